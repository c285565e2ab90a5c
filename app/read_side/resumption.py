"""What moved a stream while clients were away, read once for all who resume at nearly the same place.

A thousand clients that lost one sidecar come back within a second or two, and stand within a few moves of each other.
Those who wait while others are read for go into one reading, from the lowest of their places; each takes of it what is
beyond its own.
"""

import asyncio
from collections.abc import Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemark.app.read_side.coalescer import Coalescer
from tidemark.app.read_side.durable import Durable
from tidemark.app.read_side.requests import Past, RequestHandler
from tidemark.sinks.postgres.tail import DurableMark, Moved
from tidemark.sinks.reader.events import Event, Place
from tidemark.streaming.direction import nearer
from tidemark.streaming.errors import TidemarkError

NEAR = 10_000  # IDs: who stands farther back must not make others read so much
NEAR_MARKS = 5_000  # ms, likewise
MOST = 100_000  # moves that are told again: snapshots are less than that
AT_ONCE = 4  # readings
PAGE = 200  # events, some 40 KB: what is sent to a client in one piece is kept for it until it has read it
READ = 1000  # advances that Postgres is asked for at once: whoever asks may go after a page


class MissedPage:
    """`events` lead to `place`. Those who have taken it let it go: a page is kept for the slowest alone."""

    def __init__(self, past: Past, events: list[Event], place: Place, *, complete: bool) -> None:
        self.events = events
        self.place = place
        self.complete = complete
        """Nothing more was published when this was read."""
        self.sent: dict[Hashable, tuple[bytes, Place]] = {}
        """By where a client stands: what of the page it is sent, and where it stands then. Many stand at one place."""
        self._past = past
        self._next: asyncio.Task[MissedPage | None] | None = None

    async def next(self) -> "MissedPage | None":
        """For any number of tasks, which share it. Raises `Unavailable`, `Stop`; may be called again."""
        if self._next is None:
            self._next = _begun(_page(self._past))
        reading = self._next
        try:
            return await asyncio.shield(reading)
        except TidemarkError:
            if self._next is reading:
                self._next = None
            raise


async def _page(past: Past) -> MissedPage | None:
    found = await past.page()
    return None if found is None else MissedPage(past, found.events, found.place, complete=found.complete)


def _begun(reading: Coroutine[Any, Any, MissedPage | None]) -> "asyncio.Task[MissedPage | None]":
    task = asyncio.create_task(reading)
    # Looked at, because whoever waited for it may have gone.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


@dataclass(frozen=True, slots=True)
class MissedMoves:
    """What moved any stream since a mark; `told` by stream, by whom it is first told: the text, and where it leads."""

    events: Mapping[str, Sequence[Event]]
    streams: Mapping[str, Moved]
    told: dict[str, tuple[bytes, Place]] = field(default_factory=dict)


class Resumptions:
    """For one event loop."""

    def __init__(self, requests: RequestHandler, durable: Durable) -> None:
        self._requests = requests
        self._durable = durable
        self._since = Coalescer(self._read_since)
        self._waiting: dict[tuple[str, int], tuple[list[Place], asyncio.Task[MissedPage | None]]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def missed(self, stream: str, place: Place) -> MissedPage | None:
        """The first page of what was published after `place`, or after one that is nearly as far; None where nobody
        knows the stream. Read after this call. Raises `Unavailable`, `Stop`."""
        key = stream, place.linear // NEAR
        if key not in self._waiting:
            places: list[Place] = []
            self._waiting[key] = places, _begun(self._read(key, places))
        places, reading = self._waiting[key]
        places.append(place)
        return await asyncio.shield(reading)

    async def since(self, mark: DurableMark) -> MissedMoves | None:
        """What moved any stream since `mark`, or one shortly before; None where that is more than `MOST`, or not kept.
        Read after this call. Raises `Unavailable`, `Stop`."""
        return (await self._since.get([mark]))[mark]

    async def _read_since(self, marks: Collection[DurableMark]) -> Mapping[DurableMark, MissedMoves | None]:
        answers: dict[DurableMark, MissedMoves | None] = {}
        first: DurableMark | None = None
        for mark in sorted(marks, key=lambda mark: (mark.lease, mark.time)):
            if first is None or first.lease != mark.lease or mark.time - first.time > NEAR_MARKS:
                first = mark
                found = await self._durable.missed(mark, MOST)
                answers[mark] = None if found is None else MissedMoves(found.events, found.streams)
            answers[mark] = answers[first]
        return answers

    async def _read(self, key: tuple[str, int], places: list[Place]) -> MissedPage | None:
        async with self._turns:
            del self._waiting[key]  # who comes now wants what is read from now on
            return await _page(Past(self._requests, key[0], lowest(places), PAGE, READ))


def lowest(places: Iterable[Place]) -> Place:
    """The farthest place that is behind all of them."""
    first, *rest = places
    for other in rest:
        writers = {*first.positions, *other.positions}
        positions = {
            name: nearer(first.positions.get(name, first.linear), other.positions.get(name, other.linear))
            for name in writers
        }
        first = Place(nearer(first.linear, other.linear), positions, min(first.late, other.late))
    return first
