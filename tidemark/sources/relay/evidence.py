"""The outcome of the IDs of one stream, by evidence from its database (docs/design.md 4b). Pure; magnitudes only.

Three queries, in this order: the highest ID that was given out (the *head*); the running transactions, and if necessary
the writer locks that they hold; the rows of the outbox, in a later snapshot than both. Each transaction that reserved
an ID up to the head either ran and held the lock of its writer at the second query, or had ended. So when all those
transactions have ended, an ID that has no row in the outbox will never have a fact. An ID that only other writers can
have is not this writer's.

The state that is kept between two observations only saves queries. It is not evidence: a relay that starts without
state decides the same.

A writer's chain (`WriterChains`) is cut at its own facts and at the *beats*: IDs that belong to no writer, with rows in
the outbox. Each own fact is an edge of one ID, which is sent as soon as it is committed. The range between two
neighbouring cuts is sent as one announcement, once no ID in it can be the writer's. Then no cut can come between the
two, so every relay sends the same range, whenever it reads the database.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tidemark.streaming.values.intervals import EMPTY, Intervals


class LockHolder(NamedTuple):
    """A transaction, and the number of the writer whose lock it holds; None if the locks were not queried. Only a
    transaction that retires the writer holds its lock exclusively."""

    transaction: int
    writer: int | None = None
    exclusive: bool = False


RANGES_AT_ONCE = 2000
_ASKED_EVERY = 20
_MARKS = 32
"""The largest number of marks. Beyond it, the two oldest marks are merged into one that waits for the transactions of
both."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """IDs that were given out before one observation of the running transactions, and are not decided.

    `waiting`: transactions that may own them and have not ended. `absent` IDs were not in the outbox when it was read
    after `waiting` last shrank; `unread` IDs were not read since.
    """

    waiting: frozenset[LockHolder]
    unread: Intervals
    absent: Intervals = EMPTY

    def only(self, running: frozenset[int], lock_holders: frozenset[LockHolder] | None) -> "_Mark":
        """A copy that waits only for the transactions that still run and hold a lock."""
        if lock_holders is None:
            waiting = frozenset(lock for lock in self.waiting if lock.transaction in running)
        else:
            unasked = {lock.transaction for lock in self.waiting if lock.writer is None}
            waiting = frozenset(lock for lock in lock_holders if lock.transaction in unasked or lock in self.waiting)
        if _transactions(waiting) == _transactions(self.waiting):
            return replace(self, waiting=waiting)
        return _Mark(waiting, self.unread.union(self.absent))

    def with_(self, other: "_Mark") -> "_Mark":
        return _Mark(self.waiting | other.waiting, self.unread.union(other.unread), self.absent.union(other.absent))


class StreamEvidence:
    """The evidence of one connection. A new connection needs new evidence: after a crash the server reuses transaction
    numbers and IDs.

    `several`: the stream has several writers, so locks are evidence too.
    """

    def __init__(self, floor: int, *, several: bool = False) -> None:
        self.floor = floor
        self.head = floor
        self._several = several
        self._marks: list[_Mark] = []
        self._waited_for: frozenset[LockHolder] = frozenset()
        self._holders: frozenset[int] = frozenset()
        self._observations = 0

    @property
    def open(self) -> bool:
        """Whether an ID up to the head is not decided."""
        return bool(self._marks)

    @property
    def undecided(self) -> int:
        """The number of IDs up to the head that are not decided."""
        return sum(mark.unread.width() + mark.absent.width() for mark in self._marks)

    @property
    def complete(self) -> int:
        """The highest ID up to which every ID is decided."""
        parts = [part for mark in self._marks for part in (mark.unread, mark.absent) if part]
        return min([self.head, *(int(part.lows[0]) for part in parts)])

    @property
    def unseen(self) -> bool:
        """Whether the outbox must be read again, without waiting for a transaction."""
        return any(mark.unread for mark in self._marks)

    @property
    def needs_locks(self) -> bool:
        """Whether the locks must be queried: an ID waits for a transaction that ran already at the last observation.

        A transaction that held the lock usually holds it until it ends, so the query is repeated rarely.
        """
        if self._several:
            unknown = any(lock.writer is None for lock in self._waited_for)
        else:
            unknown = not _transactions(self._waited_for) <= self._holders
        return unknown or (bool(self._waited_for) and self._observations >= _ASKED_EVERY)

    def observe(self, head: int, running: frozenset[int], lock_holders: frozenset[LockHolder] | None = None) -> None:
        """Add an observation. `head` was read first, then the `running` transactions and their locks."""
        self._observations += 1
        if lock_holders is not None:
            self._holders, self._observations = frozenset(_transactions(lock_holders)), 0
        marks = [mark.only(running, lock_holders) for mark in self._marks]
        self._waited_for = frozenset().union(*(mark.waiting for mark in marks))
        if head > self.head:
            owners = frozenset(map(LockHolder, running)) if lock_holders is None else lock_holders
            marks.append(_Mark(owners, Intervals.of([(self.head, head)])))
            self.head = head
        by_owners: dict[frozenset[LockHolder], _Mark] = {}
        for mark in marks:
            known = by_owners.get(mark.waiting)
            by_owners[mark.waiting] = mark if known is None else known.with_(mark)
        self._marks = [*by_owners.values()]
        while len(self._marks) > _MARKS:
            first, second, *rest = self._marks
            self._marks = [first.with_(second), *rest]

    def unread(self) -> Intervals:
        """The ID ranges of the outbox to read next, in ascending order."""
        ids = EMPTY
        for mark in self._marks:
            ids = ids.union(mark.unread)
        return ids.lowest(RANGES_AT_ONCE)

    def open_to(self, writers: Collection[int] | None) -> Intervals:
        """The undecided IDs that may belong to a writer with one of these numbers; with None, to any writer.

        If such a writer may end at an undecided ID, all IDs beyond are open to it too: its RETIRE there would
        contradict a range beyond. The database itself (None) never retires.
        """
        undecided, end = EMPTY, self.head
        for mark in self._marks:
            owners = [lock for lock in mark.waiting if writers is None or lock.writer is None or lock.writer in writers]
            ids = mark.unread.union(mark.absent) if owners else mark.unread
            undecided = undecided.union(ids)
            if any(owner.exclusive or owner.writer is None for owner in owners):
                end = min([end, *ids.lows[:1].tolist()])
            else:
                end = min([end, *mark.unread.lows[:1].tolist()])
        return (
            undecided
            if writers is None
            else undecided.union(Intervals.of([(end, self.head)] if end < self.head else []))
        )

    def read(self, asked: Intervals, ids: Collection[int], settled: int = 0) -> Intervals:
        """Note that `ids` are all rows of the outbox in the ranges `asked`. Returns the IDs without a fact.

        IDs up to `settled` count as decided, because their rows were deleted.
        """
        present = Intervals.from_ids(np.fromiter(ids, np.int64, len(ids)))
        if settled:
            present = present.union(Intervals.of([(0, settled)]))
        voids, marks = EMPTY, list[_Mark]()
        for mark in self._marks:
            covered = mark.unread.common(asked)
            missing = covered.difference(present)
            absent = mark.absent.above(settled)
            if mark.waiting:
                absent = absent.union(missing)
            else:
                voids = voids.union(missing)
            unread = mark.unread.difference(covered)
            if unread or absent:
                marks.append(_Mark(mark.waiting, unread, absent))
        self._marks = marks
        return voids


def _transactions(lock_holders: Collection[LockHolder]) -> set[int]:
    return {lock.transaction for lock in lock_holders}


def ids_of(voids: Intervals) -> Iterator[int]:
    """Each ID of the intervals."""
    return (id for low, high in voids for id in range(low + 1, high + 1))


class EmptyRange(NamedTuple):
    """The range `(prev, id]` has no fact of the writer."""

    writer: str
    prev: int
    id: int


class _WriterChain:
    def __init__(self, last: int) -> None:
        self.last = last
        self.sent = EMPTY
        self.acknowledged = EMPTY


class WriterChains:
    """`lasts`: by writer, the ID of the last cut of its chain. Everything of the writer up to that ID is in Kafka."""

    def __init__(self, lasts: Mapping[str, int]) -> None:
        self._chains = {writer: _WriterChain(last) for writer, last in lasts.items()}
        self._beats: list[int] = []
        self._gappy: set[str] = set()
        self.last_beat = 0
        """The highest beat."""

    def __len__(self) -> int:
        return len(self._chains)

    def own(self, writer: str, ids: Intervals) -> None:
        """Note that these IDs were sent as edges of the writer."""
        if ids:
            self._chains[writer].sent = self._chains[writer].sent.union(ids)
            self._gappy.add(writer)

    def beat(self, id: int) -> None:
        self._beats.append(id)
        self._beats.sort()
        self.last_beat = self._beats[-1]
        self._gappy.update(self._chains)

    def end(self, writer: str) -> None:
        """End the writer's epoch. A RETIRE or JOIN settles its remaining IDs."""
        self._chains.pop(writer, None)
        self._gappy.discard(writer)

    def behind(self, head: int) -> bool:
        """Whether a chain ends below `head` and no beat was written yet."""
        return head > self.last_beat and any(chain.sent.reach(chain.last) < head for chain in self._chains.values())

    def announce(self, open_to: Callable[[str], Intervals]) -> list[EmptyRange]:
        """The unsent ranges between neighbouring cuts in which the writer has no undecided ID."""
        ranges = list[EmptyRange]()
        for writer in sorted(self._gappy):
            chain = self._chains[writer]
            gaps = self._gaps(chain)
            open_ = open_to(writer) if gaps else EMPTY
            ready = [gap for gap in gaps if not open_.within(*gap)]
            ranges += (EmptyRange(writer, *gap) for gap in ready)
            chain.sent = chain.sent.union(Intervals.of(ready))
            if len(ready) == len(gaps):
                self._gappy.discard(writer)
        return ranges

    def _gaps(self, chain: _WriterChain) -> list[tuple[int, int]]:
        top = max([chain.last, self.last_beat, *chain.sent.highs[-1:].tolist()])
        gaps = list[tuple[int, int]]()
        for low, high in chain.sent.missing(chain.last, top):
            cuts = [low, *(beat for beat in self._beats if low < beat < high), high]
            gaps += pairwise(cuts)
        return gaps

    def note_acknowledged(self, writer: str, ids: Intervals) -> None:
        """Note that Kafka has these edges of the writer."""
        if (chain := self._chains.get(writer)) is not None:
            chain.acknowledged = chain.acknowledged.union(ids)

    def floor(self, reached: int) -> int:
        """The highest ID, at most `reached`, up to which Kafka has every chain."""
        return min([reached, *map(self._limit, self._chains.values())])

    def settled(self, floor: int) -> None:
        """Note that the floor was raised: Kafka has everything up to it."""
        self._beats = [beat for beat in self._beats if beat > floor]

    def _limit(self, chain: _WriterChain) -> int:
        position = chain.acknowledged.reach(chain.last)
        if chain.sent.reach(chain.last) > position:
            return position
        above = chain.sent.above(position)
        cuts = [*above.lows[:1].tolist(), *(beat - 1 for beat in self._beats if beat > position)]
        return min(cuts, default=2**63 - 1)


def edges(announced: Iterable[EmptyRange]) -> dict[str, Intervals]:
    """The ranges as edges, by writer."""
    by_writer: dict[str, list[tuple[int, int]]] = {}
    for gap in announced:
        by_writer.setdefault(gap.writer, []).append((gap.prev, gap.id))
    return {writer: Intervals.of(parts) for writer, parts in by_writer.items()}
