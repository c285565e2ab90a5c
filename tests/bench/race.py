"""Throughput: Tidemark whole beside its alternatives, by turns, on one topic with the same records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import click

from tests.bench.competitors.task import Task, measure
from tests.bench.memory import KINDS, Samples, sampled
from tests.bench.rate import Rate, RateLimits, steady
from tests.bench.site import BenchSite
from tests.bench.table import mib, rate, table
from tests.bench.topic import Loaded, fill
from tests.bench.whole import pipeline
from tests.bench.workload import Shape
from tidemark.app.settings import Settings

WHOLE = "tidemark"
CEILING = "ceiling"

NAMES = {
    CEILING: "Spark's Kafka source, records dropped (the ceiling)",
    WHOLE: "**Tidemark whole**, Postgres and Redis included",
    "row-by-row": "Spark: `from_json`, state function row by row",
    "loop-json": "consumer loop by hand, `json`",
    "loop-orjson": "consumer loop by hand, `orjson`",
    "quixstreams": "quixstreams, stateful update",
}
_ON_SPARK = {CEILING, WHOLE, "row-by-row"}
_DEFAULT_BATCH: int = Settings.model_fields["max_records_per_batch"].default


@dataclass(frozen=True, slots=True)
class RacePlan:
    """`wanted`: competitor -> how many times its rate Tidemark should reach. The first `warm_batches` batches of a JVM
    do not count; of a consumer loop, which has nothing to warm up but its buffers, the first 100 000 records.
    """

    shape: Shape
    wanted: Mapping[str, float]
    records: int
    window: float = 30.0
    batch: int = _DEFAULT_BATCH
    warm_batches: int = 3
    partitions: int = 4
    rounds: int = 3

    def limits(self, name: str, total: int) -> RateLimits:
        warm = self.warm_batches * self.batch if name in _ON_SPARK else min(100_000, total // 4)
        # Spark rounds down when it shares a batch out to partitions: a handful of records is left for one more.
        return RateLimits(warm, total - total // 1000, self.window)


THROUGHPUT = RacePlan(
    Shape(streams=4, writers=8),
    {CEILING: 0.5, "row-by-row": 2.5, "loop-json": 2.0, "loop-orjson": 1.2, "quixstreams": 6.0},
    records=7 * _DEFAULT_BATCH,
)
STREAMS = RacePlan(
    Shape(streams=10_000, writers=2, in_flight=0.1), {CEILING: 0.2}, records=7 * _DEFAULT_BATCH, window=60.0
)


@dataclass(frozen=True, slots=True)
class Passage:
    """Tidemark's way through the topic: `turn` is what a batch takes in all, `sinks` what each sink takes of it (s)."""

    rate: Rate
    turn: float
    sinks: Mapping[str, float]
    memory: Samples


def run(site: BenchSite, plan: RacePlan) -> dict[str, Any]:
    """Every round measures everybody once; Tidemark comes right after the ceiling."""
    loaded = fill(site.connection, site.fresh("facts"), plan.shape, records=plan.records, partitions=plan.partitions)
    click.echo(f"{loaded.records} records of {loaded.bytes / loaded.records:.0f} bytes are in Kafka", err=True)
    rates: dict[str, list[float]] = {name: [] for name in NAMES if name in {WHOLE, *plan.wanted}}
    passages: list[Passage] = []
    for number in range(1, plan.rounds + 1):
        for name, found in rates.items():
            if name == WHOLE:
                passage = whole(site, plan, loaded)
                reached = passage.rate
                passages.append(passage)
            else:
                reached = measure(name, _task(site, plan, loaded, name))
            found.append(reached.per_second)
            click.echo(f"round {number}: {name}: {rate(reached.per_second)}/s over {reached.records} records", err=True)
    return {
        "streams": plan.shape.streams,
        "writers": plan.shape.writers,
        "partitions": plan.partitions,
        "records": loaded.records,
        "bytes": loaded.bytes / loaded.records,
        "in_flight": plan.shape.in_flight,
        "batch": plan.batch,
        "warm_batches": plan.warm_batches,
        "window": plan.window,
        "rates": rates,
        "wanted": dict(plan.wanted),
        "memory": {kind: max(passage.memory.peak(kind) for passage in passages) for kind in KINDS},
        "turn": mean(passage.turn for passage in passages),
        "sinks": {sink: mean(passage.sinks[sink] for passage in passages) for sink in passages[0].sinks},
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    rates: dict[str, list[float]] = figures["rates"]
    wanted: dict[str, float] = figures["wanted"]
    return [
        f"{figures['records']:,} records of {figures['bytes']:.0f} bytes, lz4, {figures['streams']:,} streams"
        f" x {figures['writers']} writers with {figures['in_flight']:g} transactions open each on average,"
        f" {figures['partitions']} partitions; Spark's batches have"
        f" {figures['batch']:,} records, the first {figures['warm_batches']} do not count; then to the end of the"
        f" topic, or {figures['window']:.0f} s. {len(rates[WHOLE])} rounds by turns; medians, and the median of the"
        " rounds' ratios.",
        "",
        *table(
            ["what", "records/s", "each round", "Tidemark is", "wanted"],
            [_row(name, found, rates[WHOLE], wanted.get(name)) for name, found in rates.items()],
        ),
        "",
        f"One of Tidemark's batches takes {figures['turn']:.2f} s in all: "
        + "".join(f"{sink} {seconds:.2f} s, " for sink, seconds in figures["sinks"].items())
        + "the rest reads and computes.",
        "",
        "Memory of the pipeline at most (resident; shared pages of the workers count in each): "
        + ", ".join(f"{kind} {mib(figures['memory'][kind])}" for kind in KINDS)
        + ".",
    ]


def _row(name: str, found: Sequence[float], whole: Sequence[float], wanted: float | None) -> list[str]:
    row = [NAMES[name], rate(median(found)), ", ".join(map(rate, found))]
    if wanted is None:
        return [*row, "", ""]
    ratio = median(ours / theirs for ours, theirs in zip(whole, found, strict=True))
    return [*row, f"{ratio:.2f} x", f"{wanted:g} x {'reached' if ratio >= wanted else '**missed**'}"]


def _task(site: BenchSite, plan: RacePlan, loaded: Loaded, name: str) -> Task:
    return Task(
        site.kafka.bootstrap_servers,
        loaded.name,
        loaded.partitions,
        plan.batch,
        plan.limits(name, loaded.records),
        str(site.directory(name)),
        str(site.connector_jars),
    )


def whole(site: BenchSite, plan: RacePlan, loaded: Loaded) -> Passage:
    """The whole topic through a new pipeline; what it published in the end must be right for the rate to count."""
    variables = {"TIDEMARK_MAX_RECORDS_PER_BATCH": str(plan.batch)}
    with pipeline(site, loaded.name, loaded.partitions, variables) as running:
        with sampled(running.pid, every=0.5) as samples:
            running.await_records(loaded.records, seconds=600)
        running.await_positions(loaded.play)
        found = steady(running.marks(), plan.limits(WHOLE, loaded.records))
        return Passage(found, found.seconds * plan.batch / found.records, running.sink_seconds(), samples)
