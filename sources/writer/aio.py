"""The writer for asyncio: facts in transactions of psycopg's `AsyncConnection`. Never blocks the loop.

The relay runs on a thread, as with `Writer`; start and stop are waited for on a thread too.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import psycopg
from psycopg.rows import tuple_row

from tidemark.sources.writer.core import WriterCore
from tidemark.sources.writer.pending import ADD, PendingTransaction, encoded, write_statement
from tidemark.streaming.errors import HistoryChanged, WriterFenced


class AsyncFacts:
    """`transaction.Facts` for one task."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], pending: PendingTransaction) -> None:
        self._pending = pending
        self._cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)

    async def append(self, stream: str, row: object) -> int:
        """Reserve the next ID of `stream` for a fact whose only row (any JSON) is known: `reserve` and `add` in one."""
        return (await self._reserve(stream, 1, encoded(stream, row)))[0]

    async def write(self, stream: str, row: object, statement: str, params: Mapping[str, object] | None = None) -> int:
        """`append`, and a statement of the caller's own in the same round trip: the cheapest way to write a fact.

            facts.write("orders", row, "insert into orders (id, total) values (%(id)s, %(total)s)", {"total": 40})

        `statement` is an INSERT, UPDATE or DELETE with named parameters; `%(id)s` in it stands for the new ID.
        """
        handle, body = self._pending.handle(stream), encoded(stream, row)
        statement_and_call = write_statement(handle.call, statement)
        with self._pending.reserving(handle, 1, body) as reservation:
            await self._cursor.execute(statement_and_call, {**(params or {}), **reservation.params})
            reservation.answer = await self._cursor.fetchone()
        return reservation.ids[0]

    async def reserve(self, stream: str) -> int:
        """The next ID of `stream`. It holds back the stream until this transaction ends, and needs rows: `add`."""
        return (await self._reserve(stream, 1))[0]

    async def reserve_many(self, stream: str, count: int) -> list[int]:
        """Several at once, away from 0, not always neighbours."""
        return await self._reserve(stream, count)

    async def add(self, stream: str, id: int, *rows: object) -> None:
        """Rows (any JSON) of the fact `id`; may be called again, they keep their order."""
        with self._pending.adding(stream, id, rows) as params:
            await self._cursor.execute(ADD, params)

    def void(self, stream: str, id: int) -> None:
        """Nothing was written with `id` and nothing will be: it gets no rows. Costs nothing."""
        self._pending.void(stream, id)

    async def _reserve(self, stream: str, count: int, body: str | None = None) -> list[int]:
        handle = self._pending.handle(stream)
        with self._pending.reserving(handle, count, body) as reservation:
            await self._cursor.execute(handle.reserve, reservation.params)
            reservation.answer = await self._cursor.fetchone()
        return reservation.ids


class AsyncWriter(WriterCore):
    """As `Writer`, of one event loop: `async with AsyncWriter(...) as writer`, `async with writer.transaction(...)`."""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._start)
        return self

    async def __aexit__(self, *error: object) -> None:
        # Shielded: a task that is cancelled while it stops would leave the thread behind.
        await asyncio.shield(asyncio.to_thread(self._stop))

    @asynccontextmanager
    async def transaction(self, connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[AsyncFacts]:
        """As `Writer.transaction`."""
        pending = self._pending()
        try:
            async with connection.transaction():
                yield AsyncFacts(connection, pending)
                pending.require_whole()
        except psycopg.OperationalError as error:
            if connection.broken and (over := await asyncio.to_thread(self._over)) is not None:
                raise over from error
            raise
        except (WriterFenced, HistoryChanged) as error:
            if (told := self._told(error, pending)) is not error:
                raise told from error
            raise
        finally:
            self._ended(pending, connection.pgconn.transaction_status)
