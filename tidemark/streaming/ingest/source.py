"""Kafka as a source of packets for Spark: ranges are planned in one Python process, read and compacted in the workers.

The JVM sees offsets and packets, no record (docs/decisions/0021-kafka-in-python.md). A worker keeps its consumer from
batch to batch.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
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

ONE_TASK = 20_000
"""Records of a batch that are not worth a second task, which costs Spark some milliseconds."""

_SOON = 0.2  # seconds: what is expected later is left to Spark, which asks again after as long (`engine.spark`)
_STEP = 0.02  # seconds at least, because to ask takes a millisecond of ours and one of the broker's

_OPTION = "secret"  # Spark shows no option of such a name


class KafkaConfig(msgspec.Struct, frozen=True):
    """`client` are librdkafka's settings, with which any host can connect; `start` holds the next offset to read of
    every partition. `records`: of the first batch at most; `limit`: of any. A batch of fewer than `few` begins
    `interval` seconds after the one before or later. `most` and `refused` as of `streaming.ingest.compact`.
    """

    client: dict[str, str]
    facts: str
    control: str
    start: TopicOffsets
    records: int
    limit: int
    few: int
    interval: float
    keys: list[int]
    most: int
    refused: dict[str, dict[int, list[int]]] = {}

    @property
    def names(self) -> dict[Topic, str]:
        return {Topic.FACTS: self.facts, Topic.CONTROL: self.control}


def packets(spark: SparkSession, config: KafkaConfig) -> DataFrame:
    """The packets of both topics, as a stream."""
    spark.dataSource.register(PacketSource)
    option = msgspec.json.encode(config).decode()
    return spark.readStream.format(PacketSource.name()).option(_OPTION, option).load()


class PacketSource(DataSource):
    """Found by name in Spark's Python processes, and told what to do by its one option."""

    @classmethod
    def name(cls) -> str:
        return "tidemark"

    def schema(self) -> str:
        return "key int, packet binary"  # of streaming.ingest.compact.PACKETS

    def streamReader(self, schema: StructType) -> "PacketReader":
        return PacketReader(msgspec.json.decode(self.options[_OPTION], type=KafkaConfig))


@dataclass
class _Task(InputPartition):
    ranges: list[PlannedRange]


_Offsets = dict[str, dict[str, int]]
"""As Spark keeps them, as JSON: the next offset to read, by topic and partition."""


class PacketReader(DataSourceStreamReader):
    """In the planner asked for offsets, in workers for the records of a task."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._ends: EndOffsets | None = None
        self._records = config.records
        self._full: _Offsets | None = None
        """The start of a batch that had to be bounded."""
        self._pace = Pace(config.few, config.interval)

    def initialOffset(self) -> _Offsets:
        return _written(self._config.start)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._config.records)

    def latestOffset(self, start: _Offsets, limit: ReadLimit) -> _Offsets:
        if self._ends is None:
            self._ends = EndOffsets(self._config.client)
        if self._full not in (None, start):
            self._records = grown(self._records, self._config.limit)
            self._full = None
        known = _read(start)
        ends = self._ends.beyond(known)
        if not isinstance(limit, ReadMaxRows):
            return _written(ends)
        soon = time.monotonic() + _SOON
        while not self._pace.begins(records := _count(known, ends), now := time.monotonic()):
            pause = self._pace.pause(records, now)
            if now + pause > soon:
                return start  # to Spark nothing is new; it asks again
            time.sleep(pause)
            ends = self._ends.beyond(known)
        end = bounded(known, ends, self._records)
        if end is not ends:
            self._full = start
        return _written(end)

    def partitions(self, start: _Offsets, end: _Offsets) -> list[_Task]:
        known, names = _read(start), {name: topic for topic, name in self._config.names.items()}
        ranges = [
            PlannedRange(names[name], number, known[name][number], stop)
            for name, stops in _read(end).items()
            for number, stop in stops.items()
        ]
        return [_Task(task) for task in tasks([range_ for range_ in ranges if range_.start < range_.end])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        config = self._config
        freeze()
        with gc_disabled(), _reader(config) as reader:
            read = ((ranges, reader.read(ranges)) for ranges in together(partition.ranges))
            yield from compact(
                read, keys=config.keys, names=config.names, max_facts=config.most, refused=config.refused
            )

    def stop(self) -> None:
        if self._ends is not None:
            self._ends.close()


class Pace:
    """When a batch is worth its price, which is the same for one record and for a thousand: at once where `few` records
    or more wait, or none came for `interval` seconds; otherwise that long after the last one began.
    """

    def __init__(self, few: int, interval: float) -> None:
        self._few = few
        self._interval = interval
        self._began = -math.inf

    def begins(self, records: int, now: float) -> bool:
        """Whether a batch of so many records begins `now`, by the monotonic clock."""
        if not records or (records < self._few and now < self._began + self._interval):
            return False
        self._began = now
        return True

    def pause(self, records: int, now: float) -> float:
        """Seconds until one is likely to begin, where so many records wait `now` for others: these came since the last
        one began, and more may come as fast. Infinite where none wait."""
        if not records:
            return math.inf
        passed = now - self._began
        return max(_STEP, min(self._interval - passed, (self._few - records) * passed / records))


def bounded(start: TopicOffsets, ends: TopicOffsets, max_records: int) -> TopicOffsets:
    """How far to read where it may be `most` offsets together: of each partition as large a part as of all."""
    total = _count(start, ends)
    if total <= max_records:
        return ends
    return {
        topic: {
            number: offset + -(-(ends[topic][number] - offset) * max_records // total)
            for number, offset in known.items()
        }
        for topic, known in start.items()
    }


def grown(records: int, limit: int) -> int:
    """How many records a batch may have after one that had as many as it might. Where their facts were too many for
    memory a batch began with fewer (`app.batches`), at the price of a new query: it comes to that again only after a
    good many batches.
    """
    return min(limit, records + max(1, records // 64))


def tasks(ranges: list[PlannedRange]) -> list[list[PlannedRange]]:
    """The ranges spread over as many tasks as they are worth, the longest first to whoever has least."""
    task_count = min(len(ranges), -(-_size(ranges) // ONE_TASK))
    tasks_: list[list[PlannedRange]] = [[] for _ in range(task_count)]
    sizes = [0] * task_count
    for range_ in sorted(ranges, key=lambda range_: range_.start - range_.end):
        smallest = sizes.index(min(sizes))
        tasks_[smallest].append(range_)
        sizes[smallest] += range_.end - range_.start
    return tasks_


def together(ranges: list[PlannedRange]) -> list[list[PlannedRange]]:
    """Those of a task that are fetched together. Few records are: a question to the brokers for each range would take
    longer than all that is done with them. Of many all that was fetched behind a range's end would be in vain.
    """
    return [ranges] if _size(ranges) <= ONE_TASK else [[range_] for range_ in ranges]


# -- one consumer in each Python worker

_open_readers: list[tuple[Mapping[str, object], RangeReader]] = []


@contextmanager
def _reader(config: KafkaConfig) -> Iterator[RangeReader]:
    """This worker's, made anew for another connection and after an error."""
    wanted = {"client": config.client, "names": config.names}
    if _open_readers and _open_readers[0][0] != wanted:
        _open_readers.pop()[1].close()
    if not _open_readers:
        _open_readers.append((wanted, RangeReader(config.client, config.names)))
    reader = _open_readers[0][1]
    try:
        yield reader
        reader.park()
    except BaseException:
        _open_readers.clear()
        reader.close()
        raise


def _size(ranges: list[PlannedRange]) -> int:
    return sum(range_.end - range_.start for range_ in ranges)


def _count(start: TopicOffsets, end: TopicOffsets) -> int:
    return sum(end[topic][number] - offset for topic, known in start.items() for number, offset in known.items())


def _written(offsets: TopicOffsets) -> _Offsets:
    return {
        topic: {str(number): offset for number, offset in sorted(known.items())}
        for topic, known in sorted(offsets.items())
    }


def _read(offsets: _Offsets) -> TopicOffsets:
    return {topic: {int(number): offset for number, offset in known.items()} for topic, known in offsets.items()}
