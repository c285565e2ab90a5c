"""The state machine of one stream: who has joined, what is settled, how far the line is. The heart of Tidemark.

Pure: no Spark, no I/O, no clock of its own; magnitudes only, the sign lives at the edges of the system. Nothing here
raises for what a writer sent: each record is counted as applied, held, duplicate, late or one of several rows, or it
is rejected with its reason (docs/design.md, rule 5).

Records come in *segments*: `core.segments` takes the edges between two neighbouring JOIN or RETIRE records of the
stream, then `join`, `retire` or `skip` takes the marker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from zlib import crc32

import msgspec
import numpy as np

from tidemark.streaming.core.chain import NO_POSITION, Chain
from tidemark.streaming.core.classify import Classifier, Completed
from tidemark.streaming.core.deferred import DeferredRange
from tidemark.streaming.core.linear import LinearPosition
from tidemark.streaming.core.outcome import BatchOutcome, Refusal, RollbackSignal, TimelineBegun
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import (
    OVERFLOW_SLOT,
    Incarnation,
    Mark,
    PartialRows,
    UnjoinedWriter,
    UnjoinedWriters,
    WriterState,
    begin,
    discard_unjoined,
    place,
    settle,
)
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds, Reason, printable
from tidemark.streaming.wire.records import ANY_WRITER
from tidemark.streaming.wire.runs import UNBOUNDED, Mask, Run, TurnedAway

_NONE_HELD = UnjoinedWriters()


def evidence_of(mark: Mark) -> int:
    """What a JOIN says, in 32 bits and never 0: a JOIN that is sent again says the same.

    Without `told`, which a relay that repeats the JOIN reads anew.
    """
    return crc32(msgspec.msgpack.encode((mark.id, mark.unseen, mark.timeline))) or 1


def rollback_signal(
    writer: WriterState | None, held: UnjoinedWriters, mark: Mark, timeline: int, database: str | None
) -> RollbackSignal | None:
    """What in a JOIN shows that IDs beyond `mark.no_reuse_below` may be given out again, if it was not said before.

    A JOIN below the linear position, or below another writer's position, shows nothing: it read what was allocated
    before the others went on. Nor does the JOIN of a writer that had not joined in this timeline: it went back with the
    others.

    Args:
        writer: the writer that joins, as it was; None if it never joined.
        held: incarnations that have not joined.
        timeline: the stream's.
        database: the history that the stream's newest JOIN named; None if it is not known.
    """
    if _has_another_database(mark, database):
        return "database"
    earlier = (held[it].chain for it in held.of(mark.writer) if it[1] < mark.epoch)
    if any(chain.pending_beyond(mark.no_reuse_below) for chain in earlier):
        return "position"
    if writer is None or writer.timeline < timeline:
        return None
    if mark.no_reuse_below < writer.reach:
        return "position"
    return "start" if _has_another_start(writer, mark) else None


def is_repetition(writer: WriterState, mark: Mark, timeline: int, database: str | None) -> bool:
    """Whether a JOIN is of the epoch in which its writer lives and contradicts nothing that the epoch's JOIN said.

    Two starts that share an epoch show that the database went back: epochs rise (docs/design.md 4). If the evidence of
    the epoch's JOIN is not known (an operator began the epoch, nobody joined, or an older Tidemark wrote the state),
    only another database or another start contradicts it.
    """
    if mark.epoch != writer.epoch:
        return False
    if mark.forced or writer.joined == evidence_of(mark):
        return True
    if writer.joined:
        return writer.timeline == timeline and rollback_signal(writer, _NONE_HELD, mark, timeline, database) is None
    if mark.timeline is None or mark.timeline.start == writer.start:
        return True
    return not (_has_another_database(mark, database) or _has_another_start(writer, mark))


def _has_another_database(mark: Mark, database: str | None) -> bool:
    return (
        mark.timeline is not None
        and None not in (database, mark.timeline.database)
        and database != (mark.timeline.database)
    )


def _has_another_start(writer: WriterState, mark: Mark) -> bool:
    """Whether the start is neither the writer's last one nor the one that follows it, in an epoch of its own."""
    if mark.timeline is None or writer.start in (None, mark.timeline.start):
        return False
    is_next = writer.start == mark.timeline.after
    return not is_next or (mark.epoch == writer.epoch and writer.joined != 0)


@dataclass(slots=True)
class StreamState:
    """`home` is the Kafka partition that the stream lives in.

    While `held` holds anything, the line stays (docs/design.md 3). `timeline` goes up when IDs beyond `began` may
    be given out again; `database` is the history of the database that the newest JOIN named. `here` counts the
    active writers that joined in this timeline, and `ended` is the highest position in it that one had when it
    retired. `refused` is how far records reach that were turned away and may be facts of writers that nobody knew
    yet (`runs.UNBOUNDED` where nobody can tell). `transactions` has, by writer, who holds its open IDs, by its own
    word: for people, a line for each.
    """

    direction: Direction = Direction.UNKNOWN
    home: int | None = None
    linear: LinearPosition = field(default_factory=LinearPosition)
    writers: Writers = field(default_factory=Writers)
    unjoined: UnjoinedWriters = field(default_factory=UnjoinedWriters)
    timeline: int = 1
    database: str | None = None
    ended: int = 0
    refused: int = 0
    began: int = 0
    here: int = 0
    transactions: dict[str, list[str]] = field(default_factory=dict)

    def set_direction(self, direction: Direction) -> None:
        """A record was accepted whose ID has that direction; the first one that has any decides for ever."""
        self.direction = self.direction or direction

    @property
    def allocated(self) -> int:
        """The highest ID that the stream's records have named, about: every ID up to here was allocated."""
        return max([self.linear.position, self.writers.reach(), *(held.chain.reach for held in self.unjoined.values())])

    def current_epoch(self, name: str) -> int:
        """The epoch of the writer as it lives now: the joined one, else the newest that is held, else the last one."""
        writer = self.writers.get(name)
        if writer is not None and writer.retired is None:
            return writer.epoch
        last = 0 if writer is None else writer.epoch
        return max([last, *(epoch for _, epoch in self.unjoined.of(name))])

    def mark_uncertain(self) -> None:
        """A record was turned away that may be a fact of any writer, also of one that nobody knows yet."""
        self.refused = UNBOUNDED
        self.writers.mark_uncertain()
        for held in self.unjoined.values():
            held.chain.refuse(UNBOUNDED)

    def join(self, mark: Mark, changes: BatchOutcome) -> Reason | None:
        """A new epoch begins: all of the writer's IDs up to `mark.id` are complete. Gives why not, or None.

        A JOIN of the epoch that lives begins it anew if it contradicts the JOIN that began it. An operator's begins
        none: it takes back what operators settled beyond `mark.id`.
        """
        writer = self.writers.get(mark.writer)
        if writer is not None and mark.epoch < writer.epoch:
            return Reason.ZOMBIE
        if writer is not None and is_repetition(writer, mark, self.timeline, self.database):
            return self._join_again(writer, mark, changes)
        changes.counts["applied"] += 1
        writer, retire = self._begin(mark, changes)
        if retire is not None and not writer.chain.pending_beyond(retire):
            self._end(writer, Mark(mark.writer, mark.epoch, retire, mark.time), changes)
        self.advance_linear()
        return None

    def retire(self, mark: Mark, bounds: Bounds, changes: BatchOutcome) -> Reason | None:
        """The writer is complete up to `mark.id` and nothing follows. Gives why it is refused, or None.

        An incarnation that never joined has said nothing that may move a position: its RETIRE waits for its JOIN. An
        operator's RETIRE does not, and is how a held incarnation is got rid of, also one that went on after it retired.
        The writer's own takes back what an operator settled beyond it. Of a writer that has joined, an operator's for a
        later epoch only throws out the incarnation that never did: what that one said is late.
        """
        if mark.writer == ANY_WRITER:
            return self._throw_out([*self.unjoined], changes)
        writer = self.writers.get(mark.writer)
        held = self.unjoined.get((mark.writer, mark.epoch))
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
            writer.chain.adopt(self.unjoined.pop((mark.writer, mark.epoch)).chain, writer.published)
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
        self.advance_linear()
        return None

    def skip(self, mark: Mark, prev: int, changes: BatchOutcome) -> Reason | None:
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
        self.advance_linear()
        return None

    def report(self, mark: Mark, transactions: Sequence[str], changes: BatchOutcome) -> Reason | None:
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

    def keep_within(self, bounds: Bounds, changes: BatchOutcome) -> None:
        """Called once after a batch: forget what passes the bounds, and retired writers that the line has passed."""
        changes.counts["forgotten"] += self.linear.forget_beyond(bounds.completed)
        # What the batch touched has still its moves to tell.
        before = changes.now - bounds.retirement
        for name in self.writers.outlived(self.linear.position, bounds.retired, before, changes.touched):
            chain = self.writers.pop(name).chain
            self.refused = max(self.refused, chain.refused if chain.refused > chain.position else 0)
            changes.dropped.append(name)

    def recall(self, bounds: Bounds) -> Iterator[tuple[str, int, DeferredRange]]:
        """What comes again from Kafka, with writer and epoch: a range of each writer. Called once after a batch."""
        for name, writer in sorted(self.writers.open.items()):
            if (found := writer.chain.recall(bounds.pending)) is not None:
                yield name, writer.epoch, found

    def forget_offsets(self) -> None:
        """What was put off stands elsewhere in Kafka, or nowhere: as if it had been refused."""
        self.writers.open_waiting()
        chains = [it.chain for it in self.writers.open.values()] + [it.chain for it in self.unjoined.values()]
        for chain in chains:
            chain.deferred.clear()

    def advance_linear(self) -> None:
        """Both halves of the line's definition; with no writer left it goes to the highest position of any.

        A writer that has not joined in this timeline tells of another one, so by such alone the line goes nowhere.
        """
        if self.unjoined or not self.writers:
            return
        floor = self.writers.floor()
        if floor is None or self.here:
            self.linear.settle(self.ended if floor is None else floor)

    def passed(self, writer: WriterState) -> int:
        """How far the writer's chain goes in this timeline."""
        return writer.chain.position if writer.timeline == self.timeline else min(writer.chain.position, self.began)

    def mark_overflow(self, changes: BatchOutcome) -> None:
        """A writer that never joined was turned away for want of room: nobody knows its name, or what it has open."""
        self.unjoined.setdefault(OVERFLOW_SLOT, UnjoinedWriter(Chain(NO_POSITION), changes.now))
        self.mark_uncertain()

    # -- markers

    def _join_again(self, writer: WriterState, mark: Mark, changes: BatchOutcome) -> Reason | None:
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

    def _begin(self, mark: Mark, changes: BatchOutcome) -> tuple[WriterState, int | None]:
        """Begin the epoch of a JOIN, and a new timeline first where it shows that the database went back."""
        known = self.writers.get(mark.writer)
        if (why := rollback_signal(known, self.unjoined, mark, self.timeline, self.database)) is not None:
            self._begin_timeline(mark, known.position if known is not None else 0, why, changes)
        elif known is not None and known.retired is not None and known.chain.position > mark.no_reuse_below:
            # An operator retired it there, and it never was.
            beyond = [
                it
                for name, it in self.writers.beyond(mark.no_reuse_below)
                if it.retired is not None and it is not known
            ]
            self.ended = max([min(self.ended, mark.no_reuse_below), *(self.passed(it) for it in beyond)])
        self.transactions.pop(mark.writer, None)
        self.here += known is None or known.retired is not None or known.timeline < self.timeline
        writer, retire = begin(self.writers, self.unjoined, mark, self.refused, changes)
        self.writers.follow(mark.writer)
        writer.timeline = self.timeline
        self._note_evidence(writer, mark)
        return writer, retire

    def _begin_timeline(self, mark: Mark, position: int, why: RollbackSignal, changes: BatchOutcome) -> None:
        """`position` is that of the one that joins. Those whom a relay had join by the same start are in it already."""
        limit = mark.no_reuse_below
        self.timeline, self.began = self.timeline + 1, limit
        self.here, self.ended = 0, min(self.ended, limit)
        changes.timelines.append(TimelineBegun(mark.writer, mark.epoch, limit, position, self.timeline, why))
        for name, writer in self.writers.beyond(limit):
            writer.go_back(limit, name, changes)
            self.writers.follow(name)
            changes.touch(name, mark.time)
        changes.counts["forgotten"] += self.linear.forget_above(limit)
        if mark.timeline is not None and mark.told is not None:
            for writer in [it for it in self.writers.values() if it.start == mark.timeline.start]:
                writer.timeline = self.timeline
                self.here += writer.retired is None

    def _end(self, writer: WriterState, mark: Mark, changes: BatchOutcome) -> None:
        settle(writer, 0, mark, "retired", changes)
        writer.chain.deferred.clear()
        self.here -= writer.timeline == self.timeline and writer.retired is None
        self.ended = max(self.ended, self.passed(writer))
        writer.retired = changes.now
        self.transactions.pop(mark.writer, None)

    def _throw_out(self, incarnations: Sequence[Incarnation], changes: BatchOutcome) -> Reason | None:
        if not self.unjoined.keys() & incarnations:
            return Reason.UNKNOWN_WRITER
        for incarnation in incarnations:
            refused = discard_unjoined(self.unjoined, incarnation, changes)
            if (writer := self.writers.get(incarnation[0])) is not None:
                writer.chain.refuse(refused)
            else:
                self.refused = max(self.refused, refused)
        changes.counts["applied"] += 1
        self.advance_linear()
        return None

    def _hold_retire(self, mark: Mark, bounds: Bounds, changes: BatchOutcome) -> Reason | None:
        held = place(self.unjoined, (mark.writer, mark.epoch), bounds, changes)
        if held is None:
            self.mark_overflow(changes)
            return Reason.BUFFER_OVERFLOW
        if held.retire is not None and held.retire != mark.id:
            return Reason.CONFLICT
        changes.counts["buffered" if held.retire is None else "duplicate"] += 1
        held.retire = mark.id
        return None


FromUnknownWriter = Run | PartialRows | TurnedAway


def complete(
    stream: StreamState,
    runs: Sequence[Run],
    others: Sequence[PartialRows | TurnedAway],
    bounds: Bounds,
    changes: BatchOutcome,
) -> None:
    """Feed the edges and rows of one segment, and what was turned away in it."""
    known, strange = _sort_out(stream, runs, others, changes)
    if strange and not stream.unjoined:
        # What came before the first record of an unknown writer may still move the line; what came after may not.
        first = min(item.first_offset for item in strange)
        before = [part for run in known for part in run.parts(run.offsets < first)]
        _complete(stream, [*_apply(stream, before, bounds, changes)], changes)
        stream.advance_linear()
        known = [part for run in known for part in run.parts(run.offsets >= first)]
    held = [_hold(stream, item, bounds, changes) for item in strange]
    completed = [found for item in held if item is not None for found in item]
    _complete(stream, [*completed, *_apply(stream, known, bounds, changes)], changes)
    if None in held:
        stream.mark_overflow(changes)
    if any(item.writer is None for item in others):
        stream.mark_uncertain()
    stream.advance_linear()


def _sort_out(
    stream: StreamState, runs: Sequence[Run], others: Sequence[PartialRows | TurnedAway], changes: BatchOutcome
) -> tuple[list[Run], list[FromUnknownWriter]]:
    """Runs of writers that have joined, and what came from those that have not; the rest is counted or rejected.

    A retired writer that completes anything beyond its RETIRE, or may, is unknown again. What was turned away of an
    active writer holds it by its own broken chain.
    """
    known: list[Run] = []
    strange: list[FromUnknownWriter] = []
    items: list[Run | PartialRows | TurnedAway] = [*runs, *others]
    for item in sorted(items, key=attrgetter("first_offset")):
        if item.writer is None:
            continue
        if isinstance(item, Run) and stream.direction.opposes(item.direction):
            changes.rejected.append(Refusal.whole(Reason.MIXED_SIGN, item.offsets))
            continue
        writer = stream.writers.get(item.writer)
        if writer is None and item.epoch == 0 and _is_new(stream) and not strange:
            if isinstance(item, TurnedAway):
                stream.refused = max(stream.refused, item.reach)  # it may still be another that comes first
                continue
            writer = WriterState(0, Chain(refused=stream.refused), timeline=stream.timeline)
            stream.writers[item.writer] = writer
            stream.here += 1
        if writer is not None and item.epoch < writer.epoch:
            if not isinstance(item, TurnedAway):
                changes.rejected.append(Refusal.whole(Reason.ZOMBIE, item.offsets))
            continue
        if isinstance(item, Run):
            stream.set_direction(item.direction)
            changes.touch(item.writer, item.oldest)
        if writer is None or item.epoch > writer.epoch:
            strange.append(item)
        elif writer.retired is not None:
            known_too, strange_too = _after_retirement(writer, item)
            known.extend(known_too)
            strange.extend(strange_too)
        elif isinstance(item, TurnedAway):
            writer.chain.refuse(item.reach)
        elif isinstance(item, PartialRows):
            changes.counts["batch"] += len(item.offsets)
        else:
            known.append(item)
    return known, strange


def _after_retirement(writer: WriterState, item: FromUnknownWriter) -> tuple[list[Run], list[FromUnknownWriter]]:
    if not isinstance(item, Run):
        return [], [item] if item.reach > writer.position else []
    beyond = item.ids > writer.position
    return [*item.parts(~beyond)], [*item.parts(beyond)]


def _is_new(stream: StreamState) -> bool:
    """Whether nobody was ever seen here, so that a writer of epoch 0 needs no JOIN."""
    return not stream.writers and not stream.unjoined and stream.linear.position == 0


def _apply(stream: StreamState, runs: Sequence[Run], bounds: Bounds, changes: BatchOutcome) -> Iterator[Completed]:
    for run in runs:
        writer = stream.writers[run.writer]
        began = stream.began if writer.timeline == stream.timeline else 0
        feed = Classifier(writer.chain, bounds.pending, changes, "applied", writer.late, writer.published, began)
        yield from feed.run(run)
        writer.late = feed.late


def _complete(stream: StreamState, found: Sequence[Completed], changes: BatchOutcome) -> None:
    """Tell the line what was completed. What it has already is final (docs/design.md, rule 10): a completion of it
    comes late, also where another writer completed the ID, and the first one counts.
    """
    if not found:
        return
    ids = np.concatenate([run.ids for run, _ in found])
    completes = np.concatenate([run.completes for run, _ in found])
    counts = completes & np.concatenate([_of_this_timeline(stream, run) for run, _ in found])
    late = completes & stream.linear.complete(ids, np.concatenate([run.offsets for run, _ in found]), counts)
    if late.any():
        ends = np.cumsum([len(run) for run, _ in found])[:-1]
        for (run, outcome), mask in zip(found, np.split(late, ends), strict=True):
            if outcome != "late":
                changes.counts[outcome] -= int(np.count_nonzero(mask))
                for part in run.parts(mask):
                    changes.record_late(part, "final")


def _of_this_timeline(stream: StreamState, run: Run) -> Mask:
    """Which IDs of `run` are told of the stream's timeline.

    Until its writer joins again, what it tells beyond the JOIN that began it is of the timeline before: it was under
    way to Kafka when the database went back. Other writers had these IDs since, or will have them.
    """
    writer = stream.writers.get(run.writer)
    if writer is None or writer.epoch != run.epoch or writer.timeline == stream.timeline:
        return np.ones(len(run), np.bool_)
    return run.ids <= stream.began


def _hold(
    stream: StreamState, item: FromUnknownWriter, bounds: Bounds, changes: BatchOutcome
) -> list[Completed] | None:
    """What it completed; None where the bound leaves no place for it."""
    held = place(stream.unjoined, (item.writer or ANY_WRITER, item.epoch), bounds, changes)
    if held is None:
        if not isinstance(item, TurnedAway):
            changes.rejected.append(Refusal.whole(Reason.BUFFER_OVERFLOW, item.offsets))
        return None
    if isinstance(item, Run):
        return [*Classifier(held.chain, bounds.pending, changes, "buffered").run(item)]
    held.chain.refuse(item.reach)
    if isinstance(item, PartialRows):
        changes.counts["batch"] += len(item.offsets)
    return []
