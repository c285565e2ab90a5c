"""What the writer's library costs a service: its transactions per second, beside the same without the library."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import psycopg

from tests.bench.site import BenchSite
from tests.bench.table import table
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.sources.writer import Stream, Writer, sequences
from tidemark.sources.writer.database import SCHEMA, session_of
from tidemark.streaming.direction import Direction

WANTED = 0.6
_SEQUENCE = "orders_id_seq"
_ROW = {"total": 40, "items": ["pen", "paper"], "customer": "ada"}
_INSERT = "insert into orders (id, total) values (%(id)s, %(total)s)"
_INSERT_BARE = f"insert into orders (id, total) values (nextval('{_SEQUENCE}'), %(total)s)"
_BARE, _WRITE, _APPEND = "bare", "write", "append"

Connection = psycopg.Connection[Any]
Transact = Callable[[Connection], None]


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """Each measure runs `seconds`; `rounds` of both in turns, so that a noisy moment hits both."""

    seconds: float = 6.0
    rounds: int = 3


def run(site: BenchSite, plan: WriterPlan) -> dict[str, Any]:
    dsn, topic = _prepared(site.database()), site.fresh("writer")
    Topics(site.connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    found: dict[str, dict[str, list[float]]] = {}
    with Writer(dsn, site.connection, instance="bench", streams=[Stream("orders", _SEQUENCE)], topic=topic) as writer:

        def write(connection: Connection) -> None:
            with writer.transaction(connection) as facts:
                facts.write("orders", _ROW, _INSERT, {"total": 40})

        def append(connection: Connection) -> None:
            with writer.transaction(connection) as facts:
                connection.execute(_INSERT, {"id": facts.append("orders", _ROW), "total": 40})

        ways: dict[str, Transact] = {_BARE: _bare, _WRITE: write, _APPEND: append}
        for threads in (1, 8):
            rates = found[str(threads)] = {name: [] for name in ways}
            for number in range(1, plan.rounds + 1):
                for name, transact in ways.items():
                    rates[name].append(rate(dsn, transact, threads, plan.seconds))
                told = ", ".join(f"{name} {of[-1]:.0f}/s" for name, of in rates.items())
                click.echo(f"{threads} threads, round {number}: {told}", err=True)
    return {"seconds": plan.seconds, "threads": found}


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for threads, rates in figures["threads"].items():
        bare, *others = (median(rates[name]) for name in (_BARE, _WRITE, _APPEND))
        rows.append([threads, f"{bare:,.0f}", *(f"{rate:,.0f} ({rate / bare:.2f})" for rate in others)])
    return [
        "A service inserts one row per transaction into its Postgres, from threads of one process with a connection"
        " each: BEGIN, INSERT with `nextval`, COMMIT. With the writer's library each also passes the fence and leaves"
        " its fact in the outbox, from which it goes to Kafka meanwhile: `facts.write` does that in the INSERT's own"
        f" round trip, `facts.append` in one more. Medians of runs of {figures['seconds']:.0f} s in turns, all servers"
        f" on the same machine; in brackets the share of bare, wanted {WANTED}.",
        "",
        *table(["threads", "bare, transactions/s", "with `write`", "with `append`"], rows),
    ]


def _bare(connection: Connection) -> None:
    with connection.transaction():
        connection.execute(_INSERT_BARE, {"total": 40})


def _prepared(dsn: str) -> str:
    session = session_of(dsn, "bench")
    SCHEMA.migrate(session)
    with session.use() as connection:
        sequences.create(connection, _SEQUENCE, Direction.FORWARD)
        connection.execute("create table orders (id bigint primary key, total integer not null)")
    session.close()
    return dsn


def rate(dsn: str, transact: Transact, threads: int, seconds: float) -> float:
    """Transactions per second, after a second that does not count."""
    counts = [0] * threads
    ready, over = threading.Barrier(threads + 1), threading.Event()
    with ExitStack() as stack:
        connections = [stack.enter_context(psycopg.connect(dsn)) for _ in range(threads)]

        def work(number: int) -> None:
            ready.wait()
            while not over.is_set():
                transact(connections[number])
                counts[number] += 1

        workers = [threading.Thread(target=work, args=[number]) for number in range(threads)]
        for worker in workers:
            worker.start()
        ready.wait()
        time.sleep(1)
        began, before = time.perf_counter(), sum(counts)
        time.sleep(seconds)
        rate = (sum(counts) - before) / (time.perf_counter() - began)
        over.set()
        for worker in workers:
            worker.join()
    return rate
