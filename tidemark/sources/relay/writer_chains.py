"""The chains of the writers of one stream with several writers (docs/design.md 4b). Pure; magnitudes only.

A writer's chain is cut at its own facts and at the *beats*: IDs that belong to no writer, and stand in the outbox like
facts. Each own fact is an edge of one ID, which is sent as soon as it is committed. The range between two neighbouring
cuts is sent as one announcement, once no ID in it can be the writer's. Then no cut can come between the two, so every
relay sends the same range, whenever it reads the database.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from tidemark.streaming.values.intervals import EMPTY, Intervals


class EmptyRange(NamedTuple):
    """No fact of the writer is in `(prev, id]`."""

    writer: str
    prev: int
    id: int


class _WriterChain:
    def __init__(self, last: int) -> None:
        self.last = last
        self.sent = EMPTY
        self.acknowledged = EMPTY


class WriterChains:
    """`lasts`: by writer, where its chain was last cut. Everything of the writer up to there is in Kafka."""

    def __init__(self, lasts: Mapping[str, int]) -> None:
        self._chains = {writer: _WriterChain(last) for writer, last in lasts.items()}
        self._beats: list[int] = []
        self._gappy: set[str] = set()
        self.last_beat = 0
        """The highest beat."""

    def __len__(self) -> int:
        return len(self._chains)

    def own(self, writer: str, ids: Intervals) -> None:
        """These IDs are edges of the writer, and are sent."""
        if ids:
            self._chains[writer].sent = self._chains[writer].sent.union(ids)
            self._gappy.add(writer)

    def beat(self, id: int) -> None:
        self._beats.append(id)
        self._beats.sort()
        self.last_beat = self._beats[-1]
        self._gappy.update(self._chains)

    def end(self, writer: str) -> None:
        """The writer's epoch ends; a RETIRE or JOIN settles the rest."""
        self._chains.pop(writer, None)
        self._gappy.discard(writer)

    def behind(self, head: int) -> bool:
        """Whether a chain ends below `head`, and no beat is on its way."""
        return head > self.last_beat and any(chain.sent.reach(chain.last) < head for chain in self._chains.values())

    def announce(self, open_to: Callable[[str], Intervals]) -> list[EmptyRange]:
        """The ranges between neighbouring cuts that were not sent and have no undecided ID of their writer."""
        found = list[EmptyRange]()
        for writer in sorted(self._gappy):
            chain = self._chains[writer]
            gaps = self._gaps(chain)
            open_ = open_to(writer) if gaps else EMPTY
            ready = [gap for gap in gaps if not open_.within(*gap)]
            found += (EmptyRange(writer, *gap) for gap in ready)
            chain.sent = chain.sent.union(Intervals.of(ready))
            if len(ready) == len(gaps):
                self._gappy.discard(writer)
        return found

    def _gaps(self, chain: _WriterChain) -> list[tuple[int, int]]:
        top = max([chain.last, self.last_beat, *chain.sent.highs[-1:].tolist()])
        gaps = list[tuple[int, int]]()
        for low, high in chain.sent.missing(chain.last, top):
            cuts = [low, *(beat for beat in self._beats if low < beat < high), high]
            gaps += pairwise(cuts)
        return gaps

    def acknowledged(self, writer: str, ids: Intervals) -> None:
        """Kafka has these edges of the writer."""
        if (chain := self._chains.get(writer)) is not None:
            chain.acknowledged = chain.acknowledged.union(ids)

    def floor(self, reached: int) -> int:
        """The highest ID up to `reached` below which each chain is in Kafka, as far as it is cut."""
        return min([reached, *map(self._limit, self._chains.values())])

    def settled(self, floor: int) -> None:
        """The floor was raised to where all of this is in Kafka."""
        self._beats = [beat for beat in self._beats if beat > floor]

    def _limit(self, chain: _WriterChain) -> int:
        position = chain.acknowledged.reach(chain.last)
        if chain.sent.reach(chain.last) > position:
            return position
        above = chain.sent.above(position)
        cuts = [*above.lows[:1].tolist(), *(beat - 1 for beat in self._beats if beat > position)]
        return min(cuts, default=2**63 - 1)


def edges(announced: Iterable[EmptyRange]) -> dict[str, Intervals]:
    """The same by writer."""
    found: dict[str, list[tuple[int, int]]] = {}
    for each in announced:
        found.setdefault(each.writer, []).append((each.prev, each.id))
    return {writer: Intervals.of(parts) for writer, parts in found.items()}
