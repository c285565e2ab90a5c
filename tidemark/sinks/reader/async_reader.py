"""The loop with which a service reads the table of a stream. The decisions are in `read_loop`.

`reader`, the version for threads, is generated from this module (`make format`).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Self

import psycopg
from psycopg.rows import TupleRow, dict_row

from tidemark.common.errors import TransactionEnded, Unavailable
from tidemark.common.postgres_session import SELECT_BACKEND_PID, SET_LOCK_TIMEOUT, AsyncSessionConnection, detect_pooler
from tidemark.sinks.reader.async_positions import AsyncPositions, run_to_next_value
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.databases import (
    BatchRolledBack,
    Databases,
    EffectsTransaction,
    async_transaction_factory,
    row_error,
)
from tidemark.sinks.reader.events import ReadProgress
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.partitions import PartitionedReadProgram, make_partitioning
from tidemark.sinks.reader.read_loop import Portion, ReadConfig, ReadProgram
from tidemark.sinks.reader.requests import (
    Answer,
    AsyncStep,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Request,
    Role,
    Row,
    RunSql,
)
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token, as_token

AsyncConnection = psycopg.AsyncConnection[TupleRow]


class AsyncReader(AsyncIterator[ReadBatch[Any]]):
    """An async context manager and an async iterator of batches, for one asyncio task.

    The effects of a batch are committed when the loop requests the next batch, and only then. `break` or an error in
    the loop rolls back the current batch with its effects. The loop ends between two batches once `stopping` is set.
    The reader logs and waits while servers are down.

    Cancellation: a cancelled `anext`, for example by a time-out, loses nothing: its work continues, and the next
    `anext` gets the batch. `aclose` ends that work.

    Raises `Refused`, `ReaderInUse` (another task reads from the same object), `ReaderModeChanged`,
    `ReaderPartitionsChanged`, `LateUnknown`, `LateNeedsWriter`, `RowUnreadable`, `TransactionEnded`, and psycopg's
    errors about invalid statements.
    """

    def __init__(
        self,
        positions: AsyncPositions,
        stream: str,
        table: Table,
        *,
        name: str,
        source: str,
        effects: Any,
        mode: Mode = "linear",
        since: Token | str | int = ZERO,
        rows: int = 1000,
        primary: str | None = None,
        partitions: int | None = None,
        key: str | None = None,
        stopping: asyncio.Event | None = None,
        observe: Callable[[ReadProgress], object] | None = None,
    ) -> None:
        """Raises `BadSetting`.

        Args:
            positions: the source of positions.
            stream: the name of the stream.
            table: the backing table of the stream.
            name: the name of the stored place. All copies of a service use the same name, and take turns.
            source: the address of the database with the backing table.
            effects: the reader's own database: its address; or an object of your service, on psycopg 3: a psycopg pool,
                a SQLAlchemy engine or session maker, or `django.db.connection`. Then `batch.connection` is a connection
                of the pool, a session, or Django's connection, inside the transaction of the batch.
            mode: "linear", or "vector" to read the rows of each writer as soon as its position passes them.
            since: where a new reader begins: a token, its text, or an ID. A reader with a stored place continues from
                it, and logs that.
            rows: the largest number of rows of a batch, unless one fact has more.
            primary: the address of the primary, if `source` is a replica.
            partitions: number of partitions, which the running copies divide among them. Linear mode only.
            key: the column of the table that determines the partition of a row. Rows with equal values are read in
                order.
            stopping: once set, the loop ends between two batches.
            observe: for metrics: called with the progress after each commit, and whenever everything is read. It must
                not block. Its errors are logged.
        """
        self._positions = positions
        self._begin_transaction = async_transaction_factory(effects)
        self._databases = Databases(source, effects if self._begin_transaction is None else "", primary)
        self._stopping = stopping or asyncio.Event()
        self._config = ReadConfig(
            stream, table, name, mode, as_token(since), rows, replica=primary is not None, observe=observe
        )
        self._partitioning = make_partitioning(partitions, key, self._config)
        self._connected_roles: set[Role] = set()
        self._step = AsyncStep(name, stream)
        self._reset()

    def _reset(self) -> None:
        if getattr(self, "_process", None) != os.getpid():
            self._step = AsyncStep(self._config.reader, self._config.stream)
        self._process = os.getpid()
        self._program = (
            ReadProgram(self._config)
            if self._partitioning is None
            else PartitionedReadProgram(self._config, self._partitioning)
        )
        self._driver: Driver[Portion] = Driver(self._program.steps())
        self._sessions: dict[Role, AsyncConnection] = {}
        self._transaction_context: AbstractAsyncContextManager[Any] | None = None
        self._transaction: EffectsTransaction | None = None
        self._is_restarted = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Roll back uncommitted work and close the sessions. The next use begins at the stored place."""
        await self._step.aclose()
        await self._close_sessions()
        self._reset()

    async def _close_sessions(self) -> None:
        context = self._transaction_context
        self._transaction_context = self._transaction = None
        if self._begin_transaction is not None and context is not None and self._process == os.getpid():
            with suppress(Exception):
                await context.__aexit__(BatchRolledBack, BatchRolledBack(), None)
        # The sessions of the parent process stay open after a fork: closing them would end the parent's.
        if self._process == os.getpid():
            for session in self._sessions.values():
                await session.close()
        self._sessions.clear()

    def __aiter__(self) -> Self:
        """Begin a loop. If an earlier loop ended with an error, its unfinished batch is not committed.

        Raises `ReaderInUse` if another task is processing that batch.
        """
        if self._transaction_context is not None:
            self._step.check_can_begin_loop()
        self._is_restarted = self._transaction_context is not None
        return self

    @property
    def promised(self) -> Token:
        """The token up to which this reader has read and committed; it may promise this to processes that wait for
        it.
        """
        return self._program.promised

    @property
    def complete_token(self) -> Token:
        """The token up to which everything is complete, as far as this reader knows. It may use these facts already."""
        return self._program.complete_token

    async def __anext__(self) -> ReadBatch[Any]:
        if self._process != os.getpid():
            self._reset()
        portion = await self._step.result(self._next_portion)
        if portion is None:
            raise StopAsyncIteration
        assert self._transaction is not None
        return ReadBatch(
            portion.rows,
            self._transaction.session,
            portion.late,
            portion.withdrawn,
            portion.is_retry,
            self._program.partition,
            self._config.table.id,
            self._program.checkpoint_store,
            self._transaction,
        )

    async def _next_portion(self) -> Portion | None:
        if self._is_restarted:
            await self._close_sessions()
            self._reset()
        return await run_to_next_value(self._driver, self._carry_out, self._is_stopping)

    def _is_stopping(self) -> bool:
        return self._stopping.is_set() and self._transaction_context is None

    async def _carry_out(self, request: Request) -> Answer:
        match request:
            case RunSql() | BeginTransaction() | CommitTransaction():
                try:
                    return await self._run_on_database(request)
                except Unavailable as error:
                    role: Role = request.role if isinstance(request, RunSql) else "place"
                    raise await asyncio.to_thread(self._databases.with_lock_holders, role, error) from error.__cause__
                except asyncio.CancelledError:  # async only
                    await self._close_sessions()  # the outcome is unknown
                    self._reset()
                    raise
            case CloseSessions():
                await self._close_sessions()
                return None
            case _:
                return await self._positions.carry_out(request, self._stopping)

    async def _run_on_database(self, request: RunSql | BeginTransaction | CommitTransaction) -> Answer:
        match request:
            case RunSql(role):
                with self._databases.translate_errors(role, self._sessions):
                    if role != "place":
                        return await self._rows(await self._session(role), request)
                    if self._transaction is not None:
                        if self._transaction.has_ended:
                            raise TransactionEnded(self._config.reader, self._config.stream)
                        return await self._rows(self._transaction.driver, request)
                    if self._begin_transaction is not None:
                        async with self._begin_transaction() as transaction:
                            return await self._rows_with_lock_limit(transaction.driver, request)
                    connection = await self._session("place")
                    async with connection.transaction():
                        return await self._rows_with_lock_limit(connection, request)
            case BeginTransaction():
                with self._databases.translate_errors("place", self._sessions):
                    if self._begin_transaction is None:
                        connection = await self._session("place")
                        context: AbstractAsyncContextManager[Any] = psycopg.AsyncTransaction(connection)
                        await context.__aenter__()
                        self._transaction = EffectsTransaction(connection, connection, connection.transaction)
                    else:
                        context = self._begin_transaction()
                        self._transaction = await context.__aenter__()
                    self._transaction_context = context
                    await self._transaction.driver.execute(SET_LOCK_TIMEOUT)
            case CommitTransaction():
                assert self._transaction_context is not None
                context, self._transaction_context, self._transaction = self._transaction_context, None, None
                with self._databases.translate_errors("place", self._sessions):
                    await context.__aexit__(None, None, None)
        return None

    async def _rows_with_lock_limit(self, connection: AsyncConnection, request: RunSql) -> list[Row]:
        """Run a statement as the only one of its transaction, with a limit on its waits for locks."""
        await connection.execute(SET_LOCK_TIMEOUT)
        return await self._rows(connection, request)

    async def _rows(self, connection: AsyncConnection, request: RunSql) -> list[Row]:
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(request.statement)
            try:
                return await cursor.fetchall() if cursor.description else []
            except Exception as error:
                raise row_error(cursor, request, error) from error

    async def _session(self, role: Role) -> AsyncConnection:
        if role not in self._sessions:
            try:
                conninfo = self._databases.conninfo(role, self._config.reader)
                if role == "place":  # the connection of the batch keeps the settings of the database
                    connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
                    backend = await connection.execute(SELECT_BACKEND_PID)
                    detect_pooler(connection, await backend.fetchone())
                else:
                    connection = await AsyncSessionConnection.open(conninfo)
            except psycopg.OperationalError as error:
                if role not in self._connected_roles:
                    await asyncio.to_thread(self._databases.raise_if_refused, role, error)
                raise
            self._sessions[role] = connection
            self._connected_roles.add(role)
        return self._sessions[role]
