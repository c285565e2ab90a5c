"""The operations that answer with server-sent events: `/v1/events` for programs, `/v1/watch` for people.

`/v1/events`: a snapshot of each stream, then everything that moves it, in order per writer, without a gap. `/v1/watch`:
what changed in all streams since the last text of the client; a slow client gets fewer and newer texts.

The ID of an event is the place of the client, so that any sidecar can continue from there (`Last-Event-ID`). If few
streams are followed, it holds the place in each of them. If many are, it names a mark: a moment up to which the client
was sent everything that Postgres published. A mark is as long for a million streams as for ten.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.read_side import ReadSide, metrics
from tidemark.app.read_side.replay import MissedPage, SingleFlight, identity
from tidemark.app.read_side.subscription import EventBatch, Item, Listener, Started, StreamAdded, Watermark, settle
from tidemark.app.sidecar.event_stream import (
    EVENT_STREAM,
    SNAPSHOTS_AT_ONCE,
    EventStream,
    SnapshotTexts,
    decode_event_id,
    encode_batch,
    encode_batch_id,
    encode_events_after,
    encode_mark,
    encode_missed_moves,
    encode_page_after,
    encode_places,
)
from tidemark.app.sidecar.openapi import Operation, OperationCall
from tidemark.app.sidecar.operations import existing
from tidemark.app.sidecar.problems import BadRequest, Busy, RecoveringProblem, Unauthorized, UnknownStream
from tidemark.app.sidecar.watch import PipelineAnswer, Watch, WatchedStreamAnswer, Watcher
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader import Place
from tidemark.streaming.wire.records import is_name

KEEP_ALIVE = 15.0  # seconds without an event, after which a comment keeps the connection alive
RETRY = 1000, 3000  # ms after which a client reconnects: not all of them at once
FEW = 8  # streams, up to which an ID holds the place in each
LONGEST_ID = 16_000  # characters that servers accept in a header
PIECE = 16 << 10  # bytes that are sent in one piece, and some more: they stay in memory until the client has read them
JOINS = 1000  # places for which an item caches what is new: the last item of a quiet stream stays for long


class EventsClient:
    """One client of `/v1/events`: its `places` by stream, and the texts that it is sent.

    Once it has caught up with a follower, its place is the `Place` object of the follower. Then it takes batches as
    they are encoded for all clients, and comparing places by identity is mostly enough.
    """

    def __init__(
        self,
        read_side: ReadSide,
        snapshots: SnapshotTexts,
        listener: Listener,
        resume_from: Mapping[str, Place] | DurableMark,
        joined: dict[str, Place],
        on_started: Callable[[], None],
    ) -> None:
        """The listener has subscribed already.

        Args:
            read_side: where positions and events come from.
            snapshots: encoded snapshots.
            listener: the queue of the client.
            resume_from: what the last ID of the client says.
            joined: the places that the items of the listener continue from.
            on_started: called when the client has been sent the position of every stream.
        """
        self._read_side = read_side
        self._texts = snapshots
        self._listener = listener
        self._resume_from = resume_from
        self._came = time.monotonic()
        self._places = joined
        self._on_started = on_started

    async def texts(self, streams: list[str]) -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n" % random.randint(*RETRY)
        if not isinstance(self._resume_from, DurableMark):
            for stream in streams:
                if stream in self._resume_from and stream not in self._places:
                    async for text in self._missed(stream, self._resume_from[stream]):
                        yield text
        elif not self._places:
            async for text in self._missed_since(self._resume_from, streams):
                yield text
        others = [stream for stream in streams if stream not in self._places]
        for start in range(0, len(others), SNAPSHOTS_AT_ONCE):
            yield b"".join(await self._snapshots(others[start : start + SNAPSHOTS_AT_ONCE], self._came))
        self._count()
        text = await self._next()
        if not text and self._places and not self._listener.wants_watermarks:
            text = b": at\n" + self._id(None) + b"\n"
        if text:
            yield text
        self._on_started()
        while not self._listener.cut_off.done():
            if await self._listener.waited(KEEP_ALIVE):
                if text := await self._next():
                    yield text
            else:
                yield b": still here\n\n"

    async def _missed(self, stream: str, place: Place) -> AsyncIterator[bytes]:
        """What moved the stream while the client was away."""
        self._places[stream] = place
        page: MissedPage | None = None
        resumptions = self._read_side.resumptions
        while page is None or not page.complete:
            if page is not None and page.abandoned:
                page = None
            if page is None and (cached := resumptions.responses.get(stream, place)):
                text, place = cached
                yield text
                continue
            try:
                page = await (page.next() if page else resumptions.missed(stream, place))
            except (Unavailable, Stop):
                yield b": waiting for Redis or Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            if page is None:  # no server knows the stream
                return
            key = identity(place)
            if key not in page.sent:
                page.sent[key] = encode_page_after(page, stream, place)
                if not page.complete:
                    resumptions.responses.keep(stream, place, *page.sent[key])
            text, place = page.sent[key]
            yield text
        self._places[stream] = place

    async def _missed_since(self, mark: DurableMark, streams: list[str]) -> AsyncIterator[bytes]:
        """What moved all streams since the mark. Nothing, and no places, if the mark is not known any more."""
        while True:
            try:
                # Read positions before moves: the moves then lead to them or beyond.
                known = await self._read_side.snapshots.known(streams)
                missed = await self._read_side.resumptions.since(mark)
            except (Unavailable, Stop):
                yield b": waiting for Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            break
        if missed is None:
            return
        for stream, positions in known.items():
            if stream not in missed.streams:
                self._places[stream] = Place(positions.linear, positions.vector, positions.late)
                continue
            if stream not in missed.encoded or missed.encoded[stream].abandoned:
                place = Place(positions.linear, positions.vector, positions.late)
                missed.encoded[stream] = SingleFlight(encode_missed_moves(missed, stream, place))
            # The same place for all clients: what was known before this was read is among the events.
            texts, self._places[stream] = await missed.encoded[stream].get()
            for text in texts:
                yield text

    async def _snapshots(self, streams: Sequence[str], since: float) -> list[bytes]:
        blocks = []
        for stream, place, text in await self._texts.get(streams, since):
            self._places[stream] = place
            blocks.append(text)
        return blocks

    def _count(self) -> None:
        if len(self._places) > FEW:
            self._listener.wants_watermarks = True

    async def _next(self) -> bytes:
        """The items that the listener was given meanwhile, followed by an ID if one is known. May be empty."""
        blocks: list[bytes] = []
        last: Item | None = None
        size = 0
        while size < PIECE and (taken := self._listener.take(1)):
            ((stream, last),) = taken
            new = await self._taken(stream, last)
            size += sum(map(len, new))
            blocks += new
        if blocks and not self._listener.wants_watermarks:
            blocks[-1] = self._id(last) + blocks[-1]
        return b"".join(blocks)

    async def _taken(self, stream: str, item: Item) -> Sequence[bytes]:
        if isinstance(item, Watermark):
            return [b": at\nid: %s\n\n" % encode_mark(item.mark).encode()]
        if isinstance(item, StreamAdded):
            blocks = await self._snapshots([stream], time.monotonic())
            self._count()
            return blocks
        place = self._places[stream]
        if isinstance(item, EventBatch) and (place is item.before or place == item.before):
            self._places[stream] = item.after
            return item.once(encode_batch)
        if isinstance(item, Started) and place == item.place:
            self._places[stream] = item.place
            return ()
        if id(place) not in item.joins:
            if len(item.joins) >= JOINS:
                item.joins.clear()
            item.joins[id(place)] = place, encode_events_after(stream, place, item)
        joined: tuple[list[bytes], Place] = item.joins[id(place)][1]
        self._places[stream] = joined[1]
        return joined[0]

    def _id(self, last: Item | None) -> bytes:
        if isinstance(last, EventBatch) and len(self._places) == 1 and last.after is self._places[last.stream]:
            text = last.once(encode_batch_id)
        else:
            text = encode_places(self._places).encode()
        if len(text) > LONGEST_ID:
            self._listener.wants_watermarks = True
            return b""
        return b"id: %s\n" % text


NAMES = 200  # streams that one request may name
STALLED = 30.0  # seconds that one text for a watcher may take to be sent


class EventsQuery(msgspec.Struct, frozen=True):
    stream: Annotated[
        list[str], Meta(description="Streams to follow; up to 200 times for several. Without it: all.")
    ] = []


async def follow_events(call: OperationCall) -> Response:
    query: EventsQuery = call.query
    if len(query.stream) > NAMES:
        raise BadRequest(f"{len(query.stream)} streams are named, and {NAMES} may be: leave them out to follow all")
    for name in query.stream:
        if not is_name(name):
            raise UnknownStream(name)
    service, read_side = call.service, call.service.read_side
    last = call.request.headers.get("last-event-id")
    resume_from = decode_event_id(last) if last else {}
    address = call.address
    if pause := service.reconnect_throttle.pause(address):
        metrics.PAUSED.inc()
        await asyncio.sleep(pause)
        if await call.request.is_disconnected():
            return Response(media_type=EVENT_STREAM)
    with ExitStack() as stack:
        listener = Listener()
        stack.enter_context(service.limiter.one("events", address, partial(settle, listener.cut_off)))
        on_started = await service.start_queue.turn(address)
        stack.callback(on_started)
        names = set(query.stream) or await read_side.snapshots.names()
        if query.stream and (others := sorted(name for name in names if not read_side.snapshots.has(name))):
            for snapshot in await read_side.snapshots.get(others):
                existing(snapshot)
        listener.wants_watermarks = len(names) > FEW
        if not query.stream:
            read_side.followers.follow_new_streams(listener)
        joined = stack.enter_context(read_side.followers.subscribe(listener, names, resume_from))
        stack.callback(service.reconnect_throttle.stream_ended, address, time.monotonic())
        resources = stack.pop_all()
    client = EventsClient(read_side, service.snapshot_texts, listener, resume_from, joined, on_started)
    return EventStream(client.texts(sorted(names)), listener.cut_off, resources)


async def watch_streams(call: OperationCall) -> Response:
    with ExitStack() as stack:
        cut_off: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stack.enter_context(call.service.limiter.one("watch", call.address, partial(settle, cut_off)))
        watcher = stack.enter_context(call.service.watch.watching())
        resources = stack.pop_all()
    return EventStream(_changes(call.service.watch, watcher, cut_off), cut_off, resources)


async def _changes(watch: Watch, watcher: Watcher, cut_off: asyncio.Future[None]) -> AsyncIterator[bytes]:
    while True:
        text = await watch.news(watcher)
        stalled = asyncio.get_running_loop().call_later(STALLED, settle, cut_off)
        yield text
        stalled.cancel()


OPERATIONS = [
    Operation(
        "/v1/events",
        "events",
        "Server-sent events: `snapshot` of each stream, then `advance`, `linear`, `late`, `late-lost` and `reread`.",
        follow_events,
        str,
        query=EventsQuery,
        media=EVENT_STREAM,
        problems=(BadRequest, Unauthorized, UnknownStream, Busy, RecoveringProblem),
        headers=("Last-Event-ID",),
    ),
    Operation(
        "/v1/watch",
        "watch",
        "Server-sent events for people: `stream` for each stream and then for each that changed, at most once a second,"
        " and `pipeline`.",
        watch_streams,
        WatchedStreamAnswer | PipelineAnswer,
        media=EVENT_STREAM,
        problems=(Unauthorized, Busy),
    ),
]
