"""Sessions to Tidemark's database, the migrations of the database, and statements whose parameters are whole columns.

The files in `migrations/` create the schema `tidemark`; see `common.migrations`.

A column of rows is sent as one array parameter, because psycopg would adapt each element of a list separately. Arrays
of integers and of bytes are sent in Postgres's binary format: the text format is two to four times as long, and
Postgres has to parse it. Arrays of texts are sent in the text format.
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

from tidemark.common.log import Progress, no_progress
from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession

_BIGINT, _BIGINTS = 20, 1016
_BYTEA, _BYTEAS = 17, 1001
_pack_length = struct.Struct("!i").pack
_NULL = _pack_length(-1)


def as_array(column: Sequence[Any]) -> Any:
    """Convert `column` to one parameter of a statement. Postgres casts the parameter to an array. None becomes null.

    The values must have one type. A column of another type than text, bytes, integer or boolean is returned as a list,
    which psycopg adapts.
    """
    kind: type[Any] = next((type(value) for value in column if value is not None), type(None))
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
    except (TypeError, OverflowError):  # a null, or a number that exceeds bigint
        return _literal(column, str)
    if sys.byteorder == "little":
        numbers.byteswap()
    data = numbers.tobytes()
    elements = bytearray(_pack_length(8) + bytes(8)) * len(column)
    for byte in range(8):
        elements[4 + byte :: 12] = data[byte::8]
    return _Bigints(_array_header(_BIGINT, len(column)) + elements)


def _byteas(column: Sequence[bytes | None]) -> _Byteas:
    parts = [_array_header(_BYTEA, len(column))]
    for value in column:
        parts += (_NULL,) if value is None else (_pack_length(len(value)), value)
    return _Byteas(b"".join(parts))


def _array_header(element: int, length: int) -> bytes:
    """The header of a binary array: one dimension, nulls allowed, lower bound 1. `element` is the OID of the type."""
    return struct.pack("!iiIii", 1, 1, element, length, 1)


def _texts(column: Sequence[Any]) -> str:
    try:
        joined = '","'.join(column)
    except TypeError:
        return _literal(column, _quoted)
    if "\\" in joined or joined.count('"') > 2 * (len(column) - 1):
        return _literal(column, _quoted)
    return '{"' + joined + '"}'


def _literal(column: Sequence[Any], format_value: Callable[[Any], str]) -> str:
    return "{" + ",".join(["null" if value is None else format_value(value) for value in column]) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


_USE = DatabaseUse(
    "TIDEMARK_POSTGRES_DSN",
    refusals={
        "28": "check the user and the password in TIDEMARK_POSTGRES_DSN, or TIDEMARK_POSTGRES_PASSWORD",
        "3D": "create the database, or correct its name in TIDEMARK_POSTGRES_DSN",
        "3F": "run `tidemark migrate`",
        "42P01": "run `tidemark migrate`",
        "42501": "grant the user the role tidemark_owner (to read only: tidemark_reader; for operators: also"
        " tidemark_operator), or run `tidemark migrate` as a user who may create a schema",
    },
    password="TIDEMARK_POSTGRES_PASSWORD",
)

SCHEMA = Migrations("tidemark.sinks.postgres", "schema_version", "tidemark migrate")
OLDEST_READABLE_VERSION = 4
"""The oldest schema that this version can read. A sidecar may be newer than the pipeline that migrated the schema."""


def session_of(dsn: Dsn, application: str) -> PostgresSession:
    """Create a session to Tidemark's database. `application` is the `application_name` that Postgres shows."""
    return PostgresSession(dsn, application, _USE)


def migrate(dsn: Dsn, progress: Progress = no_progress) -> list[int]:
    """Apply the missing migrations to the database `dsn`, and return their versions: see `Migrations.migrate`."""
    with session_of(dsn, "tidemark migrate") as session:
        return SCHEMA.migrate(session, progress)


Rows: TypeAlias = Iterable[tuple[Any, ...]]


def execute(
    connection: Connection, statement: LiteralString, rows: Rows, *arguments: object
) -> Cursor[TupleRow] | None:
    """Run `statement` with an array for each column of `rows`, followed by `arguments`. None in a row becomes null.

    The statement must cast each array, for example `%s::text[]`. If there are no rows, the statement is not run.

    Returns:
        The cursor; None if there are no rows.
    """
    columns = list(zip(*rows, strict=True))
    return connection.execute(statement, [*map(as_array, columns), *arguments]) if columns else None
