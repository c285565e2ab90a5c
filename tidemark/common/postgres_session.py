"""A session to Postgres that connects when needed, reconnects after a failure, and classifies errors.

Not a pool: each thread has its own session, or threads take turns on one session.

Tidemark applies `SESSION_SETTINGS` to every session that it opens, instead of the defaults of the server, database or
role. When a session is opened, one statement applies the settings, and also detects a pooler. A pooler may give the
session to another client after each transaction. So behind a pooler, each transaction applies the settings for itself.
Start-up options (`options=`) are not used, because poolers refuse or lose them.

`tidemark.Writer` does not change the caller's session: its statements need none of these settings, and the SQL
functions set `row_security` themselves. In the transactions of a reader's batch, only `lock_timeout` is set.
"""

import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, LiteralString, Self, TypeAlias, TypeVar

import psycopg
from psycopg import sql
from psycopg.abc import Params
from psycopg.errors import LockNotAvailable
from psycopg.pq import PGconn, Ping, PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow, kwargs_row

from tidemark.common.errors import Refused, Slow, TidemarkError, Unavailable
from tidemark.common.postgres_address import address, conninfo

SESSION_SETTINGS: Mapping[str, str] = {
    # The formats in which psycopg expects dates, intervals and text.
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "standard_conforming_strings": "on",
    # A missing row is evidence. So Postgres must raise an error if row level security hides a row.
    "row_security": "off",
    # Each statement sees everything that was committed before it.
    "default_transaction_isolation": "read committed",
    # Limits the wait for a lock. Statements that need longer set their own limits.
    "lock_timeout": "10s",
    "statement_timeout": "0",
}
_STARTUP_OVERRIDES = ["lock_timeout", "statement_timeout"]
"""If an address sets one of these settings with a start-up option, Tidemark does not change the setting."""

SELECT_BACKEND_PID = "select pg_backend_pid()"

SET_LOCK_TIMEOUT = (
    f"select set_config('lock_timeout', '{SESSION_SETTINGS['lock_timeout']}', true)"
    " where current_setting('lock_timeout') = '0'"
)
"""Sets `lock_timeout` for the current transaction of a session that Tidemark did not open, unless a limit is set."""

# In a session of a pooler, `set_config` is local to the transaction of this statement.
_APPLY_SETTINGS = """
select pg_backend_pid(), current_user::text,
    count(set_config(wanted.name, wanted.value, pg_backend_pid() <> %s and not %s))
from unnest(%s::text[], %s::text[]) as wanted (name, value)
where wanted.name <> all (%s::text[])
    or not exists (select from pg_settings s where s.name = wanted.name and s.source = 'client')
"""

_AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
_QUOTED_PATTERN = re.compile(r'["«„](.+)["»“]')


def detect_pooler(connection: _AnyConnection, backend: TupleRow | None) -> bool:
    """Detect a pooler. If there is one, disable prepared statements, because each transaction may get another session.

    A pooler sends its clients a process ID that differs from the process ID of the server.

    Args:
        backend: a row that begins with the result of `SELECT_BACKEND_PID` on `connection`; None if there is no row.

    Returns:
        Whether there is a pooler.
    """
    is_pooled = backend is None or backend[0] != connection.info.backend_pid
    if is_pooled:
        connection.prepare_threshold = None
    return is_pooled


def explain_row_security(error: psycopg.Error, role: str) -> tuple[str, str] | None:
    """Explain an error that row level security caused.

    Args:
        error: the error of psycopg.
        role: `current_user` of the session; empty if not known.

    Returns:
        (problem, what to do), as texts for a message; None for other errors.
    """
    if error.diag.source_function != "check_enable_rls":  # unlike the message, this is not translated
        return None
    name = _QUOTED_PATTERN.search(error.diag.message_primary or "")
    return describe_hidden_rows(role, name[1] if name else "?", is_owner=error.diag.message_hint is not None)


def describe_hidden_rows(role: str, table: str, *, is_owner: bool = False) -> tuple[str, str]:
    """(problem, what to do), as texts, if row level security hides rows of `table` from `role` (empty if not known).

    `is_owner`: whether the role owns the table. The table then has FORCE ROW LEVEL SECURITY.
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


def _settings_parameters(
    connection: _AnyConnection, settings: Mapping[str, str], *, is_exclusive: bool = False
) -> list[object]:
    return [connection.info.backend_pid, is_exclusive, [*settings], [*settings.values()], _STARTUP_OVERRIDES]


def _set_local_statements(settings: Mapping[str, str]) -> list[sql.Composed]:
    return [sql.SQL("set local {} = {}").format(sql.SQL(name), sql.Literal(value)) for name, value in settings.items()]


def _join_statements(connection: _AnyConnection, statements: list[sql.Composed]) -> list[sql.Composed]:
    """Join statements into one, for one round trip; but not in pipeline mode, which refuses joined statements."""
    if not statements or connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return statements
    return [sql.SQL("; ").join(statements)]


def _is_idle(connection: _AnyConnection) -> bool:
    is_idle = connection.info.transaction_status == TransactionStatus.IDLE
    return is_idle and connection.pgconn.pipeline_status == PipelineStatus.OFF


class SessionConnection(psycopg.Connection[TupleRow]):
    """A connection in autocommit with `SESSION_SETTINGS`. `role`: the `current_user` of the session.

    `is_pooled`: whether a pooler may give the session to another client. If so, each statement outside a transaction
    gets its own transaction, so statements that cannot run in a transaction (CONCURRENTLY) fail.
    """

    role = ""
    is_pooled = False
    _settings: list[sql.Composed] = []  # noqa: RUF012  # replaced, never changed in place
    _transaction_depth = 0

    @classmethod
    def open(cls, conninfo: str, extra: Mapping[str, str] | None = None) -> Self:
        """Connect, then apply `SESSION_SETTINGS` and `extra` in one round trip. Raises errors of psycopg."""
        connection = cls.connect(conninfo, autocommit=True)
        try:
            connection.apply({**SESSION_SETTINGS, **(extra or {})})
        except BaseException:
            connection.close()
            raise
        return connection

    def apply(self, settings: Mapping[str, str]) -> None:
        """Apply the settings to the session; behind a pooler, to each transaction. Sets `is_pooled` and `role`."""
        row = self.execute(_APPLY_SETTINGS, _settings_parameters(self, settings), prepare=False).fetchone()
        if detect_pooler(self, row):
            self.is_pooled, self._settings, self.cursor_factory = True, _set_local_statements(settings), _PooledCursor
        self.role = "" if row is None else row[1]

    def apply_to_session(self, extra: Mapping[str, str]) -> None:
        """Apply `SESSION_SETTINGS` and `extra` to a session that no pooler gives to another client."""
        self.execute(
            _APPLY_SETTINGS, _settings_parameters(self, {**SESSION_SETTINGS, **extra}, is_exclusive=True), prepare=False
        )
        self.is_pooled, self._settings, self.cursor_factory = False, [], psycopg.Cursor

    @contextmanager
    def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002  # as psycopg has it
    ) -> Iterator[psycopg.Transaction]:
        with super().transaction(savepoint_name, force_rollback) as transaction:
            self._transaction_depth += 1
            try:
                for statement in _join_statements(self, self._settings) if self._transaction_depth == 1 else ():
                    self.execute(statement)
                yield transaction
            finally:
                self._transaction_depth -= 1


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
    _transaction_depth = 0

    @classmethod
    async def open(cls, conninfo: str, extra: Mapping[str, str] | None = None) -> Self:
        """See `SessionConnection.open`."""
        connection = await cls.connect(conninfo, autocommit=True)
        try:
            await connection.apply({**SESSION_SETTINGS, **(extra or {})})
        except BaseException:
            await connection.close()
            raise
        return connection

    async def apply(self, settings: Mapping[str, str]) -> None:
        row = await (
            await self.execute(_APPLY_SETTINGS, _settings_parameters(self, settings), prepare=False)
        ).fetchone()
        if detect_pooler(self, row):
            self.is_pooled, self._settings, self.cursor_factory = (
                True,
                _set_local_statements(settings),
                _AsyncPooledCursor,
            )
        self.role = "" if row is None else row[1]

    @asynccontextmanager
    async def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002  # as psycopg has it
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            self._transaction_depth += 1
            try:
                for statement in _join_statements(self, self._settings) if self._transaction_depth == 1 else ():
                    await self.execute(statement)
                yield transaction
            finally:
                self._transaction_depth -= 1


class _AsyncPooledCursor(psycopg.AsyncCursor[Any]):
    async def execute(self, *args: Any, **options: Any) -> Self:
        if not _is_idle(self.connection):
            return await super().execute(*args, **options)
        async with self.connection.transaction():
            return await super().execute(*args, **options)


Connection = psycopg.Connection[TupleRow]

Row = TypeVar("Row")
Statement: TypeAlias = LiteralString | bytes | sql.SQL | sql.Composed

BRIDGE_LOCK_SPACE = 1414087748
"""First half of the keys of the advisory locks of `tidemark synapse`. The second half is the hash of the stream's name.
`tidemark status` reads these locks.
"""

Dsn: TypeAlias = str | Callable[[], str]
"""An address, or a function that returns an address. Each new connection calls the function: passwords may change."""

# SQLSTATE classes and codes of temporary errors: lost connections, resources, rollbacks by the server, restarts.
_RETRIED_SQLSTATE_CLASSES = ("08", "40", "53", "58")
_STATEMENT_TIMEOUT_SQLSTATE = "57014"  # statement time-out
_RETRIED_SQLSTATES = {
    "25006",  # read only: a replica that is about to be promoted, or a server in maintenance
    "25P03",  # idle in transaction for too long
    "25P04",  # transaction for too long
    "55P03",  # lock not available
    "57P01",  # administrator's shutdown
    "57P02",  # another server process crashed
    "57P03",  # starting up or shutting down
    "57P05",  # session idle for too long
}

# Messages of libpq about TLS. libpq has no codes for these errors.
_TLS_PROBLEM_PATTERN = re.compile(
    r"certificate verify failed|does not match host name|not support SSL|(root )?certificate file|private key file"
    r"|alert (unknown ca|certificate required|bad certificate)|requires a valid client certificate"
)

# Messages of poolers (PgBouncer, Pgpool, Odyssey, PgCat) whose server is down, or which have no free session. Also
# messages of Postgres without free connections. libpq has no error code if a connection attempt fails. Only the message
# shows that user and password are not the cause.
_OUTAGE_PATTERN = re.compile(
    r"cannot connect to server|server login has been failing|server_login_retry|server login failed|connect failed"
    r"|client_login_timeout|query_wait_timeout|server conn crashed|bouncer is shutting|server (is )?(down|shut)"
    r"|no more connections allowed|unable to (get|find) (a )?session|all backend nodes are down"
    r"|failed to connect to remote server|could not get connection|AllServersDown|timed.out waiting"
    r"|too many (clients|connections)|remaining connection slots"
)

_POOLER_CHECKS = 5
"""The largest number of connections that `_is_pooled` opens. One is not enough: another client may use the session."""


@dataclass(frozen=True, slots=True)
class DatabaseUse:
    """How one part of Tidemark uses a database, and what a person has to do if the database refuses.

    Attributes:
        setting: the name of Tidemark's setting that has the address, for messages.
        remedies: SQLSTATE, or its class (the first two characters) -> what to do.
        password: the name of the setting that may have the password, for messages; empty if there is none.
        options: (name, value) of Postgres settings for every session. They override `SESSION_SETTINGS`.
        pooler_remedy: what to do if there is a pooler in transaction mode; empty if such a pooler is allowed.
    """

    setting: str
    remedies: Mapping[str, str]
    password: str = ""
    options: tuple[tuple[str, str], ...] = ()
    pooler_remedy: str = ""


def explain_error(
    error: psycopg.Error, where: str, remedies: Mapping[str, str], role: str = ""
) -> TidemarkError | psycopg.Error:
    """Convert an error of psycopg to `Unavailable` (temporary) or `Refused`; return `error` unchanged if it is neither.

    Args:
        where: the address, for the message.
        remedies: SQLSTATE, or its class (the first two characters) -> what a person has to do.
        role: the session's user; empty if not known.
    """
    code = error.sqlstate
    if (hidden := explain_row_security(error, role)) is not None:
        return Refused("Postgres", where, *hidden)
    if code is None:
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return Unavailable("Postgres", where, first_line(error)) if lost else error
    if code[:2] in _RETRIED_SQLSTATE_CLASSES or code in _RETRIED_SQLSTATES:
        return Unavailable("Postgres", where, first_line(error))
    if code == _STATEMENT_TIMEOUT_SQLSTATE:
        return Slow("Postgres", where, first_line(error))
    do = remedies.get(code) or remedies.get(code[:2])
    return Refused("Postgres", where, first_line(error), do) if do else error


def first_line(error: psycopg.Error) -> str:
    return error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]


def is_outage(error: psycopg.Error) -> bool:
    """Whether a connection attempt timed out, or failed because no connection is free or a pooler's server is down."""
    return isinstance(error, psycopg.errors.ConnectionTimeout) or _OUTAGE_PATTERN.search(str(error)) is not None


def is_reachable(dsn: str) -> bool:
    """Try to connect to `dsn`. Returns whether a server accepts connections, even if it refuses the login."""
    return PGconn.ping(dsn.encode()) == Ping.OK


def _is_pooled(connection: Connection, full_dsn: str) -> bool:
    """Whether a pooler may give the session of this connection to another client. Changes no session.

    A pooler in session mode also sends process IDs that differ from the server's. So `detect_pooler` is not enough:
    this function opens other connections, and compares the process IDs of the server.
    """
    first = _backend_pid(connection)
    for _ in range(_POOLER_CHECKS):
        with psycopg.connect(full_dsn) as other:
            if _backend_pid(other) == first or _backend_pid(connection) != first:
                return True
    return False


def _backend_pid(connection: Connection) -> int:
    row = connection.execute(SELECT_BACKEND_PID, prepare=False).fetchone()
    assert row is not None
    return int(row[0])


def describe_sessions(connection: Connection, pids: list[int]) -> str:
    """Describe server processes for a message: pid, user, application name, state, start of the transaction.

    `pids`: process IDs; 0 means prepared transactions, as in `pg_blocking_pids`. Ended processes are left out.
    """
    rows = connection.execute(
        """
        select pid, coalesce(usename, '-'), coalesce(nullif(application_name, ''), '-'),
            coalesce(state, 'state not shown'), to_char(xact_start at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS"Z"')
        from pg_stat_activity where pid = any (%s) order by xact_start nulls last, pid
        """,
        [pids],
    ).fetchall()
    sessions = [
        f"pid {pid} (user {user}, session named {name}, {state}{f' since {since}' if since else ''})"
        for pid, user, name, state, since in rows
    ]
    return "; ".join(sessions + ["a prepared transaction (see pg_prepared_xacts)"] * (0 in pids))


# pg_locks no longer has a wait that has timed out. So this query lists up to 10 sessions that have, or wait for, a
# strong lock on a table: on a table of Tidemark if there is such a lock, otherwise on any table.
_LOCKING_PIDS = """
with locks as (
    select coalesce(l.pid, 0) as pid,
        c.relnamespace in (to_regnamespace('tidemark'), to_regnamespace('tidemark_reader')) as is_ours
    from pg_locks l join pg_class c on c.oid = l.relation
    where l.locktype = 'relation' and l.pid is distinct from pg_backend_pid()
        and l.database = (select oid from pg_database where datname = current_database())
        and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
)
select distinct pid from locks where is_ours = (select bool_or(is_ours) from locks) limit 10
"""


def describe_lock_timeout(error: psycopg.Error, other_session: Connection) -> str:
    """Describe a lock time-out: the first line of `error`, and possible owners of the lock, read on `other_session`."""
    sessions = describe_sessions(other_session, [pid for (pid,) in other_session.execute(_LOCKING_PIDS).fetchall()])
    return first_line(error) + (f"; possibly locked by {sessions}" if sessions else "")


def fetch_all(
    connection: Connection, row: Callable[..., Row], statement: Statement, parameters: Params | None = None
) -> list[Row]:
    """Run a query, and call `row` for each row, with the columns as keyword arguments. Returns the results of `row`."""
    with connection.cursor(row_factory=kwargs_row(row)) as cursor:
        return cursor.execute(statement, parameters).fetchall()


def fetch_one(
    connection: Connection, row: Callable[..., Row], statement: Statement, parameters: Params | None = None
) -> Row | None:
    """Run a query, and return the result of `row` for the first row (see `fetch_all`); None if there are no rows."""
    with connection.cursor(row_factory=kwargs_row(row)) as cursor:
        return cursor.execute(statement, parameters).fetchone()


def fetch_value(connection: Connection, statement: Statement, parameters: Params | None = None) -> Any:
    """Run a query and return the first column of its first row; None if there are no rows."""
    row = connection.execute(statement, parameters).fetchone()
    return None if row is None else row[0]


class PostgresSession:
    """A connection in autocommit that reconnects; a context manager. Callers begin their own transactions. Thread-safe.

    After `Unavailable`, repeat the whole transaction: the transaction was rolled back, or the answer to the commit was
    lost. Until the first successful connection, a failed login is `Refused`. Later, a failed login is `Unavailable`,
    because libpq does not distinguish a wrong password from a server without free connections.
    """

    def __init__(self, dsn: Dsn, application: str, database: DatabaseUse) -> None:
        self._dsn = dsn
        self._application = application
        self._database = database
        self.where = address(self._resolve_dsn(), database.setting)
        self._has_connected = False
        self._connection: Connection | None = None
        self._role = ""
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Lock the session for this thread, connect if needed, and yield the connection. A thread may nest blocks.

        Errors of psycopg in the block are converted as by `explain_error`; a lock time-out becomes `Unavailable`.
        """
        with self._lock:
            try:
                yield self._open_connection()
            except LockNotAvailable as error:
                problem = first_line(error)
                with suppress(TidemarkError, psycopg.Error), self.new_session() as other, other.use() as connection:
                    problem = describe_lock_timeout(error, connection)
                raise Unavailable("Postgres", self.where, problem) from error
            except psycopg.Error as error:
                raise explain_error(error, self.where, self._database.remedies, self._role) from error

    def fetch_all(self, row: Callable[..., Row], statement: Statement, parameters: Params | None = None) -> list[Row]:
        """`fetch_all` on the connection of this session."""
        with self.use() as connection:
            return fetch_all(connection, row, statement, parameters)

    def fetch_one(self, row: Callable[..., Row], statement: Statement, parameters: Params | None = None) -> Row | None:
        """`fetch_one` on the connection of this session."""
        with self.use() as connection:
            return fetch_one(connection, row, statement, parameters)

    def fetch_value(self, statement: Statement, parameters: Params | None = None) -> Any:
        """`fetch_value` on the connection of this session."""
        with self.use() as connection:
            return fetch_value(connection, statement, parameters)

    def fetch_tuples(self, statement: Statement, parameters: Params | None = None) -> list[TupleRow]:
        """Run a query, and return its rows as tuples. For large results and for key-value pairs."""
        with self.use() as connection:
            return connection.execute(statement, parameters).fetchall()

    def execute(self, statement: Statement, parameters: Params | None = None) -> int:
        """Run one statement, and return its `rowcount`. Commits, unless in a transaction."""
        with self.use() as connection:
            return connection.execute(statement, parameters).rowcount

    def new_session(self) -> "PostgresSession":
        """Create another session with the same parameters. It connects at its first use."""
        return PostgresSession(self._dsn, self._application, self._database)

    def close(self) -> None:
        """Close the connection. The next `use()` opens another one."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _open_connection(self) -> Connection:
        if self._pid != os.getpid():
            self._pid, self._connection = os.getpid(), None  # the parent process still uses the old connection
        if self._connection is None or self._connection.closed or self._connection.broken:
            connection = self._connect()
            if self._database.pooler_remedy and connection.is_pooled:
                if _is_pooled(connection, self._full_dsn()):
                    connection.close()
                    problem = "a pooler may give each transaction another session"
                    raise Refused("Postgres", self.where, problem, self._database.pooler_remedy)
                connection.apply_to_session(dict(self._database.options))
            self._connection, self._role = connection, connection.role
            self._has_connected = True
        return self._connection

    def _connect(self) -> SessionConnection:
        setting, password = self._database.setting, self._database.password
        full_dsn, options = self._full_dsn(), dict(self._database.options)
        try:
            return SessionConnection.open(full_dsn, options)
        except psycopg.OperationalError as error:
            if self._has_connected or error.sqlstate is not None:
                raise
            if _TLS_PROBLEM_PATTERN.search(str(error)):
                do = f"check sslmode, sslrootcert, sslcert and sslkey in {setting}"
                raise Refused("Postgres", self.where, first_line(error), do) from error
            if is_outage(error) or not is_reachable(full_dsn):
                raise
        # The server refused the login, or the server became available between the two calls: try once more.
        try:
            return SessionConnection.open(full_dsn, options)
        except psycopg.OperationalError as error:
            if error.sqlstate is not None or is_outage(error):
                raise
            do = f"check user, password and database in {setting}" + (f", or {password}" if password else "")
            raise Refused("Postgres", self.where, first_line(error), do) from error

    def _full_dsn(self) -> str:
        return conninfo(self._resolve_dsn(), self._application, self._database.setting)

    def _resolve_dsn(self) -> str:
        return self._dsn if isinstance(self._dsn, str) else self._dsn()
