"""What `tidemark.append` costs a service's transaction, and how quick and how strong the relay behind it is."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
import numpy as np
import psutil
import psycopg
from confluent_kafka import Consumer, TopicPartition

from tests.bench.site import BenchSite
from tests.bench.table import table
from tidemark.app.relay import migrate
from tidemark.app.stack.postgres import postgres_program
from tidemark.common.environment import child_environment
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.sources.writer import Writer
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Rdata

WANTED = {"share": 0.75, "many": 0.5, "latency": 25.0, "drain": 50_000}
_FACT = {"total": 40, "items": ["pen", "paper"], "customer": "ada"}
_ROW = json.dumps(_FACT)
_CALL = f"tidemark.append('orders', '{_ROW}')"
_BARE = "insert into orders (id, total) values (nextval('bare_ids'), 40);"
_WAYS = {
    "bare": _BARE,
    "by_hand": f"{_BARE}\ninsert into outbox (row) values ('{_ROW}');",
    "append": f"insert into orders (id, total) values (1000000000 + {_CALL}, 40);",
    "statement": f"select {_CALL} as id \\gset\ninsert into orders (id, total) values (1000000000 + :id, 40);",
}
"""What stands between BEGIN and COMMIT of a service, in the words of pgbench."""

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """`seconds` for each rate, `rounds` of all in turns; a backlog of `backlog` facts; `per_second` for the latency."""

    seconds: float = 6.0
    rounds: int = 3
    backlog: int = 1_000_000
    per_second: int = 200


def run(site: BenchSite, plan: AppendPlan) -> dict[str, Any]:
    dsn, topic = prepared(site.database()), site.fresh("append")
    Topics(site.connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    rates: dict[str, dict[str, list[float]]] = {}
    for connections in (1, 8):
        found = rates[str(connections)] = {name: [] for name in _WAYS}
        for number in range(1, plan.rounds + 1):
            for name, statements in _WAYS.items():
                found[name].append(_rate(dsn, statements, connections, plan.seconds))
            told = ", ".join(f"{name} {of[-1]:.0f}/s" for name, of in found.items())
            click.echo(f"{connections} connections, round {number}: {told}", err=True)
    with psycopg.connect(dsn, autocommit=True) as connection:
        together = [many(connection) for _ in range(5)]
        click.echo(f"20 000 facts: {median(together):.3f} s", err=True)
        connection.execute("truncate tidemark.append_outbox")
        connection.execute(
            "update tidemark.append_progress set floor = pg_sequence_last_value('tidemark.append_ids_1')"
        )
        for _ in range(plan.backlog // 20_000):
            many(connection)
        with relay(site, dsn, topic) as process:
            drained = _drained(site, topic, plan.backlog)
            click.echo(f"backlog: {drained:.0f} facts/s", err=True)
            latencies = _latencies(site, connection, topic, plan.per_second)
            idle = _idle(process)
            click.echo(f"idle: {idle:.4f} of a core", err=True)
    p50, p99 = np.percentile(latencies, [50, 99]).tolist()
    click.echo(f"from COMMIT to a consumer: p50 {p50:.1f} ms, p99 {p99:.1f} ms", err=True)
    return {
        "seconds": plan.seconds,
        "connections": rates,
        "many": median(together),
        "backlog": plan.backlog,
        "drained": drained,
        "per_second": plan.per_second,
        "latency": {"p50": p50, "p99": p99},
        "idle": idle,
    }


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = []
    for connections, found in figures["connections"].items():
        bare, *others = (median(found[name]) for name in _WAYS)
        rows.append([connections, f"{bare:,.0f}", *(f"{each:,.0f} ({each / bare:.2f})" for each in others)])
    latency = figures["latency"]
    return [
        "A service inserts a row per transaction into its Postgres: BEGIN, INSERT, COMMIT. `tidemark.append` stands in"
        " that INSERT, or is a statement of its own, a round trip more, as `Writer.append` of Python has it. By pgbench"
        f" with prepared statements; medians of runs of {figures['seconds']:.0f} s in turns, all servers on the same"
        f" machine; in brackets the share of bare, wanted {WANTED['share']} for the second. The first is an outbox by"
        " hand: a plain INSERT of the row into a table of the service's own, without a stream ID or a relay.",
        "",
        *table(["connections", "bare, transactions/s", "an outbox by hand", "in the INSERT", "a statement more"], rows),
        "",
        f"- 20 000 facts by one `Writer.append_many`, with its COMMIT: {figures['many']:.2f} s (wanted"
        f" {WANTED['many']}).",
        f"- A backlog of {figures['backlog']:,} facts, by one relay: {figures['drained']:,.0f} facts/s until they are"
        f" in Kafka (wanted {WANTED['drain']:,.0f}).",
        f"- From COMMIT to a consumer of Kafka, at {figures['per_second']} facts/s: p50 {latency['p50']:.0f} ms, p99"
        f" {latency['p99']:.0f} ms (wanted p50 {WANTED['latency']:.0f}, to Kafka's acknowledgement).",
        f"- The relay takes {100 * figures['idle']:.1f} % of a core while nothing happens.",
    ]


def _idle(process: psutil.Process) -> float:
    """The share of a core that the relay takes while nothing happens, over a minute."""
    time.sleep(3)
    before = process.cpu_times()
    time.sleep(60)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system) / 60


def _rate(dsn: str, statements: str, connections: int, seconds: float) -> float:
    """Transactions per second."""
    command = ["-n", "-M", "prepared", "-c", str(connections), "-j", str(min(connections, 2)), "-T", f"{seconds:.0f}"]
    run = subprocess.run(
        [postgres_program("pgbench"), *command, "-f", "-", dsn],
        input=f"begin;\n{statements}\ncommit;\n",
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"^tps = ([\d.]+)", run.stdout, re.MULTILINE)
    assert found, run.stdout
    return float(found[1])


def many(connection: Connection, count: int = 20_000) -> float:
    """Append so many facts in one transaction; the seconds that it takes."""
    began = time.perf_counter()
    Writer().append_many(connection, "orders", [_FACT] * count)
    return time.perf_counter() - began


def prepared(dsn: str) -> str:
    """With the functions, a stream `orders` and a table of the service."""
    migrate(dsn, ["orders"], "forward", say=lambda _: None)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create sequence bare_ids")
        connection.execute("create table outbox (id bigint generated always as identity primary key, row jsonb)")
        connection.execute("create table orders (id bigint primary key, total integer not null)")
    return dsn


@contextmanager
def relay(site: BenchSite, dsn: str, topic: str) -> Iterator[psutil.Process]:
    changes = {
        "TIDEMARK_POSTGRES_DSN": dsn,
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": site.connection.bootstrap,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
        "TIDEMARK_LOG_LEVEL": "warning",
    }
    with subprocess.Popen([sys.executable, "-m", "tidemark", "relay"], env=child_environment(changes)) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


@contextmanager
def _consumer(site: BenchSite, topic: str, offset: int) -> Iterator[Consumer]:
    consumer = Consumer({**site.connection.client_settings(), "group.id": "bench", "fetch.wait.max.ms": "5"})
    consumer.assign([TopicPartition(topic, 0, offset)])
    try:
        yield consumer
    finally:
        consumer.close()


def _drained(site: BenchSite, topic: str, count: int) -> float:
    """Facts per second, from the first that Kafka has to the last."""
    first: tuple[float, int] | None = None
    with _consumer(site, topic, 0) as consumer:
        while True:
            end: int = consumer.get_watermark_offsets(TopicPartition(topic, 0))[1]
            if first is None and end > 1:
                first = time.perf_counter(), end
            if first is not None and end > count:
                return (end - first[1]) / (time.perf_counter() - first[0])
            time.sleep(0.02)


def _latencies(site: BenchSite, connection: Connection, topic: str, per_second: int) -> list[float]:
    """In ms, of 20 s of single facts, the first 5 s left out."""
    committed: dict[int, float] = {}
    seen: dict[int, float] = {}
    end = next(iter(Topics(site.connection).end_offsets({topic: 1}).values()))
    with _consumer(site, topic, end) as consumer:
        began = time.perf_counter()
        count = 20 * per_second
        while len(seen) < count:
            due = began + len(committed) / per_second
            if len(committed) < count and time.perf_counter() >= due:
                row = connection.execute("select tidemark.append('orders', %s)", [_ROW]).fetchone()
                assert row is not None
                committed[row[0]] = time.perf_counter()
            message = consumer.poll(0.0005)
            if message is not None and isinstance(record := records.decode(message.value()), Rdata):
                assert isinstance(record.id, int)
                seen[record.id] = time.perf_counter()
    return [1000 * (seen[id] - at) for id, at in committed.items()][5 * per_second :]
