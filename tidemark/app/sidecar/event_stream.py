"""What clients of `/v1/events` are sent, as texts, each made once for all who stand at the same place."""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from tidemark.app.read_side.replay import PAGE, MissedMoves, MissedPage
from tidemark.app.read_side.single_flight import Coalescer
from tidemark.app.read_side.snapshots import Snapshots
from tidemark.app.read_side.subscription import Begun, Slice
from tidemark.app.sidecar import cursor, moves
from tidemark.app.sidecar.answers import stream_answer
from tidemark.app.sidecar.sse import encode_event
from tidemark.sinks.reader import events
from tidemark.sinks.reader.events import Place
from tidemark.sinks.reader.merge import Joining
from tidemark.streaming.values.direction import beyond

AT_ONCE = 100  # streams whose snapshots are read: others have their turn in between
SHARED_FOR = 5.0  # seconds


class SnapshotTexts:
    """Snapshots as they are sent, made once for all clients that come at the same time. For one event loop."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._reads = Coalescer(self._read)
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
        for start in range(0, len(names), AT_ONCE):
            for snapshot in await self._snapshots.get(names[start : start + AT_ONCE]):
                known = snapshot.known
                place = Place() if known is None else Place(known.linear, known.vector, known.late)
                text = encode_event(stream_answer(snapshot, time.monotonic()), "snapshot")
                found[snapshot.stream] = now, place, text
        self._texts |= found
        return found


def joined(stream: str, place: Place, item: Begun | Slice) -> tuple[list[bytes], Place]:
    """What is new to a client that stands elsewhere than the follower did, before it or ahead; and where it is then."""
    joining = Joining(place)
    found: list[events.Event]
    match item:
        case Begun(after):
            found = [event for it in after.positions.items() for event in joining.reach(*it)]
        case Slice(after=after):
            found = [new for event in item.events for new in _fed(joining, event)]
    blocks = [encode_event(moves.move_answer(stream, event)) for event in found]
    joining.settle(after.linear, after.positions)
    if beyond(after.linear, place.linear):
        blocks.append(_line(stream, after.linear))
    if joining.place == place:
        return blocks, place
    return blocks, after if joining.place == after else joining.place


def blocks_of(piece: Slice) -> tuple[bytes, bytes]:
    """The slice as server-sent events, the last one apart from the others: it is the one that may carry an ID."""
    blocks = [encode_event(moves.move_answer(piece.stream, event)) for event in piece.events]
    if piece.linear is not None:
        blocks.append(_line(piece.stream, piece.linear))
    return b"".join(blocks[:-1]), blocks[-1]


def id_behind(piece: Slice) -> bytes:
    """Where a client stands behind this slice that follows nothing but its stream."""
    return cursor.encode_places({piece.stream: piece.after}).encode()


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


def _line(stream: str, linear: int) -> bytes:
    return encode_event(moves.LinearMoveAnswer(stream=stream, linear=linear))


async def missed_moves(missed: MissedMoves, stream: str, stands: Place) -> tuple[list[bytes], Place]:
    """What moved one of many streams, as texts of a page each, with others' turns in between: there may be very many
    moves, and each text is kept for who has not read it. And where they lead whoever `stands` there."""
    joining, found, texts = Joining(stands), missed.events[stream], []
    for start in range(0, len(found), PAGE):
        page = found[start : start + PAGE]
        for event in page:
            deque(_fed(joining, event), maxlen=0)
        texts.append(b"".join(encode_event(moves.move_answer(stream, event)) for event in page))
        await asyncio.sleep(0)
    missed.events[stream] = ()
    return [*texts, _line(stream, missed.streams[stream].linear)], joining.place


def page_taken(page: MissedPage, stream: str, place: Place) -> tuple[bytes, Place]:
    """What of the page is new to a client that stands at `place`, and where it stands then."""
    joining = Joining(place)
    blocks = [encode_event(moves.move_answer(stream, new)) for event in page.events for new in _fed(joining, event)]
    if page.complete:
        joining.settle(page.place.linear, page.place.positions)
        if beyond(page.place.linear, place.linear):
            blocks.append(_line(stream, page.place.linear))
    return b"".join(blocks), page.place if joining.place == page.place else joining.place
