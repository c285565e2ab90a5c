"""Writes facts from Python in the caller's transaction, with the SQL functions of docs/how-to/write-facts.md.

    writer = Writer("checkout")
    with psycopg.connect(...) as connection:
        id = writer.append(connection, "orders", {"order": 17})
        connection.execute("insert into orders (id) values (%s)", [id])

A writer has no state except its name, so threads, tasks, forks and processes may share a writer. A writer never commits
or rolls back. With psycopg, each call is one round trip without a prepared statement, so poolers work.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import msgspec
import psycopg
from psycopg.rows import tuple_row

from tidemark.common.errors import BadRow, BadSetting, NotReserved, Refused
from tidemark.common.postgres_address import address
from tidemark.common.postgres_session import explain_row_security, first_line
from tidemark.streaming.wire.records import encode_row, explain_bad_name, is_name, is_writer_name

MAX_ROW_BYTES = 900_000
"""The largest JSON of a row in bytes: Kafka's default limit (1 MB) minus room for the rest of the record."""
MAX_FACT_BYTES = 16_777_216
"""The largest fact in bytes: the JSON of its rows plus 200 bytes for each row. Bounds the relay's memory."""
_ROW_BYTES = 200
"""The bytes that each row adds to the size of a fact, besides its JSON."""
MAX_DEPTH = 256
"""A row that is nested this deep or deeper is refused, because not every JSON parser accepts such a row."""

_APPEND = "select tidemark.append_as(%s, %s, variadic %s::jsonb[])"
_APPEND_MANY = "select tidemark.append_many(%s, %s::jsonb[], writer => %s)"
_RESERVE = "select tidemark.reserve(%s, writer => %s)"
_COMPLETE = "select tidemark.complete(%s, %s::bigint, variadic %s::jsonb[])"

_MIGRATE = "run `tidemark relay migrate` there"
_REMEDIES = {
    "3F000": _MIGRATE,
    "42883": _MIGRATE,
    "42501": "grant the user the role tidemark_append",
    "42704": "create the stream as the owner of the schema: select tidemark.create_stream(...)",
}
# SQLSTATEs:
_BAD_ROW_STATES = {"22P02", "22P05", "54000", "54001"}
_NOT_RESERVED_STATE = "55000"

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]')

_Driver = TypeVar("_Driver", psycopg.Connection[Any], psycopg.AsyncConnection[Any])


class Writer:
    """Appends facts as the writer `name`, which has its own position; without a name, as the writer of the database.

    The argument `connection` of the methods is a connection of psycopg or Django, or a Session or Connection of
    SQLAlchemy on psycopg; `TypeError` for another object. Methods raise `BadRow`, `NotReserved`, `BadSetting` for an
    invalid name, and `Refused` if the stream, the functions or a right are missing. Other errors of the connection are
    raised unchanged. After an error that the database returned, the transaction must be rolled back.
    """

    def __init__(self, name: str | None = None) -> None:
        self._statements = _WriterStatements(_check_writer(name))

    def append(self, connection: object, stream: str, *rows: object) -> int:
        """Append one fact with these rows. Returns the fact's stream ID. The fact is published only if the transaction
        commits.

        A row is a JSON value, such as a dict, and not a JSON text. Wrap a JSON text in `msgspec.Raw`.
        """
        return int(_run(connection, self._statements.append(stream, rows)))

    def append_many(self, connection: object, stream: str, rows: Iterable[object]) -> list[int]:
        """Append one fact for each row. Returns the stream IDs of the facts, in the order of the rows.

        The facts are published only if the transaction commits.
        """
        return list(_run(connection, self._statements.append_many(stream, rows)))

    def reserve(self, connection: object, stream: str) -> int:
        """Reserve the next stream ID and return it. Call `complete` with this ID in the same transaction.

        If the transaction ends without `complete`, the ID gets no fact.
        """
        return int(_run(connection, self._statements.reserve(stream)))

    def complete(self, connection: object, stream: str, id: int, *rows: object) -> None:
        """Append one fact with these rows at the reserved ID. The fact is published only if the transaction commits."""
        _run(connection, self._statements.complete(stream, id, rows))


class AsyncWriter:
    """The same as `Writer`, for asyncio.

    The argument `connection` of the methods is psycopg's AsyncConnection, asyncpg's Connection (also from a pool), or
    an AsyncSession or AsyncConnection of SQLAlchemy on psycopg or asyncpg.
    """

    def __init__(self, name: str | None = None) -> None:
        self._statements = _WriterStatements(_check_writer(name))

    async def append(self, connection: object, stream: str, *rows: object) -> int:
        """See `Writer.append`."""
        return int(await _run_async(connection, self._statements.append(stream, rows)))

    async def append_many(self, connection: object, stream: str, rows: Iterable[object]) -> list[int]:
        """See `Writer.append_many`."""
        return list(await _run_async(connection, self._statements.append_many(stream, rows)))

    async def reserve(self, connection: object, stream: str) -> int:
        """See `Writer.reserve`."""
        return int(await _run_async(connection, self._statements.reserve(stream)))

    async def complete(self, connection: object, stream: str, id: int, *rows: object) -> None:
        """See `Writer.complete`."""
        await _run_async(connection, self._statements.complete(stream, id, rows))


def _check_writer(name: str | None) -> str:
    """Return the name, or an empty text for None. Raises `BadSetting` if the name is invalid."""
    if name is not None and not is_writer_name(name):
        raise BadSetting("writer", explain_bad_name(name))
    return name or ""


@dataclass(frozen=True, slots=True)
class _WriterStatement:
    """A statement that returns one value, with its parameters.

    Attributes:
        statement: the SQL text, with psycopg's placeholders.
        params: the parameters.
        stream: the stream, for errors.
        id: the ID that the statement completes; None for other statements.
    """

    statement: str
    params: Sequence[object]
    stream: str
    id: int | None = None


@dataclass(frozen=True, slots=True)
class _WriterStatements:
    """Makes the statements of one writer. `writer`: the name; empty for the writer of the database."""

    writer: str

    def append(self, stream: str, rows: Sequence[object]) -> _WriterStatement:
        return _WriterStatement(
            _APPEND, [self.writer, stream, _encode_array(stream, rows, MAX_FACT_BYTES)], _check_stream(stream)
        )

    def append_many(self, stream: str, rows: Iterable[object]) -> _WriterStatement:
        if isinstance(rows, str | bytes | Mapping):
            raise TypeError(f"append_many takes rows, not one {type(rows).__name__}")
        return _WriterStatement(_APPEND_MANY, [stream, _encode_array(stream, rows), self.writer], _check_stream(stream))

    def reserve(self, stream: str) -> _WriterStatement:
        return _WriterStatement(_RESERVE, [stream, self.writer], _check_stream(stream))

    def complete(self, stream: str, id: int, rows: Sequence[object]) -> _WriterStatement:
        return _WriterStatement(
            _COMPLETE, [stream, id, _encode_array(stream, rows, MAX_FACT_BYTES)], _check_stream(stream), id
        )


def _check_stream(stream: str) -> str:
    if not is_name(stream):
        raise BadSetting("stream", explain_bad_name(stream))
    return stream


def _encode_array(stream: str, rows: Iterable[object], max_bytes: int | None = None) -> str:
    """Encode the rows as the text of a Postgres array, much faster than psycopg does.

    Args:
        stream: the stream, for errors.
        rows: the rows.
        max_bytes: the largest size of all rows together, as for `MAX_FACT_BYTES`; None for no limit.

    Raises:
        BadRow: a row is not acceptable, or the rows are too large together.
    """
    bodies, size = [], 0
    for row in rows:
        try:
            body = bytes(encode_row(row))
            text = body.decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(stream, f"it is not JSON: {error}") from error
        if problem := _row_problem(row, body):
            raise BadRow(stream, problem)
        size += len(body) + _ROW_BYTES
        if max_bytes is not None and size > max_bytes:
            raise BadRow(stream, f"with this row the fact has {size} bytes, and a fact may have {max_bytes}")
        bodies.append(text.replace("\\", "\\\\").replace('"', '\\"'))
    return '{"' + '","'.join(bodies) + '"}' if bodies else "{}"


def _row_problem(row: object, body: bytes) -> str:
    """Why the row cannot be published; empty if it can. `body`: the JSON of the row."""
    if isinstance(row, bytes | bytearray | memoryview):
        return "it is bytes, which JSON does not have: give the object itself, or JSON text as msgspec.Raw"
    if isinstance(row, str) and _is_json_text(row):
        return (
            "it is a str with the text of a JSON object or array, and would be stored as a string: give the object"
            " itself, or its text as msgspec.Raw"
        )
    if len(body) > MAX_ROW_BYTES:
        return f"it has {len(body)} bytes of JSON, and the limit is {MAX_ROW_BYTES}"
    if b"null" in body and not _is_finite(row):
        return "NaN and Infinity are not JSON"
    if body.count(b"[") + body.count(b"{") >= MAX_DEPTH and _nesting_depth(body) >= MAX_DEPTH:
        return f"it is nested {MAX_DEPTH} deep or deeper, which not every JSON parser accepts"
    return ""


def _is_json_text(row: str) -> bool:
    """Whether the text is the JSON of an object or array."""
    if not row.lstrip().startswith(("{", "[")):
        return False
    try:
        msgspec.json.decode(row)
    except ValueError:
        return False
    return True


def _is_finite(row: object) -> bool:
    """Whether the row contains no NaN or infinite number, which msgspec would encode as null without an error."""
    values = [msgspec.to_builtins(row, enc_hook=lambda _: None)]  # `Raw` is JSON text, which the server checks
    while values:
        match values.pop():
            case float(number):
                if not math.isfinite(number):
                    return False
            case dict(entries):
                values += entries.values()
            case list(items) | tuple(items):
                values += items
    return True


def _nesting_depth(body: bytes) -> int:
    """The largest number of nested objects and arrays in a JSON text."""
    deepest = depth = 0
    for token in _TOKEN.findall(body):
        depth += 1 if token in b"[{" else -1 if token in b"]}" else 0
        deepest = max(deepest, depth)
    return deepest


def _run(original: object, call: _WriterStatement) -> Any:
    """Run a statement on the caller's connection. Returns its value; converts errors (see `Writer`)."""
    driver = _psycopg_connection(original)
    try:
        cursor = psycopg.Cursor(driver, row_factory=tuple_row)
        row = cursor.execute(call.statement.encode(), call.params, prepare=False).fetchone()
    except psycopg.Error as error:
        if (converted := _convert_error(error, driver, call)) is not None:
            raise converted from error
        raise
    return row and row[0]


async def _run_async(original: object, call: _WriterStatement) -> Any:
    """The same as `_run`, for asyncio."""
    driver = await _async_connection(original)
    if not isinstance(driver, psycopg.AsyncConnection):
        return await _run_asyncpg(driver, call)
    try:
        cursor = psycopg.AsyncCursor(driver, row_factory=tuple_row)
        await cursor.execute(call.statement.encode(), call.params, prepare=False)
        row = await cursor.fetchone()
    except psycopg.Error as error:
        if (converted := _convert_error(error, driver, call)) is not None:
            raise converted from error
        raise
    return row and row[0]


async def _run_asyncpg(driver: Any, call: _WriterStatement) -> Any:
    """Run a statement on a connection of asyncpg, or on a connection of SQLAlchemy that uses asyncpg."""
    numbers = count(1)
    # asyncpg encodes each value by the parameter's type, so all values are passed as text.
    statement = re.sub("%s", lambda _: f"${next(numbers)}::text", call.statement)
    try:
        if hasattr(driver, "exec_driver_sql"):
            return (await driver.exec_driver_sql(statement, tuple(map(_as_text, call.params)))).scalar()
        return await driver.fetchval(statement, *map(_as_text, call.params))
    except Exception as error:
        cause: Any = error
        while cause is not None and not _is_asyncpg(cause):
            cause = cause.__cause__ or getattr(cause, "orig", None)
        code = getattr(cause, "sqlstate", None) or ""
        where = "the database of the writer"
        if (converted := _convert_code(code, str(cause), getattr(cause, "hint", None), where, call)) is not None:
            raise converted from error
        raise


def _as_text(value: object) -> str:
    return str(value)


def _is_asyncpg(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "asyncpg"


def _psycopg_connection(original: Any) -> psycopg.Connection[Any]:
    """Get psycopg's connection from the caller's connection. Begins SQLAlchemy's transaction if it has not begun.

    Raises `TypeError` if the connection does not use psycopg.
    """
    if isinstance(original, psycopg.Connection):
        return original
    connection = original
    if callable(getattr(original, "connection", None)):  # a Session of SQLAlchemy
        connection = original.connection()
    if hasattr(connection, "in_transaction"):  # a Connection of SQLAlchemy
        # SQLAlchemy begins a transaction only at a statement of its own, and this statement bypasses SQLAlchemy.
        if not connection.in_transaction():
            connection.begin()
        connection = connection.connection.driver_connection
    elif hasattr(connection, "ensure_connection"):  # a connection of Django
        with connection.cursor() as cursor:
            connection = cursor.connection
    return _require_type(connection, psycopg.Connection)


async def _async_connection(original: Any) -> Any:
    """The same as `_psycopg_connection`, for asyncio. Returns a connection of psycopg or asyncpg, or a connection of
    SQLAlchemy that uses asyncpg."""
    if isinstance(original, psycopg.AsyncConnection) or _is_asyncpg(original):
        return original
    connection = original
    if hasattr(original, "run_sync") and not hasattr(original, "get_raw_connection"):  # an AsyncSession of SQLAlchemy
        connection = await original.connection()
    if hasattr(connection, "get_raw_connection"):  # an AsyncConnection of SQLAlchemy
        if not connection.in_transaction():
            await connection.begin()
        driver = (await connection.get_raw_connection()).driver_connection
        if _is_asyncpg(driver):
            return connection
        connection = driver
    return _require_type(connection, psycopg.AsyncConnection)


def _require_type(connection: object, wanted_type: type[_Driver]) -> _Driver:
    """Return the connection. Raises `TypeError` if it is not of the type `wanted_type`."""
    if isinstance(connection, wanted_type):
        return connection
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    if wanted_type is psycopg.Connection:
        supported = "a psycopg.Connection, or a connection of SQLAlchemy or Django on psycopg"
    else:
        supported = "a psycopg.AsyncConnection, a connection of asyncpg, or a connection of SQLAlchemy on one of them"
    alternative = "SELECT tidemark.append(...)"
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        alternative = "Writer" if isinstance(connection, psycopg.Connection) else "AsyncWriter"
    raise TypeError(f"{kind} is not {supported}: use {alternative}")


def _convert_error(
    error: psycopg.Error, driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], call: _WriterStatement
) -> Exception | None:
    """Convert an error of psycopg to an error of Tidemark. Returns None for an error that `Writer` raises unchanged."""
    code = error.sqlstate or ""
    if (hidden := explain_row_security(error, "")) is not None:
        return Refused("Postgres", address(driver.info.dsn), *hidden)
    return _convert_code(code, first_line(error), error.diag.message_hint, address(driver.info.dsn), call)


def _convert_code(code: str, problem: str, hint: str | None, where: str, call: _WriterStatement) -> Exception | None:
    """The same as `_convert_error`, from an SQLSTATE code, the server's message and hint, and the server's address."""
    if code in _BAD_ROW_STATES:
        return BadRow(call.stream, problem)
    if code == _NOT_RESERVED_STATE and call.id is not None:
        return NotReserved(call.stream, call.id)
    if code in _REMEDIES:
        return Refused("Postgres", where, problem, (code == "42704" and hint) or _REMEDIES[code])
    return None
