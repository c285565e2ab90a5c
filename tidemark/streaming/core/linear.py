"""The linear position of a stream and the completed IDs above it (docs/design.md 3). Pure; magnitudes only."""

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from tidemark.streaming.values.intervals import EMPTY, Ids, Intervals
from tidemark.streaming.wire.runs import Mask

HEADS_MAX = 16
"""Bound of `LinearPosition.heads`. Past it every second entry is dropped: the IDs in between look older than they are,
never younger."""


@dataclass(slots=True)
class LinearPosition:
    """The linear position.

    Attributes:
        position: every ID of any writer up to here is settled.
        completed: completed IDs above the position, of facts and voids of any writer.
        heads: since when the linear position lags, as `(head, since)`, ascending: from the time `since` (ms) on, IDs
            beyond `head` were allocated. The first `head` is the position itself. Empty if there is no linear lag.
    """

    position: int = 0
    completed: Intervals = EMPTY
    heads: list[tuple[int, int]] = field(default_factory=list)

    def complete(self, ids: Ids, offsets: Ids, counts: Mask) -> Mask:
        """Remember completed IDs.

        Args:
            ids: completed IDs, in any order; an ID may occur more than once.
            offsets: Kafka offset of each ID's record.
            counts: mask of the IDs to remember.

        Returns:
            Mask of the IDs that were final before: the position has passed the ID, or the ID was completed earlier, by
            a previous batch or by a record at a lower offset.
        """
        final = (ids <= self.position) | self.completed.contains(ids)
        added = Intervals.from_ids(ids)
        if added.width() < len(ids):
            order = np.lexsort((offsets, ids))
            ordered, indexes = ids[order], np.arange(len(ids))
            # For each ID but the first: the index of the last ID before it that counts.
            last = np.maximum.accumulate(np.where(counts[order], indexes, -1))[:-1]
            final[order[1:]] |= (last >= 0) & (ordered[1:] == ordered[last])
        if not counts.all():
            added = Intervals.from_ids(ids[counts])
        self.completed = self.completed.union(added.above(self.position))
        return final

    def settle(self, floor: int) -> None:
        """Advance to `floor`, which no active writer is below, and on through the completed IDs above it."""
        self.position = self.completed.reach(max(self.position, floor))
        self.completed = self.completed.above(self.position)

    def follow(self, before: int, head: int, now: int) -> None:
        """Note, once after a batch, how far IDs are allocated.

        Args:
            before: highest allocated ID before the batch.
            head: highest allocated ID after the batch.
            now: time (ms) of the batch.
        """
        if head <= self.position:
            self.heads = []
            return
        if passed := bisect_right(self.heads, self.position, key=itemgetter(0)):
            self.heads[:passed] = [(self.position, self.heads[passed - 1][1])]
        if not self.heads:
            self.heads = [(self.position, now)]
        while self.heads[-1][0] >= head:  # the database was restored
            self.heads.pop()
        last, since = self.heads[-1]
        if head > before > last and now > since:
            self.heads.append((before, now))
            if len(self.heads) > HEADS_MAX:
                del self.heads[1::2]

    def forget_above(self, id: int) -> int:
        """Forget completed IDs beyond `id`, which may be given out again. Returns how many were forgotten."""
        return self._keep(self.completed.upto(id))

    def forget_beyond(self, intervals: int) -> int:
        """Keep the lowest `intervals` of completed IDs. Returns how many IDs were forgotten.

        Without a completed ID the linear position may wait longer. It never moves too early.
        """
        return self._keep(self.completed.lowest(intervals))

    def _keep(self, remaining: Intervals) -> int:
        if remaining is self.completed:
            return 0
        forgotten = self.completed.width() - remaining.width()
        self.completed = remaining
        return forgotten
