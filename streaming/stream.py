"""The state machine of one stream: who has joined, what is settled, how far the line is. The heart of Tidemark.

Pure: no Spark, no I/O, no clock of its own; magnitudes only, the sign lives at the edges of the system. Nothing here
raises for what a writer sent: each record is counted as applied, held, duplicate, late or one of several rows, or it
is rejected with its reason (docs/design.md, rule 5).

Records come in *segments*: `complete` takes the edges between two neighbouring JOIN or RETIRE records of the stream,
then `join`, `retire` or `skip` takes the marker. Inside a segment the order of arrival does not matter but for two
things, which the offsets decide: who was first on a new stream, and what came before a writer that never joined.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from tidemark.streaming.chain import NOWHERE, Chain
from tidemark.streaming.changes import Changes, LateRange, TimelineBegun
from tidemark.streaming.classify import Classifier, Completed
from tidemark.streaming.direction import Direction
from tidemark.streaming.joined import Writers
from tidemark.streaming.linear import LinearPosition
from tidemark.streaming.model import Bounds, Reason
from tidemark.streaming.runs import Run
from tidemark.streaming.writers import HeldRows, HeldWriter, Incarnation, Mark, WriterState, begin, settle, went_back


@dataclass(slots=True)
class StreamState:
    """`home` is the Kafka partition that the stream lives in.

    While `held` holds anything, the line stays (docs/design.md 3). `timeline` goes up when IDs may be given out again;
    `database` is the history of the database that the newest JOIN named. `ended` is the highest position that a writer
    had when it retired.
    """

    direction: Direction = Direction.UNKNOWN
    home: int | None = None
    line: LinearPosition = field(default_factory=LinearPosition)
    writers: Writers = field(default_factory=Writers)
    held: dict[Incarnation, HeldWriter] = field(default_factory=dict)
    timeline: int = 1
    database: str | None = None
    ended: int = 0

    def face(self, direction: Direction) -> None:
        """A record was accepted whose ID has that direction; the first one that has any decides for ever."""
        self.direction = self.direction or direction

    @property
    def allocated(self) -> int:
        """The highest ID that the stream's records have named, about: every ID up to here was allocated."""
        return max([self.line.position, self.writers.reach(), *(held.chain.reach for held in self.held.values())])

    def complete(self, runs: Sequence[Run], rows: Sequence[HeldRows], bounds: Bounds, changes: Changes) -> None:
        """Feed the edges and rows of one segment."""
        known, strange = self._sort_out(runs, rows, changes)
        if strange and not self.held:
            # What came before the first record of an unknown writer may still move the line; what came after may not.
            first = min(item.first_offset for item in strange)
            before = [part for run in known for part in run.parts(run.offsets < first)]
            self._complete([*self._apply(before, bounds, changes)], changes)
            self._settle_line()
            known = [part for run in known for part in run.parts(run.offsets >= first)]
        held = [found for item in strange for found in self._hold(item, bounds, changes)]
        self._complete([*held, *self._apply(known, bounds, changes)], changes)
        self._settle_line()

    def join(self, mark: Mark, changes: Changes) -> Reason | None:
        """A new epoch begins: all of the writer's IDs up to `mark.id` are complete. Gives why not, or None."""
        writer = self.writers.get(mark.writer)
        if writer is not None and mark.epoch <= writer.epoch:
            if mark.epoch < writer.epoch:
                return Reason.ZOMBIE
            if mark.id > writer.position:
                return Reason.CONFLICT
            changes.counts["duplicate"] += 1
            return None
        changes.counts["applied"] += 1
        writer, retire = self._begin(mark, changes)
        if retire is not None and not writer.chain.pending_beyond(retire):
            self._end(writer, Mark(mark.writer, mark.epoch, retire, mark.time), changes)
        self._settle_line()
        return None

    def retire(self, mark: Mark, bounds: Bounds, changes: Changes) -> Reason | None:
        """The writer is complete up to `mark.id` and nothing follows. Gives why it is refused, or None.

        An incarnation that never joined has said nothing that may move a position: its RETIRE waits for its JOIN. An
        operator's RETIRE does not, and is how a held incarnation is got rid of, also one that went on after it retired.
        Of a writer that has joined, it only throws out the incarnation that never did: what that one said is late.
        """
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
            return self._throw_out(mark, changes)
        elif writer.retired is not None and mark.forced and held is not None:
            writer.chain.adopt(self.held.pop((mark.writer, mark.epoch)).chain, writer.published)
        elif writer.retired is not None:
            if mark.id > writer.position:
                return Reason.CONFLICT
            changes.counts["duplicate"] += 1
            return None
        elif writer.chain.pending_beyond(mark.id):
            return Reason.CONFLICT
        self._end(writer, mark, changes)
        changes.counts["applied"] += 1
        self._settle_line()
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
        self._settle_line()
        return None

    def distrust(self, incarnation: Incarnation, reach: int, bounds: Bounds, changes: Changes) -> None:
        """Its records up to `reach` were rejected: they stand in another partition and have no order against this one.

        A writer that has joined is held by its own broken chain; any other holds the line until it joins here.
        """
        name, epoch = incarnation
        writer = self.writers.get(name)
        if writer is not None and epoch < writer.epoch:
            return
        if writer is not None and epoch == writer.epoch and writer.retired is None:
            writer.chain.refused = max(writer.chain.refused, reach)
        elif (held := self._held(incarnation, bounds, changes)) is not None:
            held.chain.refused = max(held.chain.refused, reach)

    def doubt(self) -> None:
        """A record could not be read: it may be a fact of any writer, so what their next marker settles is `unseen`."""
        self.writers.doubt()
        for held in self.held.values():
            held.doubt = True

    def keep_within(self, bounds: Bounds, changes: Changes) -> None:
        """Called once after a batch: forget what passes the bounds, and retired writers that the line has passed."""
        changes.counts["forgotten"] += self.line.forget_beyond(bounds.completed)
        # What the batch touched has still its moves to tell.
        before = changes.now - bounds.retirement
        for name in self.writers.outlived(self.line.position, bounds.retired, before, changes.touched):
            del self.writers[name]
            changes.dropped.append(name)

    def _settle_line(self) -> None:
        """Both halves of the line's definition; with no writer left it goes to the highest position of any."""
        if self.held or not self.writers:
            return
        floor = self.writers.floor()
        self.line.settle(self.ended if floor is None else floor)

    # -- edges

    def _sort_out(
        self, runs: Sequence[Run], rows: Sequence[HeldRows], changes: Changes
    ) -> tuple[list[Run], list[Run | HeldRows]]:
        """Runs of writers that have joined, and what came from those that have not; the rest is counted or rejected.

        A retired writer that completes anything beyond its RETIRE is unknown again.
        """
        known: list[Run] = []
        strange: list[Run | HeldRows] = []
        items: list[Run | HeldRows] = [*runs, *rows]
        for item in sorted(items, key=attrgetter("first_offset")):
            if isinstance(item, Run) and self.direction.opposes(item.direction):
                changes.rejected.append((Reason.MIXED_SIGN, np.sort(item.offsets)))
                continue
            writer = self.writers.get(item.writer)
            if writer is None and item.epoch == 0 and self._is_new() and not strange:
                writer = self.writers[item.writer] = WriterState(0, Chain())
            if writer is not None and item.epoch < writer.epoch:
                changes.rejected.append((Reason.ZOMBIE, np.sort(item.offsets)))
                continue
            if isinstance(item, Run):
                self.face(item.direction)
                changes.touch(item.writer, item.oldest)
            if writer is None or item.epoch > writer.epoch:
                strange.append(item)
            elif isinstance(item, HeldRows):
                changes.counts["batch"] += len(item.offsets)
            elif writer.retired is None:
                known.append(item)
            else:
                beyond = item.ids > writer.position
                known.extend(item.parts(~beyond))
                strange.extend(item.parts(beyond))
        return known, strange

    def _is_new(self) -> bool:
        """Whether nobody was ever seen here, so that a writer of epoch 0 needs no JOIN."""
        return not self.writers and not self.held and self.line.position == 0

    def _apply(self, runs: Sequence[Run], bounds: Bounds, changes: Changes) -> Iterator[Completed]:
        for run in runs:
            writer = self.writers[run.writer]
            feed = Classifier(writer.chain, bounds.pending, changes, "applied", writer.late, writer.published)
            yield from feed.run(run)

    def _complete(self, found: Sequence[Completed], changes: Changes) -> None:
        """Tell the line what was completed. What it has already is final (docs/design.md, rule 10): a completion of it
        comes late, also where another writer completed the ID, and the first one counts.
        """
        if not found:
            return
        ids = np.concatenate([run.ids for run, _ in found])
        completes = np.concatenate([run.completes for run, _ in found])
        late = self.line.final(ids, np.concatenate([run.offsets for run, _ in found]), completes)
        if late.any():
            ends = np.cumsum([len(run) for run, _ in found])[:-1]
            for (run, outcome), mask in zip(found, np.split(late, ends), strict=True):
                if outcome != "late":
                    changes.counts[outcome] -= int(np.count_nonzero(mask))
                    for part in run.parts(mask):
                        changes.be_late(part, "final")
        self.line.remember(ids[completes])

    def _hold(self, item: Run | HeldRows, bounds: Bounds, changes: Changes) -> Iterator[Completed]:
        held = self._held((item.writer, item.epoch), bounds, changes)
        if held is None:
            changes.rejected.append((Reason.HELD_OVERFLOW, np.sort(item.offsets)))
        elif isinstance(item, HeldRows):
            changes.counts["batch"] += len(item.offsets)
        else:
            yield from Classifier(held.chain, bounds.pending, changes, "held").run(item)

    def _held(self, incarnation: Incarnation, bounds: Bounds, changes: Changes) -> HeldWriter | None:
        """The place where its records wait; None where the bound leaves none."""
        if incarnation not in self.held and len(self.held) >= bounds.held:
            return None
        return self.held.setdefault(incarnation, HeldWriter(Chain(NOWHERE), changes.now))

    # -- markers

    def _begin(self, mark: Mark, changes: Changes) -> tuple[WriterState, int | None]:
        """Begin the epoch of a JOIN, and a new timeline first where it shows that the database went back."""
        known = self.writers.get(mark.writer)
        if (why := went_back(known, self.held, mark, self.timeline, self.database)) is not None:
            self.timeline += 1
            position = known.position if known is not None else 0
            begun = TimelineBegun(mark.writer, mark.epoch, mark.id, position, self.timeline, why)
            changes.timelines.append(begun)
            for name, writer in self.writers.beyond(mark.id):
                writer.go_back(mark.id, name, changes)
                self.writers.follow(name)
                changes.touch(name, mark.time)
            changes.counts["forgotten"] += self.line.forget_above(mark.id)
        writer, retire = begin(self.writers, self.held, mark, changes)
        self.writers.follow(mark.writer)
        writer.timeline = self.timeline
        if mark.timeline is not None:
            self.database = mark.timeline.database or self.database
        return writer, retire

    def _end(self, writer: WriterState, mark: Mark, changes: Changes) -> None:
        settle(writer, 0, mark, "retired", changes)
        writer.retired = changes.now
        self.ended = max(self.ended, writer.position)

    def _throw_out(self, mark: Mark, changes: Changes) -> Reason | None:
        held = self.held.pop((mark.writer, mark.epoch), None)
        if held is None:
            return Reason.UNKNOWN_WRITER
        for span in held.chain.pending:
            late = LateRange(mark.writer, mark.epoch, span.prev, span.id, span.evidence.facts, "skipped")
            changes.late.append(late)
        changes.counts["applied"] += 1
        self._settle_line()
        return None

    def _hold_retire(self, mark: Mark, bounds: Bounds, changes: Changes) -> Reason | None:
        held = self._held((mark.writer, mark.epoch), bounds, changes)
        if held is None:
            return Reason.HELD_OVERFLOW
        if held.retire is not None and held.retire != mark.id:
            return Reason.CONFLICT
        changes.counts["held" if held.retire is None else "duplicate"] += 1
        held.retire = mark.id
        return None
