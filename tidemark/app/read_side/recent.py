"""What moved followed streams in the last seconds, kept so that whoever comes back is told from memory what it missed.

A client that lost its connection is given the very slices that it would have been given, encoded already for those who
stayed. Who was away for longer, or comes from another sidecar that was farther behind, is read for.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tidemark.app.read_side.subscription import Slice
from tidemark.sinks.postgres.changes import DurableMark
from tidemark.sinks.reader.events import Place
from tidemark.streaming.values.direction import beyond

SECONDS = 15.0
MOVES = 40_000  # that are kept, of all streams: some 20 MB, and 8 s at 5000 a second
SLICES = 10_000  # likewise; less than a listener may be behind
MARKS = 30


@dataclass(frozen=True, slots=True)
class Recalled:
    """Whoever stands at `place` has all once it has taken `slices`."""

    place: Place
    slices: list[Slice]


@dataclass(slots=True)
class _Kept:
    """Of one stream, everything behind the slice numbered `since`, which leads to `place`."""

    since: int
    place: Place
    slices: deque[tuple[int, Slice]] = field(default_factory=deque)


class Recent:
    """For one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._number = 0
        self._moves = 0
        self._streams: dict[str, _Kept] = {}
        self._all: deque[tuple[int, Slice]] = deque()
        self._marks: dict[DurableMark, int] = {}

    def begin(self, stream: str, place: Place) -> None:
        """It is followed from here on."""
        self._streams[stream] = _Kept(self._number, place)

    def end(self, stream: str) -> None:
        self._streams.pop(stream, None)

    def keep(self, piece: Slice) -> None:
        """The next one of its stream."""
        self._number += 1
        self._moves += len(piece.events)
        kept = self._streams[piece.stream]
        kept.slices.append((self._number, piece))
        kept.place = piece.after
        self._all.append((self._number, piece))
        self.forget()

    def forget(self) -> None:
        """What is too old or too much."""
        oldest = self._now() - SECONDS
        while self._all and (self._moves > MOVES or len(self._all) > SLICES or self._all[0][1].at < oldest):
            number, piece = self._all.popleft()
            self._moves -= len(piece.events)
            kept = self._streams.get(piece.stream)
            if kept is not None and kept.slices and kept.slices[0][0] == number:
                kept.slices.popleft()
                kept.since = number

    def told(self, mark: DurableMark) -> None:
        """What Postgres published up to the mark, of all streams that are followed, is in the slices so far."""
        # The first time counts: who was told so then, was told no more than that.
        self._marks.setdefault(mark, self._number)
        if len(self._marks) > MARKS:
            del self._marks[next(iter(self._marks))]

    def after(self, stream: str, place: Place) -> Recalled | None:
        """What comes after a place; None where that is not kept any more."""
        kept = self._streams.get(stream)
        if kept is None:
            return None
        if kept.place == place:
            return Recalled(kept.place, [])
        slices = [piece for _, piece in kept.slices]
        for start in reversed(range(len(slices))):
            if slices[start].before == place:
                return Recalled(slices[start].before, slices[start:])
        # Between two of ours: of another sidecar.
        if not reached(place, slices[0].before if slices else kept.place):
            return None
        start = next((at for at, piece in enumerate(slices) if not reached(place, piece.after)), len(slices))
        return Recalled(place, slices[start:])

    def since(self, mark: DurableMark, streams: Collection[str]) -> dict[str, Recalled]:
        """What moved these streams since a mark; empty where that is not kept of all of them."""
        number = self._marks.get(mark)
        found: dict[str, Recalled] = {}
        for stream in streams:
            kept = self._streams.get(stream)
            if number is None or kept is None or kept.since > number:
                return {}
            slices = [piece for at, piece in kept.slices if at > number]
            found[stream] = Recalled(slices[0].before if slices else kept.place, slices)
        return found


def reached(place: Place, other: Place) -> bool:
    """Whether who stands at `place` has everything that leads to the `other` one, of any writer."""
    return (
        not beyond(other.linear, place.linear)
        and place.late >= other.late
        and not any(
            beyond(other.positions.get(writer, other.linear), place.positions.get(writer, place.linear))
            for writer in {*place.positions, *other.positions}
        )
    )
