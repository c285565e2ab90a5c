"""The loop of a service that reads a table along with its stream, for one event loop of asyncio; else as `loop`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import psycopg
from psycopg.rows import TupleRow, dict_row

from tidemark.common.session_settings import BACKEND, AsyncSessionConnection, unprepared_where_pooled
from tidemark.sinks.reader.async_positions import AsyncPositions, until_handed
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.databases import Databases, unreadable
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.read_loop import Portion, ReadConfig, Reading
from tidemark.sinks.reader.requests import (
    Answer,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Request,
    Role,
    RunSql,
)
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token

AsyncConnection = psycopg.AsyncConnection[TupleRow]


class AsyncReader(AsyncIterator[ReadBatch[AsyncConnection]]):
    """An async context manager and iterator of batches, for one task; in all else as `Reader`.

    After a cancelled `anext` the next one goes on from the place that is kept. The batch before may have been committed
    or given back; in the second case it comes again.
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
        self._config = ReadConfig(stream, table, name, mode, since, rows, replica=primary is not None)
        self._trusted: set[Role] = set()
        self._sessions: dict[Role, AsyncConnection] = {}
        self._begin()

    def _begin(self) -> None:
        self._reading = Reading(self._config)
        self._driver: Driver[Portion] = Driver(self._reading.steps())
        self._transaction: psycopg.AsyncTransaction | None = None
        self._begun_again = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back what was not committed. Who goes on with the reader begins at the place that is kept."""
        await self._drop()
        self._begin()

    def __aiter__(self) -> Self:
        """As of `Reader`."""
        self._begun_again = self._transaction is not None
        return self

    async def _drop(self) -> None:
        self._transaction = None
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    @property
    def promised(self) -> Token:
        """As of `Reader`."""
        return self._reading.promised

    @property
    def usable(self) -> Token:
        """As of `Reader`."""
        return self._reading.usable

    async def __anext__(self) -> ReadBatch[AsyncConnection]:
        if self._begun_again:
            await self.aclose()
        portion = await until_handed(self._driver, self._carry_out)
        if portion is None:
            raise StopAsyncIteration
        table, ledger = self._config.table, self._reading.ledger
        return ReadBatch(portion.rows, self._sessions["place"], portion.late, table.id, ledger)

    async def _carry_out(self, request: Request) -> Answer:
        match request:
            case RunSql() | BeginTransaction() | CommitTransaction():
                try:
                    return await self._on_databases(request)
                except asyncio.CancelledError:
                    await self.aclose()  # nobody knows what came of it
                    raise
            case CloseSessions():
                await self._drop()
                return None
            case _:
                return await self._positions.carry_out(request)

    async def _on_databases(self, request: RunSql | BeginTransaction | CommitTransaction) -> Answer:
        match request:
            case RunSql(role, statement):
                with self._databases.translated(role, self._sessions):
                    async with (await self._session(role)).cursor(row_factory=dict_row) as cursor:
                        await cursor.execute(statement)
                        try:
                            return await cursor.fetchall() if cursor.description else []
                        except Exception as error:
                            raise unreadable(cursor, request, error) from error
            case BeginTransaction():
                with self._databases.translated("place", self._sessions):
                    transaction = psycopg.AsyncTransaction(await self._session("place"))
                    await transaction.__aenter__()
                    self._transaction = transaction
            case CommitTransaction():
                assert self._transaction is not None
                transaction, self._transaction = self._transaction, None
                with self._databases.translated("place", self._sessions):
                    await transaction.__aexit__(None, None, None)
        return None

    async def _session(self, role: Role) -> AsyncConnection:
        if role not in self._sessions:
            try:
                conninfo = self._databases.conninfo(role, self._config.reader)
                if role == "place":  # the batch's connection: its settings are those of the database
                    made = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
                    unprepared_where_pooled(made, await (await made.execute(BACKEND)).fetchone())
                else:
                    made = await AsyncSessionConnection.open(conninfo)
            except psycopg.OperationalError as error:
                if role not in self._trusted:
                    await asyncio.to_thread(self._databases.refuse, role, error)
                raise
            self._sessions[role] = made
            self._trusted.add(role)
        return self._sessions[role]
