"""A column as a parameter: one array, in the form that costs both sides least. Of a list psycopg would adapt each
element by itself.

Numbers and bytes go in Postgres's binary form: text of them is two to four times as long, and is parsed. Text goes as
text. The statement casts each array (`%s::bigint[]`).
"""

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.pq import Format

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
