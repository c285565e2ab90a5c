"""The linear position and the completed IDs above it (docs/design.md 3). Pure; magnitudes only."""

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from tidemark.streaming.values.intervals import EMPTY, Ids, Intervals

HEADS_KEPT = 16  # past it every second one goes, which makes what lies between look older, never younger


@dataclass(slots=True)
class LinearPosition:
    """`completed` are IDs of facts and voids, of whatever writer, beyond `position`.

    `heads` say since when the line is behind: from each time (ms) on, IDs beyond the ID before it were given out. The
    first is the line's own; there is none where the line has come as far as they are.
    """

    position: int = 0
    completed: Intervals = EMPTY
    heads: list[tuple[int, int]] = field(default_factory=list)

    def complete(self, ids: Ids, offsets: Ids, counts: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Remember those of the IDs that `counts`. Gives which of all were settled for good: the position has passed
        them, or another record, of those that were remembered or of these at a lower offset, completed them.
        """
        final = (ids <= self.position) | self.completed.contains(ids)
        found = Intervals.from_ids(ids)
        if found.width() < len(ids):
            order = np.lexsort((offsets, ids))
            ordered, places = ids[order], np.arange(len(ids))
            # For each but the first, where the last one before it is that counts.
            last = np.maximum.accumulate(np.where(counts[order], places, -1))[:-1]
            final[order[1:]] |= (last >= 0) & (ordered[1:] == ordered[last])
        if not counts.all():
            found = Intervals.from_ids(ids[counts])
        self.completed = self.completed.union(found.above(self.position))
        return final

    def settle(self, floor: int) -> None:
        """Move as far as the evidence goes: every writer is at or beyond `floor`, and completed IDs bridge the rest."""
        self.position = self.completed.reach(max(self.position, floor))
        self.completed = self.completed.above(self.position)

    def follow(self, before: int, head: int, now: int) -> None:
        """Once after a batch at `now` (ms): IDs are given out up to `head`; up to `before` they were before it."""
        if head <= self.position:
            self.heads = []
            return
        if passed := bisect_right(self.heads, self.position, key=itemgetter(0)):
            self.heads[:passed] = [(self.position, self.heads[passed - 1][1])]
        if not self.heads:
            self.heads = [(self.position, now)]
        while self.heads[-1][0] >= head:  # a database went back
            self.heads.pop()
        last, seen = self.heads[-1]
        if head > before > last and now > seen:
            self.heads.append((before, now))
            if len(self.heads) > HEADS_KEPT:
                del self.heads[1::2]

    def forget_above(self, id: int) -> int:
        """IDs beyond `id` may come again; gives how many were known to be complete."""
        return self._keep(self.completed.upto(id))

    def forget_beyond(self, intervals: int) -> int:
        """Keep the lowest `intervals`, which only makes the line more cautious; gives how many IDs were forgotten."""
        return self._keep(self.completed.lowest(intervals))

    def _keep(self, kept: Intervals) -> int:
        if kept is self.completed:
            return 0
        forgotten = self.completed.width() - kept.width()
        self.completed = kept
        return forgotten
