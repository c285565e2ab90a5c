"""The edges of many streams as columns, and what is asked of all of them at once. Pure: numpy; magnitudes only.

A *link* is a chain of runs of one writer, each of which continues the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from tidemark.streaming.intervals import Ids, Intervals
from tidemark.streaming.runs import POSITION, RDATA, Mask, PackedRun

_NONE: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class EdgeColumns:
    """Edges `(prevs[i], ids[i]]` of some streams, link by link: a link begins at each of `firsts`, and a stream at each
    of `begins`. `streams` numbers the stream of each edge.
    """

    prevs: Ids
    ids: Ids
    kinds: npt.NDArray[np.uint8]
    firsts: npt.NDArray[np.intp]
    begins: npt.NDArray[np.intp]
    streams: Ids

    @classmethod
    def of(cls, links: Sequence[Sequence[PackedRun]], counts: Sequence[int]) -> "EdgeColumns":
        """`links` are chains of at least one run each; the first stream has as many of them as the first of `counts`
        says, and so on.
        """
        ids = np.frombuffer(b"".join([run.ids for link in links for run in link]), np.int64)
        kinds = np.frombuffer(b"".join([run.kinds for link in links for run in link]), np.uint8)
        lengths = [sum(len(run.kinds) for run in link) for link in links]
        firsts = np.array([0, *accumulate(lengths[:-1])])
        prevs = np.empty_like(ids)
        prevs[1:] = ids[:-1]
        prevs[firsts] = [link[0].start for link in links]
        begins = firsts[[0, *accumulate(counts[:-1])]]
        streams = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(ids)))
        return cls(prevs, ids, kinds, firsts, begins, streams)

    def reach(self, lines: Ids, floors: Ids, heads: Ids) -> Mask:
        """For each stream whether its line goes to its head: all IDs beyond its floor are completed, each of them once
        and none of those that its line had passed.
        """
        completes = self.kinds != POSITION
        passed = completes & (self.ids <= lines[self.streams])
        above = completes & (self.ids > floors[self.streams])
        reached: Mask = np.add.reduceat(above, self.begins, dtype=np.int64) == heads - floors
        reached &= ~np.logical_or.reduceat(passed, self.begins)
        reached[self._repeated(completes, lines, heads)] = False
        return reached

    def _repeated(self, completes: Mask, lines: Ids, heads: Ids) -> Ids:
        """The streams in which an ID is completed twice; all of them, where side by side their IDs take 62 bits."""
        if len(self.firsts) == len(self.begins):
            return _NONE
        # Streams side by side, each with room for what lies between its line and its head.
        rooms = heads - lines
        if rooms.sum(dtype=np.float64) >= 2**62:
            return np.arange(len(rooms))
        ids, streams = self.ids[completes], self.streams[completes]
        places = ids + (np.cumsum(rooms) - rooms - lines)[streams]
        if Intervals.from_ids(places).width() == len(places):
            return _NONE
        order = np.argsort(places, kind="stable")
        again = places[order[1:]] == places[order[:-1]]
        repeated: Ids = streams[order[1:][again]]
        return repeated

    def counts(self) -> tuple[list[int], list[int]]:
        """By link how many facts there are, and how wide what was declared to be without is."""
        facts = np.add.reduceat(self.kinds == RDATA, self.firsts, dtype=np.int64)
        widths = np.where(self.kinds == POSITION, self.ids - self.prevs, self.kinds != RDATA)
        return facts.tolist(), np.add.reduceat(widths, self.firsts, dtype=np.int64).tolist()

    def declared(self) -> list[tuple[int, int, int]]:
        """What was declared to be without facts: link, low and high, ascending; what touches is one."""
        chosen = np.flatnonzero(self.kinds != RDATA)
        if not len(chosen):
            return []
        highs = self.ids[chosen]
        lows = np.where(self.kinds[chosen] == POSITION, self.prevs[chosen], highs - 1)
        links = np.searchsorted(self.firsts, chosen, side="right") - 1
        first = np.flatnonzero(np.concatenate(([True], (links[1:] != links[:-1]) | (lows[1:] > highs[:-1]))))
        last = np.append(first[1:], len(chosen)) - 1
        return list(zip(links[first].tolist(), lows[first].tolist(), highs[last].tolist(), strict=True))
