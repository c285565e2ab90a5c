"""The loop with which a service reads the table of a stream.

This module carries out the requests of `read_loop.ReadProgram`, which decides what to read.

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
    """Reads the rows of a stream's table, and commits the effects of each batch exactly once.

    An async context manager and an async iterator of `ReadBatch`, for one asyncio task.

    The effects of a batch are committed when the loop requests the next batch, and only then. After `break` or an error
    in the loop, the transaction of the current batch stays open until `aclose` or the next loop rolls it back. Once
    `stopping` is set, the loop ends between two batches. While a server is down, the reader logs the outage and waits.

    Cancellation: a cancelled `anext`, for example by a time-out, loses no batch. The work of the call continues, and
    the next `anext` gets the batch. `aclose` ends the work.

    The loop raises these errors:

    - `Refused`: a server refuses this user, or the table does not exist.
    - `BadSetting`: `effects` opens connections that the reader cannot use.
    - `ReaderInUse`: another task reads from the same object.
    - `ReaderModeChanged`: the reader has read the stream in the other mode.
    - `ReaderPartitionsChanged`: the reader has read the stream with another number of partitions.
    - `LateUnknown`: Redis no longer has late completions that the reader needs.
    - `LateNeedsWriter`: the rows of a late completion cannot be distinguished from rows of other writers.
    - `RowUnreadable`: a row cannot be converted to Python values.
    - `TransactionEnded`: the service has committed or rolled back the transaction of a batch.
    - errors of psycopg about invalid statements.
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
        """Does not connect: the loop connects when it begins.

        Args:
            positions: reads the published positions of the stream.
            stream: the name of the stream.
            table: the backing table of the stream.
            name: the name under which the reader's place is stored. All copies of a service use one name. The copies
                take turns, or share the partitions if there are `partitions`.
            source: the address of the database with the backing table.
            effects: the reader's own database, which also stores the reader's place: an address, or an object of your
                service that uses psycopg 3. Such an object is a psycopg pool, a SQLAlchemy engine or session maker, or
                `django.db.connection`. Then `batch.connection` is a connection of the pool, a session, or Django's
                connection, inside the transaction of the batch.
            mode: "linear" to read all rows in the order of their IDs, up to the linear position. "vector" to read the
                rows of each writer as soon as the position of the writer passes them.
            since: the token or ID after which a reader without a stored place begins. If the reader has a stored place,
                `since` is ignored, and the reader logs a message.
            rows: the largest number of rows of a batch, at least 1. A fact with more rows is a batch by itself.
            primary: the address of the primary, if `source` is a replica; None: `source` is not a replica. The reader
                waits until the replica has all published rows.
            partitions: the number of partitions, from 1 to 1000. The running copies share the partitions. Needs
                `key` and the linear mode. None for a reader without partitions.
            key: the column of the table that determines the partition of a row. Rows with equal values are in one
                partition, and are read in order.
            stopping: once this event is set, the loop ends between two batches.
            observe: a function for metrics. The loop calls it with the progress after each commit, and when the reader
                has read everything that is published. The function must not block. Errors of the function are logged.

        Raises:
            BadSetting: an argument is invalid, or does not fit another argument.
            BadToken: `since` is neither a token nor an ID.
        """
        self._positions = positions
        self._begin_transaction = async_transaction_factory(effects)
        self._databases = Databases(source, effects if self._begin_transaction is None else "", primary)
        self._stopping = stopping or asyncio.Event()
        self._config = ReadConfig(
            stream, table, name, mode, as_token(since), rows, is_replica=primary is not None, observe=observe
        )
        self._partitioning = make_partitioning(partitions, key, self._config)
        self._connected_roles: set[Role] = set()
        self._step = AsyncStep(name, stream)
        self._reset()

    def _reset(self) -> None:
        """Begin again at the stored place, without sessions and without a batch. After a fork, replace the step."""
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
        """Roll back the uncommitted batch, if there is one, and close the connections.

        The object may be used again: the next loop begins at the stored place.
        """
        await self._step.aclose()
        await self._close_sessions()
        self._reset()

    async def _close_sessions(self) -> None:
        context = self._transaction_context
        self._transaction_context = self._transaction = None
        if self._begin_transaction is not None and context is not None and self._process == os.getpid():
            with suppress(Exception):
                await context.__aexit__(BatchRolledBack, BatchRolledBack(), None)
        # After a fork, do not close the inherited sessions: the parent process uses the same sockets.
        if self._process == os.getpid():
            for session in self._sessions.values():
                await session.close()
        self._sessions.clear()

    def __aiter__(self) -> Self:
        """Begin a loop. If an earlier loop has left an unfinished batch, the first step rolls the batch back.

        Raises `ReaderInUse` if another task is processing the unfinished batch.
        """
        if self._transaction_context is not None:
            self._step.check_can_begin_loop()
        self._is_restarted = self._transaction_context is not None
        return self

    @property
    def promised(self) -> Token:
        """The token up to which the reader has read all rows and committed their effects; `ZERO` before the first loop.

        The service may promise this token to processes that wait for these effects. With partitions, all partitions
        have reached the token.
        """
        return self._program.promised

    @property
    def complete_token(self) -> Token:
        """The token up to which the stream was complete at the last read of positions; `ZERO` before the first loop.

        The reader may not have handed over all facts up to this token yet.
        """
        return self._program.complete_token

    async def __anext__(self) -> ReadBatch[Any]:
        if self._process != os.getpid():
            self._reset()
        portion = await self._step.run(self._next_portion)
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
                    raise await asyncio.to_thread(self._databases.name_lock_sessions, role, error) from error.__cause__
                except asyncio.CancelledError:  # async only
                    await self._close_sessions()  # the server may have carried out the request
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
                        return await self._fetch_rows(await self._session(role), request)
                    if self._transaction is not None:
                        if self._transaction.has_ended:
                            raise TransactionEnded(self._config.reader, self._config.stream)
                        return await self._fetch_rows(self._transaction.driver, request)
                    if self._begin_transaction is not None:
                        async with self._begin_transaction() as transaction:
                            return await self._fetch_rows_with_lock_timeout(transaction.driver, request)
                    connection = await self._session("place")
                    async with connection.transaction():
                        return await self._fetch_rows_with_lock_timeout(connection, request)
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

    async def _fetch_rows_with_lock_timeout(self, connection: AsyncConnection, request: RunSql) -> list[Row]:
        """Run a statement in the open transaction, with a limit on its waits for locks, and return its rows.

        The limit holds until the end of the transaction, which must have no other statements.
        """
        await connection.execute(SET_LOCK_TIMEOUT)
        return await self._fetch_rows(connection, request)

    async def _fetch_rows(self, connection: AsyncConnection, request: RunSql) -> list[Row]:
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(request.statement)
            try:
                return await cursor.fetchall() if cursor.description else []
            except Exception as error:
                raise row_error(cursor, request, error) from error

    async def _session(self, role: Role) -> AsyncConnection:
        """Return the connection of a role; connect first if there is none."""
        if role not in self._sessions:
            try:
                conninfo = self._databases.conninfo(role, self._config.reader)
                if role == "place":  # the service uses this connection, so it gets no settings of Tidemark
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
