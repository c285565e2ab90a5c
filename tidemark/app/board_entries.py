"""What a board shows of each stream, and of all of them in one number. Kept up with each change, so that a scrape looks
at no stream that has no series of its own and of which nothing is to be told. Not for threads.
"""

from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import merge, nsmallest

from tidemark.streaming.core import codec as state
from tidemark.streaming.core.effects import StreamEffects, Summary, summarize
from tidemark.streaming.core.fast_path import at_rest
from tidemark.streaming.core.store import ShardedStates

QUIET = Summary(0, 0, None, [], 0, None)
"""Of a stream of which nothing is to be told: one for all of them."""


@dataclass(slots=True)
class BoardEntry:
    """`positions` are those of the writers that have not retired."""

    linear: int
    allocated: int
    positions: dict[str, int]
    summary: Summary

    @classmethod
    def of(cls, stored: bytes) -> "BoardEntry":
        if (resting := at_rest(stored)) is not None:
            return cls(resting.line, resting.line, resting.positions, QUIET)
        stream = state.decode(stored)
        signed = stream.direction.signed
        positions = {name: signed(it.position) for name, it in stream.writers.items() if it.retired is None}
        return cls(signed(stream.line.position), signed(stream.allocated), positions, summarize(stream))

    @property
    def ended(self) -> bool:
        """All writers have retired, and nobody is waited for."""
        return not self.positions and not self.summary.unknown


class BoardEntries:
    """Streams that have not ended, by name. `first` names the first `most` of them, the `preferred` before all.

    `linear`, `allocated` and `positions` are sums, of `writers` positions; `restless` are those that are not quiet.
    `version` changes as streams come and go; `ended` are those that have. Those at rest stay among the `stored` states,
    with which they began, until they change or somebody looks: there may be a million of them.
    """

    def __init__(self, most: int, stored: ShardedStates) -> None:
        self.restless: dict[str, BoardEntry] = {}
        self.linear = self.allocated = self.positions = self.writers = 0
        self.version = 0
        self.ended: set[str] = set()
        self._streams = 0
        self._stored = stored
        self._open: dict[str, BoardEntry] = {}
        self._most = most
        self._preferred: Collection[str] = ()
        self._first: list[tuple[bool, str]] | None = None
        for name, data in stored.items():
            entry = BoardEntry.of(data)
            if entry.ended:
                self.ended.add(name)
                continue
            self._streams += 1
            self._count(name, entry, 1)
            if entry.summary is not QUIET:
                self._open[name] = entry

    def __len__(self) -> int:
        return self._streams

    def __getitem__(self, name: str) -> BoardEntry:
        """Raises KeyError."""
        entry = self._find(name)
        if entry is None:
            raise KeyError(name)
        return entry

    def __iter__(self) -> Iterator[str]:
        yield from self._open
        yield from (name for name in self._stored.names() if name not in self._open and name not in self.ended)

    def update(self, stream: StreamEffects) -> None:
        name = stream.stream
        known = self._find(name)
        entry = known or BoardEntry(0, 0, {}, QUIET)
        if known is not None:
            self._count(name, known, -1)
        entry.linear, entry.allocated, entry.summary = stream.linear, stream.allocated, stream.summary
        for row in stream.writers:
            if row.retired:
                entry.positions.pop(row.writer, None)
            else:
                entry.positions[row.writer] = row.position
        if entry.ended:
            if name not in self.ended:
                self._end(name)
            return
        self._count(name, entry, 1)
        if known is None:
            self._begin(name, entry)

    def prefer(self, names: Collection[str]) -> None:
        self._preferred, self._first = names, None

    def first(self) -> list[str]:
        if self._first is None:
            found = [(False, name) for name in sorted(self._preferred) if self._find(name) is not None]
            last = None
            for name in merge(self._stored.names(), nsmallest(self._most + len(found), self._open)):
                if len(found) >= self._most:
                    break
                if name != last and name not in self.ended and name not in self._preferred:
                    found.append((True, name))
                last = name
            self._first = found[: self._most]
        return [name for _, name in self._first]

    def _find(self, name: str) -> BoardEntry | None:
        if (entry := self._open.get(name)) is not None or name in self.ended:
            return entry
        if (data := self._stored.get(name)) is None:
            return None
        self._open[name] = found = BoardEntry.of(data)
        return found

    def _begin(self, name: str, entry: BoardEntry) -> None:
        self._open[name] = entry
        self.ended.discard(name)
        self._streams += 1
        self.version += 1
        if self._first is not None:
            insort(self._first, self._rank(name))
            del self._first[self._most :]

    def _end(self, name: str) -> None:
        self.ended.add(name)
        self.version += 1
        if self._open.pop(name, None) is not None:
            self._streams -= 1
            if self._first and self._rank(name) <= self._first[-1]:
                self._first = None  # another moves up

    def _rank(self, name: str) -> tuple[bool, str]:
        return name not in self._preferred, name

    def _count(self, name: str, entry: BoardEntry, sign: int) -> None:
        self.linear += sign * entry.linear
        self.allocated += sign * entry.allocated
        self.positions += sign * sum(entry.positions.values())
        self.writers += sign * len(entry.positions)
        if entry.summary is QUIET:
            return
        if entry.summary == QUIET:
            entry.summary = QUIET
        elif sign > 0:
            self.restless[name] = entry
        else:
            del self.restless[name]
