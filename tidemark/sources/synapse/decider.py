"""Decides the position and the facts of each writer of one Synapse stream (docs/how-to/synapse.md). Pure.

IDs are magnitudes. The decision needs three kinds of evidence:

- *The position that a writer announces* on the channel: all IDs of the writer up to this ID are complete. Synapse
  reserves an ID before it opens the transaction that uses the ID. So the database alone cannot show which IDs are
  reserved.
- *The table*: the facts and their writers. Lines on the channel may be lost, but a committed row is in the table.
- *The running transactions*: a killed process leaves transactions that may commit after the process's successor has
  announced a position. So a position that may come from a successor gets a *barrier*: the transactions that ran when
  the position was received. The position takes effect when all these transactions have ended.

Repeated, late or reordered positions are harmless, because only the highest position has an effect. A position beyond
the IDs that the sequence has given out is discarded. Then the writer does not advance until it announces another
position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from msgspec import Raw

from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.wire.records import DatabaseStart, Join, Position, Rdata, Record, Retire

MASTER = "master"
"""The name of the main process. Old rows of the main process have no writer."""


@dataclass(frozen=True, slots=True)
class StreamFact:
    """A fact of a stream.

    Attributes:
        id: the ID of the fact (a magnitude).
        writer: the writer of the fact; empty if the table does not name the writer.
        rows: the rows of the fact as JSON texts; empty if only the fact's identity was read.
        marks: a hash of each row's identity; empty for a fact that was received on the channel.
        is_proof: whether no other history of the database can have a fact with these marks.
    """

    id: int
    writer: str
    rows: Sequence[str]
    marks: frozenset[int] = field(default=frozenset(), compare=False)
    is_proof: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ProvenAdvance:
    """An advance of a writer: all transactions of the writer with IDs in `(prev, id]` have ended.

    Attributes:
        writer: the name of the writer.
        prev: the ID before the range.
        id: the last ID of the range.
        facts: the writer's known facts in the range, in ascending order of their IDs.
        is_unseen: whether the range may contain facts of the writer that are not in `facts`.
    """

    writer: str
    prev: int
    id: int
    facts: Sequence[StreamFact]
    is_unseen: bool = False


@dataclass(frozen=True, slots=True)
class WriterEncoder:
    """Makes the records of a writer in one epoch. Methods take magnitudes; the records have signed IDs."""

    stream: str
    writer: str
    epoch: int
    direction: Direction
    timeline: DatabaseStart

    def join(self, id: int, *, unseen: bool = False) -> Join:
        """Make the JOIN record. `unseen`: the IDs up to `id` may have facts that were not published."""
        signed = self.direction.signed(id)
        return Join(
            stream=self.stream,
            writer=self.writer,
            epoch=self.epoch,
            id=signed,
            unseen=unseen and id > 0,
            timeline=self.timeline,
        )

    def retire(self, id: int) -> Retire:
        """Make the RETIRE record. `id`: the last position of the writer."""
        return Retire(stream=self.stream, writer=self.writer, epoch=self.epoch, id=self.direction.signed(id))

    def advance(self, advance: ProvenAdvance) -> Iterator[Record]:
        """Yield the records of an advance: the edge of each fact, which begins at the previous fact, and a POSITION for
        the IDs after the last fact.

        If `is_unseen` is set, the edge of each fact has one ID, and there is no POSITION. The caller must settle
        the other IDs with a JOIN in the epoch `epoch + 1`.
        """
        prev, signed = advance.prev, self.direction.signed
        for fact in advance.facts:
            if advance.is_unseen:
                prev = fact.id - 1
            *first, last = (Raw(row.encode()) for row in fact.rows)
            for row in first:
                yield Rdata(stream=self.stream, writer=self.writer, epoch=self.epoch, id="batch", row=row)
            edge = {"prev": signed(prev), "id": signed(fact.id)}
            yield Rdata(stream=self.stream, writer=self.writer, epoch=self.epoch, row=last, **edge)
            prev = fact.id
        if prev < advance.id and not advance.is_unseen:
            edge = {"prev": signed(prev), "id": signed(advance.id)}
            yield Position(stream=self.stream, writer=self.writer, epoch=self.epoch, **edge)


@dataclass(frozen=True, slots=True)
class Barrier:
    """Running transactions that may belong to a dead process of the writer, and may commit IDs up to `head`.

    Attributes:
        head: the highest ID that was given out when the transactions were read.
        transactions: the numbers of the transactions that have not ended.
    """

    head: int
    transactions: frozenset[int]


@dataclass(slots=True)
class SynapseWriter:
    """The state of one writer of the stream."""

    sent_upto: int
    """The writer's published position."""
    announced_position: int = 0
    """The highest position that the writer has announced."""
    is_uncertain: bool = True
    """Whether the next positions may come from a new process of the writer. If so, `observe` adds a barrier."""
    has_announced: bool = False
    """Whether the writer has announced a position since `is_uncertain` was set."""
    barriers: list[Barrier] = field(default_factory=list)
    process_start_id: int = 0
    """IDs beyond this one were given out after the writer's current process started."""
    empty_ranges: Intervals = NO_INTERVALS
    """The ranges beyond the published position that the writer has announced to be empty."""
    must_read_table: bool = False
    """Whether the table must be read, because the announced position has advanced or a barrier has ended."""
    unanswered_requests: int = 0
    """The number of requests for positions that the writer has not answered. The writer may repeat its position this
    many times without being a new process."""
    has_backlog: bool = False
    """Whether the writer may have unpublished facts up to the ID at which the writer joined. These facts are read when
    their transactions have ended."""
    is_retiring: bool = False
    """Whether the writer's retirement was requested, and the writer has announced no position since."""
    final_id: int | None = None
    """The ID at which a retiring writer retires; None if this ID is not known yet."""
    discarded_position: int = 0
    """The announced position that was discarded; 0 if the last position was not discarded."""

    def apply_announced_position(self, id: int, *, is_repeated: bool = False) -> None:
        """Apply an announced position. `is_repeated`: the position is the same as before. Then the worker answers a
        request, or has started."""
        if is_repeated and self.unanswered_requests:
            self.unanswered_requests -= 1
        else:
            self.is_uncertain |= is_repeated
        self.is_retiring = False
        self.discarded_position = 0
        self.has_announced = True
        self.must_read_table |= id > self.sent_upto
        self.announced_position = max(self.announced_position, id)

    def discard_beyond(self, head: int) -> bool:
        """Discard the announced position if it is beyond `head`. Returns whether the position was discarded.

        Such a position shows that the sequence was set back. The position is no evidence for IDs that are given out
        again.

        Args:
            head: the highest ID that was given out, read after the position was received.
        """
        if self.announced_position <= head:
            return False
        self.discarded_position, self.announced_position, self.must_read_table = (
            self.announced_position,
            self.sent_upto,
            False,
        )
        self.is_uncertain, self.has_announced, self.empty_ranges = True, False, NO_INTERVALS
        return True

    @property
    def may_advance(self) -> bool:
        """Whether facts of the writer beyond its published position can be published now."""
        return (
            self.must_read_table
            and self.sent_upto < self.announced_position
            and not (self.is_uncertain or self.has_backlog)
        )

    @property
    def may_send_backlog(self) -> bool:
        """Whether all transactions of the writer with IDs up to the published position have ended."""
        return self.announced_position >= self.sent_upto and not (self.is_uncertain or self.barriers)

    @property
    def can_retire(self) -> bool:
        """Whether a retiring writer can retire now, because all facts of the writer are published."""
        return self.final_id is not None and self.sent_upto >= self.final_id and not self.has_backlog

    @property
    def barrier_head(self) -> int:
        """The highest ID that a transaction of a barrier may still commit; 0 without barriers."""
        return max((barrier.head for barrier in self.barriers), default=0)


WriterPositions = Iterable[tuple[str, int]]
"""Writers, each with a position (a magnitude)."""
MAX_IDS_PER_READ = 5000
"""The largest number of IDs in a range that is read from the tables at once."""
UNBOUNDED = 2**63 - 1
"""A value of `kept_above`: any row may have been deleted."""
MAX_RECEIVED_FACTS = 50_000
"""The largest number of received facts in memory. Above this number, the oldest received facts are removed from memory.
Their rows are read from the table later."""


class StreamDecider:
    """Decides up to which ID each writer's facts are complete, during one connection to Synapse's database. Not
    thread-safe.

    The caller repeats these steps: apply all messages; call `observe` if `needs_observation`; read the facts of
    `range_to_read`, and pass them to `apply_facts`.

    Args:
        sent_upto: known writer -> the writer's published position.
        keeps_rows: whether rows are never overwritten or deleted, so that a missing row proves that the ID has no fact.
            Sets `kept_above`.
        retired_positions: the retired writers, with their published positions. A retired writer becomes unknown when it
            announces a position, or has a row beyond its published position.
        writers_with_backlog: the known writers that have a backlog (see `sendable_backlogs`).

    Attributes:
        kept_above: rows above this ID are never deleted. Up to this ID, an ID without a row may have had a fact.
    """

    def __init__(
        self,
        sent_upto: Mapping[str, int],
        *,
        keeps_rows: bool = True,
        retired_positions: WriterPositions = (),
        writers_with_backlog: Iterable[str] = (),
    ) -> None:
        self.kept_above = 0 if keeps_rows else UNBOUNDED
        self._retired_positions = dict(retired_positions)
        self._writers = {name: SynapseWriter(at) for name, at in sent_upto.items()}
        for name in writers_with_backlog:
            self._writers[name].has_backlog = True
        self._received_facts: dict[int, StreamFact] = {}
        """ID -> received fact that is not published."""
        self._partial_rows: dict[str, list[str]] = {}
        """Writer -> the received rows of a fact whose last row was not received yet."""
        self._writers_at_boundary: set[str] = set()
        """Writers whose next row begins a new fact. Of other writers, the first rows of a fact may be lost."""
        self._unknown_writers: dict[str, SynapseWriter] = {}

    @property
    def unknown_writers(self) -> Set[str]:
        """Writers that announced a position or have rows, and were not passed to `add_writer` yet. `apply_facts`
        returns no advances while there are unknown writers."""
        return self._unknown_writers.keys()

    @property
    def sent_upto(self) -> Mapping[str, int]:
        """Known writer -> the writer's published position."""
        return {name: writer.sent_upto for name, writer in self._writers.items()}

    @property
    def announced_positions(self) -> Mapping[str, int]:
        """Known writer -> the highest position that the writer has announced; 0 if none. If this position was
        discarded: the published position."""
        return {name: writer.announced_position for name, writer in self._writers.items()}

    @property
    def discarded_positions(self) -> Mapping[str, int]:
        """Writer -> the announced position that was discarded, because it is beyond the IDs that were given out. Such a
        writer does not advance."""
        every = {**self._writers, **self._unknown_writers}
        return {name: writer.discarded_position for name, writer in every.items() if writer.discarded_position}

    def discard_beyond(self, head: int) -> None:
        """Discard announced positions beyond `head`. If there are any, also discard the received facts beyond `head`.

        Args:
            head: the highest ID that was given out, read after all messages were received.
        """
        writers = [*self._writers.values(), *self._unknown_writers.values()]
        contradicted = [writer.discard_beyond(head) for writer in writers]
        if any(contradicted):
            self._received_facts = {id: fact for id, fact in self._received_facts.items() if id <= head}

    @property
    def linear(self) -> int:
        """The linear position: the ID up to which everything is published; 0 without writers."""
        return min((writer.sent_upto for writer in self._writers.values()), default=0)

    @property
    def needs_observation(self) -> bool:
        """Whether the caller must call `observe` before it reads facts."""
        return (
            any(writer.barriers or (writer.is_uncertain and writer.has_announced) for writer in self._writers.values())
            or self._can_find_final_id
        )

    @property
    def _can_find_final_id(self) -> bool:
        """Whether `observe` can find the final ID of a retiring writer: all writers that do not retire have announced a
        position since the request."""
        every = self._writers.values()
        ending = any(writer.is_retiring and writer.final_id is None for writer in every)
        return ending and not any(
            writer.is_uncertain and not writer.has_announced and not writer.is_retiring for writer in every
        )

    def add_unknown(self, writers: Iterable[str]) -> None:
        """Add writers to the unknown writers, unless they are known or have retired."""
        for name in writers:
            if name not in self._writers and name not in self._retired_positions:
                self._unknown_writers.setdefault(name, SynapseWriter(0))

    def retire(self, writer: str) -> None:
        """Begin to retire a known writer, because an operator stated that the writer no longer exists.

        Marks all writers uncertain, so the caller must request the positions of all workers. If the writer answers, the
        writer still exists, and the retirement ends.
        """
        self.mark_uncertain()
        self._writers[writer].is_retiring, self._writers[writer].final_id = True, None

    @property
    def retiring_writers(self) -> Mapping[str, int | None]:
        """Retiring writer -> the ID at which the writer can retire now; None while facts of the writer are unpublished.

        Writers that have announced a position since the request are left out.
        """
        every = {name: writer for name, writer in self._writers.items() if writer.is_retiring}
        return {name: writer.sent_upto if writer.can_retire else None for name, writer in every.items()}

    def forget(self, writer: str) -> None:
        """Move a writer that has retired from the known writers to the retired writers."""
        self._retired_positions[writer] = self._writers.pop(writer).sent_upto

    def add_writer(self, writer: str, sent_upto: int) -> None:
        """Record that an unknown writer has joined at `sent_upto`. The writer's facts up to this ID are its backlog."""
        self._retired_positions.pop(writer, None)
        self.add_unknown([writer])
        if unknown_writer := self._unknown_writers.pop(writer, None):
            unknown_writer.sent_upto, unknown_writer.must_read_table, unknown_writer.has_backlog = (
                sent_upto,
                unknown_writer.announced_position > sent_upto,
                True,
            )
            self._writers[writer] = unknown_writer

    @property
    def sendable_backlogs(self) -> list[str]:
        """The writers whose backlog can be read now, because all transactions of the backlog have ended.

        A writer's backlog is its facts up to the ID at which the writer joined. The caller must publish the backlog
        before other facts of the writer, and then call `note_backlog_sent`.
        """
        return [name for name, writer in self._writers.items() if writer.has_backlog and writer.may_send_backlog]

    def note_backlog_sent(self, writer: str) -> None:
        """Record that the writer's backlog is published."""
        self._writers[writer].has_backlog = False

    def mark_uncertain(self) -> None:
        """Record that lines of the channel may be lost, including the first positions of new processes. Each writer
        advances again only after its next announced position."""
        self._partial_rows.clear()
        self._writers_at_boundary.clear()
        for writer in [*self._writers.values(), *self._unknown_writers.values()]:
            writer.is_uncertain, writer.has_announced, writer.unanswered_requests = True, False, 0

    def note_request(self) -> None:
        """Record that this bridge has requested the positions of all workers, so each writer may repeat its position
        once.

        If a starting worker has sent the request, call `mark_uncertain` instead.
        """
        for writer in [*self._writers.values(), *self._unknown_writers.values()]:
            writer.unanswered_requests += 1

    def apply_position(self, writer: str, prev: int, id: int) -> None:
        """Apply the line `POSITION writer prev id` of the channel. If `prev` is not below `id`, the worker has started,
        or answers a request."""
        self._partial_rows.pop(writer, None)
        self._writers_at_boundary.add(writer)
        known = self._get_writer(writer)
        known.apply_announced_position(id, is_repeated=prev >= id)
        if not known.is_uncertain and (first := max(prev, known.process_start_id, known.sent_upto)) < id:
            known.empty_ranges = known.empty_ranges.union(Intervals.of([(first, id)]))

    def apply_rdata(self, writer: str, id: int | None, row: str) -> None:
        """Apply the line `RDATA writer id row` of the channel. If `id` is None, more rows of the fact follow: only the
        last row has the ID."""
        rows = self._partial_rows.setdefault(writer, [])
        rows.append(row)
        if id is None:
            return
        del self._partial_rows[writer]
        self._get_writer(writer).apply_announced_position(id)
        if writer in self._writers_at_boundary:
            self._received_facts.setdefault(id, StreamFact(id, writer, rows))
            while len(self._received_facts) > MAX_RECEIVED_FACTS:
                del self._received_facts[next(iter(self._received_facts))]
        self._writers_at_boundary.add(writer)

    def _get_writer(self, writer: str) -> SynapseWriter:
        """The state of a writer. A writer that is not known, or has retired, becomes an unknown writer."""
        self._retired_positions.pop(writer, None)
        self.add_unknown([writer])
        return self._writers.get(writer) or self._unknown_writers[writer]

    def observe(self, head: int, running_transactions: frozenset[int]) -> None:
        """Apply an observation of the database: add, shrink and remove barriers, and find the final IDs of retiring
        writers.

        Args:
            head: the highest ID that was given out, read after all messages were received.
            running_transactions: the numbers of the running transactions, read after `head`.
        """
        self.discard_beyond(head)
        if self._can_find_final_id:
            for known in self._writers.values():
                if known.is_retiring and known.final_id is None:
                    known.apply_announced_position(head)
                    known.is_retiring, known.final_id = True, head
        for writer in self._writers.values():
            barriers = [
                Barrier(barrier.head, barrier.transactions & running_transactions) for barrier in writer.barriers
            ]
            barriers = [barrier for barrier in barriers if barrier.transactions]
            writer.must_read_table |= len(barriers) < len(writer.barriers)
            if writer.is_uncertain and writer.has_announced:
                writer.is_uncertain = writer.has_announced = False
                writer.process_start_id = head
                if running_transactions:
                    barriers.append(Barrier(head, running_transactions))
            by_transactions = {
                barrier.transactions: barrier for barrier in sorted(barriers, key=lambda barrier: barrier.head)
            }
            writer.barriers = [*by_transactions.values()]

    def find_floor(self) -> int | None:
        """The ID at which all writers may join for the first time, because all transactions up to this ID have ended.
        None if the ID is not known yet."""
        if not self._writers or any(writer.is_uncertain or writer.barriers for writer in self._writers.values()):
            return None
        return min(writer.announced_position for writer in self._writers.values())

    def begin(self, floor: int) -> None:
        """Record that all writers have joined at the ID `floor`."""
        for writer in self._writers.values():
            writer.sent_upto, writer.must_read_table, writer.has_backlog = (
                floor,
                writer.announced_position > floor,
                False,
            )

    def range_to_read(self) -> tuple[int, int] | None:
        """The range `(low, high]` of IDs whose facts must be read from the tables now. None if no writer may
        advance."""
        moved = [writer for writer in self._writers.values() if writer.may_advance]
        if not moved:
            return None
        low = min(writer.sent_upto for writer in moved)
        return low, min(low + MAX_IDS_PER_READ, max(writer.announced_position for writer in moved))

    def apply_facts(self, ids: tuple[int, int], head: int, facts: Iterable[StreamFact]) -> list[ProvenAdvance]:
        """Apply the facts of a range, move the positions of writers, and return the advances to publish.

        Returns an empty list if a fact has an unknown writer. Then the writer is added to `unknown_writers`, and no
        position moves.

        Args:
            ids: the range, from `range_to_read`.
            head: the highest ID that was given out, read with the same statement as `facts`.
            facts: the facts of the tables in the range.
        """
        self.discard_beyond(head)
        low, top = ids[0], min(ids[1], head)
        table = {fact.id: fact for fact in self.with_writers(facts)}
        # Above `kept_above`, rows are not deleted: a received fact that is not in the table belongs to a lost history.
        received = min(top, self.kept_above)
        known = {id: fact for id, fact in self._received_facts.items() if low < id <= received} | table
        for fact in known.values():
            if fact.id > self._retired_positions.get(fact.writer, 0):
                self._get_writer(fact.writer)
        if self.unknown_writers:
            return []
        fact_ids = Intervals.of((id - 1, id) for id in known)
        advances = list[ProvenAdvance]()
        for name, writer in self._writers.items():
            if writer.may_advance and low <= writer.sent_upto:
                advances += self._advance(name, writer, top, known, fact_ids)
        linear = self.linear
        if advances:
            self._received_facts = {id: fact for id, fact in self._received_facts.items() if id > linear}
        return advances

    def with_writers(self, facts: Iterable[StreamFact]) -> list[StreamFact]:
        """Copy the facts. A fact without a writer gets its probable writer."""
        return [fact if fact.writer else replace(fact, writer=self._find_probable_writer(fact.id)) for fact in facts]

    def _find_probable_writer(self, id: int) -> str:
        """The probable writer of a fact whose row names no writer: the writer that announced the ID, or the only
        writer, or the main process."""
        if received := self._received_facts.get(id):
            return received.writer
        return next(iter(self._writers)) if len(self._writers) == 1 else MASTER

    def _advance(
        self, name: str, writer: SynapseWriter, top: int, facts_by_id: Mapping[int, StreamFact], fact_ids: Intervals
    ) -> Iterator[ProvenAdvance]:
        """Move the writer's position up to `top` if possible. Yields the advance, or nothing."""
        writer.must_read_table = writer.announced_position > top
        prev, id = writer.sent_upto, min(writer.announced_position, top)
        if id <= prev:
            return
        without_fact = fact_ids.missing(prev, id)
        if uncertain := [low for low, _ in without_fact if low < writer.barrier_head]:
            id = uncertain[0]
        if id <= prev:
            return
        facts = [fact for _, fact in sorted(facts_by_id.items()) if prev < fact.id <= id and fact.writer == name]
        unseen = bool(without_fact.up_to(min(id, self.kept_above)).difference(writer.empty_ranges))
        writer.sent_upto = id
        writer.empty_ranges = writer.empty_ranges.above(id)
        yield ProvenAdvance(name, prev, id, facts, unseen)
