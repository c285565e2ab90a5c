"""The lines of the writers of one stream, where there are several (docs/design.md 4b). Pure; magnitudes only.

A writer's line is cut at its own facts and at the *beats*, IDs of nobody that stand in the outbox as facts do. Each own
fact is an edge of one ID, told as soon as it is committed. What lies between two neighbouring cuts is told as one range
without a fact of this writer, once none of it can be its own: then nothing can come between the two, so every relay
tells the same range, whenever it looks.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from tidemark.streaming.values.intervals import EMPTY, Intervals


class EmptyRange(NamedTuple):
    """Nothing of the writer is in `(prev, id]`."""

    writer: str
    prev: int
    id: int


class _WriterChain:
    def __init__(self, last: int) -> None:
        self.last = last
        self.sent = EMPTY
        self.acknowledged = EMPTY


class WriterChains:
    """`lasts`: by writer where its line was last cut; all of it up to there is in Kafka."""

    def __init__(self, lasts: Mapping[str, int]) -> None:
        self._lines = {writer: _WriterChain(last) for writer, last in lasts.items()}
        self._beats: list[int] = []
        self._gappy: set[str] = set()
        self.last_beat = 0
        """The highest beat."""

    def __len__(self) -> int:
        return len(self._lines)

    def own(self, writer: str, ids: Intervals) -> None:
        """These are edges of the writer, and told."""
        if ids:
            self._lines[writer].sent = self._lines[writer].sent.union(ids)
            self._gappy.add(writer)

    def beat(self, id: int) -> None:
        self._beats.append(id)
        self._beats.sort()
        self.last_beat = self._beats[-1]
        self._gappy.update(self._lines)

    def end(self, writer: str) -> None:
        """Its line goes no further, and is told by a RETIRE or a JOIN."""
        self._lines.pop(writer, None)
        self._gappy.discard(writer)

    def behind(self, head: int) -> bool:
        """Whether a line ends below `head`, and no beat is on its way."""
        return head > self.last_beat and any(line.sent.reach(line.last) < head for line in self._lines.values())

    def announce(self, open_to: Callable[[str], Intervals]) -> list[EmptyRange]:
        """What lies between neighbouring cuts, was not told, and is not open to its writer."""
        found = list[EmptyRange]()
        for writer in sorted(self._gappy):
            line = self._lines[writer]
            gaps = self._gaps(line)
            open_ = open_to(writer) if gaps else EMPTY
            ready = [gap for gap in gaps if not open_.within(*gap)]
            found += (EmptyRange(writer, *gap) for gap in ready)
            line.sent = line.sent.union(Intervals.of(ready))
            if len(ready) == len(gaps):
                self._gappy.discard(writer)
        return found

    def _gaps(self, line: _WriterChain) -> list[tuple[int, int]]:
        top = max([line.last, self.last_beat, *line.sent.highs[-1:].tolist()])
        gaps = list[tuple[int, int]]()
        for low, high in line.sent.missing(line.last, top):
            cuts = [low, *(beat for beat in self._beats if low < beat < high), high]
            gaps += pairwise(cuts)
        return gaps

    def acknowledged(self, writer: str, ids: Intervals) -> None:
        """Kafka has these edges of the writer."""
        if (line := self._lines.get(writer)) is not None:
            line.acknowledged = line.acknowledged.union(ids)

    def floor(self, reached: int) -> int:
        """The highest ID up to `reached` below which every line is in Kafka, as far as it is cut there."""
        return min([reached, *map(self._limit, self._lines.values())])

    def settled(self, floor: int) -> None:
        """The floor was raised to where all of this is in Kafka."""
        self._beats = [beat for beat in self._beats if beat > floor]

    def _limit(self, line: _WriterChain) -> int:
        position = line.acknowledged.reach(line.last)
        if line.sent.reach(line.last) > position:
            return position
        above = line.sent.above(position)
        cuts = [*above.lows[:1].tolist(), *(beat - 1 for beat in self._beats if beat > position)]
        return min(cuts, default=2**63 - 1)


def edges(announced: Iterable[EmptyRange]) -> dict[str, Intervals]:
    """The same by writer."""
    found: dict[str, list[tuple[int, int]]] = {}
    for each in announced:
        found.setdefault(each.writer, []).append((each.prev, each.id))
    return {writer: Intervals.of(parts) for writer, parts in found.items()}
