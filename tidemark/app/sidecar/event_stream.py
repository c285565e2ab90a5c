"""Server-sent events: events and their IDs as text, each encoded once for all clients at the same place, and the
response."""

import asyncio
import binascii
import re
import time
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemark.app.diagnosis.open_ranges import StreamId
from tidemark.app.read_side.replay import PAGE, MissedMoves, MissedPage
from tidemark.app.read_side.single_flight import ReadCoalescer
from tidemark.app.read_side.snapshots import Snapshots
from tidemark.app.read_side.subscription import EventBatch, Started
from tidemark.app.sidecar.answers import LinearMoveAnswer, move_answer, stream_answer
from tidemark.app.sidecar.problems import BadRequest, Stops
from tidemark.common.errors import BadToken
from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader import Advance, Event, EventMerge, Late, LateLost, Place, Reread, Token
from tidemark.streaming.values.direction import beyond

EVENT_STREAM = "text/event-stream"


def encode_event(body: msgspec.Struct, name: str | None = None) -> bytes:
    """One event. `name` is its kind; by default the tag of the struct."""
    return b"event: %s\ndata: %s\n\n" % ((name or str(body.__struct_config__.tag)).encode(), msgspec.json.encode(body))


class EventStream(Response):
    """A response of events that does not end by itself.

    Closes `resources` when the client has left, and stops serving a client for which `cut_off` is done: sending to a
    client that does not read would wait for ever. If the process stops, the response ends as a complete one, so that no
    proxy takes it for a failure.
    """

    media_type = EVENT_STREAM

    def __init__(self, texts: AsyncIterator[bytes], cut_off: "asyncio.Future[None]", resources: ExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._texts = texts
        self._cut_off = cut_off
        self._resources = resources
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stopped: asyncio.Future[Any] = scope["app"].state.service.stopped
        with self._resources:
            serving = asyncio.create_task(self._serve(send))
            disconnected = asyncio.create_task(_disconnected(receive))
            try:
                # Two tasks and shared futures: there are thousands of such responses.
                await asyncio.wait((serving, disconnected, self._cut_off, stopped), return_when=asyncio.FIRST_COMPLETED)
            finally:
                serving.cancel()
                disconnected.cancel()
                await asyncio.gather(serving, disconnected, return_exceptions=True)
            if not serving.cancelled():
                serving.result()
            elif stopped.done() and not self._cut_off.done():
                await self._end(scope, receive, send)

    async def _serve(self, send: Send) -> None:
        self._is_started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._texts:
            await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_started:
            await send({"type": "http.response.body", "body": b": this sidecar is stopping\n\n", "more_body": False})
        else:
            await Stops().response()(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_CURSOR_BYTES = 1 << 20  # bytes that a cursor may decompress to: a hostile one must not fill the memory


class _EncodedPlace(msgspec.Struct, array_like=True, frozen=True):
    linear: StreamId
    positions: dict[str, StreamId]
    late: StreamId


_MARK = re.compile(r"t([0-9]{1,19})\.([0-9]{1,15})", re.ASCII)
_DECODER = msgspec.msgpack.Decoder(dict[str, _EncodedPlace])


def encode_places(places: Mapping[str, Place]) -> str:
    encoded = {
        stream: _EncodedPlace(place.linear, dict(place.positions), place.late) for stream, place in places.items()
    }
    return "p" + urlsafe_b64encode(zlib.compress(msgspec.msgpack.encode(encoded))).decode().rstrip("=")


def decode_places(text: str) -> dict[str, Place]:
    """Raises `BadRequest`."""
    try:
        if not text.startswith("p"):
            raise ValueError("it does not begin with p")
        packed = urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
        stored = _DECODER.decode(_decompressed(packed))
    except (ValueError, binascii.Error, zlib.error, msgspec.MsgspecError):
        raise BadRequest(f"{text[:80]!r} was not given out by this interface") from None
    return {stream: Place(place.linear, place.positions, place.late) for stream, place in stored.items()}


def encode_mark(mark: DurableMark) -> str:
    return f"t{mark.lease}.{mark.time}"


def decode_event_id(text: str) -> dict[str, Place] | DurableMark:
    """Parse the ID of an event: a place in each stream, or a mark. Raises `BadRequest`."""
    if text.startswith("t"):
        mark = _MARK.fullmatch(text)
        if mark is None or any(int(number) >= 1 << 63 for number in mark.groups()):
            raise BadRequest(f"{text[:80]!r} was not given out by this interface")
        return DurableMark(int(mark[1]), int(mark[2]))
    return decode_places(text)


def decode_since(stream: str, text: str) -> Place | Token:
    """Parse `since=`: a token, or the `next` of a page. Raises `BadRequest`."""
    if text.startswith("p"):
        place = decode_places(text).get(stream)
        if place is None:
            raise BadRequest(f"that cursor is not of stream {stream}")
        return place
    return decode_token(text)


def decode_token(text: str) -> Token:
    """Raises `BadRequest`."""
    try:
        return Token.parse(text)
    except BadToken as problem:
        raise BadRequest(str(problem)) from None


def _decompressed(packed: bytes) -> Any:
    stream = zlib.decompressobj()
    data = stream.decompress(packed, MAX_CURSOR_BYTES)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("too long, or cut off")
    return data


SNAPSHOTS_AT_ONCE = 100  # streams whose snapshots are read at once: other tasks run in between
SHARED_FOR = 5.0  # seconds


class SnapshotTexts:
    """Encoded snapshots, made once for all clients that come at the same time. For one event loop."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._reads = ReadCoalescer(self._read)
        self._texts: dict[str, tuple[float, Place, bytes]] = {}
        self._cleared = time.monotonic()

    async def get(self, streams: Sequence[str], since: float) -> list[tuple[str, Place, bytes]]:
        """Snapshots of streams that were read at or after `since` (s, monotonic): the place and the event of each
        stream."""
        texts: Mapping[str, tuple[float, Place, bytes]] = self._texts
        if missing := [name for name in streams if name not in texts or texts[name][0] < since]:
            texts = {**{name: texts[name] for name in streams if name in texts}, **await self._reads.get(missing)}
        return [(name, *texts[name][1:]) for name in streams]

    async def _read(self, streams: Collection[str]) -> Mapping[str, tuple[float, Place, bytes]]:
        now = time.monotonic()
        if now - self._cleared > SHARED_FOR:
            self._texts, self._cleared = {}, now
        names, texts = list(streams), {}
        for start in range(0, len(names), SNAPSHOTS_AT_ONCE):
            for snapshot in await self._snapshots.get(names[start : start + SNAPSHOTS_AT_ONCE]):
                known = snapshot.known
                place = Place() if known is None else Place(known.linear, known.vector, known.late)
                text = encode_event(stream_answer(snapshot, time.monotonic()), "snapshot")
                texts[snapshot.stream] = now, place, text
        self._texts |= texts
        return texts


def encode_events_after(stream: str, place: Place, item: Started | EventBatch) -> tuple[list[bytes], Place]:
    """The part of `item` that is new for a client at `place`, which is not the place of the follower; and the client's
    place after it."""
    merge = EventMerge(place)
    new_events: list[Event]
    match item:
        case Started(after):
            new_events = [event for position in after.positions.items() for event in merge.reach(*position)]
        case EventBatch(after=after):
            new_events = [new for event in item.events for new in _merge_event(merge, event)]
    blocks = [encode_event(move_answer(stream, event)) for event in new_events]
    merge.settle(after.linear, after.positions)
    if beyond(after.linear, place.linear):
        blocks.append(_linear_event(stream, after.linear))
    if merge.place == place:
        return blocks, place
    return blocks, after if merge.place == after else merge.place


def encode_batch(piece: EventBatch) -> tuple[bytes, bytes]:
    """The batch as server-sent events. The last event is separate: it is the one that may carry an ID."""
    blocks = [encode_event(move_answer(piece.stream, event)) for event in piece.events]
    if piece.linear is not None:
        blocks.append(_linear_event(piece.stream, piece.linear))
    return b"".join(blocks[:-1]), blocks[-1]


def encode_batch_id(piece: EventBatch) -> bytes:
    """The place after this batch of a client that follows nothing but its stream."""
    return encode_places({piece.stream: piece.after}).encode()


def _merge_event(merge: EventMerge, event: Event) -> Iterable[Event]:
    match event:
        case Advance():
            return merge.advance(event)
        case Reread(writer=str() as writer):
            return merge.reach(writer, event.id)
        case Late():
            return merge.complete(event)
        case LateLost():
            return merge.lose_late(event.number)
    return [event]


def _linear_event(stream: str, linear: int) -> bytes:
    return encode_event(LinearMoveAnswer(stream=stream, linear=linear))


async def encode_missed_moves(missed: MissedMoves, stream: str, start: Place) -> tuple[list[bytes], Place]:
    """The moves of one of many streams, and the place after them for a client that begins at `start`.

    One text per page, and other tasks run in between: there may be very many moves, and each text is kept until its
    client has read it.
    """
    merge, events, texts = EventMerge(start), missed.events[stream], []
    for first in range(0, len(events), PAGE):
        page = events[first : first + PAGE]
        for event in page:
            deque(_merge_event(merge, event), maxlen=0)
        texts.append(b"".join(encode_event(move_answer(stream, event)) for event in page))
        await asyncio.sleep(0)
    missed.events[stream] = ()
    return [*texts, _linear_event(stream, missed.streams[stream].linear)], merge.place


def encode_page_after(page: MissedPage, stream: str, place: Place) -> tuple[bytes, Place]:
    """What is new in the page for a client at `place`, and its place after the page."""
    merge = EventMerge(place)
    blocks = [encode_event(move_answer(stream, new)) for event in page.events for new in _merge_event(merge, event)]
    if page.complete:
        merge.settle(page.place.linear, page.place.positions)
        if beyond(page.place.linear, place.linear):
            blocks.append(_linear_event(stream, page.place.linear))
    return b"".join(blocks), page.place if merge.place == page.place else merge.place
