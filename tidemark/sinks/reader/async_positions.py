"""The published positions of streams: read them, wait for them, follow their advances.

The decisions are in `wait` and `follow`.

`positions`, the version for threads, is generated from this module (`make format`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self, TypeVar

import redis.asyncio

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import Unavailable
from tidemark.sinks.reader.events import Event, Place
from tidemark.sinks.reader.follow import CaughtUp, FollowProgram, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.redis import (
    async_await_entry,
    async_read_keys,
    open_async_session,
    query_filled,
    query_listed,
)
from tidemark.sinks.reader.requests import (
    Answer,
    AwaitEntry,
    CheckStreamName,
    Driver,
    Pause,
    ReadHistory,
    ReadKeys,
    ReadList,
    ReadNewest,
    Request,
    StreamKeys,
    async_pause,
)
from tidemark.sinks.reader.token import Token, as_token
from tidemark.sinks.reader.wait import (
    GRACE,
    MonotonicPositions,
    PositionSnapshot,
    PublishedPositions,
    Recovering,
    WaitConfig,
    keep_keys_monotonic,
    read_positions,
    target_token,
    wait_for_token,
)
from tidemark.sinks.redis.client import RedisAddress

R = TypeVar("R")


class AsyncPositions:
    """The published positions, as an async context manager. Any asyncio task of one event loop may use it.

    Args:
        redis: an address (a URL or `RedisAddress`), or your own client, which stays open.
        dsn: the address of Tidemark's Postgres (role tidemark_reader). With `dsn` a follower gets the evidence of
            advances that Redis no longer lists, and all methods work while Redis is down or has lost its data.
    """

    def __init__(self, redis: "str | RedisAddress | redis.asyncio.Redis", dsn: str | None = None) -> None:
        self._session = open_async_session(redis)
        self._history = None if dsn is None else History(dsn)
        self._monotonic = MonotonicPositions[PublishedPositions]()
        self._redis_log = WaitLog()  # only for the log: Postgres is read while Redis is down

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._session.aclose()
        if self._history is not None:
            await asyncio.to_thread(self._history.close)

    async def get(self, stream: str) -> PositionSnapshot | Recovering:
        """The published positions of `stream` now.

        Raises:
            Unavailable: neither server answers; call again.
            Refused: a server answers, but not to this user.
        """
        return await self._result(Driver[PositionSnapshot | Recovering](read_positions(stream)))

    async def wait(
        self,
        stream: str,
        until: Token | str | int,
        writer: str | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
    ) -> PositionSnapshot:
        """Wait until `stream` is complete up to `until`.

        Args:
            stream: the name of the stream.
            until: a token, or an ID (of `writer`, or of all writers).
            writer: the writer whose ID `until` is; None if `until` is a token.
            timeout: seconds; None: no limit.
            grace: seconds to wait for an unknown stream.

        Raises:
            NotReached: after `timeout`. If `is_ahead`, no record that Tidemark has read names the ID: the relay or the
                pipeline has lag, or the token belongs to another stream or database.
            StreamNotKnown: after `grace`, if Tidemark has read no record of the stream.
            BadToken: `until` is not a token of this stream, or is a token although `writer` is given.
            Unavailable: Redis is down at the end of `timeout`.
            Refused: a server answers, but not to this user.
        """
        program = wait_for_token(stream, target_token(until, writer), WaitConfig(timeout, grace))
        return await self._result(Driver[PositionSnapshot](program))

    def follow(
        self,
        stream: str,
        mode: Mode = "vector",
        since: Place | Token | str | int | None = None,
        stopping: asyncio.Event | None = None,
    ) -> "AsyncFollow":
        """Iterate over the advances after `since`: each once, without gaps, in order per writer. For one asyncio task
        at a time.

        Logs and waits while servers are down. Raises `Refused`.

        Cancellation: a cancelled `anext` loses nothing.

        Args:
            stream: the name of the stream.
            mode: "vector" for advances of writers, "linear" for moves of the linear position.
            since: where to begin; None: at the positions published now.
            stopping: once set, the iteration ends within about a second.
        """
        start = since if since is None or isinstance(since, Place) else as_token(since)
        return AsyncFollow(self, FollowProgram(stream, mode, start), stopping or asyncio.Event())

    async def carry_out(self, request: Request, stopping: asyncio.Event) -> Answer:
        """Run a request of a program. Raises `Unavailable` (the request may be repeated) and `Refused`."""
        match request:
            case ReadKeys():
                return keep_keys_monotonic(self._monotonic, request.stream, await self._keys(request))
            case ReadList() | ReadNewest():
                return await self._keys(request)
            case CheckStreamName(stream):
                async with self._session.use() as client:
                    if await query_listed(client, stream):
                        return True
                    filled = bool(await query_filled(client))
                if self._history is None:
                    return not filled
                stored = await asyncio.to_thread(self._history.keys, stream)
                return stored.linear is not None
            case AwaitEntry():
                try:
                    await async_await_entry(self._session, request)
                except Unavailable:
                    if self._history is None:
                        raise
                    await async_pause(stopping, request.seconds)
            case ReadHistory():
                return None if self._history is None else await asyncio.to_thread(self._history.read_page, request)
            case Pause(seconds):
                await async_pause(stopping, seconds)
        return None

    async def _keys(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        return await read_redis_or_postgres(
            request, self._read_redis, None if self._history is None else self._read_postgres
        )

    async def _read_redis(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        try:
            keys = await async_read_keys(self._session, request)
        except Unavailable as problem:
            if self._history is not None:
                self._redis_log.pause_after(problem)
            raise
        self._redis_log.note_success()
        return keys

    async def _read_postgres(self, stream: str) -> StreamKeys:
        assert self._history is not None
        return await asyncio.to_thread(self._history.keys, stream)

    async def _result(self, driver: Driver[R]) -> R:
        never = asyncio.Event()
        result = await run_to_next_value(driver, lambda request: self.carry_out(request, never), never.is_set)
        assert result is not None
        return result


class AsyncFollow(AsyncIterator[Event]):
    """An async iterator of events.

    `place` is the place after the last event that was handed over: another `follow` can continue from it.
    """

    def __init__(self, positions: AsyncPositions, program: FollowProgram, stopping: asyncio.Event) -> None:
        self._positions = positions
        self._program = program
        self._stopping = stopping
        self._driver: Driver[Event | CaughtUp] = Driver(program.steps())

    @property
    def place(self) -> Place | None:
        """The place after the last event; None while the stream is unknown and no `since` was given."""
        return self._program.place

    async def __anext__(self) -> Event:
        while True:
            event = await run_to_next_value(
                self._driver, lambda request: self._positions.carry_out(request, self._stopping), self._stopping.is_set
            )
            if event is None:
                raise StopAsyncIteration
            if not isinstance(event, CaughtUp):
                return event


async def read_redis_or_postgres(
    request: ReadList | ReadNewest | ReadKeys,
    read_redis: Callable[[ReadList | ReadNewest | ReadKeys], Awaitable[StreamKeys]],
    read_postgres: Callable[[str], Awaitable[StreamKeys]] | None,
) -> StreamKeys:
    """The keys of a stream in Redis; from Postgres if Redis is down or does not know the stream."""
    try:
        keys = await read_redis(request)
    except Unavailable:
        if read_postgres is None:
            raise
    else:
        if keys.linear is not None or read_postgres is None:
            return keys
    return await read_postgres(request.stream)


async def run_to_next_value(
    driver: Driver[R], carry_out: Callable[[Request], Awaitable[Answer]], is_stopped: Callable[[], bool]
) -> R | None:
    """Run requests of the program until it yields a value; return the value. None: the program has ended, or
    `is_stopped()` is true.
    """
    task = asyncio.current_task()  # async only
    cancelled = task.cancelling() if task is not None else 0  # async only
    while not is_stopped():
        step = driver.step()
        if not isinstance(step, Request):
            driver.mark_handed_over()
            return step
        if task is not None and task.cancelling() > cancelled:  # async only
            raise asyncio.CancelledError  # redis-py swallows a cancellation while it closes a connection
        try:
            answer = await carry_out(step)
        except Unavailable as problem:
            driver.throw(problem)
        else:
            driver.send_answer(answer)
    return None
