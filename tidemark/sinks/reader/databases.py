"""The databases of a reader: addresses, transactions of the service's library, errors, and the wait for a replica.

A position is published after the commits that the position covers. So when a reader has read a position, these commits
are in the primary's write-ahead log. A replica must replay the log up to its current end before the replica is read.

A service may let its own library (SQLAlchemy, a psycopg pool, or Django) open the transactions in the reader's own
database. A batch is then handed over with a session of this library, which also commits the batch. The statements of
the reader run on the underlying psycopg connection, in the same transaction. A library is imported only if it is used.
"""

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import psycopg
from psycopg import sql
from psycopg.adapt import Transformer
from psycopg.errors import LockNotAvailable
from psycopg.pq import TransactionStatus

from tidemark.common.errors import BadSetting, BatchTimedOut, Refused, RowUnreadable, TidemarkError, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.postgres_address import address, conninfo
from tidemark.common.postgres_session import (
    SessionConnection,
    describe_lock_timeout,
    explain_error,
    first_line,
    is_outage,
    is_reachable,
)
from tidemark.sinks.reader.requests import Answer, Pause, Request, Role, Row, RunSql, fetch_rows

BEGIN = "select 1"  # SQLAlchemy and Django begin a transaction in the database only with the first statement


@dataclass(frozen=True, slots=True)
class EffectsTransaction:
    """An open transaction in the reader's own database.

    Attributes:
        session: the object that the service gets as `batch.connection`.
        driver: the underlying psycopg connection, for threads or for asyncio.
        savepoint: returns a context manager that runs its block in a savepoint of the session.
    """

    session: Any
    driver: Any
    savepoint: Callable[[], Any]

    @property
    def has_ended(self) -> bool:
        """Whether the service has ended the transaction, or closed its connection. False if the connection was lost."""
        if self.driver.closed:
            return not self.driver.broken
        return bool(self.driver.info.transaction_status == TransactionStatus.IDLE)


class BatchRolledBack(Exception):
    """Raised into the block of an `EffectsTransaction`, so that the block ends without a commit."""


def transaction_factory(effects: Any) -> Callable[[], AbstractContextManager[EffectsTransaction]] | None:
    """Return a function that opens a transaction with `effects`; None if `effects` is an address.

    The function returns a context manager that commits, or rolls back after an error.

    Raises:
        BadSetting: `effects` is neither an address nor an object of a known library.
    """
    return None if isinstance(effects, str) else partial(_begin, _check_effects(effects))


def async_transaction_factory(effects: Any) -> Callable[[], AbstractAsyncContextManager[EffectsTransaction]] | None:
    """`transaction_factory` for asyncio."""
    return None if isinstance(effects, str) else partial(_async_begin, _check_effects(effects))


def find_psycopg_error(error: BaseException | None) -> psycopg.Error | None:
    """Return the error of psycopg that `error` is, or that SQLAlchemy or Django has wrapped; None if there is none."""
    while error is not None and not isinstance(error, psycopg.Error):
        error = getattr(error, "orig", None) or error.__cause__
    return error


def _check_effects(effects: Any) -> Any:
    """Return `effects`. Raise `BadSetting` unless it is a pool, an engine, a session maker or Django's connection."""
    if hasattr(effects, "getconn") or hasattr(effects, "ensure_connection") or _is_engine(effects) or callable(effects):
        return effects
    problem = (
        f"is a {type(effects).__name__}: give an address, a pool, an engine, a session maker or Django's connection"
    )
    raise BadSetting("effects", problem)


def _is_engine(effects: Any) -> bool:
    return hasattr(effects, "dialect") and hasattr(effects, "connect")


def _check_driver(driver: Any, driver_class: type[Any]) -> Any:
    """Return the connection `driver`. Raise `BadSetting` if it is not of psycopg 3."""
    if not isinstance(driver, driver_class):
        raise BadSetting(
            "effects", f"its connections are of {type(driver).__module__}: give an object that uses psycopg 3"
        )
    return driver


@contextmanager
def _begin(effects: Any) -> Iterator[EffectsTransaction]:
    """Run the block in a transaction of a pool, an engine, a session maker or Django's connection."""
    if hasattr(effects, "getconn"):  # a pool of psycopg
        with effects.connection() as connection, connection.transaction():
            yield EffectsTransaction(connection, connection, connection.transaction)
    elif hasattr(effects, "ensure_connection"):  # Django's connection
        from django.db import transaction  # noqa: PLC0415 - only services that use Django have it

        savepoint = partial(transaction.atomic, using=effects.alias)
        with savepoint(durable=True), effects.cursor() as cursor:
            driver = _check_driver(cursor.connection, psycopg.Connection)
            driver.execute(BEGIN)
            yield EffectsTransaction(effects, driver, savepoint)
    else:
        from sqlalchemy.orm import Session  # noqa: PLC0415 - only services that use SQLAlchemy have it

        with Session(effects) if _is_engine(effects) else effects() as session, session.begin():
            driver = _check_driver(session.connection().connection.driver_connection, psycopg.Connection)
            driver.execute(BEGIN)
            yield EffectsTransaction(session, driver, session.begin_nested)


@asynccontextmanager
async def _async_begin(effects: Any) -> AsyncIterator[EffectsTransaction]:
    """`_begin` for asyncio."""
    if hasattr(effects, "getconn"):
        async with effects.connection() as connection, connection.transaction():
            yield EffectsTransaction(connection, connection, connection.transaction)
    elif hasattr(effects, "ensure_connection"):
        raise BadSetting("effects", "Django has no transactions for asyncio: use tidemark.Reader")
    else:
        from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415 - only services that use SQLAlchemy have it

        async with AsyncSession(effects) if _is_engine(effects) else effects() as session, session.begin():
            raw = await (await session.connection()).get_raw_connection()
            driver = _check_driver(raw.driver_connection, psycopg.AsyncConnection)
            await driver.execute(BEGIN)
            yield EffectsTransaction(session, driver, session.begin_nested)


AnyConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
AnyCursor: TypeAlias = psycopg.Cursor[Row] | psycopg.AsyncCursor[Row]

# SQLSTATE, or its first two characters -> what a person must do.
_REMEDIES: Mapping[str, str] = {
    "25P02": "a statement on the batch's connection failed and its error was swallowed: put statements that may"
    " fail into a savepoint (batch.parking, or `with batch.connection.transaction()`)",
    "28": "check user and password",
    "3D": "create the database, or correct its name",
    "42501": "grant the reader's user select on the backing table, and create on its own database for the schema"
    " tidemark_reader",
    "42P01": "check the name of the table",
    "42703": "check the names of the columns",
}


# SQLSTATE -> the setting of Postgres that ended the transaction.
_TIME_LIMIT_SETTINGS: Mapping[str, str] = {
    "25P03": "idle_in_transaction_session_timeout",
    "25P04": "transaction_timeout",
}


@dataclass(frozen=True, slots=True)
class Databases:
    """The addresses of a reader's databases, which may contain passwords, and the errors of these databases.

    Attributes:
        source: the address of the database with the backing table.
        effects: the address of the reader's own database; empty if a library of the service opens the transactions.
        primary: the address of the server that `source` is a replica of; None if `source` is not a replica.
    """

    source: str = field(repr=False)
    effects: str = field(repr=False)
    primary: str | None = field(default=None, repr=False)

    def conninfo(self, role: Role, reader: str) -> str:
        """Return the connection string of a role. Its `application_name` has the name of the reader."""
        # Operators count the copies of a reader by this name: each copy has one connection to the database with the
        # place.
        suffix = "" if role == "place" else f" ({role})"
        return conninfo(self._dsn(role), f"{APPLICATION_PREFIX}{reader}{suffix}")

    @contextmanager
    def translate_errors(self, role: Role, sessions: Mapping[Role, AnyConnection]) -> Iterator[None]:
        """Convert errors of psycopg in the block to `Unavailable` and `Refused`.

        After `Unavailable`, the reader continues from the stored checkpoint. `BatchTimedOut` is an `Unavailable` for a
        transaction that the server ended. Other errors are raised unchanged.

        Args:
            role: the database that the block uses.
            sessions: the open connections. A refusal names the user of the role's connection, if there is one.
        """
        try:
            yield
        except TidemarkError:
            raise  # already converted by `raise_if_refused`
        except Exception as error:
            cause = find_psycopg_error(error)
            if cause is None:
                raise
            where = address(self._dsn(role)) if self._dsn(role) else "effects"
            if role == "place" and (setting := _time_limit_setting(cause)):
                raise BatchTimedOut("Postgres", where, first_line(cause), setting) from error
            problem = explain_error(cause, where, _REMEDIES, getattr(sessions.get(role), "role", ""))
            if problem is cause:
                raise
            raise problem from error

    def raise_if_refused(self, role: Role, error: psycopg.OperationalError) -> None:
        """Raise `Refused` if the server answers, but refuses this user. May connect to the server to check that.

        Call this only if the first connection of the role fails with `error`. Later, an error that looks like a refusal
        may be temporary: libpq reports some temporary problems in the same way as a wrong password.
        """
        if error.sqlstate is None and not is_outage(error) and is_reachable(conninfo(self._dsn(role), "")):
            raise Refused(
                "Postgres", address(self._dsn(role)), first_line(error), "check user, password and database"
            ) from error

    def name_lock_sessions(self, role: Role, error: Unavailable) -> Unavailable:
        """For a lock time-out, return an error that also names the sessions that may hold the lock.

        Opens a connection to query these sessions. Returns `error` unchanged if it is not a lock time-out, if the query
        fails, or if there is no DSN for `role` because a library of the service opens the connections.
        """
        if not isinstance(error.__cause__, LockNotAvailable) or not self._dsn(role):
            return error
        with suppress(TidemarkError, psycopg.Error), SessionConnection.open(self.conninfo(role, "lock waits")) as other:
            return Unavailable("Postgres", error.where, describe_lock_timeout(error.__cause__, other))
        return error

    def _dsn(self, role: Role) -> str:
        match role:
            case "source":
                return self.source
            case "place":
                return self.effects
            case "primary":
                assert self.primary is not None
                return self.primary


def _time_limit_setting(error: psycopg.Error) -> str | None:
    """The setting because of which the server ended an idle or long transaction; None for another error."""
    if (setting := _TIME_LIMIT_SETTINGS.get(error.sqlstate or "")) is not None:
        return setting
    return "idle_transaction_timeout of PgBouncer" if "idle transaction timeout" in str(error) else None


def row_error(cursor: AnyCursor, request: RunSql, error: Exception) -> Exception:
    """Return a `RowUnreadable` if psycopg cannot convert a fetched row of the cursor; otherwise return `error`.

    Args:
        cursor: the cursor whose fetch raised `error`.
        request: names the column whose value names the row in the `RowUnreadable`.
        error: the error of the fetch.
    """
    result, names = cursor.pgresult, [column.name for column in cursor.description or ()]
    if result is None or request.id_column not in names:
        return error
    loader = Transformer(cursor)
    loader.set_pgresult(result)
    for number in range(result.ntuples):
        try:
            loader.load_row(number, tuple)
        except Exception as problem:  # noqa: BLE001 - whatever a type's loader raises
            id = result.get_value(number, names.index(request.id_column))
            return RowUnreadable((id or b"null").decode(), f"{type(problem).__name__}: {problem}")
    return error


log = get_logger(__name__)

APPLICATION_PREFIX = "tidemark reader "
"""The prefix of the `application_name` of a copy's connection, before the name of the reader."""

POLL_SECONDS = 0.01  # between two queries of the replica's replay position
POLLS_PER_WARNING = 1000

_INSERT_LSN_QUERY = sql.SQL(
    "select (pg_current_wal_insert_lsn() - '0/0')::bigint as lsn,"
    " (select setting::bigint from pg_settings where name = 'wal_segment_size') as segment"
).format()
_REPLAY_LSN_QUERY = sql.SQL(
    "select (coalesce(case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
    " else pg_current_wal_insert_lsn() end, '0/0') - '0/0')::bigint as lsn"
).format()

PAGE_SIZE = 8192  # bytes
SHORT_HEADER, LONG_HEADER = 24, 40  # bytes of a page header, and of the header of a segment's first page


def wait_for_replica() -> Generator[Request, Answer, None]:
    """Wait, without a time limit, until `source` has replayed all WAL that `primary` inserted before the call."""
    (written,) = yield from fetch_rows(RunSql("primary", _INSERT_LSN_QUERY))
    target = end_of_records(written["lsn"], written["segment"])
    polls = 0
    while True:
        (replayed,) = yield from fetch_rows(RunSql("source", _REPLAY_LSN_QUERY))
        if replayed["lsn"] >= target:
            return
        polls += 1
        if polls % POLLS_PER_WARNING == 0:
            log.warning(
                "Waiting until the replica has replayed the write-ahead log of the primary",
                bytes=target - replayed["lsn"],
            )
        yield Pause(POLL_SECONDS)


def end_of_records(insert: int, segment: int) -> int:
    """Return the end of the last record in the write-ahead log of a primary. All values are in bytes.

    If `insert` is the first byte after a page header, no record reaches into the new page. A replica that has replayed
    everything then reports the position before the header, until the next record is written.

    Args:
        insert: the insert position of the primary, in bytes from the start of the log.
        segment: the size of a log segment.
    """
    if insert % segment == LONG_HEADER:
        return insert - LONG_HEADER
    if insert % PAGE_SIZE == SHORT_HEADER:
        return insert - SHORT_HEADER
    return insert
