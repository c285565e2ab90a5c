"""Applies runs to a chain, and decides which edges are new, duplicate, in conflict or late. Pure; magnitudes only.

The edges of one writer and epoch cover its chain without gaps and overlaps (docs/design.md 3). An edge whose range is
settled is a duplicate; the edge is late if its writer had declared that the ID has no fact. An edge whose range is
settled in part is a conflict, unless an earlier timeline settled that part: edges of two timelines need not match.

Python loops run over settled ranges, and numpy handles the edges. Only edges that cross an end of a late range, or of a
range that an earlier timeline settled, are handled one by one: at most two for each range.

A `BatchOutcome` collects the changes of one stream by one batch. `streaming.core.batch` makes the effects from it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from tidemark.streaming.core.chain import EMPTY_RANGES_MAX, Chain, DeferredRange
from tidemark.streaming.values.intervals import NO_INTERVALS, Ids, Intervals
from tidemark.streaming.values.limits import NO_EVIDENCE, Reason
from tidemark.streaming.wire.runs import RDATA, Mask, Run

Outcome = Literal["applied", "buffered", "deferred", "duplicate", "late", "batch", "forgotten"]
"""How a record, or an edge of a RUN, is counted. `batch`: a batch row (`records.ROW`). `forgotten` counts completed IDs
that were dropped, at the bound or with a new timeline; their records are counted under another outcome too.
"""

LateReason = Literal["skipped", "regressed", "final", "announced"]
"""Why a completion is late.

- `skipped`: an operator had settled the ID.
- `regressed`: the database was restored, or an operator's override was taken back.
- `final`: the linear position had passed the ID, or another writer had completed it.
- `announced`: the writer itself had declared that the ID has no fact of the writer.
"""

RollbackSignal = Literal["position", "database", "start"]
"""The evidence in a JOIN that the writer's database was restored.

- `position`: the JOIN is below IDs that its writer had completed.
- `database`: the JOIN names another database (`DatabaseStart.database`).
- `start`: the JOIN's start does not follow the writer's last start.
"""


@dataclass(frozen=True, slots=True)
class LateRange:
    """Late completions in `(prev, id]`. `facts`: the number of facts among them."""

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: LateReason


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """A timeline that began with a JOIN.

    Attributes:
        writer: the writer that joined.
        id: IDs above this one may be given out again.
        position: the writer's position before the JOIN; 0 if it never joined.
        number: number of the new timeline.
        why: the evidence that the database was restored.
    """

    writer: str
    epoch: int
    id: int
    position: int
    number: int
    why: RollbackSignal


@dataclass(frozen=True, slots=True)
class Rejection:
    """Edges or records that are rejected for one reason.

    Attributes:
        offsets: Kafka offsets, ascending. A RUN occurs once for each of its rejected edges.
        ids: for each offset the ID of the rejected edge, a magnitude until `core.batch` adds the sign; 0 if the whole
            record is rejected.
    """

    reason: Reason
    offsets: Ids
    ids: Ids

    @classmethod
    def of_records(cls, reason: Reason, offsets: Ids) -> "Rejection":
        """The rejection of whole records. The `offsets` may be in any order."""
        return cls(reason, np.sort(offsets), np.zeros_like(offsets))


@dataclass(slots=True)
class BatchOutcome:
    """The changes of a stream by a batch.

    Attributes:
        now: time (ms) of the batch, since 1970.
        has_unordered_rejections: True if the batch rejected records that have no order relative to the stream's other
            records.
        counts: number of records, or of edges of RUNs, by outcome.
        touch_times: writer -> Kafka time (ms) of the oldest record that may have changed the writer's state.
        rejections: rejected records and edges, but no markers: `StreamState.apply_marker` returns the reason for a
            rejected marker.
        late_ranges: late completions.
        timelines: timelines that began.
        dropped_writers: names of retired writers that left the state.
    """

    now: int
    has_unordered_rejections: bool = False
    counts: Counter[Outcome] = field(default_factory=Counter)
    touch_times: dict[str, int] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    late_ranges: list[LateRange] = field(default_factory=list)
    timelines: list[TimelineStart] = field(default_factory=list)
    dropped_writers: list[str] = field(default_factory=list)

    def record_late(self, run: Run, why: LateReason) -> None:
        """Count all edges of `run` as late. The range of `run` must contain no other edge of its writer."""
        self.counts["late"] += len(run)
        self.late_ranges.append(LateRange(run.writer, run.epoch, run.start, run.end, run.fact_count, why))

    def record_contradiction(self, run: Run) -> None:
        """Count all edges of `run` as late, because their writer had declared that the IDs have no fact.

        Records the single IDs as late, not the range of `run`, because other edges may overlap the range.
        """
        self.counts["late"] += len(run)
        for low, high in Intervals.from_ids(run.ids):
            self.late_ranges.append(LateRange(run.writer, run.epoch, low, high, high - low, "announced"))

    def touch(self, writer: str, time: int) -> None:
        """Record that a record with the Kafka time `time` (ms) may have changed the state of `writer`."""
        self.touch_times[writer] = min(time, self.touch_times.get(writer, time))


CompletedRun = tuple[Run, Outcome]
"""A run of edges that this batch settled or that are late, and the outcome of all its edges."""

_NEW, _DUPLICATE, _ACROSS_TIMELINE, _CONFLICT = 0, 1, 2, 3
"""Classes of an edge outside the late ranges. If several classes apply to an edge, the highest one counts."""
_NOT_LATE, _LATE, _ACROSS_LATE = 0, 1, 2
"""Whether an edge is outside the late ranges, inside one of them, or partly inside."""


@dataclass(slots=True)
class ChainUpdater:
    """Applies runs of one writer to its chain.

    Attributes:
        chain: the writer's chain.
        spans_max: bound of the spans on the chain. An edge that would add one more is deferred.
        batch: collects the changes.
        outcome: the outcome of edges that settle a range: `applied` or `buffered`.
        late_ranges: ranges in which a completion is late. `apply` removes the ranges of late edges.
        published_position: a completion in a late range has the reason `regressed` up to this ID, `skipped` beyond it.
        timeline_start_id: an earlier timeline may have settled IDs up to this one; 0 if there is none.
    """

    chain: Chain
    spans_max: int
    batch: BatchOutcome
    outcome: Outcome
    late_ranges: Intervals = NO_INTERVALS
    published_position: int = 0
    timeline_start_id: int = 0

    def apply(self, run: Run) -> Iterator[CompletedRun]:
        """Apply the edges of `run`: settle new edges, and count, defer or reject all others.

        Exhaust the iterator: the edges are applied during the iteration.

        Yields:
            Parts of the run that were settled or are late, with their outcomes.
        """
        late = self.late_ranges.within(run.start, run.end)
        if not len(late):
            yield from self._apply_outside_late(run)
            return
        prevs = run.prevs
        classes = np.full(len(run), _NOT_LATE)
        for low, high in late:
            first, stop = run.overlapping(low, high)
            if first >= stop:
                continue
            inside = (prevs[first:stop] >= low) & (run.ids[first:stop] <= high)
            classes[first:stop] = np.where(inside, _LATE, _ACROSS_LATE)
        for part in run.parts(classes == _NOT_LATE):
            yield from self._apply_outside_late(part)
        for part in run.parts(classes == _LATE):
            yield from self._record_late(part)
        for index in np.flatnonzero(classes == _ACROSS_LATE).tolist():
            yield from self._apply_across_late(run.part(index, index + 1))

    def _apply_outside_late(self, run: Run) -> Iterator[CompletedRun]:
        """Apply edges that do not touch a late range."""
        classes = self._classify(run)
        if classes is None:
            yield from self._settle(run)
            return
        for part in run.parts(classes == _NEW):
            yield from self._settle(part)
        yield from self._count_settled(run, classes == _DUPLICATE)
        for index in np.flatnonzero(classes == _ACROSS_TIMELINE).tolist():
            yield from self._apply_across_timeline(run.part(index, index + 1))
        if (classes == _CONFLICT).any():
            self._reject(run, classes == _CONFLICT, Reason.CONFLICT)

    def _classify(self, run: Run) -> npt.NDArray[np.int64] | None:
        """Compare each edge with the settled ranges.

        Returns:
            For each edge `_NEW`, `_DUPLICATE`, `_ACROSS_TIMELINE` or `_CONFLICT`. None if all edges are new.
        """
        covered = self.chain.settled_ranges(run.start, run.end)
        if not covered:
            return None
        prevs = run.prevs
        classes = np.full(len(run), _NEW)
        for low, high in covered:
            first, stop = run.overlapping(low, high)
            if first >= stop:
                continue
            classes[first:stop] = np.maximum(classes[first:stop], _DUPLICATE)
            if prevs[first] < low:
                classes[first] = max(classes[first], _ACROSS_TIMELINE if low < self.timeline_start_id else _CONFLICT)
            if run.ids[stop - 1] > high:
                classes[stop - 1] = max(
                    classes[stop - 1], _ACROSS_TIMELINE if high <= self.timeline_start_id else _CONFLICT
                )
        return classes

    def _settle(self, run: Run) -> Iterator[CompletedRun]:
        """Settle a run and yield it. If it would add a span beyond the bound, defer the run and yield nothing."""
        if not self._has_room(run.start, run.end):
            self._defer(run)
            self.batch.counts["deferred"] += len(run)
            return
        self.chain.settle(run.start, run.end, run.evidence(), len(run), "completed", self.batch.now)
        self.chain.declare_empty(run.highest_empty(EMPTY_RANGES_MAX))
        self.batch.counts[self.outcome] += len(run)
        yield run, self.outcome

    def _apply_across_timeline(self, edge: Run) -> Iterator[CompletedRun]:
        """Apply one edge that crosses the end of a range that an earlier timeline settled.

        If the edge's ID is open, the open range that ends at the ID is settled with the evidence of the edge. If the ID
        is settled, the edge is a duplicate or late. The remaining open parts of the edge are settled without evidence.
        """
        *_, (low, high) = self.chain.open_ranges(edge.start, edge.end)
        if high == edge.end:
            completed = [*self._settle(replace(edge, start=low))]
            yield from completed
            if not completed:
                return
        else:
            yield from self._count_settled(edge, np.ones(1, np.bool_))
        self._settle_without_evidence(edge)

    def _has_room(self, prev: int, id: int) -> bool:
        return len(self.chain.pending) < self.spans_max or self.chain.adjoins(prev, id)

    def _count_settled(self, run: Run, edges: Mask) -> Iterator[CompletedRun]:
        """Count the edges of `run` that are in the mask `edges`, and whose ranges are settled already.

        A fact whose ID the writer had declared empty is late, and is yielded. All other edges are duplicates.
        """
        denied = edges & (run.kinds == RDATA) & self.chain.empty_ranges.contains(run.ids)
        self.batch.counts["duplicate"] += int(np.count_nonzero(edges & ~denied))
        for part in run.parts(denied):
            self.chain.empty_ranges = self.chain.empty_ranges.difference(Intervals.from_ids(part.ids))
            self.batch.record_contradiction(part)
            yield part, "late"

    def _reject(self, run: Run, edges: Mask, reason: Reason) -> None:
        offsets, ids = run.offsets[edges], run.ids[edges]
        order = np.argsort(offsets, kind="stable")
        self.batch.rejections.append(Rejection(reason, offsets[order], ids[order]))
        self.chain.mark_uncertain_up_to(int(run.ids[edges][-1]))

    def _defer(self, run: Run) -> None:
        self.chain.defer(DeferredRange(run.first_offset, int(run.offsets.max()), run.start), run.end)

    def _record_late(self, run: Run) -> Iterator[CompletedRun]:
        """Apply edges in late ranges: facts and voids are late, announcements are duplicates. Yields all of them."""
        completed, is_published = run.completes, run.ids <= self.published_position
        self.batch.counts["duplicate"] += int(np.count_nonzero(~completed))
        reasons: list[tuple[LateReason, Mask]] = [
            ("regressed", completed & is_published),
            ("skipped", completed & ~is_published),
        ]
        for why, edges in reasons:
            for part in run.parts(edges):
                self.batch.record_late(part, why)
        self._settle_without_evidence(run)
        yield run, "late"

    def _settle_without_evidence(self, run: Run) -> None:
        """Settle the open parts of a run whose edges are counted already, and remove the run from the late ranges.

        If removing the run could leave more late ranges than `spans_max`, the late ranges are not changed. If there is
        no room for a part, the run is deferred. Then its records are counted as late again when they are read again.
        """
        for prev, id in self.chain.open_ranges(run.start, run.end):
            if self._has_room(prev, id):
                self.chain.settle(prev, id, NO_EVIDENCE, 0, "completed", self.batch.now)
            else:
                self._defer(run)
                return
        self.chain.declare_empty(run.empty().intersection(self.late_ranges))
        if len(self.late_ranges) < self.spans_max:
            self.late_ranges = self.late_ranges.without(run.start, run.end)

    def _apply_across_late(self, edge: Run) -> Iterator[CompletedRun]:
        """Apply one edge that is partly in a late range.

        If the edge's ID is outside the late ranges, the part from the last late range to the ID is applied like a
        separate edge. If the ID is inside a late range, the completion is late. The remaining open parts of the edge
        are settled without evidence.
        """
        *_, (low, high) = [(0, 0), *self.late_ranges.missing(edge.start, edge.end)]
        if high == edge.end:
            completed = [*self._apply_outside_late(replace(edge, start=low))]
            yield from completed
            if any(outcome != "late" for _, outcome in completed):
                self._settle_without_evidence(edge)
        else:
            yield from self._record_late(edge)
