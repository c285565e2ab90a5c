"""The settings of every Postgres session that Tidemark opens, whatever the defaults of server, database and role.

One statement sets them when a session is opened. It also detects a pooler. A pooler may give the session to another
client after each transaction, so the settings are then local to each transaction. `SET` is used instead of start-up
options (`options=`), which poolers refuse or lose.

Sessions of the caller (`tidemark.Writer`, the connection of a reader's batch) are not changed: statements on them need
none of these settings, and the SQL functions set `row_security` themselves.
"""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow

SESSION_SETTINGS: Mapping[str, str] = {
    # The formats in which psycopg expects dates, intervals and text.
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "standard_conforming_strings": "on",
    # A missing row is evidence. Rows that a policy hides must therefore be an error.
    "row_security": "off",
    # Each statement sees everything that was committed before it.
    "default_transaction_isolation": "read committed",
    # No statement waits long for a lock. Long statements set their own limits.
    "lock_timeout": "10s",
    "statement_timeout": "0",
}
_GIVEN = ["lock_timeout", "statement_timeout"]
"""Settings for which a start-up option in the address takes precedence."""

BACKEND = "select pg_backend_pid()"

# In a session of a pooler, `set_config` is local to the transaction of this statement.
_OPEN = """
select pg_backend_pid(), current_user::text,
    count(set_config(wanted.name, wanted.value, pg_backend_pid() <> %s and not %s))
from unnest(%s::text[], %s::text[]) as wanted (name, value)
where wanted.name <> all (%s::text[])
    or not exists (select from pg_settings s where s.name = wanted.name and s.source = 'client')
"""

_Driver = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
_QUOTED = re.compile(r'["«„](.+)["»“]')


def unprepared_where_pooled(connection: _Driver, backend: TupleRow | None) -> bool:
    """Detect a pooler, and prepare no statements if there is one: each transaction may get another session.

    A pooler gives its clients process IDs of its own.

    Args:
        backend: the answer to `BACKEND`.

    Returns:
        Whether there is a pooler.
    """
    is_pooled = backend is None or backend[0] != connection.info.backend_pid
    if is_pooled:
        connection.prepare_threshold = None
    return is_pooled


def hidden_rows(error: psycopg.Error, role: str) -> tuple[str, str] | None:
    """What happened and what to do, if row level security is the cause of `error`; else None.

    Args:
        error: what psycopg raised.
        role: the session's user, as `current_user` gives it, empty if that is not known.
    """
    if error.diag.source_function != "check_enable_rls":  # the message is in the server's language, this is not
        return None
    name = _QUOTED.search(error.diag.message_primary or "")
    return hidden_from(role, name[1] if name else "?", is_owner=error.diag.message_hint is not None)


def hidden_from(role: str, table: str, *, is_owner: bool = False) -> tuple[str, str]:
    """What happened and what to do.

    Args:
        role: the session's user, empty if that is not known.
        table: the name, with its schema if that is known.
        is_owner: whether `role` owns the table, which then has FORCE ROW LEVEL SECURITY.
    """
    name = ".".join(f'"{part}"' for part in table.split("."))
    whom = f'role "{role}"' if role else "its owner" if is_owner else "this user"
    problem = f"row level security hides rows of table {name} from {whom}, which must see every row"
    remedies = [f"ALTER TABLE {name} {'NO FORCE' if is_owner else 'DISABLE'} ROW LEVEL SECURITY"]
    if role:
        remedies.append(f'ALTER ROLE "{role}" BYPASSRLS')
    if not is_owner:
        remedies.append("make the role the table's owner")
    return problem, f"{', or '.join(remedies)}; a policy is not enough, whatever rows it shows"


def _opening(connection: _Driver, settings: Mapping[str, str], *, is_own: bool = False) -> list[object]:
    return [connection.info.backend_pid, is_own, [*settings], [*settings.values()], _GIVEN]


def _local(settings: Mapping[str, str]) -> list[sql.Composed]:
    return [sql.SQL("set local {} = {}").format(sql.SQL(name), sql.Literal(value)) for name, value in settings.items()]


def _statements(connection: _Driver, local: list[sql.Composed]) -> list[sql.Composed]:
    """One round trip: one text with all statements, or in a pipeline, which does not accept that, separate ones."""
    if not local or connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return local
    return [sql.SQL("; ").join(local)]


def _is_idle(connection: _Driver) -> bool:
    is_idle = connection.info.transaction_status == TransactionStatus.IDLE
    return is_idle and connection.pgconn.pipeline_status == PipelineStatus.OFF


class SessionConnection(psycopg.Connection[TupleRow]):
    """A connection in autocommit with `SESSION_SETTINGS`.

    Behind a pooler, each statement outside a transaction gets its own transaction. A statement that refuses
    transactions (CONCURRENTLY) fails there.
    """

    role = ""
    is_pooled = False
    _settings: list[sql.Composed] = []  # noqa: RUF012  # replaced, never changed in place
    _depth = 0

    @classmethod
    def open(cls, conninfo: str, more: Mapping[str, str] | None = None) -> Self:
        """Connect, and apply the settings and `more` in one round trip. Raises errors of psycopg."""
        made = cls.connect(conninfo, autocommit=True)
        try:
            made.apply({**SESSION_SETTINGS, **(more or {})})
        except BaseException:
            made.close()
            raise
        return made

    def apply(self, settings: Mapping[str, str]) -> None:
        row = self.execute(_OPEN, _opening(self, settings), prepare=False).fetchone()
        if unprepared_where_pooled(self, row):
            self.is_pooled, self._settings, self.cursor_factory = True, _local(settings), _PooledCursor
        self.role = "" if row is None else row[1]

    def keep(self, more: Mapping[str, str]) -> None:
        """Apply the settings and `more` to the session, which no other client gets while this one is connected."""
        self.execute(_OPEN, _opening(self, {**SESSION_SETTINGS, **more}, is_own=True), prepare=False)
        self.is_pooled, self._settings, self.cursor_factory = False, [], psycopg.Cursor

    @contextmanager
    def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002  # as psycopg has it
    ) -> Iterator[psycopg.Transaction]:
        with super().transaction(savepoint_name, force_rollback) as transaction:
            self._depth += 1
            try:
                for statement in _statements(self, self._settings) if self._depth == 1 else ():
                    self.execute(statement)
                yield transaction
            finally:
                self._depth -= 1


class _PooledCursor(psycopg.Cursor[Any]):
    def execute(self, *args: Any, **options: Any) -> Self:
        if not _is_idle(self.connection):
            return super().execute(*args, **options)
        with self.connection.transaction():
            return super().execute(*args, **options)


class AsyncSessionConnection(psycopg.AsyncConnection[TupleRow]):
    """`SessionConnection` for asyncio."""

    role = ""
    is_pooled = False
    _settings: list[sql.Composed] = []  # noqa: RUF012  # replaced, never changed in place
    _depth = 0

    @classmethod
    async def open(cls, conninfo: str, more: Mapping[str, str] | None = None) -> Self:
        """See `SessionConnection.open`."""
        made = await cls.connect(conninfo, autocommit=True)
        try:
            await made.apply({**SESSION_SETTINGS, **(more or {})})
        except BaseException:
            await made.close()
            raise
        return made

    async def apply(self, settings: Mapping[str, str]) -> None:
        row = await (await self.execute(_OPEN, _opening(self, settings), prepare=False)).fetchone()
        if unprepared_where_pooled(self, row):
            self.is_pooled, self._settings, self.cursor_factory = True, _local(settings), _AsyncPooledCursor
        self.role = "" if row is None else row[1]

    @asynccontextmanager
    async def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002  # as psycopg has it
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            self._depth += 1
            try:
                for statement in _statements(self, self._settings) if self._depth == 1 else ():
                    await self.execute(statement)
                yield transaction
            finally:
                self._depth -= 1


class _AsyncPooledCursor(psycopg.AsyncCursor[Any]):
    async def execute(self, *args: Any, **options: Any) -> Self:
        if not _is_idle(self.connection):
            return await super().execute(*args, **options)
        async with self.connection.transaction():
            return await super().execute(*args, **options)
