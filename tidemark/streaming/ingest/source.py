"""The data source of packets for Spark. One Python process plans offset ranges; workers read and compact the records.

The JVM gets offsets and packets, but no records (docs/decisions/0021-kafka-in-python.md). A worker keeps its consumer
between batches.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import psutil
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from tidemark.common.gc_tuning import freeze, gc_disabled
from tidemark.streaming.ingest.compact import compact
from tidemark.streaming.ingest.ranges import EndOffsets, RangeReader, TopicOffsets
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.wire.records import Topic

RECORDS_PER_TASK = 20_000
"""The intended number of records of a task. A smaller task is not worth its cost, a few milliseconds of Spark."""
LIGHT_RECORDS = 200_000
"""The largest number of records of a batch that one task computes (`KafkaConfig.one_task`). Such a batch takes 0.2 to
0.3 s of CPU.
"""

WORTHWHILE_RECORDS = 32
"""The number of records from which a batch is worth its cost (`Pace`). At 200 records/s, they arrive in 0.16 s."""
MAX_WAIT_SECONDS = 0.6  # from the start of one batch to the start of the next one that has records
_IDLE_SECONDS = 2.0  # after a longer interval between two batches, `Pace` ignores the CPU time of the interval
_LIST_SECONDS = 10.0  # between two listings of processes; a listing takes a few milliseconds
_MIN_PAUSE_SECONDS = 0.02  # between queries of end offsets; a query takes 1 ms in this process and 1 ms in the broker

_OPTION = "secret"  # Spark redacts an option with this name


class KafkaConfig(msgspec.Struct, frozen=True):
    """The configuration of the data source.

    Attributes:
        client: librdkafka's settings of the connection. They must be valid on all hosts with workers.
        facts_topic, control_topic: the names of the topics.
        start_offsets: for each partition, the offset at which the query begins.
        first_max_records: the largest number of records of the first batch.
        max_records: the largest number of records of any batch.
        too_many_records: the number of records of an earlier batch that had too many facts; 0 if there was none.
        cpu_share: the share of a core that batches may use at a low rate of records (`Pace`).
        driver_pid: the process whose CPU time is measured, together with its descendants.
        shard_keys: Spark's group-by key of each shard (`engine.query.shard_keys`).
        max_facts: a task stops reading when it has this many facts beyond one for each record.
        not_storable: topic -> partition -> offsets of records to reject with the reason `not_storable`.
        one_task: whether one task reads all records of a batch.
    """

    client: dict[str, str]
    facts_topic: str
    control_topic: str
    start_offsets: TopicOffsets
    first_max_records: int
    max_records: int
    cpu_share: float
    driver_pid: int
    shard_keys: list[int]
    max_facts: int
    too_many_records: int = 0
    not_storable: dict[str, dict[int, list[int]]] = {}
    one_task: bool = False

    @property
    def names(self) -> dict[Topic, str]:
        return {Topic.FACTS: self.facts_topic, Topic.CONTROL: self.control_topic}


def packets(spark: SparkSession, config: KafkaConfig) -> DataFrame:
    """Register the data source, and return a streaming data frame with the packets of both topics."""
    spark.dataSource.register(PacketSource)
    option = msgspec.json.encode(config).decode()
    return spark.readStream.format(PacketSource.name()).option(_OPTION, option).load()


class PacketSource(DataSource):
    """The data source, which Spark's processes import by name. Its only option is the encoded `KafkaConfig`."""

    @classmethod
    def name(cls) -> str:
        return "tidemark"

    def schema(self) -> str:
        return "key int, packet binary"  # the same as `streaming.ingest.compact.PACKETS_SCHEMA`

    def streamReader(self, schema: StructType) -> "PacketReader":
        return PacketReader(msgspec.json.decode(self.options[_OPTION], type=KafkaConfig))


@dataclass
class _Task(InputPartition):
    ranges: list[PlannedRange]


_Offsets = dict[str, dict[str, int]]
"""Topic -> partition, as text -> next offset, as Spark stores offsets in JSON."""


class PacketReader(DataSourceStreamReader):
    """Plans batches and reads their records, with the methods that Spark calls.

    Spark's planner calls `latestOffset` and `partitions`, always in the same process. A worker calls `read` for a task.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._end_offsets: EndOffsets | None = None
        self._max_records = config.first_max_records
        self._full_start: _Offsets | None = None
        """The start offsets of the newest batch that was limited to `_max_records`; None after the limit has grown."""
        self._pace = Pace(config.cpu_share, ProcessTree(config.driver_pid).cpu_seconds)

    def initialOffset(self) -> _Offsets:
        return _to_json(self._config.start_offsets)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._config.first_max_records)

    def latestOffset(self, start: _Offsets, limit: ReadLimit) -> _Offsets:
        """Wait until the next batch is worth its cost (`Pace`), and return the batch's end offsets.

        Waits up to about `MAX_WAIT_SECONDS`. Returns `start` at once if there are no records. If `limit` is no
        `ReadMaxRows`, returns the end offsets of the partitions at once.

        Raises:
            Unavailable, Refused: see `EndOffsets.fetch`, which may block for up to `PATIENCE_SECONDS`.
        """
        if self._end_offsets is None:
            self._end_offsets = EndOffsets(self._config.client)
        if self._full_start not in (None, start):
            config = self._config
            self._max_records = grown_limit(self._max_records, config.max_records, config.too_many_records)
            self._full_start = None
        known = _from_json(start)
        ends = self._end_offsets.fetch(known)
        if not isinstance(limit, ReadMaxRows):
            return _to_json(ends)
        while not self._pace.try_begin(records := _unread_count(known, ends), now := time.monotonic()):
            if not records:
                return start  # Spark polls again after its polling delay (`engine.spark`)
            time.sleep(self._pace.estimate_pause(records, now))
            ends = self._end_offsets.fetch(known)
        end = bounded_ends(known, ends, self._max_records)
        if end is not ends:
            self._full_start = start
        return _to_json(end)

    def partitions(self, start: _Offsets, end: _Offsets) -> list[_Task]:
        known, names = _from_json(start), {name: topic for topic, name in self._config.names.items()}
        ranges = [
            PlannedRange(names[name], number, known[name][number], stop)
            for name, stops in _from_json(end).items()
            for number, stop in stops.items()
        ]
        ranges = [range_ for range_ in ranges if range_.start < range_.end]
        return [_Task(task) for task in ([ranges] if self._config.one_task else group_into_tasks(ranges))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        config = self._config
        freeze()
        with gc_disabled(), _reader(config) as reader:
            groups = ((ranges, reader.read(ranges)) for ranges in fetch_groups(partition.ranges))
            yield from compact(
                groups,
                keys=config.shard_keys,
                names=config.names,
                max_facts=config.max_facts,
                not_storable=config.not_storable,
            )

    def stop(self) -> None:
        if self._end_offsets is not None:
            self._end_offsets.close()


class Pace:
    """Decides when a batch begins, so that batches use at most a share of a core at a low rate of records.

    A batch of one record costs about as much as a batch of a thousand. So there is an *interval* between the starts of
    two batches: the median cost of the last batches, divided by `share`. If fewer than `WORTHWHILE_RECORDS` records are
    unread, the interval is longer in proportion. It is never longer than `MAX_WAIT_SECONDS`. If `RECORDS_PER_TASK`
    records are unread, the next batch begins at once.

    Args:
        share: the share of a core that batches may use.
        cpu_seconds: returns the CPU seconds that all processes of the pipeline have used so far.
    """

    def __init__(self, share: float, cpu_seconds: Callable[[], float]) -> None:
        self._share = share
        self._cpu_seconds = cpu_seconds
        self._last_begin = -math.inf
        self._cpu_at_last_begin = 0.0
        self._costs: deque[float] = deque(maxlen=9)

    @property
    def cost(self) -> float:
        """CPU seconds of a batch: the median of the last batches."""
        return statistics.median(self._costs) if self._costs else 0.0

    def try_begin(self, records: int, now: float) -> bool:
        """Begin a batch if records are unread and the interval has passed. Also measures the cost of the last batch.

        Args:
            records: number of unread records.
            now: monotonic seconds.

        Returns:
            True if the batch begins.
        """
        if not records or (records < RECORDS_PER_TASK and now < self._last_begin + self._wait_seconds(records)):
            return False
        cpu = self._cpu_seconds()
        if now - self._last_begin < _IDLE_SECONDS:
            self._costs.append(cpu - self._cpu_at_last_begin)
        self._last_begin, self._cpu_at_last_begin = now, cpu
        return True

    def estimate_pause(self, records: int, now: float) -> float:
        """Estimate the seconds until `try_begin` may begin a batch, if the rate of records since the last batch goes
        on.

        Args:
            records: number of unread records, at least 1.
            now: monotonic seconds.
        """
        passed, shortest = now - self._last_begin, self.cost / self._share
        wait = max(shortest, math.sqrt(shortest * WORTHWHILE_RECORDS * passed / records))
        return max(_MIN_PAUSE_SECONDS, min(MAX_WAIT_SECONDS, wait, passed * RECORDS_PER_TASK / records) - passed)

    def _wait_seconds(self, records: int) -> float:
        """Seconds from the start of the last batch to the start of the next batch, if `records` records are unread."""
        return min(MAX_WAIT_SECONDS, self.cost / self._share * max(1.0, WORTHWHILE_RECORDS / records))


class ProcessTree:
    """Measures the CPU time of a process and all its descendants.

    Args:
        root_pid: ID of the process.
    """

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._members: list[psutil.Process] = []
        self._listed_at = -math.inf

    def cpu_seconds(self) -> float:
        """CPU seconds that the processes, and their ended children, have used since they started.

        If there is no such process on this machine, monotonic seconds, as if a batch took one core.
        """
        now = time.monotonic()
        if now > self._listed_at + _LIST_SECONDS:
            self._members, self._listed_at = _process_tree(self._root_pid), now
        used = 0.0
        for member in self._members:
            with suppress(psutil.Error):
                used += sum(member.cpu_times()[:4])
        return used or now


def _process_tree(root_pid: int) -> list[psutil.Process]:
    """The process `root_pid` and all its descendants. Empty if there is no such process on this machine."""
    try:
        process = psutil.Process(root_pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def bounded_ends(start: TopicOffsets, ends: TopicOffsets, max_records: int) -> TopicOffsets:
    """The end offsets of a batch of about `max_records` records: the same share of each partition, rounded up.

    Counts each offset from `start` to `ends` as a record. Returns the object `ends` itself if there are at most
    `max_records` of them.
    """
    total = _unread_count(start, ends)
    if total <= max_records:
        return ends
    return {
        topic: {
            number: offset + -(-(ends[topic][number] - offset) * max_records // total)
            for number, offset in known.items()
        }
        for topic, known in start.items()
    }


def grown_limit(limit: int, highest_limit: int, too_many: int) -> int:
    """The limit of records for the next batch, after a batch that reached `limit`.

    A batch with too many facts for the memory ends the query, and the next query begins with a lower limit
    (`app.pipeline.batches`). So the limit grows slowly near the size of that batch:

    - below 7/8 of `too_many`: by 1/8 of the difference between `limit` and `too_many`
    - from there to `too_many`: by 1/512 of `limit`
    - from `too_many` on: by 1/64 of `limit`

    Args:
        limit: the limit of the last batch.
        highest_limit: the limit never exceeds this number.
        too_many: the number of records of an earlier batch that had too many facts; 0 if there was none.

    Returns:
        At least `limit + 1`, but at most `highest_limit`.
    """
    if limit >= too_many:
        step = limit // 64
    elif limit < too_many - too_many // 8:
        step = (too_many - limit) // 8
    else:
        step = limit // 512
    return min(highest_limit, limit + max(1, step))


def group_into_tasks(ranges: list[PlannedRange]) -> list[list[PlannedRange]]:
    """Group the ranges into tasks of about `RECORDS_PER_TASK` records. Ranges are not split: a task with a longer range
    has more records.

    The longest range comes first. Each range goes to the task that has the fewest records so far.
    Spark starts tasks in the order of the list, so the list begins with the task that has the most records.
    """
    task_count = min(len(ranges), -(-_record_count(ranges) // RECORDS_PER_TASK))
    tasks: list[list[PlannedRange]] = [[] for _ in range(task_count)]
    sizes = [0] * task_count
    for range_ in sorted(ranges, key=lambda range_: range_.start - range_.end):
        smallest = sizes.index(min(sizes))
        tasks[smallest].append(range_)
        sizes[smallest] += range_.end - range_.start
    return sorted(tasks, key=_record_count, reverse=True)


def fetch_groups(ranges: list[PlannedRange]) -> list[list[PlannedRange]]:
    """Divide the ranges of a task into groups that are fetched together.

    If there are few records, all ranges are one group: a separate request for each range would take longer than the
    rest of the task. If there are many records, each range is a group: then the reader fetches fewer messages beyond
    the end of a range. It drops these messages.
    """
    return [ranges] if _record_count(ranges) <= RECORDS_PER_TASK else [[range_] for range_ in ranges]


# -- one consumer in each Python worker

_open_readers: list[tuple[Mapping[str, object], RangeReader]] = []
"""The reader of this worker, if it is open, with its connection settings."""


@contextmanager
def _reader(config: KafkaConfig) -> Iterator[RangeReader]:
    """Lend the reader of this worker. It stays open for the next task, unless the block raises an error.

    Opens a new reader if none is open, or if the connection settings have changed.
    """
    wanted = {"client": config.client, "names": config.names}
    if _open_readers and _open_readers[0][0] != wanted:
        _open_readers.pop()[1].close()
    if not _open_readers:
        _open_readers.append((wanted, RangeReader(config.client, config.names)))
    reader = _open_readers[0][1]
    try:
        yield reader
        reader.stop_fetching()
    except BaseException:
        _open_readers.clear()
        reader.close()
        raise


def _record_count(ranges: list[PlannedRange]) -> int:
    return sum(range_.end - range_.start for range_ in ranges)


def _unread_count(start: TopicOffsets, end: TopicOffsets) -> int:
    return sum(end[topic][number] - offset for topic, known in start.items() for number, offset in known.items())


def _to_json(offsets: TopicOffsets) -> _Offsets:
    return {
        topic: {str(number): offset for number, offset in sorted(known.items())}
        for topic, known in sorted(offsets.items())
    }


def _from_json(offsets: _Offsets) -> TopicOffsets:
    return {topic: {int(number): offset for number, offset in known.items()} for topic, known in offsets.items()}
