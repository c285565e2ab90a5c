"""Who takes part in a race, and what one of them does in one turn on one topic."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import click

from tests.bench.competitors import jvm
from tests.bench.competitors.task import Task, Turn, measure
from tests.bench.rate import RateLimits, steady
from tests.bench.site import BenchSite
from tests.bench.topic import Loaded
from tests.bench.usage import Samples, sampled
from tests.bench.whole import pipeline
from tests.bench.workload import Shape
from tidemark.app.settings import FIELDS

WHOLE = "tidemark"
CEILING = "ceiling"
QUIX = "quixstreams"

NAMES = {
    CEILING: "Spark's Kafka source, records dropped (the ceiling)",
    WHOLE: "**Tidemark whole**, Postgres and Redis included",
    "row-by-row": "Spark: `from_json`, state function row by row",
    "loop-json": "consumer loop by hand, `json`",
    "loop-orjson": "consumer loop by hand, `orjson`",
    QUIX: "quixstreams, stateful update",
    "streams-rocksdb": "Kafka Streams, `fastjson2`, store in RocksDB; no sinks, no evidence",
    "streams-heap": "Kafka Streams, `fastjson2`, store in the heap; no sinks, no evidence",
    "loop-java": "consumer loop by hand in Java, `fastjson2`; no sinks, no evidence",
}
ON_SPARK = {CEILING, WHOLE, "row-by-row"}
DEFAULT_BATCH: int = FIELDS["max_records_per_batch"].default


@dataclass(frozen=True, slots=True)
class RacePlan:
    """`wanted`: competitor -> how many times its rate Tidemark should reach, None where nothing is wanted; of
    `against`, unless it is empty, are those that take part. The first `warm_batches` batches of a JVM do not count, or
    as many records; of another consumer loop, which has nothing to warm up but its buffers, the first 100 000 records.
    `warm_seconds` and `paced_seconds` are of `pace`; with 0 of the latter it measures nothing. `max_records` is
    Tidemark's setting of the largest batch; `batch` if it is None.
    """

    shape: Shape
    wanted: Mapping[str, float | None]
    records: int
    window: float = 30.0
    batch: int = DEFAULT_BATCH
    warm_batches: int = 3
    partitions: int = 4
    rounds: int = 3
    warm_seconds: float = 16.0
    paced_seconds: float = 10.0
    against: tuple[str, ...] = ()
    max_records: int | None = None

    def limits(self, name: str, total: int) -> RateLimits:
        on_jvm = name in ON_SPARK or name in jvm.PROGRAMS
        warm = self.warm_batches * self.batch if on_jvm else min(100_000, total // 4)
        # Spark rounds down when it shares a batch out to partitions: a handful of records is left for one more.
        return RateLimits(warm, total - total // 1000, self.window)

    def takes_part(self, name: str) -> bool:
        return name == WHOLE or (name in self.wanted and (not self.against or name in self.against))


@dataclass(frozen=True, slots=True)
class Passage(Turn):
    """Tidemark's way through the topic: `batch` is what one takes in all, `sinks` what each sink takes of it (s)."""

    batch: float
    sinks: Mapping[str, float]
    memory: Samples


class Contestants:
    """`names` in the order of their turns; `skipped` says who is left out and why, and `jvm` what those on the JVM run
    with, each empty where there is nothing to say. Raises `CompetitorFailed` where Maven cannot build.
    """

    def __init__(self, site: BenchSite, plan: RacePlan) -> None:
        self.names = [name for name in NAMES if plan.takes_part(name)]
        self.skipped = self.jvm = ""
        if QUIX in self.names and find_spec(QUIX) is None:
            self.names.remove(QUIX)
            self.skipped = f"For want of its package nobody measured {QUIX}; it needs confluent-kafka below 2.13."
            click.echo(self.skipped, err=True)
        self._site = site
        self._programs: jvm.BuiltPrograms | None = None
        on_jvm = [name for name in self.names if name in jvm.PROGRAMS]
        if not on_jvm:
            return
        if missing := jvm.wanting():
            self.names = [name for name in self.names if name not in on_jvm]
            reason = f"For want of `{missing}` nobody measured {', '.join(on_jvm)}."
            self.skipped = f"{self.skipped} {reason}".strip()
            click.echo(reason, err=True)
            return
        self._programs = jvm.build(site.java, site.jars / "rivals")
        self.jvm = f"{self._programs.libraries()}; {jvm.OPTIONS}, {jvm.THREADS} threads"

    def turn(self, name: str, plan: RacePlan, loaded: Loaded) -> Turn:
        if name == WHOLE:
            return whole(self._site, plan, loaded)
        task = self.task(name, loaded, plan.batch, plan.limits(name, loaded.records))
        return measure(name, self.command(name), task, loaded.positions())

    def command(self, name: str) -> list[str]:
        """Of a competitor, without its task."""
        if name in jvm.PROGRAMS:
            assert self._programs is not None
            return self._programs.command(name)
        return [sys.executable, "-m", "tests.bench.competitors", name]

    def task(self, name: str, loaded: Loaded, batch: int, limits: RateLimits) -> Task:
        return Task(
            self._site.kafka.bootstrap_servers,
            loaded.name,
            loaded.partitions,
            loaded.records,
            batch,
            limits,
            str(self._site.directory(name)),
            str(self._site.connector_jars),
        )


def whole(site: BenchSite, plan: RacePlan, loaded: Loaded) -> Passage:
    """The whole topic through a new pipeline; what it published in the end must be right for the rate to count. Its
    CPU is that of its Postgres and its Redis too.
    """
    variables = {"TIDEMARK_MAX_RECORDS_PER_BATCH": str(plan.max_records or plan.batch)}
    with pipeline(site, loaded.name, loaded.partitions, variables) as running:
        with sampled(running.pid, every=0.5, servers=site.sinks) as samples:
            running.await_records(loaded.records, seconds=600)
        running.await_positions(loaded.play)
        found = steady(running.marks(), plan.limits(WHOLE, loaded.records))
        cpu = samples.cpu(found.began, found.ended)
        return Passage(found, cpu, found.seconds * plan.batch / found.records, running.sink_seconds(), samples)
