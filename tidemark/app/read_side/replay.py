"""The events that clients missed: from memory, or read once for all clients that continue from nearby places.

If a sidecar ends, a thousand clients reconnect to others within a second or two, at nearby places. `ReplayBuffer` keeps
the batches of the last seconds, which are already encoded. If clients were disconnected for longer, their concurrent
requests share one read, from the lowest of their places. Each client gets the events beyond its own place. No read
begins for disconnected clients, and responses are cached briefly. So a client that reconnects again and again from the
beginning costs little more than its requests."""

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
from tidemark.sinks.postgres.history import DurableMark, StreamChange
from tidemark.sinks.reader import Event, Place
from tidemark.streaming.values.direction import is_beyond, nearer

MAX_SHARED_IDS = 10_000  # the distance of places that share a read
MAX_SHARED_MILLISECONDS = 5_000  # the distance of marks that share a read
MAX_MOVES = 100_000  # if there are more, clients get snapshots, which are cheaper
MAX_CONCURRENT_READS = 4
PAGE_EVENTS = 200  # about 40 KB, which stay in memory until the client has read them
MAX_ADVANCES_PER_QUERY = 1000  # more would be wasted if the client disconnects
CACHE_SECONDS = 30.0  # short, because responses that were read while Postgres was down lack evidence
MAX_CACHE_BYTES = 4 << 20
BYTES_PER_POSITION = 200  # about; clients determine the number of positions in a place

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """A computation whose result any number of tasks await. The computation starts at once. If all waiting tasks are
    cancelled, the computation is cancelled too.
    """

    def __init__(self, computation: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(computation)
        # Mark the exception as retrieved, because all waiting tasks may have left.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._waiting_task_count = 0
        self.is_abandoned = False
        """Whether the computation was cancelled. Then no task may await it."""

    async def get(self) -> T:
        """Wait for the result of the computation. Raises its exception."""
        self._waiting_task_count += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting_task_count -= 1
            if not self._waiting_task_count and not self._task.done():
                self.is_abandoned = True
                self._task.cancel()


class ResponseCache:
    """Caches responses by stream and start place. A response is the text of one page, and the place after it, from
    which the client requests the next page. For one thread.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._responses: OrderedDict[tuple[str, Hashable], tuple[float, int, bytes, Place]] = OrderedDict()
        self._bytes = 0

    def get(self, stream: str, place: Place) -> tuple[bytes, Place] | None:
        """The response for a client at `place`; None if no response is cached."""
        key = stream, place_key(place)
        if key not in self._responses:
            return None
        at, _, text, after = self._responses[key]
        if self._now() - at > CACHE_SECONDS:
            self._drop(key)
            return None
        self._responses.move_to_end(key)
        return text, after

    def store(self, stream: str, place: Place, text: bytes, place_after: Place) -> None:
        """Store a response for clients at `place`. Evicts the least recently used responses if the cache is full.

        A response that does not move the client is not stored, because the client would request it without end.
        """
        if place_after == place:
            return
        key = stream, place_key(place)
        if key in self._responses:
            self._drop(key)
        size = len(text) + BYTES_PER_POSITION * (len(place.positions) + len(place_after.positions))
        self._responses[key] = self._now(), size, text, place_after
        self._bytes += size
        while self._bytes > MAX_CACHE_BYTES:
            self._drop(next(iter(self._responses)))

    def _drop(self, key: tuple[str, Hashable]) -> None:
        self._bytes -= self._responses.pop(key)[1]


def place_key(place: Place) -> Hashable:
    """A key for dictionaries; equal places have equal keys."""
    return place.linear, tuple(sorted(place.positions.items())), place.late


class MissedPage:
    """A page of missed events, and the `place` after them. The page stays in memory only while clients have to read
    it."""

    def __init__(self, pager: HistoryPager, events: list[Event], place: Place, *, is_last: bool) -> None:
        self.events = events
        self.place = place
        self.is_last = is_last
        """Whether nothing more was published when the page was read."""
        self.responses: dict[Hashable, tuple[bytes, Place]] = {}
        """Client's place (`place_key`) -> the text for the client, and its place after the text. Many clients share a
        place. """
        self._pager = pager
        self._next: SingleFlight[MissedPage | None] | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether reading the next page was cancelled. A client that needs the page must request again from its own
        place.
        """
        return self._next is not None and self._next.is_abandoned

    async def next(self) -> "MissedPage | None":
        """Read the next page, once for any number of tasks; None if no server has the stream.

        Raises:
            Unavailable, Stop: the page could not be read. The call may be repeated.
        """
        if self._next is None:
            self._next = SingleFlight(_read_page(self._pager))
        reading = self._next
        try:
            return await reading.get()
        except TidemarkError:
            if self._next is reading:
                self._next = None
            raise


async def _read_page(pager: HistoryPager) -> MissedPage | None:
    page = await pager.next_page()
    return None if page is None else MissedPage(pager, page.events, page.place, is_last=page.is_last)


@dataclass(slots=True, eq=False, weakref_slot=True)
class MissedMoves:
    """The moves of all streams since a mark.

    Attributes:
        events: stream -> the events that are not encoded yet.
        streams: changed stream -> its positions after the events.
        encodings: stream -> the texts for clients, and the place after them. Encoding begins at the first request.
        move_count: the number of events.
    """

    events: dict[str, Sequence[Event]]
    streams: Mapping[str, StreamChange]
    encodings: dict[str, SingleFlight[tuple[list[bytes], Place]]] = field(default_factory=dict)
    move_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.move_count = sum(map(len, self.events.values()))


class ReplayReader:
    """Reads the events that reconnecting clients missed. For one event loop."""

    def __init__(self, request_handler: RequestHandler, postgres_reader: PostgresReader) -> None:
        self._request_handler = request_handler
        self._postgres_reader = postgres_reader
        self._reads_by_mark = ReadCoalescer(self._read_since_marks)
        self._waiting_reads: dict[tuple[str, int], tuple[dict[object, Place], SingleFlight[MissedPage | None]]] = {}
        self._read_slots = asyncio.Semaphore(MAX_CONCURRENT_READS)
        self._moves_being_sent: WeakSet[MissedMoves] = WeakSet()
        self.responses = ResponseCache()

    async def read_missed(self, stream: str, place: Place) -> MissedPage | None:
        """Read the first page of events after `place`. The read begins after this call.

        The page may begin at a place that is up to `MAX_SHARED_IDS` lower, because clients at near places share a
        read: skip the events up to `place`.

        Returns:
            None if no server has the stream.

        Raises:
            Unavailable, Stop: the page could not be read.
        """
        key = stream, place.linear // MAX_SHARED_IDS
        if key not in self._waiting_reads:
            places: dict[object, Place] = {}
            self._waiting_reads[key] = places, SingleFlight(self._read(key, places))
        waiting = places, reading = self._waiting_reads[key]
        request_key = object()
        places[request_key] = place
        try:
            return await reading.get()
        finally:
            del places[request_key]  # a read must not begin at the place of a disconnected client
            if reading.is_abandoned and self._waiting_reads.get(key) is waiting:
                del self._waiting_reads[key]

    async def read_missed_since(self, mark: DurableMark) -> MissedMoves | None:
        """Read the moves of all streams since `mark`. The read begins after this call. Other clients may share the
        read; then the moves may begin at a slightly older mark.

        Returns:
            None if there are more than `MAX_MOVES` moves, or if the moves are no longer stored. Also None if more than
            `MAX_MOVES` moves are being sent to other clients.

        Raises:
            Unavailable, Stop: Postgres does not answer, or refuses the session.
        """
        return (await self._reads_by_mark.get([mark]))[mark]

    async def _read_since_marks(self, marks: Collection[DurableMark]) -> Mapping[DurableMark, MissedMoves | None]:
        answers: dict[DurableMark, MissedMoves | None] = {}
        first: DurableMark | None = None
        for mark in sorted(marks, key=lambda mark: (mark.lease_token, mark.time)):
            if (
                first is None
                or first.lease_token != mark.lease_token
                or mark.time - first.time > MAX_SHARED_MILLISECONDS
            ):
                first = mark
                answers[mark] = await self._missed_since(mark)
            answers[mark] = answers[first]
        return answers

    async def _missed_since(self, mark: DurableMark) -> MissedMoves | None:
        if sum(missed.move_count for missed in self._moves_being_sent) > MAX_MOVES:
            return None
        changes = await self._postgres_reader.missed_changes(mark, MAX_MOVES)
        if changes is None:
            return None
        missed = MissedMoves({**changes.events}, changes.streams)
        self._moves_being_sent.add(missed)
        return missed

    async def _read(self, key: tuple[str, int], places: Mapping[object, Place]) -> MissedPage | None:
        async with self._read_slots:
            del self._waiting_reads[key]  # requests from now on need another read
            return await _read_page(
                HistoryPager(
                    self._request_handler, key[0], lowest_place(places.values()), PAGE_EVENTS, MAX_ADVANCES_PER_QUERY
                )
            )


def lowest_place(places: Iterable[Place]) -> Place:
    """The highest place that is, for every writer, at or below all these places."""
    first, *rest = places
    for other in rest:
        writers = {*first.positions, *other.positions}
        positions = {
            name: nearer(first.positions.get(name, first.linear), other.positions.get(name, other.linear))
            for name in writers
        }
        first = Place(nearer(first.linear, other.linear), positions, min(first.late, other.late))
    return first


BUFFER_SECONDS = 15.0
MAX_BUFFERED_MOVES = 40_000  # of all streams: about 20 MB, or 8 s at 5,000 moves/s
MAX_BUFFERED_BATCHES = 10_000  # of all streams; fewer than fit into the queue of a listener
MAX_MARKS = 30


@dataclass(frozen=True, slots=True)
class BufferedReplay:
    """The batches that lead a listener from `place` to the place of the follower."""

    place: Place
    batches: list[EventBatch]


@dataclass(slots=True)
class _StreamReplay:
    """The batches of one stream with numbers above `since`, up to `place`."""

    since: int
    place: Place
    batches: deque[tuple[int, EventBatch]] = field(default_factory=deque)


class ReplayBuffer:
    """The batches of followed streams of the last `BUFFER_SECONDS`. For one thread.

    Older batches are dropped. Younger ones are also dropped while there are more than `MAX_BUFFERED_MOVES` moves or
    `MAX_BUFFERED_BATCHES` batches.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._batch_number = 0
        self._move_count = 0
        self._streams: dict[str, _StreamReplay] = {}
        self._batches: deque[tuple[int, EventBatch]] = deque()
        self._marks: dict[DurableMark, int] = {}

    def begin_stream(self, stream: str, place: Place) -> None:
        """Begin to store the batches of a stream. `place`: the current place of its follower."""
        self._streams[stream] = _StreamReplay(self._batch_number, place)

    def end_stream(self, stream: str) -> None:
        self._streams.pop(stream, None)

    def add(self, batch: EventBatch) -> None:
        """Add the next batch of its stream."""
        self._batch_number += 1
        self._move_count += len(batch.events)
        replay = self._streams[batch.stream]
        replay.batches.append((self._batch_number, batch))
        replay.place = batch.place_after
        self._batches.append((self._batch_number, batch))
        self.drop_old()

    def drop_old(self) -> None:
        """Drop the batches that are too old or too many."""
        oldest = self._now() - BUFFER_SECONDS
        while self._batches and (
            self._move_count > MAX_BUFFERED_MOVES
            or len(self._batches) > MAX_BUFFERED_BATCHES
            or self._batches[0][1].created_at < oldest
        ):
            number, batch = self._batches.popleft()
            self._move_count -= len(batch.events)
            replay = self._streams.get(batch.stream)
            if replay is not None and replay.batches and replay.batches[0][0] == number:
                replay.batches.popleft()
                replay.since = number

    def add_mark(self, mark: DurableMark) -> None:
        """Record that the stored batches contain everything that was published up to `mark` in the followed streams."""
        # A mark may be added again. The first number counts, because a listener may have got the mark at that time, and
        # no batch since.
        self._marks.setdefault(mark, self._batch_number)
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]

    def batches_after(self, stream: str, place: Place) -> BufferedReplay | None:
        """The batches that contain the events after `place`; None if they are no longer in memory."""
        replay = self._streams.get(stream)
        if replay is None:
            return None
        if replay.place == place:
            return BufferedReplay(replay.place, [])
        batches = [batch for _, batch in replay.batches]
        for start in reversed(range(len(batches))):
            if batches[start].place_before == place:
                return BufferedReplay(batches[start].place_before, batches[start:])
        # The place may be between two batches, because another sidecar makes other batches.
        if not has_reached(place, batches[0].place_before if batches else replay.place):
            return None
        start = next(
            (at for at, batch in enumerate(batches) if not has_reached(place, batch.place_after)), len(batches)
        )
        return BufferedReplay(place, batches[start:])

    def batches_since(self, mark: DurableMark, streams: Collection[str]) -> dict[str, BufferedReplay]:
        """The batches since a mark, by stream. Empty if the mark is unknown, or if batches of one of these streams are
        no longer in memory."""
        number = self._marks.get(mark)
        replays: dict[str, BufferedReplay] = {}
        for stream in streams:
            replay = self._streams.get(stream)
            if number is None or replay is None or replay.since > number:
                return {}
            batches = [batch for at, batch in replay.batches if at > number]
            replays[stream] = BufferedReplay(batches[0].place_before if batches else replay.place, batches)
        return replays


def has_reached(place: Place, other: Place) -> bool:
    """Whether `place` is at or beyond `other`: for every writer, the linear position and late completions."""
    return (
        not is_beyond(other.linear, place.linear)
        and place.late >= other.late
        and not any(
            is_beyond(other.positions.get(writer, other.linear), place.positions.get(writer, place.linear))
            for writer in {*place.positions, *other.positions}
        )
    )
