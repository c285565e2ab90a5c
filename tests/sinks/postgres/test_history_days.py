"""Days of history that are past their time, on a real Postgres, while somebody reads all of it as a dump does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg import sql as statements
from psycopg.conninfo import make_conninfo
from structlog.testing import capture_logs

from tests.sinks.given import NOW, advance, batch, stream
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

TODAY = datetime.fromtimestamp(NOW / 1000, UTC)
DAY = 86_400_000
OLD = [NOW - days * DAY for days in (30, 20)]


def days(sql: psycopg.Connection) -> list[str]:
    """Tables of a day that is past its time, attached or not."""
    found = sql.execute(
        "select distinct right(relname, 8) from pg_class where relnamespace = 'tidemark'::regnamespace"
        " and relkind = 'r' and relname ~ '_advances_[0-9]{8}$' order by 1"
    )
    today = f"{TODAY:%Y%m%d}"
    return [day for (day,) in found if day < today]


@contextmanager
def dump(dsn: str) -> Iterator[psycopg.Connection]:
    """What pg_dump holds until it ends: every table, shared, and a snapshot."""
    with psycopg.connect(dsn, application_name="pg_dump") as reader:
        reader.execute("set transaction isolation level repeatable read")
        tables = reader.execute(
            "select relname from pg_class where relnamespace = 'tidemark'::regnamespace and relkind in ('r', 'p')"
        ).fetchall()
        names = statements.SQL(", ").join(statements.Identifier("tidemark", name) for (name,) in tables)
        reader.execute(statements.SQL("lock table {} in access share mode").format(names))
        yield reader


@pytest.fixture(params=["owner of the tables", "member of tidemark_owner"])
def tidy(request: pytest.FixtureRequest, dsn: str, sql: psycopg.Connection) -> Iterator[Postgres]:
    """Who tidies. Whatever waits longer than a second for a lock in a batch fails."""
    if request.param == "owner of the tables":
        with Postgres(PostgresConfig(dsn)) as store:
            yield store
        return
    sql.execute("create role a_member login password 'pw' in role tidemark_owner")
    try:
        with Postgres(PostgresConfig(make_conninfo(dsn, user="a_member", password="pw"))) as store:
            yield store
    finally:
        sql.execute("drop role a_member")


def test_a_dump_delays_the_end_of_a_day_and_no_batch(
    dsn: str, tidy: Postgres, sql: psycopg.Connection, lease: Lease
) -> None:
    """While a dump reads, batches of old and new streams are committed before, between and after attempts to drop what
    is past its time; the reader is named, nothing it reads is missing to it, and once it ends the days are dropped."""
    hurried = PostgresConfig(make_conninfo(dsn, options="-c lock_timeout=1s"))
    with Postgres(hurried) as store:
        for number, now in enumerate([*OLD, NOW]):
            store.apply(batch(number, stream("s", advance("w", number, number + 1)), token=lease.token, now=now))
        assert len(days(sql)) == len(OLD)
        with dump(dsn) as reader, capture_logs() as logs:
            for attempt in range(2):
                assert not tidy.apply_retention(TODAY)
                made = stream(f"s{attempt}", advance("w", 0, 1))
                store.apply(batch(10 + attempt, made, token=lease.token, now=NOW))
            assert len(days(sql)) == len(OLD)
            assert reader.execute("select count(*) from tidemark.position_advances").fetchone() == (3,)
        assert any("pg_dump (pid" in str(line.get("readers")) for line in logs)
        assert tidy.apply_retention(TODAY)
        assert days(sql) == []
        store.apply(batch(20, stream("s", advance("w", 3, 9)), token=lease.token, now=NOW))
    rows = sql.execute("select prev, id from tidemark.position_advances where stream = 's'").fetchall()
    assert rows == [(2, 3), (3, 9)]


def test_a_batch_goes_on_while_a_day_waits_to_be_dropped(
    dsn: str, tidy: Postgres, lease: Lease, sql: psycopg.Connection
) -> None:
    """At no moment of the attempt does a batch wait for a second."""
    with Postgres(PostgresConfig(make_conninfo(dsn, options="-c lock_timeout=1s"))) as store:
        store.apply(batch(0, stream("s", advance("w", 0, 1)), token=lease.token, now=OLD[0]))
        store.apply(batch(1, stream("s", advance("w", 1, 2)), token=lease.token, now=NOW))
        with dump(dsn), ThreadPoolExecutor(1) as pool:
            tidying = pool.submit(tidy.apply_retention, TODAY)
            number = 2
            while not tidying.done() or number == 2:
                store.apply(batch(number, stream("s", advance("w", number, number + 1)), token=lease.token, now=NOW))
                number += 1
            assert not tidying.result()
    assert sql.execute("select max(id) from tidemark.position_advances").fetchone() == (number,)
