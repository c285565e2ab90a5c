"""One writer's line: its position, the spans that wait above it, and the gaps between. Pure; magnitudes only.

    position        span           span
    ────────┤  gap  ├────────┤ gap ├────┤
            (low, top]

A gap lies below every span and is named by its `top`, the `prev` of that span. It counts its age from the batch in
which it was first seen (docs/design.md, rule 7); a gap that is split hands its age to both parts.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

from tidemark.streaming.values.intervals import EMPTY, Intervals
from tidemark.streaming.values.limits import NOTHING, Evidence

# A chain of a writer that never joined: not even an edge from 0 joins it.
NO_POSITION = -1

ANNOUNCED_KEPT = 32  # of each writer: a few bytes in its state; an older contradiction counts as a duplicate

RANGES_KEPT = 32  # of each chain: a few hundred bytes in its state; fewer are wider, and more comes again in vain

How = Literal["completed", "joined", "retired", "skipped"]


class DeferredRange(NamedTuple):
    """The records from offset `first` to `last` of the partition in which the stream lives; the two at its ends were
    put off, and perhaps others between. `prev` is the lowest of theirs.
    """

    first: int
    last: int
    prev: int

    def joined(self, other: "DeferredRange") -> "DeferredRange":
        """The smallest range that has both."""
        return DeferredRange(min(self.first, other.first), max(self.last, other.last), min(self.prev, other.prev))


def united(ranges: Iterable[DeferredRange]) -> list[DeferredRange]:
    """The ranges by offset: those that touch as one, then the narrowest pairs, until they are `RANGES_KEPT`."""
    found: list[DeferredRange] = []
    for it in sorted(ranges):
        if found and it.first <= found[-1].last + 1:
            found[-1] = found[-1].joined(it)
        else:
            found.append(it)
    while len(found) > RANGES_KEPT:
        widths = [after.last - before.first for before, after in pairwise(found)]
        at = widths.index(min(widths))
        found[at : at + 2] = [found[at].joined(found[at + 1])]
    return found


@dataclass(slots=True)
class Span:
    """`(prev, id]` is settled and waits for the gap below it, which is open `since` (ms). `edges` were completed."""

    prev: int
    id: int
    evidence: Evidence
    edges: int
    since: int


@dataclass(slots=True)
class Moves:
    """What happened to a chain since the last `take`: `(prev, id]` with its evidence, gaps changed, gaps closed."""

    prev: int
    id: int
    evidence: Evidence
    changed: list[tuple[int, int, int]]
    closed: dict[int, How]


@dataclass(slots=True)
class Chain:
    """`refused` is the highest ID of a record that was turned away although it may be true, or `runs.UNBOUNDED` where
    nobody can tell: what is open up to there may hold facts, whatever its writer says later. `empty` are the newest of
    the ranges that the writer declared to be without facts (`ANNOUNCED_KEPT`): a fact that comes from there contradicts
    it (docs/design.md, rule 10). `deferred` says where the records stand that found no room and are to come again.
    """

    position: int = 0
    pending: list[Span] = field(default_factory=list)
    refused: int = 0
    empty: Intervals = EMPTY
    deferred: list[DeferredRange] = field(default_factory=list)
    _prev: int = field(default=NO_POSITION, init=False)
    _evidence: Evidence = field(default=NOTHING, init=False)
    _gaps: dict[int, tuple[int, int, int]] | None = field(default=None, init=False)  # by top, before the first change
    _closed: dict[int, How] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._prev = self.position

    @property
    def reach(self) -> int:
        """The highest ID that is settled, with gaps below it or without; 0 where there is none."""
        return self.pending[-1].id if self.pending else max(self.position, 0)

    @property
    def waiting(self) -> int:
        """How many completed edges are pending."""
        return sum(span.edges for span in self.pending)

    def pending_beyond(self, id: int) -> bool:
        """Whether a span waits that reaches beyond `id`."""
        return bool(self.pending) and self.pending[-1].id > id

    def covered(self, prev: int, id: int) -> list[tuple[int, int]]:
        """The settled parts that overlap `(prev, id]`, uncut, ascending; the first may be `(0, position]`."""
        found = [(0, self.position)] if prev < self.position else []
        found.extend((span.prev, span.id) for span in self._overlapping(prev, id))
        return found

    def missing(self, prev: int, id: int) -> list[tuple[int, int]]:
        """The open parts of `(prev, id]`, ascending."""
        low = max(prev, self.position)
        if not self.pending:
            return [(low, id)] if low < id else []
        return (
            [*Intervals.of((span.prev, span.id) for span in self._overlapping(low, id)).missing(low, id)]
            if low < id
            else []
        )

    def adjoins(self, prev: int, id: int) -> bool:
        """Whether settling `(prev, id]` adds no span: it joins the position or a span that is there."""
        if prev == self.position:
            return True
        at = self._at(prev)
        below = self.pending[at - 1].id if at else None
        above = self.pending[at].prev if at < len(self.pending) else None
        return prev == below or id == above

    def settle(self, prev: int, id: int, evidence: Evidence, edges: int, how: How, since: int) -> None:
        """`(prev, id]` is complete. The caller has made sure that all of it is open (`missing`).

        `since` (ms) is when it was first seen: the age of the gap below it, unless that gap is older.
        """
        self._note_gaps()
        if prev == self.position:
            self._advance(id, evidence)
            while self.pending and self.pending[0].prev == self.position:
                span = self.pending.pop(0)
                self._close(span.prev, how)
                self._advance(span.id, span.evidence)
            return
        at = self._at(prev)
        below = self.pending[at - 1] if at else None
        above = self.pending[at] if at < len(self.pending) else None
        joins_below = below is not None and below.id == prev
        joins_above = above is not None and above.prev == id
        if below is not None and joins_below:
            below.id = id
            below.evidence += evidence
            below.edges += edges
            if above is not None and joins_above:
                self._close(above.prev, how)
                below.id = above.id
                below.evidence += above.evidence
                below.edges += above.edges
                del self.pending[at]
        elif above is not None and joins_above:
            self._close(above.prev, how)
            above.prev = prev
            above.evidence += evidence
            above.edges += edges
        else:
            age = since if above is None else min(since, above.since)
            self.pending.insert(at, Span(prev, id, evidence, edges, age))

    def refuse(self, reach: int) -> None:
        """A record that may be a fact, up to `reach`, was turned away."""
        self.refused = max(self.refused, reach)

    def wait_for_room(self, deferred: DeferredRange, reach: int) -> None:
        """Records up to the ID `reach` found no room. Should they be gone when they are recalled, they were refused."""
        self.deferred = united([*self.deferred, deferred])
        self.refuse(reach)

    def recall(self, spans: int) -> DeferredRange | None:
        """What is to come again next, put off no more: nothing before half of the `spans` that may wait are free, as
        each that frees a place would bring all of it; but for what the position itself has come to, which needs none.
        """
        free = len(self.pending) <= spans // 2
        at = next((at for at, it in enumerate(self.deferred) if free or it.prev <= self.position), None)
        return None if at is None else self.deferred.pop(at)

    def declare_empty(self, ranges: Intervals) -> None:
        """The writer says that it has no fact in `ranges`."""
        self.empty = self.empty.union(ranges).highest(ANNOUNCED_KEPT)

    def cut_above(self, limit: int) -> list[Span]:
        """Take away what is settled beyond `limit` but not passed by the position; returns it, ascending.

        A span across `limit` is divided: its counts cannot be, so both parts carry them, at most their width each.
        """
        self._note_gaps()
        at = self._at(limit)
        gone = self.pending[at:]
        del self.pending[at:]
        self.empty = self.empty.upto(max(limit, self.position))
        for span in gone:
            self._close(span.prev, "joined")
        if at and self.pending[at - 1].id > limit:
            across = self.pending[at - 1]
            gone.insert(0, _part(across, limit, across.id))
            self.pending[at - 1] = _part(across, across.prev, limit)
        return gone

    def begin_again(self, position: int) -> None:
        """Stand at `position`, below where the chain was, with nothing beyond it settled."""
        self.position = position
        self.empty = self.empty.upto(position)

    def settled(self) -> Intervals:
        """All that is settled, whatever gaps are in it."""
        return Intervals.of([*self.covered(0, self.reach)])

    def reopen(self, ranges: Intervals, since: int) -> None:
        """Open again, `since` (ms), what is settled in `ranges`. Of what the position had passed no evidence is told
        again, and of a span that is divided each part carries as much as its width.
        """
        self._note_gaps()
        tops = {span.prev for span in self.pending}
        kept = [Span(prev, id, NOTHING, 0, since) for prev, id in ranges.missing(0, max(self.position, 0))]
        self.position = kept.pop(0).id if kept and kept[0].prev == 0 else 0
        for span in self.pending:
            kept.extend(_part(span, prev, id) for prev, id in ranges.missing(span.prev, span.id))
        self.pending = kept
        for top in tops - {span.prev for span in kept}:
            self._close(top, "joined")

    def adopt(self, other: "Chain", published: int) -> None:
        """Take over the spans of a chain that had no position, as far as they are open here.

        Of what was `published` already no evidence is told again.
        """
        self.refuse(other.refused)
        self.declare_empty(other.empty)
        for span in other.pending:
            for prev, id in self.missing(span.prev, span.id):
                if prev < published:
                    self.settle(prev, min(id, published), NOTHING, 0, "joined", span.since)
                if id > published:
                    part = _part(span, max(prev, published), id)
                    self.settle(part.prev, id, part.evidence, part.edges, "joined", span.since)

    def within(self, prev: int, id: int) -> Iterator[Span]:
        """The parts of the spans that lie in `(prev, id]`, ascending."""
        if prev < id:
            for span in self._overlapping(prev, id):
                yield _part(span, max(prev, span.prev), min(id, span.id))

    def gaps(self) -> Iterator[tuple[int, int, int]]:
        """`(low, top, since)` of every gap, ascending."""
        low = self.position
        for span in self.pending:
            yield low, span.prev, span.since
            low = span.id

    def take(self) -> Moves:
        """What happened since the last `take`, by whatever steps: a gap that came and went in between is not told. One
        that was closed and stands again is told as both.
        """
        before = self._gaps or {}
        closed = {top: how for top, how in self._closed.items() if top in before}
        changed = (
            [] if self._gaps is None else [gap for gap in self.gaps() if before.get(gap[1]) != gap or gap[1] in closed]
        )
        moves = Moves(self._prev, self.position, self._evidence, changed, closed)
        self._prev, self._evidence, self._gaps, self._closed = self.position, NOTHING, None, {}
        return moves

    def _advance(self, id: int, evidence: Evidence) -> None:
        self.position = id
        self._evidence += evidence

    def _close(self, top: int, how: How) -> None:
        self._closed.setdefault(top, how)

    def _note_gaps(self) -> None:
        if self._gaps is None:
            self._gaps = {gap[1]: gap for gap in self.gaps()}

    def _at(self, prev: int) -> int:
        return bisect_left(self.pending, prev, key=attrgetter("prev"))

    def _overlapping(self, prev: int, id: int) -> Iterator[Span]:
        at = self._at(prev)
        if at and self.pending[at - 1].id > prev:
            at -= 1
        while at < len(self.pending) and self.pending[at].prev < id:
            yield self.pending[at]
            at += 1


def _part(span: Span, prev: int, id: int) -> Span:
    if (prev, id) == (span.prev, span.id):
        return span
    width = id - prev
    return Span(prev, id, span.evidence.at_most(width), min(span.edges, width), span.since)
