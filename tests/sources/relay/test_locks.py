"""What a login that may only connect can do to a service's database with the advisory locks that Postgres gives it."""

import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from structlog.testing import capture_logs

from tests.sinks.reader.given import later
from tests.sources.relay.judge import Judge
from tests.sources.relay.running import Run, agrees, append, settled
from tests.waiting import eventually
from tidemark.sources.relay import queries

STREAM = queries.LOCK_KEY_BASE + 1


@pytest.fixture
def stranger(ready: str, sql: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A session of a login that has CONNECT, as everybody has, and no more."""
    sql.execute("drop role if exists connect_only")
    sql.execute("create role connect_only login password 'connect_only'")
    address = make_conninfo(ready, user="connect_only", password="connect_only", application_name="attacker")
    with psycopg.connect(address, autocommit=True) as connection:
        yield connection
    sql.execute("drop role connect_only")


@pytest.mark.parametrize(
    "call",
    [
        "append('orders', '1')",
        "append_as('web', 'orders', '1')",
        "append_many('orders', array['1'::jsonb])",
        "reserve('orders')",
    ],
)
def test_append_waits_briefly_and_names_who_has_the_lock(
    sql: psycopg.Connection, stranger: psycopg.Connection, call: str
) -> None:
    """The service's own `lock_timeout` counts. Without one an append fails after five seconds."""
    writer, other = ("web", "") if "web" in call else ("", "web")
    stranger.execute("select pg_advisory_lock(%s, hashtext(%s))", [STREAM, writer])
    named = rf"of pid {stranger.info.backend_pid} \(user connect_only, session named attacker\)"
    sql.execute("set lock_timeout = '200ms'")
    began = time.monotonic()
    with pytest.raises(psycopg.errors.LockNotAvailable, match=named):
        sql.execute(f"select tidemark.{call}".encode())
    assert time.monotonic() - began < 4
    sql.execute("set lock_timeout = 0")
    began = time.monotonic()
    with pytest.raises(psycopg.errors.LockNotAvailable, match=named):
        sql.execute(f"select tidemark.{call}".encode())
    assert 4 < time.monotonic() - began < 30
    assert sql.execute("show lock_timeout").fetchone() == ("0",)
    sql.execute("select tidemark.append_as(%s, 'orders', '1')", [other])
    stranger.execute("select pg_advisory_unlock_all()")
    sql.execute(f"select tidemark.{call}".encode())


def test_append_gets_the_lock_that_was_free_in_time(sql: psycopg.Connection, stranger: psycopg.Connection) -> None:
    """The transaction keeps the lock that it waited for until it ends."""
    stranger.execute("select pg_advisory_lock(%s, hashtext(''))", [STREAM])
    with later(1, lambda: stranger.execute("select pg_advisory_unlock_all()")), sql.transaction():
        sql.execute("select tidemark.append('orders', '1')")
        kept = sql.execute(
            "select count(*) from pg_locks where locktype = 'advisory' and classid::bigint = %s and granted"
            " and pid = pg_backend_pid()",
            [STREAM],
        ).fetchone()
        assert kept == (1,)


def test_stranger_with_the_lock_blocks_no_position(
    sql: psycopg.Connection, stranger: psycopg.Connection, run: Run, judge: Judge
) -> None:
    """A transaction that never used the sequence holds no ID, whatever locks it has."""
    with stranger.transaction():
        stranger.execute("select pg_current_xact_id()")
        for writer in ("", "web", queries.COMMON_CUT):
            stranger.execute("select pg_advisory_xact_lock_shared(%s, hashtext(%s))", [STREAM, writer])
        run()
        facts = append(sql)
        with sql.transaction(force_rollback=True):
            append(sql)  # its ID is void once nobody can hold it
        facts |= append(sql)
        eventually(lambda: settled(sql))
        assert queries.read_blockers(sql) == []
    agrees(judge, sql, facts)


def test_stranger_with_the_lock_of_common_cuts_stops_no_relay(
    sql: psycopg.Connection, stranger: psycopg.Connection, run: Run, judge: Judge
) -> None:
    """Facts of the stream and of others are sent, the log names the session, and common cuts follow when it ends."""
    sql.execute("select tidemark.create_stream('payments')")
    stranger.execute("select pg_advisory_lock(%s, hashtext(%s))", [STREAM, queries.COMMON_CUT])
    relay = run()
    with capture_logs() as logs:
        sql.execute("select tidemark.append('payments', '1')")
        last = 0
        for number in range(5):
            row = sql.execute("select tidemark.append_as(%s, 'orders', '1')", [f"w{number % 2}"]).fetchone()
            assert row is not None
            last = int(row[0])
        eventually(lambda: any("lock of the stream's common cuts" in it["event"] for it in logs))
        eventually(lambda: judge.verdict().announced == {"orders": {*range(1, 6)}, "payments": {1}})
    found = [it for it in logs if "lock of the stream's common cuts" in it["event"]]
    assert len(found) == 1
    assert f"pid {stranger.info.backend_pid} (user connect_only, session named attacker" in found[0]["blockers"]
    assert relay.metric("tidemark_relay_active") == 1
    head = "select pg_sequence_last_value('tidemark.append_ids_1')"
    assert sql.execute(head.encode()).fetchone() == (last,)
    stranger.execute("select pg_advisory_unlock_all()")
    eventually(lambda: (sql.execute(head.encode()).fetchone() or (0,))[0] > last)
    eventually(lambda: judge.verdict().effects["orders"].linear >= last)
