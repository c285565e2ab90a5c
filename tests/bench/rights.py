"""What logins with few rights do to `tidemark.append` and to the relay: advisory locks, and too large facts."""

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
from tidemark.sources.relay.queries import BEAT, LOCK
from tidemark.sources.topics import TopicPlan, Topics

_SECONDS = 10.0
_PAUSE = 0.01
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
    dsn, topic = append.prepared(site.database()), site.fresh("rights")
    Topics(site.connection).create_missing([TopicPlan(topic, 1, 3_600_000)])
    with psycopg.connect(dsn, autocommit=True) as sql, outbox.watched_relay(site, dsn, topic) as relay:
        found: dict[str, Any] = {"append": _appended(sql)}
        sql.execute("drop role if exists connect_only")
        sql.execute("create role connect_only login password 'connect_only'")
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
    """A login with CONNECT alone holds the locks of a writer and of heartbeats, and shares that of the database."""
    address = make_conninfo(dsn, user="connect_only", password="connect_only")
    with psycopg.connect(address) as connection:
        connection.execute("select pg_current_xact_id()")
        connection.execute("select pg_advisory_xact_lock_shared(%s, hashtext(''))", [LOCK + 1])
        for writer in ("locked", BEAT):
            connection.execute("select pg_advisory_xact_lock(%s, hashtext(%s))", [LOCK + 1, writer])
        yield


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
    return {"50": statistics.median(took), "99": statistics.quantiles(took, n=100)[98], "settled": settled}


def _fails_after(sql: append.Connection, call: str, arguments: list[Any]) -> float:
    """Seconds until the call fails."""
    began = time.monotonic()
    try:
        sql.execute(call.encode(), arguments)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.ProgramLimitExceeded):
        return time.monotonic() - began
    raise AssertionError(call)


def render(figures: Mapping[str, Any]) -> list[str]:
    return [
        "A login with CONNECT alone to a service's database holds the advisory locks of a writer and of heartbeats, and"
        " shares that of the database itself in a transaction of its own. The database's appends meanwhile:",
        "",
        *table(
            ["", "an append, p50", "p99", "until all are in Kafka, at the end"],
            [
                [name, *(f"{figures[key][of]:,.1f} ms" for of in ("50", "99", "settled"))]
                for name, key in (("in peace", "append"), ("under attack", "attacked"))
            ],
        ),
        "",
        f"An append in the name of the locked writer fails after {figures['fails_after']:.1f} s, and the error names"
        f" the session. A fact of {_REFUSED} rows of 700 kB is refused after {figures['refused_after']:.1f} s."
        f" {_FACTS} facts of {_TAKEN} such rows, which is the most that a fact may have, come while Kafka is away, and"
        f" are sent after that: the relay takes at most {mib(figures['relay'])}, and {mib(figures['relay_before'])}"
        f" before. The chart's limit is {figures['limit']}.",
    ]
