"""Where the time of a batch goes: the query cut off after each of its stages, over the same records, as Spark batches.

Not a contest but a profile: a stage's price is what it adds to the stage before it, in core time per record.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import pyarrow as pa
from pyspark.sql import DataFrame

from tests.bench.race import THROUGHPUT
from tests.bench.site import BenchSite
from tests.bench.table import table
from tests.bench.topic import fill
from tidemark.sources.kafka import EARLIEST, source_options
from tidemark.streaming import query
from tidemark.streaming.compact import MOST_FACTS
from tidemark.streaming.spark import Jvm, SparkSettings, configuration, connect


@dataclass(frozen=True, slots=True)
class StagesPlan:
    records: int = 4_000_000
    rounds: int = 4


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([pa.array([sum(batch.num_rows for batch in batches)], pa.int64())], names=["records"])


def run(site: BenchSite, plan: StagesPlan) -> dict[str, Any]:
    """The first round warms up and does not count."""
    shape, partitions = THROUGHPUT.shape, THROUGHPUT.partitions
    loaded = fill(site.connection, site.fresh("facts"), shape, records=plan.records, partitions=partitions)
    wanted = SparkSettings(
        master="local[*]",
        memory="4g",  # each Spark batch leaves consumers with full buffers behind
        jars=sorted(site.connector_jars.glob("*.jar")),
        tasks=os.cpu_count() or 1,
        local_dir=site.directory("spark"),
    )
    conf = configuration(wanted)
    spark = connect(Jvm(conf), conf)
    options = source_options(site.connection, {loaded.name: dict.fromkeys(range(partitions), EARLIEST)}, plan.records)
    del options["maxOffsetsPerTrigger"]  # of streams only
    records = spark.read.format("kafka").options(**options).load()
    names = {"facts": loaded.name, "control": "control"}
    stages = {
        "Kafka source alone": records,
        "+ values to Python and back as a count": records.select("value").mapInArrow(_count, "records long"),
        "+ the rest of the record": query.frames(records, "control").mapInArrow(_count, "records long"),
        "+ decoding and compaction": query.compacted(records, **names, shards=16, most=MOST_FACTS),
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for number in range(plan.rounds):
        for name, frame in stages.items():
            took = _seconds(frame)
            click.echo(f"round {number}: {name}: {took:.2f} s", err=True)
            if number:
                seconds[name].append(took)
    spark.stop()
    return {"records": loaded.records, "cores": wanted.tasks, "seconds": seconds}


def _seconds(frame: DataFrame) -> float:
    began = time.monotonic()
    frame.write.format("noop").mode("overwrite").save()
    return time.monotonic() - began


def render(figures: Mapping[str, Any]) -> list[str]:
    records, cores = figures["records"], figures["cores"]
    rows, before = [], 0.0
    for name, seconds in figures["seconds"].items():
        price = median(seconds) * cores / records * 1e6
        rows.append([name, f"{records / median(seconds) / 1e6:.2f} M", f"{price:.2f}", f"{price - before:+.2f}"])
        before = price
    return [
        f"{records:,} records of the workload with few streams, read as a Spark batch that ends after the stage named;"
        f" medians of {len(next(iter(figures['seconds'].values())))} rounds. Both cores are busy all the time, so the"
        " price is wall time times cores. The state machine behind it costs 0.03 µs a record (`flat`), the sinks 10 ms"
        " a batch; the rest of a batch is Spark's planning, its logs and the shuffle.",
        "",
        *table(["the query up to", "records/s", "µs of a core per record", "this stage"], rows),
    ]
