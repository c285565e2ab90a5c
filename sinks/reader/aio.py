"""`AsyncPositions`: the same as `positions`, for asyncio. One event loop per object."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar

import redis.asyncio

from tidemark.sinks.reader.asks import Answer, Ask, Doorbell, Glance, Look, Newest, Pause, Recall
from tidemark.sinks.reader.connection import TIMEOUT, translated
from tidemark.sinks.reader.driver import Driver
from tidemark.sinks.reader.events import Event
from tidemark.sinks.reader.following import CaughtUp, Following, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.keys import reply, ring, seen
from tidemark.sinks.reader.place import Place
from tidemark.sinks.reader.standing import GRACE, Recovering, Standing, WaitTerms, getting, target, waiting
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis_address import RedisAddress, aclose, redis_address
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
        """What is published of `stream` now."""
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
        return await self._result(Driver[Standing](waiting(stream, target(until, writer), WaitTerms(timeout, grace))))

    def follow(self, stream: str, mode: Mode = "vector", since: Place | Token | str | None = None) -> "AsyncFollow":
        """Every advance after `since` (None: after what is published now), each once, joined, in order per writer.

        For one task at a time. A cancelled `anext` loses nothing.
        """
        since = Token.parse(since) if isinstance(since, str) else since
        return AsyncFollow(self, Following(stream, mode, since))

    async def carry_out(self, ask: Ask) -> Answer:
        match ask:
            case Look() | Newest() | Glance():
                with translated(self._client):
                    return seen(ask, await reply(self._client, ask))
            case Doorbell():
                with translated(self._client):
                    await ring(self._client, ask)
            case Recall():
                return None if self._history is None else await asyncio.to_thread(self._history.past, ask)
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


async def until_handed(driver: Driver[R], carry_out: Callable[[Ask], Awaitable[Answer]]) -> R | None:
    """Carry out what the program asks until it hands something over; None: it is over."""
    while True:
        step = driver.step()
        if not isinstance(step, Ask):
            driver.handed_over()
            return step
        try:
            answer = await carry_out(step)
        except Unavailable as problem:
            driver.failed(problem)
        else:
            driver.answered(answer)
