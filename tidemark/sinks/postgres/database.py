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

_BIGINT_OID, _BIGINT_ARRAY_OID = 20, 1016
_BYTEA_OID, _BYTEA_ARRAY_OID = 17, 1001
_pack_length = struct.Struct("!i").pack
_NULL = _pack_length(-1)


def encode_column(column: Sequence[Any]) -> Any:
    """Convert `column` to one parameter of a statement, which must cast the parameter to an array. None becomes null.

    All values must have the same type. If the type is not text, bytes, integer or boolean, returns a list, which
    psycopg adapts.
    """
    kind: type[Any] = next((type(value) for value in column if value is not None), type(None))
    if issubclass(kind, str):
        return _encode_texts(column)
    if issubclass(kind, bytes):
        return _encode_byteas(column)
    if kind is not bool and issubclass(kind, int):
        return _encode_bigints(column)
    if kind is bool or kind is type(None):
        return _format_array(column, str)
    return list(column)


class _BigintArray(bytes):
    pass


class _ByteaArray(bytes):
    pass


class _BigintArrayDumper(Dumper):
    format = Format.BINARY
    oid = _BIGINT_ARRAY_OID

    def dump(self, obj: Buffer) -> Buffer:
        return obj


class _ByteaArrayDumper(_BigintArrayDumper):
    oid = _BYTEA_ARRAY_OID


psycopg.adapters.register_dumper(_BigintArray, _BigintArrayDumper)
psycopg.adapters.register_dumper(_ByteaArray, _ByteaArrayDumper)


def _encode_bigints(column: Sequence[Any]) -> Any:
    try:
        numbers = array("q", column)
    except (TypeError, OverflowError):  # a null, or a number that exceeds bigint
        return _format_array(column, str)
    if sys.byteorder == "little":
        numbers.byteswap()
    data = numbers.tobytes()
    elements = bytearray(_pack_length(8) + bytes(8)) * len(column)
    for byte in range(8):
        elements[4 + byte :: 12] = data[byte::8]
    return _BigintArray(_array_header(_BIGINT_OID, len(column)) + elements)


def _encode_byteas(column: Sequence[bytes | None]) -> _ByteaArray:
    parts = [_array_header(_BYTEA_OID, len(column))]
    for value in column:
        parts += (_NULL,) if value is None else (_pack_length(len(value)), value)
    return _ByteaArray(b"".join(parts))


def _array_header(element: int, length: int) -> bytes:
    """The header of a binary array: one dimension, nulls allowed, lower bound 1. `element` is the OID of the type."""
    return struct.pack("!iiIii", 1, 1, element, length, 1)


def _encode_texts(column: Sequence[Any]) -> str:
    try:
        joined = '","'.join(column)
    except TypeError:
        return _format_array(column, _quote)
    if "\\" in joined or joined.count('"') > 2 * (len(column) - 1):
        return _format_array(column, _quote)
    return '{"' + joined + '"}'


def _format_array(column: Sequence[Any], format_value: Callable[[Any], str]) -> str:
    return "{" + ",".join(["null" if value is None else format_value(value) for value in column]) + "}"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


_DATABASE_USE = DatabaseUse(
    "TIDEMARK_POSTGRES_DSN",
    remedies={
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
"""The oldest schema version that this code can read. A sidecar may be newer than the code that migrated the schema."""


def session_of(dsn: Dsn, application: str) -> PostgresSession:
    """Create a session to Tidemark's database. `application`: the `application_name` of the session."""
    return PostgresSession(dsn, application, _DATABASE_USE)


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
    return connection.execute(statement, [*map(encode_column, columns), *arguments]) if columns else None
