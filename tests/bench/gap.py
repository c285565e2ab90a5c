"""One gap with very many pending IDs behind it: what it costs in state and in the time of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import click

from tests.bench.rate import RateMark
from tests.bench.site import BenchSite
from tests.bench.table import table, verdict
from tests.bench.topic import Loaded, Sender, fill
from tests.bench.whole import Whole, pipeline
from tests.bench.workload import Completions, Shape

WANTED_STATE = 1024
WANTED_RATIO = 1.3
_SHAPE = Shape(streams=1, writers=1)
_OPEN, _CLOSED = "with the gap", "without"


@dataclass(frozen=True, slots=True)
class GapPlan:
    """`batches` of `batch` records count, once `pending` records stand behind the gap."""

    pending: int = 1_000_000
    batch: int = 250_000
    batches: int = 8
    rounds: int = 3

    @property
    def records(self) -> int:
        return self.pending + self.batches * self.batch


@dataclass(slots=True)
class Withheld:
    """Leaves out the first edge of the one writer, as if its transaction had hung."""

    edges: Completions | None = field(default=None)

    def __call__(self, edges: Completions) -> Completions:
        first = edges.prev == 0
        if first.any():
            self.edges = edges.pick(first)
        return edges.pick(~first)


def run(site: BenchSite, plan: GapPlan) -> dict[str, Any]:
    withheld = Withheld()
    seconds: dict[str, list[float]] = {_OPEN: [], _CLOSED: []}
    closed = _load(site, plan, lambda edges: edges)
    state_bytes = 0
    for number in range(1, plan.rounds + 1):
        # Closing the gap adds the missing record to the topic, so each round has its own.
        opened = _load(site, plan, withheld)
        with _running(site, plan, opened) as running:
            running.await_records(opened.records, seconds=300)
            seconds[_OPEN] += _batch_seconds(running.marks(), plan)
            state_bytes = max(state_bytes, running.state_bytes(_SHAPE.stream(0)))
            _close(site, running, opened, withheld)
        with _running(site, plan, closed) as running:
            running.await_records(closed.records, seconds=300)
            seconds[_CLOSED] += _batch_seconds(running.marks(), plan)
            running.await_positions(closed.play)
        click.echo(
            f"round {number}: " + ", ".join(f"{how} {median(found):.2f} s" for how, found in seconds.items()), err=True
        )
    return {"pending": plan.pending, "batch": plan.batch, "state_bytes": state_bytes, "seconds": seconds}


def render(figures: Mapping[str, Any]) -> list[str]:
    seconds: dict[str, list[float]] = figures["seconds"]
    ratio = median(seconds[_OPEN]) / median(seconds[_CLOSED])
    return [
        f"One stream, one writer, its first ID missing; batches of {figures['batch']:,} records, timed once"
        f" {figures['pending']:,} are pending, against the same records without the gap. When the missing record comes"
        " at last, the position must jump to the end in Redis; it did.",
        "",
        *table(
            ["", "median batch", "lowest", "highest", "batches"],
            [
                [how, *(f"{of(found):.2f} s" for of in (median, min, max)), str(len(found))]
                for how, found in seconds.items()
            ],
        ),
        "",
        f"Batch time with the gap, as a multiple: {verdict(ratio, WANTED_RATIO)}."
        f" The stream's whole state: {verdict(figures['state_bytes'], WANTED_STATE, ' bytes')}.",
    ]


def _load(site: BenchSite, plan: GapPlan, keep: Callable[[Completions], Completions]) -> Loaded:
    return fill(site.connection, site.fresh("gap"), _SHAPE, records=plan.records, partitions=1, keep=keep)


def _running(site: BenchSite, plan: GapPlan, loaded: Loaded) -> Any:
    return pipeline(site, loaded.name, loaded.partitions, {"TIDEMARK_MAX_RECORDS_PER_BATCH": str(plan.batch)})


def _batch_seconds(marks: list[RateMark], plan: GapPlan) -> list[float]:
    """Of the batches that began with enough pending; not of the crumbs at the end of the topic."""
    return [
        after.at - before.at
        for before, after in pairwise(marks)
        if before.records >= plan.pending and after.records - before.records >= plan.batch // 2
    ]


def _close(site: BenchSite, running: Whole, opened: Loaded, withheld: Withheld) -> None:
    if withheld.edges is None:
        raise AssertionError("the workload has no first edge")
    sender = Sender(site.connection, opened.name, opened.partitions, _SHAPE)
    sender.send(withheld.edges)
    sender.flush()
    running.await_positions(opened.play)
