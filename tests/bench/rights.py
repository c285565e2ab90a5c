"""What logins with few rights do to batches, `tidemark.append` and the relay: advisory locks, and too large facts."""

import resource
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import yaml
from psycopg.conninfo import make_conninfo

from tests.bench import append, outbox
from tests.bench.site import BenchSite
from tests.bench.table import mib, table
from tests.sinks import given
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sources.relay.queries import COMMON_CUT, LOCK_KEY_BASE
from tidemark.sources.topics import TopicPlan, Topics

_SECONDS = 10.0
_PAUSE = 0.01
_DAY = 86_400_000  # ms
_DAYS = 1000  # more than begin in one measurement
_ROW = "x" * 700_000
_REFUSED, _TAKEN = 130, 23  # rows of 700 kB in a fact: more than a fact may have, and as many as it may
_FACTS = 10
_LARGE = "select tidemark.append('orders', variadic array(select to_jsonb(%s::text) from generate_series(1, %s)))"


@contextmanager
def soft_limit(files: int) -> Iterator[None]:
    """Processes that are started in the block begin with this soft limit of open files; 0: with ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files or soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run(site: BenchSite) -> dict[str, Any]:
    tidemark = site.database()
    dsn, topic = append.prepared(site.database()), site.fresh("rights")
    Topics(site.connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    with psycopg.connect(dsn, autocommit=True) as sql, outbox.watched_relay(site, dsn, topic) as relay:
        found: dict[str, Any] = {"append": _appended(sql)}
        sql.execute("drop role if exists connect_only")
        sql.execute("create role connect_only login password 'connect_only'")
        found["batches"] = _committed(tidemark, "before")
        with _connected(tidemark) as attacker:
            attacker.execute("select pg_advisory_lock(hashtextextended('tidemark.history', 0))")
            found["batches_attacked"] = _committed(tidemark, "during", _DAYS)
        with _locking(dsn):
            found["attacked"] = _appended(sql)
            found["fails_after"] = _fails_after(sql, "select tidemark.append_as('locked', 'orders', '1')", [])
        found["refused_after"] = _fails_after(sql, _LARGE, [_ROW, _REFUSED])
        found["relay_before"] = relay.peak()
        site.kafka.stop()
        for _ in range(_FACTS):
            sql.execute(_LARGE.encode(), [_ROW, _TAKEN])
        site.kafka.start()
        outbox.until_settled(sql)
        found["relay"] = relay.peak()
    values = yaml.safe_load(Path("helm/tidemark/values.yaml").read_text())
    found["limit"] = values["relay"]["defaults"]["resources"]["limits"]["memory"]
    return found


@contextmanager
def _locking(dsn: str) -> Iterator[None]:
    """A login with CONNECT alone holds the locks of a writer and of common cuts, and shares that of the database."""
    with _connected(dsn) as connection:
        connection.execute("select pg_current_xact_id()")
        connection.execute("select pg_advisory_xact_lock_shared(%s, hashtext(''))", [LOCK_KEY_BASE + 1])
        for writer in ("locked", COMMON_CUT):
            connection.execute("select pg_advisory_xact_lock(%s, hashtext(%s))", [LOCK_KEY_BASE + 1, writer])
        yield


def _connected(dsn: str) -> append.Connection:
    return psycopg.connect(make_conninfo(dsn, user="connect_only", password="connect_only"))


def _committed(dsn: str, name: str, day: int = 0) -> dict[str, float]:
    """Milliseconds of the pipeline's transactions, each of which moves a stream; one in a hundred begins a day of the
    history, from `day` on."""
    took = list[float]()
    with Postgres(PostgresConfig(dsn)) as store, Lease.acquire(dsn, LeaseConfig("bench"), threading.Event()) as lease:
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            number = len(took)
            moved = given.stream(name, given.advance("shop", number, number + 1))
            now = given.NOW + (day + number // 100) * _DAY
            began = time.monotonic()
            store.apply(given.batch(number, moved, token=lease.token, query=name, now=now))
            took.append(1000 * (time.monotonic() - began))
            time.sleep(_PAUSE)
    return _percentiles(took)


def _percentiles(took: list[float]) -> dict[str, float]:
    return {"50": statistics.median(took), "99": statistics.quantiles(took, n=100)[98], "100": max(took)}


def _appended(sql: append.Connection) -> dict[str, float]:
    """Milliseconds of a service's appends, and of the time until all of them are in Kafka at the end."""
    took, over = list[float](), threading.Event()
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        began = time.monotonic()
        sql.execute("select tidemark.append('orders', '1')")
        took.append(1000 * (time.monotonic() - began))
        over.wait(_PAUSE)
    began = time.monotonic()
    outbox.until_settled(sql)
    settled = 1000 * (time.monotonic() - began)
    return _percentiles(took) | {"settled": settled}


def _fails_after(sql: append.Connection, call: str, arguments: list[Any]) -> float:
    """Seconds until the call fails."""
    began = time.monotonic()
    try:
        sql.execute(call.encode(), arguments)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.ProgramLimitExceeded):
        return time.monotonic() - began
    raise AssertionError(call)


def render(figures: Mapping[str, Any]) -> list[str]:
    before, during = figures["append"], figures["attacked"]
    return [
        "A login with CONNECT alone holds the advisory lock of the history in Tidemark's database, while the"
        " pipeline's transactions move a stream, and one in a hundred begins a day of the history. In a service's"
        " database it holds the advisory locks of a writer and of common cuts, and shares that of the database itself"
        " in a transaction of its own, while other writers append:",
        "",
        *table(
            ["", "p50", "p99", "highest"],
            [
                [name, *(f"{figures[key][of]:,.1f} ms" for of in ("50", "99", "100"))]
                for name, key in (
                    ("a transaction of the pipeline, before", "batches"),
                    ("during the attack", "batches_attacked"),
                    ("an append, before", "append"),
                    ("during the attack", "attacked"),
                )
            ],
        ),
        "",
        f"After the last append, all facts were in Kafka within {before['settled']:,.0f} ms before the attack, and"
        f" within {during['settled']:,.0f} ms during it. An append in the name of the locked writer fails after"
        f" {figures['fails_after']:.1f} s, and the error names the session. A fact of {_REFUSED} rows of 700 kB is"
        f" refused after {figures['refused_after']:.1f} s. {_FACTS} facts of {_TAKEN} such rows, which is the most that"
        " a fact may have, come while Kafka is away, and are sent after that: the relay takes at most"
        f" {mib(figures['relay'])}, and {mib(figures['relay_before'])} before. The chart's limit is"
        f" {figures['limit']}.",
    ]
