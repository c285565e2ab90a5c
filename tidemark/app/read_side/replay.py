"""What moved a stream while clients were away, read once for all who resume at nearly the same place.

A thousand clients that lost one sidecar come back within a second or two, and stand within a few moves of each other.
Those who wait while others are read for go into one reading, from the lowest of their places; each takes of it what is
beyond its own. Nobody is read for who has gone, and what was told from a place is told again from memory for a while:
so who comes and goes, again and again from the beginning, costs little more than its requests.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from tidemark.app.read_side.fallback import HistoryPager, RequestHandler
from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.single_flight import ReadCoalescer
from tidemark.app.read_side.subscription import EventBatch
from tidemark.common.errors import TidemarkError
from tidemark.sinks.postgres.changes import DurableMark, StreamChange
from tidemark.sinks.reader import Event, Place
from tidemark.streaming.values.direction import beyond, nearer

NEAR = 10_000  # IDs: who stands farther back must not make others read so much
NEAR_MARKS = 5_000  # ms, likewise
MOST = 100_000  # moves that are told again: snapshots are less than that
AT_ONCE = 4  # readings
PAGE = 200  # events, some 40 KB: what is sent to a client in one piece is kept for it until it has read it
READ = 1000  # advances that Postgres is asked for at once, in the end: whoever asks may go after a page
TOLD_FOR = 30.0  # seconds: it may say that evidence is gone, because Postgres was away for a moment
TOLD = 4 << 20  # bytes that are kept of it
POSITION = 200  # bytes that one takes in a place, which clients may make long

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """A reading for any number of tasks; it ends when the last of them has gone."""

    def __init__(self, reading: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(reading)
        # Looked at, because whoever waited for it may have gone.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._waiting = 0
        self.abandoned = False
        """Whether it was ended: nobody may wait for it any more."""

    async def get(self) -> T:
        """Raises what the reading raises."""
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self._task.done():
                self.abandoned = True
                self._task.cancel()


class ResponseCache:
    """What clients were told of a stream from a place on, and where that led: never all that there was, so whoever is
    told it again asks for the rest. For one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._texts: OrderedDict[tuple[str, Hashable], tuple[float, int, bytes, Place]] = OrderedDict()
        self._bytes = 0

    def get(self, stream: str, place: Place) -> tuple[bytes, Place] | None:
        key = stream, identity(place)
        if key not in self._texts:
            return None
        at, _, text, after = self._texts[key]
        if self._now() - at > TOLD_FOR:
            self._drop(key)
            return None
        self._texts.move_to_end(key)
        return text, after

    def keep(self, stream: str, place: Place, text: bytes, after: Place) -> None:
        """In place of those that were not asked for the longest, where there are too many. Not where it led nowhere, as
        who is told it again would go on from there for ever."""
        if after == place:
            return
        key = stream, identity(place)
        if key in self._texts:
            self._drop(key)
        size = len(text) + POSITION * (len(place.positions) + len(after.positions))
        self._texts[key] = self._now(), size, text, after
        self._bytes += size
        while self._bytes > TOLD:
            self._drop(next(iter(self._texts)))

    def _drop(self, key: tuple[str, Hashable]) -> None:
        self._bytes -= self._texts.pop(key)[1]


def identity(place: Place) -> Hashable:
    return place.linear, tuple(sorted(place.positions.items())), place.late


class MissedPage:
    """`events` lead to `place`. Those who have taken it let it go: a page is kept for the slowest alone."""

    def __init__(self, past: HistoryPager, events: list[Event], place: Place, *, complete: bool) -> None:
        self.events = events
        self.place = place
        self.complete = complete
        """Nothing more was published when this was read."""
        self.sent: dict[Hashable, tuple[bytes, Place]] = {}
        """By where a client stands: what of the page it is sent, and where it stands then. Many stand at one place."""
        self._past = past
        self._next: SingleFlight[MissedPage | None] | None = None

    @property
    def abandoned(self) -> bool:
        """Whether the next page was ended half read: whoever wants it asks anew, from its own place."""
        return self._next is not None and self._next.abandoned

    async def next(self) -> "MissedPage | None":
        """For any number of tasks, which share it. Raises `Unavailable`, `Stop`; may be called again."""
        if self._next is None:
            self._next = SingleFlight(_page(self._past))
        reading = self._next
        try:
            return await reading.get()
        except TidemarkError:
            if self._next is reading:
                self._next = None
            raise


async def _page(past: HistoryPager) -> MissedPage | None:
    found = await past.page()
    return None if found is None else MissedPage(past, found.events, found.place, complete=found.complete)


@dataclass(slots=True, eq=False, weakref_slot=True)
class MissedMoves:
    """What moved any stream since a mark; `told` by stream, when somebody is first told: the texts, and where they
    lead. The events are let go then."""

    events: dict[str, Sequence[Event]]
    streams: Mapping[str, StreamChange]
    told: dict[str, SingleFlight[tuple[list[bytes], Place]]] = field(default_factory=dict)
    moves: int = field(init=False)

    def __post_init__(self) -> None:
        self.moves = sum(map(len, self.events.values()))


class Resumptions:
    """For one event loop."""

    def __init__(self, requests: RequestHandler, durable: PostgresReader) -> None:
        self._requests = requests
        self._durable = durable
        self._since = ReadCoalescer(self._read_since)
        self._waiting: dict[tuple[str, int], tuple[dict[object, Place], SingleFlight[MissedPage | None]]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._being_told: WeakSet[MissedMoves] = WeakSet()
        self.told = ResponseCache()

    async def missed(self, stream: str, place: Place) -> MissedPage | None:
        """The first page of what was published after `place`, or after one that is nearly as far; None where nobody
        knows the stream. Read after this call. Raises `Unavailable`, `Stop`."""
        key = stream, place.linear // NEAR
        if key not in self._waiting:
            places: dict[object, Place] = {}
            self._waiting[key] = places, SingleFlight(self._read(key, places))
        waiting = places, reading = self._waiting[key]
        me = object()
        places[me] = place
        try:
            return await reading.get()
        finally:
            del places[me]  # who has gone before it begins must not make others read from there
            if reading.abandoned and self._waiting.get(key) is waiting:
                del self._waiting[key]

    async def since(self, mark: DurableMark) -> MissedMoves | None:
        """What moved any stream since `mark`, or one shortly before; None where that is more than `MOST`, or not kept,
        or where so much is held already for clients that have not read it. Read after this call. Raises `Unavailable`,
        `Stop`."""
        return (await self._since.get([mark]))[mark]

    async def _read_since(self, marks: Collection[DurableMark]) -> Mapping[DurableMark, MissedMoves | None]:
        answers: dict[DurableMark, MissedMoves | None] = {}
        first: DurableMark | None = None
        for mark in sorted(marks, key=lambda mark: (mark.lease, mark.time)):
            if first is None or first.lease != mark.lease or mark.time - first.time > NEAR_MARKS:
                first = mark
                answers[mark] = await self._missed_since(mark)
            answers[mark] = answers[first]
        return answers

    async def _missed_since(self, mark: DurableMark) -> MissedMoves | None:
        if sum(missed.moves for missed in self._being_told) > MOST:
            return None
        found = await self._durable.missed(mark, MOST)
        if found is None:
            return None
        missed = MissedMoves({**found.events}, found.streams)
        self._being_told.add(missed)
        return missed

    async def _read(self, key: tuple[str, int], places: Mapping[object, Place]) -> MissedPage | None:
        async with self._turns:
            del self._waiting[key]  # who comes now wants what is read from now on
            return await _page(HistoryPager(self._requests, key[0], lowest(places.values()), PAGE, READ))


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


KEPT_SECONDS = 15.0
MOVES = 40_000  # that are kept, of all streams: some 20 MB, and 8 s at 5000 a second
SLICES = 10_000  # likewise; less than a listener may be behind
MARKS = 30


@dataclass(frozen=True, slots=True)
class BufferedReplay:
    """Whoever stands at `place` has all once it has taken `slices`."""

    place: Place
    slices: list[EventBatch]


@dataclass(slots=True)
class _StreamReplay:
    """Of one stream, everything behind the slice numbered `since`, which leads to `place`."""

    since: int
    place: Place
    slices: deque[tuple[int, EventBatch]] = field(default_factory=deque)


class ReplayBuffer:
    """For one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._number = 0
        self._moves = 0
        self._streams: dict[str, _StreamReplay] = {}
        self._all: deque[tuple[int, EventBatch]] = deque()
        self._marks: dict[DurableMark, int] = {}

    def begin(self, stream: str, place: Place) -> None:
        """It is followed from here on."""
        self._streams[stream] = _StreamReplay(self._number, place)

    def end(self, stream: str) -> None:
        self._streams.pop(stream, None)

    def keep(self, piece: EventBatch) -> None:
        """The next one of its stream."""
        self._number += 1
        self._moves += len(piece.events)
        kept = self._streams[piece.stream]
        kept.slices.append((self._number, piece))
        kept.place = piece.after
        self._all.append((self._number, piece))
        self.forget()

    def forget(self) -> None:
        """What is too old or too much."""
        oldest = self._now() - KEPT_SECONDS
        while self._all and (self._moves > MOVES or len(self._all) > SLICES or self._all[0][1].at < oldest):
            number, piece = self._all.popleft()
            self._moves -= len(piece.events)
            kept = self._streams.get(piece.stream)
            if kept is not None and kept.slices and kept.slices[0][0] == number:
                kept.slices.popleft()
                kept.since = number

    def told(self, mark: DurableMark) -> None:
        """What Postgres published up to the mark, of all streams that are followed, is in the slices so far."""
        # The first time counts: who was told so then, was told no more than that.
        self._marks.setdefault(mark, self._number)
        if len(self._marks) > MARKS:
            del self._marks[next(iter(self._marks))]

    def after(self, stream: str, place: Place) -> BufferedReplay | None:
        """What comes after a place; None where that is not kept any more."""
        kept = self._streams.get(stream)
        if kept is None:
            return None
        if kept.place == place:
            return BufferedReplay(kept.place, [])
        slices = [piece for _, piece in kept.slices]
        for start in reversed(range(len(slices))):
            if slices[start].before == place:
                return BufferedReplay(slices[start].before, slices[start:])
        # Between two of ours: of another sidecar.
        if not reached(place, slices[0].before if slices else kept.place):
            return None
        start = next((at for at, piece in enumerate(slices) if not reached(place, piece.after)), len(slices))
        return BufferedReplay(place, slices[start:])

    def since(self, mark: DurableMark, streams: Collection[str]) -> dict[str, BufferedReplay]:
        """What moved these streams since a mark; empty where that is not kept of all of them."""
        number = self._marks.get(mark)
        found: dict[str, BufferedReplay] = {}
        for stream in streams:
            kept = self._streams.get(stream)
            if number is None or kept is None or kept.since > number:
                return {}
            slices = [piece for at, piece in kept.slices if at > number]
            found[stream] = BufferedReplay(slices[0].before if slices else kept.place, slices)
        return found


def reached(place: Place, other: Place) -> bool:
    """Whether who stands at `place` has everything that leads to the `other` one, of any writer."""
    return (
        not beyond(other.linear, place.linear)
        and place.late >= other.late
        and not any(
            beyond(other.positions.get(writer, other.linear), place.positions.get(writer, place.linear))
            for writer in {*place.positions, *other.positions}
        )
    )
