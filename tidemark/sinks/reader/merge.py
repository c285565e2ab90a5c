"""Merges what lists, history and positions say about a stream into one chain of events per writer. Pure.

The input may come twice, from a list that began again, or with gaps. The events of each writer join exactly: the `prev`
of one is the `id` of the one before (Rule 3), and nothing is handed over twice. A writer that retired and joins again
begins at the linear position, as a new one does. `LinearEvidence` makes moves of the linear position from the events of
writers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tidemark.sinks.reader.events import Advance, Late, LateLost, LinearMove, Place, Reread
from tidemark.streaming.values.direction import beyond, farther


class LinearEvidence:
    """Turns moves of the linear position into `LinearMove` events.

    The linear position may pass an ID before the position of its writer is known here, and it may pass IDs of writers
    that joined and retired while nobody followed. So `known` is true only for a range that is beyond every position at
    the start, that every writer has passed, and whose advances all have their evidence.
    """

    def __init__(self, linear: int) -> None:
        self.linear = linear
        self._watched_from: int | None = None
        self._events: list[Advance | Reread] = []

    def note(self, event: Advance | Reread) -> None:
        """The position of a writer moved."""
        if beyond(event.id, self.linear):
            self._events.append(event)

    def mark_uncertain(self) -> None:
        """Advances may have been missed."""
        self._watched_from = None

    def move(self, linear: int, writers: Mapping[str, int]) -> Iterator[LinearMove]:
        """The linear position is at `linear`, and the writers are at their positions. All moves of writers so far were
        noted."""
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
    """Feed it anything that is true: it yields what is new. Its place has moved when an event is taken from it."""

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
        """The place of writers that are not known."""
        return self._linear

    @property
    def late(self) -> int:
        return self._late

    @property
    def reached(self) -> Mapping[str, int]:
        """The place of each known writer."""
        return self._reached

    def at(self, writer: str) -> int:
        return self._reached.get(writer, self._linear)

    def leaves_gap(self, advance: Advance) -> bool:
        """Whether the advance begins beyond the place of its writer: what settled the IDs between was not seen."""
        return beyond(advance.prev, self.at(advance.writer))

    def advance(self, advance: Advance) -> Iterator[Advance | Reread]:
        reached = self.at(advance.writer)
        if beyond(advance.id, reached):
            if self.leaves_gap(advance):
                yield from self.reach(advance.writer, advance.prev)
            self._reached[advance.writer] = advance.id
            yield replace(advance, prev=reached) if beyond(reached, advance.prev) else advance

    def reach(self, writer: str, position: int) -> Iterator[Reread]:
        """The writer is at `position`, and its advances up to there are not available."""
        reached = self.at(writer)
        if beyond(position, reached):
            self._reached[writer] = position
            yield Reread(writer, reached, position)

    def complete(self, late: Late) -> Iterator[Late]:
        if late.number > self._late:
            self._late = late.number
            yield late

    def lose_late(self, number: int) -> Iterator[LateLost]:
        """Late completions up to `number` were published, and those after the last one are not available."""
        if number > self._late:
            after, self._late = self._late, number
            yield LateLost(after, number)

    def sweep(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """Hand over ranges of writers other than `writers`: they retired, and their last advances are not available.
        They went up to `linear` at most, because a writer leaves only when the linear position has passed it."""
        for left_writer in sorted(self._reached.keys() - writers.keys()):
            yield from self.reach(left_writer, linear)
        if beyond(linear, self._linear):
            self._know(writers)
            prev, self._linear = self._linear, linear
            yield Reread(None, prev, linear, frozenset(self._reached))

    def read_all(self, linear: int, writers: Mapping[str, int]) -> Iterator[Reread]:
        """The first reading of a stream: hand over every range up to `linear` that no event has named.

        The table may be older than the stream. Then it has rows of writers that Tidemark does not know, rows without a
        writer, and rows of known writers beyond their advances. All of them are committed, as everything up to the
        linear position is.
        """
        for writer in sorted(writers):
            yield from self.reach(writer, linear)
        yield from self.sweep(linear, writers)

    def settle(self, linear: int, writers: Iterable[str]) -> None:
        """No writers are left except those that are known and `writers`. A writer that comes later begins beyond
        `linear`.

        A writer joins before it reserves, so the linear position cannot pass an ID of a writer that has not joined
        (docs/design.md 3). A writer that has left and that the linear position has passed is forgotten, so names do not
        accumulate.
        """
        listed = {*writers}
        self._is_settled = True
        self._know(listed)
        self._linear = farther(linear, self._linear)
        for left_writer in [
            writer
            for writer in self._reached
            if writer not in listed and not beyond(self._reached[writer], self._linear)
        ]:
            del self._reached[left_writer]

    def _know(self, writers: Iterable[str]) -> None:
        for writer in writers:
            self._reached.setdefault(writer, self._linear)

    def is_behind(self, positions: Mapping[str, int], late: int) -> bool:
        """Whether something was published that was not fed in."""
        return late > self._late or any(beyond(id, self.at(writer)) for writer, id in positions.items())
