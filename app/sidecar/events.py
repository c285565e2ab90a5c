"""The operations that answer with server-sent events: `/v1/events` for programs, `/v1/watch` for people.

`/v1/events`: a snapshot of each stream, then everything that moves it, in order per writer, without a hole. An event's
ID says where the client stands in all its streams, so any sidecar can go on from there (`Last-Event-ID`).
`/v1/watch`: what changed of all streams since the client's last text; a slow client gets fewer and newer texts.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.read_side.opened import ReadSide
from tidemark.app.read_side.requests import history_page
from tidemark.app.read_side.slices import Appeared, Begun, Item, Listener, Slice
from tidemark.app.sidecar import cursor, moves
from tidemark.app.sidecar.answers import described
from tidemark.app.sidecar.operation import Operation, OperationCall
from tidemark.app.sidecar.operations import existing
from tidemark.app.sidecar.problems import BadRequest, Busy, RecoveringProblem, Unauthorized, UnknownStream
from tidemark.app.sidecar.sse import MEDIA_TYPE, EventStream, block
from tidemark.app.sidecar.watch import Watch, Watcher
from tidemark.app.sidecar.watched import PipelineAnswer, WatchedStreamAnswer
from tidemark.sinks.reader import events
from tidemark.sinks.reader.events import Place
from tidemark.sinks.reader.merge import Joining
from tidemark.streaming.direction import beyond
from tidemark.streaming.errors import Stop, Unavailable

KEEP_ALIVE = 15.0  # seconds without an event, after which a comment shows that the connection lives
STALLED = 30.0  # seconds that one text for a watcher may take to be sent
ID_EVERY = 1.0  # seconds between two IDs where many streams are followed: they are long
FEW = 8  # streams, up to which every text carries an ID
TOGETHER = 200  # slices that are sent in one piece
LONGEST_ID = 16_000  # characters, which servers take in a header


class EventsQuery(msgspec.Struct, frozen=True):
    stream: Annotated[
        list[str], Meta(description="Streams to follow; several times for several. Without it: all.")
    ] = []


async def follow(call: OperationCall) -> Response:
    query: EventsQuery = call.query
    service, read_side = call.service, call.service.read_side
    last = call.request.headers.get("last-event-id")
    places = cursor.places(last) if last else {}
    with ExitStack() as stack:
        stack.enter_context(service.limiter.one("events"))
        names = set(query.stream) or await read_side.snapshots.names()
        if query.stream:
            for snapshot in await read_side.snapshots.get(sorted(names)):
                existing(snapshot)
        listener = Listener()
        if not query.stream:
            read_side.feeds.to_all(listener)
        stack.enter_context(read_side.feeds.listening(listener, names))
        resources = stack.pop_all()
    return EventStream(_Client(read_side, listener, places).texts(sorted(names)), listener.cut_off, resources)


class _Client:
    """One client of `/v1/events`: its `places` by stream, and the texts that it is sent.

    As soon as it has caught up with a follower, its place is the follower's own `Place` object: then it takes slices as
    they are encoded for all, and comparing by identity is enough.
    """

    def __init__(self, read_side: ReadSide, listener: Listener, places: dict[str, Place]) -> None:
        self._read_side = read_side
        self._listener = listener
        self._resumed = places
        self._places: dict[str, Place] = {}
        self._identified = 0.0
        self._id_due = False

    async def texts(self, streams: list[str]) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        for stream in streams:
            if stream in self._resumed:
                async for text in self._missed(stream):
                    yield text
        blocks = await self._snapshots([stream for stream in streams if stream not in self._resumed])
        yield b"".join(blocks)
        if self._places and not await self._listener.waited(0):
            yield self._id_alone()
        while not self._listener.cut_off.is_set():
            if await self._listener.waited(ID_EVERY if self._id_due else KEEP_ALIVE):
                if text := await self._next():
                    yield text
            else:
                yield self._id_alone() if self._id_due else b": still here\n\n"

    async def _missed(self, stream: str) -> AsyncIterator[bytes]:
        """What moved the stream while the client was away."""
        self._places[stream] = self._resumed[stream]
        while True:
            try:
                found = await history_page(self._read_side.requests, stream, self._places[stream], 1000)
            except (Unavailable, Stop):
                yield b": waiting for Redis or Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            if found is None:
                return
            self._places[stream] = found.place
            yield b"".join(block(moves.described(stream, event)) for event in found.events)
            if found.complete:
                return

    async def _snapshots(self, streams: list[str]) -> list[bytes]:
        blocks = []
        for snapshot in await self._read_side.snapshots.get(streams):
            known = snapshot.known
            place = Place() if known is None else Place(known.linear, known.vector, known.late)
            self._places[snapshot.stream] = place
            blocks.append(block(described(snapshot, time.monotonic()), "snapshot"))
        self._id_due = True
        return blocks

    async def _next(self) -> bytes:
        """The items given to the listener meanwhile, with an ID behind them where one is due; may be empty."""
        blocks: list[bytes] = []
        last: Item | None = None
        for stream, item in self._listener.take(TOGETHER):
            last = item
            if isinstance(item, Appeared):
                blocks += await self._snapshots([stream])
            elif isinstance(item, Slice) and self._places[stream] is item.before:
                self._places[stream] = item.after
                blocks += item.once(_blocks)
            else:
                blocks += self._joined(stream, item)
        if not blocks:
            return b""
        self._id_due = True
        few = len(self._places) <= FEW
        if few or time.monotonic() - self._identified >= ID_EVERY:
            blocks[-1] = self._id(last) + blocks[-1]
        return b"".join(blocks)

    def _joined(self, stream: str, item: Begun | Slice) -> list[bytes]:
        """What is new to a client that stands elsewhere than the follower did: before it, or ahead."""
        place = self._places[stream]
        joining = Joining(place)
        found: list[events.Event]
        match item:
            case Begun(after):
                found = [event for it in after.positions.items() for event in joining.reach(*it)]
            case Slice(after=after):
                found = [new for event in item.events for new in _fed(joining, event)]
        blocks = [block(moves.described(stream, event)) for event in found]
        joining.settle(after.linear, after.positions)
        if beyond(after.linear, place.linear):
            blocks.append(block(moves.LinearMoveAnswer(stream=stream, linear=after.linear)))
        self._places[stream] = after if joining.place == after else joining.place
        return blocks

    def _id_alone(self) -> bytes:
        return b": at\n" + self._id(None) + b"\n"

    def _id(self, last: Item | None) -> bytes:
        self._id_due = False
        self._identified = time.monotonic()
        if isinstance(last, Slice) and len(self._places) == 1 and last.after is self._places[last.stream]:
            text = last.once(_id)
        else:
            text = cursor.of_places(self._places).encode()
        return b"id: %s\n" % text if len(text) <= LONGEST_ID else b""


def _blocks(piece: Slice) -> tuple[bytes, bytes]:
    """The slice as server-sent events, the last one apart from the others: it is the one that may carry an ID."""
    blocks = [block(moves.described(piece.stream, event)) for event in piece.events]
    if piece.linear is not None:
        blocks.append(block(moves.LinearMoveAnswer(stream=piece.stream, linear=piece.linear)))
    return b"".join(blocks[:-1]), blocks[-1]


def _id(piece: Slice) -> bytes:
    """Where a client stands behind this slice that follows nothing but its stream."""
    return cursor.of_places({piece.stream: piece.after}).encode()


def _fed(joining: Joining, event: events.Event) -> Iterable[events.Event]:
    match event:
        case events.Advance():
            return joining.advance(event)
        case events.Reread(writer=str() as writer):
            return joining.reach(writer, event.id)
        case events.Late():
            return joining.complete(event)
        case events.LateLost():
            return joining.lose_late(event.number)
    return [event]


async def watch(call: OperationCall) -> Response:
    with ExitStack() as stack:
        stack.enter_context(call.service.limiter.one("watch"))
        watcher = stack.enter_context(call.service.watch.watching())
        resources = stack.pop_all()
    cut_off = asyncio.Event()
    return EventStream(_changes(call.service.watch, watcher, cut_off), cut_off, resources)


async def _changes(watch: Watch, watcher: Watcher, cut_off: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        text = await watch.news(watcher)
        stalled = asyncio.get_running_loop().call_later(STALLED, cut_off.set)
        yield text
        stalled.cancel()


OPERATIONS = [
    Operation(
        "/v1/events",
        "events",
        "Server-sent events: `snapshot` of each stream, then `advance`, `linear`, `late`, `late-lost` and `reread`.",
        follow,
        str,
        query=EventsQuery,
        media=MEDIA_TYPE,
        problems=(BadRequest, Unauthorized, UnknownStream, Busy, RecoveringProblem),
        headers=("Last-Event-ID",),
    ),
    Operation(
        "/v1/watch",
        "watch",
        "Server-sent events for people: `stream` for each stream and then for each that changed, at most once a second,"
        " and `pipeline`.",
        watch,
        WatchedStreamAnswer | PipelineAnswer,
        media=MEDIA_TYPE,
        problems=(Unauthorized, Busy),
    ),
]
