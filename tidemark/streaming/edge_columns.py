"""The edges of many streams as columns, and what is asked of all of them at once. Pure: numpy; magnitudes only.

A *link* is a chain of edges of one writer, each of which continues the one before.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemark.streaming.intervals import Ids, are_different
from tidemark.streaming.runs import POSITION, RDATA, Mask

_NONE: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class EdgeColumns:
    """Edges of some streams, link by link: a link begins at each of `firsts`, with an edge from one of `starts`, and a
    stream at each of `begins`. IDs ascend along a link.
    """

    ids: Ids
    kinds: npt.NDArray[np.uint8]
    starts: Ids
    firsts: Ids
    begins: Ids
    _others: Ids = field(init=False)
    """Where the edges are that are no facts."""
    _links: Ids = field(init=False)
    """Of each of those the link."""
    _lows: Ids = field(init=False)
    """And where what it declares to be without begins."""

    def __post_init__(self) -> None:
        self._others = np.flatnonzero(self.kinds != RDATA)
        self._links = np.searchsorted(self.firsts, self._others, side="right") - 1
        prevs = self.ids[self._others - 1]
        first = self._others == self.firsts[self._links]
        prevs[first] = self.starts[self._links[first]]
        self._lows = np.where(self.kinds[self._others] == POSITION, prevs, self.ids[self._others] - 1)

    def reach(self, lines: Ids, floors: Ids, heads: Ids) -> Mask:
        """For each stream whether its line goes to its head: all IDs beyond its floor are completed, each of them once
        and none of those that its line had passed.
        """
        announced = self._others[self.kinds[self._others] == POSITION]
        counts = np.diff(self.begins, append=len(self.ids))
        above = self.ids > np.repeat(floors, counts)
        above[announced] = False
        completed = np.bincount(self._streams(np.flatnonzero(above)), minlength=len(lines))
        reached: Mask = completed == heads - floors
        if np.any(self.ids[self.firsts] <= lines[self._streams(self.firsts)]):
            passed = self.ids <= np.repeat(lines, counts)
            passed[announced] = False
            reached[self._streams(np.flatnonzero(passed))] = False
        if len(self.firsts) > len(self.begins):
            reached[self._repeated(counts, announced, lines, heads)] = False
        return reached

    def _repeated(self, counts: Ids, announced: Ids, lines: Ids, heads: Ids) -> Ids:
        """The streams in which an ID is completed twice; all of them, where side by side their IDs take 62 bits."""
        # Streams side by side, each with room for what lies between its line and its head.
        rooms = heads - lines
        if rooms.sum(dtype=np.float64) >= 2**62:
            return np.arange(len(rooms))
        places = self.ids + np.repeat(np.cumsum(rooms) - rooms - lines, counts)
        if len(announced):
            places = np.delete(places, announced)
        if are_different(places):
            return _NONE
        streams = self._streams(np.delete(np.arange(len(self.ids)), announced))
        order = np.argsort(places, kind="stable")
        repeated: Ids = streams[order[1:][places[order[1:]] == places[order[:-1]]]]
        return repeated

    def counts(self) -> tuple[list[int], list[int]]:
        """By link how many facts there are, and how wide what was declared to be without is."""
        facts = np.diff(self.firsts, append=len(self.ids)) - np.bincount(self._links, minlength=len(self.firsts))
        empty = np.zeros(len(self.firsts), np.int64)
        np.add.at(empty, self._links, self.ids[self._others] - self._lows)
        return facts.tolist(), empty.tolist()

    def declared(self) -> list[tuple[int, int, int]]:
        """What was declared to be without facts: link, low and high, ascending; what touches is one."""
        if not len(self._others):
            return []
        links, lows, highs = self._links, self._lows, self.ids[self._others]
        first = np.flatnonzero(np.concatenate(([True], (links[1:] != links[:-1]) | (lows[1:] > highs[:-1]))))
        last = np.append(first[1:], len(links)) - 1
        return list(zip(links[first].tolist(), lows[first].tolist(), highs[last].tolist(), strict=True))

    def _streams(self, places: Ids) -> Ids:
        """Of these edges the streams."""
        return np.searchsorted(self.begins, places, side="right") - 1
