"""The published positions of streams: to read positions, to wait for positions, and to follow advances.

This module carries out the requests of programs. The programs, which decide what to request, are in `wait` and
`follow`.

The version for threads of `async_positions`.
"""

# Generated from tidemark/sinks/reader/async_positions.py by `make format`: change that module and not this one.

import threading
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import redis

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import Unavailable
from tidemark.sinks.reader.events import Event, Place
from tidemark.sinks.reader.follow import CaughtUp, FollowProgram, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.redis import (
    await_entry,
    open_session,
    query_filled,
    query_is_published,
    read_keys,
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
    pause,
)
from tidemark.sinks.reader.token import Token, as_token
from tidemark.sinks.reader.wait import (
    GRACE_SECONDS,
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


class Positions:
    """Reads the published positions of streams, waits for positions, and follows advances.

    The object is a context manager. Any thread may use the object.

    Args:
        redis: the address of Tidemark's Redis (a URL or `RedisAddress`), or a redis-py client of your service, which
            `close` does not close.
        dsn: the address of Tidemark's Postgres, for a user with the role tidemark_reader; None to read Redis only. With
            `dsn`, the methods also answer while Redis is down or has lost its data, and followers get the evidence of
            advances that Redis no longer has.

    Raises:
        BadSetting: `redis` is not a valid address.
    """

    def __init__(self, redis: "str | RedisAddress | redis.Redis", dsn: str | None = None) -> None:
        self._session = open_session(redis)
        self._history = None if dsn is None else History(dsn)
        self._monotonic = MonotonicPositions[PublishedPositions]()
        self._redis_log = WaitLog()  # logs the outages of Redis during which Postgres is read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, but not a redis-py client of your service."""
        self._session.close()
        if self._history is not None:
            self._history.close()

    def get(self, stream: str) -> PositionSnapshot | Recovering:
        """Read the published positions of `stream`.

        The positions of a stream never go back from one call to the next, even if Redis loses writes.

        Returns:
            The positions; `Recovering` if no server knows the stream, or while Redis is being filled.

        Raises:
            Unavailable: no server answers; call again.
            Refused: a server refuses this user.
        """
        return self._run_program(Driver[PositionSnapshot | Recovering](read_positions(stream)))

    def wait(
        self,
        stream: str,
        until: Token | str | int,
        writer: str | None = None,
        timeout: float | None = None,
        grace: float = GRACE_SECONDS,
    ) -> PositionSnapshot:
        """Wait until `stream` is complete up to `until`, and return the positions of the stream.

        Args:
            stream: the name of the stream.
            until: a token (`Token` or its text), or an ID.
            writer: the writer up to whose ID `until` the stream must be complete. None: `until` is a token, or the ID
                up to which all writers must be complete.
            timeout: the longest wait, in seconds; None: no limit.
            grace: the longest wait, in seconds, while Tidemark has read no record of the stream.

        Raises:
            NotReached: the stream is not complete up to `until` after `timeout`. If the error's `is_ahead` is true, no
                record that Tidemark has read names the ID: the relay or the pipeline has lag, or the token belongs to
                another stream or database.
            StreamNotKnown: Tidemark has read no record of the stream for `grace` seconds.
            BadToken: `until` is neither a token nor an ID, or is a token although `writer` is given. Also raised if the
                IDs of `until` and of the stream have different signs.
            Unavailable: no server answers when `timeout` ends.
            Refused: a server refuses this user.
        """
        program = wait_for_token(stream, target_token(until, writer), WaitConfig(timeout, grace))
        return self._run_program(Driver[PositionSnapshot](program))

    def follow(
        self,
        stream: str,
        mode: Mode = "vector",
        since: Place | Token | str | int | None = None,
        stopping: threading.Event | None = None,
    ) -> "Follow":
        """Return an iterator over the events of `stream` after `since`.

        Each event is handed over once. The events of a writer are in order and leave no gap. While servers are down, or
        the stream is unknown, the iterator logs a message and waits. The iterator is for one thread at a time.

        Args:
            stream: the name of the stream.
            mode: "vector" for the advances of each writer (`Advance`, `Reread`), "linear" for the moves of the linear
                position (`LinearMove`). Late completions (`Late`, `MissingLateCompletions`) are events in both modes.
            since: the place, token or ID after which to begin. None: the positions that are published when the
                iteration begins. Only a `Place` has the number of the last late completion. Without a `Place`, the
                iterator omits the late completions that are published before the iteration begins.
            stopping: once this event is set, the iteration ends within about a second.

        Raises:
            BadToken: `since` is a text or number that is neither a token nor an ID.
            Refused: raised by the iterator, if a server refuses this user.
        """
        start = since if since is None or isinstance(since, Place) else as_token(since)
        return Follow(self, FollowProgram(stream, mode, start), stopping or threading.Event())

    def carry_out(self, request: Request, stopping: threading.Event) -> Answer:
        """Carry out a request of a program, and return its answer.

        If `stopping` is set, a `Pause` ends early.

        Raises:
            Unavailable: a server does not answer; the request may be repeated.
            Refused: a server refuses this user.
        """
        match request:
            case ReadKeys():
                return keep_keys_monotonic(self._monotonic, request.stream, self._read_keys(request))
            case ReadList() | ReadNewest():
                return self._read_keys(request)
            case CheckStreamName(stream):
                try:
                    with self._session.use() as client:
                        if query_is_published(client, stream):
                            return True
                        filled = bool(query_filled(client))
                    if self._history is None:
                        return not filled
                except Unavailable:
                    if self._history is None:
                        raise
                stored = self._history.read_keys(stream)
                return stored.linear is not None
            case AwaitEntry():
                try:
                    await_entry(self._session, request)
                except Unavailable:
                    if self._history is None:
                        raise
                    pause(stopping, request.seconds)
            case ReadHistory():
                return None if self._history is None else self._history.read_page(request)
            case Pause(seconds):
                pause(stopping, seconds)
        return None

    def _read_keys(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        return read_redis_or_postgres(request, self._read_redis, None if self._history is None else self._read_postgres)

    def _read_redis(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        try:
            keys = read_keys(self._session, request)
        except Unavailable as problem:
            if self._history is not None:
                self._redis_log.pause_after(problem)
            raise
        self._redis_log.note_success()
        return keys

    def _read_postgres(self, stream: str) -> StreamKeys:
        assert self._history is not None
        return self._history.read_keys(stream)

    def _run_program(self, driver: Driver[R]) -> R:
        never = threading.Event()
        result = run_to_next_value(driver, lambda request: self.carry_out(request, never), never.is_set)
        assert result is not None
        return result


class Follow(Iterator[Event]):
    """An iterator of the events of a stream, made by `Positions.follow`.

    The iteration ends once the event `stopping` is set.
    """

    def __init__(self, positions: Positions, program: FollowProgram, stopping: threading.Event) -> None:
        self._positions = positions
        self._program = program
        self._stopping = stopping
        self._driver: Driver[Event | CaughtUp] = Driver(program.steps())

    @property
    def place(self) -> Place | None:
        """The place after the last event that was handed over; `follow(since=place)` continues from there.

        Before the first event, this is the place at which the iteration began. While the stream is unknown, the value
        is the `Place` that was given as `since`; None if `since` was not a `Place`.
        """
        return self._program.place

    def __next__(self) -> Event:
        while True:
            event = run_to_next_value(
                self._driver, lambda request: self._positions.carry_out(request, self._stopping), self._stopping.is_set
            )
            if event is None:
                raise StopIteration
            if not isinstance(event, CaughtUp):
                return event


def read_redis_or_postgres(
    request: ReadList | ReadNewest | ReadKeys,
    read_redis: Callable[[ReadList | ReadNewest | ReadKeys], StreamKeys],
    read_postgres: Callable[[str], StreamKeys] | None,
) -> StreamKeys:
    """Read the keys of a stream from Redis, or from Postgres if Redis is down or does not know the stream.

    Args:
        request: the request for the keys.
        read_redis: reads the keys from Redis. Raises `Unavailable` if Redis is down.
        read_postgres: stream -> its keys in Postgres; None if there is no Postgres.

    Raises:
        Unavailable: no server answers; the request may be repeated.
    """
    try:
        keys = read_redis(request)
    except Unavailable:
        if read_postgres is None:
            raise
    else:
        if keys.linear is not None or read_postgres is None:
            return keys
    return read_postgres(request.stream)


def run_to_next_value(
    driver: Driver[R], carry_out: Callable[[Request], Answer], is_stopped: Callable[[], bool]
) -> R | None:
    """Carry out the requests of a program until the program yields a value, and return the value.

    Returns None if the program has ended, or if `is_stopped()` is true before the next step of the program.
    """
    while not is_stopped():
        step = driver.step()
        if not isinstance(step, Request):
            driver.mark_handed_over()
            return step
        try:
            answer = carry_out(step)
        except Unavailable as problem:
            driver.throw(problem)
        else:
            driver.send_answer(answer)
    return None
