"""Server-sent events: a snapshot of each stream, then everything that moves it, in order per writer, without a hole.

An event's ID says where the client stands in all its streams, so any sidecar can go on from there (`Last-Event-ID`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.sidecar import answers, cursor, moves
from app.sidecar.describing import described
from app.sidecar.feeds import Appeared, Begun, Item, Line, Listener
from app.sidecar.looks import existing
from app.sidecar.operation import Call, Operation
from app.sidecar.problems import BadRequest, Busy, Recovering, Unauthorized, UnknownStream
from app.sidecar.program import page
from sinks.reader import events
from sinks.reader.joining import Joining
from sinks.reader.place import Place
from streaming.errors import Stop, Unavailable

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = 15.0  # seconds without an event, after which a comment shows that the connection lives
ID_EVERY = 1.0  # seconds between two IDs where many streams are followed: they are long
FEW = 8  # streams, of which every event carries an ID
LONGEST_ID = 16_000  # characters, which servers take in a header


class EventsQuery(msgspec.Struct, frozen=True):
    stream: Annotated[
        list[str], Meta(description="Streams to follow; several times for several. Without it: all.")
    ] = []


async def follow(call: Call) -> Response:
    query: EventsQuery = call.query
    service = call.service
    last = call.request.headers.get("last-event-id")
    places = cursor.places(last) if last else {}
    with ExitStack() as stack:
        stack.enter_context(service.held.one("events"))
        names = set(query.stream) or await service.snapshots.names()
        if query.stream:
            for snapshot in await service.snapshots.get(sorted(names)):
                existing(snapshot)
        listener = Listener()
        if not query.stream:
            service.feeds.to_all(listener)
        stack.enter_context(service.feeds.listening(listener, names))
        held = stack.pop_all()
    return EventStream(_Client(call, listener, places).told(sorted(names)), listener, held)


class _Client:
    """What one client is told."""

    def __init__(self, call: Call, listener: Listener, places: dict[str, Place]) -> None:
        self._service = call.service
        self._listener = listener
        self._places = places
        self._standing: dict[str, Joining] = {}
        self._identified = 0.0
        self._owed = False

    async def told(self, streams: list[str]) -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        resumed = [stream for stream in streams if stream in self._places]
        for stream in resumed:
            async for text in self._made_good(stream):
                yield text
        for text in await self._snapshots([stream for stream in streams if stream not in self._places]):
            yield text
        if not self._listener.items.qsize() and self._standing:
            yield self._id_alone()
        while not self._listener.cut_off.is_set():
            try:
                stream, item = await asyncio.wait_for(
                    self._listener.items.get(), ID_EVERY if self._owed else KEEP_ALIVE
                )
            except TimeoutError:
                yield self._id_alone() if self._owed else ": still here\n\n"
                continue
            if isinstance(item, Appeared):
                for text in await self._snapshots([stream]):
                    yield text
            else:
                for plain in self._heard(stream, item):
                    yield self._event(plain)

    async def _made_good(self, stream: str) -> AsyncIterator[str]:
        """What the client missed while it was away."""
        place = self._places[stream]
        while True:
            try:
                found = await page(self._service.hands, stream, place, 1000)
            except (Unavailable, Stop):
                yield ": waiting for Redis or Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            if found is None:
                self._standing[stream] = Joining(place)
                return
            place = found.place
            self._standing[stream] = Joining(place)
            for event in found.events:
                yield _text(moves.told(stream, event))
            if found.complete:
                return

    async def _snapshots(self, streams: list[str]) -> list[str]:
        texts = []
        for snapshot in await self._service.snapshots.get(streams):
            known = snapshot.known
            place = Place() if known is None else Place(known.linear, known.vector, known.late)
            self._standing[snapshot.stream] = Joining(place)
            texts.append(_text(described(snapshot, time.monotonic())))
        self._owed = True
        return texts

    def _heard(self, stream: str, item: Item) -> Iterator[moves.Move | moves.Line]:
        """What is new to this client: the follower may be behind what it has, and its ranges may begin before."""
        joining = self._standing[stream]
        match item:
            case Begun(place):
                for writer, position in place.positions.items():
                    yield from _told(stream, joining.reach(writer, position))
            case Line(linear):
                yield moves.Line(stream=stream, linear=linear)
            case events.Advance():
                yield from _told(stream, joining.advance(item))
            case events.Reread(writer=str() as writer):
                yield from _told(stream, joining.reach(writer, item.id))
            case events.Late():
                yield from _told(stream, joining.complete(item))
            case events.LateLost():
                yield from _told(stream, joining.lose_late(item.number))
            case events.Reread():
                yield from _told(stream, [item])

    def _event(self, plain: moves.Move | moves.Line) -> str:
        self._owed = True
        few = len(self._standing) <= FEW
        due = few or (self._listener.items.empty() and time.monotonic() - self._identified >= ID_EVERY)
        return (self._id() if due else "") + _text(plain)

    def _id_alone(self) -> str:
        return f": at\n{self._id()}\n"

    def _id(self) -> str:
        self._owed = False
        self._identified = time.monotonic()
        text = cursor.of_places({stream: joining.place for stream, joining in self._standing.items()})
        return f"id: {text}\n" if len(text) <= LONGEST_ID else ""


class EventStream(StreamingResponse):
    """Gives back what it holds when the client is gone, and leaves a client that does not read."""

    def __init__(self, texts: AsyncIterator[str], listener: Listener, held: ExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(texts, media_type=MEDIA_TYPE, headers=headers)
        self._listener = listener
        self._kept = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._kept:
            serving = asyncio.create_task(super().__call__(scope, receive, send))
            cut = asyncio.create_task(self._listener.cut_off.wait())
            try:
                await asyncio.wait({serving, cut}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (serving, cut):
                    task.cancel()
                await asyncio.gather(serving, cut, return_exceptions=True)


def _told(stream: str, found: Iterable[events.Event]) -> Iterator[moves.Move]:
    return (moves.told(stream, event) for event in found)


def _text(plain: moves.Move | moves.Line | answers.Stream) -> str:
    kind = "snapshot" if isinstance(plain, answers.Stream) else str(plain.__struct_config__.tag)
    return f"event: {kind}\ndata: {msgspec.json.encode(plain).decode()}\n\n"


OPERATIONS = [
    Operation(
        "/v1/events",
        "events",
        "Server-sent events: `snapshot` of each stream, then `advance`, `line`, `late`, `late-lost` and `reread`.",
        follow,
        str,
        query=EventsQuery,
        media=MEDIA_TYPE,
        problems=(BadRequest, Unauthorized, UnknownStream, Busy, Recovering),
        headers=("Last-Event-ID",),
    )
]
