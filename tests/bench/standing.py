"""What a stream has and a batch does not touch: retired writers, pending spans, writers that never joined.

One record a batch, through the state machine in this process and the transaction in Postgres; and many JOINs and
RETIREs in one batch, through the state machine.
"""

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
from tests.streaming.builders import Record, Shard, join, packets, rdata, retire, sent
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.streaming.core.effects import ShardEffects

_PENDING, _RETIRED = "10 000 spans of another writer pending", "9 999 retired writers"
_STRANGERS = 900


@dataclass(frozen=True, slots=True)
class StandingPlan:
    batches: int = 100
    markers: int = 8000


def run(site: BenchSite, plan: StandingPlan) -> dict[str, Any]:
    names = [f"worker-{number:05}" for number in range(9_999)]
    crowds: dict[str, list[list[Record]]] = {
        "nothing": [],
        _RETIRED: [[join(name, 0) for name in names], [retire(name, 0) for name in names]],
        _PENDING: [[join("slow", 0)], [rdata("slow", id, id - 1, epoch=1) for id in range(2, 20_002, 2)]],
    }
    return {
        "rows": {name: _one_by_one(site, plan, crowd) for name, crowd in crowds.items()},
        "markers": {
            str(count): {"join": _markers(count, retiring=False), "retire": _markers(count, retiring=True)}
            for count in (plan.markers // 4, plan.markers)
        },
    }


def _one_by_one(site: BenchSite, plan: StandingPlan, crowd: list[list[Record]]) -> dict[str, float]:
    dsn, shard = site.database(), Shard()
    with (
        Postgres(PostgresConfig(dsn)) as store,
        Lease.acquire(dsn, LeaseConfig("bench"), threading.Event()) as lease,
        psycopg.connect(dsn, autocommit=True) as sql,
    ):
        for number, records in enumerate([*crowd, [join("busy", 0)]]):
            store.apply(Batch("bench", number, lease.token, [_fed(shard, records)[0]]))
        cpu, seconds, wal = [], [], []
        for id in range(1, plan.batches + 1):
            done, took = _fed(shard, [rdata("busy", id, epoch=1)])
            before, began = _wal(sql), time.perf_counter()
            store.apply(Batch("bench", len(crowd) + id, lease.token, [done]))
            seconds.append(time.perf_counter() - began)
            cpu.append(took)
            wal.append(_wal(sql) - before)
    found = {"cpu": median(cpu), "seconds": median(seconds), "wal": median(wal)}
    click.echo(f"{found}", err=True)
    return found


def _markers(count: int, *, retiring: bool) -> float:
    """CPU seconds of a batch of that many JOINs, or of RETIREs after them, while strangers are held."""
    shard, names = Shard(), [f"worker-{number:05}" for number in range(count)]
    _fed(shard, [join("busy", 0), *(rdata(f"stranger-{number}", number + 1, epoch=1) for number in range(_STRANGERS))])
    _, took = _fed(shard, [join(name, 0) for name in names])
    if retiring:
        _, took = _fed(shard, [retire(name, 0) for name in names])
    return took


def _fed(shard: Shard, records: list[Record]) -> tuple[ShardEffects, float]:
    """The effects of a batch, and the CPU seconds that they took."""
    batch = packets(sent(records, shard.next_offset))
    shard.next_offset += len(records)
    began = time.process_time()
    done = shard.feed_packets(batch)
    return done, time.process_time() - began


def _wal(sql: psycopg.Connection) -> int:
    row = sql.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
    return int(row[0]) if row else 0


def render(figures: Mapping[str, Any]) -> list[str]:
    return [
        "One record of another writer in each batch, and what the stream has beside; medians.",
        "",
        *table(
            ["beside", "state machine, CPU", "transaction", "WAL"],
            [
                [
                    name,
                    f"{row['cpu'] * 1000:.2f} ms",
                    f"{row['seconds'] * 1000:.2f} ms",
                    f"{row['wal'] / 1024:,.1f} KiB",
                ]
                for name, row in figures["rows"].items()
            ],
        ),
        "",
        f"JOINs and RETIREs of one stream in one batch, with buffered records of {_STRANGERS} writers that never"
        " joined:",
        "",
        *table(
            ["records", "a JOIN, CPU", "a RETIRE, CPU"],
            [
                [f"{int(count):,}", *(f"{row[kind] / int(count) * 1e6:,.0f} µs" for kind in ("join", "retire"))]
                for count, row in figures["markers"].items()
            ],
        ),
    ]
