"""The reader's library for asyncio: `AsyncPositions` and `AsyncReader`, of one event loop each; otherwise as `sync`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar

import psycopg
import redis.asyncio
from psycopg.rows import TupleRow, dict_row

from tidemark.sinks.reader.databases import Databases
from tidemark.sinks.reader.events import Event, Place
from tidemark.sinks.reader.follow import CaughtUp, Following, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.io import (
    Answer,
    AwaitEntry,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Pause,
    ReadHistory,
    ReadKeys,
    ReadList,
    ReadNewest,
    Request,
    Role,
    RunSql,
)
from tidemark.sinks.reader.read import Portion, ReadConfig, Reading
from tidemark.sinks.reader.redis import TIMEOUT, await_entry, reply, seen, translated
from tidemark.sinks.reader.sync import ReadBatch
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token
from tidemark.sinks.reader.wait import GRACE, Recovering, Standing, WaitConfig, getting, target, waiting
from tidemark.sinks.redis.client import RedisAddress, aclose, redis_address
from tidemark.streaming.errors import Unavailable

R = TypeVar("R")


class AsyncPositions:
    """An async context manager; arguments as of `Positions`. Its methods raise what those of `Positions` raise."""

    def __init__(self, redis: "str | RedisAddress | redis.asyncio.Redis", dsn: str | None = None) -> None:
        self._owned = isinstance(redis, str | RedisAddress)
        self._client: Any = (
            redis_address(redis).async_client(TIMEOUT) if isinstance(redis, str | RedisAddress) else redis
        )
        self._history = None if dsn is None else History(dsn)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._owned:
            await aclose(self._client)
        if self._history is not None:
            await asyncio.to_thread(self._history.close)

    async def get(self, stream: str) -> Standing | Recovering:
        """The published positions of `stream` now."""
        return await self._result(Driver[Standing | Recovering](getting(stream)))

    async def wait(
        self,
        stream: str,
        until: Token | str | int,
        writer: str | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
    ) -> Standing:
        """Wait until `stream` is complete up to `until`: a token, or an ID (of `writer`, or of all)."""
        return await self._result(Driver[Standing](waiting(stream, target(until, writer), WaitConfig(timeout, grace))))

    def follow(self, stream: str, mode: Mode = "vector", since: Place | Token | str | None = None) -> "AsyncFollow":
        """Every advance after `since` (None: after what is published now), each once, joined, in order per writer.

        For one task at a time. A cancelled `anext` loses nothing.
        """
        since = Token.parse(since) if isinstance(since, str) else since
        return AsyncFollow(self, Following(stream, mode, since))

    async def carry_out(self, request: Request) -> Answer:
        match request:
            case ReadList() | ReadNewest() | ReadKeys():
                with translated(self._client):
                    return seen(request, await reply(self._client, request))
            case AwaitEntry():
                with translated(self._client):
                    await await_entry(self._client, request)
            case ReadHistory():
                return None if self._history is None else await asyncio.to_thread(self._history.past, request)
            case Pause(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _result(self, driver: Driver[R]) -> R:
        result = await until_handed(driver, self.carry_out)
        assert result is not None
        return result


class AsyncFollow(AsyncIterator[Event]):
    """An async iterator of events; `place` is what was handed over so far, to go on from in another `follow`."""

    def __init__(self, positions: AsyncPositions, following: Following) -> None:
        self._positions = positions
        self._following = following
        self._driver: Driver[Event | CaughtUp] = Driver(following.steps())

    @property
    def place(self) -> Place | None:
        """None while nothing is known of the stream and we began nowhere."""
        return self._following.place

    async def __anext__(self) -> Event:
        while True:
            event = await until_handed(self._driver, self._positions.carry_out)
            if event is None:
                raise StopAsyncIteration
            if not isinstance(event, CaughtUp):
                return event


async def until_handed(driver: Driver[R], carry_out: Callable[[Request], Awaitable[Answer]]) -> R | None:
    """Carry out requests of the program until it hands a value over; None: the program is over."""
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    while True:
        step = driver.step()
        if not isinstance(step, Request):
            driver.handed_over()
            return step
        if task is not None and task.cancelling() > cancelled:
            raise asyncio.CancelledError  # redis-py swallows one that comes while it gives up a connection
        try:
            answer = await carry_out(step)
        except Unavailable as problem:
            driver.failed(problem)
        else:
            driver.answered(answer)


AsyncConnection = psycopg.AsyncConnection[TupleRow]


class AsyncReader(AsyncIterator[ReadBatch[AsyncConnection]]):
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
        config = ReadConfig(stream, table, name, mode, since, rows, replica=primary is not None)
        self._driver: Driver[Portion] = Driver(Reading(config).steps())
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

    async def __anext__(self) -> ReadBatch[AsyncConnection]:
        portion = await until_handed(self._driver, self._carry_out)
        if portion is None:
            raise StopAsyncIteration
        return ReadBatch(portion.rows, self._sessions["place"], portion.late)

    async def _carry_out(self, request: Request) -> Answer:
        match request:
            case RunSql(role, statement):
                with self._databases.translated(role):
                    async with (await self._session(role)).cursor(row_factory=dict_row) as cursor:
                        await cursor.execute(statement)
                        return await cursor.fetchall() if cursor.description else []
            case BeginTransaction():
                with self._databases.translated("place"):
                    transaction = AsyncExitStack()
                    await transaction.enter_async_context((await self._session("place")).transaction())
                    self._transaction = transaction
            case CommitTransaction():
                assert self._transaction is not None
                transaction, self._transaction = self._transaction, None
                with self._databases.translated("place"):
                    await transaction.aclose()
            case CloseSessions():
                await self.aclose()
            case _:
                return await self._positions.carry_out(request)
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
