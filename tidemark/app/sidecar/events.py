"""The operations that answer with server-sent events: `/v1/events` for programs, `/v1/watch` for people.

`/v1/events` sends a snapshot of each stream, then every move of the stream, in order per writer, without a gap. A
client that reconnects gets the moves that it missed, or a snapshot if these moves are not available.
`/v1/watch` sends the streams that changed since the last text to the client; a slow client gets fewer and newer texts.

The ID of an event is the place of the client, so that any sidecar can continue from there (`Last-Event-ID`). If the
client follows few streams, the ID contains the place in each stream. For many streams, or long places, the ID is a
mark: the client has received everything that Postgres published up to the mark. The length of a mark does not depend on
the number of streams.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tidemark.app.read_side import ReadSide, metrics
from tidemark.app.read_side.replay import MissedPage, SingleFlight, place_key
from tidemark.app.read_side.subscription import (
    EventBatch,
    FollowerStarted,
    Item,
    Listener,
    StreamAdded,
    Watermark,
    complete_future,
)
from tidemark.app.sidecar.answers import BadRequest, Busy, RecoveringProblem, Unauthorized, UnknownStream
from tidemark.app.sidecar.event_stream import (
    EVENT_STREAM,
    SNAPSHOTS_PER_READ,
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
from tidemark.app.sidecar.operations import require_existing
from tidemark.app.sidecar.watch import PipelineAnswer, Watch, WatchedStreamAnswer, Watcher
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader import Place
from tidemark.streaming.wire.records import is_name

KEEP_ALIVE_SECONDS = 15.0  # without an event; then a comment is sent
RETRY_MILLISECONDS = 1000, 3000  # the range of random reconnect delays, so that clients do not reconnect together
MAX_STREAMS_IN_EVENT_ID = 8  # with more streams, the event ID is a mark
MAX_EVENT_ID_LENGTH = 16_000  # characters that HTTP servers accept in a header
CHUNK_BYTES = 16 << 10  # about the size of one write, which stays in memory until the client has read it
MAX_CACHED_PLACES = 1000  # per item; limited because the last item of an idle stream stays in memory


class EventsClient:
    """One client of `/v1/events`: the client's place in each stream, and the texts for the client.

    A client that has caught up with a follower shares the `Place` object of the follower, and gets the batches that
    were encoded once for all clients. So the two places are usually compared by identity.
    """

    def __init__(
        self,
        read_side: ReadSide,
        snapshots: SnapshotTexts,
        listener: Listener,
        resume_from: Mapping[str, Place] | DurableMark,
        resumed_places: dict[str, Place],
        on_started: Callable[[], None],
        wait_for_turn: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            read_side: the source of positions and events.
            snapshots: encoded snapshots.
            listener: the client's queue; it is already subscribed.
            resume_from: the decoded `Last-Event-ID` of the client; empty if the client sent none.
            resumed_places: stream -> place after which the listener's first item begins. `EventsClient` updates the
                mapping with each text.
            on_started: called when the client has been sent the positions of every stream.
            wait_for_turn: returns when it is the turn of this client. So clients that share a read continue one after
                the other.
        """
        self._read_side = read_side
        self._snapshot_cache = snapshots
        self._listener = listener
        self._resume_from = resume_from
        self._connected_at = time.monotonic()
        self._places = resumed_places
        self._on_started = on_started
        self._wait_for_turn = wait_for_turn

    async def texts(self, streams: list[str]) -> AsyncIterator[bytes]:
        """Yield the texts of the response for these streams, until the listener must be disconnected. Moves the
        client's places.
        """
        yield b"retry: %d\n\n" % random.randint(*RETRY_MILLISECONDS)
        if not isinstance(self._resume_from, DurableMark):
            for stream in streams:
                if stream in self._resume_from and stream not in self._places:
                    async for text in self._missed_texts(stream, self._resume_from[stream]):
                        yield text
        elif not self._places:
            async for text in self._missed_texts_since(self._resume_from, streams):
                yield text
        others = [stream for stream in streams if stream not in self._places]
        for start in range(0, len(others), SNAPSHOTS_PER_READ):
            text = b"".join(await self._snapshot_texts(others[start : start + SNAPSHOTS_PER_READ], self._connected_at))
            await self._wait_for_turn()
            yield text
        self._request_watermarks_if_many()
        text = await self._next_text()
        if not text and self._places and not self._listener.receives_watermarks:
            text = b": at\n" + self._event_id_line(None) + b"\n"
        if text:
            yield text
        self._on_started()
        while not self._listener.disconnect_signal.done():
            if await self._listener.wait_for_item(KEEP_ALIVE_SECONDS):
                if text := await self._next_text():
                    yield text
            else:
                yield b": still here\n\n"

    async def _missed_texts(self, stream: str, place: Place) -> AsyncIterator[bytes]:
        """Yield the moves of the stream after `place`, which the client missed while it was disconnected. Moves the
        client's place.

        While the moves cannot be read, yields a comment once a second. Ends if no server has the stream.
        """
        self._places[stream] = place
        page: MissedPage | None = None
        replay_reader = self._read_side.replay_reader
        while page is None or not page.is_last:
            if page is not None and page.is_abandoned:
                page = None
            if page is None and (cached := replay_reader.responses.get(stream, place)):
                text, place = cached
                yield text
                continue
            try:
                page = await (page.next() if page else replay_reader.read_missed(stream, place))
            except (Unavailable, Stop):
                yield b": waiting for Redis or Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            if page is None:  # no server has the stream
                return
            key = place_key(place)
            if key not in page.responses:
                page.responses[key] = encode_page_after(page, stream, place)
                if not page.is_last:
                    replay_reader.responses.store(stream, place, *page.responses[key])
            text, place = page.responses[key]
            yield text
        self._places[stream] = place

    async def _missed_texts_since(self, mark: DurableMark, streams: list[str]) -> AsyncIterator[bytes]:
        """Yield the moves of `streams` since the mark, and set the client's places.

        While the moves cannot be read, yields a comment once a second. Yields no moves, and sets no places, if
        `ReplayReader.read_missed_since` returns None.
        """
        while True:
            try:
                # Read positions before moves, so that the moves reach or pass these positions.
                known = await self._read_side.snapshots.known_positions(streams)
                missed = await self._read_side.replay_reader.read_missed_since(mark)
            except (Unavailable, Stop):
                yield b": waiting for Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            break
        if missed is None:
            return
        for stream, positions in known.items():
            if stream not in missed.streams:
                self._places[stream] = Place(positions.linear, positions.vector, positions.last_late_number)
                continue
            if stream not in missed.encodings or missed.encodings[stream].is_abandoned:
                place = Place(positions.linear, positions.vector, positions.last_late_number)
                missed.encodings[stream] = SingleFlight(encode_missed_moves(missed, stream, place))
            # Encoded once for all clients: the moves reach or pass the positions that each of these clients has read.
            texts, self._places[stream] = await missed.encodings[stream].get()
            for text in texts:
                yield text

    async def _snapshot_texts(self, streams: Sequence[str], since: float) -> list[bytes]:
        """Get the `snapshot` event of each stream, and set the client's places to the places of the snapshots. `since`:
        as for `SnapshotTexts.get`."""
        blocks = []
        for stream, place, text in await self._snapshot_cache.get(streams, since):
            self._places[stream] = place
            blocks.append(text)
        return blocks

    def _request_watermarks_if_many(self) -> None:
        if len(self._places) > MAX_STREAMS_IN_EVENT_ID:
            self._listener.receives_watermarks = True

    async def _next_text(self) -> bytes:
        """Take items from the queue, encode about `CHUNK_BYTES` of them, and move the client's places.

        The last event has an event ID, unless watermarks provide the event IDs. The text may be empty.
        """
        blocks: list[bytes] = []
        last: Item | None = None
        size = 0
        while size < CHUNK_BYTES and (items := self._listener.take(1)):
            ((stream, last),) = items
            new = await self._encode(stream, last)
            size += sum(map(len, new))
            blocks += new
        if blocks and not self._listener.receives_watermarks:
            blocks[-1] = self._event_id_line(last) + blocks[-1]
        return b"".join(blocks)

    async def _encode(self, stream: str, item: Item) -> Sequence[bytes]:
        """Encode an item for this client, and move the client's place."""
        if isinstance(item, Watermark):
            return [b": at\nid: %s\n\n" % encode_mark(item.mark).encode()]
        if isinstance(item, StreamAdded):
            blocks = await self._snapshot_texts([stream], time.monotonic())
            self._request_watermarks_if_many()
            return blocks
        place = self._places[stream]
        if isinstance(item, EventBatch) and (place is item.place_before or place == item.place_before):
            self._places[stream] = item.place_after
            return item.encode_once(encode_batch)
        if isinstance(item, FollowerStarted) and place == item.place:
            self._places[stream] = item.place
            return ()
        if id(place) not in item.by_place:
            if len(item.by_place) >= MAX_CACHED_PLACES:
                item.by_place.clear()
            item.by_place[id(place)] = place, encode_events_after(stream, place, item)
        encoded: tuple[list[bytes], Place] = item.by_place[id(place)][1]
        self._places[stream] = encoded[1]
        return encoded[0]

    def _event_id_line(self, last: Item | None) -> bytes:
        """Encode the line with the event ID after `last`, the last encoded item. If the ID is too long, returns an
        empty text, and requests watermarks: then the client gets marks as event IDs."""
        if isinstance(last, EventBatch) and len(self._places) == 1 and last.place_after is self._places[last.stream]:
            text = last.encode_once(encode_batch_id)
        else:
            text = encode_places(self._places).encode()
        if len(text) > MAX_EVENT_ID_LENGTH:
            self._listener.receives_watermarks = True
            return b""
        return b"id: %s\n" % text


MAX_STREAMS_PER_REQUEST = 200
WRITE_TIMEOUT_SECONDS = 30.0  # for one text to a watcher


class EventsQuery(msgspec.Struct, frozen=True):
    stream: Annotated[
        list[str],
        Meta(description="A stream to follow. Repeat the parameter for several streams, up to 200. Default: all."),
    ] = []


async def follow_events(call: OperationCall) -> Response:
    query: EventsQuery = call.query
    if len(query.stream) > MAX_STREAMS_PER_REQUEST:
        raise BadRequest(
            f"the request names {len(query.stream)} streams; at most {MAX_STREAMS_PER_REQUEST} are allowed. A"
            " request without `stream` parameters follows all streams"
        )
    for name in query.stream:
        if not is_name(name):
            raise UnknownStream(name)
    service, read_side = call.service, call.service.read_side
    last_id = call.request.headers.get("last-event-id")
    resume_from = decode_event_id(last_id) if last_id else {}
    address = call.address
    if delay := service.reconnect_throttle.delay_seconds(address):
        metrics.EVENTS_PAUSED.inc()
        await asyncio.sleep(delay)
        if await call.request.is_disconnected():
            return Response(media_type=EVENT_STREAM)
    with ExitStack() as stack:
        listener = Listener(partial(service.wake_queue.add, address))
        stack.enter_context(
            service.open_request_slots.take_slot(
                "events", address, partial(complete_future, listener.disconnect_signal)
            )
        )
        on_started = await service.start_queue.wait_for_start(address)
        stack.callback(on_started)
        names = set(query.stream) or await read_side.snapshots.names()
        if query.stream and (others := sorted(name for name in names if not read_side.snapshots.has_read(name))):
            for snapshot in await read_side.snapshots.get(others):
                require_existing(snapshot)
        listener.receives_watermarks = len(names) > MAX_STREAMS_IN_EVENT_ID
        if not query.stream:
            read_side.followers.follow_new_streams(listener)
        resumed_places = stack.enter_context(read_side.followers.subscribe(listener, names, resume_from))
        stack.callback(service.reconnect_throttle.count_ended_stream, address, time.monotonic())
        resources = stack.pop_all()
    client = EventsClient(
        read_side,
        service.snapshot_texts,
        listener,
        resume_from,
        resumed_places,
        on_started,
        partial(service.wake_queue.wait_for_turn, address),
    )
    return EventStream(client.texts(sorted(names)), listener.disconnect_signal, resources)


async def watch_streams(call: OperationCall) -> Response:
    with ExitStack() as stack:
        disconnect_signal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stack.enter_context(
            call.service.open_request_slots.take_slot(
                "watch", call.address, partial(complete_future, disconnect_signal)
            )
        )
        watcher = stack.enter_context(call.service.watch.watching())
        resources = stack.pop_all()
    return EventStream(_watch_texts(call.service.watch, watcher, disconnect_signal), disconnect_signal, resources)


async def _watch_texts(watch: Watch, watcher: Watcher, disconnect_signal: asyncio.Future[None]) -> AsyncIterator[bytes]:
    while True:
        text = await watch.next_text(watcher)
        write_timeout = asyncio.get_running_loop().call_later(WRITE_TIMEOUT_SECONDS, complete_future, disconnect_signal)
        yield text
        write_timeout.cancel()


OPERATIONS = [
    Operation(
        "/v1/events",
        "events",
        "Server-sent events: `snapshot` of each stream, then `advance`, `linear`, `late`, `late-lost` and `reread`.",
        follow_events,
        str,
        query=EventsQuery,
        media_type=EVENT_STREAM,
        problems=(BadRequest, Unauthorized, UnknownStream, Busy, RecoveringProblem),
        headers=("Last-Event-ID",),
    ),
    Operation(
        "/v1/watch",
        "watch",
        "Server-sent events for people, at most once a second: `stream` for each stream that changed (at first, for"
        " every stream), then `pipeline`.",
        watch_streams,
        WatchedStreamAnswer | PipelineAnswer,
        media_type=EVENT_STREAM,
        problems=(Unauthorized, Busy),
    ),
]
