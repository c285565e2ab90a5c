"""What is planned of Kafka's offsets: how much a batch reads, and who reads it."""

import itertools
import json
import math
import pickle

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tidemark.streaming.ingest.ranges import EndOffsets, TopicOffsets
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.ingest.source import (
    ONE_TASK,
    KafkaConfig,
    Pace,
    PacketReader,
    PacketSource,
    bounded_ends,
    fetch_groups,
    packets,
    split_ranges,
)
from tidemark.streaming.wire.records import Topic

CONFIG = KafkaConfig(
    client={"bootstrap.servers": "nowhere:1", "sasl.password": "well-kept"},
    facts="f",
    control="c",
    start={"f": {1: 7, 0: 3}, "c": {0: 0}},
    records=9,
    limit=200,
    few=1,
    interval=0.0,
    keys=[0, 1, 2, 3],
    most=99,
)
sizes = st.dictionaries(st.integers(0, 20), st.integers(0, 1000), min_size=1)


@given(sizes, st.integers(1, 3000))
def test_a_batch_is_bounded_and_no_partition_starves(behind: dict[int, int], most: int) -> None:
    """Together at most as many offsets as allowed, but for one a partition, and of each that has any at least one."""
    ends = bounded_ends(
        {"f": dict.fromkeys(behind, 5)}, {"f": {number: 5 + size for number, size in behind.items()}}, most
    )
    read = {number: end - 5 for number, end in ends["f"].items()}
    assert sum(read.values()) <= most + len(behind)
    assert all(min(1, size) <= read[number] <= size for number, size in behind.items())
    assert sum(behind.values()) > most or read == behind


class _Far(EndOffsets):
    """Where every partition ends far away."""

    asked = 0

    def beyond(self, known: TopicOffsets) -> TopicOffsets:
        self.asked += 1
        return {topic: {number: at + 100_000 for number, at in of.items()} for topic, of in known.items()}


def test_batches_grow_again_after_one_that_had_too_many_facts() -> None:
    """Bit by bit and to the limit; the same question has the same answer, because Spark may ask twice."""
    reader = PacketReader(CONFIG)
    reader._ends = _Far(CONFIG.client)
    at, sizes = reader.initialOffset(), []
    for _ in range(300):
        end = reader.latestOffset(at, ReadMaxRows(CONFIG.records))
        assert reader.latestOffset(at, ReadMaxRows(CONFIG.records)) == end
        sizes.append(sum(end["f"].values()) + end["c"]["0"] - sum(at["f"].values()) - at["c"]["0"])
        at = end
    assert sizes[0] <= CONFIG.records + 3
    assert sizes == sorted(sizes)
    assert CONFIG.limit <= sizes[-1] <= CONFIG.limit + 3
    assert all(after - before <= before // 64 + 4 for before, after in itertools.pairwise(sizes))


def test_a_batch_that_is_not_full_is_no_reason_to_grow() -> None:
    """Nothing is known then of how much memory a full one takes."""
    reader = PacketReader(CONFIG)
    reader._ends = _Near(CONFIG.client)
    at = reader.initialOffset()
    for _ in range(9):
        at = reader.latestOffset(at, ReadMaxRows(CONFIG.records))
    assert reader._records == CONFIG.records


class _Near(EndOffsets):
    """Where each partition has one record more."""

    def beyond(self, known: TopicOffsets) -> TopicOffsets:
        return {topic: {number: at + 1 for number, at in of.items()} for topic, of in known.items()}


FEW, INTERVAL = 12, 0.5
comes = st.lists(st.tuples(st.integers(0, 6), st.floats(0, 2)), max_size=60)


@given(comes)
def test_few_records_wait_and_no_longer_than_the_interval(comes: list[tuple[int, float]]) -> None:
    """Nobody waits where enough records wait or no batch began lately, and few share a batch at most each interval."""
    pace, now, waiting, last = Pace(FEW, INTERVAL), 0.0, 0, -math.inf
    for records, later in comes:
        waiting, now = waiting + records, now + later
        begins = pace.begins(waiting, now)
        assert begins == (waiting >= FEW or (waiting > 0 and now >= last + INTERVAL))
        if begins:
            waiting, last = 0, now


@given(st.integers(1, FEW - 1), st.floats(0, 0.99))
def test_the_next_question_comes_when_enough_are_likely_to_wait(records: int, part: float) -> None:
    """As many more as came since the last batch began, and no later than the interval ends."""
    pace = Pace(FEW, INTERVAL)
    assert pace.begins(1, 7.0)
    now = 7.0 + part * INTERVAL
    assert not pace.begins(records, now)
    pause = pace.pause(records, now)
    assert pause >= 0.02
    if pause > 0.02:
        at = min(now + pause, 7.0 + INTERVAL)
        assert now + pause <= 7.0 + INTERVAL + 1e-9
        assert pace.begins(round(records / (now - 7.0) * (at - 7.0)) if at > now else records, now + pause + 1e-9)


def test_where_none_wait_nothing_is_likely() -> None:
    """Spark asks again by itself."""
    assert Pace(FEW, INTERVAL).pause(0, 7.0) == math.inf


class _Coming(EndOffsets):
    """Where each partition has a record more with every question."""

    asked = 0

    def beyond(self, known: TopicOffsets) -> TopicOffsets:
        self.asked += 1
        return {topic: {number: at + self.asked for number, at in of.items()} for topic, of in known.items()}


def test_who_asks_waits_for_what_is_about_to_come() -> None:
    """Spark would ask a fifth of a second later."""
    reader = PacketReader(msgspec.structs.replace(CONFIG, records=99, few=FEW, interval=3600.0))
    reader._ends = _Coming(CONFIG.client)
    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(99))
    reader._ends = _Coming(CONFIG.client)
    second = reader.latestOffset(first, ReadMaxRows(99))
    assert second["f"]["0"] - first["f"]["0"] == FEW // 3
    assert reader._ends.asked == FEW // 3


def test_nobody_waits_in_a_question_for_what_is_about_to_come_for_ever() -> None:
    """A few of so many are missing for ever; Spark asks again after no longer."""
    reader = PacketReader(msgspec.structs.replace(CONFIG, few=310_000, interval=3600.0))
    ends = reader._ends = _Far(CONFIG.client)
    at = reader.initialOffset()
    assert reader.latestOffset(at, ReadMaxRows(99)) != at
    reader._pace._began -= 2
    assert reader.latestOffset(at, ReadMaxRows(99)) == at
    assert 2 < ends.asked < 20


def test_few_records_are_left_to_the_next_question() -> None:
    """Spark is told that nothing is new, and asks again; a source that is read to its end now waits for nothing."""
    reader = PacketReader(msgspec.structs.replace(CONFIG, few=FEW, interval=3600.0))
    reader._ends = _Near(CONFIG.client)
    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(99))
    assert first != reader.initialOffset()
    assert reader.latestOffset(first, ReadMaxRows(99)) == first
    assert reader.latestOffset(first, ReadAllAvailable()) != first
    reader._ends = _Far(CONFIG.client)
    assert reader.latestOffset(first, ReadMaxRows(99)) != first


@given(sizes)
def test_every_range_has_one_task(behind: dict[int, int]) -> None:
    """And no task is without one."""
    ranges = [PlannedRange(Topic.FACTS, number, 0, 100 * size) for number, size in behind.items() if size]
    found = split_ranges(ranges)
    assert sorted((it for task in found for it in task), key=lambda it: it.partition) == sorted(
        ranges, key=lambda it: it.partition
    )
    assert all(found)


def test_few_records_are_one_task_and_many_are_spread() -> None:
    """A task costs Spark milliseconds: sixteen partitions with a record each are not worth sixteen."""
    few = [PlannedRange(Topic.FACTS, number, 0, 5) for number in range(16)]
    assert [len(task) for task in split_ranges(few)] == [16]
    many = [PlannedRange(Topic.FACTS, number, 0, ONE_TASK) for number in range(16)]
    assert [len(task) for task in split_ranges(many)] == [1] * 16


def test_few_records_are_fetched_together_and_many_range_by_range() -> None:
    """Each range is a question to the brokers; and where there is more, what lies behind a range comes in vain."""
    few = [PlannedRange(Topic.FACTS, number, 0, 5) for number in range(16)]
    assert fetch_groups(few) == [few]
    many = [PlannedRange(Topic.FACTS, number, 0, ONE_TASK) for number in range(3)]
    assert fetch_groups(many) == [[it] for it in many]
    assert fetch_groups([]) == [[]]


def test_what_spark_keeps_of_offsets_is_the_same_text_every_time() -> None:
    """It compares texts to see whether anything is new."""
    reader = PacketReader(CONFIG)
    assert json.dumps(reader.initialOffset()) == '{"c": {"0": 0}, "f": {"0": 3, "1": 7}}'


def test_only_what_is_new_is_planned() -> None:
    """A partition without anything new is in no task; tasks travel to executors."""
    reader = PacketReader(CONFIG)
    (task,) = reader.partitions(reader.initialOffset(), {"c": {"0": 2}, "f": {"0": 3, "1": 9}})
    assert pickle.loads(pickle.dumps(task)).ranges == [
        PlannedRange(Topic.CONTROL, 0, 0, 2),
        PlannedRange(Topic.FACTS, 1, 7, 9),
    ]


def test_spark_shows_no_password(spark: SparkSession) -> None:
    """The settings of the connection are in an option, and options in plans, which Spark writes into its log."""
    stream = packets(spark, CONFIG)
    plan = stream._jdf.queryExecution().toString()
    assert PacketSource.name() in plan
    assert "well-kept" not in plan
