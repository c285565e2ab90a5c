"""Answers the requests of followers from Redis. Postgres answers if Redis is down, refuses the request, does not know
the stream, or has older positions than Postgres.

Postgres has no list of advances as Redis has. So an answer from Postgres contains positions without entries, and the
follower then reads the advances from the history.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.redis_reader import RedisReader
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.history import StreamChange
from tidemark.sinks.reader import (
    Answer,
    AwaitEntry,
    CaughtUp,
    Driver,
    Event,
    FollowProgram,
    Pause,
    Place,
    ReadHistory,
    ReadKeys,
    ReadList,
    ReadNewest,
    Request,
    StreamKeys,
    Token,
    read_redis_or_postgres,
)

UNKNOWN_STREAM_KEYS = StreamKeys(None, {})
EVENTS_PER_ITERATION = 200  # of the event loop; a page may have ten thousand


class RequestHandler:
    """Answers requests from Redis, or from Postgres if Redis cannot answer. For one event loop.

    Only Postgres can answer `ReadHistory`.
    """

    def __init__(self, redis_reader: RedisReader, postgres_reader: PostgresReader) -> None:
        self.lagging_streams: Mapping[str, StreamChange] = {}
        """Streams whose positions in Redis are lower than in Postgres, with the positions in Postgres."""
        self._redis_reader = redis_reader
        self._postgres_reader = postgres_reader

    async def carry_out(self, request: Request) -> Answer:
        """Answer a request. Sleeps for the seconds of an `AwaitEntry` or a `Pause`, and answers None.

        Raises:
            Unavailable, Stop: the error of Postgres, if Redis cannot answer either. The call may be repeated.
        """
        match request:
            case ReadList() | ReadNewest():
                return await self._read_keys(request)
            case ReadHistory():
                return await self._postgres_reader.history(request)
            case AwaitEntry(seconds=seconds) | Pause(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _read_keys(self, request: ReadList | ReadNewest) -> StreamKeys:
        return await read_redis_or_postgres(request, self._read_redis, self._read_postgres)

    async def _read_redis(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        assert not isinstance(request, ReadKeys)
        try:
            keys = await self._redis_reader.read(request)
        except Stop as problem:
            raise Unavailable("Redis", self._redis_reader.where, str(problem)) from problem
        lagging = self.lagging_streams.get(request.stream)
        is_lagging = lagging is not None and not (
            keys.linear is not None and lagging.is_reached_by(keys.linear, keys.positions, keys.last_late_number)
        )
        return UNKNOWN_STREAM_KEYS if is_lagging else keys

    async def _read_postgres(self, stream: str) -> StreamKeys:
        positions = (await self._postgres_reader.positions([stream])).get(stream)
        return (
            UNKNOWN_STREAM_KEYS
            if positions is None
            else StreamKeys(positions.linear, positions.positions, positions.last_late_number, positions.allocated)
        )


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """A page of events. `place`: the place after the last event. `is_last`: whether nothing more was published when
    the page was read.
    """

    events: list[Event]
    place: Place
    is_last: bool


class HistoryPager:
    """Reads the events of a stream, page by page. For one task at a time.

    The first query of Postgres is for one page, because the client may disconnect after the page. Each later query is
    for twice as many advances, up to `max_advances`.

    Args:
        request_handler: answers the requests.
        stream: the name of the stream.
        since: where the first page begins.
        limit: the largest number of events of a page.
        max_advances: the largest number of advances of one query; None: `limit`.
    """

    def __init__(
        self,
        request_handler: RequestHandler,
        stream: str,
        since: Place | Token,
        limit: int,
        max_advances: int | None = None,
    ) -> None:
        self._request_handler = request_handler
        self._limit = limit
        self._advances_per_query = limit
        self._program = FollowProgram(stream, "vector", since, max_advances or limit)
        self._driver: Driver[Event | CaughtUp] = Driver(self._program.steps())
        self._events: list[Event] = []

    async def next_page(self) -> HistoryPage | None:
        """Read the next page; None if no server has the stream.

        Raises:
            Unavailable, Stop: the page could not be read. The call may be repeated.
        """
        while len(self._events) < self._limit:
            step = self._driver.step()
            match step:
                case CaughtUp():
                    break
                case AwaitEntry():  # no server has the stream
                    return None
                case ReadHistory():
                    limited = replace(step, limit=min(self._advances_per_query, step.limit))
                    self._driver.send_answer(await self._request_handler.carry_out(limited))
                    self._advances_per_query *= 2
                case Request():
                    self._driver.send_answer(await self._request_handler.carry_out(step))
                case None:
                    raise AssertionError("a follower does not end")
                case _:
                    self._driver.mark_handed_over()
                    self._events.append(step)
                    if len(self._events) % EVENTS_PER_ITERATION == 0:
                        await asyncio.sleep(0)
        events, self._events = self._events, []
        assert self._program.place is not None
        return HistoryPage(events, self._program.place, len(events) < self._limit)
