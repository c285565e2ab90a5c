"""Creates the class archive of `app.pipeline.class_archive`. Run: python -m tidemark.app.pipeline.archive_classes

A JVM runs the pipeline's query, and writes the archive when the JVM exits. The command needs half a minute of CPU time,
and the archive needs 160 MB of disk space. If a complete archive exists, the command does nothing.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from tidemark.app.pipeline.class_archive import NO_WARNINGS, create, spark_archive_path
from tidemark.app.settings import load
from tidemark.app.versions import find_java
from tidemark.streaming.engine import query
from tidemark.streaming.engine.jvm import Jvm
from tidemark.streaming.engine.spark import SparkSettings, configuration, connect, set_tasks
from tidemark.streaming.ingest.compact import MAX_FACTS, compact
from tidemark.streaming.ingest.ranges import TopicOffsets
from tidemark.streaming.ingest.source import KafkaConfig, PacketReader, PacketSource
from tidemark.streaming.values.limits import Bounds

_BATCH_COUNT = 2
_SHARD_KEYS = [0, 1, 2, 3]


class _StubReader(PacketReader):
    """Reads simulated partitions: with each batch, the end offset of a partition rises by one, without a record."""

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        return {topic: {number: at + 1 for number, at in offsets.items()} for topic, offsets in start.items()}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ranges = partition.ranges  # type: ignore[attr-defined]
        return compact([(ranges, ())], keys=_SHARD_KEYS, names=self._config.names, max_facts=MAX_FACTS)


class _StubSource(PacketSource):
    def streamReader(self, schema: StructType) -> _StubReader:
        start: TopicOffsets = {"facts": {0: 0}, "control": {}}
        return _StubReader(KafkaConfig({}, "facts", "control", start, 1, 1, 1.0, 0, _SHARD_KEYS, MAX_FACTS))


def _run_query(spark: SparkSession, checkpoint: Path, *, one_task: bool) -> None:
    """Run the pipeline's query for `_BATCH_COUNT` batches, and stop the query. Raises the error of a failed query."""
    set_tasks(spark, one_task=one_task)
    is_done = threading.Event()

    def publish(batch: DataFrame, number: int) -> None:
        query.collect(batch)
        if number + 1 >= _BATCH_COUNT:
            is_done.set()

    spark.dataSource.register(_StubSource)
    packets = spark.readStream.format(_StubSource.name()).load()
    seeds = spark.sparkContext.broadcast(dict[int, bytes]())
    effects = query.compute_effects(
        packets, shards=len(_SHARD_KEYS), seeds=seeds, bounds=Bounds(), query="", one_task=one_task
    )
    running = effects.writeStream.foreachBatch(publish).option("checkpointLocation", str(checkpoint)).start()
    while not is_done.wait(0.1):
        if error := running.exception():
            raise error
    running.stop()


def _run_jvm(directory: Path, option: str) -> None:
    """Run the query in a JVM with an additional option, end the JVM, and wait for its exit. Exits with an error text if
    the exit code of the JVM is not 0."""
    conf = configuration(SparkSettings("local[*]", "512m", [], len(_SHARD_KEYS), directory, [*NO_WARNINGS, option]))
    jvm = Jvm(conf)
    spark = connect(jvm, conf)
    for one_task in (True, False):  # the queries for light and for heavy traffic
        _run_query(spark, directory / f"checkpoint-{one_task}", one_task=one_task)
    spark.stop()
    process = jvm.gateway.proc
    process.stdin.close()  # ends the JVM
    if code := process.wait():
        sys.exit(f"the JVM exited with code {code}, so the class archive is incomplete; run this command again")


if __name__ == "__main__":
    # SystemExit instead of the default action, so that an incomplete archive is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    create(spark_archive_path(find_java(load().java_home)), _run_jvm)
