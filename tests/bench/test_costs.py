"""Latencies of contestants that say only how many records they have processed, and the rendering of costs."""

from typing import Any, cast

import pytest

from tests.bench.contestants import NAMES
from tests.bench.costs import RATES, CostsPlan, Feed, Span, by_count, readme_row, render
from tests.bench.latency import MoveTimes
from tests.bench.rate import RateMark
from tests.bench.topic import Sender
from tests.bench.workload import Shape, WritersAtWork

COSTS = {
    name: {str(rate): {"cores": 0.25, "rate": float(rate), "p50": 140.0, "p99": 1390.4} for rate in RATES}
    for name in NAMES
}
FIGURES: dict[str, Any] = {
    "costs": COSTS,
    "streams": 4,
    "writers": 8,
    "seconds": 8.0,
    "settle_seconds": 2.0,
    "warm_seconds": 10.0,
    "jvm": "kafka-streams 4.1.1",
    "skipped": "",
}


def test_a_record_is_processed_when_as_many_records_are_as_were_sent_up_to_it() -> None:
    """Three records come after two that were in the topic before; marks are of all records."""
    shape = Shape()
    sender = cast("Sender", None)
    feed = Feed(sender, WritersAtWork(shape).step(3), CostsPlan(), MoveTimes(shape), sent=[10.0, 10.5, 11.0])
    marks = [RateMark(2, 9.0), RateMark(3, 10.1), RateMark(5, 11.2)]
    assert by_count(feed, marks, 2)(Span(10.0, 12.0, 0, 3)) == pytest.approx([100.0, 700.0, 200.0])
    assert by_count(feed, marks, 2)(Span(10.4, 12.0, 1, 2)) == pytest.approx([700.0])


def test_each_contestant_has_a_row_with_each_rate() -> None:
    """Cores, and both latencies in one cell."""
    rows = [line for line in render(FIGURES) if line.startswith("| ")]
    assert len(rows) == 2 + len(NAMES)
    assert rows[-1].count("| 0.25 | 140, 1,390 ms ") == len(RATES)
    assert not any("did not reach" in line for line in render(FIGURES))
    assert "Kafka Streams: 0.25, 0.25, 0.25, 0.25) | 0.25, 0.25, 0.25, 0.25 |" in readme_row(FIGURES)
