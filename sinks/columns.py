"""Rows as array parameters for `unnest`: how a statement takes a hundred thousand rows in one round trip."""

from collections.abc import Iterable
from typing import Any, LiteralString

from psycopg import Cursor
from psycopg.rows import TupleRow

from tidemark.sinks.database import Connection

Rows = Iterable[tuple[Any, ...]]


def execute(connection: Connection, statement: LiteralString, rows: Rows, *more: object) -> Cursor[TupleRow] | None:
    """Run `statement` with one array per column of `rows`, then `more`; without rows nothing runs and None comes back.

    The statement casts each array (`%s::bigint[]`). Rows hold no None.
    """
    columns = list(zip(*rows, strict=True))
    return connection.execute(statement, [*map(_array, columns), *more]) if columns else None


def _array(column: tuple[Any, ...]) -> Any:
    # One literal for all numbers: psycopg adapts a list item by item, which takes three times as long.
    return "{" + ",".join(map(str, column)) + "}" if isinstance(column[0], int) else list(column)
