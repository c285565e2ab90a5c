"""Server-sent events: the texts of events and event IDs, encoded once for all clients at the same place, and the HTTP
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
from tidemark.app.read_side.replay import PAGE_EVENTS, MissedMoves, MissedPage
from tidemark.app.read_side.single_flight import ReadCoalescer
from tidemark.app.read_side.snapshots import Snapshots
from tidemark.app.read_side.subscription import EventBatch, FollowerStarted
from tidemark.app.sidecar.answers import BadRequest, LinearMoveAnswer, StoppingProblem, move_answer, stream_answer
from tidemark.common.errors import BadToken
from tidemark.sinks.postgres.history import DurableMark
from tidemark.sinks.reader import Advance, Event, EventMerge, Late, MissingLateCompletions, Place, Reread, Token
from tidemark.streaming.values.direction import is_beyond

EVENT_STREAM = "text/event-stream"


def encode_event(body: msgspec.Struct, name: str | None = None) -> bytes:
    """Encode one event. `name`: the event type; None: the tag of the struct `body`."""
    return b"event: %s\ndata: %s\n\n" % ((name or str(body.__struct_config__.tag)).encode(), msgspec.json.encode(body))


class EventStream(Response):
    """A response with server-sent events. It ends when the client disconnects, or when `texts` ends.

    The response is cut off when `disconnect_signal` is done, because a send to a client that does not read would never
    end. When the process stops, the response ends normally, so that a proxy reports no failure.

    Args:
        texts: the encoded events.
        disconnect_signal: done when the client must be disconnected.
        resources: closed at the end of the response.
    """

    media_type = EVENT_STREAM

    def __init__(
        self, texts: AsyncIterator[bytes], disconnect_signal: "asyncio.Future[None]", resources: ExitStack
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._texts = texts
        self._disconnect_signal = disconnect_signal
        self._resources = resources
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stop_signal: asyncio.Future[Any] = scope["app"].state.service.stop_signal
        with self._resources:
            serving = asyncio.create_task(self._serve(send))
            disconnected = asyncio.create_task(_wait_for_disconnect(receive))
            try:
                # Only two tasks per response, because there are thousands of responses. The signals are futures.
                await asyncio.wait(
                    (serving, disconnected, self._disconnect_signal, stop_signal), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                serving.cancel()
                disconnected.cancel()
                await asyncio.gather(serving, disconnected, return_exceptions=True)
            if not serving.cancelled():
                serving.result()
            elif stop_signal.done() and not self._disconnect_signal.done():
                await self._send_end(scope, receive, send)

    async def _serve(self, send: Send) -> None:
        self._is_started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._texts:
            await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_started:
            await send({"type": "http.response.body", "body": b": this sidecar is stopping\n\n", "more_body": False})
        else:
            await StoppingProblem().response()(scope, receive, send)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_CURSOR_BYTES = 1 << 20  # of a decompressed cursor; limited because clients send cursors


class _EncodedPlace(msgspec.Struct, array_like=True, frozen=True):
    linear: StreamId
    positions: dict[str, StreamId]
    late: StreamId


_MARK_PATTERN = re.compile(r"t([0-9]{1,19})\.([0-9]{1,15})", re.ASCII)
_DECODER = msgspec.msgpack.Decoder(dict[str, _EncodedPlace])


def encode_places(places: Mapping[str, Place]) -> str:
    """Encode the place in each stream (stream -> place) as an event ID, or as the `next` of a page."""
    encoded = {
        stream: _EncodedPlace(place.linear, dict(place.positions), place.late) for stream, place in places.items()
    }
    return "p" + urlsafe_b64encode(zlib.compress(msgspec.msgpack.encode(encoded))).decode().rstrip("=")


def decode_places(text: str) -> dict[str, Place]:
    """Parse the text of `encode_places`. Raises `BadRequest`."""
    try:
        if not text.startswith("p"):
            raise ValueError("a cursor begins with p")
        packed = urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
        stored = _DECODER.decode(_decompress(packed))
    except (ValueError, binascii.Error, zlib.error, msgspec.MsgspecError):
        raise _invalid_cursor(text) from None
    return {stream: Place(place.linear, place.positions, place.late) for stream, place in stored.items()}


def _invalid_cursor(text: str) -> BadRequest:
    return BadRequest(f"{text[:80]!r} is not a cursor or event ID of this interface; send the request without it")


def encode_mark(mark: DurableMark) -> str:
    """Encode a mark as an event ID."""
    return f"t{mark.lease_token}.{mark.time}"


def decode_event_id(text: str) -> dict[str, Place] | DurableMark:
    """Parse the ID of an event: the place in each stream, or a mark. Raises `BadRequest`."""
    if text.startswith("t"):
        mark = _MARK_PATTERN.fullmatch(text)
        if mark is None or any(int(number) >= 1 << 63 for number in mark.groups()):
            raise _invalid_cursor(text)
        return DurableMark(int(mark[1]), int(mark[2]))
    return decode_places(text)


def decode_since(stream: str, text: str) -> Place | Token:
    """Parse `since=`: a token, or the `next` of a page. Raises `BadRequest`."""
    if text.startswith("p"):
        place = decode_places(text).get(stream)
        if place is None:
            raise BadRequest(f"the cursor is not for stream {stream}; use the `next` of a page of this stream")
        return place
    return decode_token(text)


def decode_token(text: str) -> Token:
    """Parse a token. Raises `BadRequest`."""
    try:
        return Token.parse(text)
    except BadToken as problem:
        raise BadRequest(str(problem)) from None


def _decompress(packed: bytes) -> Any:
    stream = zlib.decompressobj()
    data = stream.decompress(packed, MAX_CURSOR_BYTES)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError("the cursor is too long, or incomplete")
    return data


SNAPSHOTS_PER_READ = 100  # other tasks run between two reads
CACHE_SECONDS = 5.0  # between two removals of all cached snapshots


class SnapshotTexts:
    """Encoded snapshots, shared by all clients that connect at about the same time. For one event loop."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._reads = ReadCoalescer(self._read)
        # Stream -> when the snapshot was read (seconds, monotonic), its place, and the text of the event.
        self._texts: dict[str, tuple[float, Place, bytes]] = {}
        self._cleared_at = time.monotonic()

    async def get(self, streams: Sequence[str], since: float) -> list[tuple[str, Place, bytes]]:
        """Return (stream, place of the snapshot, text of the `snapshot` event) for each stream, in the order of
        `streams`. The place is `Place()` if the positions of the stream are not known.

        Args:
            streams: the names of the streams.
            since: cached snapshots that are older are read again (seconds, monotonic).
        """
        texts: Mapping[str, tuple[float, Place, bytes]] = self._texts
        if missing := [name for name in streams if name not in texts or texts[name][0] < since]:
            texts = {**{name: texts[name] for name in streams if name in texts}, **await self._reads.get(missing)}
        return [(name, *texts[name][1:]) for name in streams]

    async def _read(self, streams: Collection[str]) -> Mapping[str, tuple[float, Place, bytes]]:
        now = time.monotonic()
        if now - self._cleared_at > CACHE_SECONDS:
            self._texts, self._cleared_at = {}, now
        names, texts = list(streams), {}
        for start in range(0, len(names), SNAPSHOTS_PER_READ):
            for snapshot in await self._snapshots.get(names[start : start + SNAPSHOTS_PER_READ]):
                positions = snapshot.positions
                place = (
                    Place()
                    if positions is None
                    else Place(positions.linear, positions.vector, positions.last_late_number)
                )
                text = encode_event(stream_answer(snapshot, time.monotonic()), "snapshot")
                texts[snapshot.stream] = now, place, text
        self._texts |= texts
        return texts


def encode_events_after(stream: str, place: Place, item: FollowerStarted | EventBatch) -> tuple[list[bytes], Place]:
    """Encode the events of `item` that are new for a client at `place`, which is not the place before `item`. Also
    returns the place of the client after these events."""
    merge = EventMerge(place)
    new_events: list[Event]
    match item:
        case FollowerStarted(after):
            new_events = [event for position in after.positions.items() for event in merge.move_to(*position)]
        case EventBatch(place_after=after):
            new_events = [new for event in item.events for new in _merge_event(merge, event)]
    blocks = [encode_event(move_answer(stream, event)) for event in new_events]
    merge.mark_settled(after.linear, after.positions)
    if is_beyond(after.linear, place.linear):
        blocks.append(_encode_linear(stream, after.linear))
    if merge.place == place:
        return blocks, place
    return blocks, after if merge.place == after else merge.place


def encode_batch(batch: EventBatch) -> tuple[bytes, bytes]:
    """Encode the events of a batch as two texts: all events except the last one, and the last event, to which the
    caller may add an event ID."""
    blocks = [encode_event(move_answer(batch.stream, event)) for event in batch.events]
    if batch.linear is not None:
        blocks.append(_encode_linear(batch.stream, batch.linear))
    return b"".join(blocks[:-1]), blocks[-1]


def encode_batch_id(batch: EventBatch) -> bytes:
    """Encode the event ID after this batch, for a client that follows only the stream of the batch."""
    return encode_places({batch.stream: batch.place_after}).encode()


def _merge_event(merge: EventMerge, event: Event) -> Iterable[Event]:
    match event:
        case Advance():
            return merge.add_advance(event)
        case Reread(writer=str() as writer):
            return merge.move_to(writer, event.id)
        case Late():
            return merge.add_late(event)
        case MissingLateCompletions():
            return merge.note_missing_late_completions(event.number)
    return [event]


def _encode_linear(stream: str, linear: int) -> bytes:
    return encode_event(LinearMoveAnswer(stream=stream, linear=linear))


async def encode_missed_moves(missed: MissedMoves, stream: str, start: Place) -> tuple[list[bytes], Place]:
    """Encode the missed moves of one stream for clients that begin at `start`, and remove the moves from `missed`.

    Returns a text for each page of moves, then a text with the linear position; and the place after these texts. A page
    is small, because its text stays in memory until the client has read it. Other tasks run between two pages, because
    there may be very many moves.
    """
    merge, events, texts = EventMerge(start), missed.events[stream], []
    for first in range(0, len(events), PAGE_EVENTS):
        page = events[first : first + PAGE_EVENTS]
        for event in page:
            deque(_merge_event(merge, event), maxlen=0)
        texts.append(b"".join(encode_event(move_answer(stream, event)) for event in page))
        await asyncio.sleep(0)
    missed.events[stream] = ()
    return [*texts, _encode_linear(stream, missed.streams[stream].linear)], merge.place


def encode_page_after(page: MissedPage, stream: str, place: Place) -> tuple[bytes, Place]:
    """Encode the events of the page that are new for a client at `place`. Also returns the place of the client after
    these events."""
    merge = EventMerge(place)
    blocks = [encode_event(move_answer(stream, new)) for event in page.events for new in _merge_event(merge, event)]
    if page.is_last:
        merge.mark_settled(page.place.linear, page.place.positions)
        if is_beyond(page.place.linear, place.linear):
            blocks.append(_encode_linear(stream, page.place.linear))
    return b"".join(blocks), page.place if merge.place == page.place else merge.place
