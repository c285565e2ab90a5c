"""What a batch waits for inside Postgres: a lock of another session, or a synchronous standby.

The session of the batch cannot answer meanwhile, so a second session queries it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.errors import LockNotAvailable

from tidemark.common.lock_waits import sessions_of
from tidemark.common.postgres_session import Connection, PostgresSession

PATIENCE = 3.0
"""Seconds that a batch may wait before it is reported."""


def wait_of(connection: Connection, pid: int) -> str | None:
    """What the server process `pid` waits for; None if it does not wait, or has ended."""
    row = connection.execute(
        "select wait_event, pg_blocking_pids(pid) from pg_stat_activity where pid = %s", (pid,)
    ).fetchone()
    if row is None:
        return None
    event, blockers = row
    if blockers:
        return f"a lock of another session: {sessions_of(connection, blockers)}; end that session, or wait for it"
    if event == "SyncRep":
        row = connection.execute(
            "select current_setting('synchronous_standby_names'),"
            " (select count(*) from pg_stat_replication where state = 'streaming')"
        ).fetchone()
        names, streaming = row or ("", 0)
        return (
            f"a synchronous standby to commit: synchronous_standby_names is {names!r}, and {streaming} standbys"
            " are streaming; start the standby, or change that setting and reload Postgres"
        )
    return None


class BatchWait:
    """Notes when a batch begins and ends in Postgres. Any thread may query what the batch waits for."""

    def __init__(self, session: PostgresSession) -> None:
        """`session` is used for these queries only."""
        self._session = session
        self._lock = threading.Lock()
        # A batch that is retried after a lock timeout has waited since its first attempt.
        self._since: float | None = None
        self._pid: int | None = None
        self._last: str | None = None

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def of(self, connection: Connection) -> Iterator[None]:
        """Note that `connection` writes a batch during the block."""
        with self._lock:
            self._since = time.monotonic() if self._since is None else self._since
            self._pid = connection.info.backend_pid
        is_waiting = False
        try:
            yield
        except LockNotAvailable:
            is_waiting = True
            raise
        finally:
            with self._lock:
                self._pid = None
                if not is_waiting:
                    self._since = self._last = None

    def problem(self) -> str | None:
        """What a batch has waited for longer than `PATIENCE`; None if none has. Raises `Unavailable` and `Refused`."""
        with self._lock:
            since, pid = self._since, self._pid
        if since is None or time.monotonic() - since < PATIENCE:
            return None
        if pid is not None:
            with self._session.use() as connection:
                wait = wait_of(connection, pid)
            with self._lock:
                if self._pid == pid:
                    self._last = wait and f"a batch waits in Postgres for {wait}"
        with self._lock:
            return self._last

    def note(self, token: int, problem: str | None) -> None:
        """Store the problem for `tidemark status`, without waiting for a standby or long for a lock."""
        with self._session.use() as connection, connection.transaction():
            connection.execute("set local synchronous_commit = local")
            connection.execute("set local lock_timeout = '1s'")
            connection.execute("update tidemark.query_lease set waits_for = %s where token = %s", (problem, token))
