"""The edges of many streams as columns, and what is asked of all of them at once. Pure: numpy; magnitudes only.

A *link* is a chain of edges of one writer, each of which continues the one before.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemark.streaming.values.intervals import Ascending, Ids, are_different
from tidemark.streaming.wire.runs import POSITION, RDATA, Mask

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
    _prevs: Ids = field(init=False)
    """Where each edge begins."""

    def __post_init__(self) -> None:
        self._others = np.flatnonzero(self.kinds != RDATA)
        self._prevs = np.empty_like(self.ids)
        self._prevs[1:] = self.ids[:-1]
        self._prevs[self.firsts] = self.starts

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
        """By link how many facts there are, and how wide what was declared void or announced is."""
        others, links = self._others, self._links(self._others)
        facts = np.diff(self.firsts, append=len(self.ids)) - np.bincount(links, minlength=len(self.firsts))
        widths = np.where(self.kinds[others] == POSITION, self.ids[others] - self._prevs[others], 1)
        empty = np.zeros(len(self.firsts), np.int64)
        np.add.at(empty, links, widths)
        return facts.tolist(), empty.tolist()

    def declared(self, most: int) -> list[tuple[int, Ascending]]:
        """By link where its writer says that it has no facts (`Run.empty`): of each the highest `most` ranges."""
        highs = self.ids - (self.kinds == RDATA)
        places = np.flatnonzero(self._prevs < highs)
        if not len(places):
            return []
        links, lows, highs = self._links(places), self._prevs[places], highs[places]
        first = np.flatnonzero(np.concatenate(([True], (links[1:] != links[:-1]) | (lows[1:] > highs[:-1]))))
        last = np.append(first[1:], len(links)) - 1
        links, lows, highs = links[first], lows[first], highs[last]  # what touches is one
        kept = np.arange(len(links)) >= np.searchsorted(links, links, side="right") - most
        links, lows, highs = links[kept], lows[kept], highs[kept]
        firsts = np.flatnonzero(np.concatenate(([True], links[1:] != links[:-1])))
        return list(zip(links[firsts].tolist(), Ascending.all_of(lows, highs, firsts), strict=True))

    def _links(self, places: Ids) -> Ids:
        """Of these edges the links."""
        return np.searchsorted(self.firsts, places, side="right") - 1

    def _streams(self, places: Ids) -> Ids:
        """Of these edges the streams."""
        return np.searchsorted(self.begins, places, side="right") - 1
