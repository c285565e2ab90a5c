"""Traces of batches as a collector receives them. What Spark adds is looked at with the pipeline that runs."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import Mock

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from structlog.testing import capture_logs

from tests.app.collector import Collector, attributes, collecting
from tidemark.app.pipeline.batches import Trace, open_tracing
from tidemark.app.pipeline.tracing import trace_id
from tidemark.common.errors import QueryFailed
from tidemark.sinks.dead_letters import DeadLetterResult
from tidemark.sinks.publisher import PublishResult
from tidemark.streaming.core.effects import ShardEffects

SECONDS = {"postgres": 0.25, "redis": 0.5, "dead_letters": 0.0}
DONE = PublishResult(
    7, is_repeat=False, stream_count=1, dead_lettered=DeadLetterResult(), published_at=0.0, seconds=SECONDS
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def publish(trace: Trace, number: int = 7) -> None:
    with trace("first", number) as told:
        told.record_publish(DONE)


def test_a_batch_is_a_trace_of_its_own(collector: Collector) -> None:
    """Each step of the publisher within it, one behind the other. Its ID follows from the batch, which the attributes
    name with the fencing token; who sends it, the resource does."""
    with open_tracing(collector.address + "/", "me", 41) as trace:
        publish(trace)
        publish(trace, 8)
    first, second = collector.traces()
    assert {*first} == {"batch", *SECONDS}
    root = first["batch"]
    assert {int.from_bytes(span.trace_id) for span in first.values()} == {trace_id("first", 7)}
    assert int.from_bytes(second["batch"].trace_id) == trace_id("first", 8)
    assert {first[name].parent_span_id for name in SECONDS} == {root.span_id}
    for before, after in pairwise(SECONDS):
        assert first[before].end_time_unix_nano == first[after].start_time_unix_nano
    took = {name: first[name].end_time_unix_nano - first[name].start_time_unix_nano for name in SECONDS}
    assert took == {name: seconds * 1e9 for name, seconds in SECONDS.items()}
    told = {"tidemark.query": "first", "tidemark.batch": 7, "tidemark.lease_token": 41, "tidemark.repeated": False}
    assert attributes(root) == told
    (sent,) = collector.taken[0].resource_spans
    resource = {it.key: it.value.string_value for it in sent.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("tidemark-pipeline", "me")


@pytest.mark.parametrize(
    ("stages", "computed_from", "read", "state"),
    [
        ([(1000, 1500)], 1400, (1000, 1400), (1400, 1500)),
        ([(1000, 1500)], 999, (1000, 1000), (1000, 1500)),
        ([(1000, 1500)], 1501, (1000, 1500), (1500, 1500)),
        ([(1000, 1200), (1300, 1500)], 1400, (1000, 1200), (1300, 1500)),
    ],
)
def test_one_stage_has_a_span_for_reading_and_one_for_the_state_machine(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    stages: list[tuple[int, int]],
    computed_from: int,
    read: tuple[int, int],
    state: tuple[int, int],
) -> None:
    """A query for light traffic has one stage. All records were read when its first shard was computed."""
    monkeypatch.setattr("tidemark.app.pipeline.tracing._read_stages", lambda _: iter(stages))
    shards = [ShardEffects(number, 0, [], [], [], computation_start=computed_from + number) for number in (0, 9)]
    with open_tracing(collector.address, "me", 41) as trace, trace("first", 7) as spans:
        spans.record_compute(Mock(), shards)
    (found,) = collector.traces()
    for name, times in (("read", read), ("state", state)):
        assert (found[name].start_time_unix_nano // 1_000_000, found[name].end_time_unix_nano // 1_000_000) == times


def test_a_batch_that_fails_says_why(collector: Collector) -> None:
    """What was raised goes on; the next attempt at the batch stands in the same trace."""
    with open_tracing(collector.address, "me", 41) as trace:
        with pytest.raises(QueryFailed), trace("first", 7):
            raise QueryFailed("no room")
        publish(trace)
    spans = [it for of in collector.taken[0].resource_spans for scope in of.scope_spans for it in scope.spans]
    failed, done = (span for span in spans if span.name == "batch")
    assert (failed.status.code, failed.status.message) == (
        Status.STATUS_CODE_ERROR,
        "QueryFailed: the query failed: no room",
    )
    assert done.status.code == Status.STATUS_CODE_UNSET
    assert failed.trace_id == done.trace_id


def test_a_collector_that_takes_nothing_is_told_once_and_holds_nobody_up(collector: Collector) -> None:
    """One that refuses, or is not there. Its password is not told."""
    collector.answer = 403
    address = collector.address.replace("//", "//me:hunter2@")
    with capture_logs() as told:
        for _ in range(2):
            with open_tracing(address, "me", 41) as trace:
                publish(trace)
    assert [(it["log_level"], it["endpoint"]) for it in told] == [("warning", collector.address)] * 2
    with capture_logs() as told, open_tracing("http://127.0.0.1:9", "me", 41) as trace:
        publish(trace)
    assert [it["event"] for it in told] == ["The collector does not accept traces; dropping them"]


def test_nothing_of_it_is_imported_without_a_collector() -> None:
    """By us: redis-py looks for the SDK by itself."""
    program = (
        "import sys, tidemark.app.pipeline.supervisor\n"
        "from tidemark.app.pipeline.batches import open_tracing\n"
        "with open_tracing(None, 'me', 1) as trace, trace('first', 7) as told: told.record_publish(None)\n"
        "sys.exit(any(it.startswith('opentelemetry.exporter') for it in sys.modules))"
    )
    assert subprocess.call([sys.executable, "-c", program]) == 0
