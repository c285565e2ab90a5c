"""One client of `/v1/events`, and what it is sent.

An event's ID says where the client stands, for any sidecar to go on from there (`Last-Event-ID`). Where few streams are
followed, it holds the client's place in each of them. Where many are, it names a mark: a moment up to which everything
that Postgres published was told, which is as long for a million streams as for ten.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from tidemark.app.read_side.opened import ReadSide
from tidemark.app.read_side.replay import MissedPage, SharedReading, identity
from tidemark.app.read_side.subscription import Appeared, Begun, Item, Listener, Slice, ToldUpTo
from tidemark.app.sidecar import cursor, event_stream
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.changes import DurableMark
from tidemark.sinks.reader.events import Place

KEEP_ALIVE = 15.0  # seconds without an event, after which a comment shows that the connection lives
RETRY = 1000, 3000  # ms after which a client comes back: not all of them at once
FEW = 8  # streams, up to which an ID holds a place in each
LONGEST_ID = 16_000  # characters, which servers take in a header
PIECE = 16 << 10  # bytes that are sent in one piece, and some more: they are kept for a client until it has read them
JOINS = 1000  # places for which an item remembers what is new there: that of a stream that rests stays for long


class EventsClient:
    """Its `places` by stream, and the texts that it is sent.

    As soon as it has caught up with a follower, its place is the follower's own `Place` object: then it takes slices as
    they are encoded for all, and comparing by identity is mostly enough.
    """

    def __init__(
        self,
        read_side: ReadSide,
        snapshots: event_stream.SnapshotTexts,
        listener: Listener,
        stands: Mapping[str, Place] | DurableMark,
        joined: dict[str, Place],
        begun: Callable[[], None],
    ) -> None:
        """`stands`: what its last ID says. The listener listens already; what it is given joins the places `joined`.
        `begun` is called when it has been sent where everything stands."""
        self._read_side = read_side
        self._texts = snapshots
        self._listener = listener
        self._stands = stands
        self._came = time.monotonic()
        self._places = joined
        self._begun = begun

    async def texts(self, streams: list[str]) -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n" % random.randint(*RETRY)
        if not isinstance(self._stands, DurableMark):
            for stream in streams:
                if stream in self._stands and stream not in self._places:
                    async for text in self._missed(stream, self._stands[stream]):
                        yield text
        elif not self._places:
            async for text in self._missed_since(self._stands, streams):
                yield text
        others = [stream for stream in streams if stream not in self._places]
        for start in range(0, len(others), event_stream.AT_ONCE):
            yield b"".join(await self._snapshots(others[start : start + event_stream.AT_ONCE], self._came))
        self._count()
        text = await self._next()
        if not text and self._places and not self._listener.marks:
            text = b": at\n" + self._id(None) + b"\n"
        if text:
            yield text
        self._begun()
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
            if page is None and (told := resumptions.told.get(stream, place)):
                text, place = told
                yield text
                continue
            try:
                page = await (page.next() if page else resumptions.missed(stream, place))
            except (Unavailable, Stop):
                yield b": waiting for Redis or Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            if page is None:  # nobody knows the stream
                return
            key = identity(place)
            if key not in page.sent:
                page.sent[key] = event_stream.page_taken(page, stream, place)
                if not page.complete:
                    resumptions.told.keep(stream, place, *page.sent[key])
            text, place = page.sent[key]
            yield text
        self._places[stream] = place

    async def _missed_since(self, mark: DurableMark, streams: list[str]) -> AsyncIterator[bytes]:
        """What moved all streams since the mark; nothing, and no places, where that is not known any more."""
        while True:
            try:
                # Positions before moves, which then lead to them and perhaps beyond.
                known = await self._read_side.snapshots.known(streams)
                missed = await self._read_side.resumptions.since(mark)
            except (Unavailable, Stop):
                yield b": waiting for Postgres\n\n"
                await asyncio.sleep(1.0)
                continue
            break
        if missed is None:
            return
        for stream, stands in known.items():
            if stream not in missed.streams:
                self._places[stream] = Place(stands.linear, stands.vector, stands.late)
                continue
            if stream not in missed.told or missed.told[stream].abandoned:
                place = Place(stands.linear, stands.vector, stands.late)
                missed.told[stream] = SharedReading(event_stream.missed_moves(missed, stream, place))
            # The same place for all: what was known before this was read is among the events.
            texts, self._places[stream] = await missed.told[stream].get()
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
            self._listener.marks = True

    async def _next(self) -> bytes:
        """The items given to the listener meanwhile, with an ID behind them where one is known; may be empty."""
        blocks: list[bytes] = []
        last: Item | None = None
        size = 0
        while size < PIECE and (taken := self._listener.take(1)):
            ((stream, last),) = taken
            new = await self._taken(stream, last)
            size += sum(map(len, new))
            blocks += new
        if blocks and not self._listener.marks:
            blocks[-1] = self._id(last) + blocks[-1]
        return b"".join(blocks)

    async def _taken(self, stream: str, item: Item) -> Sequence[bytes]:
        if isinstance(item, ToldUpTo):
            return [b": at\nid: %s\n\n" % cursor.encode_mark(item.mark).encode()]
        if isinstance(item, Appeared):
            blocks = await self._snapshots([stream], time.monotonic())
            self._count()
            return blocks
        place = self._places[stream]
        if isinstance(item, Slice) and (place is item.before or place == item.before):
            self._places[stream] = item.after
            return item.once(event_stream.blocks_of)
        if isinstance(item, Begun) and place == item.place:
            self._places[stream] = item.place
            return ()
        if id(place) not in item.joins:
            if len(item.joins) >= JOINS:
                item.joins.clear()
            item.joins[id(place)] = place, event_stream.joined(stream, place, item)
        found: tuple[list[bytes], Place] = item.joins[id(place)][1]
        self._places[stream] = found[1]
        return found[0]

    def _id(self, last: Item | None) -> bytes:
        if isinstance(last, Slice) and len(self._places) == 1 and last.after is self._places[last.stream]:
            text = last.once(event_stream.id_behind)
        else:
            text = cursor.encode_places(self._places).encode()
        if len(text) > LONGEST_ID:
            self._listener.marks = True
            return b""
        return b"id: %s\n" % text
