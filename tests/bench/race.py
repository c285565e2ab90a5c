"""Throughput: Tidemark whole beside its alternatives, by turns, on one topic with the same records."""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import click

from tests.bench import pace
from tests.bench.contestants import CEILING, DEFAULT_BATCH, NAMES, WHOLE, Contestants, Passage, RacePlan
from tests.bench.site import BenchSite
from tests.bench.table import mib, rate, table
from tests.bench.topic import fill
from tests.bench.usage import KINDS
from tests.bench.workload import Shape

THROUGHPUT = RacePlan(
    Shape(streams=4, writers=8),
    {
        CEILING: 0.5,
        "row-by-row": 2.5,
        "loop-json": 3.3,
        "loop-orjson": 1.4,
        "quixstreams": 14.0,
        "streams-rocksdb": 0.83,
        "streams-heap": 0.83,
        "loop-java": None,
    },
    records=7 * DEFAULT_BATCH,
    window=20.0,
)
STREAMS = RacePlan(
    Shape(streams=10_000, writers=2, in_flight=0.1),
    {CEILING: 0.2, "streams-rocksdb": 1.0, "streams-heap": 1.0, "loop-java": None},
    records=7 * DEFAULT_BATCH,
    window=60.0,
)


def run(site: BenchSite, plan: RacePlan) -> dict[str, Any]:
    """Every round measures everybody once; Tidemark comes right after the ceiling."""
    contestants = Contestants(site, plan)
    cores = pace.run(site, contestants, plan)
    loaded = fill(site.connection, site.fresh("facts"), plan.shape, records=plan.records, partitions=plan.partitions)
    click.echo(f"{loaded.records} records of {loaded.bytes / loaded.records:.0f} bytes are in Kafka", err=True)
    rates: dict[str, list[float]] = {name: [] for name in contestants.names}
    prices: dict[str, list[float]] = {name: [] for name in contestants.names}
    passages: list[Passage] = []
    for number in range(1, plan.rounds + 1):
        for name in contestants.names:
            turn = contestants.turn(name, plan, loaded)
            if name == WHOLE and isinstance(turn, Passage):
                passages.append(turn)
            rates[name].append(turn.rate.per_second)
            prices[name].append(turn.price)
            reached = f"{rate(turn.rate.per_second)}/s over {turn.rate.records} records, {turn.price:.2f} µs of a core"
            click.echo(f"round {number}: {name}: {reached}", err=True)
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
        "prices": prices,
        "cores": {name: found for name, (found,) in cores.items()},
        "paced": pace.described(plan),
        "wanted": dict(plan.wanted),
        "memory": {kind: max(passage.memory.peak(kind) for passage in passages) for kind in KINDS},
        "turn": mean(passage.batch for passage in passages),
        "sinks": {sink: mean(passage.sinks[sink] for passage in passages) for sink in passages[0].sinks},
        "jvm": contestants.jvm,
        "skipped": contestants.skipped,
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    rates: dict[str, list[float]] = figures["rates"]
    wanted: dict[str, float | None] = figures["wanted"]
    return [
        f"{figures['records']:,} records, a fact each, of {figures['bytes']:.0f} bytes, lz4, {figures['streams']:,}"
        f" streams x {figures['writers']} writers with {figures['in_flight']:g} transactions open each on average,"
        f" {figures['partitions']} partitions; Spark's batches have"
        f" {figures['batch']:,} records, the first {figures['warm_batches']} do not count; then to the end of the"
        f" topic, or {figures['window']:.0f} s. {len(rates[WHOLE])} rounds by turns; medians, and the median of the"
        " rounds' ratios.",
        "",
        *table(
            ["what", *columns(figures), "Tidemark is", "wanted"],
            [
                [NAMES[name], *cells(name, figures, figures), *_against(found, rates[WHOLE], name, wanted)]
                for name, found in rates.items()
            ],
        ),
        "",
        *pace.explained(figures),
        *on_jvm(figures),
        f"A batch of Tidemark follows another after {figures['turn']:.2f} s, in which the one before is published: "
        + ", ".join(f"{sink} {seconds:.2f} s" for sink, seconds in figures["sinks"].items())
        + ".",
        "",
        "Memory of the pipeline at most (resident; shared pages of the workers count in each): "
        + ", ".join(f"{kind} {mib(figures['memory'][kind])}" for kind in KINDS)
        + ".",
    ]


def columns(figures: Mapping[str, Any]) -> list[str]:
    """Of what each contestant reached: its rates, its core time, and its cores at an even pace if measured."""
    return ["facts/s", "each round", "µs of a core per fact", *([pace.HEAD] if figures.get("paced") else [])]


def cells(name: str, row: Mapping[str, Any], figures: Mapping[str, Any]) -> list[str]:
    """Of one contestant under `columns`; `row` is `figures`, or that part of them with its own rates."""
    rates, prices = row["rates"][name], row["prices"].get(name)
    found = [rate(median(rates)), ", ".join(map(rate, rates)), f"{median(prices):.2f}" if prices else ""]
    if figures.get("paced"):
        cores = row["cores"].get(name)
        found.append("" if cores is None else f"{cores:.2f}")
    return found


def ratio(whole: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return median(ours / found for ours, found in zip(whole, theirs, strict=True))


def on_jvm(figures: Mapping[str, Any]) -> list[str]:
    """What those on the JVM ran with, or why they did not, and a blank line; nothing where nothing is to say."""
    said = [f"On the JVM: {figures['jvm']}."] if figures["jvm"] else []
    said += [figures["skipped"]] if figures["skipped"] else []
    return [" ".join(said), ""] if said else []


def _against(
    theirs: Sequence[float], whole: Sequence[float], name: str, wanted: Mapping[str, float | None]
) -> list[str]:
    if name == WHOLE:
        return ["", ""]
    reached, least = ratio(whole, theirs), wanted[name]
    verdict = "" if least is None else f"{least:g} x {'reached' if reached >= least else '**missed**'}"
    return [f"{reached:.2f} x", verdict]
