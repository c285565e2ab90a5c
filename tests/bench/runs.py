"""Throughput of RUN records: the same facts one to a Kafka record, and many."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import click

from tests.bench.race import RacePlan, whole
from tests.bench.site import BenchSite
from tests.bench.table import rate, table
from tests.bench.topic import fill
from tests.bench.workload import Shape

_SHAPE = Shape(streams=4, writers=8, slow_every=5000)  # few gaps: a backlog is told in the order of its IDs


@dataclass(frozen=True, slots=True)
class RunsPlan:
    """So many facts in all and in a batch. Of `together` each is a turn of every round."""

    facts: int = 14_000_000
    batch: int = 2_000_000
    warm_batches: int = 3
    rounds: int = 3
    together: tuple[int, ...] = (1, 20, 100)


def run(site: BenchSite, plan: RunsPlan) -> dict[str, Any]:
    topics = {
        most: fill(site.connection, site.fresh("runs"), _SHAPE, records=plan.facts, partitions=4, together=most)
        for most in plan.together
    }
    rates: dict[int, list[float]] = {most: [] for most in plan.together}
    for number in range(1, plan.rounds + 1):
        for most, loaded in topics.items():
            facts = loaded.facts / loaded.records
            race = RacePlan(_SHAPE, {}, 0, batch=round(plan.batch / facts), warm_batches=plan.warm_batches)
            found = whole(site, race, loaded).rate.per_second * facts
            rates[most].append(found)
            click.echo(f"round {number}: {facts:.1f} facts a record: {rate(found)}/s", err=True)
    return {
        "facts": plan.facts,
        "rows": [
            {"facts": it.facts / it.records, "bytes": it.bytes / it.facts, "rates": rates[most]}
            for most, it in topics.items()
        ],
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    rows: list[Mapping[str, Any]] = figures["rows"]
    single = rows[0]["rates"]
    return [
        f"{figures['facts']:,} facts through the whole pipeline, Postgres and Redis included, by turns; medians, and"
        " the median of the rounds' ratios.",
        "",
        *table(
            ["facts a record", "bytes a fact", "facts/s", "each round", "as many as one by one"],
            [
                [
                    f"{row['facts']:.1f}",
                    f"{row['bytes']:.0f}",
                    rate(median(row["rates"])),
                    ", ".join(map(rate, row["rates"])),
                    f"{median(ours / theirs for ours, theirs in zip(row['rates'], single, strict=True)):.2f} x",
                ]
                for row in rows
            ],
        ),
    ]
