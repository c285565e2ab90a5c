"""BatchHandler in the driver, with a publisher that has no sinks and results of Spark that are there already."""

import threading
import weakref
from contextlib import nullcontext
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame

from tidemark.app.pipeline.batches import BATCHES_PER_COLLECTION, BatchHandler, no_trace
from tidemark.app.pipeline.engine import SLOW_PYTHON_START
from tidemark.app.pipeline.preflight import Seed
from tidemark.app.pipeline.stream_metrics import StreamCollector
from tidemark.app.pipeline.supervisor import LIGHT_STREAMS, counts_as_failure, is_light
from tidemark.common.errors import (
    BatchTooLarge,
    ChainBroken,
    ConfigurationChanged,
    LeaseLost,
    QueryFailed,
    Retry,
    Stopping,
    TidemarkError,
    Unavailable,
)
from tidemark.common.gc_tuning import gc_disabled
from tidemark.sinks.dead_letters import DeadLetterResult
from tidemark.sinks.publisher import Publisher, PublishResult
from tidemark.sources.topics import TopicIdentity
from tidemark.streaming.core import effects
from tidemark.streaming.core.effects import NextOffset, ShardEffects
from tidemark.streaming.ingest.source import LIGHT_RECORDS, RECORDS_PER_TASK


class _Empty:
    def collect(self) -> list[Any]:
        return []


class _Quick:
    def publish(self, _: str, number: int, *__: object) -> PublishResult:
        return PublishResult(
            number, is_repeat=False, stream_count=0, dead_lettered=DeadLetterResult(), published_at=0.0, seconds={}
        )


class _Held(_Quick):
    """Publishes once it is `let`, and only one batch at a time."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.let = threading.Event()
        self.begun: list[int] = []
        self.published: list[tuple[object, ...]] = []
        self._problem = problem
        self._one = threading.Lock()

    def publish(self, line: str, number: int, *rest: object) -> PublishResult:
        assert self._one.acquire(blocking=False), "two at a time"
        self.begun.append(number)
        assert self.let.wait(60)
        self._one.release()
        if self._problem is not None:
            raise self._problem
        _, after = rest
        self.published.append((line, number, after))
        return super().publish(line, number)


EMPTY = cast("DataFrame", _Empty())
BEFORE = ("earlier", 41)
TOPICS = {"facts": TopicIdentity("id", 1)}


def batches(publisher: _Quick | None = None, *, one_task: bool = False) -> BatchHandler:
    publisher = publisher or _Quick()
    seed = Seed("first", BEFORE, {})
    board = StreamCollector(max_streams=1, max_writers=1)
    board.read_offsets["facts", 0] = 0
    return BatchHandler(cast("Publisher", publisher), board, seed, TOPICS, no_trace, one_task=one_task)


def test_who_ends_lets_no_batch_begin() -> None:
    """What was handed over is published; the next one is Spark's to give again."""
    ending = batches()
    ending(EMPTY, 0)
    assert ending.finish(60)
    with pytest.raises(Stopping):
        ending(EMPTY, 1)
    assert ending.published_count == 1


class _Cycle(_Empty):
    """As pyspark makes them: its objects know each other."""

    def __init__(self) -> None:
        self.itself = self


def test_what_spark_made_of_a_batch_is_let_go() -> None:
    """However seldom Python looks for cycles: each of them keeps a plan in the JVM, which would fill up."""
    with gc_disabled():
        quick = batches()
        made = []
        for number in range(3 * BATCHES_PER_COLLECTION):
            batch = _Cycle()
            made.append(weakref.ref(batch))
            quick(cast("DataFrame", batch), number)
        assert quick.finish(60)
        assert sum(batch() is not None for batch in made) <= BATCHES_PER_COLLECTION


class _Watched(_Empty):
    """Says when Spark is asked for its results."""

    def __init__(self) -> None:
        self.computed = threading.Event()

    def collect(self) -> list[Any]:
        self.computed.set()
        return super().collect()


def one_ahead(going: BatchHandler) -> threading.Thread:
    """Batch 0 is handed over, and batch 1 computed by the thread."""
    second = _Watched()
    going(EMPTY, 0)
    beside = threading.Thread(target=going, args=(second, 1))
    beside.start()
    assert second.computed.wait(60)
    return beside


def test_a_batch_is_computed_while_the_one_before_is_published() -> None:
    """But they are published in their order and one at a time, and each names the one that Postgres must have applied
    before. Who ends waits for both."""
    publisher = _Held()
    going = batches(publisher)
    beside = one_ahead(going)
    assert (publisher.begun, publisher.published) == ([0], [])
    assert not going.finish(0.2)
    publisher.let.set()
    assert going.finish(60)
    beside.join()
    assert publisher.published == [("first", 0, BEFORE), ("first", 1, ("first", 0))]
    assert going.published_count == 2


def test_the_end_does_not_wait_for_ever() -> None:
    """A server may hang: whoever ends is told in time that the batch in hand is not through."""
    publisher = _Held()
    going = batches(publisher)
    going(EMPTY, 0)
    assert not going.finish(0.2)
    publisher.let.set()
    assert going.finish(60)


class _HeldTwice(_Held):
    """The second batch once more."""

    def __init__(self) -> None:
        super().__init__()
        self.let_second = threading.Event()

    def publish(self, line: str, number: int, *rest: object) -> PublishResult:
        if number == 1:
            assert self.let_second.wait(60)
        return super().publish(line, number, *rest)


def test_no_batch_outlives_its_query() -> None:
    """One that waited for the batch before is handed over after the end was given up; it is waited for, too."""
    publisher = _HeldTwice()
    going = batches(publisher)
    beside = one_ahead(going)
    assert not going.finish(0.2)
    ending = threading.Thread(target=going.finish)
    ending.start()
    publisher.let.set()
    beside.join(60)
    ending.join(0.2)
    assert ending.is_alive()
    publisher.let_second.set()
    ending.join(60)
    assert going.published_count == 2


@pytest.mark.parametrize(
    ("problem", "raised"),
    [(LeaseLost(1, 2), "the lease was taken over"), (ValueError("odd"), "the query failed: ValueError: odd")],
)
def test_what_could_not_be_published_fails_the_next_batch(problem: Exception, raised: str) -> None:
    """Whoever supervises finds it too. Nothing is published after it."""
    publisher = _Held(problem)
    publisher.let.set()
    going = batches(publisher)
    going(EMPTY, 0)
    for number in (1, 2):
        with pytest.raises(TidemarkError, match=raised) as caught:
            going(EMPTY, number)
        assert going.failure is caught.value
    assert isinstance(going.failure, LeaseLost if isinstance(problem, LeaseLost) else QueryFailed)
    assert publisher.begun == [0]


class _Cut(_Empty):
    """As of a shard whose facts were too many: Spark has planned more than the eight records that it read."""

    def collect(self) -> list[Any]:
        cut = ShardEffects(0, 0, [], [], [NextOffset("facts", 0, 8)], is_cut_short=True)
        return [{"effects": effects.encode(cut)}]


def test_a_batch_that_was_cut_is_published_before_it_ends_the_query() -> None:
    """Behind the one before, and as one of the same line of batches."""
    publisher = _Held()
    going = batches(publisher)
    going(EMPTY, 0)
    publisher.let.set()
    with pytest.raises(BatchTooLarge) as caught:
        going(cast("DataFrame", _Cut()), 1)
    assert publisher.published == [("first", 0, BEFORE), ("first", 1, ("first", 0))]
    assert going.failure is caught.value


class _Read:
    """A batch that reads this many records of partition 0."""

    def __init__(self, records: int) -> None:
        self._records = records

    def collect(self) -> list[Any]:
        done = ShardEffects(0, 1000, [], [], [NextOffset("facts", 0, self._records)])
        return [{"effects": effects.encode(done)}]


@pytest.mark.parametrize(("one_task", "records", "ends"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_full_batch_ends_a_query_for_light_traffic(one_task: bool, records: int, ends: bool) -> None:
    """The batch is published, and the next query uses all cores if enough records wait."""
    going = batches(one_task=one_task)
    batch = cast("DataFrame", _Read(LIGHT_RECORDS - records))
    with pytest.raises(ConfigurationChanged) if ends else nullcontext():
        going(batch, 0)
    assert going.finish(60)
    assert going.published_count == 1


def test_a_query_for_heavy_traffic_counts_the_time_without_a_large_batch() -> None:
    """BatchHandler that one task reads are not large."""
    going = batches()
    for number, (records, is_large) in enumerate([(RECORDS_PER_TASK, False), (2 * RECORDS_PER_TASK + 1, True)]):
        going._last_large_batch_at -= 100
        going(cast("DataFrame", _Read(records)), number)
        assert going.finish(60)
        going._finish_requested.clear()
        assert (going.seconds_without_large_batch() < 100) == is_large


def test_few_streams_and_few_waiting_records_are_light_traffic() -> None:
    """A query with many streams is never restarted for lighter traffic: it takes long to load them."""
    assert is_light(LIGHT_STREAMS, LIGHT_RECORDS - 1)
    assert not is_light(LIGHT_STREAMS + 1, 0)
    assert not is_light(0, LIGHT_RECORDS)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (QueryFailed("Job aborted"), True),
        (ChainBroken("batch 4", "batch 6"), True),
        (QueryFailed(SLOW_PYTHON_START), False),
        (Unavailable("Postgres", "localhost:5432", "does not answer"), False),
        (LeaseLost(1, 2), False),
        (BatchTooLarge(4000, 1000), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_outage_is_no_failure_of_the_query(error: Retry, counts: bool) -> None:
    """Otherwise the first query that fails after a long outage would end the process."""
    assert counts_as_failure(error) is counts
