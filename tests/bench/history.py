"""The history in Postgres under 10 000 busy streams: its bytes, and what it costs the transaction of a batch.

Batches are committed as the pipeline commits them, one after the other; nothing else runs. Works with any schema whose
tables of advances have `advances` in their names.
"""

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import psycopg

from tests.bench.site import BenchSite
from tests.bench.table import table
from tests.sinks.given import NOW, batch, stream
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core.effects import StreamEffects, WriterAdvance, WriterRow

BATCHES_A_SECOND = 3
_DAY = 86_400
_MOVING = {"all": 1.0, "a third": 1 / 3, "one in a thousand": 0.001}
_WRITER = "orders-7d4b9"


@dataclass(frozen=True, slots=True)
class HistoryPlan:
    streams: int = 10_000
    batches: int = 60


def _name(number: int) -> str:
    return f"orders-of-customer-{number}"


class BusyStreams:
    """One writer each. Between two batches a stream moves by a few facts; one move in thirty has an ID without one."""

    def __init__(self, streams: int) -> None:
        self._random = random.Random(1)
        self._stands = {_name(number): 0 for number in range(streams)}
        self._epochs = {name: NOW - self._random.randrange(10**9) for name in self._stands}

    def begin(self) -> list[StreamEffects]:
        """Every writer joins, some way into its stream."""
        return [self._moved(name, self._random.randrange(10**6, 10**7), unseen=0) for name in self._stands]

    def move(self, share: float) -> list[StreamEffects]:
        return [
            self._moved(name, self._random.randint(1, 9), unseen=int(self._random.random() < 1 / 30))
            for name in self._stands
            if self._random.random() < share
        ]

    def _moved(self, name: str, by: int, unseen: int) -> StreamEffects:
        prev = self._stands[name]
        self._stands[name] = prev + by
        advance = WriterAdvance(_WRITER, self._epochs[name], prev, prev + by, by - unseen, unseen, 0, 0, NOW)
        row = WriterRow(advance.writer, advance.epoch, advance.id, is_retired=False)
        return stream(name, advance, linear=advance.id, writers=[row], state=self._random.randbytes(120))


def run(site: BenchSite, plan: HistoryPlan) -> dict[str, Any]:
    return {
        "streams": plan.streams,
        "batches": plan.batches,
        "rows": {name: _written(site, plan, share) for name, share in _MOVING.items()},
    }


def _written(site: BenchSite, plan: HistoryPlan, share: float) -> dict[str, Any]:
    dsn = site.database()
    busy = BusyStreams(plan.streams)
    seconds, advances = [], 0
    with (
        Postgres(PostgresConfig(dsn)) as store,
        Lease.acquire(dsn, LeaseConfig("bench"), threading.Event()) as lease,
        psycopg.connect(dsn, autocommit=True) as sql,
    ):
        store.apply(batch(0, *busy.begin(), token=lease.token))
        size, wal = _size(sql), _wal(sql)
        for number in range(1, plan.batches + 1):
            made = batch(number, *busy.move(share), token=lease.token, now=NOW + number * 1000 // BATCHES_A_SECOND)
            advances += sum(1 for _ in made.streams())
            began = time.perf_counter()
            store.apply(made)
            seconds.append(time.perf_counter() - began)
        found = {
            "advances": advances,
            "bytes": (_size(sql) - size) / advances,
            "wal": (_wal(sql) - wal) / advances,
            "seconds": median(seconds),
        }
        known = [(_name(number), _WRITER, 0) for number in range(0, plan.streams, 100)]
        for _ in range(2):  # the first call also makes the server ready
            began = time.perf_counter()
            found["read"] = sum(map(len, store.advances_since(known, 10_000).values()))
            found["read_seconds"] = time.perf_counter() - began
    click.echo(f"{share}: {found}", err=True)
    return found


def _size(sql: psycopg.Connection) -> int:
    """Bytes of the history, with indexes and what is stored beside the rows."""
    return _number(
        sql,
        "select sum(pg_total_relation_size(c.oid)) from pg_class c"
        " where relnamespace = 'tidemark'::regnamespace and relkind = 'r' and relname like '%advances%'",
    )


def _wal(sql: psycopg.Connection) -> int:
    return _number(sql, "select pg_current_wal_lsn() - '0/0'")


def _number(sql: psycopg.Connection, query: str) -> int:
    row = sql.execute(query.encode()).fetchone()
    return int(row[0]) if row else 0


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = figures["rows"]
    moves = figures["streams"] * BATCHES_A_SECOND * _DAY
    return [
        f"{figures['streams']:,} streams with a writer each; {figures['batches']} batches, each the transaction of the"
        " pipeline, in which a part of the streams moves. Bytes are those of the history's tables and indexes; WAL is"
        " that of the whole transaction. Reading is the chain of one writer, from its newest advance back.",
        "",
        *table(
            ["streams that move in a batch", "bytes an advance", "WAL an advance", "transaction", "reading an advance"],
            [
                [
                    name,
                    f"{row['bytes']:,.0f}",
                    f"{row['wal']:,.0f}",
                    f"{row['seconds'] * 1000:,.1f} ms",
                    f"{row['read_seconds'] / max(1, row['read']) * 1e6:,.0f} µs",
                ]
                for name, row in rows.items()
            ],
        ),
        "",
        f"So a day in which all of {figures['streams']:,} streams move in each of {BATCHES_A_SECOND} batches a second"
        f" ({moves / 1e9:.1f} billion advances) takes {moves * rows['all']['bytes'] / 1e9:,.0f} GB of history:"
        f" extrapolated from {rows['all']['advances']:,} advances.",
    ]
