"""What is published of streams, for threads; `aio` is for asyncio. The logic of both is in `wait` and `follow`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import redis

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import Unavailable
from tidemark.sinks.reader.events import Event, Place
from tidemark.sinks.reader.follow import CaughtUp, Following, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.redis import REMEDIES, TIMEOUT, await_entry, is_filled, is_named, reply, seen, translated
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
from tidemark.sinks.redis.client import RedisAddress, RedisSession, redis_address

R = TypeVar("R")


class Positions:
    """A context manager; any thread may call.

    `redis` is an address (a URL, or `RedisAddress`) or a client of your own, which stays open; `dsn` is that of
    Tidemark's Postgres (role tidemark_reader): with it a follower learns the evidence of what Redis no longer lists,
    and a Redis that is away, or lost its data, is done without.
    """

    def __init__(self, redis: "str | RedisAddress | redis.Redis", dsn: str | None = None) -> None:
        self._session: RedisSession | _Given = (
            RedisSession(redis_address(redis), REMEDIES, TIMEOUT)
            if isinstance(redis, str | RedisAddress)
            else _Given(redis)
        )
        self._history = None if dsn is None else History(dsn)
        self._seen = LastTold()
        self._patience = WaitLog()  # only says that Redis is away: Postgres is asked meanwhile

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()
        if self._history is not None:
            self._history.close()

    def get(self, stream: str) -> Standing | Recovering:
        """The published positions of `stream` now. Raises `Unavailable` (call again) and `Refused`."""
        return self._result(Driver[Standing | Recovering](getting(stream)))

    def wait(
        self,
        stream: str,
        until: Token | str | int,
        writer: str | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
    ) -> Standing:
        """Wait until `stream` is complete up to `until`: a token, or an ID (of `writer`, or of all).

        Raises `NotReached` after `timeout` seconds; after `grace` seconds `StreamNotKnown` where Tidemark has not heard
        of the stream, and `TokenFromTheFuture` where `until` is beyond every ID that it has heard of; `BadToken`,
        `Refused`, and `Unavailable` where Redis is away as the time is over.
        """
        return self._result(Driver[Standing](waiting(stream, target(until, writer), WaitConfig(timeout, grace))))

    def follow(
        self,
        stream: str,
        mode: Mode = "vector",
        since: Place | Token | str | None = None,
        stopping: threading.Event | None = None,
    ) -> "Follow":
        """Every advance after `since` (None: after what is published now), each once, joined, in order per writer.

        Waits for servers that are away and says so in the log. Ends soon after `stopping` is set. Raises `Refused`.
        For one thread.
        """
        since = Token.parse(since) if isinstance(since, str) else since
        return Follow(self, Following(stream, mode, since), stopping or threading.Event())

    def carry_out(self, request: Request, stopping: threading.Event) -> Answer:
        """Raises `Unavailable` (the same request may be carried out again) and `Refused`."""
        match request:
            case ReadList() | ReadNewest() | ReadKeys():
                return self._seen.never_less(request, self._keys(request))
            case ReadName(stream):
                with self._session.use() as client:
                    if is_named(client, stream):
                        return True
                    filled = bool(is_filled(client))
                return not filled if self._history is None else self._history.keys(stream).linear is not None
            case AwaitEntry():
                try:
                    with self._session.use() as client:
                        await_entry(client, request)
                except Unavailable:
                    if self._history is None:
                        raise
                    stopping.wait(request.seconds)
            case ReadHistory():
                return None if self._history is None else self._history.past(request)
            case Pause(seconds):
                stopping.wait(seconds)
        return None

    def _keys(self, request: ReadList | ReadNewest | ReadKeys) -> KeysFound:
        try:
            with self._session.use() as client:
                found = seen(request, reply(client, request))
        except Unavailable as problem:
            if self._history is None:
                raise
            self._patience.pause_after(problem)
        else:
            self._patience.succeeded()
            if found.linear is not None or self._history is None:
                return found
        return self._history.keys(request.stream)

    def _result(self, driver: Driver[R]) -> R:
        never = threading.Event()
        result = until_handed(driver, lambda request: self.carry_out(request, never), never.is_set)
        assert result is not None
        return result


class Follow(Iterator[Event]):
    """An iterator of events; `place` is what was handed over so far, to go on from in another `follow`."""

    def __init__(self, positions: Positions, following: Following, stopping: threading.Event) -> None:
        self._positions = positions
        self._following = following
        self._stopping = stopping
        self._driver: Driver[Event | CaughtUp] = Driver(following.steps())

    @property
    def place(self) -> Place | None:
        """None while nothing is known of the stream and we began nowhere."""
        return self._following.place

    def __next__(self) -> Event:
        while True:
            event = until_handed(
                self._driver, lambda request: self._positions.carry_out(request, self._stopping), self._stopping.is_set
            )
            if event is None:
                raise StopIteration
            if not isinstance(event, CaughtUp):
                return event


def until_handed(driver: Driver[R], carry_out: Callable[[Request], Answer], stopped: Callable[[], bool]) -> R | None:
    """Carry out requests of the program until it hands a value over; None: it is over, or we are to stop."""
    while not stopped():
        step = driver.step()
        if not isinstance(step, Request):
            driver.handed_over()
            return step
        try:
            answer = carry_out(step)
        except Unavailable as problem:
            driver.failed(problem)
        else:
            driver.answered(answer)
    return None


class _Given:
    """A client that is not ours, in the place of a `RedisSession`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @contextmanager
    def use(self) -> Iterator[Any]:
        with translated(self._client):
            yield self._client

    def close(self) -> None:
        """It stays open."""
