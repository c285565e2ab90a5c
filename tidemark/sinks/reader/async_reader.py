"""The loop of a service that reads a table along with its stream. The decisions are in `read_loop`.

`reader` is the form for threads. It is generated from this module (`make format`).
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Self

import psycopg
from psycopg.rows import TupleRow, dict_row

from tidemark.common.errors import Unavailable
from tidemark.common.postgres_session import BACKEND, LOCK_LIMIT, AsyncSessionConnection, unprepared_where_pooled
from tidemark.sinks.reader.async_positions import AsyncPositions, run_to_next_value
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.databases import Databases, unreadable
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.read_loop import Portion, ReadConfig, ReadProgram
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
    """An async context manager and an async iterator of batches, for one asyncio task.

    The effects of a batch are committed when the next batch is asked for, and only then. A loop that is left by `break`
    or by an error rolls back the batch in hand, with its effects. The loop ends between two batches once `stopping` is
    set. The reader waits for servers that are down, and logs that.

    Cancellation: after a cancelled `anext` the next one goes on from the stored place. The batch before may have been
    committed or rolled back; if it was rolled back, it comes again.

    Raises `Refused`, `ReaderModeChanged`, `LateUnknown`, `LateNeedsWriter`, and whatever psycopg raises of a statement
    that the database does not understand.
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
        stopping: asyncio.Event | None = None,
    ) -> None:
        """Raises `BadSetting`.

        Args:
            positions: where positions are read.
            stream: the name of the stream.
            table: the backing table of the stream.
            name: the name of the stored place. Every copy of a service uses the same name, and they take turns.
            source: the address of the database with the backing table.
            effects: the address of the reader's own database.
            mode: "linear", or "vector" to read the rows of each writer as soon as its position passes them.
            since: where a new reader begins.
            rows: how many rows a batch has at most, unless one fact has more.
            primary: the address of the primary, if `source` is a replica.
            stopping: once set, the loop ends between two batches.
        """
        self._positions = positions
        self._databases = Databases(source, effects, primary)
        self._stopping = stopping or asyncio.Event()
        self._config = ReadConfig(stream, table, name, mode, since, rows, replica=primary is not None)
        self._trusted: set[Role] = set()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._reading = ReadProgram(self._config)
        self._driver: Driver[Portion] = Driver(self._reading.steps())
        self._sessions: dict[Role, AsyncConnection] = {}
        self._transaction: psycopg.AsyncTransaction | None = None
        self._is_restarted = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Roll back what was not committed. Whoever continues with the reader begins at the stored place."""
        await self._drop()
        self._begin()

    async def _drop(self) -> None:
        self._transaction = None
        # The sessions of the parent process stay open after a fork: closing them here would end the parent's.
        if self._process == os.getpid():
            for session in self._sessions.values():
                await session.close()
        self._sessions.clear()

    def __aiter__(self) -> Self:
        """A loop that was left by an error, and is begun again, does not commit the batch that it had half done."""
        self._is_restarted = self._transaction is not None
        return self

    @property
    def promised(self) -> Token:
        """What this reader has read and committed: what it may promise to a process that waits for it."""
        return self._reading.promised

    @property
    def usable(self) -> Token:
        """What is complete as far as this reader knows: what it may use already."""
        return self._reading.usable

    async def __anext__(self) -> ReadBatch[AsyncConnection]:
        if self._process != os.getpid():
            self._begin()
        if self._is_restarted:
            await self.aclose()
        portion = await run_to_next_value(self._driver, self._carry_out, self._stopped)
        if portion is None:
            raise StopAsyncIteration
        table, ledger = self._config.table, self._reading.ledger
        return ReadBatch(portion.rows, self._sessions["place"], portion.late, portion.is_retry, table.id, ledger)

    def _stopped(self) -> bool:
        return self._stopping.is_set() and self._transaction is None

    async def _carry_out(self, request: Request) -> Answer:
        match request:
            case RunSql() | BeginTransaction() | CommitTransaction():
                try:
                    return await self._on_databases(request)
                except Unavailable as error:
                    role: Role = request.role if isinstance(request, RunSql) else "place"
                    raise await asyncio.to_thread(self._databases.with_lockers, role, error) from error.__cause__
                except asyncio.CancelledError:  # async only
                    await self.aclose()  # the outcome is unknown
                    raise
            case CloseSessions():
                await self._drop()
                return None
            case _:
                return await self._positions.carry_out(request, self._stopping)

    async def _on_databases(self, request: RunSql | BeginTransaction | CommitTransaction) -> Answer:
        match request:
            case RunSql(role, statement):
                with self._databases.translated(role, self._sessions):
                    session = await self._session(role)
                    async with session.cursor(row_factory=dict_row) as cursor:
                        await cursor.execute(statement)
                        try:
                            return await cursor.fetchall() if cursor.description else []
                        except Exception as error:
                            raise unreadable(cursor, request, error) from error
            case BeginTransaction():
                with self._databases.translated("place", self._sessions):
                    transaction = psycopg.AsyncTransaction(await self._session("place"))
                    await transaction.__aenter__()
                    await transaction.connection.execute(LOCK_LIMIT)
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
                if role == "place":  # the connection of the batch: its settings are those of the database
                    connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
                    backend = await connection.execute(BACKEND)
                    unprepared_where_pooled(connection, await backend.fetchone())
                else:
                    connection = await AsyncSessionConnection.open(conninfo)
            except psycopg.OperationalError as error:
                if role not in self._trusted:
                    await asyncio.to_thread(self._databases.refuse, role, error)
                raise
            self._sessions[role] = connection
            self._trusted.add(role)
        return self._sessions[role]
