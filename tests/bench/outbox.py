"""How large the outbox of `tidemark.append` grows, and its relay: while facts come, and after an hour without Kafka."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import click
import psutil
import psycopg

from tests.bench import append
from tests.bench.site import BenchSite
from tests.bench.table import table
from tidemark.sources.topics import TopicPlan, Topics

_MIB = 1024 * 1024
_TOGETHER = 20
"""Facts in a transaction, while they come."""


@dataclass(frozen=True, slots=True)
class OutboxPlan:
    """`per_second` facts for `seconds`, then `backlog` while Kafka is away, then as before for `after` seconds."""

    seconds: int = 300
    after: int = 60
    per_second: int = 1000
    backlog: int = 3_600_000


@dataclass(slots=True)
class _Watched:
    """The largest memory of the relay (bytes) since the last `peak`."""

    process: psutil.Process
    halt: threading.Event = field(default_factory=threading.Event)
    _largest: int = 0

    def watch(self) -> None:
        while not self.halt.wait(0.1):
            self._largest = max(self._largest, self.process.memory_info().rss)

    def peak(self) -> int:
        found, self._largest = self._largest, 0
        return found


def run(site: BenchSite, plan: OutboxPlan) -> dict[str, Any]:
    dsn, topic = append.prepared(site.database()), site.fresh("outbox")
    Topics(site.connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    found: dict[str, Any] = asdict(plan)
    with psycopg.connect(dsn, autocommit=True) as sql, watched_relay(site, dsn, topic) as relay:
        found["sizes"] = _coming(sql, plan, plan.seconds)
        found["memory"] = relay.peak()
        site.kafka.stop()
        for _ in range(plan.backlog // 20_000):
            append.many(sql)
        found["full"], found["memory_away"] = _size(sql), relay.peak()
        site.kafka.start()
        began = time.monotonic()
        until_settled(sql)
        found["drained"] = plan.backlog / (time.monotonic() - began)
        found["emptied"], found["memory_draining"] = _size(sql), relay.peak()
        found["sizes_after"] = _coming(sql, plan, plan.after)
    return found


def render(figures: Mapping[str, Any]) -> list[str]:
    """Sizes in MiB."""

    def mib(size: float) -> str:
        return f"{size / _MIB:,.0f}"

    rows = [
        [name, *(mib(figures[key][at]) for at in (0, len(figures[key]) // 2, -1)), mib(max(figures[key]))]
        for name, key in (("at first", "sizes"), ("after the backlog", "sizes_after"))
    ]
    return [
        f"{figures['per_second']:,} facts/s for {figures['seconds']} s, and for {figures['after']} s after the backlog:"
        " the outbox with its index, in MiB.",
        "",
        *table(["", "in the beginning", "half-way", "in the end", "largest"], rows),
        "",
        f"- A backlog of {figures['backlog']:,} facts while Kafka is away: {mib(figures['full'])} MiB; drained by"
        f" {figures['drained']:,.0f} facts/s; right after it {mib(figures['emptied'])} MiB.",
        f"- The relay's memory at its largest: {mib(figures['memory'])} MiB while facts come,"
        f" {mib(figures['memory_away'])} while Kafka is away, {mib(figures['memory_draining'])} while it drains.",
    ]


@contextmanager
def watched_relay(site: BenchSite, dsn: str, topic: str) -> Iterator[_Watched]:
    with append.relay(site, dsn, topic) as process:
        watched = _Watched(process)
        thread = threading.Thread(target=watched.watch)
        thread.start()
        try:
            yield watched
        finally:
            watched.halt.set()
            thread.join()


def _coming(sql: append.Connection, plan: OutboxPlan, seconds: int) -> list[int]:
    """The size every five seconds while facts come; at the end all is in Kafka."""
    sizes = list[int]()
    began = time.monotonic()
    for sent in range(0, seconds * plan.per_second, _TOGETHER):
        time.sleep(max(0.0, began + sent / plan.per_second - time.monotonic()))
        append.many(sql, _TOGETHER)
        if sent % (5 * plan.per_second) == 0:
            sizes.append(_size(sql))
            click.echo(f"{sent} facts: {sizes[-1] / _MIB:.1f} MiB", err=True)
    until_settled(sql)
    return sizes


def _size(sql: append.Connection) -> int:
    row = sql.execute("select pg_total_relation_size('tidemark.append_outbox')").fetchone()
    assert row is not None
    return int(row[0])


def until_settled(sql: append.Connection) -> None:
    settled = "select from tidemark.append_progress where floor = pg_sequence_last_value('tidemark.append_ids_1')"
    while sql.execute(settled).fetchone() is None:
        time.sleep(0.1)
