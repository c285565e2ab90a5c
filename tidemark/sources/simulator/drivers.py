"""The drivers by which a play's services reach their database: psycopg, SQLAlchemy on it, and asyncpg.

The last two only where they are installed; they are no part of `tidemark-streams[local]`.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import psycopg
from msgspec import json
from psycopg.conninfo import conninfo_to_dict

from tidemark.sources.writer import Writer

T = TypeVar("T")

Row = dict[str, int]


class BrokenOff(Exception):
    """The transaction is lost, with its connection or without: begin again with another."""


class Undone(Exception):
    """Raised inside a transaction that is to be rolled back."""


class ServiceConnection(Protocol):
    """One connection of a service that appends as `writer`. Everything raises `BrokenOff`."""

    def transaction(self) -> AbstractContextManager[object]:
        """A transaction, or inside another one a savepoint; `Undone` passes through it."""

    def append(self, stream: str, *rows: Row) -> int: ...

    def append_many(self, stream: str, rows: Sequence[Row]) -> list[int]: ...

    def reserve(self, stream: str) -> int: ...

    def complete(self, stream: str, id: int, *rows: Row) -> None: ...

    def insert(self, stream: str, id: int, part: int) -> None:
        """A row of the service's own table, which is called like the stream."""


Driver = Callable[[str, str], AbstractContextManager[ServiceConnection]]
"""Of a DSN and a writer a new connection. Raises `BrokenOff`."""


def installed() -> list[Driver]:
    others = {"sqlalchemy": by_sqlalchemy, "asyncpg": by_asyncpg}
    return [by_psycopg, *(driver for name, driver in others.items() if find_spec(name))]


_INSERT = 'insert into demo."{}" (stream_id, part, writer, written_at) values (%s, %s, %s, now())'


class _OfWriter:
    """By `tidemark.Writer`, which knows both kinds of connection."""

    def __init__(
        self, connection: Any, name: str, execute: Callable[[str, Any], object], begin: Callable[[], Any]
    ) -> None:
        self._connection = connection
        self._writer = Writer(name)
        self._name = name
        self._execute = execute
        self.transaction = begin

    def append(self, stream: str, *rows: Row) -> int:
        return self._writer.append(self._connection, stream, *rows)

    def append_many(self, stream: str, rows: Sequence[Row]) -> list[int]:
        return self._writer.append_many(self._connection, stream, rows)

    def reserve(self, stream: str) -> int:
        return self._writer.reserve(self._connection, stream)

    def complete(self, stream: str, id: int, *rows: Row) -> None:
        self._writer.complete(self._connection, stream, id, *rows)

    def insert(self, stream: str, id: int, part: int) -> None:
        self._execute(_INSERT.format(stream), (id, part, self._name))


@contextmanager
def lost(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as problem:
        raise BrokenOff(str(problem)) from problem


@contextmanager
def by_psycopg(dsn: str, name: str) -> Iterator[ServiceConnection]:
    with (
        lost(psycopg.OperationalError, psycopg.InterfaceError),
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        yield _OfWriter(connection, name, connection.execute, connection.transaction)


@contextmanager
def by_sqlalchemy(dsn: str, name: str) -> Iterator[ServiceConnection]:
    from sqlalchemy import create_engine  # noqa: PLC0415  # need not be installed
    from sqlalchemy.exc import DBAPIError, InvalidRequestError  # noqa: PLC0415  # need not be installed
    from sqlalchemy.pool import NullPool  # noqa: PLC0415  # need not be installed

    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)
    # What follows a lost connection inside a transaction is an InvalidRequestError.
    with (
        lost(psycopg.OperationalError, psycopg.InterfaceError, DBAPIError, InvalidRequestError),
        engine.connect() as connection,
    ):

        def begin() -> Any:
            return connection.begin_nested() if connection.in_transaction() else connection.begin()

        yield _OfWriter(connection, name, connection.exec_driver_sql, begin)


@contextmanager
def by_asyncpg(dsn: str, name: str) -> Iterator[ServiceConnection]:
    import asyncpg  # noqa: PLC0415  # need not be installed

    kinds = [asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.OperatorInterventionError]
    at = conninfo_to_dict(dsn)
    names = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    with lost(*kinds, asyncpg.InsufficientResourcesError, OSError), asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(**{to: at[name] for name, to in names.items() if name in at}))
        try:
            yield _OfAsyncpg(connection, runner, name)
        finally:
            connection.terminate()


class _OfAsyncpg:
    """By the SQL functions, without `tidemark.Writer`."""

    def __init__(self, connection: Any, runner: asyncio.Runner, name: str) -> None:
        self._connection = connection
        self._runner = runner
        self._name = name

    @contextmanager
    def transaction(self) -> Iterator[None]:
        under_way = self._connection.transaction()
        self._runner.run(under_way.start())
        try:
            yield
        except BaseException:
            if not self._connection.is_closed():
                self._runner.run(under_way.rollback())
            raise
        self._runner.run(under_way.commit())

    def append(self, stream: str, *rows: Row) -> int:
        return int(self._value("select tidemark.append_as($1, $2, variadic $3)", self._name, stream, _json(rows)))

    def append_many(self, stream: str, rows: Sequence[Row]) -> list[int]:
        return [*self._value("select tidemark.append_many($1, $2, writer => $3)", stream, _json(rows), self._name)]

    def reserve(self, stream: str) -> int:
        return int(self._value("select tidemark.reserve($1, writer => $2)", stream, self._name))

    def complete(self, stream: str, id: int, *rows: Row) -> None:
        self._value("select tidemark.complete($1, $2, variadic $3)", stream, id, _json(rows))

    def insert(self, stream: str, id: int, part: int) -> None:
        numbered = _INSERT.format(stream) % ("$1", "$2", "$3")
        self._runner.run(self._connection.execute(numbered, id, part, self._name))

    def _value(self, statement: str, *params: object) -> Any:
        return self._runner.run(self._connection.fetchval(statement, *params))


def _json(rows: Sequence[Row]) -> list[str]:
    return [json.encode(row).decode() for row in rows]
