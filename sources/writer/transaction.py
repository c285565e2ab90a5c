"""Facts of one transaction on a psycopg `Connection` of the caller's. `aio` is the same for an `AsyncConnection`."""

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from tidemark.sources.writer.draft import ADD, Draft, encoded, write_statement


class Facts:
    """Made by `Writer.transaction`; valid inside that block, on its thread.

    Every method costs one round trip, raises `WriterFenced` where another process has taken over this writer, and lets
    psycopg's own errors pass.
    """

    def __init__(self, connection: psycopg.Connection[Any], draft: Draft) -> None:
        self._draft = draft
        # Not the connection's own kind of cursor: its rows may be anything.
        self._cursor = psycopg.Cursor(connection, row_factory=tuple_row)

    def append(self, stream: str, row: object) -> int:
        """Reserve the next ID of `stream` for a fact whose only row (any JSON) is known: `reserve` and `add` in one."""
        return self._reserve(stream, 1, encoded(stream, row))[0]

    def write(self, stream: str, row: object, statement: str, params: Mapping[str, object] | None = None) -> int:
        """`append`, and a statement of the caller's own in the same round trip: the cheapest way to write a fact.

            facts.write("orders", row, "insert into orders (id, total) values (%(id)s, %(total)s)", {"total": 40})

        `statement` is an INSERT, UPDATE or DELETE with named parameters; `%(id)s` in it stands for the new ID.
        """
        outlet, body = self._draft.outlet(stream), encoded(stream, row)
        statement_and_call = write_statement(outlet.call, statement)
        with self._draft.reserving(outlet, 1, body) as reservation:
            reservation.answer = self._cursor.execute(
                statement_and_call, {**(params or {}), **reservation.params}
            ).fetchone()
        return reservation.ids[0]

    def reserve(self, stream: str) -> int:
        """The next ID of `stream`. It holds back the stream until this transaction ends, and needs rows: `add`."""
        return self._reserve(stream, 1)[0]

    def reserve_many(self, stream: str, count: int) -> list[int]:
        """Several at once, away from 0, not always neighbours."""
        return self._reserve(stream, count)

    def add(self, stream: str, id: int, *rows: object) -> None:
        """Rows (any JSON) of the fact `id`; may be called again, they keep their order."""
        with self._draft.adding(stream, id, rows) as params:
            self._cursor.execute(ADD, params)

    def void(self, stream: str, id: int) -> None:
        """Nothing was written with `id` and nothing will be: it gets no rows. Costs nothing."""
        self._draft.void(stream, id)

    def _reserve(self, stream: str, count: int, body: str | None = None) -> list[int]:
        outlet = self._draft.outlet(stream)
        with self._draft.reserving(outlet, count, body) as reservation:
            reservation.answer = self._cursor.execute(outlet.reserve, reservation.params).fetchone()
        return reservation.ids
