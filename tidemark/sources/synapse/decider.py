"""Decides the position and facts of each writer of one Synapse stream (docs/how-to/synapse.md). Pure; magnitudes.

It needs all three kinds of evidence:

- *The position that a writer announces* on the channel: all its IDs up to `n` have ended. Synapse takes an ID before it
  opens the transaction that uses it, so the database alone cannot show which IDs are about to be used.
- *The table*: the facts and their writers. Lines may be lost unnoticed; a committed row is in the table.
- *The running transactions*: a process that was killed leaves transactions that may commit after its successor has
  announced a position. So a position that may be a successor's counts only when all transactions that ran at its
  receipt have ended: its *barrier*.

Repeated, late or reordered positions are harmless: the highest one counts. A position beyond the IDs that the sequence
has given out is ignored, and the writer does not advance until it announces another one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from msgspec import Raw

from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import EMPTY, Intervals
from tidemark.streaming.wire.records import Join, Position, Rdata, Record, Retire, Timeline

MASTER = "master"
"""The main process. Older rows do not name it."""


@dataclass(frozen=True, slots=True)
class StreamFact:
    """`rows` are JSON, at least one. `writer` is empty if the table does not name it.

    `marks`: a hash of each row's identity; empty for a fact that was received but is in no table. `is_proof`: no other
    history has a fact with these marks.
    """

    id: int
    writer: str
    rows: Sequence[str]
    marks: frozenset[int] = field(default=frozenset(), compare=False)
    is_proof: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class ProvenAdvance:
    """All transactions of the writer in `(prev, id]` have ended, and `facts` are its facts there, in order.
    `unseen`: there may be more facts, which are unknown."""

    writer: str
    prev: int
    id: int
    facts: Sequence[StreamFact]
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class WriterEncoder:
    """Makes the records of a writer in its epoch."""

    stream: str
    writer: str
    epoch: int
    towards: Direction
    timeline: Timeline

    def join(self, id: int, *, unseen: bool = False) -> Join:
        signed = self.towards.signed(id)
        return Join(
            stream=self.stream,
            writer=self.writer,
            epoch=self.epoch,
            id=signed,
            unseen=unseen and id > 0,
            timeline=self.timeline,
        )

    def retire(self, id: int) -> Retire:
        return Retire(stream=self.stream, writer=self.writer, epoch=self.epoch, id=self.towards.signed(id))

    def advance(self, advance: ProvenAdvance) -> Iterator[Record]:
        """The records of an advance. Each fact is an edge from the one before; the rest is an announcement.

        If the range may have more facts, each fact is an edge of one ID, and a JOIN in the epoch `epoch + 1` settles
        the IDs between.
        """
        prev, signed = advance.prev, self.towards.signed
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
    """`waiting` contains each transaction of a dead process that may still commit an ID up to `head`."""

    head: int
    waiting: frozenset[int]


@dataclass(slots=True)
class SynapseWriter:
    """A writer of the stream. `is_uncertain`: its next position may be a successor's. `has_reported`: it has announced
    a position since the last loss of lines.
    """

    sent_upto: int
    reported: int = 0
    is_uncertain: bool = True
    has_reported: bool = False
    barriers: list[Barrier] = field(default_factory=list)
    since: int = 0
    """IDs beyond this one were given out after the writer's current process started."""
    empty: Intervals = EMPTY
    """The ranges beyond its published position that the writer has announced to be empty."""
    moved: bool = False
    """Whether the table must be read, because the announced position has advanced."""
    answers: int = 0
    """How often the writer may announce the same position without being a successor: the number of requests since."""
    has_backlog: bool = False
    """Whether the writer joined below positions of other writers. Its facts there are read once their transactions have
    ended.
    """
    retiring: bool = False
    ends: int | None = None
    """The ID at which a retiring writer ends; None: not known yet."""
    beyond: int = 0
    """An announced position beyond the IDs that were given out, which is ignored; 0: none."""

    def report_position(self, id: int, *, again: bool = False) -> None:
        """Note an announced position. `again`: the position is unchanged, so the worker was asked or has started."""
        if again and self.answers:
            self.answers -= 1
        else:
            self.is_uncertain |= again
        self.retiring = False
        self.beyond = 0
        self.has_reported = True
        self.moved |= id > self.sent_upto
        self.reported = max(self.reported, id)

    def check(self, head: int) -> bool:
        """Discard the announced position if it is beyond `head`, which was read after the position was received.

        The sequence went back then, and the announcement is not about the IDs that are given out again. Returns whether
        the position was discarded.
        """
        if self.reported <= head:
            return False
        self.beyond, self.reported, self.moved = self.reported, self.sent_upto, False
        self.is_uncertain, self.has_reported, self.empty = True, False, EMPTY
        return True

    @property
    def may_advance(self) -> bool:
        return self.moved and self.sent_upto < self.reported and not (self.is_uncertain or self.has_backlog)

    @property
    def may_send_backlog(self) -> bool:
        return self.reported >= self.sent_upto and not (self.is_uncertain or self.barriers)

    @property
    def has_ended(self) -> bool:
        return self.ends is not None and self.sent_upto >= self.ends and not self.has_backlog

    @property
    def guarded(self) -> int:
        """The ID up to which transactions may still commit IDs that are in no table yet."""
        return max((barrier.head for barrier in self.barriers), default=0)


WriterPositions = Iterable[tuple[str, int]]
MOST_IDS = 5000
"""IDs that are read at once."""
UNBOUNDED = 2**63 - 1
MOST_RECEIVED = 50_000
"""The largest number of received rows that are not published. Beyond it, the oldest are forgotten, and read from the
table."""


class StreamDecider:
    """Decides for one connection to Synapse's database. `sent_upto`: by known writer, the highest published ID.

    `keeps`: an ID above `kept_above` without a row never had a fact. Otherwise rows are overwritten and deleted, and an
    ID without a row may have had a fact. `retired`: by retired writer, the highest published ID. The decider does not
    wait for a retired writer until it announces a position again. `with_backlog`: see `backlog`. For one thread:
    receive all messages, observe, and read the range `asked`.
    """

    def __init__(
        self,
        sent_upto: Mapping[str, int],
        *,
        keeps: bool = True,
        retired: WriterPositions = (),
        with_backlog: Iterable[str] = (),
    ) -> None:
        self.kept_above = 0 if keeps else UNBOUNDED
        self._retired = dict(retired)
        self._writers = {name: SynapseWriter(at) for name, at in sent_upto.items()}
        for name in with_backlog:
            self._writers[name].has_backlog = True
        self._received: dict[int, StreamFact] = {}
        self._begun: dict[str, list[str]] = {}
        self._whole: set[str] = set()
        """Writers of whose next fact all rows or no row were received."""
        self._unknown_writers: dict[str, SynapseWriter] = {}

    @property
    def unknown_writers(self) -> Set[str]:
        """Unknown writers that announced a position or have rows. Nothing is published until they are known."""
        return self._unknown_writers.keys()

    @property
    def sent_upto(self) -> Mapping[str, int]:
        return {name: writer.sent_upto for name, writer in self._writers.items()}

    @property
    def reported_positions(self) -> Mapping[str, int]:
        """The position that each writer has announced."""
        return {name: writer.reported for name, writer in self._writers.items()}

    @property
    def beyond(self) -> Mapping[str, int]:
        """By writer, an announced position beyond the IDs that were given out. Such a writer does not advance."""
        every = {**self._writers, **self._unknown_writers}
        return {name: writer.beyond for name, writer in every.items() if writer.beyond}

    def check(self, head: int) -> None:
        """Discard positions beyond `head`, which was read after all messages were received."""
        contradicted = [writer.check(head) for writer in [*self._writers.values(), *self._unknown_writers.values()]]
        if any(contradicted):
            self._received = {id: fact for id, fact in self._received.items() if id <= head}

    @property
    def linear(self) -> int:
        """The ID up to which everything is published."""
        return min((writer.sent_upto for writer in self._writers.values()), default=0)

    @property
    def wants_observation(self) -> bool:
        """Whether the running transactions must be queried before anything is read."""
        return (
            any(writer.barriers or (writer.is_uncertain and writer.has_reported) for writer in self._writers.values())
            or self._may_end
        )

    @property
    def _may_end(self) -> bool:
        """Whether a retirement was requested, and every other writer has announced a position since."""
        every = self._writers.values()
        ending = any(writer.retiring and writer.ends is None for writer in every)
        return ending and not any(
            writer.is_uncertain and not writer.has_reported and not writer.retiring for writer in every
        )

    def add_unknown(self, writers: Iterable[str]) -> None:
        """Add unknown writers, unless they have retired."""
        for name in writers:
            if name not in self._writers and name not in self._retired:
                self._unknown_writers.setdefault(name, SynapseWriter(0))

    def retire(self, writer: str) -> None:
        """Begin to retire a writer that is gone, by an operator's statement. All workers are asked; a worker that
        answers is not gone.
        """
        self.mark_uncertain()
        self._writers[writer].retiring, self._writers[writer].ends = True, None

    @property
    def retiring(self) -> Mapping[str, int | None]:
        """The retiring writers, each with its final position once everything is published. Writers that came back are
        left out.
        """
        every = {name: writer for name, writer in self._writers.items() if writer.retiring}
        return {name: writer.sent_upto if writer.has_ended else None for name, writer in every.items()}

    def forget(self, writer: str) -> None:
        """Remove a writer that has retired."""
        self._retired[writer] = self._writers.pop(writer).sent_upto

    def add_writer(self, writer: str, sent_upto: int) -> None:
        """The writer has joined at `sent_upto`. Its announced position counts, and its facts below are its backlog."""
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
        """Writers that joined below positions of other writers, and have completed everything there since. Their facts
        there are published before their other facts (`backlog_sent`).
        """
        return [name for name, writer in self._writers.items() if writer.has_backlog and writer.may_send_backlog]

    def backlog_sent(self, writer: str) -> None:
        self._writers[writer].has_backlog = False

    def mark_uncertain(self) -> None:
        """Note that lines may be lost, including the first positions of a successor."""
        self._begun.clear()
        self._whole.clear()
        for writer in [*self._writers.values(), *self._unknown_writers.values()]:
            writer.is_uncertain, writer.has_reported, writer.answers = True, False, 0

    def asked_all(self) -> None:
        """Note that this bridge has asked all workers for their positions. The request of a starting worker makes
        positions uncertain instead.
        """
        for writer in [*self._writers.values(), *self._unknown_writers.values()]:
            writer.answers += 1

    def announced(self, writer: str, prev: int, id: int) -> None:
        """Apply `POSITION writer prev id`. If `prev` is not below `id`, the worker has started or was asked."""
        self._begun.pop(writer, None)
        self._whole.add(writer)
        known = self._known(writer)
        known.report_position(id, again=prev >= id)
        if not known.is_uncertain and (first := max(prev, known.since, known.sent_upto)) < id:
            known.empty = known.empty.union(Intervals.of([(first, id)]))

    def completed(self, writer: str, id: int | None, row: str) -> None:
        """Apply `RDATA writer id row`. `id` None: one of several rows; the last row has the ID."""
        rows = self._begun.setdefault(writer, [])
        rows.append(row)
        if id is None:
            return
        del self._begun[writer]
        self._known(writer).report_position(id)
        if writer in self._whole:
            self._received.setdefault(id, StreamFact(id, writer, rows))
            while len(self._received) > MOST_RECEIVED:
                del self._received[next(iter(self._received))]
        self._whole.add(writer)

    def _known(self, writer: str) -> SynapseWriter:
        self._retired.pop(writer, None)
        self.add_unknown([writer])
        return self._writers.get(writer) or self._unknown_writers[writer]

    def observe(self, head: int, running: frozenset[int]) -> None:
        """Add an observation: `head`, then the `running` transactions, both queried after all messages were
        received.
        """
        self.check(head)
        if self._may_end:
            for known in self._writers.values():
                if known.retiring and known.ends is None:
                    known.report_position(head)
                    known.retiring, known.ends = True, head
        for writer in self._writers.values():
            left = [Barrier(barrier.head, barrier.waiting & running) for barrier in writer.barriers]
            left = [barrier for barrier in left if barrier.waiting]
            writer.moved |= len(left) < len(writer.barriers)
            if writer.is_uncertain and writer.has_reported:
                writer.is_uncertain = writer.has_reported = False
                writer.since = head
                if running:
                    left.append(Barrier(head, running))
            by_waiting = {barrier.waiting: barrier for barrier in sorted(left, key=lambda barrier: barrier.head)}
            writer.barriers = [*by_waiting.values()]

    def floor(self) -> int | None:
        """The ID at which all writers may join for the first time: every transaction up to it has ended. None: not
        known yet."""
        if not self._writers or any(writer.is_uncertain or writer.barriers for writer in self._writers.values()):
            return None
        return min(writer.reported for writer in self._writers.values())

    def begin(self, floor: int) -> None:
        """Note that all writers have joined at this ID."""
        for writer in self._writers.values():
            writer.sent_upto, writer.moved, writer.has_backlog = floor, writer.reported > floor, False

    def asked(self) -> tuple[int, int] | None:
        """The range `(low, high]` to read from the table now, or None."""
        moved = [writer for writer in self._writers.values() if writer.may_advance]
        if not moved:
            return None
        low = min(writer.sent_upto for writer in moved)
        return low, min(low + MOST_IDS, max(writer.reported for writer in moved))

    def read(self, asked: tuple[int, int], head: int, facts: Iterable[StreamFact]) -> list[ProvenAdvance]:
        """Apply the facts of the tables in `asked` and the head, which were read last, in one snapshot. Returns the
        advances to publish.
        """
        self.check(head)
        low, top = asked[0], min(asked[1], head)
        table = {fact.id: fact for fact in self.owned(facts)}
        # If rows are kept, a received row that is not in the table was deleted, or belongs to a lost history.
        received = min(top, self.kept_above)
        known = {id: fact for id, fact in self._received.items() if low < id <= received} | table
        for fact in known.values():
            if fact.id > self._retired.get(fact.writer, 0):
                self._known(fact.writer)
        if self.unknown_writers:
            return []
        ids = Intervals.of((id - 1, id) for id in known)
        advances = list[ProvenAdvance]()
        for name, writer in self._writers.items():
            if writer.may_advance and low <= writer.sent_upto:
                advances += self._advance(name, writer, top, known, ids)
        linear = self.linear
        if advances:
            self._received = {id: fact for id, fact in self._received.items() if id > linear}
        return advances

    def owned(self, facts: Iterable[StreamFact]) -> list[StreamFact]:
        """The facts, each with its writer."""
        return [fact if fact.writer else replace(fact, writer=self._owner(fact.id)) for fact in facts]

    def _owner(self, id: int) -> str:
        """The writer of a fact whose row names no writer: the writer that announced the ID, or the only writer."""
        if received := self._received.get(id):
            return received.writer
        return next(iter(self._writers)) if len(self._writers) == 1 else MASTER

    def _advance(
        self, name: str, writer: SynapseWriter, top: int, known: Mapping[int, StreamFact], ids: Intervals
    ) -> Iterator[ProvenAdvance]:
        writer.moved = writer.reported > top
        prev, id = writer.sent_upto, min(writer.reported, top)
        if id <= prev:
            return
        without_fact = ids.missing(prev, id)
        if uncertain := [low for low, _ in without_fact if low < writer.guarded]:
            id = uncertain[0]
        if id <= prev:
            return
        facts = [known[at] for at in sorted(known) if prev < at <= id and known[at].writer == name]
        unseen = bool(without_fact.upto(min(id, self.kept_above)).difference(writer.empty))
        writer.sent_upto = id
        writer.empty = writer.empty.above(id)
        yield ProvenAdvance(name, prev, id, facts, unseen)
