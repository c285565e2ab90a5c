"""The requests of a follower (`sinks.reader.requests`), answered from Redis, or from Postgres while Redis is away.

For a stream that Redis does not know, the answer from Postgres is a list of advances without entries: the follower then
takes the advances from the history, so nothing is missing either way.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.redis_reader import RedisReader
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.changes import StreamChange
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
    read_either,
)

NOTHING = StreamKeys(None, {})


class RequestHandler:
    """For one event loop. Raises `Unavailable` where neither server answers."""

    def __init__(self, live: RedisReader, durable: PostgresReader) -> None:
        self.behind: Mapping[str, StreamChange] = {}
        """Streams of which Redis did not show what Postgres had, for a while."""
        self._live = live
        self._durable = durable

    async def carry_out(self, request: Request) -> Answer:
        match request:
            case ReadList() | ReadNewest():
                return await self._keys(request)
            case ReadHistory():
                return await self._durable.history(request)
            case AwaitEntry(seconds=seconds) | Pause(seconds):
                await asyncio.sleep(seconds)
        return None

    async def _keys(self, request: ReadList | ReadNewest) -> StreamKeys:
        return await read_either(request, self._read_redis, self._read_postgres)

    async def _read_redis(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        assert not isinstance(request, ReadKeys)
        try:
            keys = await self._live.read(request)
        except Stop as problem:
            raise Unavailable("Redis", request.stream, str(problem)) from problem
        behind = self.behind.get(request.stream)
        is_behind = behind is not None and not (
            keys.linear is not None and behind.reached(keys.linear, keys.positions, keys.late)
        )
        return NOTHING if is_behind else keys

    async def _read_postgres(self, stream: str) -> StreamKeys:
        found = (await self._durable.positions([stream])).get(stream)
        return NOTHING if found is None else StreamKeys(found.linear, found.positions, found.late, found.allocated)


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """`place` is behind the last event; `complete`: nothing more was published when this was read."""

    events: list[Event]
    place: Place
    complete: bool


class HistoryPager:
    """What was published of `stream` after `since`, page by page; for one task at a time. Postgres is asked for a page
    at first, because whoever asks may go after it, and then for twice as many each time, up to `most`."""

    def __init__(
        self, requests: RequestHandler, stream: str, since: Place | Token, limit: int, most: int | None = None
    ) -> None:
        self._requests = requests
        self._limit = limit
        self._at_once = limit
        self._following = FollowProgram(stream, "vector", since, most or limit)
        self._driver: Driver[Event | CaughtUp] = Driver(self._following.steps())
        self._events: list[Event] = []

    async def page(self) -> HistoryPage | None:
        """At most `limit` events; None where nobody knows the stream. Raises `Unavailable`; may be called again."""
        while len(self._events) < self._limit:
            step = self._driver.step()
            match step:
                case CaughtUp():
                    break
                case AwaitEntry():  # before it has caught up: it waits for a stream that does not exist
                    return None
                case ReadHistory():
                    asked = replace(step, most=min(self._at_once, step.most))
                    self._driver.answered(await self._requests.carry_out(asked))
                    self._at_once *= 2
                case Request():
                    self._driver.answered(await self._requests.carry_out(step))
                case None:
                    raise AssertionError("a follower does not end")
                case _:
                    self._driver.handed_over()
                    self._events.append(step)
        events, self._events = self._events, []
        assert self._following.place is not None
        return HistoryPage(events, self._following.place, len(events) < self._limit)
