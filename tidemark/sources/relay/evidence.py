"""The outcome of the IDs of one stream, by evidence from its database (docs/design.md 4b). Pure; magnitudes only.

Three queries run in this order: the highest ID that was given out (the *head*); the running transactions, and if
necessary the writer locks that they hold; the rows of the outbox, in a later snapshot than the others. A transaction
that reserved an ID up to the head either ran and held the lock of its writer at the second query, or had ended. So when
all running transactions have ended, an ID that has no row in the outbox will never have a fact. An ID without a row can
belong to a writer only if one of the running transactions held the writer's lock.

`StreamEvidence` keeps state between two observations only to save queries. A relay that starts without this state makes
the same decisions.

A writer's chain (`WriterChains`) is cut at its own facts and at the *common cuts*: IDs that belong to no writer, with
rows in the outbox. Each fact of the writer is an edge of one ID, which is sent as soon as the fact is committed. The
range between two neighbouring cuts is sent as one announcement, as soon as no ID in the range can belong to the writer.
Then no other cut can come into the range, so every relay sends the same range, whenever it reads the database.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals


class LockOwner(NamedTuple):
    """A transaction that may own undecided IDs, and a writer's lock that the transaction holds.

    Attributes:
        transaction_number: the number of the transaction (64 bits).
        writer_key: the second half of the lock's key; None if the locks were not queried.
        is_exclusive: whether the lock is exclusive. Only a transaction that retires the writer holds an exclusive lock.
    """

    transaction_number: int
    writer_key: int | None = None
    is_exclusive: bool = False


RANGES_AT_ONCE = 2000
"""The largest number of ranges that one query reads from the outbox."""
_LOCK_QUERY_EVERY = 20
"""The largest number of observations between two queries of the locks, while a transaction runs."""
_MAX_GROUPS = 32
"""The largest number of groups of undecided IDs. Above this number, the two oldest groups are merged. The merged group
has the possible owners of both groups."""


@dataclass(frozen=True, slots=True)
class _UndecidedGroup:
    """Undecided IDs with the same possible owners.

    Attributes:
        owners: the transactions that may own the IDs and have not ended.
        unread_ids: the IDs for which the outbox was not read since a transaction last left `owners`.
        absent_ids: the IDs for which the outbox was read since a transaction last left `owners`, and had no row.
    """

    owners: frozenset[LockOwner]
    unread_ids: Intervals
    absent_ids: Intervals = NO_INTERVALS

    def without_ended(
        self, running_transactions: frozenset[int], lock_owners: frozenset[LockOwner] | None
    ) -> "_UndecidedGroup":
        """A copy without the owners that have ended. If the locks were queried, owners without a lock are left out too.

        If a transaction has left `owners`, the outbox must be read again: all IDs of the copy are `unread_ids`.
        """
        if lock_owners is None:
            owners = frozenset(lock for lock in self.owners if lock.transaction_number in running_transactions)
        else:
            transactions_without_writer = {lock.transaction_number for lock in self.owners if lock.writer_key is None}
            owners = frozenset(
                lock
                for lock in lock_owners
                if lock.transaction_number in transactions_without_writer or lock in self.owners
            )
        if _transaction_numbers(owners) == _transaction_numbers(self.owners):
            return replace(self, owners=owners)
        return _UndecidedGroup(owners, self.unread_ids.union(self.absent_ids))

    def merge(self, other: "_UndecidedGroup") -> "_UndecidedGroup":
        return _UndecidedGroup(
            self.owners | other.owners, self.unread_ids.union(other.unread_ids), self.absent_ids.union(other.absent_ids)
        )


class StreamEvidence:
    """The evidence for the IDs of one stream, observed on one connection. A new connection needs new evidence: after a
    crash the server reuses transaction numbers and IDs.

    Attributes:
        floor: every ID up to the floor is decided, and Kafka has the records. Set by the caller.
        head: the highest ID that was given out, at the last observation.

    Args:
        floor: the first value of `floor` and of `head`.
        has_several_writers: whether the stream has several writers. Then the locks show to which writer an ID may
            belong.
    """

    def __init__(self, floor: int, *, has_several_writers: bool = False) -> None:
        self.floor = floor
        self.head = floor
        self._has_several_writers = has_several_writers
        self._groups: list[_UndecidedGroup] = []
        self._owners: frozenset[LockOwner] = frozenset()
        self._locking_transactions: frozenset[int] = frozenset()
        self._observations_since_lock_query = 0

    @property
    def has_undecided(self) -> bool:
        """Whether an ID up to the head is not decided."""
        return bool(self._groups)

    @property
    def undecided_count(self) -> int:
        """The number of IDs up to the head that are not decided."""
        return sum(group.unread_ids.width() + group.absent_ids.width() for group in self._groups)

    @property
    def decided_upto(self) -> int:
        """The highest ID up to which every ID is decided."""
        parts = [part for group in self._groups for part in (group.unread_ids, group.absent_ids) if part]
        return min([self.head, *(int(part.lows[0]) for part in parts)])

    @property
    def has_unread(self) -> bool:
        """Whether `unread_ranges` is not empty: the outbox can be read now, before another transaction ends."""
        return any(group.unread_ids for group in self._groups)

    @property
    def needs_locks(self) -> bool:
        """Whether the locks must be queried: a transaction still runs, and its locks are not known.

        A transaction usually holds a lock until it ends, so known locks are queried again only every
        `_LOCK_QUERY_EVERY` observations.
        """
        if self._has_several_writers:
            unknown = any(lock.writer_key is None for lock in self._owners)
        else:
            unknown = not _transaction_numbers(self._owners) <= self._locking_transactions
        return unknown or (bool(self._owners) and self._observations_since_lock_query >= _LOCK_QUERY_EVERY)

    def observe(
        self, head: int, running_transactions: frozenset[int], lock_owners: frozenset[LockOwner] | None = None
    ) -> None:
        """Add an observation. The three values must be read in the order of the arguments.

        Args:
            head: the highest ID of the stream that was given out.
            running_transactions: the numbers of the running transactions.
            lock_owners: the running transactions that hold locks of the stream's writers; None if not queried.
        """
        self._observations_since_lock_query += 1
        if lock_owners is not None:
            self._locking_transactions = frozenset(_transaction_numbers(lock_owners))
            self._observations_since_lock_query = 0
        groups = [group.without_ended(running_transactions, lock_owners) for group in self._groups]
        self._owners = frozenset().union(*(group.owners for group in groups))
        if head > self.head:
            owners = frozenset(map(LockOwner, running_transactions)) if lock_owners is None else lock_owners
            groups.append(_UndecidedGroup(owners, Intervals.of([(self.head, head)])))
            self.head = head
        by_owners: dict[frozenset[LockOwner], _UndecidedGroup] = {}
        for group in groups:
            known = by_owners.get(group.owners)
            by_owners[group.owners] = group if known is None else known.merge(group)
        self._groups = [*by_owners.values()]
        while len(self._groups) > _MAX_GROUPS:
            first, second, *rest = self._groups
            self._groups = [first.merge(second), *rest]

    def unread_ranges(self) -> Intervals:
        """The ID ranges of the outbox to read next, in ascending order; at most `RANGES_AT_ONCE`."""
        ids = NO_INTERVALS
        for group in self._groups:
            ids = ids.union(group.unread_ids)
        return ids.lowest(RANGES_AT_ONCE)

    def undecided_ids(self, writers: Collection[int] | None) -> Intervals:
        """The undecided IDs that may belong to a writer.

        If the writer may retire at an undecided ID, all higher IDs count as undecided too: a range that was announced
        above that ID would contradict the RETIRE.

        Args:
            writers: the second halves of the keys of the writer's locks. None for the database's own writer: any ID may
                belong to this writer, and it never retires.
        """
        undecided, end = NO_INTERVALS, self.head
        for group in self._groups:
            owners = [
                lock
                for lock in group.owners
                if writers is None or lock.writer_key is None or lock.writer_key in writers
            ]
            ids = group.unread_ids.union(group.absent_ids) if owners else group.unread_ids
            undecided = undecided.union(ids)
            if any(owner.is_exclusive or owner.writer_key is None for owner in owners):
                end = min([end, *ids.lows[:1].tolist()])
            else:
                end = min([end, *group.unread_ids.lows[:1].tolist()])
        return (
            undecided
            if writers is None
            else undecided.union(Intervals.of([(end, self.head)] if end < self.head else []))
        )

    def note_rows(self, ranges: Intervals, ids: Collection[int], deleted_upto: int = 0) -> Intervals:
        """Record which rows the outbox has. The IDs that have a row are decided.

        Args:
            ranges: the IDs that were queried.
            ids: the IDs of all rows in the ranges.
            deleted_upto: every ID up to this one counts as decided, because its row may have been deleted; 0 for none.

        Returns:
            The IDs that are decided by this call and have no fact.
        """
        present = Intervals.from_ids(np.fromiter(ids, np.int64, len(ids)))
        if deleted_upto:
            present = present.union(Intervals.of([(0, deleted_upto)]))
        voids, groups = NO_INTERVALS, list[_UndecidedGroup]()
        for group in self._groups:
            covered = group.unread_ids.intersection(ranges)
            missing = covered.difference(present)
            absent = group.absent_ids.above(deleted_upto)
            if group.owners:
                absent = absent.union(missing)
            else:
                voids = voids.union(missing)
            unread = group.unread_ids.difference(covered)
            if unread or absent:
                groups.append(_UndecidedGroup(group.owners, unread, absent))
        self._groups = groups
        return voids


def _transaction_numbers(lock_owners: Collection[LockOwner]) -> set[int]:
    return {lock.transaction_number for lock in lock_owners}


def iterate_ids(ids: Intervals) -> Iterator[int]:
    """Yield each ID of the intervals."""
    return (id for low, high in ids for id in range(low + 1, high + 1))


class EmptyRange(NamedTuple):
    """A range `(prev, id]` in which the writer has no fact. IDs are magnitudes."""

    writer: str
    prev: int
    id: int


class _WriterChain:
    """The chain of one writer.

    Attributes:
        sent_upto: a cut of the chain. Kafka has everything of the writer up to this ID.
        sent_ids: the IDs beyond `sent_upto` that sent edges cover.
        acknowledged_ids: the IDs beyond `sent_upto` that acknowledged edges cover.
    """

    def __init__(self, sent_upto: int) -> None:
        self.sent_upto = sent_upto
        self.sent_ids = NO_INTERVALS
        self.acknowledged_ids = NO_INTERVALS


class WriterChains:
    """The chains of all writers of a stream.

    Args:
        sent_upto: writer -> the last cut of the writer's chain. Kafka has everything of the writer up to this ID.
    """

    def __init__(self, sent_upto: Mapping[str, int]) -> None:
        self._chains = {writer: _WriterChain(cut) for writer, cut in sent_upto.items()}
        self._common_cuts: list[int] = []
        self._writers_with_unsent_ranges: set[str] = set()
        self.last_common_cut = 0
        """The highest common cut; 0 if none was noted."""

    def __len__(self) -> int:
        return len(self._chains)

    def note_sent(self, writer: str, ids: Intervals) -> None:
        """Record that edges of the writer with these IDs are sent."""
        if ids:
            self._chains[writer].sent_ids = self._chains[writer].sent_ids.union(ids)
            self._writers_with_unsent_ranges.add(writer)

    def note_common_cut(self, id: int) -> None:
        """Record that the outbox has a common cut at `id`."""
        self._common_cuts.append(id)
        self._common_cuts.sort()
        self.last_common_cut = self._common_cuts[-1]
        self._writers_with_unsent_ranges.update(self._chains)

    def end_epoch(self, writer: str) -> None:
        """Remove the chain of a writer whose epoch ends. A RETIRE or a JOIN will settle the writer's remaining IDs."""
        self._chains.pop(writer, None)
        self._writers_with_unsent_ranges.discard(writer)

    def needs_common_cut(self, head: int) -> bool:
        """Whether `head` is beyond the last common cut, and a writer's chain of sent edges ends below `head`."""
        return head > self.last_common_cut and any(
            chain.sent_ids.contiguous_end(chain.sent_upto) < head for chain in self._chains.values()
        )

    def announce(self, undecided_ids: Callable[[str], Intervals]) -> list[EmptyRange]:
        """Return the ranges to announce, and note the ranges as sent.

        A range lies between two neighbouring cuts of a writer's chain, is not sent, and contains no undecided ID of the
        writer.

        Args:
            undecided_ids: returns the undecided IDs that may belong to a writer.
        """
        announced = list[EmptyRange]()
        for writer in sorted(self._writers_with_unsent_ranges):
            chain = self._chains[writer]
            unsent = self._unsent_ranges(chain)
            undecided = undecided_ids(writer) if unsent else NO_INTERVALS
            ready = [bounds for bounds in unsent if not undecided.within(*bounds)]
            announced += (EmptyRange(writer, *bounds) for bounds in ready)
            chain.sent_ids = chain.sent_ids.union(Intervals.of(ready))
            if len(ready) == len(unsent):
                self._writers_with_unsent_ranges.discard(writer)
        return announced

    def _unsent_ranges(self, chain: _WriterChain) -> list[tuple[int, int]]:
        """The ranges `(low, high]` of the chain that were not sent, in ascending order. A range that contains common
        cuts is divided at each cut."""
        top = max([chain.sent_upto, self.last_common_cut, *chain.sent_ids.highs[-1:].tolist()])
        ranges = list[tuple[int, int]]()
        for low, high in chain.sent_ids.missing(chain.sent_upto, top):
            cuts = [low, *(cut for cut in self._common_cuts if low < cut < high), high]
            ranges += pairwise(cuts)
        return ranges

    def note_acknowledged(self, writer: str, ids: Intervals) -> None:
        """Record that Kafka has acknowledged the writer's edges with these IDs. Does nothing if the writer's epoch has
        ended."""
        if (chain := self._chains.get(writer)) is not None:
            chain.acknowledged_ids = chain.acknowledged_ids.union(ids)

    def max_floor(self, limit: int) -> int:
        """The highest ID, at most `limit`, to which the floor can be raised: Kafka has every chain up to that ID."""
        return min([limit, *map(self._floor_limit, self._chains.values())])

    def note_floor(self, floor: int) -> None:
        """Forget the common cuts up to the new floor."""
        self._common_cuts = [cut for cut in self._common_cuts if cut > floor]

    def _floor_limit(self, chain: _WriterChain) -> int:
        """The highest ID to which the floor can be raised with regard to this chain; 2**63 - 1 without a limit."""
        position = chain.acknowledged_ids.contiguous_end(chain.sent_upto)
        if chain.sent_ids.contiguous_end(chain.sent_upto) > position:
            return position
        above = chain.sent_ids.above(position)
        cuts = [*above.lows[:1].tolist(), *(cut - 1 for cut in self._common_cuts if cut > position)]
        return min(cuts, default=2**63 - 1)


def ranges_by_writer(announced: Iterable[EmptyRange]) -> dict[str, Intervals]:
    """Group the ranges: writer -> the IDs of its ranges."""
    by_writer: dict[str, list[tuple[int, int]]] = {}
    for empty_range in announced:
        by_writer.setdefault(empty_range.writer, []).append((empty_range.prev, empty_range.id))
    return {writer: Intervals.of(parts) for writer, parts in by_writer.items()}
