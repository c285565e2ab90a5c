"""The requests of a follower (`sinks.reader.io`), answered from Redis, or from Postgres while Redis is away.

For a stream that Redis does not know, the answer from Postgres is a list of advances without entries: the follower then
takes the advances from the history, so nothing is missing either way.
"""

import asyncio
from dataclasses import dataclass

from tidemark.app.read_side.durable import Durable
from tidemark.app.read_side.live import Live
from tidemark.sinks.reader.events import Event, Place
from tidemark.sinks.reader.follow import CaughtUp, Following
from tidemark.sinks.reader.io import (
    Answer,
    AwaitEntry,
    Driver,
    KeysFound,
    Pause,
    ReadHistory,
    ReadList,
    ReadNewest,
    Request,
)
from tidemark.sinks.reader.token import Token
from tidemark.streaming.errors import Stop, Unavailable

NOTHING = KeysFound(None, {})


class RequestHandler:
    """For one event loop. Raises `Unavailable` where neither server answers."""

    def __init__(self, live: Live, durable: Durable) -> None:
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

    async def _keys(self, request: ReadList | ReadNewest) -> KeysFound:
        try:
            found = await self._live.read(request)
        except (Unavailable, Stop):
            return await self._stored(request.stream)
        if found.linear is not None:
            return found
        return await self._stored(request.stream)

    async def _stored(self, stream: str) -> KeysFound:
        found = (await self._durable.positions([stream])).get(stream)
        return NOTHING if found is None else KeysFound(found.linear, found.positions, found.late, found.allocated)


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """`place` is behind the last event; `complete`: nothing more was published when this was read."""

    events: list[Event]
    place: Place
    complete: bool


async def history_page(requests: RequestHandler, stream: str, since: Place | Token, limit: int) -> HistoryPage | None:
    """At most `limit` events after `since`; None where nobody knows the stream. Raises `Unavailable`."""
    following = Following(stream, "vector", since, limit)
    driver: Driver[Event | CaughtUp] = Driver(following.steps())
    events: list[Event] = []
    while len(events) < limit:
        step = driver.step()
        match step:
            case CaughtUp():
                break
            case AwaitEntry():  # before it has caught up: it waits for a stream that does not exist
                return None
            case Request():
                driver.answered(await requests.carry_out(step))
            case None:
                raise AssertionError("a follower does not end")
            case _:
                driver.handed_over()
                events.append(step)
    assert following.place is not None
    return HistoryPage(events, following.place, len(events) < limit)
