"""What clients of `/v1/events` are sent, as texts, each made once for all who stand at the same place."""

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

from tidemark.app.lag_json import StreamId
from tidemark.app.read_side.replay import PAGE, MissedMoves, MissedPage
from tidemark.app.read_side.single_flight import ReadCoalescer
from tidemark.app.read_side.snapshots import Snapshots
from tidemark.app.read_side.subscription import EventBatch, Started
from tidemark.app.sidecar.answers import LinearMoveAnswer, move_answer, stream_answer
from tidemark.app.sidecar.problems import BadRequest, Stops
from tidemark.common.errors import BadToken
from tidemark.sinks.postgres.changes import DurableMark
from tidemark.sinks.reader import Advance, Event, EventMerge, Late, LateLost, Place, Reread, Token
from tidemark.streaming.values.direction import beyond

EVENT_STREAM = "text/event-stream"


def encode_event(body: msgspec.Struct, name: str | None = None) -> bytes:
    """One event, named after the struct's tag where it has no `name`."""
    return b"event: %s\ndata: %s\n\n" % ((name or str(body.__struct_config__.tag)).encode(), msgspec.json.encode(body))


class EventStream(Response):
    """Closes `resources` when the client is gone, and leaves a client for which `cut_off` is done: sending to one that
    does not read waits for ever. Where the process stops, it ends as a whole answer does, so that nothing on the way
    takes it for a failure."""

    media_type = EVENT_STREAM

    def __init__(self, texts: AsyncIterator[bytes], cut_off: "asyncio.Future[None]", resources: ExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._texts = texts
        self._cut_off = cut_off
        self._resources = resources
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stopped: asyncio.Future[Any] = scope["app"].state.service.stopped
        with self._resources:
            serving = asyncio.create_task(self._serve(send))
            gone = asyncio.create_task(_gone(receive))
            try:
                # Two tasks of its own, and futures of others: there are thousands of such streams.
                await asyncio.wait((serving, gone, self._cut_off, stopped), return_when=asyncio.FIRST_COMPLETED)
            finally:
                serving.cancel()
                gone.cancel()
                await asyncio.gather(serving, gone, return_exceptions=True)
            if not serving.cancelled():
                serving.result()
            elif stopped.done() and not self._cut_off.done():
                await self._end(scope, receive, send)

    async def _serve(self, send: Send) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._texts:
            await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begun:
            await send({"type": "http.response.body", "body": b": this sidecar stops\n\n", "more_body": False})
        else:
            await Stops().response()(scope, receive, send)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_CURSOR_BYTES = 1 << 20  # bytes that a cursor may unpack to: a hostile one must not fill the memory


class _EncodedPlace(msgspec.Struct, array_like=True, frozen=True):
    linear: StreamId
    positions: dict[str, StreamId]
    late: StreamId


_MARK = re.compile(r"t([0-9]{1,19})\.([0-9]{1,15})", re.ASCII)
_DECODER = msgspec.msgpack.Decoder(dict[str, _EncodedPlace])


def encode_places(places: Mapping[str, Place]) -> str:
    plain = {stream: _EncodedPlace(it.linear, dict(it.positions), it.late) for stream, it in places.items()}
    return "p" + urlsafe_b64encode(zlib.compress(msgspec.msgpack.encode(plain))).decode().rstrip("=")


def decode_places(text: str) -> dict[str, Place]:
    """Raises `BadRequest`."""
    try:
        if not text.startswith("p"):
            raise ValueError("it does not begin with p")
        packed = urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
        stored = _DECODER.decode(_decompressed(packed))
    except (ValueError, binascii.Error, zlib.error, msgspec.MsgspecError):
        raise BadRequest(f"{text[:80]!r} is none that this interface gave out") from None
    return {stream: Place(it.linear, it.positions, it.late) for stream, it in stored.items()}


def encode_mark(mark: DurableMark) -> str:
    return f"t{mark.lease}.{mark.time}"


def decode_event_id(text: str) -> dict[str, Place] | DurableMark:
    """What an event's ID says: a place in each stream, or a mark. Raises `BadRequest`."""
    if text.startswith("t"):
        found = _MARK.fullmatch(text)
        if found is None or any(int(it) >= 1 << 63 for it in found.groups()):
            raise BadRequest(f"{text[:80]!r} is none that this interface gave out")
        return DurableMark(int(found[1]), int(found[2]))
    return decode_places(text)


def decode_since(stream: str, text: str) -> Place | Token:
    """What `since=` says: a token, or the `next` of a page. Raises `BadRequest`."""
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


SNAPSHOTS_AT_ONCE = 100  # streams whose snapshots are read: others have their turn in between
SHARED_FOR = 5.0  # seconds


class SnapshotTexts:
    """Snapshots as they are sent, made once for all clients that come at the same time. For one event loop."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._reads = ReadCoalescer(self._read)
        self._texts: dict[str, tuple[float, Place, bytes]] = {}
        self._cleared = time.monotonic()

    async def get(self, streams: Sequence[str], since: float) -> list[tuple[str, Place, bytes]]:
        """Of each stream, as it was read not before `since` (s, monotonic): where it stood, and its event."""
        found: Mapping[str, tuple[float, Place, bytes]] = self._texts
        if missing := [name for name in streams if name not in found or found[name][0] < since]:
            found = {**{name: found[name] for name in streams if name in found}, **await self._reads.get(missing)}
        return [(name, *found[name][1:]) for name in streams]

    async def _read(self, streams: Collection[str]) -> Mapping[str, tuple[float, Place, bytes]]:
        now = time.monotonic()
        if now - self._cleared > SHARED_FOR:
            self._texts, self._cleared = {}, now
        names, found = list(streams), {}
        for start in range(0, len(names), SNAPSHOTS_AT_ONCE):
            for snapshot in await self._snapshots.get(names[start : start + SNAPSHOTS_AT_ONCE]):
                known = snapshot.known
                place = Place() if known is None else Place(known.linear, known.vector, known.late)
                text = encode_event(stream_answer(snapshot, time.monotonic()), "snapshot")
                found[snapshot.stream] = now, place, text
        self._texts |= found
        return found


def encode_events_after(stream: str, place: Place, item: Started | EventBatch) -> tuple[list[bytes], Place]:
    """What is new to a client that stands elsewhere than the follower did, before it or ahead; and where it is then."""
    joining = EventMerge(place)
    found: list[Event]
    match item:
        case Started(after):
            found = [event for it in after.positions.items() for event in joining.reach(*it)]
        case EventBatch(after=after):
            found = [new for event in item.events for new in _fed(joining, event)]
    blocks = [encode_event(move_answer(stream, event)) for event in found]
    joining.settle(after.linear, after.positions)
    if beyond(after.linear, place.linear):
        blocks.append(_line(stream, after.linear))
    if joining.place == place:
        return blocks, place
    return blocks, after if joining.place == after else joining.place


def encode_batch(piece: EventBatch) -> tuple[bytes, bytes]:
    """The slice as server-sent events, the last one apart from the others: it is the one that may carry an ID."""
    blocks = [encode_event(move_answer(piece.stream, event)) for event in piece.events]
    if piece.linear is not None:
        blocks.append(_line(piece.stream, piece.linear))
    return b"".join(blocks[:-1]), blocks[-1]


def encode_batch_id(piece: EventBatch) -> bytes:
    """Where a client stands behind this slice that follows nothing but its stream."""
    return encode_places({piece.stream: piece.after}).encode()


def _fed(joining: EventMerge, event: Event) -> Iterable[Event]:
    match event:
        case Advance():
            return joining.advance(event)
        case Reread(writer=str() as writer):
            return joining.reach(writer, event.id)
        case Late():
            return joining.complete(event)
        case LateLost():
            return joining.lose_late(event.number)
    return [event]


def _line(stream: str, linear: int) -> bytes:
    return encode_event(LinearMoveAnswer(stream=stream, linear=linear))


async def encode_missed_moves(missed: MissedMoves, stream: str, stands: Place) -> tuple[list[bytes], Place]:
    """What moved one of many streams, as texts of a page each, with others' turns in between: there may be very many
    moves, and each text is kept for who has not read it. And where they lead whoever `stands` there."""
    joining, found, texts = EventMerge(stands), missed.events[stream], []
    for start in range(0, len(found), PAGE):
        page = found[start : start + PAGE]
        for event in page:
            deque(_fed(joining, event), maxlen=0)
        texts.append(b"".join(encode_event(move_answer(stream, event)) for event in page))
        await asyncio.sleep(0)
    missed.events[stream] = ()
    return [*texts, _line(stream, missed.streams[stream].linear)], joining.place


def encode_page_after(page: MissedPage, stream: str, place: Place) -> tuple[bytes, Place]:
    """What of the page is new to a client that stands at `place`, and where it stands then."""
    joining = EventMerge(place)
    blocks = [encode_event(move_answer(stream, new)) for event in page.events for new in _fed(joining, event)]
    if page.complete:
        joining.settle(page.place.linear, page.place.positions)
        if beyond(page.place.linear, place.linear):
            blocks.append(_line(stream, page.place.linear))
    return b"".join(blocks), page.place if joining.place == page.place else joining.place
