"""The chain of one writer: its position, the settled spans above it, and the gaps between them. Pure; magnitudes only.

    position        span           span
    ────────┤  gap  ├────────┤ gap ├────┤
            (low, top]

Each span has a gap below it. A gap is named by its `top`, which is the `prev` of the span above. The age of a gap
counts from the batch in which the gap appeared (docs/design.md, rule 7). If a gap is divided, both parts keep its age.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.values.limits import NO_EVIDENCE, Evidence

NO_POSITION = -1
"""Position of the chain of an incarnation that has not joined. No edge begins here: the lowest `prev` is 0."""

EMPTY_RANGES_MAX = 32
"""The largest number of empty ranges that a chain stores, a few bytes each. A fact in a range that is no longer stored
counts as a duplicate.
"""

DEFERRED_RANGES_MAX = 32
"""The largest number of deferred ranges that a chain stores, a few bytes each. With a lower number, the ranges would be
wider, and more records would be read again without need.
"""

SettledBy = Literal["completed", "joined", "retired", "skipped"]
"""What settled an ID or closed a gap: an edge of the writer, a JOIN, a RETIRE, or an operator's SKIP. A gap that
disappears because its chain is set back counts as closed by `joined`.
"""


class DeferredRange(NamedTuple):
    """A range of Kafka offsets with deferred edges of one writer. The range is read again later.

    The records at both ends were deferred. The records in between may be of other writers, or may have been applied.

    Attributes:
        first_offset: lowest offset of the range, in the stream's partition.
        last_offset: highest offset of the range, included.
        prev: the lowest `prev` of the deferred edges.
    """

    first_offset: int
    last_offset: int
    prev: int

    def union(self, other: "DeferredRange") -> "DeferredRange":
        """The smallest range that contains both ranges."""
        return DeferredRange(
            min(self.first_offset, other.first_offset),
            max(self.last_offset, other.last_offset),
            min(self.prev, other.prev),
        )


def merge_ranges(ranges: Iterable[DeferredRange]) -> list[DeferredRange]:
    """Sort ranges by offset, and merge them until there are at most `DEFERRED_RANGES_MAX`.

    First merges all ranges that touch or overlap. Then merges two neighbours at a time, those with the shortest union
    first.
    """
    merged: list[DeferredRange] = []
    for deferred in sorted(ranges):
        if merged and deferred.first_offset <= merged[-1].last_offset + 1:
            merged[-1] = merged[-1].union(deferred)
        else:
            merged.append(deferred)
    while len(merged) > DEFERRED_RANGES_MAX:
        widths = [after.last_offset - before.first_offset for before, after in pairwise(merged)]
        index = widths.index(min(widths))
        merged[index : index + 2] = [merged[index].union(merged[index + 1])]
    return merged


@dataclass(slots=True)
class Span:
    """A settled range `(prev, id]` above the position of its chain. There is a gap directly below the range.

    Attributes:
        evidence: how the IDs of the span were settled.
        edge_count: number of completed edges in the span.
        since: time (ms) at which the gap below the span appeared.
    """

    prev: int
    id: int
    evidence: Evidence
    edge_count: int
    since: int


@dataclass(slots=True)
class ChainChanges:
    """The changes of a chain since the last `Chain.take_changes`.

    Attributes:
        prev: the position at the last `take_changes`.
        id: the position now.
        evidence: how the IDs in `(prev, id]` were settled.
        changed_gaps: gaps that are new or have changed, as `(low, top, since)`.
        closed_gaps: `top` of each closed gap -> what closed the gap.
    """

    prev: int
    id: int
    evidence: Evidence
    changed_gaps: list[tuple[int, int, int]]
    closed_gaps: dict[int, SettledBy]


@dataclass(slots=True)
class Chain:
    """The settled ranges of one writer.

    Attributes:
        position: every ID of the writer up to this one is settled; `NO_POSITION` if the incarnation has not joined.
        pending: the spans above the position, ascending. There is a gap below each of them.
        uncertain_up_to: rejected records of the writer may contain facts up to this ID; `runs.UNBOUNDED` if the ID is
            not known; 0 if there are no such records. Open IDs up to this one may be facts, even if the writer later
            declares them empty.
        empty_ranges: ranges that the writer declared empty: the highest ones, at most `EMPTY_RANGES_MAX`. A fact in
            such a range contradicts the writer (docs/design.md, rule 10).
        deferred: Kafka records of deferred edges, which are read again later.
    """

    position: int = 0
    pending: list[Span] = field(default_factory=list)
    uncertain_up_to: int = 0
    empty_ranges: Intervals = NO_INTERVALS
    deferred: list[DeferredRange] = field(default_factory=list)
    _position_before: int = field(default=NO_POSITION, init=False)
    _evidence: Evidence = field(default=NO_EVIDENCE, init=False)
    _gaps_before: dict[int, tuple[int, int, int]] | None = field(default=None, init=False)
    """The gaps at the last `take_changes`, by `top`; None if nothing has changed since."""
    _closed_gaps: dict[int, SettledBy] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._position_before = self.position

    @property
    def highest_settled(self) -> int:
        """The highest settled ID, even if there are gaps below the ID; 0 if no ID is settled."""
        return self.pending[-1].id if self.pending else max(self.position, 0)

    @property
    def pending_edges(self) -> int:
        """Number of completed edges in the spans above the position."""
        return sum(span.edge_count for span in self.pending)

    def has_pending_beyond(self, id: int) -> bool:
        """True if a span above the position reaches beyond `id`."""
        return bool(self.pending) and self.pending[-1].id > id

    def settled_ranges(self, prev: int, id: int) -> list[tuple[int, int]]:
        """The settled ranges `(low, high]` that overlap `(prev, id]`, ascending.

        The ranges are whole: they may begin before `prev` and end after `id`. The first one may be `(0, position]`.
        """
        ranges = [(0, self.position)] if prev < self.position else []
        ranges.extend((span.prev, span.id) for span in self._overlapping(prev, id))
        return ranges

    def open_ranges(self, prev: int, id: int) -> list[tuple[int, int]]:
        """The open parts `(low, high]` of `(prev, id]`, ascending."""
        low = max(prev, self.position)
        if not self.pending:
            return [(low, id)] if low < id else []
        return (
            [*Intervals.of((span.prev, span.id) for span in self._overlapping(low, id)).missing(low, id)]
            if low < id
            else []
        )

    def adjoins(self, prev: int, id: int) -> bool:
        """True if `(prev, id]` touches the position or a span, so that settling it adds no span."""
        if prev == self.position:
            return True
        index = self._index(prev)
        below = self.pending[index - 1].id if index else None
        above = self.pending[index].prev if index < len(self.pending) else None
        return prev == below or id == above

    def settle(self, prev: int, id: int, evidence: Evidence, edges: int, how: SettledBy, since: int) -> None:
        """Settle `(prev, id]`, which must be completely open (`open_ranges`).

        Args:
            evidence: how the IDs were settled.
            edges: number of completed edges in the range.
            how: what settles the range, and so closes the gaps that the range fills.
            since: time (ms) from which the age of a new gap below the range counts. If the range divides an older gap,
                the new gap gets the age of the older one.
        """
        self._save_gaps()
        if prev == self.position:
            self._advance(id, evidence)
            while self.pending and self.pending[0].prev == self.position:
                span = self.pending.pop(0)
                self._record_closed(span.prev, how)
                self._advance(span.id, span.evidence)
            return
        index = self._index(prev)
        below = self.pending[index - 1] if index else None
        above = self.pending[index] if index < len(self.pending) else None
        joins_below = below is not None and below.id == prev
        joins_above = above is not None and above.prev == id
        if below is not None and joins_below:
            below.id = id
            below.evidence += evidence
            below.edge_count += edges
            if above is not None and joins_above:
                self._record_closed(above.prev, how)
                below.id = above.id
                below.evidence += above.evidence
                below.edge_count += above.edge_count
                del self.pending[index]
        elif above is not None and joins_above:
            self._record_closed(above.prev, how)
            above.prev = prev
            above.evidence += evidence
            above.edge_count += edges
        else:
            age = since if above is None else min(since, above.since)
            self.pending.insert(index, Span(prev, id, evidence, edges, age))

    def mark_uncertain_up_to(self, id: int) -> None:
        """Record that a rejected record may contain facts with IDs up to `id`."""
        self.uncertain_up_to = max(self.uncertain_up_to, id)

    def defer(self, deferred: DeferredRange, highest_id: int) -> None:
        """Store the offsets of records whose edges have no room, to read the records again later.

        Also marks IDs up to `highest_id` as uncertain, because Kafka may remove the records before they are read again.

        Args:
            deferred: the records.
            highest_id: the highest ID in the records.
        """
        self.deferred = merge_ranges([*self.deferred, deferred])
        self.mark_uncertain_up_to(highest_id)

    def pop_deferred(self, spans_max: int) -> DeferredRange | None:
        """Remove and return the next deferred range to read again.

        If the position has reached the `prev` of a range, the lowest edge of the range needs no span. So such a range
        is returned at once. Other ranges are returned only while at least half of `spans_max` is free. Otherwise the
        pipeline would read a whole range again for each span that becomes free.

        Args:
            spans_max: bound of the spans of this chain.

        Returns:
            None if no range may be read again now.
        """
        has_room = len(self.pending) <= spans_max // 2
        index = next(
            (index for index, deferred in enumerate(self.deferred) if has_room or deferred.prev <= self.position), None
        )
        return None if index is None else self.deferred.pop(index)

    def declare_empty(self, ranges: Intervals) -> None:
        """Store that the writer declared `ranges` empty. Drops all but the highest `EMPTY_RANGES_MAX` ranges."""
        self.empty_ranges = self.empty_ranges.union(ranges).highest(EMPTY_RANGES_MAX)

    def cut_above(self, limit: int) -> list[Span]:
        """Remove the spans, and the parts of spans, beyond `limit`. Also removes the empty ranges beyond `limit`.

        The position, and empty ranges up to the position, stay. The gaps below removed spans are recorded as closed by
        `joined`.

        The counts of a span across `limit` cannot be divided. Each part gets the full counts, limited to its width.

        Returns:
            The removed spans, ascending.
        """
        self._save_gaps()
        index = self._index(limit)
        removed = self.pending[index:]
        del self.pending[index:]
        self.empty_ranges = self.empty_ranges.up_to(max(limit, self.position))
        for span in removed:
            self._record_closed(span.prev, "joined")
        if index and self.pending[index - 1].id > limit:
            across = self.pending[index - 1]
            removed.insert(0, _part(across, limit, across.id))
            self.pending[index - 1] = _part(across, across.prev, limit)
        return removed

    def restart_at(self, position: int) -> None:
        """Set the position back, and remove the empty ranges beyond it. Call `cut_above(position)` first."""
        self.position = position
        self.empty_ranges = self.empty_ranges.up_to(position)

    def settled_intervals(self) -> Intervals:
        """All settled IDs, up to the position and in the spans."""
        return Intervals.of([*self.settled_ranges(0, self.highest_settled)])

    def reopen(self, ranges: Intervals, since: int) -> None:
        """Make settled `ranges` open again. The position goes back to the start of the lowest range below the position.

        If IDs below the old position are passed again, their evidence is not reported again. Each part of a divided
        span gets the counts of the span, limited to the width of the part.

        Args:
            since: time (ms) from which the age of the new gaps counts.
        """
        self._save_gaps()
        tops = {span.prev for span in self.pending}
        remaining = [Span(prev, id, NO_EVIDENCE, 0, since) for prev, id in ranges.missing(0, max(self.position, 0))]
        self.position = remaining.pop(0).id if remaining and remaining[0].prev == 0 else 0
        for span in self.pending:
            remaining.extend(_part(span, prev, id) for prev, id in ranges.missing(span.prev, span.id))
        self.pending = remaining
        for top in tops - {span.prev for span in remaining}:
            self._record_closed(top, "joined")

    def adopt(self, other: "Chain", published_position: int) -> None:
        """Settle the open IDs that `other` has settled, and add the empty ranges and uncertain IDs of `other`.

        Args:
            other: the chain of an incarnation that had not joined (`NO_POSITION`).
            published_position: the published position of the writer. Evidence up to this ID is not reported again.
        """
        self.mark_uncertain_up_to(other.uncertain_up_to)
        self.declare_empty(other.empty_ranges)
        for span in other.pending:
            for prev, id in self.open_ranges(span.prev, span.id):
                if prev < published_position:
                    self.settle(prev, min(id, published_position), NO_EVIDENCE, 0, "joined", span.since)
                if id > published_position:
                    part = _part(span, max(prev, published_position), id)
                    self.settle(part.prev, id, part.evidence, part.edge_count, "joined", span.since)

    def spans_within(self, prev: int, id: int) -> Iterator[Span]:
        """The parts of spans inside `(prev, id]`, ascending."""
        if prev < id:
            for span in self._overlapping(prev, id):
                yield _part(span, max(prev, span.prev), min(id, span.id))

    def gaps(self) -> Iterator[tuple[int, int, int]]:
        """Yield every gap as `(low, top, since)`, ascending. `since`: the time (ms) at which the gap appeared."""
        low = self.position
        for span in self.pending:
            yield low, span.prev, span.since
            low = span.id

    def take_changes(self) -> ChainChanges:
        """Return the combined changes since the last call. The next call does not return them again.

        A gap that appeared and was closed since then is left out. A gap that was closed and opened again is in both
        `changed_gaps` and `closed_gaps`.
        """
        before = self._gaps_before or {}
        closed = {top: how for top, how in self._closed_gaps.items() if top in before}
        changed = (
            []
            if self._gaps_before is None
            else [gap for gap in self.gaps() if before.get(gap[1]) != gap or gap[1] in closed]
        )
        moves = ChainChanges(self._position_before, self.position, self._evidence, changed, closed)
        self._position_before, self._evidence, self._gaps_before, self._closed_gaps = (
            self.position,
            NO_EVIDENCE,
            None,
            {},
        )
        return moves

    def _advance(self, id: int, evidence: Evidence) -> None:
        self.position = id
        self._evidence += evidence

    def _record_closed(self, top: int, how: SettledBy) -> None:
        """Record that the gap `top` was closed. If the gap was closed before, the first `how` counts."""
        self._closed_gaps.setdefault(top, how)

    def _save_gaps(self) -> None:
        """Save the current gaps before the first change since `take_changes`."""
        if self._gaps_before is None:
            self._gaps_before = {gap[1]: gap for gap in self.gaps()}

    def _index(self, prev: int) -> int:
        """Index of the first span whose `prev` is not below `prev`; the number of spans if there is none."""
        return bisect_left(self.pending, prev, key=attrgetter("prev"))

    def _overlapping(self, prev: int, id: int) -> Iterator[Span]:
        index = self._index(prev)
        if index and self.pending[index - 1].id > prev:
            index -= 1
        while index < len(self.pending) and self.pending[index].prev < id:
            yield self.pending[index]
            index += 1


def _part(span: Span, prev: int, id: int) -> Span:
    """The part `(prev, id]` of a span. Its counts are those of the span, limited to the width of the part."""
    if (prev, id) == (span.prev, span.id):
        return span
    width = id - prev
    return Span(prev, id, span.evidence.at_most(width), min(span.edge_count, width), span.since)
