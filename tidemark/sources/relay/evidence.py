"""What became of the IDs of one stream, by evidence from its database (docs/design.md 4b). Pure; magnitudes only.

Three queries, in this order: how far IDs were given out (the *head*); which transactions run, and if necessary which of
them hold the lock of which writer; the rows of the outbox, in a later snapshot than both. Each transaction that
reserved an ID up to the head either ran and held the lock of its writer at the second query, or had ended. So when all
those transactions have ended, an ID that has no row in the outbox has no fact for ever. An ID that only other writers
can have is not this writer's.

What is remembered between two observations only saves reading again. It is no evidence: a relay that begins with
nothing decides the same.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tidemark.streaming.values.intervals import EMPTY, Intervals

LockHolder = tuple[int, int | None]
"""A transaction, and the number of the writer whose lock it holds: None where nobody has asked."""

RANGES_AT_ONCE = 2000
_ASKED_EVERY = 20
_MARKS = 32
"""Marks kept; past it the two oldest are one, which waits for the transactions of both."""


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
        """The same after some have ended."""
        if lock_holders is None:
            waiting = frozenset(each for each in self.waiting if each[0] in running)
        else:
            unasked = {transaction for transaction, writer in self.waiting if writer is None}
            waiting = frozenset(each for each in lock_holders if each[0] in unasked or each in self.waiting)
        if _transactions(waiting) == _transactions(self.waiting):
            return replace(self, waiting=waiting)
        return _Mark(waiting, self.unread.union(self.absent))

    def with_(self, other: "_Mark") -> "_Mark":
        return _Mark(self.waiting | other.waiting, self.unread.union(other.unread), self.absent.union(other.absent))


class StreamEvidence:
    """The evidence of one connection: after a crash of the server, numbers of transactions and IDs may come again.

    With `several` writers it matters whose locks a transaction holds.
    """

    def __init__(self, floor: int, *, several: bool = False) -> None:
        self.floor = floor
        self.head = floor
        self._several = several
        self._marks: list[_Mark] = []
        self._waited_for: frozenset[LockHolder] = frozenset()
        self._holders: frozenset[int] = frozenset()
        self._looks = 0

    @property
    def open(self) -> bool:
        """Whether an ID up to the head is not decided."""
        return bool(self._marks)

    @property
    def undecided(self) -> int:
        """How many IDs up to the head are not decided."""
        return sum(mark.unread.width() + mark.absent.width() for mark in self._marks)

    @property
    def complete(self) -> int:
        """Up to here every ID is decided."""
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
            unknown = any(writer is None for _, writer in self._waited_for)
        else:
            unknown = not _transactions(self._waited_for) <= self._holders
        return unknown or (bool(self._waited_for) and self._looks >= _ASKED_EVERY)

    def observe(self, head: int, running: frozenset[int], lock_holders: frozenset[LockHolder] | None = None) -> None:
        """`head` was read first, then both others: `running` of the snapshot, and the `holders` among them."""
        self._looks += 1
        if lock_holders is not None:
            self._holders, self._looks = frozenset(_transactions(lock_holders)), 0
        marks = [mark.only(running, lock_holders) for mark in self._marks]
        self._waited_for = frozenset().union(*(mark.waiting for mark in marks))
        if head > self.head:
            who = frozenset((each, None) for each in running) if lock_holders is None else lock_holders
            marks.append(_Mark(who, Intervals.of([(self.head, head)])))
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
        """Where the outbox is to be read next; the lowest come first."""
        found = EMPTY
        for mark in self._marks:
            found = found.union(mark.unread)
        return found.lowest(RANGES_AT_ONCE)

    def open_to(self, writers: Collection[int] | None) -> Intervals:
        """The undecided IDs that may belong to a writer with one of these numbers; with None, to any writer."""
        found = EMPTY
        for mark in self._marks:
            found = found.union(mark.unread)
            if writers is None or any(writer is None or writer in writers for _, writer in mark.waiting):
                found = found.union(mark.absent)
        return found

    def read(self, asked: Intervals, found: Collection[int], settled: int = 0) -> Intervals:
        """The outbox has `found` of what lies in `asked`, and nothing below the floor; gives the IDs without a fact.

        IDs up to `settled` are decided, whatever the outbox has: their rows were deleted.
        """
        present = Intervals.from_ids(np.fromiter(found, np.int64, len(found)))
        if settled:
            present = present.union(Intervals.of([(0, settled)]))
        voids, kept = EMPTY, list[_Mark]()
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
                kept.append(_Mark(mark.waiting, unread, absent))
        self._marks = kept
        return voids


def _transactions(lock_holders: Collection[LockHolder]) -> set[int]:
    return {transaction for transaction, _ in lock_holders}


def ids_of(voids: Intervals) -> Iterator[int]:
    """Each ID of the intervals."""
    return (id for low, high in voids for id in range(low + 1, high + 1))
