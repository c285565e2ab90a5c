"""Decides the position and facts of each writer of one Synapse stream (docs/how-to/synapse.md). Pure. IDs are
magnitudes.

The decision needs three kinds of evidence:

- *The position that a writer announces* on the channel: all IDs of the writer up to this ID are complete. Synapse
  reserves an ID before it opens the transaction that uses the ID. So the database alone cannot show which IDs are
  reserved.
- *The table*: the facts and their writers. Lines on the channel may be lost, but a committed row is in the table.
- *The running transactions*: a killed process leaves transactions that may commit after its successor has announced a
  position. So if a position may come from a successor, it has a *barrier*: the transactions that ran when the position
  was received. The position takes effect when all these transactions have ended.

Repeated, late or reordered positions are harmless, because only the highest one has an effect. A position beyond the
IDs that the sequence has given out is ignored, and the writer does not advance until it announces another position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from msgspec import Raw

from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.wire.records import Join, Position, Rdata, Record, Retire, Timeline

MASTER = "master"
"""The name of the main process. Old rows of the main process have no writer."""


@dataclass(frozen=True, slots=True)
class StreamFact:
    """A fact of a stream.

    Attributes:
        id: its ID (magnitude).
        writer: its writer; empty if the table does not name the writer.
        rows: its rows as JSON.
        marks: a hash of each row's identity; empty for a fact that was received but is in no table.
        is_proof: no other history has a fact with these marks.
    """

    id: int
    writer: str
    rows: Sequence[str]
    marks: frozenset[int] = field(default=frozenset(), compare=False)
    is_proof: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ProvenAdvance:
    """An advance of a writer: all its transactions with IDs in `(prev, id]` have ended.

    Attributes:
        facts: its facts in the range, in order of ID.
        unseen: the range may contain more facts of the writer, which are unknown.
    """

    writer: str
    prev: int
    id: int
    facts: Sequence[StreamFact]
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class WriterEncoder:
    """Makes the records of a writer in one epoch. Takes magnitudes; the records have signed IDs."""

    stream: str
    writer: str
    epoch: int
    direction: Direction
    timeline: Timeline

    def join(self, id: int, *, unseen: bool = False) -> Join:
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
        return Retire(stream=self.stream, writer=self.writer, epoch=self.epoch, id=self.direction.signed(id))

    def advance(self, advance: ProvenAdvance) -> Iterator[Record]:
        """The records of an advance. Each fact is an edge from the fact before it; a POSITION follows for the rest.

        If the range is `unseen`, each fact is an edge of one ID, and the caller settles the other IDs with a JOIN in
        the epoch `epoch + 1`.
        """
        prev, signed = advance.prev, self.direction.signed
        for fact in advance.facts:
            if advance.unseen:
                prev = fact.id - 1
            *first, last = (Raw(row.encode()) for row in fact.rows)
            for row in first:
                yield Rdata(stream=self.stream, writer=self.writer, epoch=self.epoch, id="batch", row=row)
            edge = {"prev": signed(prev), "id": signed(fact.id)}
            yield Rdata(stream=self.stream, writer=self.writer, epoch=self.epoch, row=last, **edge)
            prev = fact.id
        if prev < advance.id and not advance.unseen:
            edge = {"prev": signed(prev), "id": signed(advance.id)}
            yield Position(stream=self.stream, writer=self.writer, epoch=self.epoch, **edge)


@dataclass(frozen=True, slots=True)
class Barrier:
    """The running transactions (`waiting`), one of which may be of a dead process and commit an ID up to `head`."""

    head: int
    waiting: frozenset[int]


@dataclass(slots=True)
class SynapseWriter:
    """The state of one writer of the stream."""

    sent_upto: int
    """Its highest published ID."""
    reported: int = 0
    """The highest position that it has announced."""
    is_uncertain: bool = True
    """Whether its positions may now come from a successor of its process. `observe` then adds a barrier."""
    has_reported: bool = False
    """If `is_uncertain`: whether it has announced a position since then."""
    barriers: list[Barrier] = field(default_factory=list)
    since: int = 0
    """IDs beyond this one were given out after the writer's current process started."""
    empty: Intervals = NO_INTERVALS
    """The ranges beyond its published position that the writer has announced to be empty."""
    moved: bool = False
    """Whether the table must be read, because the announced position has advanced."""
    answers: int = 0
    """How often the writer may repeat its position without being a successor: the number of unanswered requests."""
    has_backlog: bool = False
    """Whether the writer joined although it may have facts below the ID at which it joined. These facts are read when
    their transactions have ended."""
    retiring: bool = False
    final_id: int | None = None
    """The ID at which a retiring writer retires; None: not known yet."""
    discarded: int = 0
    """A discarded position, beyond the IDs that were given out; 0: none."""

    def report_position(self, id: int, *, again: bool = False) -> None:
        """Apply an announced position. `again`: the position has not moved, so the worker answers a request, or has
        started."""
        if again and self.answers:
            self.answers -= 1
        else:
            self.is_uncertain |= again
        self.retiring = False
        self.discarded = 0
        self.has_reported = True
        self.moved |= id > self.sent_upto
        self.reported = max(self.reported, id)

    def check(self, head: int) -> bool:
        """Discard the announced position if it is beyond `head`, the highest ID that was given out. `head` must be read
        after the position was received.

        Such a position shows that the sequence was set back. The position is no evidence for IDs that are given out
        again. Returns whether the position was discarded.
        """
        if self.reported <= head:
            return False
        self.discarded, self.reported, self.moved = self.reported, self.sent_upto, False
        self.is_uncertain, self.has_reported, self.empty = True, False, NO_INTERVALS
        return True

    @property
    def may_advance(self) -> bool:
        return self.moved and self.sent_upto < self.reported and not (self.is_uncertain or self.has_backlog)

    @property
    def may_send_backlog(self) -> bool:
        return self.reported >= self.sent_upto and not (self.is_uncertain or self.barriers)

    @property
    def has_ended(self) -> bool:
        return self.final_id is not None and self.sent_upto >= self.final_id and not self.has_backlog

    @property
    def barrier_head(self) -> int:
        """Up to this ID, transactions may still commit rows."""
        return max((barrier.head for barrier in self.barriers), default=0)


WriterPositions = Iterable[tuple[str, int]]
MAX_IDS_PER_READ = 5000
UNBOUNDED = 2**63 - 1
MAX_RECEIVED = 50_000
"""The maximum of received facts that are not published. Beyond it, the oldest are removed from memory, and read from
the table later."""


class StreamDecider:
    """Decides up to which ID each writer's facts are complete, during one connection to Synapse's database. Not
    thread-safe.

    In a loop: apply all messages, call `observe`, read the facts of `range_to_read` and pass them to `apply_facts`.

    Args:
        sent_upto: by known writer, the highest published ID.
        keeps_rows: rows above `kept_above` are never deleted, so a missing row proves that the ID has no fact.
            Otherwise rows are overwritten and deleted, and an ID without a row may have had a fact.
        retired: by retired writer, the highest published ID. The decider does not wait for a retired writer until the
            writer announces a position again.
        with_backlog: the writers that have a backlog (see `backlog`).
    """

    def __init__(
        self,
        sent_upto: Mapping[str, int],
        *,
        keeps_rows: bool = True,
        retired: WriterPositions = (),
        with_backlog: Iterable[str] = (),
    ) -> None:
        self.kept_above = 0 if keeps_rows else UNBOUNDED
        self._retired = dict(retired)
        self._writers = {name: SynapseWriter(at) for name, at in sent_upto.items()}
        for name in with_backlog:
            self._writers[name].has_backlog = True
        self._received: dict[int, StreamFact] = {}
        """By ID, received facts that are not published."""
        self._partial_rows: dict[str, list[str]] = {}
        """By writer, the received rows of a fact whose last row has not come yet."""
        self._at_boundary: set[str] = set()
        """Writers whose next row begins a new fact. For other writers, the first rows of a fact may be lost."""
        self._unknown_writers: dict[str, SynapseWriter] = {}

    @property
    def unknown_writers(self) -> Set[str]:
        """Writers that announced a position or have rows, and are not known yet. Nothing is published until they are
        added."""
        return self._unknown_writers.keys()

    @property
    def sent_upto(self) -> Mapping[str, int]:
        """By writer, the highest published ID."""
        return {name: writer.sent_upto for name, writer in self._writers.items()}

    @property
    def reported_positions(self) -> Mapping[str, int]:
        """The position that each writer has announced."""
        return {name: writer.reported for name, writer in self._writers.items()}

    @property
    def discarded_positions(self) -> Mapping[str, int]:
        """By writer, the position that was discarded, because it is beyond the IDs that were given out. Such a writer
        does not advance."""
        every = {**self._writers, **self._unknown_writers}
        return {name: writer.discarded for name, writer in every.items() if writer.discarded}

    def check(self, head: int) -> None:
        """Discard positions beyond `head`, the highest ID that was given out. `head` must be read after all messages
        were received."""
        contradicted = [writer.check(head) for writer in [*self._writers.values(), *self._unknown_writers.values()]]
        if any(contradicted):
            self._received = {id: fact for id, fact in self._received.items() if id <= head}

    @property
    def linear(self) -> int:
        """The ID up to which everything is published."""
        return min((writer.sent_upto for writer in self._writers.values()), default=0)

    @property
    def wants_observation(self) -> bool:
        """Whether `observe` must be called before facts are read."""
        return (
            any(writer.barriers or (writer.is_uncertain and writer.has_reported) for writer in self._writers.values())
            or self._can_retire
        )

    @property
    def _can_retire(self) -> bool:
        """Whether a retirement was requested, and every other writer has announced a position since."""
        every = self._writers.values()
        ending = any(writer.retiring and writer.final_id is None for writer in every)
        return ending and not any(
            writer.is_uncertain and not writer.has_reported and not writer.retiring for writer in every
        )

    def add_unknown(self, writers: Iterable[str]) -> None:
        """Add writers to the unknown writers, unless they are known or have retired."""
        for name in writers:
            if name not in self._writers and name not in self._retired:
                self._unknown_writers.setdefault(name, SynapseWriter(0))

    def retire(self, writer: str) -> None:
        """Begin to retire a writer, because an operator stated that it no longer exists. The caller must request the
        positions of all workers: if the writer answers, it still exists and does not retire."""
        self.mark_uncertain()
        self._writers[writer].retiring, self._writers[writer].final_id = True, None

    @property
    def retiring(self) -> Mapping[str, int | None]:
        """The retiring writers, each with its final ID when all its facts are published, before with None. Writers that
        have announced a position since are left out."""
        every = {name: writer for name, writer in self._writers.items() if writer.retiring}
        return {name: writer.sent_upto if writer.has_ended else None for name, writer in every.items()}

    def forget(self, writer: str) -> None:
        """Remove a writer that has retired."""
        self._retired[writer] = self._writers.pop(writer).sent_upto

    def add_writer(self, writer: str, sent_upto: int) -> None:
        """Note that a writer has joined at `sent_upto`. Its facts below are its backlog."""
        self._retired.pop(writer, None)
        self.add_unknown([writer])
        if unknown_writer := self._unknown_writers.pop(writer, None):
            unknown_writer.sent_upto, unknown_writer.moved, unknown_writer.has_backlog = (
                sent_upto,
                unknown_writer.reported > sent_upto,
                True,
            )
            self._writers[writer] = unknown_writer

    @property
    def backlog(self) -> list[str]:
        """Writers whose backlog can be read now, because all its transactions have ended.

        A writer's backlog is its facts below the ID at which it joined. The caller must publish the backlog before
        other facts of the writer, and then call `backlog_sent`.
        """
        return [name for name, writer in self._writers.items() if writer.has_backlog and writer.may_send_backlog]

    def backlog_sent(self, writer: str) -> None:
        self._writers[writer].has_backlog = False

    def mark_uncertain(self) -> None:
        """Note that lines may be lost, including the first positions of new processes."""
        self._partial_rows.clear()
        self._at_boundary.clear()
        for writer in [*self._writers.values(), *self._unknown_writers.values()]:
            writer.is_uncertain, writer.has_reported, writer.answers = True, False, 0

    def note_request(self) -> None:
        """Note that this bridge has requested the positions of all workers, so each may repeat its position once. For a
        request of a starting worker, call `mark_uncertain` instead."""
        for writer in [*self._writers.values(), *self._unknown_writers.values()]:
            writer.answers += 1

    def apply_position(self, writer: str, prev: int, id: int) -> None:
        """Apply the line `POSITION writer prev id`. If `prev` is not below `id`, the worker has started, or answers a
        request."""
        self._partial_rows.pop(writer, None)
        self._at_boundary.add(writer)
        known = self._get_writer(writer)
        known.report_position(id, again=prev >= id)
        if not known.is_uncertain and (first := max(prev, known.since, known.sent_upto)) < id:
            known.empty = known.empty.union(Intervals.of([(first, id)]))

    def apply_rdata(self, writer: str, id: int | None, row: str) -> None:
        """Apply the line `RDATA writer id row`. If `id` is None, more rows of the fact follow; only the last has the
        ID."""
        rows = self._partial_rows.setdefault(writer, [])
        rows.append(row)
        if id is None:
            return
        del self._partial_rows[writer]
        self._get_writer(writer).report_position(id)
        if writer in self._at_boundary:
            self._received.setdefault(id, StreamFact(id, writer, rows))
            while len(self._received) > MAX_RECEIVED:
                del self._received[next(iter(self._received))]
        self._at_boundary.add(writer)

    def _get_writer(self, writer: str) -> SynapseWriter:
        self._retired.pop(writer, None)
        self.add_unknown([writer])
        return self._writers.get(writer) or self._unknown_writers[writer]

    def observe(self, head: int, running: frozenset[int]) -> None:
        """Apply an observation of the database. It must be made after all messages were received.

        Args:
            head: the highest ID that was given out.
            running: the transactions that ran after `head` was read.
        """
        self.check(head)
        if self._can_retire:
            for known in self._writers.values():
                if known.retiring and known.final_id is None:
                    known.report_position(head)
                    known.retiring, known.final_id = True, head
        for writer in self._writers.values():
            barriers = [Barrier(barrier.head, barrier.waiting & running) for barrier in writer.barriers]
            barriers = [barrier for barrier in barriers if barrier.waiting]
            writer.moved |= len(barriers) < len(writer.barriers)
            if writer.is_uncertain and writer.has_reported:
                writer.is_uncertain = writer.has_reported = False
                writer.since = head
                if running:
                    barriers.append(Barrier(head, running))
            by_waiting = {barrier.waiting: barrier for barrier in sorted(barriers, key=lambda barrier: barrier.head)}
            writer.barriers = [*by_waiting.values()]

    def floor(self) -> int | None:
        """The ID at which all writers may join for the first time: all transactions with IDs up to it have ended. None
        if it is not known yet."""
        if not self._writers or any(writer.is_uncertain or writer.barriers for writer in self._writers.values()):
            return None
        return min(writer.reported for writer in self._writers.values())

    def begin(self, floor: int) -> None:
        """Note that all writers have joined at the ID `floor`."""
        for writer in self._writers.values():
            writer.sent_upto, writer.moved, writer.has_backlog = floor, writer.reported > floor, False

    def range_to_read(self) -> tuple[int, int] | None:
        """The range `(low, high]` of IDs whose facts must be read from the tables now; None if no writer may
        advance."""
        moved = [writer for writer in self._writers.values() if writer.may_advance]
        if not moved:
            return None
        low = min(writer.sent_upto for writer in moved)
        return low, min(low + MAX_IDS_PER_READ, max(writer.reported for writer in moved))

    def apply_facts(self, ids: tuple[int, int], head: int, facts: Iterable[StreamFact]) -> list[ProvenAdvance]:
        """Apply the facts of a range, and return the advances to publish.

        Args:
            ids: the range, from `range_to_read`.
            head: the highest ID that was given out, from the same snapshot of the database as `facts`.
            facts: the facts of the tables in the range.
        """
        self.check(head)
        low, top = ids[0], min(ids[1], head)
        table = {fact.id: fact for fact in self.with_writers(facts)}
        # Above `kept_above`, rows are not deleted: a received fact that is not in the table belongs to a lost history.
        received = min(top, self.kept_above)
        known = {id: fact for id, fact in self._received.items() if low < id <= received} | table
        for fact in known.values():
            if fact.id > self._retired.get(fact.writer, 0):
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
            self._received = {id: fact for id, fact in self._received.items() if id > linear}
        return advances

    def with_writers(self, facts: Iterable[StreamFact]) -> list[StreamFact]:
        """The facts, each with its writer. Facts without a writer get their probable writer."""
        return [fact if fact.writer else replace(fact, writer=self._owner(fact.id)) for fact in facts]

    def _owner(self, id: int) -> str:
        """The writer of a fact whose row names no writer: the writer that announced the ID, or the only writer."""
        if received := self._received.get(id):
            return received.writer
        return next(iter(self._writers)) if len(self._writers) == 1 else MASTER

    def _advance(
        self, name: str, writer: SynapseWriter, top: int, known: Mapping[int, StreamFact], fact_ids: Intervals
    ) -> Iterator[ProvenAdvance]:
        writer.moved = writer.reported > top
        prev, id = writer.sent_upto, min(writer.reported, top)
        if id <= prev:
            return
        without_fact = fact_ids.missing(prev, id)
        if uncertain := [low for low, _ in without_fact if low < writer.barrier_head]:
            id = uncertain[0]
        if id <= prev:
            return
        facts = [fact for _, fact in sorted(known.items()) if prev < fact.id <= id and fact.writer == name]
        unseen = bool(without_fact.up_to(min(id, self.kept_above)).difference(writer.empty))
        writer.sent_upto = id
        writer.empty = writer.empty.above(id)
        yield ProvenAdvance(name, prev, id, facts, unseen)
