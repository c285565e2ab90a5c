"""The writer for threads: facts in transactions of the caller's psycopg `Connection`. `aio` is the same for asyncio."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import psycopg
from psycopg.rows import tuple_row

from tidemark.sources.writer.core import WriterCore
from tidemark.sources.writer.pending import ADD, PendingTransaction, encoded, write_statement
from tidemark.streaming.errors import HistoryChanged, WriterFenced


class Facts:
    """Made by `Writer.transaction`; valid inside that block, on its thread.

    Every method costs one round trip, raises `WriterFenced` where another process has taken over this writer, and lets
    psycopg's own errors pass.
    """

    def __init__(self, connection: psycopg.Connection[Any], pending: PendingTransaction) -> None:
        self._pending = pending
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
        handle, body = self._pending.handle(stream), encoded(stream, row)
        statement_and_call = write_statement(handle.call, statement)
        with self._pending.reserving(handle, 1, body) as reservation:
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
        with self._pending.adding(stream, id, rows) as params:
            self._cursor.execute(ADD, params)

    def void(self, stream: str, id: int) -> None:
        """Nothing was written with `id` and nothing will be: it gets no rows. Costs nothing."""
        self._pending.void(stream, id)

    def _reserve(self, stream: str, count: int, body: str | None = None) -> list[int]:
        handle = self._pending.handle(stream)
        with self._pending.reserving(handle, count, body) as reservation:
            reservation.answer = self._cursor.execute(handle.reserve, reservation.params).fetchone()
        return reservation.ids


class Writer(WriterCore):
    """Writes facts to streams of a service's own Postgres. Any number of threads and connections may share it."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @contextmanager
    def transaction(self, connection: psycopg.Connection[Any]) -> Iterator[Facts]:
        """A transaction of `connection`, in which facts are given; commits at the end of the block, or rolls back.

        Inside a transaction of the caller it is a savepoint, as psycopg's own `transaction()`: its IDs then hold back
        their streams until the caller's has ended, which is found out by asking the server.

        May be repeated as a whole after any error of psycopg's, and after `HistoryChanged`: the database was restored
        or failed over, and the writer joins anew. Raises `WriterFenced` (nothing was written, and nothing can be any
        more: end this process), `Stopping` after the writer was told to stop, `FactWithoutRow` for an ID that got
        neither rows nor a `void`.
        """
        pending = self._pending()
        try:
            with connection.transaction():
                yield Facts(connection, pending)
                pending.require_whole()
        except psycopg.OperationalError as error:
            if connection.broken and (over := self._over()) is not None:
                raise over from error
            raise
        except (WriterFenced, HistoryChanged) as error:
            if (told := self._told(error, pending)) is not error:
                raise told from error
            raise
        finally:
            self._ended(pending, connection.pgconn.transaction_status)
