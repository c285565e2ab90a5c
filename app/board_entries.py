"""What a board shows of each stream, and of all of them in one number. Kept up with each change, so that a scrape looks
at no stream that has no series of its own and of which nothing is to be told. Not for threads.
"""

from bisect import insort
from collections.abc import Container, Iterator
from dataclasses import dataclass
from heapq import nsmallest

from tidemark.streaming.effects import StreamEffects, Summary

QUIET = Summary(0, 0, None, [], 0, None)
"""Of a stream of which nothing is to be told: one for all of them."""


@dataclass(slots=True)
class BoardEntry:
    """`positions` are those of the writers that have not retired."""

    linear: int
    allocated: int
    positions: dict[str, int]
    summary: Summary

    @property
    def ended(self) -> bool:
        """All writers have retired, and nobody is waited for."""
        return not self.positions and not self.summary.unknown


class BoardEntries:
    """Streams that have not ended, by name. `first` names the first `most` of them, the `preferred` before all.

    `linear`, `allocated` and `positions` are sums, of `writers` positions; `restless` are those that are not quiet.
    `version` changes as streams come and go.
    """

    def __init__(self, most: int) -> None:
        self.restless: dict[str, BoardEntry] = {}
        self.linear = self.allocated = self.positions = self.writers = 0
        self.version = 0
        self._all: dict[str, BoardEntry] = {}
        self._most = most
        self._preferred: Container[str] = ()
        self._first: list[tuple[bool, str]] | None = []

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __getitem__(self, name: str) -> BoardEntry:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def put(self, name: str, entry: BoardEntry) -> None:
        """A stream that is not here. One that has ended is left out."""
        if entry.ended:
            return
        self._all[name] = entry
        self._count(name, entry, 1)
        self.version += 1
        if self._first is not None:
            insort(self._first, self._rank(name))
            del self._first[self._most :]

    def update(self, stream: StreamEffects) -> None:
        name = stream.stream
        known = self._all.get(name)
        entry = known or BoardEntry(0, 0, {}, QUIET)
        if known is not None:
            self._count(name, known, -1)
        entry.linear, entry.allocated, entry.summary = stream.linear, stream.allocated, stream.summary
        for row in stream.writers:
            if row.retired:
                entry.positions.pop(row.writer, None)
            else:
                entry.positions[row.writer] = row.position
        if known is None:
            self.put(name, entry)
        elif entry.ended:
            self._drop(name)
        else:
            self._count(name, entry, 1)

    def prefer(self, names: Container[str]) -> None:
        self._preferred, self._first = names, None

    def first(self) -> list[str]:
        if self._first is None:
            self._first = nsmallest(self._most, map(self._rank, self._all))
        return [name for _, name in self._first]

    def _drop(self, name: str) -> None:
        del self._all[name]
        self.version += 1
        if self._first and self._rank(name) <= self._first[-1]:
            self._first = None  # another moves up

    def _rank(self, name: str) -> tuple[bool, str]:
        return name not in self._preferred, name

    def _count(self, name: str, entry: BoardEntry, sign: int) -> None:
        self.linear += sign * entry.linear
        self.allocated += sign * entry.allocated
        self.positions += sign * sum(entry.positions.values())
        self.writers += sign * len(entry.positions)
        if entry.summary == QUIET:
            entry.summary = QUIET
        elif sign > 0:
            self.restless[name] = entry
        else:
            del self.restless[name]
