"""Feeding a run to a chain: which of its edges are new, which are duplicates, conflicts, or too late. Pure.

Edges of one writer and epoch tile the line (docs/design.md 3): one whose range is settled already is a duplicate, one
that is settled in part contradicts what came before; but not what an earlier timeline left, which had edges of its own.
The steps are taken per settled range, never per edge; only the edges across the end of a late range, or of what an
earlier timeline left, are looked at one by one, at most two for each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tidemark.streaming.core.chain import Chain, DeferredRange
from tidemark.streaming.core.outcome import BatchOutcome, Outcome, Refusal, Why
from tidemark.streaming.values.intervals import EMPTY, Intervals
from tidemark.streaming.values.limits import NOTHING, Reason
from tidemark.streaming.wire.runs import RDATA, Mask, Run

Completed = tuple[Run, Outcome]
"""Edges that were settled now, or that come late, and how each of them is counted."""

_NEW, _DUPLICATE, _OVER, _CONFLICT = 0, 1, 2, 3
_CLEAR, _LATE, _ACROSS = 0, 1, 2


@dataclass(slots=True)
class Classifier:
    """Where runs go: the chain, how an accepted edge is counted, and the ranges in which completions are late.

    `spans` bounds the spans that may wait on the chain; an edge that would add one more is put off. Up to `published`
    a completion is late because the database went back, beyond because an operator skipped it. `late` shrinks by what
    has come. Up to `began` the chain may have been settled in a timeline before that of the edges.
    """

    chain: Chain
    spans: int
    changes: BatchOutcome
    outcome: Outcome
    late: Intervals = EMPTY
    published: int = 0
    began: int = 0

    def run(self, run: Run) -> Iterator[Completed]:
        """Settle what is new in `run`; gives the parts of it that were accepted or late."""
        late = self.late.within(run.start, run.end)
        if not len(late):
            yield from self._clear(run)
            return
        prevs = run.prevs
        standing = np.full(len(run), _CLEAR)
        for low, high in late:
            first, stop = run.overlapping(low, high)
            if first >= stop:
                continue
            inside = (prevs[first:stop] >= low) & (run.ids[first:stop] <= high)
            standing[first:stop] = np.where(inside, _LATE, _ACROSS)
        for part in run.parts(standing == _CLEAR):
            yield from self._clear(part)
        for part in run.parts(standing == _LATE):
            yield from self._late(part)
        for at in np.flatnonzero(standing == _ACROSS).tolist():
            yield from self._across(run.part(at, at + 1))

    def _clear(self, run: Run) -> Iterator[Completed]:
        standing = self._standing(run)
        if standing is None:
            yield from self._settle(run)
            return
        for part in run.parts(standing == _NEW):
            yield from self._settle(part)
        yield from self._repeated(run, standing == _DUPLICATE)
        for at in np.flatnonzero(standing == _OVER).tolist():
            yield from self._over(run.part(at, at + 1))
        if (standing == _CONFLICT).any():
            self._refuse(run, standing == _CONFLICT, Reason.CONFLICT)

    def _standing(self, run: Run) -> npt.NDArray[np.int64] | None:
        """For each edge how it stands to what is settled; None where all are new."""
        covered = self.chain.covered(run.start, run.end)
        if not covered:
            return None
        prevs = run.prevs
        standing = np.full(len(run), _NEW)
        for low, high in covered:
            first, stop = run.overlapping(low, high)
            if first >= stop:
                continue
            standing[first:stop] = np.maximum(standing[first:stop], _DUPLICATE)
            if prevs[first] < low:
                standing[first] = max(standing[first], _OVER if low < self.began else _CONFLICT)
            if run.ids[stop - 1] > high:
                standing[stop - 1] = max(standing[stop - 1], _OVER if high <= self.began else _CONFLICT)
        return standing

    def _settle(self, run: Run) -> Iterator[Completed]:
        if not self._has_room(run.start, run.end):
            self._put_off(run)
            self.changes.counts["deferred"] += len(run)
            return
        self.chain.settle(run.start, run.end, run.evidence(), len(run), "completed", self.changes.now)
        self.chain.declare_empty(run.empty())
        self.changes.counts[self.outcome] += len(run)
        yield run, self.outcome

    def _over(self, edge: Run) -> Iterator[Completed]:
        """One edge across an end of what an earlier timeline left: what is open of it is settled, as the edge says.

        Its ID outside: what is open right below that counts as the edge. Its ID inside: it is a duplicate.
        """
        *_, (low, high) = self.chain.missing(edge.start, edge.end)
        if high == edge.end:
            found = [*self._settle(replace(edge, start=low))]
            yield from found
            if not found:
                return
        else:
            yield from self._repeated(edge, np.ones(1, np.bool_))
        self._follow(edge)

    def _has_room(self, prev: int, id: int) -> bool:
        return len(self.chain.pending) < self.spans or self.chain.adjoins(prev, id)

    def _repeated(self, run: Run, edges: Mask) -> Iterator[Completed]:
        """Edges that are settled already: duplicates, but for a fact that its writer had declared not to be there."""
        denied = edges & (run.kinds == RDATA) & self.chain.empty.contains(run.ids)
        self.changes.counts["duplicate"] += int(np.count_nonzero(edges & ~denied))
        for part in run.parts(denied):
            self.chain.empty = self.chain.empty.difference(Intervals.from_ids(part.ids))
            self.changes.record_contradiction(part)
            yield part, "late"

    def _refuse(self, run: Run, edges: Mask, reason: Reason) -> None:
        offsets, ids = run.offsets[edges], run.ids[edges]
        order = np.argsort(offsets, kind="stable")
        self.changes.rejected.append(Refusal(reason, offsets[order], ids[order]))
        self.chain.refuse(int(run.ids[edges][-1]))

    def _put_off(self, run: Run) -> None:
        self.chain.wait_for_room(DeferredRange(run.first_offset, int(run.offsets.max()), run.start), run.end)

    def _late(self, run: Run) -> Iterator[Completed]:
        completed, again = run.completes, run.ids <= self.published
        self.changes.counts["duplicate"] += int(np.count_nonzero(~completed))
        reasons: list[tuple[Why, Mask]] = [("regressed", completed & again), ("skipped", completed & ~again)]
        for why, chosen in reasons:
            for part in run.parts(chosen):
                self.changes.record_late(part, why)
        self._follow(run)
        yield run, "late"

    def _follow(self, run: Run) -> None:
        """Settle what comes late and is open. It was counted; no evidence is told of it, and it is late no more, unless
        that would take more memory than pending spans may. What finds no room comes again, and is told as late again.
        """
        for prev, id in self.chain.missing(run.start, run.end):
            if self._has_room(prev, id):
                self.chain.settle(prev, id, NOTHING, 0, "completed", self.changes.now)
            else:
                self._put_off(run)
                return
        self.chain.declare_empty(run.empty().common(self.late))
        if len(self.late) < self.spans:
            self.late = self.late.without(run.start, run.end)

    def _across(self, edge: Run) -> Iterator[Completed]:
        """One edge that lies in a late range in part: what lies outside is settled, as the edge says, without facts.

        Its ID outside: the rest of the edge counts as the edge. Its ID inside: the completion is late.
        """
        *_, (low, high) = [(0, 0), *self.late.missing(edge.start, edge.end)]
        if high == edge.end:
            found = [*self._clear(replace(edge, start=low))]
            yield from found
            if any(outcome != "late" for _, outcome in found):
                self._follow(edge)
        else:
            yield from self._late(edge)
