"""Throughput of RUN records: the same facts one to a Kafka record, and many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import click

from tests.bench import pace
from tests.bench.competitors import jvm
from tests.bench.contestants import DEFAULT_BATCH, NAMES, WHOLE, Contestants, RacePlan
from tests.bench.race import THROUGHPUT, cells, columns, on_jvm, ratio
from tests.bench.site import BenchSite
from tests.bench.table import rate, table
from tests.bench.topic import fill
from tests.bench.workload import Shape

_WANTED = {20: 2.0e6, 100: 2.5e6}
"""Facts/s that Tidemark should reach with so many a record."""
_RUN_FACTOR = 4
"""A batch of RUN records has up to four times the facts. Tidemark reaches this size after about ten batches."""
_SHAPE = Shape(streams=4, writers=8, slow_every=5000)  # few gaps: a backlog is told in the order of its IDs


@dataclass(frozen=True, slots=True)
class RunsPlan:
    """The facts of the topic with one fact a record, the largest number of records of a batch, and the batches before
    the measurement. A topic with RUN records has `_RUN_FACTOR` times the facts, also before the measurement. Of
    `together` each is a turn of every round, for each contestant.
    """

    facts: int = 56_000_000
    batch: int = DEFAULT_BATCH
    warm_batches: int = 3
    rounds: int = 3
    warm_seconds: float = THROUGHPUT.warm_seconds
    paced_seconds: float = THROUGHPUT.paced_seconds
    together: tuple[int, ...] = (1, 20, 100)
    against: tuple[str, ...] = ()


def run(site: BenchSite, plan: RunsPlan) -> dict[str, Any]:
    wanted = dict.fromkeys(jvm.PROGRAMS)
    everybody = RacePlan(
        _SHAPE,
        wanted,
        0,
        warm_batches=plan.warm_batches,
        warm_seconds=plan.warm_seconds,
        paced_seconds=plan.paced_seconds,
        against=plan.against,
    )
    contestants = Contestants(site, everybody)
    cores = pace.run(site, contestants, everybody, plan.together)
    rows: list[dict[str, Any]] = []
    topics = []
    for place, most in enumerate(plan.together):
        factor = 1 if most == 1 else _RUN_FACTOR
        loaded = fill(
            site.connection, site.fresh("runs"), _SHAPE, records=factor * plan.facts, partitions=4, together=most
        )
        topics.append(loaded)
        row: dict[str, Any] = {
            "factor": factor,
            "facts": loaded.facts / loaded.records,
            "bytes": loaded.bytes / loaded.facts,
        }
        row["cores"] = {name: found[place] for name, found in cores.items()}
        rows.append(row | {"wanted": _WANTED.get(most), "rates": _none(contestants), "prices": _none(contestants)})
    for number in range(1, plan.rounds + 1):
        for row, loaded in zip(rows, topics, strict=True):
            batch = round(row["factor"] * plan.batch / row["facts"])
            race = replace(everybody, batch=batch, max_records=plan.batch)
            for name in contestants.names:
                turn = contestants.turn(name, race, loaded)
                row["rates"][name].append(turn.rate.per_second * row["facts"])
                row["prices"][name].append(turn.price / row["facts"])
                reached = f"{rate(row['rates'][name][-1])}/s, {row['prices'][name][-1]:.2f} µs of a core"
                click.echo(f"round {number}: {row['facts']:.1f} facts a record: {name}: {reached}", err=True)
    return {
        "facts": plan.facts,
        "rows": rows,
        "paced": pace.described(everybody),
        "jvm": contestants.jvm,
        "skipped": contestants.skipped,
    }


def _none(contestants: Contestants) -> dict[str, list[float]]:
    return {name: [] for name in contestants.names}


def _verdict(reached: float, wanted: float | None) -> str:
    return "" if wanted is None else f"{rate(wanted)}/s {'reached' if reached >= wanted else '**missed**'}"


def render(figures: Mapping[str, Any]) -> list[str]:
    rows: list[Mapping[str, Any]] = figures["rows"]
    single: Mapping[str, Sequence[float]] = rows[0]["rates"]
    return [
        f"{figures['facts']:,} facts, {_RUN_FACTOR} times as many in RUN records, by turns; medians, and the median of"
        " the rounds' ratios. All settings have their default values.",
        "",
        *table(
            [
                *("facts a record, bytes a fact", "what"),
                *columns(figures),
                *("Tidemark is", "as many as one by one", "wanted"),
            ],
            [
                [
                    f"{row['facts']:.1f}, {row['bytes']:.0f}",
                    NAMES[name],
                    *cells(name, row, figures),
                    f"{ratio(row['rates'][WHOLE], rates):.2f} x" if name != WHOLE else "",
                    f"{ratio(rates, single[name]):.2f} x",
                    _verdict(median(rates), row["wanted"]) if name == WHOLE else "",
                ]
                for row in rows
                for name, rates in row["rates"].items()
            ],
        ),
        "",
        *pace.explained(figures, "All rows of a contestant are one process, which gets them one after the other."),
        *on_jvm(figures),
    ][:-1]
