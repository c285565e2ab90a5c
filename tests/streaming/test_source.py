"""What is planned of Kafka's offsets: how much a batch reads, and who reads it."""

import itertools
import json
import math
import os
import pickle
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tidemark.streaming.ingest.ranges import EndOffsets, TopicOffsets
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.ingest.source import (
    MAX_WAIT_SECONDS,
    RECORDS_PER_TASK,
    KafkaConfig,
    Pace,
    PacketReader,
    PacketSource,
    ProcessTree,
    bounded_ends,
    fetch_groups,
    group_into_tasks,
    grown_limit,
    packets,
)
from tidemark.streaming.wire.records import Topic

CONFIG = KafkaConfig(
    client={"bootstrap.servers": "nowhere:1", "sasl.password": "well-kept"},
    facts_topic="f",
    control_topic="c",
    start_offsets={"f": {1: 7, 0: 3}, "c": {0: 0}},
    first_max_records=9,
    max_records=200,
    cpu_share=1e9,
    driver_pid=0,
    shard_keys=[0, 1, 2, 3],
    max_facts=99,
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

    def fetch(self, known: TopicOffsets) -> TopicOffsets:
        self.asked += 1
        return {topic: {number: at + 100_000 for number, at in of.items()} for topic, of in known.items()}


def test_batches_grow_again_after_one_that_had_too_many_facts() -> None:
    """Bit by bit and to the limit; the same question has the same answer, because Spark may ask twice."""
    reader = PacketReader(CONFIG)
    reader._end_offsets = _Far(CONFIG.client)
    at, sizes = reader.initialOffset(), []
    for _ in range(300):
        end = reader.latestOffset(at, ReadMaxRows(CONFIG.first_max_records))
        assert reader.latestOffset(at, ReadMaxRows(CONFIG.first_max_records)) == end
        sizes.append(sum(end["f"].values()) + end["c"]["0"] - sum(at["f"].values()) - at["c"]["0"])
        at = end
    assert sizes[0] <= CONFIG.first_max_records + 3
    assert sizes == sorted(sizes)
    assert CONFIG.max_records <= sizes[-1] <= CONFIG.max_records + 3
    assert all(after - before <= before // 64 + 4 for before, after in itertools.pairwise(sizes))


def test_batches_return_to_nearly_the_size_that_was_too_large() -> None:
    """Within twelve batches to 7/8 of it. The next 1/8 takes more than sixty batches. Beyond it they grow by 1/64."""
    limit, limits = 50_000, [50_000]
    while limit < 4_000_000:
        limit = grown_limit(limit, 4_000_000, 100_000)
        limits.append(limit)
    assert limits == sorted({*limits})
    assert sum(at < 87_500 for at in limits) <= 12
    assert sum(87_500 <= at < 100_000 for at in limits) > 60
    assert all(after - before <= before // 64 for before, after in itertools.pairwise(limits) if before >= 100_000)


def test_a_reader_grows_fast_below_the_size_that_was_too_large() -> None:
    """The second batch after a batch of 200 records with too many facts has 23 records more: 1/8 of the difference."""
    reader = PacketReader(msgspec.structs.replace(CONFIG, too_many_records=200))
    reader._end_offsets = _Far(CONFIG.client)
    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(CONFIG.first_max_records))
    reader.latestOffset(first, ReadMaxRows(CONFIG.first_max_records))
    assert reader._max_records == CONFIG.first_max_records + (200 - CONFIG.first_max_records) // 8


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_a_limit_always_grows(limit: int, highest: int, too_many: int) -> None:
    """By at least one record, and never beyond the setting."""
    assert grown_limit(limit, highest, too_many) == highest or limit < grown_limit(limit, highest, too_many) < highest


def test_a_batch_that_is_not_full_is_no_reason_to_grow() -> None:
    """Nothing is known then of how much memory a full one takes."""
    reader = PacketReader(CONFIG)
    reader._end_offsets = _Near(CONFIG.client)
    at = reader.initialOffset()
    for _ in range(9):
        at = reader.latestOffset(at, ReadMaxRows(CONFIG.first_max_records))
    assert reader._max_records == CONFIG.first_max_records


class _Near(EndOffsets):
    """Where each partition has one record more."""

    def fetch(self, known: TopicOffsets) -> TopicOffsets:
        return {topic: {number: at + 1 for number, at in of.items()} for topic, of in known.items()}


COST, SHARE = 0.06, 0.3
"""CPU seconds of a batch, and cores that batches may take."""


def paced(rate: float, seconds: float, share: float = SHARE) -> tuple[list[float], list[int]]:
    """Starts and sizes of batches while `rate` records come a second."""
    begun: list[float] = []
    sizes: list[int] = []
    pace = Pace(share, lambda: COST * len(begun))
    now, taken = 0.0, 0
    while now < seconds:
        records = int(rate * now) - taken
        if pace.try_begin(records, now):
            begun.append(now)
            sizes.append(records)
            taken += records
        now += max(0.001, pace.estimate_pause(records, now)) if records else 0.001
    return begun, sizes


@given(st.floats(10, 5000), st.floats(0.15, 2))
def test_batches_take_their_share_of_a_core(rate: float, share: float) -> None:
    """Once the cost of a batch is known, batches take no more cores than the share, and waits are bounded."""
    begun, _ = paced(rate, 8.0, share)
    known = [start for start in begun if start > 2.0]
    waits = [after - before for before, after in itertools.pairwise(known)]
    assert COST / (sum(waits) / len(waits)) <= share * 1.001
    assert max(waits) <= MAX_WAIT_SECONDS + 1 / rate + 0.03


def test_few_records_take_less_than_the_share() -> None:
    """At 20 records a second a batch begins when MAX_WAIT_SECONDS or little less has passed; at 200, when it may."""
    assert len(paced(20, 10.0)[0]) <= 20
    assert 44 <= len(paced(200, 10.0)[0]) <= 52


def test_many_records_do_not_wait() -> None:
    """More than fit into one task begin a batch at once, although the last batch has just begun."""
    pace = Pace(0.001, itertools.count().__next__)
    assert pace.try_begin(1, 6.0)
    assert pace.try_begin(1, 7.0)
    assert not pace.try_begin(RECORDS_PER_TASK - 1, 7.001)
    assert pace.try_begin(RECORDS_PER_TASK, 7.001)
    assert not pace.try_begin(0, 99.0)


def test_a_pause_without_records_does_not_count_as_cost() -> None:
    """The pipeline takes CPU time without batches too: after an hour that is more than a batch takes."""
    used = iter([0.0, 0.05, 70.0, 70.05])
    pace = Pace(SHARE, used.__next__)
    for now in (1.0, 2.0, 3600.0, 3601.0):
        assert pace.try_begin(1, now)
    assert pace.cost == pytest.approx(0.05)


@given(st.integers(1, 100), st.floats(0.01, 0.99))
def test_the_next_question_comes_when_a_batch_is_likely_to_begin(records: int, part: float) -> None:
    """If as many records come as since the last batch began, the batch begins then, and not after MAX_WAIT_SECONDS."""
    used = itertools.count(0.0, COST)
    pace = Pace(SHARE, used.__next__)
    assert pace.try_begin(1, 6.0)
    assert pace.try_begin(1, 7.0)
    passed = part * MAX_WAIT_SECONDS
    if pace.try_begin(records, 7.0 + passed):
        return
    pause = pace.estimate_pause(records, 7.0 + passed)
    assert 0.02 <= pause <= max(0.02, MAX_WAIT_SECONDS - passed) + 1e-9
    if pause > 0.02:
        assert pace.try_begin(math.ceil(records * (passed + pause) / passed), 7.0 + passed + pause + 1e-6)


_BURN = """
import sys, time
while time.process_time() < 0.3: pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_cpu_time_of_a_process_tree_includes_children() -> None:
    """While a child runs, and after it has ended and was waited for."""
    before = ProcessTree(os.getpid()).cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", _BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        assert ProcessTree(os.getpid()).cpu_seconds() - before > 0.25
    assert ProcessTree(os.getpid()).cpu_seconds() - before > 0.25


def test_without_the_process_the_clock_counts() -> None:
    """On another machine: a batch then counts as one core."""
    tree = ProcessTree(2**30)
    before = tree.cpu_seconds()
    assert tree.cpu_seconds() >= before > 0


class _Coming(EndOffsets):
    """Where each partition has a record more with every question."""

    asked = 0

    def fetch(self, known: TopicOffsets) -> TopicOffsets:
        self.asked += 1
        return {topic: {number: at + self.asked for number, at in of.items()} for topic, of in known.items()}


def test_a_question_waits_for_the_start_of_the_batch() -> None:
    """While records wait, Spark's question is answered when the batch begins; without records, at once."""
    reader = PacketReader(msgspec.structs.replace(CONFIG, cpu_share=0.001))
    reader._end_offsets = _Coming(CONFIG.client)
    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(99))
    reader._pace._costs.append(1.0)
    ends = reader._end_offsets = _Coming(CONFIG.client)
    second = reader.latestOffset(first, ReadMaxRows(99))
    assert second["f"]["0"] - first["f"]["0"] == ends.asked > 1
    reader._end_offsets = _Nothing(CONFIG.client)
    assert reader.latestOffset(second, ReadMaxRows(99)) == second


class _Nothing(EndOffsets):
    """Without new records."""

    def fetch(self, known: TopicOffsets) -> TopicOffsets:
        return known


def test_a_source_that_is_read_to_its_end_waits_for_nothing() -> None:
    """Spark asks so for a query that ends with the records that are there."""
    reader = PacketReader(msgspec.structs.replace(CONFIG, cpu_share=0.001))
    reader._end_offsets = _Near(CONFIG.client)
    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(99))
    assert reader.latestOffset(first, ReadAllAvailable()) != first


def test_one_task_reads_all_ranges_of_light_traffic() -> None:
    """However many records there are: the query has one task, and a second Python worker after the first is no gain."""
    many = {"f": {"0": 3 * RECORDS_PER_TASK, "1": 3 * RECORDS_PER_TASK}, "c": {"0": 0}}
    for one_task, tasks in ((True, 1), (False, 2)):
        reader = PacketReader(msgspec.structs.replace(CONFIG, one_task=one_task))
        assert len(reader.partitions(reader.initialOffset(), many)) == tasks


@given(sizes)
def test_every_range_has_one_task(behind: dict[int, int]) -> None:
    """And no task is without one."""
    ranges = [PlannedRange(Topic.FACTS, number, 0, 100 * size) for number, size in behind.items() if size]
    found = group_into_tasks(ranges)
    assert sorted((it for task in found for it in task), key=lambda it: it.partition) == sorted(
        ranges, key=lambda it: it.partition
    )
    assert all(found)
    lengths = [sum(it.end - it.start for it in task) for task in found]
    assert lengths == sorted(lengths, reverse=True)


def test_few_records_are_one_task_and_many_are_spread() -> None:
    """A task costs Spark milliseconds: sixteen partitions with a record each are not worth sixteen."""
    few = [PlannedRange(Topic.FACTS, number, 0, 5) for number in range(16)]
    assert [len(task) for task in group_into_tasks(few)] == [16]
    many = [PlannedRange(Topic.FACTS, number, 0, RECORDS_PER_TASK) for number in range(16)]
    assert [len(task) for task in group_into_tasks(many)] == [1] * 16


def test_few_records_are_fetched_together_and_many_range_by_range() -> None:
    """Each range is a question to the brokers; and where there is more, what lies behind a range comes in vain."""
    few = [PlannedRange(Topic.FACTS, number, 0, 5) for number in range(16)]
    assert fetch_groups(few) == [few]
    many = [PlannedRange(Topic.FACTS, number, 0, RECORDS_PER_TASK) for number in range(3)]
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
