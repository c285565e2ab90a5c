"""`Positions`: the published positions of streams, for services with threads. The asyncio form is in `aio`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import redis

from tidemark.sinks.reader.asks import Answer, Ask, Doorbell, Glance, Look, Newest, Pause, Recall
from tidemark.sinks.reader.connection import REMEDIES, TIMEOUT, translated
from tidemark.sinks.reader.driver import Driver
from tidemark.sinks.reader.events import Event
from tidemark.sinks.reader.following import CaughtUp, Following, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.keys import reply, ring, seen
from tidemark.sinks.reader.place import Place
from tidemark.sinks.reader.standing import GRACE, Recovering, Standing, WaitTerms, getting, target, waiting
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis_address import RedisAddress, redis_address
from tidemark.sinks.redis_session import RedisSession
from tidemark.streaming.errors import Unavailable

R = TypeVar("R")


class Positions:
    """A context manager; any thread may call.

    `redis` is an address (a URL, or `RedisAddress`) or a client of your own, which stays open; `dsn` is that of
    Tidemark's Postgres (role tidemark_reader): with it a follower learns the evidence of what Redis no longer lists.
    """

    def __init__(self, redis: "str | RedisAddress | redis.Redis", dsn: str | None = None) -> None:
        self._session: RedisSession | _Given = (
            RedisSession(redis_address(redis), REMEDIES, TIMEOUT)
            if isinstance(redis, str | RedisAddress)
            else _Given(redis)
        )
        self._history = None if dsn is None else History(dsn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()
        if self._history is not None:
            self._history.close()

    def get(self, stream: str) -> Standing | Recovering:
        """What is published of `stream` now. Raises `Unavailable` (call again) and `Refused`."""
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

        Raises `NotReached` after `timeout` seconds, `TokenFromTheFuture` after `grace` seconds in which `until` was
        beyond every ID that Tidemark has heard of, `BadToken`, `Refused`, and `Unavailable` where Redis is away as the
        time is over.
        """
        return self._result(Driver[Standing](waiting(stream, target(until, writer), WaitTerms(timeout, grace))))

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

    def carry_out(self, ask: Ask, stopping: threading.Event) -> Answer:
        """Raises `Unavailable` (the same ask may be carried out again) and `Refused`."""
        match ask:
            case Look() | Newest() | Glance():
                with self._session.use() as client:
                    return seen(ask, reply(client, ask))
            case Doorbell():
                with self._session.use() as client:
                    ring(client, ask)
            case Recall():
                return None if self._history is None else self._history.past(ask)
            case Pause(seconds):
                stopping.wait(seconds)
        return None

    def _result(self, driver: Driver[R]) -> R:
        never = threading.Event()
        result = until_handed(driver, lambda ask: self.carry_out(ask, never), never.is_set)
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
                self._driver, lambda ask: self._positions.carry_out(ask, self._stopping), self._stopping.is_set
            )
            if event is None:
                raise StopIteration
            if not isinstance(event, CaughtUp):
                return event


def until_handed(driver: Driver[R], carry_out: Callable[[Ask], Answer], stopped: Callable[[], bool]) -> R | None:
    """Carry out what the program asks until it hands something over; None: it is over, or we are to stop."""
    while not stopped():
        step = driver.step()
        if not isinstance(step, Ask):
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
