"""Transactions that wait for locks one second at a time, and log the sessions that have the locks.

A short wait is needed because Postgres grants locks in order: a statement that waits for an ACCESS EXCLUSIVE lock
blocks every later statement, even a SELECT.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psycopg

from tidemark.common.backoff import Backoff
from tidemark.common.errors import PrerequisitePending, TidemarkError
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, PostgresSession

log = get_logger(__name__)

T = TypeVar("T")

LOCK_TIMEOUT = 1.0
"""Seconds that one attempt waits for one lock."""
_PAUSE, _LONGEST_PAUSE = 0.5, 5.0
_FIRST_QUERY, _QUERY_EVERY = 0.3, 0.2
"""Seconds from the beginning of an attempt to the first query for blockers, and between two queries."""


def run_locking(session: PostgresSession, task: str, step: Callable[[Connection], T], seconds: float = 60.0) -> T:
    """Run `step` in a READ COMMITTED transaction whose locks time out; repeat it until it gets all of them.

    Each failed attempt is logged with the sessions that blocked it.

    Args:
        session: its connection must not be in a transaction.
        task: names the step in messages, such as "migration 0003_x.sql".
        step: is rolled back and called again after a lock time-out or a deadlock.
        seconds: after which no new attempt begins.

    Raises:
        PrerequisitePending: the locks were not free within `seconds`; names the blockers.
    """
    deadline, backoff = time.monotonic() + seconds, Backoff(_PAUSE, _LONGEST_PAUSE)
    while True:
        blockers = _BlockerQuery(session)
        with session.use() as connection:
            try:
                with connection.transaction(), blockers:
                    connection.execute("set transaction isolation level read committed")
                    connection.execute("select set_config('lock_timeout', %s, true)", [f"{LOCK_TIMEOUT:g}s"])
                    blockers.begin(connection)
                    return step(connection)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                pass
        log.warning("Waiting for a lock", step=task, blockers=blockers.description)
        pause = backoff.next()
        if time.monotonic() + pause > deadline:
            raise PrerequisitePending(task, session.where, f"waiting for a lock of {blockers.description}")
        time.sleep(pause)


def sessions_of(connection: Connection, pids: list[int]) -> str:
    """The server processes for a message: pid, user, application, state, since when; 0 is a prepared transaction."""
    rows = connection.execute(
        """
        select pid, coalesce(usename, '-'), coalesce(nullif(application_name, ''), '-'),
            coalesce(state, 'state not shown'), to_char(xact_start, 'YYYY-MM-DD HH24:MI:SSOF')
        from pg_stat_activity where pid = any (%s) order by xact_start nulls last, pid
        """,
        [pids],
    ).fetchall()
    sessions = [
        f"pid {pid} (user {user}, application {application}, {state}{f' since {since}' if since else ''})"
        for pid, user, application, state, since in rows
    ]
    return "; ".join(sessions + ["a prepared transaction (see pg_prepared_xacts)"] * (0 in pids))


def with_lockers(session: PostgresSession, error: TidemarkError) -> str:
    """The text of an error of `session`.

    After a lock timeout, it names the sessions that have, or wait for, a strong lock of a table of the schema
    `tidemark`.
    """
    if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
        return str(error)
    with suppress(TidemarkError, psycopg.Error), session.another() as other, other.use() as connection:
        rows = connection.execute(
            """
            select distinct coalesce(held.pid, 0)
            from pg_locks held join pg_class on pg_class.oid = held.relation
            where held.locktype = 'relation' and held.pid is distinct from pg_backend_pid()
                and held.database = (select oid from pg_database where datname = current_database())
                and relnamespace = to_regnamespace('tidemark')
                and mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            """
        ).fetchall()
        return f"{error}; locked by {sessions_of(connection, [pid for (pid,) in rows]) or 'a session that has ended'}"
    return str(error)


class _BlockerQuery:
    """Queries the blockers of a waiting statement; a context manager.

    It has a thread and a session of its own, because the waiting connection cannot answer.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.description = "a session that has ended since"

    def begin(self, connection: Connection) -> None:
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        self._thread = threading.Thread(target=self._run, args=[int(row[0])], name="blockers", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, waiting: int) -> None:
        if self._over.wait(_FIRST_QUERY):
            return
        with suppress(TidemarkError, psycopg.Error), self._session.another() as other, other.use() as connection:
            while not self._over.is_set():
                row = connection.execute("select pg_blocking_pids(%s)", [waiting]).fetchone()
                if row is not None and row[0]:
                    self.description = sessions_of(connection, row[0])
                self._over.wait(_QUERY_EVERY)
