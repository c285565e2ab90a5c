"""What the two competitors on Spark share: our session, Spark's Kafka source, marks from the query's progress."""

import json
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from tests.bench.competitors.task import Task
from tests.bench.rate import Meter, RateMark
from tidemark.streaming.engine.spark import SparkSettings, start

ROOT = Path(__file__).parents[3]
_POLL_SECONDS = 0.5  # each look is work of the JVM that is measured


def run(task: Task, meter: Meter, plan: Callable[[DataFrame], DataFrame]) -> None:
    """Run `plan` of the topic's records into a sink that drops everything, until the meter has seen enough."""
    directory = Path(task.directory)
    spark = start(
        SparkSettings(
            master="local[*]",
            memory="1g",
            jars=sorted(Path(task.jars).glob("*.jar")),
            task_count=os.cpu_count() or 1,
            local_dir=directory / "spark",
            extra_settings={
                "spark.executorEnv.PYTHONPATH": str(ROOT),  # where its workers find the state function
                "spark.sql.streaming.numRecentProgressUpdates": "10000",
                "spark.driver.extraJavaOptions": "",  # ours suit a JVM that does little; here it does all the work
            },
        )
    )
    records = spark.readStream.format("kafka").options(**_options(task)).load()
    query = (
        plan(records)
        .writeStream.format("noop")
        .outputMode("append")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start()
    )
    noted = -1
    while not meter.done:
        if not query.isActive:
            raise RuntimeError(f"the query ended: {query.exception()}")
        progress = query.lastProgress
        if progress and progress["batchId"] > noted and progress["numInputRows"]:
            noted = progress["batchId"]
            meter.note(_reached(progress), _end(progress))
        time.sleep(_POLL_SECONDS)
    # With few records, several batches end between two looks.
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    meter.marks = [RateMark(_reached(progress), _end(progress)) for progress in batches] or meter.marks
    query.stop()
    spark.stop()


def _options(task: Task) -> dict[str, str]:
    """All records, with large fetches: from 0.95 to 1.31 M records/s (docs/explanation/engine.md 1)."""
    options = {
        "bootstrap.servers": task.bootstrap,
        "isolation.level": "read_committed",
        "max.poll.records": "10000",
        "max.partition.fetch.bytes": str(16 << 20),
        "fetch.max.bytes": str(64 << 20),
        "fetch.max.wait.ms": "1",
        "receive.buffer.bytes": str(4 << 20),
        "check.crcs": "false",
    }
    spark = {"subscribe": task.topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(task.batch)}
    return {**spark, **{f"kafka.{name}": value for name, value in options.items()}}


def _reached(progress: Any) -> int:
    """Records read so far: the topic's offsets begin with 0, and each is a record."""
    (source,) = progress["sources"]
    (offsets,) = json.loads(source["endOffset"]).values()
    return sum(offsets.values())


def _end(progress: Any) -> float:
    """When the batch was over, in s since 1970."""
    began = datetime.fromisoformat(progress["timestamp"]).timestamp()
    return began + float(progress["durationMs"]["triggerExecution"]) / 1000
