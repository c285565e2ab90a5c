"""What one core does: Tidemark whole on some of the machine's cores, and on all. Servers may use all of them always."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import click

from tests.bench.contestants import whole
from tests.bench.race import THROUGHPUT
from tests.bench.site import BenchSite
from tests.bench.table import rate, table
from tests.bench.topic import fill


@dataclass(frozen=True, slots=True)
class CoresPlan:
    """`cores` of the pipeline; all of the machine's are measured besides, by turns."""

    cores: int = 1
    records: int = THROUGHPUT.records
    rounds: int = 2


@contextmanager
def _on(cores: int) -> Iterator[None]:
    """Processes that this thread starts keep to the first `cores` cores that we may use."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(ours)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def run(site: BenchSite, plan: CoresPlan) -> dict[str, Any]:
    race = replace(THROUGHPUT, records=plan.records)
    loaded = fill(site.connection, site.fresh("facts"), race.shape, records=race.records, partitions=race.partitions)
    rates: dict[int, list[float]] = {plan.cores: [], len(os.sched_getaffinity(0)): []}
    for number in range(1, plan.rounds + 1):
        for cores, found in rates.items():
            with _on(cores):
                found.append(whole(site, race, loaded).rate.per_second)
            click.echo(f"round {number}: {cores} cores: {rate(found[-1])}/s", err=True)
    return {"records": loaded.records, "rates": {str(cores): found for cores, found in rates.items()}}


def render(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{figures['records']:,} records of the workload with few streams. The pipeline, with its JVM and its Python"
        " workers, keeps to so many cores; Kafka, Postgres and Redis may use all of the machine's.",
        "",
        *table(
            ["cores", "records/s", "each round", "µs of a core per record"],
            [
                [cores, rate(median(found)), ", ".join(map(rate, found)), f"{int(cores) / median(found) * 1e6:.1f}"]
                for cores, found in figures["rates"].items()
            ],
        ),
    ]
