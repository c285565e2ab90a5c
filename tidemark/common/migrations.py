"""Runs migrations: numbered SQL files of one folder, applied in order, each in its own transaction.

A released file is never edited; a change is a new file. Services never migrate the schema. They only check its version.

During an upgrade, and after a rollback of the code, old code runs in the new schema. Therefore a migration only adds
objects; a migration one minor version later removes the old objects. If older code can run in the new schema, the file
has the comment `Works with code for schema N`. N is the schema version for which the oldest such code was written.

Several parts of Tidemark share the schema `tidemark`, in one or two databases. Each part has its own folder of
migrations and its own table of versions.

Migrations, and other callers of `run_with_lock_timeout`, wait for a lock for one second at a time, and log the sessions
that have the lock. The wait must be short because Postgres grants locks in order: a statement that waits for an ACCESS
EXCLUSIVE lock blocks every later statement, even a SELECT.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from typing import TypeVar

import psycopg
from psycopg import errors, sql

from tidemark.common.backoff import Backoff
from tidemark.common.errors import PrerequisitePending, SchemaMismatch, TidemarkError
from tidemark.common.log import Progress, get_logger, no_progress
from tidemark.common.postgres_session import Connection, PostgresSession, describe_sessions

log = get_logger(__name__)

T = TypeVar("T")

LOCK_TIMEOUT_SECONDS = 1.0  # how long one attempt waits for one lock
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0
_FIRST_QUERY_SECONDS, _QUERY_INTERVAL_SECONDS = 0.3, 0.2
"""The time from the beginning of an attempt to the first query for blockers, and between two queries."""


def run_with_lock_timeout(
    session: PostgresSession, task: str, step: Callable[[Connection], T], seconds: float = 60.0
) -> T:
    """Run `step` in a READ COMMITTED transaction with a `lock_timeout`, until an attempt gets all its locks.

    Each failed attempt is logged with the sessions that blocked the attempt. Blocks the thread during the pauses.

    Args:
        session: a session whose connection is not in a transaction.
        task: names the step in messages, such as "migration 0003_x.sql".
        step: takes the connection. After a lock time-out or a deadlock, `step` is rolled back and called again.
        seconds: the time limit, after which no new attempt begins.

    Returns:
        The result of `step`.

    Raises:
        PrerequisitePending: the locks were not free within `seconds`. The text names the blockers.
    """
    deadline, backoff = time.monotonic() + seconds, Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
    while True:
        blockers = _BlockerQuery(session)
        with session.use() as connection:
            try:
                with connection.transaction(), blockers:
                    connection.execute("set transaction isolation level read committed")
                    connection.execute("select set_config('lock_timeout', %s, true)", [f"{LOCK_TIMEOUT_SECONDS:g}s"])
                    blockers.begin(connection)
                    return step(connection)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                pass
        log.warning("Waiting for a lock", step=task, blockers=blockers.description)
        pause = backoff.next()
        if time.monotonic() + pause > deadline:
            raise PrerequisitePending(task, session.where, f"waiting for a lock of {blockers.description}")
        time.sleep(pause)


class _BlockerQuery:
    """Queries which sessions block the statements of a connection. A context manager; `begin` starts the queries.

    Uses a thread and a session of its own, because the connection is busy while a statement waits.

    Attributes:
        description: the sessions that blocked a statement last, for messages.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.description = "a session that has ended since"

    def begin(self, connection: Connection) -> None:
        """Start the thread. `connection` is the connection whose statements may have to wait."""
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        self._thread = threading.Thread(target=self._run, args=[int(row[0])], name="blockers", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, waiting_pid: int) -> None:
        if self._stopped.wait(_FIRST_QUERY_SECONDS):
            return
        with suppress(TidemarkError, psycopg.Error), self._session.new_session() as other, other.use() as connection:
            while not self._stopped.is_set():
                row = connection.execute("select pg_blocking_pids(%s)", [waiting_pid]).fetchone()
                if row is not None and row[0]:  # the description is empty if the blockers have ended since this query
                    self.description = describe_sessions(connection, row[0]) or self.description
                self._stopped.wait(_QUERY_INTERVAL_SECONDS)


_WORKS_WITH = re.compile(r"^-- Works with code for schema (\d+)\.$", re.MULTILINE)

_RESTORE_PROCESS = """
select pid from pg_stat_activity where datname = current_database() and application_name = 'pg_restore' limit 1
"""


@dataclass(frozen=True)
class Migrations:
    """The migrations of one part of Tidemark.

    Attributes:
        package: the package that contains the folder `migrations`.
        table: the table of versions in the schema `tidemark`.
        command: the command that applies the migrations, for messages.
    """

    package: str
    table: str
    command: str

    @cached_property
    def scripts(self) -> Mapping[int, tuple[str, str]]:
        """Version -> (file name, SQL text), in ascending order of version."""
        scripts: dict[int, tuple[str, str]] = {}
        entries = (entry for entry in (files(self.package) / "migrations").iterdir() if entry.name.endswith(".sql"))
        for entry in sorted(entries, key=lambda entry: entry.name):
            number = int(entry.name.split("_")[0])
            assert number not in scripts, f"two migrations have number {number}"
            scripts[number] = entry.name, entry.read_text("utf-8")
        return scripts

    @property
    def target_version(self) -> int:
        """The version of the schema that this code was written for."""
        return max(self.scripts)

    def migrate(self, session: PostgresSession, progress: Progress = no_progress) -> list[int]:
        """Apply all migrations that the schema lacks, in ascending order.

        Takes no lock if no migration is missing. Otherwise waits for locks for up to a minute for each migration, one
        second at a time, and logs the sessions that have the locks. Several processes may migrate at the same time:
        each migration is applied once. After a failure, the migrations before the failed one stay applied, and the next
        call continues. A newer schema is not changed.

        Args:
            session: a session of the database to migrate.
            progress: shows the number of migrations that were applied.

        Returns:
            The versions that this call applied.

        Raises:
            SchemaMismatch: a newer schema does not work with this code.
            PrerequisitePending: a lock was not free in time.
        """
        applied = list[int]()
        with ExitStack() as stack:
            advance: Callable[[int], None] | None = None
            while (
                current := run_with_lock_timeout(session, f"reading tidemark.{self.table}", self._check_version)
            ) is None:
                # Another process may create the schema and the table at the same moment.
                with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateSchema):
                    run_with_lock_timeout(session, f"creating tidemark.{self.table}", self._create_version_table)
            while missing := [number for number in self.scripts if number > current]:
                advance = advance or stack.enter_context(progress(len(missing)))
                current, (name, _) = missing[0], self.scripts[missing[0]]
                if run_with_lock_timeout(session, f"migration {name}", partial(self._apply, current)):
                    log.info("Migrated the database", version=current, file=name)
                    applied.append(current)
                advance(1)
        return applied

    def version(self, connection: Connection) -> int | None:
        """Query the version of the schema; 0 if no migration was applied, None if there is no table of versions."""
        name = f"tidemark.{self.table}"
        if not connection.execute("select 1 where to_regclass(%s) is not null", [name]).fetchone():
            return None
        query = sql.SQL("select coalesce(max(version), 0) from {}").format(self._table)
        row = connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])

    def check_writable(self, connection: Connection) -> None:
        """Raise an error unless this code can write in the schema.

        Accepts the target version, and newer versions that work with this code. Errors as for `check_readable`.
        """
        self.check_readable(connection, self.target_version)

    def check_readable(self, connection: Connection, oldest: int) -> None:
        """Raise an error unless this code can read the schema.

        Args:
            oldest: the oldest version of the schema that this code can read.

        Raises:
            SchemaMismatch: the schema is older than `oldest`, or it is newer and does not work with this code.
            PrerequisitePending: pg_restore is filling the database, so tables may still be missing.
        """
        if (process := connection.execute(_RESTORE_PROCESS).fetchone()) is not None:
            problem = f"pg_restore (process {process[0]}) is filling the database"
            raise PrerequisitePending("the use of the database", connection.info.dbname, problem)
        version = self.version(connection) or 0
        if not oldest <= version <= self.target_version and not self._is_compatible(connection, version):
            raise SchemaMismatch(version, self.target_version, self.command)

    def _check_version(self, connection: Connection) -> int | None:
        """Query the version of the schema; None if the table of versions is missing.

        Raises `SchemaMismatch` for a newer schema that does not work with this code.
        """
        version = self.version(connection)
        if version is not None and version > self.target_version:
            self.check_writable(connection)
        return version

    def _create_version_table(self, connection: Connection) -> None:
        if self.version(connection) is None:
            connection.execute("create schema if not exists tidemark")
            connection.execute(
                sql.SQL(
                    "create table {} (version integer primary key, name text not null,"
                    " applied_at timestamptz not null default now(), works_with integer)"
                ).format(self._table)
            )

    def _apply(self, number: int, connection: Connection) -> bool:
        """Apply a migration, with a lock that blocks other migrations but no readers.

        Returns whether this call applied the migration. False: another process has applied it before.
        """
        connection.execute(sql.SQL("lock table {} in share row exclusive mode").format(self._table))
        if (self.version(connection) or 0) >= number:
            return False
        name, script = self.scripts[number]
        connection.execute(script.encode())
        connection.execute(
            sql.SQL("insert into {} (version, name, works_with) values (%s, %s, %s)").format(self._table),
            (number, name, _oldest_compatible_version(number, script)),
        )
        return True

    def _is_compatible(self, connection: Connection, version: int) -> bool:
        if version < self.target_version:
            return False
        query = sql.SQL("select works_with <= %s from {} where version = %s").format(self._table)
        row = connection.execute(query, (self.target_version, version)).fetchone()
        return row is not None and bool(row[0])

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier("tidemark", self.table)


def _oldest_compatible_version(number: int, script: str) -> int:
    comment = _WORKS_WITH.search(script)
    return int(comment[1]) if comment else number
