"""The state machine of one stream: its writers, their positions and the linear position.

Pure: no Spark, no I/O, no clock. IDs are magnitudes; the callers remove and add the sign. An invalid record never
raises an error. Each record, or edge of a RUN, is counted under one outcome (`classify.Outcome`), or is rejected with
its reason (docs/design.md, rule 5).

Records come in *segments*. `StreamState.apply_segment` applies the records between two neighbouring markers (JOIN,
RETIRE, SKIP, OPEN) of the stream; then `StreamState.apply_marker` applies the second marker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np

from tidemark.streaming.core.chain import NO_POSITION, Chain, DeferredRange
from tidemark.streaming.core.classify import (
    BatchOutcome,
    ChainUpdater,
    CompletedRun,
    Rejection,
    RollbackSignal,
    TimelineStart,
)
from tidemark.streaming.core.effects import SourceReport
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import (
    OVERFLOW_SLOT,
    BatchRowOffsets,
    Incarnation,
    LinearPosition,
    UnjoinedWriter,
    UnjoinedWriters,
    WriterState,
    begin_epoch,
    detect_rollback,
    discard_unjoined,
    find_or_add_unjoined,
    has_another_start,
    is_repeated_join,
    join_checksum,
    settle_by_marker,
)
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds, Reason, replace_unprintable
from tidemark.streaming.wire.records import ANY_WRITER, Kind
from tidemark.streaming.wire.runs import UNBOUNDED, Marker, Mask, PossibleFacts, Run

UnknownWriterItem = Run | BatchRowOffsets | PossibleFacts
"""Records, or possible facts, of an incarnation that has not joined or has retired."""


def _split_at_retirement(writer: WriterState, item: UnknownWriterItem) -> tuple[list[Run], list[UnknownWriterItem]]:
    """Split an item of a retired writer: runs up to the writer's position, and items that may have IDs beyond it."""
    if not isinstance(item, Run):
        return [], [item] if item.reach > writer.position else []
    beyond = item.ids > writer.position
    return [*item.parts(~beyond)], [*item.parts(beyond)]


@dataclass(slots=True)
class StreamState:
    """The state of one stream.

    Attributes:
        direction: the sign of the IDs; set by the first accepted record with an ID other than 0.
        home_partition: Kafka partition of the stream; None before its first accepted record, and after
            `codec.forget_home`.
        linear: the linear position, with the completed IDs above it.
        writers: writers that have joined, by name.
        unjoined: incarnations that have sent records without a JOIN. While there is one, the linear position does not
            move (docs/design.md 3).
        timeline_number: number of the timeline. It rises when IDs above `timeline_start_id` may be given out again.
        database: the newest `DatabaseStart.database` that a JOIN named; None if no JOIN named one.
        highest_retired_position: the highest position that a writer of this timeline had when it retired.
        uncertain_up_to: rejected records may contain facts up to this ID, of writers that are not in `writers` or
            `unjoined`; `runs.UNBOUNDED` if the ID is not known; 0 if there are no such records.
        timeline_start_id: the ID at which the timeline began; 0 for the first timeline.
        active_count: number of active writers that joined in this timeline.
        transactions: writer -> open transactions that its last OPEN reported, one line of text each, for people.
        reports: writer -> `blocked` and `heartbeat` of its last OPEN. Has the writers whose last OPEN has one of them.
    """

    direction: Direction = Direction.UNKNOWN
    home_partition: int | None = None
    linear: LinearPosition = field(default_factory=LinearPosition)
    writers: Writers = field(default_factory=Writers)
    unjoined: UnjoinedWriters = field(default_factory=UnjoinedWriters)
    timeline_number: int = 1
    database: str | None = None
    highest_retired_position: int = 0
    uncertain_up_to: int = 0
    timeline_start_id: int = 0
    active_count: int = 0
    transactions: dict[str, list[str]] = field(default_factory=dict)
    reports: dict[str, SourceReport] = field(default_factory=dict)

    def set_direction(self, direction: Direction) -> None:
        """Set the direction of the stream, if the direction is still unknown. Call this for each accepted record."""
        self.direction = self.direction or direction

    @property
    def allocated(self) -> int:
        """The highest ID that is settled for any writer, joined or not, or the linear position if that is higher."""
        reaches = (writer.chain.highest_settled for writer in self.unjoined.values())
        return max([self.linear.position, self.writers.highest_settled(), *reaches])

    def current_epoch(self, name: str) -> int:
        """The epoch to use for an operator's record without an epoch: the current epoch of the writer `name`.

        For an active writer, this is the epoch in which the writer joined. For any other writer, this is the highest
        known epoch, joined or not; 0 if none is known.
        """
        writer = self.writers.get(name)
        if writer is not None and writer.retired_at is None:
            return writer.epoch
        last = 0 if writer is None else writer.epoch
        return max([last, *(epoch for _, epoch in self.unjoined.incarnations(name))])

    def mark_uncertain(self) -> None:
        """Record that a rejected record may contain a fact of any writer, including writers that are not yet known."""
        self.uncertain_up_to = UNBOUNDED
        self.writers.mark_uncertain()
        for unjoined in self.unjoined.values():
            unjoined.chain.mark_uncertain_up_to(UNBOUNDED)

    def apply_marker(self, marker: Marker, bounds: Bounds, batch: BatchOutcome) -> Reason | None:
        """Apply a JOIN, RETIRE, SKIP or OPEN.

        Returns:
            The reason if the marker is rejected, else None.
        """
        if self.direction.opposes(marker.direction):
            return Reason.MIXED_SIGN
        if marker.is_override and not marker.beyond and marker.id > self.allocated:
            return Reason.BEYOND_ALLOCATED
        if marker.kind is Kind.JOIN:
            reason = self.join(marker, batch)
        elif marker.kind is Kind.OPEN:
            reason = self.store_report(marker, batch)
        elif marker.kind is Kind.RETIRE:
            reason = self.retire(marker, bounds, batch)
        else:
            reason = self.skip(marker, batch)
        if reason is None:
            self.set_direction(marker.direction)
        return reason

    def join(self, marker: Marker, batch: BatchOutcome) -> Reason | None:
        """Apply a JOIN. A JOIN begins an epoch and settles all of the writer's IDs up to `marker.id`.

        If a JOIN names the current epoch and contradicts the JOIN that began this epoch, the epoch begins again. If an
        operator's JOIN names the current epoch, it reopens ranges above `marker.id` that only an operator settled.

        Returns:
            The reason if the JOIN is rejected, else None.
        """
        writer = self.writers.get(marker.writer)
        if writer is not None and marker.epoch < writer.epoch:
            return Reason.ZOMBIE
        if writer is not None and is_repeated_join(writer, marker, self.timeline_number, self.database):
            return self._repeat_join(writer, marker, batch)
        batch.counts["applied"] += 1
        writer, retire = self._begin_epoch(marker, batch)
        if retire is not None and not writer.chain.has_pending_beyond(retire):
            buffered = msgspec.structs.replace(marker, kind=Kind.RETIRE, id=retire, unseen=False, by=None)
            self._retire_writer(writer, buffered, batch)
        self.advance_linear()
        return None

    def retire(self, marker: Marker, bounds: Bounds, batch: BatchOutcome) -> Reason | None:
        """Apply a RETIRE: settle the writer's IDs up to `marker.id`, and mark the writer as retired.

        A writer's own RETIRE is buffered if its incarnation has not joined. If the writer is active, its own RETIRE
        also reopens ranges above `marker.id` that only an operator settled.

        An operator's RETIRE is not buffered. It also retires a writer that never joined, and an incarnation that sent
        records after its own retirement. If the RETIRE names a later epoch than the joined one, it discards the
        incarnation of the later epoch: IDs that the incarnation completed are late. A RETIRE of the writer `*` discards
        all incarnations that have not joined.

        Returns:
            The reason if the RETIRE is rejected, else None.
        """
        if marker.writer == ANY_WRITER:
            return self._discard_unjoined([*self.unjoined], batch)
        writer = self.writers.get(marker.writer)
        unjoined = self.unjoined.get((marker.writer, marker.epoch))
        if writer is not None and marker.epoch < writer.epoch:
            return Reason.ZOMBIE
        if marker.is_override and unjoined is not None and unjoined.chain.has_pending_beyond(marker.id):
            return Reason.CONFLICT
        if not marker.is_override and (writer is None or marker.epoch > writer.epoch):
            return self._buffer_retire(marker, bounds, batch)
        if writer is None:
            writer, _ = self._begin_epoch(marker, batch)
        elif marker.epoch > writer.epoch:
            return self._discard_unjoined([(marker.writer, marker.epoch)], batch)
        elif writer.retired_at is not None and marker.is_override and unjoined is not None:
            writer.chain.adopt(self.unjoined.pop((marker.writer, marker.epoch)).chain, writer.published_position)
        elif writer.retired_at is not None:
            if marker.id > writer.position:
                return Reason.CONFLICT
            batch.counts["duplicate"] += 1
            return None
        elif (reach := writer.chain.highest_settled if marker.is_override else writer.highest_settled_by_writer) > max(
            marker.id, writer.chain.position
        ):
            # IDs beyond the RETIRE are settled. Only a writer's own RETIRE may undo what an operator settled.
            return Reason.CONFLICT
        elif not marker.is_override:
            writer.reopen(max(marker.id, reach), batch.now)
        self._retire_writer(writer, marker, batch)
        batch.counts["applied"] += 1
        self.advance_linear()
        return None

    def skip(self, marker: Marker, batch: BatchOutcome) -> Reason | None:
        """Apply a SKIP of an operator: settle the open IDs in `(marker.prev, marker.id]`. Later completions are late.

        Returns:
            The reason if the SKIP is rejected, else None.
        """
        writer = self.writers.get(marker.writer)
        if writer is None or marker.epoch > writer.epoch:
            return Reason.UNKNOWN_WRITER
        if marker.epoch < writer.epoch:
            return Reason.ZOMBIE
        if writer.retired_at is not None:
            return Reason.CONFLICT
        skipped = settle_by_marker(writer, marker.prev, marker, "skipped", batch)
        batch.counts["applied" if len(skipped) else "duplicate"] += 1
        self.advance_linear()
        return None

    def store_report(self, marker: Marker, batch: BatchOutcome) -> Reason | None:
        """Store what the OPEN of an active writer reports: open transactions, why it is blocked, and its heartbeat.

        Replaces the previous report. Moves no position.

        Returns:
            The reason if the OPEN is rejected, else None.
        """
        writer = self.writers.get(marker.writer)
        if writer is None or marker.epoch > writer.epoch or writer.retired_at is not None:
            return Reason.UNKNOWN_WRITER
        if marker.epoch < writer.epoch:
            return Reason.ZOMBIE
        before = self.reports.get(marker.writer)
        self._forget_report(marker.writer)
        if marker.transactions:
            self.transactions[marker.writer] = [replace_unprintable(text) for text in marker.transactions]
        if marker.blocked or marker.heartbeat:
            blocked = replace_unprintable(marker.blocked)
            since = before.since if before is not None and before.blocked == blocked else batch.now
            self.reports[marker.writer] = SourceReport(marker.heartbeat, blocked, since if blocked else 0)
        batch.counts["applied"] += 1
        return None

    def apply_bounds(self, bounds: Bounds, batch: BatchOutcome) -> None:
        """Apply the bounds, once after a batch: drop excess completed IDs, and excess or expired retired writers.

        Retired writers beyond the linear position, and writers that the batch touched, are not dropped.
        """
        batch.counts["forgotten"] += self.linear.forget_excess(bounds.completed)
        # Keep writers that the batch touched, because their moves are not published yet.
        before = batch.now - bounds.retirement_ms
        for name in self.writers.find_expired(self.linear.position, bounds.retired, before, batch.touch_times):
            chain = self.writers.pop(name).chain
            self.uncertain_up_to = max(
                self.uncertain_up_to, chain.uncertain_up_to if chain.uncertain_up_to > chain.position else 0
            )
            batch.dropped_writers.append(name)

    def pop_deferred(self, bounds: Bounds) -> Iterator[tuple[str, int, DeferredRange]]:
        """Remove the deferred ranges that have room now, and yield them to be read again from Kafka.

        Call this method once after each batch, and exhaust the iterator.

        Yields:
            Name and epoch of a joined writer, and its range. At most one range per writer.
        """
        for name, writer in sorted(self.writers.decoded.items()):
            if (deferred := writer.chain.pop_deferred(bounds.pending)) is not None:
                yield name, writer.epoch, deferred

    def forget_offsets(self) -> None:
        """Remove the deferred ranges of all writers, if Kafka offsets are no longer valid. Their IDs stay uncertain."""
        self.writers.decode_waiting()
        chains = [writer.chain for writer in self.writers.decoded.values()]
        for chain in [*chains, *(unjoined.chain for unjoined in self.unjoined.values())]:
            chain.deferred.clear()

    def advance_linear(self) -> None:
        """Advance the linear position to the lowest position of the active writers, and over completed IDs.

        If no writer is active, advance to the highest position that a writer had when it retired. Do not advance while
        there are incarnations that have not joined. Do not advance if all active writers joined in an earlier timeline,
        to which their positions belong.
        """
        if self.unjoined or not self.writers:
            return
        floor = self.writers.floor()
        if floor is None or self.active_count:
            self.linear.advance(self.highest_retired_position if floor is None else floor)

    def position_in_timeline(self, writer: WriterState) -> int:
        """The position of the writer's chain; at most `timeline_start_id` for a writer of an earlier timeline."""
        return (
            writer.chain.position
            if writer.timeline_number == self.timeline_number
            else min(writer.chain.position, self.timeline_start_id)
        )

    def mark_overflow(self, batch: BatchOutcome) -> None:
        """Record that records were rejected at the bound `Bounds.unjoined`. Blocks the linear position."""
        self.unjoined.setdefault(OVERFLOW_SLOT, UnjoinedWriter(Chain(NO_POSITION), batch.now))
        self.mark_uncertain()

    # -- markers

    def _repeat_join(self, writer: WriterState, marker: Marker, batch: BatchOutcome) -> Reason | None:
        """Apply a repeated JOIN of the writer's current epoch. Returns the reason if the JOIN is rejected."""
        if marker.id > writer.position:
            return Reason.CONFLICT
        if not marker.is_override and not writer.join_crc:
            self._store_join_evidence(writer, marker)
        if marker.is_override and writer.retired_at is None and writer.reopen(marker.id, batch.now):
            self.writers.refresh_floor(marker.writer)
            batch.touch(marker.writer, marker.time)
            batch.counts["applied"] += 1
        else:
            batch.counts["duplicate"] += 1
        return None

    def _store_join_evidence(self, writer: WriterState, marker: Marker) -> None:
        """Store the checksum, the database and the start of the JOIN that began the writer's epoch."""
        writer.join_crc = 0 if marker.is_override else join_checksum(marker)
        if marker.timeline is not None:
            self.database, writer.start_token = marker.timeline.database or self.database, marker.timeline.start

    def _begin_epoch(self, marker: Marker, batch: BatchOutcome) -> tuple[WriterState, int | None]:
        """Begin the epoch of a JOIN, and a new timeline first if the JOIN shows that the database was restored.

        Returns:
            The writer, and the ID of the RETIRE that was buffered for this JOIN; None if there is no such RETIRE.
        """
        known = self.writers.get(marker.writer)
        if (why := detect_rollback(known, self.unjoined, marker, self.timeline_number, self.database)) is not None:
            self._begin_timeline(marker, known, why, batch)
        elif known is not None and known.retired_at is not None and known.chain.position > marker.no_reuse_up_to:
            # For example, an operator retired the writer with an ID beyond this JOIN.
            retired = [
                writer
                for _, writer in self.writers.find_beyond(marker.no_reuse_up_to)
                if writer.retired_at is not None and writer is not known
            ]
            self.highest_retired_position = max(
                [min(self.highest_retired_position, marker.no_reuse_up_to), *map(self.position_in_timeline, retired)]
            )
        self._forget_report(marker.writer)
        self.active_count += (
            known is None or known.retired_at is not None or known.timeline_number < self.timeline_number
        )
        writer, retire = begin_epoch(self.writers, self.unjoined, marker, self.uncertain_up_to, batch)
        self.writers.refresh_floor(marker.writer)
        writer.timeline_number = self.timeline_number
        self._store_join_evidence(writer, marker)
        return writer, retire

    def _begin_timeline(
        self, marker: Marker, known: WriterState | None, why: RollbackSignal, batch: BatchOutcome
    ) -> None:
        """Begin a timeline with the JOIN `marker`.

        If a relay has already joined other writers with the same start, these writers join the new timeline too.

        If the JOIN does not follow the writer's last start, the database may have lost a whole timeline. The lost
        timeline may have given out the IDs from `marker.id` to `marker.published` again. So completions of these IDs
        are counted again, as late.

        Args:
            known: the joining writer, in its state before the JOIN; None if it never joined.
            why: the evidence that the database was restored.
        """
        position = 0 if known is None else known.position
        follows_older_start = known is not None and has_another_start(known, marker)
        limit = marker.id if follows_older_start else marker.no_reuse_up_to
        self.timeline_number, self.timeline_start_id = self.timeline_number + 1, limit
        self.active_count, self.highest_retired_position = 0, min(self.highest_retired_position, limit)
        batch.timelines.append(TimelineStart(marker.writer, marker.epoch, limit, position, self.timeline_number, why))
        for name, writer in self.writers.find_beyond(limit):
            writer.roll_back(limit, name, batch)
            self.writers.refresh_floor(name)
            batch.touch(name, marker.time)
        batch.counts["forgotten"] += self.linear.forget_above(limit)
        if marker.timeline is not None and marker.published is not None:
            for writer in self.writers.values():
                if writer.start_token == marker.timeline.start:
                    writer.timeline_number = self.timeline_number
                    self.active_count += writer.retired_at is None

    def _retire_writer(self, writer: WriterState, marker: Marker, batch: BatchOutcome) -> None:
        settle_by_marker(writer, 0, marker, "retired", batch)
        writer.chain.deferred.clear()
        self.active_count -= writer.timeline_number == self.timeline_number and writer.retired_at is None
        self.highest_retired_position = max(self.highest_retired_position, self.position_in_timeline(writer))
        writer.retired_at = batch.now
        self._forget_report(marker.writer)

    def _forget_report(self, writer: str) -> None:
        self.transactions.pop(writer, None)
        self.reports.pop(writer, None)

    def _discard_unjoined(self, incarnations: Sequence[Incarnation], batch: BatchOutcome) -> Reason | None:
        if not self.unjoined.keys() & incarnations:
            return Reason.UNKNOWN_WRITER
        for incarnation in incarnations:
            uncertain_up_to = discard_unjoined(self.unjoined, incarnation, batch)
            if (writer := self.writers.get(incarnation[0])) is not None:
                writer.chain.mark_uncertain_up_to(uncertain_up_to)
            else:
                self.uncertain_up_to = max(self.uncertain_up_to, uncertain_up_to)
        batch.counts["applied"] += 1
        self.advance_linear()
        return None

    def _buffer_retire(self, marker: Marker, bounds: Bounds, batch: BatchOutcome) -> Reason | None:
        unjoined = find_or_add_unjoined(self.unjoined, (marker.writer, marker.epoch), bounds, batch)
        if unjoined is None:
            self.mark_overflow(batch)
            return Reason.BUFFER_OVERFLOW
        if unjoined.retire_id is not None and unjoined.retire_id != marker.id:
            return Reason.CONFLICT
        batch.counts["buffered" if unjoined.retire_id is None else "duplicate"] += 1
        unjoined.retire_id = marker.id
        return None

    # -- segments

    def apply_segment(
        self,
        runs: Sequence[Run],
        others: Sequence[BatchRowOffsets | PossibleFacts],
        bounds: Bounds,
        batch: BatchOutcome,
    ) -> None:
        """Apply the records of one segment.

        Args:
            runs: the edges.
            others: batch rows, and facts that rejected records may contain.
            bounds: the bounds of the stream's state.
            batch: collects the changes.
        """
        known, unknown = self._split_known_and_unknown(runs, others, batch)
        if unknown and not self.unjoined:
            # Only records before the first record of an unknown writer may still move the linear position.
            first = min(item.first_offset for item in unknown)
            before = [part for run in known for part in run.parts(run.offsets < first)]
            self._add_completed([*self._apply_runs(before, bounds, batch)], batch)
            self.advance_linear()
            known = [part for run in known for part in run.parts(run.offsets >= first)]
        buffered = [self._buffer(item, bounds, batch) for item in unknown]
        completed = [edges for parts in buffered if parts is not None for edges in parts]
        self._add_completed([*completed, *self._apply_runs(known, bounds, batch)], batch)
        if None in buffered:
            self.mark_overflow(batch)
        if any(item.writer is None for item in others):
            self.mark_uncertain()
        self.advance_linear()

    def _split_known_and_unknown(
        self, runs: Sequence[Run], others: Sequence[BatchRowOffsets | PossibleFacts], batch: BatchOutcome
    ) -> tuple[list[Run], list[UnknownWriterItem]]:
        """Return the runs of joined writers, and the items of unknown writers. Count, reject or ignore all other items.

        The first writer of a new stream joins by its first record, if its epoch is 0.

        A retired writer that completes, or may complete, an ID above its RETIRE becomes unknown again. A rejected
        record of an active writer marks IDs of the writer as uncertain.
        """
        known: list[Run] = []
        unknown: list[UnknownWriterItem] = []
        items: list[Run | BatchRowOffsets | PossibleFacts] = [*runs, *others]
        for item in sorted(items, key=attrgetter("first_offset")):
            if item.writer is None:
                continue
            if isinstance(item, Run) and self.direction.opposes(item.direction):
                batch.rejections.append(Rejection.of_records(Reason.MIXED_SIGN, item.offsets))
                continue
            writer = self.writers.get(item.writer)
            if writer is None and item.epoch == 0 and self._is_new() and not unknown:
                if isinstance(item, PossibleFacts):
                    # The stream stays new: a writer of epoch 0 may still be the first one.
                    self.uncertain_up_to = max(self.uncertain_up_to, item.reach)
                    continue
                writer = WriterState(
                    0, Chain(uncertain_up_to=self.uncertain_up_to), timeline_number=self.timeline_number
                )
                self.writers[item.writer] = writer
                self.active_count += 1
            if writer is not None and item.epoch < writer.epoch:
                if not isinstance(item, PossibleFacts):
                    batch.rejections.append(Rejection.of_records(Reason.ZOMBIE, item.offsets))
                continue
            if isinstance(item, Run):
                self.set_direction(item.direction)
                batch.touch(item.writer, item.oldest)
            if writer is None or item.epoch > writer.epoch:
                unknown.append(item)
            elif writer.retired_at is not None:
                before, after = _split_at_retirement(writer, item)
                known.extend(before)
                unknown.extend(after)
            elif isinstance(item, PossibleFacts):
                writer.chain.mark_uncertain_up_to(item.reach)
            elif isinstance(item, BatchRowOffsets):
                batch.counts["batch"] += len(item.offsets)
            else:
                known.append(item)
        return known, unknown

    def _is_new(self) -> bool:
        """True if the stream has no history: then a writer of epoch 0 needs no JOIN."""
        return not self.writers and not self.unjoined and self.linear.position == 0

    def _apply_runs(self, runs: Sequence[Run], bounds: Bounds, batch: BatchOutcome) -> Iterator[CompletedRun]:
        for run in runs:
            writer = self.writers[run.writer]
            timeline_start_id = self.timeline_start_id if writer.timeline_number == self.timeline_number else 0
            late_ranges, published_position = writer.late_ranges, writer.published_position
            updater = ChainUpdater(
                writer.chain, bounds.pending, batch, "applied", late_ranges, published_position, timeline_start_id
            )
            yield from updater.apply(run)
            writer.late_ranges = updater.late_ranges

    def _add_completed(self, completed: Sequence[CompletedRun], batch: BatchOutcome) -> None:
        """Pass completed IDs to the linear position.

        An ID is final if the linear position has passed the ID, or if a writer has completed the ID (docs/design.md,
        rule 10). Another completion of a final ID is late.
        """
        if not completed:
            return
        ids = np.concatenate([run.ids for run, _ in completed])
        completes = np.concatenate([run.completes for run, _ in completed])
        counts = completes & np.concatenate([self._current_timeline_mask(run) for run, _ in completed])
        late = completes & self.linear.add_completed(ids, np.concatenate([run.offsets for run, _ in completed]), counts)
        if late.any():
            ends = np.cumsum([len(run) for run, _ in completed])[:-1]
            for (run, outcome), mask in zip(completed, np.split(late, ends), strict=True):
                if outcome != "late":
                    batch.counts[outcome] -= int(np.count_nonzero(mask))
                    for part in run.parts(mask):
                        batch.record_late(part, "final")

    def _current_timeline_mask(self, run: Run) -> Mask:
        """Mask of the IDs of `run` that belong to the current timeline.

        Until the writer joins again, its IDs above the start of the timeline belong to the previous timeline: their
        records were in flight when the database was restored. The restored database gives out these IDs again.
        """
        writer = self.writers.get(run.writer)
        if writer is None or writer.epoch != run.epoch or writer.timeline_number == self.timeline_number:
            return np.ones(len(run), np.bool_)
        return run.ids <= self.timeline_start_id

    def _buffer(self, item: UnknownWriterItem, bounds: Bounds, batch: BatchOutcome) -> list[CompletedRun] | None:
        """Buffer an item of an incarnation that has not joined.

        Returns:
            The completed edges of the item; None if `bounds.unjoined` is reached.
        """
        unjoined = find_or_add_unjoined(self.unjoined, (item.writer or ANY_WRITER, item.epoch), bounds, batch)
        if unjoined is None:
            if not isinstance(item, PossibleFacts):
                batch.rejections.append(Rejection.of_records(Reason.BUFFER_OVERFLOW, item.offsets))
            return None
        if isinstance(item, Run):
            return [*ChainUpdater(unjoined.chain, bounds.pending, batch, "buffered").apply(item)]
        unjoined.chain.mark_uncertain_up_to(item.reach)
        if isinstance(item, BatchRowOffsets):
            batch.counts["batch"] += len(item.offsets)
        return []
