"""What is published of streams, for asyncio: `AsyncPositions`, of one event loop; otherwise as `sync`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar

import redis.asyncio

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import Unavailable
from tidemark.sinks.reader.events import Event, Place
from tidemark.sinks.reader.follow import CaughtUp, Following, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.redis import TIMEOUT, await_entry, is_filled, is_named, reply, seen, translated
from tidemark.sinks.reader.requests import (
    Answer,
    AwaitEntry,
    Driver,
    KeysFound,
    Pause,
    ReadHistory,
    ReadKeys,
    ReadList,
    ReadName,
    ReadNewest,
    Request,
)
from tidemark.sinks.reader.token import Token
from tidemark.sinks.reader.wait import GRACE, LastTold, Recovering, Standing, WaitConfig, getting, target, waiting
from tidemark.sinks.redis.client import RedisAddress, aclose, redis_address

R = TypeVar("R")


class AsyncPositions:
    """An async context manager; arguments as of `Positions`. Its methods raise what those of `Positions` raise."""

    def __init__(self, redis: "str | RedisAddress | redis.asyncio.Redis", dsn: str | None = None) -> None:
        self._owned = isinstance(redis, str | RedisAddress)
        self._client: Any = (
            redis_address(redis).async_client(TIMEOUT) if isinstance(redis, str | RedisAddress) else redis
        )
        self._history = None if dsn is None else History(dsn)
        self._seen = LastTold()
        self._patience = WaitLog()

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
                return self._seen.never_less(request, await self._keys(request))
            case ReadName(stream):
                with translated(self._client):
                    if await is_named(self._client, stream):
                        return True
                    filled = bool(await is_filled(self._client))
                if self._history is None:
                    return not filled
                return (await asyncio.to_thread(self._history.keys, stream)).linear is not None
            case AwaitEntry():
                try:
                    with translated(self._client):
                        await await_entry(self._client, request)
                except Unavailable:
                    if self._history is None:
                        raise
                    await asyncio.sleep(request.seconds)
            case ReadHistory():
                return None if self._history is None else await asyncio.to_thread(self._history.past, request)
            case Pause(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _keys(self, request: ReadList | ReadNewest | ReadKeys) -> KeysFound:
        try:
            with translated(self._client):
                found = seen(request, await reply(self._client, request))
        except Unavailable as problem:
            if self._history is None:
                raise
            self._patience.pause_after(problem)
        else:
            self._patience.succeeded()
            if found.linear is not None or self._history is None:
                return found
        return await asyncio.to_thread(self._history.keys, request.stream)

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
