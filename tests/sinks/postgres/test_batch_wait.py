"""What others can do to a batch with locks, and what is said of a batch that waits."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fix_servers import own_postgres
from tests.fix_sinks import LEASE
from tests.sinks.given import NOW, advance, batch, stream
from tests.waiting import eventually
from tidemark.app.diagnosis.health import PipelineCondition
from tidemark.common.errors import Unavailable
from tidemark.sinks.background import BatchWaitMonitor
from tidemark.sinks.postgres.database import migrate
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

DAY = 86_400_000


@pytest.fixture
def stranger_dsn(dsn: str, sql: psycopg.Connection) -> str:
    """Of a login that has CONNECT, as everybody has, and no more."""
    sql.execute("drop role if exists connect_only")
    sql.execute("create role connect_only login password 'connect_only'")
    return make_conninfo(dsn, user="connect_only", password="connect_only")


@contextmanager
def connected(dsn: str, application: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(make_conninfo(dsn, application_name=application), autocommit=True) as connection:
        yield connection


@contextmanager
def committing(store: Postgres, lease: Lease, number: int, now: int = NOW) -> Iterator[threading.Thread]:
    """A batch in a thread, tried again as the publisher does; it has ended at the end of the block."""

    def run() -> None:
        while True:
            try:
                store.apply(batch(number, stream("s", advance("w", number - 1, number)), token=lease.token, now=now))
            except Unavailable:
                time.sleep(0.1)
            else:
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def problems(store: Postgres) -> list[str]:
    """What `tidemark status` says."""
    return PipelineCondition(store.conditions.current(), None, None).problems()


def test_login_with_connect_alone_stops_no_position(
    store: Postgres, lease: Lease, stranger_dsn: str, sql: psycopg.Connection
) -> None:
    """Case `lock`: it holds every advisory lock that the schema has ever used; batches of known and new days go on."""
    with connected(stranger_dsn, "attacker") as other:
        other.execute("select pg_advisory_lock(hashtextextended('tidemark.history', 0))")
        for number in range(1, 4):
            with committing(store, lease, number, NOW + number // 2 * DAY) as thread:
                thread.join(5)
                assert not thread.is_alive()
        for rights in ("select from tidemark.history_lock for update", "lock table tidemark.history_lock"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), other.transaction():
                other.execute(rights.encode())
    for role in ("tidemark_owner", "tidemark_reader", "tidemark_operator"):
        with sql.transaction(force_rollback=True):
            sql.execute(f"set local role {role}".encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege), sql.transaction():
                sql.execute("select from tidemark.history_lock for update")


def test_advisory_locks_can_be_kept_from_others(
    store: Postgres, lease: Lease, stranger_dsn: str, sql: psycopg.Connection
) -> None:
    """The setting in SECURITY.md: without EXECUTE on Postgres's functions a login takes no such lock; we go on."""
    for (function,) in sql.execute(
        "select oid::regprocedure::text from pg_proc"
        " where pronamespace = 'pg_catalog'::regnamespace and proname like '%advisory%'"
    ).fetchall():
        sql.execute(f"revoke execute on function {function} from public".encode())
        sql.execute(f"grant execute on function {function} to tidemark_owner".encode())
    with connected(stranger_dsn, "attacker") as other, pytest.raises(psycopg.errors.InsufficientPrivilege):
        other.execute("select pg_advisory_lock(1)")
    with sql.transaction(force_rollback=True):
        sql.execute("set local role tidemark_owner")
        sql.execute("select pg_try_advisory_lock(1)")
    with committing(store, lease, 1):
        pass


def test_batch_of_a_known_day_takes_no_lock_of_the_history(store: Postgres, lease: Lease, dsn: str) -> None:
    """The day is looked for first: not even whoever may lock the row holds a batch back."""
    with committing(store, lease, 1):
        pass
    with connected(dsn, "dba") as other, other.transaction():
        other.execute("select from tidemark.history_lock for update")
        with committing(store, lease, 2) as thread:
            thread.join(5)
            assert not thread.is_alive()


def test_lock_that_a_batch_waits_for_is_named(
    store: Postgres, lease: Lease, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds it stands in the watch (for readiness), in the log and in the status, until the batch goes on."""
    monkeypatch.setattr("tidemark.sinks.postgres.transaction.REPORT_AFTER_SECONDS", 0.5)
    monkeypatch.setattr("tidemark.sinks.background.POLL_SECONDS", 0.1)
    with connected(dsn, "nightly-job") as other, BatchWaitMonitor(store.batch_wait, lease) as watch:
        with other.transaction():
            other.execute("lock table tidemark.stream_positions in exclusive mode")
            with committing(store, lease, 1):
                try:
                    found = eventually(lambda: watch.problem)
                    assert f"pid {other.info.backend_pid} (user " in found
                    assert "session named nightly-job" in found
                    assert any("nightly-job" in it for it in eventually(lambda: problems(store)))
                finally:
                    other.execute("rollback")
        eventually(lambda: watch.problem is None)
        eventually(lambda: not problems(store))


def test_lock_of_a_batch_times_out(store: Postgres, lease: Lease, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again: nobody queues behind a batch for ever, and what it waited for is still named meanwhile."""
    monkeypatch.setattr("tidemark.sinks.postgres.transaction.REPORT_AFTER_SECONDS", 0.1)
    with store._batches.use() as connection:
        connection.execute("set lock_timeout = '1s'")
    with connected(dsn, "nightly-job") as other:
        other.execute("begin; lock table tidemark.streams in exclusive mode")
        named: list[str | None] = []

        def look() -> None:
            time.sleep(0.6)
            named.append(store.batch_wait.find_problem())

        looking = threading.Thread(target=look)
        looking.start()
        with pytest.raises(Unavailable, match="lock timeout"):
            store.apply(batch(1, stream("s", advance("w", 0, 1)), token=lease.token))
        looking.join()
        named.append(store.batch_wait.find_problem())
        other.execute("rollback")
    assert all(it is not None and "nightly-job" in it for it in named)
    store.apply(batch(1, stream("s", advance("w", 0, 1)), token=lease.token))
    assert store.batch_wait.find_problem() is None


@pytest.mark.postgres
def test_commit_that_waits_for_a_standby_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease stays ours, and the status says what hangs: the batch's commit, for want of a synchronous standby."""
    monkeypatch.setattr("tidemark.sinks.postgres.transaction.REPORT_AFTER_SECONDS", 0.5)
    monkeypatch.setattr("tidemark.sinks.background.POLL_SECONDS", 0.1)
    with own_postgres(tmp_path) as server:
        dsn = server.dsn()
        migrate(dsn)
        with (
            Postgres(PostgresConfig(dsn)) as store,
            connected(dsn, "dba") as dba,
            Lease.acquire(dsn, LEASE, threading.Event()) as lease,
            BatchWaitMonitor(store.batch_wait, lease) as watch,
        ):
            dba.execute("alter system set synchronous_standby_names = 'far'")
            dba.execute("select pg_reload_conf()")
            eventually(lambda: dba.execute("show synchronous_standby_names").fetchone() == ("far",))
            with committing(store, lease, 1):
                try:
                    found = eventually(lambda: watch.problem)
                    assert "synchronous_standby_names is 'far', and 0 standbys" in found
                    assert any("standby" in it for it in eventually(lambda: problems(store)))
                    time.sleep(1.5 * LEASE.ttl_seconds)
                    assert not any("lease" in it for it in problems(store))
                finally:
                    dba.execute("alter system reset synchronous_standby_names")
                    dba.execute("select pg_reload_conf()")
            eventually(lambda: not problems(store))


@pytest.mark.postgres
def test_login_that_takes_all_locks_of_the_server_is_waited_out(tmp_path: Path) -> None:
    """All sessions share the memory for locks. A batch fails while it is full, and is written once the login has
    ended."""
    with own_postgres(tmp_path) as server:
        dsn = server.dsn()
        migrate(dsn)
        with (
            Postgres(PostgresConfig(dsn)) as store,
            connected(dsn, "dba") as dba,
            Lease.acquire(dsn, LEASE, threading.Event()) as lease,
        ):
            dba.execute("create role connect_only login password 'connect_only'")
            with committing(store, lease, 1):
                pass
            with connected(make_conninfo(dsn, user="connect_only", password="connect_only"), "attacker") as other:
                with pytest.raises(psycopg.errors.OutOfMemory):
                    other.execute("select pg_advisory_lock(number) from generate_series(1, 1000000) as number")
                with pytest.raises(Unavailable, match="shared memory"):
                    store.apply(batch(2, stream("s", advance("w", 1, 2)), token=lease.token))
            with committing(store, lease, 2):
                pass


@contextmanager
def all_connections(dsn: str, refusal: str) -> Iterator[int]:
    """As many connections as the server gives before it refuses one with this message; yields their number."""
    sessions: list[psycopg.Connection[Any]] = []
    with ExitStack() as opened:

        def open_all() -> None:
            while True:
                sessions.append(opened.enter_context(connected(dsn, "attacker")))

        with pytest.raises(psycopg.OperationalError, match=refusal):
            open_all()
        yield len(sessions)


def sessions_of(connection: psycopg.Connection[Any], user: str) -> int:
    found = connection.execute("select count(*) from pg_stat_activity where usename = %s", [user]).fetchall()
    return int(found[0][0])


@pytest.mark.postgres
def test_login_that_takes_all_connections_of_the_server_is_waited_out(tmp_path: Path) -> None:
    """A pipeline that is connected goes on. A batch that needs a new connection fails, and is written once the login
    has ended. The remedy of SECURITY.md leaves the login five connections."""
    with own_postgres(tmp_path) as server, connected(server.dsn(), "dba") as dba:
        migrate(server.dsn())
        dba.execute("create role stranger login password 'secret'")
        dba.execute("create role pipeline login password 'secret' in role tidemark_owner")
        stranger, own = (make_conninfo(server.dsn(), user=name, password="secret") for name in ("stranger", "pipeline"))
        with (
            Postgres(PostgresConfig(own)) as store,
            Postgres(PostgresConfig(own)) as new_store,
            Lease.acquire(own, LEASE, threading.Event()) as lease,
        ):
            with committing(store, lease, 1):
                pass
            with all_connections(stranger, r"remaining connection slots|too many clients"):
                with committing(store, lease, 2):
                    pass
                with pytest.raises(Unavailable, match=r"remaining connection slots|too many clients"):
                    new_store.apply(batch(3, stream("s", advance("w", 2, 3)), token=lease.token))
            eventually(lambda: sessions_of(dba, "stranger") == 0)  # a session ends after its client has closed it
            with committing(new_store, lease, 3):
                pass
            dba.execute("alter role stranger connection limit 5")
            with all_connections(stranger, "too many connections for role") as count:
                assert count == 5


def test_lease_is_renewed_though_somebody_holds_its_advisory_lock(dsn: str, stranger_dsn: str) -> None:
    """Such a login can see the lock and queue for it. Renewals go on without it, in a new session too."""
    with connected(stranger_dsn, "attacker") as other, Lease.acquire(dsn, LEASE, threading.Event()) as lease:
        waiting = threading.Thread(
            target=other.execute,
            args=("select pg_advisory_lock(hashtextextended('tidemark.query_lease ' || %s::text, 0))", (lease.token,)),
        )
        waiting.start()
        with lease._database.use() as connection:
            connection.execute("select pg_advisory_unlock_all()")
        waiting.join()
        lease._database.close()
        time.sleep(2 * LEASE.ttl_seconds)
        with connected(dsn, "test") as test:
            row = test.execute("select expires_at > now() from tidemark.query_lease").fetchone()
        assert row == (True,)
        assert not lease.lost.is_set()
