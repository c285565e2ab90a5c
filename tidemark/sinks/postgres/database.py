"""Tidemark's own database, as the pipeline and its readers use it: sessions, the schema, and many rows in a statement.

The schema `tidemark` is made by the files in `migrations/`; see `common.migrations`.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, LiteralString, TypeAlias

import psycopg
from psycopg import Cursor
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.rows import TupleRow

from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession

_BIGINT, _BIGINTS = 20, 1016
_BYTEA, _BYTEAS = 17, 1001
_length = struct.Struct("!i").pack
_NULL = _length(-1)


def as_array(column: Sequence[Any]) -> Any:
    """`column` as a parameter; None is null. Of what is neither text nor bytes nor a number, psycopg's list."""
    kind: type[Any] = next((type(it) for it in column if it is not None), type(None))
    if issubclass(kind, str):
        return _texts(column)
    if issubclass(kind, bytes):
        return _byteas(column)
    if kind is not bool and issubclass(kind, int):
        return _bigints(column)
    if kind is bool or kind is type(None):
        return _literal(column, str)
    return list(column)


class _Bigints(bytes):
    pass


class _Byteas(bytes):
    pass


class _BigintsDumper(Dumper):
    format = Format.BINARY
    oid = _BIGINTS

    def dump(self, obj: Buffer) -> Buffer:
        return obj


class _ByteasDumper(_BigintsDumper):
    oid = _BYTEAS


psycopg.adapters.register_dumper(_Bigints, _BigintsDumper)
psycopg.adapters.register_dumper(_Byteas, _ByteasDumper)


def _bigints(column: Sequence[Any]) -> Any:
    try:
        numbers = array("q", column)
    except (TypeError, OverflowError):  # a null, or none that the server would take
        return _literal(column, str)
    if sys.byteorder == "little":
        numbers.byteswap()
    found = numbers.tobytes()
    elements = bytearray(_length(8) + bytes(8)) * len(column)
    for place in range(8):
        elements[4 + place :: 12] = found[place::8]
    return _Bigints(_head(_BIGINT, len(column)) + elements)


def _byteas(column: Sequence[bytes | None]) -> _Byteas:
    parts = [_head(_BYTEA, len(column))]
    for it in column:
        parts += (_NULL,) if it is None else (_length(len(it)), it)
    return _Byteas(b"".join(parts))


def _head(element: int, length: int) -> bytes:
    """One dimension, nulls allowed, from index 1."""
    return struct.pack("!iiIii", 1, 1, element, length, 1)


def _texts(column: Sequence[Any]) -> str:
    try:
        together = '","'.join(column)
    except TypeError:
        return _literal(column, _quoted)
    if "\\" in together or together.count('"') > 2 * (len(column) - 1):
        return _literal(column, _quoted)
    return '{"' + together + '"}'


def _literal(column: Sequence[Any], written: Callable[[Any], str]) -> str:
    return "{" + ",".join(["null" if it is None else written(it) for it in column]) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


_USE = DatabaseUse(
    "TIDEMARK_POSTGRES_DSN",
    refusals={
        "28": "check the user and the password in TIDEMARK_POSTGRES_DSN, or TIDEMARK_POSTGRES_PASSWORD",
        "3D": "create the database, or correct its name in TIDEMARK_POSTGRES_DSN",
        "3F": "run `tidemark migrate`",
        "42P01": "run `tidemark migrate`",
        "42501": "grant the user the role tidemark_owner (who only looks: tidemark_reader; who acts by hand:"
        " tidemark_operator too), or run `tidemark migrate` as a user who may create a schema",
    },
    password="TIDEMARK_POSTGRES_PASSWORD",
)

SCHEMA = Migrations("tidemark.sinks.postgres", "schema_version", "tidemark migrate")
READABLE = 4
"""The oldest schema that this version can read. A sidecar may be newer than the pipeline that migrated the schema."""


def session_of(dsn: Dsn, application: str) -> PostgresSession:
    """A session to Tidemark's database; `application` is its name among the sessions of the server."""
    return PostgresSession(dsn, application, _USE)


def migrate(dsn: Dsn) -> list[int]:
    """`SCHEMA.migrate` in a session of its own."""
    with session_of(dsn, "tidemark migrate") as session:
        return SCHEMA.migrate(session)


Rows: TypeAlias = Iterable[tuple[Any, ...]]


def execute(connection: Connection, statement: LiteralString, rows: Rows, *more: object) -> Cursor[TupleRow] | None:
    """Run `statement` with one array per column of `rows`, then `more`; without rows nothing runs and None comes back.

    The statement casts each array (`postgres.arrays`). None is null.
    """
    columns = list(zip(*rows, strict=True))
    return connection.execute(statement, [*map(as_array, columns), *more]) if columns else None
