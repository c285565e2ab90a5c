"""The state machine of one stream: who has joined, what is settled, how far the line is. The heart of Tidemark.

Pure: no Spark, no I/O, no clock of its own; magnitudes only, the sign lives at the edges of the system. Nothing here
raises for what a writer sent: each record is counted as applied, held, duplicate, late or one of several rows, or it
is rejected with its reason (docs/design.md, rule 5).

Records come in *segments*: `core.segments` takes the edges between two neighbouring JOIN or RETIRE records of the
stream, then `join`, `retire` or `skip` takes the marker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemark.streaming.core.chain import NOWHERE, Chain
from tidemark.streaming.core.deferred import PutOff
from tidemark.streaming.core.linear import LinearPosition
from tidemark.streaming.core.outcome import Changes, Sign, TimelineBegun
from tidemark.streaming.core.timelines import evidence_of, is_repeated, went_back
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import (
    CROWD,
    HeldWriter,
    HeldWriters,
    Incarnation,
    Mark,
    WriterState,
    begin,
    place,
    settle,
    throw_out,
)
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds, Reason, printable
from tidemark.streaming.wire.records import EVERYBODY
from tidemark.streaming.wire.runs import EVERYTHING


@dataclass(slots=True)
class StreamState:
    """`home` is the Kafka partition that the stream lives in.

    While `held` holds anything, the line stays (docs/design.md 3). `timeline` goes up when IDs beyond `began` may
    be given out again; `database` is the history of the database that the newest JOIN named. `here` counts the
    active writers that joined in this timeline, and `ended` is the highest position in it that one had when it
    retired. `refused` is how far records reach that were turned away and may be facts of writers that nobody knew
    yet (`runs.EVERYTHING` where nobody can tell). `transactions` has, by writer, who holds its open IDs, by its own
    word: for people, a line for each.
    """

    direction: Direction = Direction.UNKNOWN
    home: int | None = None
    line: LinearPosition = field(default_factory=LinearPosition)
    writers: Writers = field(default_factory=Writers)
    held: HeldWriters = field(default_factory=HeldWriters)
    timeline: int = 1
    database: str | None = None
    ended: int = 0
    refused: int = 0
    began: int = 0
    here: int = 0
    transactions: dict[str, list[str]] = field(default_factory=dict)

    def face(self, direction: Direction) -> None:
        """A record was accepted whose ID has that direction; the first one that has any decides for ever."""
        self.direction = self.direction or direction

    @property
    def allocated(self) -> int:
        """The highest ID that the stream's records have named, about: every ID up to here was allocated."""
        return max([self.line.position, self.writers.reach(), *(held.chain.reach for held in self.held.values())])

    def living(self, name: str) -> int:
        """The epoch of the writer as it lives now: the joined one, else the newest that is held, else the last one."""
        writer = self.writers.get(name)
        if writer is not None and writer.retired is None:
            return writer.epoch
        last = 0 if writer is None else writer.epoch
        return max([last, *(epoch for _, epoch in self.held.of(name))])

    def doubt(self) -> None:
        """A record was turned away that may be a fact of any writer, also of one that nobody knows yet."""
        self.refused = EVERYTHING
        self.writers.doubt()
        for held in self.held.values():
            held.chain.refuse(EVERYTHING)

    def join(self, mark: Mark, changes: Changes) -> Reason | None:
        """A new epoch begins: all of the writer's IDs up to `mark.id` are complete. Gives why not, or None.

        A JOIN of the epoch that lives begins it anew if it contradicts the JOIN that began it. An operator's begins
        none: it takes back what operators settled beyond `mark.id`.
        """
        writer = self.writers.get(mark.writer)
        if writer is not None and mark.epoch < writer.epoch:
            return Reason.ZOMBIE
        if writer is not None and is_repeated(writer, mark, self.timeline, self.database):
            return self._join_again(writer, mark, changes)
        changes.counts["applied"] += 1
        writer, retire = self._begin(mark, changes)
        if retire is not None and not writer.chain.pending_beyond(retire):
            self._end(writer, Mark(mark.writer, mark.epoch, retire, mark.time), changes)
        self.settle_line()
        return None

    def retire(self, mark: Mark, bounds: Bounds, changes: Changes) -> Reason | None:
        """The writer is complete up to `mark.id` and nothing follows. Gives why it is refused, or None.

        An incarnation that never joined has said nothing that may move a position: its RETIRE waits for its JOIN. An
        operator's RETIRE does not, and is how a held incarnation is got rid of, also one that went on after it retired.
        The writer's own takes back what an operator settled beyond it. Of a writer that has joined, an operator's for a
        later epoch only throws out the incarnation that never did: what that one said is late.
        """
        if mark.writer == EVERYBODY:
            return self._throw_out([*self.held], changes)
        writer = self.writers.get(mark.writer)
        held = self.held.get((mark.writer, mark.epoch))
        if writer is not None and mark.epoch < writer.epoch:
            return Reason.ZOMBIE
        if mark.forced and held is not None and held.chain.pending_beyond(mark.id):
            return Reason.CONFLICT
        if not mark.forced and (writer is None or mark.epoch > writer.epoch):
            return self._hold_retire(mark, bounds, changes)
        if writer is None:
            writer, _ = self._begin(mark, changes)
        elif mark.epoch > writer.epoch:
            return self._throw_out([(mark.writer, mark.epoch)], changes)
        elif writer.retired is not None and mark.forced and held is not None:
            writer.chain.adopt(self.held.pop((mark.writer, mark.epoch)).chain, writer.published)
        elif writer.retired is not None:
            if mark.id > writer.position:
                return Reason.CONFLICT
            changes.counts["duplicate"] += 1
            return None
        elif (reach := writer.chain.reach if mark.forced else writer.reach) > max(mark.id, writer.chain.position):
            return Reason.CONFLICT
        elif not mark.forced:
            writer.reopen(max(mark.id, reach), changes.now)
        self._end(writer, mark, changes)
        changes.counts["applied"] += 1
        self.settle_line()
        return None

    def skip(self, mark: Mark, prev: int, changes: Changes) -> Reason | None:
        """An operator settles what is open in `(prev, mark.id]`; completions in there will be late."""
        writer = self.writers.get(mark.writer)
        if writer is None or mark.epoch > writer.epoch:
            return Reason.UNKNOWN_WRITER
        if mark.epoch < writer.epoch:
            return Reason.ZOMBIE
        if writer.retired is not None:
            return Reason.CONFLICT
        skipped = settle(writer, prev, mark, "skipped", changes)
        changes.counts["applied" if len(skipped) else "duplicate"] += 1
        self.settle_line()
        return None

    def report(self, mark: Mark, transactions: Sequence[str], changes: Changes) -> Reason | None:
        """A writer that has joined says who holds its open IDs. Moves nothing. Gives why it is refused, or None."""
        writer = self.writers.get(mark.writer)
        if writer is None or mark.epoch > writer.epoch or writer.retired is not None:
            return Reason.UNKNOWN_WRITER
        if mark.epoch < writer.epoch:
            return Reason.ZOMBIE
        self.transactions.pop(mark.writer, None)
        if transactions:
            self.transactions[mark.writer] = [printable(line) for line in transactions]
        changes.counts["applied"] += 1
        return None

    def keep_within(self, bounds: Bounds, changes: Changes) -> None:
        """Called once after a batch: forget what passes the bounds, and retired writers that the line has passed."""
        changes.counts["forgotten"] += self.line.forget_beyond(bounds.completed)
        # What the batch touched has still its moves to tell.
        before = changes.now - bounds.retirement
        for name in self.writers.outlived(self.line.position, bounds.retired, before, changes.touched):
            chain = self.writers.pop(name).chain
            self.refused = max(self.refused, chain.refused if chain.refused > chain.position else 0)
            changes.dropped.append(name)

    def recall(self, bounds: Bounds) -> Iterator[tuple[str, int, PutOff]]:
        """What comes again from Kafka, with writer and epoch: a range of each writer. Called once after a batch."""
        for name, writer in sorted(self.writers.open.items()):
            if (found := writer.chain.recall(bounds.pending)) is not None:
                yield name, writer.epoch, found

    def forget_offsets(self) -> None:
        """What was put off stands elsewhere in Kafka, or nowhere: as if it had been refused."""
        self.writers.open_waiting()
        chains = [it.chain for it in self.writers.open.values()] + [it.chain for it in self.held.values()]
        for chain in chains:
            chain.put_off.clear()

    def settle_line(self) -> None:
        """Both halves of the line's definition; with no writer left it goes to the highest position of any.

        A writer that has not joined in this timeline tells of another one, so by such alone the line goes nowhere.
        """
        if self.held or not self.writers:
            return
        floor = self.writers.floor()
        if floor is None or self.here:
            self.line.settle(self.ended if floor is None else floor)

    def passed(self, writer: WriterState) -> int:
        """How far the writer's chain goes in this timeline."""
        return writer.chain.position if writer.timeline == self.timeline else min(writer.chain.position, self.began)

    def crowd(self, changes: Changes) -> None:
        """A writer that never joined was turned away for want of room: nobody knows its name, or what it has open."""
        self.held.setdefault(CROWD, HeldWriter(Chain(NOWHERE), changes.now))
        self.doubt()

    # -- markers

    def _join_again(self, writer: WriterState, mark: Mark, changes: Changes) -> Reason | None:
        """A JOIN of the epoch in which `writer` lives, which contradicts nothing."""
        if mark.id > writer.position:
            return Reason.CONFLICT
        if not mark.forced and not writer.joined:
            self._note_evidence(writer, mark)
        if mark.forced and writer.retired is None and writer.reopen(mark.id, changes.now):
            self.writers.follow(mark.writer)
            changes.touch(mark.writer, mark.time)
            changes.counts["applied"] += 1
        else:
            changes.counts["duplicate"] += 1
        return None

    def _note_evidence(self, writer: WriterState, mark: Mark) -> None:
        """What the JOIN of the writer's epoch says."""
        writer.joined = 0 if mark.forced else evidence_of(mark)
        if mark.timeline is not None:
            self.database, writer.start = mark.timeline.database or self.database, mark.timeline.start

    def _begin(self, mark: Mark, changes: Changes) -> tuple[WriterState, int | None]:
        """Begin the epoch of a JOIN, and a new timeline first where it shows that the database went back."""
        known = self.writers.get(mark.writer)
        if (why := went_back(known, self.held, mark, self.timeline, self.database)) is not None:
            self._begin_timeline(mark, known.position if known is not None else 0, why, changes)
        elif known is not None and known.retired is not None and known.chain.position > mark.stands:
            # An operator retired it there, and it never was.
            beyond = [it for name, it in self.writers.beyond(mark.stands) if it.retired is not None and it is not known]
            self.ended = max([min(self.ended, mark.stands), *(self.passed(it) for it in beyond)])
        self.transactions.pop(mark.writer, None)
        self.here += known is None or known.retired is not None or known.timeline < self.timeline
        writer, retire = begin(self.writers, self.held, mark, self.refused, changes)
        self.writers.follow(mark.writer)
        writer.timeline = self.timeline
        self._note_evidence(writer, mark)
        return writer, retire

    def _begin_timeline(self, mark: Mark, position: int, why: Sign, changes: Changes) -> None:
        """`position` is that of the one that joins. Those whom a relay had join by the same start are in it already."""
        limit = mark.stands
        self.timeline, self.began = self.timeline + 1, limit
        self.here, self.ended = 0, min(self.ended, limit)
        changes.timelines.append(TimelineBegun(mark.writer, mark.epoch, limit, position, self.timeline, why))
        for name, writer in self.writers.beyond(limit):
            writer.go_back(limit, name, changes)
            self.writers.follow(name)
            changes.touch(name, mark.time)
        changes.counts["forgotten"] += self.line.forget_above(limit)
        if mark.timeline is not None and mark.told is not None:
            for writer in [it for it in self.writers.values() if it.start == mark.timeline.start]:
                writer.timeline = self.timeline
                self.here += writer.retired is None

    def _end(self, writer: WriterState, mark: Mark, changes: Changes) -> None:
        settle(writer, 0, mark, "retired", changes)
        writer.chain.put_off.clear()
        self.here -= writer.timeline == self.timeline and writer.retired is None
        self.ended = max(self.ended, self.passed(writer))
        writer.retired = changes.now
        self.transactions.pop(mark.writer, None)

    def _throw_out(self, incarnations: Sequence[Incarnation], changes: Changes) -> Reason | None:
        if not self.held.keys() & incarnations:
            return Reason.UNKNOWN_WRITER
        for incarnation in incarnations:
            refused = throw_out(self.held, incarnation, changes)
            if (writer := self.writers.get(incarnation[0])) is not None:
                writer.chain.refuse(refused)
            else:
                self.refused = max(self.refused, refused)
        changes.counts["applied"] += 1
        self.settle_line()
        return None

    def _hold_retire(self, mark: Mark, bounds: Bounds, changes: Changes) -> Reason | None:
        held = place(self.held, (mark.writer, mark.epoch), bounds, changes)
        if held is None:
            self.crowd(changes)
            return Reason.HELD_OVERFLOW
        if held.retire is not None and held.retire != mark.id:
            return Reason.CONFLICT
        changes.counts["held" if held.retire is None else "duplicate"] += 1
        held.retire = mark.id
        return None
