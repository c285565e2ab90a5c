from collections.abc import Iterator
from itertools import pairwise
from statistics import mean
from typing import Any

import msgspec
import pytest

from tests.bench.competitors.gaps import GapBuffer
from tests.bench.pace import RATE, explained, stretches
from tests.bench.workload import Rendering, Shape, WritersAtWork, moments

SHAPES = [Shape(), Shape(streams=50, writers=2, in_flight=0.1)]


def test_moments_are_even_over_the_time_and_in_order() -> None:
    """As many as asked for, the same for a seed, about half of them in the first half."""
    found = moments(1000, 10.0, seed=1)
    assert found == sorted(moments(1000, 10.0, seed=1))
    assert len(found) == 1000
    assert 0 <= found[0] < found[-1] <= 10
    assert 400 < sum(moment < 5 for moment in found) < 600


@pytest.mark.parametrize("shape", SHAPES)
def test_what_counts_comes_at_the_pace(shape: Shape) -> None:
    """A warm-up of more records, then so many a second, then some that keep the contestant busy until it is over."""
    warm, counting, after = stretches(WritersAtWork(shape), 2.0, 10.0, together=[1])
    assert warm.seconds == 2.0
    assert len(warm.records) > 10 * RATE
    assert len(counting.records) == RATE * counting.seconds
    assert [it.counted for it in (warm, counting, after)] == [0, 10.0, 0]
    assert after.records


def edges(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a record of one fact, or of many."""
    ids = record.get("ids", [record["id"]] if "id" in record else [])
    for prev, id_ in pairwise([record.get("prev", 0), *ids]):
        yield record | {"kind": "JOIN" if record["kind"] == "JOIN" else "RDATA", "prev": prev, "id": id_}


@pytest.mark.parametrize("shape", SHAPES)
def test_all_that_is_sent_leads_to_where_the_writers_end(shape: Shape) -> None:
    """Also where records of another size follow: nothing is left out, and nothing comes twice."""
    play, rendering, gaps, facts = WritersAtWork(shape), Rendering(shape), GapBuffer(), 0
    for _, value in rendering.joins():
        gaps.add(msgspec.json.decode(value))
    for stretch in stretches(play, 0.5, 1.0, together=[1, 5]):
        for stream, value in stretch.records:
            record = msgspec.json.decode(value)
            assert record["stream"] == shape.stream(stream)
            for edge in edges(record):
                gaps.add(edge)
                facts += 1
    assert facts == sum(play.linear(stream) for stream in range(shape.streams))
    for stream in range(shape.streams):
        for writer, position in play.positions(stream).items():
            assert gaps.positions[shape.stream(stream), writer] == position


@pytest.mark.parametrize("most", [20, 100])
def test_records_of_many_facts_are_full_while_they_count(most: int) -> None:
    """So that they come as seldom as the facts of a row's records say."""
    _, counting, _ = stretches(WritersAtWork(Shape(slow_every=5000)), 2.0, 10.0, together=[1, most])[3:]
    sizes = [len(msgspec.json.decode(value)["ids"]) for _, value in counting.records]
    assert mean(sizes) == pytest.approx(most, rel=0.05)
    assert sum(sizes) == pytest.approx(RATE * counting.seconds, rel=0.05)


def test_results_of_before_say_nothing_of_it() -> None:
    """A file that was written without the measure, or where it was not wanted, has no word on it."""
    assert explained({}) == []
    assert explained({"paced": {}}) == []
    assert "come for 16 s" in explained({"paced": {"warm_seconds": 16.0, "seconds": 10.0}})[0]
