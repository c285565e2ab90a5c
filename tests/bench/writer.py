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

from sources.topics import TopicPlan, Topics
from sources.writer import Stream, Writer, schema, sequences
from sources.writer.session import Session
from tests.bench.site import Site
from tests.bench.table import table

WANTED = 0.6
_SEQUENCE = "orders_id_seq"
_ROW = {"total": 40, "items": ["pen", "paper"], "customer": "ada"}
_INSERT = "insert into orders (id, total) values (%s, 40)"
_BARE = f"insert into orders (id, total) values (nextval('{_SEQUENCE}'), 40)"

Connection = psycopg.Connection[Any]
Transact = Callable[[Connection], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Each measure runs `seconds`; `rounds` of both in turns, so that a noisy moment hits both."""

    seconds: float = 6.0
    rounds: int = 3


def run(site: Site, plan: Plan) -> dict[str, Any]:
    """Fails where the topic lacks a fact in the end."""
    dsn, topic = _prepared(site.database()), site.fresh("writer")
    Topics(site.connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    found: dict[str, dict[str, list[float]]] = {}
    with Writer(dsn, site.connection, instance="bench", streams=[Stream("orders", _SEQUENCE)], topic=topic) as writer:

        def with_library(connection: Connection) -> None:
            with writer.transaction(connection) as facts:
                connection.execute(_INSERT, [facts.append("orders", _ROW)])

        for threads in (1, 8):
            rates = found[str(threads)] = {"bare": [], "library": []}
            for number in range(1, plan.rounds + 1):
                for name, transact in (("bare", _bare), ("library", with_library)):
                    rates[name].append(_rate(dsn, transact, threads, plan.seconds))
                click.echo(
                    f"{threads} threads, round {number}: "
                    + ", ".join(f"{name} {of[-1]:.0f}/s" for name, of in rates.items()),
                    err=True,
                )
    return {"seconds": plan.seconds, "threads": found}


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for threads, rates in figures["threads"].items():
        bare, library = median(rates["bare"]), median(rates["library"])
        ratio = library / bare
        rows.append([threads, f"{bare:,.0f}", f"{library:,.0f}", f"{ratio:.2f}{'' if ratio >= WANTED else ' **low**'}"])
    return [
        "A service inserts one row per transaction into its Postgres: BEGIN, INSERT with `nextval`, COMMIT, from threads of"
        " one process with a connection each; and the same with the writer's library, which fences, keeps the outbox and"
        f" sends the facts to Kafka meanwhile. Medians of runs of {figures['seconds']:.0f} s in turns, all servers on the"
        f" same machine. Wanted: {WANTED} of bare.",
        "",
        *table(["threads", "bare, transactions/s", "with the library", "of bare"], rows),
    ]


def _bare(connection: Connection) -> None:
    with connection.transaction():
        connection.execute(_BARE)


def _prepared(dsn: str) -> str:
    session = Session(dsn, "bench")
    schema.migrate(session)
    with session.use() as connection:
        sequences.create(connection, _SEQUENCE, 1)
        connection.execute("create table orders (id bigint primary key, total integer not null)")
    session.close()
    return dsn


def _rate(dsn: str, transact: Transact, threads: int, seconds: float) -> float:
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
