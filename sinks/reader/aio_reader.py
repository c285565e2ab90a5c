"""`AsyncReader`: the same as `reader`, for asyncio."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Self

import psycopg
from psycopg.rows import TupleRow, dict_row

from tidemark.sinks.reader.aio import AsyncPositions, until_handed
from tidemark.sinks.reader.asks import Answer, Ask, Begin, Commit, Reset, Role, Sql
from tidemark.sinks.reader.driver import Driver
from tidemark.sinks.reader.following import Mode
from tidemark.sinks.reader.reader import Batch
from tidemark.sinks.reader.reading import Portion, Reading, ReadTerms
from tidemark.sinks.reader.sessions import Databases
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token

AsyncConnection = psycopg.AsyncConnection[TupleRow]


class AsyncReader(AsyncIterator[Batch[AsyncConnection]]):
    """An async context manager and iterator of batches, for one task; in all else as `Reader`.

    A cancelled `anext` may have lost its session in the middle: the reader is to be closed then, and another one made.
    """

    def __init__(
        self,
        positions: AsyncPositions,
        stream: str,
        table: Table,
        *,
        name: str,
        source: str,
        effects: str,
        mode: Mode = "linear",
        since: Token = ZERO,
        rows: int = 1000,
        primary: str | None = None,
    ) -> None:
        """Arguments as of `Reader`."""
        self._positions = positions
        self._databases = Databases(source, effects, primary)
        self._name = name
        terms = ReadTerms(stream, table, name, mode, since, rows, replica=primary is not None)
        self._driver: Driver[Portion] = Driver(Reading(terms).steps())
        self._sessions: dict[Role, AsyncConnection] = {}
        self._trusted: set[Role] = set()
        self._transaction: AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back what was not committed."""
        self._transaction = None
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    async def __anext__(self) -> Batch[AsyncConnection]:
        portion = await until_handed(self._driver, self._carry_out)
        if portion is None:
            raise StopAsyncIteration
        return Batch(portion.rows, self._sessions["place"], portion.late)

    async def _carry_out(self, ask: Ask) -> Answer:
        match ask:
            case Sql(role, statement):
                with self._databases.translated(role):
                    async with (await self._session(role)).cursor(row_factory=dict_row) as cursor:
                        await cursor.execute(statement)
                        return await cursor.fetchall() if cursor.description else []
            case Begin():
                with self._databases.translated("place"):
                    transaction = AsyncExitStack()
                    await transaction.enter_async_context((await self._session("place")).transaction())
                    self._transaction = transaction
            case Commit():
                assert self._transaction is not None
                transaction, self._transaction = self._transaction, None
                with self._databases.translated("place"):
                    await transaction.aclose()
            case Reset():
                await self.aclose()
            case _:
                return await self._positions.carry_out(ask)
        return None

    async def _session(self, role: Role) -> AsyncConnection:
        if role not in self._sessions:
            try:
                conninfo = self._databases.conninfo(role, self._name)
                made = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
            except psycopg.OperationalError as error:
                if role not in self._trusted:
                    await asyncio.to_thread(self._databases.refuse, role, error)
                raise
            self._sessions[role] = made
            self._trusted.add(role)
        return self._sessions[role]
