"""The plan of a reader for a burst of events: the ranges to read, and its place while some of them are left. Pure.

Late completions are seen to before the burst's ranges. Of a late range
- what lies at or below the place was passed without it: its rows are handed over as late;
- what the burst passes is `owed`: the place will pass it, and the table is read there whatever the evidence says;
- what lies beyond (an incarnation that was thrown out) may never be passed: its rows are handed over as late too, and
  remembered, so that a place that does come there does not hand them over again.
A fact may have been committed in time and only be announced late, after an operator had skipped it. So what is read
where an operator skipped is remembered as well, until the writer's next epoch: from then on it is a zombie
(docs/design.md 3).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemark.sinks.reader.checkpoint import Delivered, Kept
from tidemark.sinks.reader.events import Advance, Event, Late, LateLost, LinearMove, Place, Reread
from tidemark.sinks.reader.table import Range
from tidemark.streaming.values.direction import beyond, farther


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """`goal` is the place after the burst. `read` are the ranges that may hold facts, one per writer; the rest of the
    way is proven empty. `skipped` pairs an advance's epoch with the range of it that an operator may have skipped."""

    goal: Place
    read: tuple[Range, ...]
    skipped: tuple[tuple[int, Range], ...]
    late: tuple[Late, ...]
    lost: LateLost | None
    epochs: Mapping[str, int]
    owed: tuple[Range, ...] = ()

    def place(self, left: Sequence[Range]) -> Place:
        """The reader's place while `left` of the ranges has still to be read."""
        line = next((span.prev for span in left if span.writer is None), self.goal.linear)
        writers = {span.writer: span.prev for span in left if span.writer is not None}
        is_settled = self.goal.is_settled and all(span.writer is not None or span.has_null for span in left)
        return Place(line, {**self.goal.positions, **writers}, self.goal.late, is_settled)

    def with_null(self, kept: Kept, facts_upto: int | None) -> "ReadPlan":
        """With the rows whose writer is NULL: no position is theirs but the linear one.

        `facts_upto` is the farthest ID that may hold a fact, as far as moves before this burst showed; None: not known.
        """
        span = Range(None, kept.place.linear, self.goal.linear, has_null=True)
        if any(it.writer is None for it in self.read) or not beyond(span.id, span.prev):
            return self
        farthest = [farther(facts_upto, span.prev)] if facts_upto is not None else [span.id]
        if not any(beyond(id, span.prev) for id in (*farthest, *(it.id for it in (*self.read, *self.owed)))):
            return self
        return replace(self, read=(*self.read, span))

    def doubtful(self, ids: Iterable[tuple[int, str | None]]) -> Iterator[Delivered]:
        """Of the (ID, writer if the row tells it) those for which a late completion may still come."""
        for id, writer in ids:
            for epoch, span in self.skipped:
                if span.holds(id) and writer in {None, span.writer}:
                    assert span.writer is not None
                    yield Delivered(id, span.writer, epoch)
                    break


def plan(kept: Kept, events: Sequence[Event], goal: Place) -> ReadPlan:
    """`goal` is the follower's place after the `events`, which all come after the place that is `kept`."""
    moves = [event for event in events if isinstance(event, Advance | Reread | LinearMove)]
    lost = next((event for event in events if isinstance(event, LateLost)), None)
    owed = [*kept.owed, *(span for event in events if isinstance(event, Late) for span in owes(kept, event, goal))]
    spans: dict[str | None, Range] = {}
    needed: set[str | None] = set()
    for move in moves:
        whose = None if isinstance(move, LinearMove) else move.writer
        besides = move.besides if isinstance(move, Reread) else frozenset[str]()
        first = spans.get(whose)
        spans[whose] = Range(whose, first.prev if first else move.prev, move.id, besides)
        # A JOIN says of a table that is older than its stream that nothing is open there, not that it has no rows.
        if lost or not kept.place.is_settled or not move.proven_empty:
            needed.add(whose)
    for whose, span in spans.items():
        if any(_concerns(it, span) for it in owed):
            needed.add(whose)
    advances = [
        advance
        for move in moves
        for advance in (move.advances if isinstance(move, LinearMove) else (move,))
        if isinstance(advance, Advance)
    ]
    return ReadPlan(
        goal,
        tuple(span for whose, span in spans.items() if whose in needed),
        tuple((it.epoch, Range(it.writer, it.prev, it.id)) for it in advances if it.evidence.skipped),
        tuple(event for event in events if isinstance(event, Late)),
        lost,
        {it.writer: it.epoch for it in advances},
        tuple(owed),
    )


def owes(kept: Kept, late: Late, goal: Place) -> Iterator[Range]:
    """The part of a late range that the burst passes."""
    yield from _parts(kept, late, goal)[1]


def hands_over(kept: Kept, late: Late, goal: Place) -> Iterator[Range]:
    """The parts of a late range whose rows are handed over as late now, in order."""
    passed, _, beyond_it = _parts(kept, late, goal)
    for span in (*passed, *beyond_it):
        begun = kept.late_part if kept.late_part and kept.late_part[0] == late.number else None
        part = span.after(begun[1]) if begun else span
        if part is not None:
            yield part


def still_owed(owed: Iterable[Range], place: Place) -> tuple[Range, ...]:
    return tuple(span for span in owed if beyond(span.id, _at(place, span.writer)))


def _parts(kept: Kept, late: Late, goal: Place) -> tuple[list[Range], list[Range], list[Range]]:
    """The parts that were passed, that the burst passes, and beyond; all empty where nothing but voids came late."""
    if not late.facts:
        return [], [], []
    span = Range(late.writer, late.prev, late.id)
    here, there = _at(kept.place, late.writer), _at(goal, late.writer)
    rest = span.after(here)
    between = rest.upto(there) if rest else None
    parts = (span.upto(here), between, span.after(farther(here, there)))
    passed, passing, ahead = ([part] if part else [] for part in parts)
    return passed, passing, ahead


def _at(place: Place, writer: str | None) -> int:
    return place.linear if writer is None else place.positions.get(writer, place.linear)


def _concerns(owed: Range, span: Range) -> bool:
    same = span.writer in {None, owed.writer} and owed.writer not in span.besides
    return same and beyond(owed.id, span.prev) and beyond(span.id, owed.prev)
