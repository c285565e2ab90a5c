"""Joins what lists, history and positions say of a stream into one chain of events per writer. Pure.

Whatever is fed, twice, out of a list that began anew, or with holes: each writer's events join exactly, the `prev` of
one the `id` of the one before (docs/design.md, rule 3), and nothing is handed over twice. One that was gone and comes
back begins where the line was, as a new one does. `LinearEvidence` makes moves of the linear position out of the
writers' events.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tidemark.sinks.reader.events import Advance, Late, LateLost, LinearMove, Place, Reread
from tidemark.streaming.values.direction import beyond, farther


class LinearEvidence:
    """Turns moves of the linear position into `LinearMove` events.

    An ID may be passed by the line before its writer's position is there, and by writers that we never heard of while
    we were away. So `known` is claimed only for a range that lies beyond all that stood when we began to watch, that
    every writer has passed, and of whose advances none has lost its evidence.
    """

    def __init__(self, linear: int) -> None:
        self.linear = linear
        self._watched_from: int | None = None
        self._events: list[Advance | Reread] = []

    def note(self, event: Advance | Reread) -> None:
        """A writer's position moved."""
        if beyond(event.id, self.linear):
            self._events.append(event)

    def doubt(self) -> None:
        """Advances may have been missed."""
        self._watched_from = None

    def move(self, linear: int, writers: Mapping[str, int]) -> Iterator[LinearMove]:
        """The line stands at `linear` and the writers at their positions; all their moves so far were noted."""
        if beyond(linear, self.linear):
            touching = [event for event in self._events if beyond(linear, event.prev)]
            known = (
                self._watched_from is not None
                and not beyond(self._watched_from, self.linear)
                and not any(beyond(linear, position) for position in writers.values())
                and not any(isinstance(event, Reread) for event in touching)
            )
            advances = tuple(event for event in touching if isinstance(event, Advance))
            prev, self.linear = self.linear, linear
            self._events = [event for event in self._events if beyond(event.id, linear)]
            yield LinearMove(prev, linear, advances, known)
        if self._watched_from is None:
            self._watched_from = max((linear, *writers.values()), key=abs)


class EventMerge:
    """Feed it anything that is true; it yields what is new, and has moved when an event is taken from it."""

    def __init__(self, place: Place) -> None:
        self._linear = place.linear
        self._reached = dict(place.positions)
        self._late = place.late
        self._is_settled = place.is_settled

    @property
    def place(self) -> Place:
        return Place(self._linear, dict(self._reached), self._late, self._is_settled)

    @property
    def is_settled(self) -> bool:
        """See `Place`."""
        return self._is_settled

    @property
    def linear(self) -> int:
        """The position up to which writers that are not known were handed over."""
        return self._linear

    @property
    def late(self) -> int:
        return self._late

    @property
    def reached(self) -> Mapping[str, int]:
        """The position up to which each known writer was handed over."""
        return self._reached

    def at(self, writer: str) -> int:
        return self._reached.get(writer, self._linear)

    def leaves_hole(self, advance: Advance) -> bool:
        """Whether IDs between where we stand and where the advance begins are settled by what we have not seen."""
        return beyond(advance.prev, self.at(advance.writer))

    def advance(self, advance: Advance) -> Iterator[Advance | Reread]:
        here = self.at(advance.writer)
        if beyond(advance.id, here):
            if self.leaves_hole(advance):
                yield from self.reach(advance.writer, advance.prev)
            self._reached[advance.writer] = advance.id
            yield replace(advance, prev=here) if beyond(here, advance.prev) else advance

    def reach(self, writer: str, position: int) -> Iterator[Reread]:
        """The writer stands at `position`, and nothing tells how it came there."""
        here = self.at(writer)
        if beyond(position, here):
            self._reached[writer] = position
            yield Reread(writer, here, position)

    def complete(self, late: Late) -> Iterator[Late]:
        if late.number > self._late:
            self._late = late.number
            yield late

    def lose_late(self, number: int) -> Iterator[LateLost]:
        """Late completions up to `number` were published, and nothing tells of those after ours."""
        if number > self._late:
            after, self._late = self._late, number
            yield LateLost(after, number)

    def sweep(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """Of writers other than those that stand here, nothing tells any more what they did before they were gone.

        That was up to `linear`, because only a writer that the line has passed leaves.
        """
        for gone in sorted(self._reached.keys() - writers.keys()):
            yield from self.reach(gone, linear)
        if beyond(linear, self._linear):
            self._know(writers)
            prev, self._linear = self._linear, linear
            yield Reread(None, prev, linear, frozenset(self._reached))

    def read_all(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """The first reading of a stream: hand over every range up to `linear` that no event has named.

        The table may be older than the stream. Then it has rows of writers that Tidemark does not know, rows without a
        writer, and rows of known writers beyond what their advances tell. All of them are committed, as is everything
        up to the linear position.
        """
        for writer in sorted(writers):
            yield from self.reach(writer, linear)
        yield from self.sweep(linear, writers)

    def settle(self, linear: int, writers: Iterable[str]) -> None:
        """No writers are left but those we know and `writers`: who comes later, begins beyond `linear`.

        A writer joins before it reserves, so the line cannot pass an ID of one that has not joined (docs/design.md 3).
        Nor of one that is gone and the line has passed: it need not be known any more, or names would pile up for ever.
        """
        here = {*writers}
        self._is_settled = True
        self._know(here)
        self._linear = farther(linear, self._linear)
        for gone in [it for it in self._reached if it not in here and not beyond(self._reached[it], self._linear)]:
            del self._reached[gone]

    def _know(self, writers: Iterable[str]) -> None:
        for writer in writers:
            self._reached.setdefault(writer, self._linear)

    def behind(self, positions: Mapping[str, int], late: int) -> bool:
        """Whether something was published that we have not been fed."""
        return late > self._late or any(beyond(id, self.at(writer)) for writer, id in positions.items())
