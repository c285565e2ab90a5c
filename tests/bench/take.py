"""How soon a reader in SQL has a fact after its commit, what it costs to keep the positions, and what partitions bring.

Without Kafka, Spark and Redis: writers, positions and readers are in one database.
"""

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import psycopg

from tests.bench.table import table, verdict
from tidemark.app.relay import migrate
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import free_port
from tidemark.sources.relay.local_positions import LocalPositions
from tidemark.sources.relay.queries import session_of

_WANTED_P50, _WANTED_IDLE = 30.0, 0.01
_PARTITIONS = (1, 2, 4)
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class TakePlan:
    """`rate` facts a second for `seconds`; then as long without any; then `rows` rows are read with partitions."""

    rate: int = 200
    seconds: float = 20.0
    rows: int = 200_000


def run(plan: TakePlan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        server = PostgresServer(Home(Path(directory)), free_port())
        server.start()
        try:
            dsn = server.dsn()
            migrate(dsn, ["orders"], "forward", say=lambda _: None)
            return {"rate": plan.rate, "seconds": plan.seconds, "rows": plan.rows} | _measure(plan, dsn)
        finally:
            server.stop()


def _measure(plan: TakePlan, dsn: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with _process(_keep, dsn) as keeper:
        _append(dsn, plan.rate, 2.0, {})  # warms up
        _await_positions(dsn)
        committed, taken = dict[int, float](), dict[int, float]()
        halt = threading.Event()
        reader = threading.Thread(target=_take, args=(dsn, halt, taken))
        reader.start()
        began, cores = time.monotonic(), _cores(keeper, dsn)
        _append(dsn, plan.rate, plan.seconds, committed)
        figures["busy"] = (_cores(keeper, dsn) - cores) / (time.monotonic() - began)
        time.sleep(1.0)
        halt.set()
        reader.join()
        assert taken.keys() >= committed.keys(), "the reader has not taken every fact"
        milliseconds = [1000 * (taken[id] - at) for id, at in committed.items()]
        figures["p50"], figures["p99"] = (float(it) for it in np.percentile(milliseconds, (50, 99)))
        time.sleep(2.0)
        began, cores = time.monotonic(), _cores(keeper, dsn)
        time.sleep(plan.seconds)
        figures["idle"] = (_cores(keeper, dsn) - cores) / (time.monotonic() - began)
    figures["partitions"] = {str(count): _drain(plan, dsn, count) for count in _PARTITIONS}
    click.echo(f"take: {figures}", err=True)
    return figures


def _keep(dsn: str) -> None:
    LocalPositions(session_of(dsn, "tidemark relay positions"), threading.Event()).run()


def _await_positions(dsn: str) -> None:
    """Return once the keeper works."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(600):
            if connection.execute("select 1 from tidemark_reader.positions where linear > 0").fetchone():
                return
            time.sleep(0.1)
    raise AssertionError("nobody keeps the positions")


@contextmanager
def _process(target: Any, *arguments: object) -> Iterator[psutil.Process]:
    process = _SPAWN.Process(target=target, args=arguments)
    process.start()
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join()


def _cores(keeper: psutil.Process, dsn: str) -> float:
    """CPU seconds of the keeper, and of its session in Postgres."""
    with psycopg.connect(dsn) as connection:
        query = "select pid from pg_stat_activity where application_name = 'tidemark relay positions'"
        sessions = [psutil.Process(pid) for (pid,) in connection.execute(query).fetchall()]
    return float(sum(sum(process.cpu_times()[:2]) for process in [keeper, *sessions]))


def _append(dsn: str, rate: int, seconds: float, committed: dict[int, float]) -> None:
    """Facts at random moments; by ID, when the commit of each had returned."""
    pauses = np.random.default_rng(1).exponential(1 / rate, int(rate * seconds))
    with psycopg.connect(dsn, autocommit=True) as connection:
        due = time.monotonic()
        for pause in pauses:
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
            row = connection.execute("select tidemark.append('orders', '{}')").fetchone()
            assert row is not None
            committed[row[0]] = time.monotonic()


def _take(dsn: str, halt: threading.Event, taken: dict[int, float]) -> None:
    """The loop of docs/how-to/read-in-any-language.md; by ID, when it was taken."""
    with psycopg.connect(dsn, autocommit=True) as woken, psycopg.connect(dsn) as connection:
        woken.execute("listen tidemark_orders")
        while not halt.is_set():
            row = connection.execute("select low, high from tidemark_reader.take('orders', 'bench')").fetchone()
            now = time.monotonic()
            connection.commit()
            if row is None:
                list(woken.notifies(timeout=0.5, stop_after=1))
            else:
                taken.update(dict.fromkeys(range(row[0] + 1, row[1] + 1), now))


def _drain(plan: TakePlan, dsn: str, partitions: int) -> float:
    """Rows a second, of a table that is there when `partitions` processes begin."""
    stream = f"filled_{partitions}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            f"create table {stream} as select id as stream_id, 'customer ' || id % 997 as customer,"
            f" repeat('x', 100) as text from generate_series(1, {plan.rows}) as id".encode()
        )
        connection.execute(f"alter table {stream} add primary key (stream_id)".encode())
        connection.execute("select tidemark_reader.publish('published', array[%s], array[%s])", [stream, plan.rows])
    barrier, counts = _SPAWN.Barrier(partitions + 1), _SPAWN.Queue()
    readers = [
        _SPAWN.Process(target=_drain_partition, args=(dsn, stream, number, partitions, barrier, counts))
        for number in range(partitions)
    ]
    for reader in readers:
        reader.start()
    barrier.wait(120)
    began = time.monotonic()
    rows: int = sum(counts.get(timeout=600) for _ in readers)
    seconds = time.monotonic() - began
    for reader in readers:
        reader.join()
    assert rows == plan.rows
    return rows / seconds


def _drain_partition(dsn: str, stream: str, number: int, partitions: int, barrier: Any, counts: Any) -> None:
    rows = 0
    with psycopg.connect(dsn) as connection:
        barrier.wait(120)
        while True:
            taken = connection.execute(
                "select low, high from tidemark_reader.take(%s, 'bench', 5000, partition => %s, partitions => %s)",
                [stream, number, partitions],
            ).fetchone()
            if taken is None:
                break
            query = f"select * from {stream} where stream_id > %s and stream_id <= %s"
            if partitions > 1:
                query += f" and tidemark_reader.partition_of(customer, {partitions}) = {number}"
            rows += len(connection.execute(f"{query} order by stream_id".encode(), taken).fetchall())
            connection.commit()
    counts.put(rows)


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = [[count, f"{rate:,.0f}"] for count, rate in figures["partitions"].items()]
    return [
        f"{figures['rate']} facts a second at random moments by `tidemark.append`, for {figures['seconds']:g} s, and"
        " one reader in the same database that calls `tidemark_reader.take` when it is notified. From the return of"
        f" the COMMIT to the answer of `take`: p50 {verdict(figures['p50'], _WANTED_P50, ' ms')}, p99"
        f" {figures['p99']:.0f} ms. The process that keeps the positions takes {figures['busy']:.3f} cores meanwhile,"
        f" and without facts {verdict(figures['idle'], _WANTED_IDLE)} cores, its session in Postgres included.",
        "",
        f"{figures['rows']:,} rows that are there already, 5,000 IDs a call, a process for each partition. Each reads"
        " the rows of its partition and has no other effects:",
        "",
        *table(["partitions", "rows/s"], rows),
    ]
