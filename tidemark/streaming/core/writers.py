"""The state of one writer of a stream, joined or not; the effects of a JOIN; and the linear position. Pure.

`core.stream` calls the functions of this module. Functions with an argument `batch` change their arguments, and record
the changes in `batch`. For IDs that a JOIN or RETIRE settles, the marker is the only evidence (docs/design.md 3). IDs
are magnitudes.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from zlib import crc32

import msgspec
import numpy as np

from tidemark.streaming.core.chain import NO_POSITION, Chain, ChainChanges, SettledBy, Span
from tidemark.streaming.core.classify import BatchOutcome, LateRange, RollbackSignal
from tidemark.streaming.values.intervals import NO_INTERVALS, Ids, Intervals
from tidemark.streaming.values.limits import NO_EVIDENCE, Bounds, Evidence
from tidemark.streaming.wire.records import ANY_WRITER
from tidemark.streaming.wire.runs import UNBOUNDED, Marker, Mask

Incarnation = tuple[str, int]
"""A writer's name and epoch."""

OVERFLOW_SLOT: Incarnation = (ANY_WRITER, 0)
"""The entry of `UnjoinedWriters` for all incarnations whose records were rejected at the bound `Bounds.unjoined`. The
entry stays, and blocks the linear position, until an operator retires `*`.
"""


@dataclass(slots=True)
class WriterState:
    """The state of a writer that has joined.

    If a range of an active writer is settled and also in `late_ranges`, only an operator settled the range.

    Attributes:
        epoch: the current epoch.
        chain: the chain in the stream's current timeline. Its position may be below `published_position` after the
            database was restored or an override was taken back. The linear position follows the chain.
        retired_at: time (ms) of the batch that retired the writer; None if it is active.
        published_position: the position that was published before the chain was set back; 0 if this never happened.
        late_ranges: ranges in which the next completion of an ID is late. Up to `published_position`, the position had
            passed the ID before the chain was set back. Beyond `published_position`, an operator settled the ID.
        timeline_number: number of the newest timeline that the writer has joined.
        start_token: token of the writer's last start (`DatabaseStart.start`); None if no JOIN named a token.
        last_seen: time (ms) of the batch that read the writer's newest record; 0 if unknown.
        join_crc: checksum of the JOIN that began the epoch (`join_checksum`); 0 if an operator or no JOIN began it.
    """

    epoch: int
    chain: Chain
    retired_at: int | None = None
    late_ranges: Intervals = NO_INTERVALS
    published_position: int = 0
    timeline_number: int = 1
    start_token: str | None = None
    last_seen: int = 0
    join_crc: int = 0
    _position_before: int = field(default=0, init=False)
    """Position at the last `take_changes`."""

    def __post_init__(self) -> None:
        self._position_before = self.position

    @property
    def position(self) -> int:
        """The writer's position. It never goes back, even if the chain does."""
        return max(self.chain.position, self.published_position)

    def take_changes(self) -> ChainChanges:
        """Return the changes since the last call: the gaps of the chain, and the move of the writer's position."""
        moves = self.chain.take_changes()
        # The counts of a partly published span are upper bounds, limited to the width of the move.
        evidence = moves.evidence.at_most(self.position - self._position_before)
        moves = replace(moves, prev=self._position_before, id=self.position, evidence=evidence)
        self._position_before = self.position
        return moves

    def roll_back(self, limit: int, name: str, batch: BatchOutcome) -> None:
        """Set the chain back to `limit`, because a restored database may give out IDs beyond `limit` again.

        Records unpublished completions beyond `limit` as late in `batch`.

        Args:
            name: name of the writer.
        """
        record_rolled_back(self.epoch, self.chain.cut_above(limit), self.late_ranges, name, batch)
        if self.chain.position > limit:
            self.published_position = max(self.published_position, self.chain.position)
            self.chain.restart_at(limit)
        self.late_ranges = self.late_ranges.up_to(limit)
        if self.published_position > limit:
            self.late_ranges = self.late_ranges.union(Intervals.of([(limit, self.published_position)]))

    @property
    def highest_settled_by_writer(self) -> int:
        """The highest settled ID, without IDs that only an operator settled; 0 if there is none."""
        if not len(self.late_ranges):
            return self.chain.highest_settled
        own = self.chain.settled_intervals().difference(self.late_ranges)
        return int(own.highs[-1]) if len(own) else 0

    def reopen(self, id: int, now: int) -> bool:
        """Reopen ranges beyond `id` that only an operator settled.

        The writer's position does not go back. Completions up to the position are late.

        Args:
            now: time (ms) of the batch, from which the age of the new gaps counts.

        Returns:
            True if a range was reopened; False if there is no such range.
        """
        overridden = self.chain.settled_intervals().intersection(self.late_ranges.above(id))
        if not len(overridden):
            return False
        self.published_position = self.position
        self.chain.reopen(overridden, now)
        self.late_ranges = self.late_ranges.up_to(max(id, self.published_position))
        return True


@dataclass(slots=True)
class UnjoinedWriter:
    """The state of an incarnation that has sent records without a JOIN.

    Attributes:
        chain: the IDs that the incarnation's edges settled; the chain has no position (`NO_POSITION`).
        since: time (ms) of the batch that read the first record of the incarnation.
        retire_id: ID of a RETIRE that is buffered until the JOIN; None if there is no RETIRE.
        last_seen: time (ms) of the batch that read the newest record of the incarnation; 0 if unknown.
    """

    chain: Chain
    since: int
    retire_id: int | None = None
    last_seen: int = 0


class UnjoinedWriters(MutableMapping[Incarnation, UnjoinedWriter]):
    """Incarnations that have not joined, by name and epoch, with an index by name."""

    def __init__(self, unjoined: Mapping[Incarnation, UnjoinedWriter] | None = None) -> None:
        self._all: dict[Incarnation, UnjoinedWriter] = {}
        self._epochs_by_name: dict[str, set[int]] = {}
        self.update(unjoined or {})

    def incarnations(self, name: str) -> list[Incarnation]:
        """Incarnations of one writer, in the order of their epochs."""
        return [(name, epoch) for epoch in sorted(self._epochs_by_name.get(name, ()))]

    def __getitem__(self, incarnation: Incarnation) -> UnjoinedWriter:
        return self._all[incarnation]

    def __setitem__(self, incarnation: Incarnation, unjoined: UnjoinedWriter) -> None:
        name, epoch = incarnation
        self._all[incarnation] = unjoined
        self._epochs_by_name.setdefault(name, set()).add(epoch)

    def __delitem__(self, incarnation: Incarnation) -> None:
        name, epoch = incarnation
        del self._all[incarnation]
        self._epochs_by_name[name].remove(epoch)
        if not self._epochs_by_name[name]:
            del self._epochs_by_name[name]

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def find_or_add_unjoined(
    unjoined: UnjoinedWriters, incarnation: Incarnation, bounds: Bounds, batch: BatchOutcome
) -> UnjoinedWriter | None:
    """Return the state of an incarnation that has not joined. Adds an empty state for a new incarnation.

    Returns:
        None if the incarnation is new and `bounds.unjoined` is reached.
    """
    if incarnation not in unjoined and len(unjoined) - (OVERFLOW_SLOT in unjoined) >= bounds.unjoined:
        return None
    return unjoined.setdefault(incarnation, UnjoinedWriter(Chain(NO_POSITION), batch.now))


def discard_unjoined(unjoined: UnjoinedWriters, incarnation: Incarnation, batch: BatchOutcome) -> int:
    """Remove an incarnation that has not joined. Records its settled ranges as late in `batch`.

    Returns:
        The `Chain.uncertain_up_to` of the incarnation, which its rejected records determine.
    """
    chain = unjoined.pop(incarnation).chain
    for span in chain.pending:
        batch.late_ranges.append(LateRange(*incarnation, span.prev, span.id, span.evidence.facts, "skipped"))
    return chain.uncertain_up_to


@dataclass(frozen=True, slots=True)
class BatchRowOffsets:
    """The offsets of batch rows of one writer and epoch: rows of facts, without the row that has the ID of its fact.

    Batch rows move no position. If the writer has not joined, batch rows count like rejected facts, because the record
    with the ID may never come.
    """

    writer: str
    epoch: int
    offsets: Ids
    first_offset: int

    @property
    def reach(self) -> int:
        """The highest ID that the facts may have: `UNBOUNDED`, because the ID is not known."""
        return UNBOUNDED


def join_checksum(marker: Marker) -> int:
    """The checksum of a JOIN's content: 32 bits, never 0. A repeated JOIN has the same checksum.

    The checksum does not include `published`: a relay that repeats the JOIN reads this value again, and it may have
    changed.
    """
    return crc32(msgspec.msgpack.encode((marker.id, marker.unseen, marker.timeline))) or 1


def detect_rollback(
    writer: WriterState | None, unjoined: UnjoinedWriters, marker: Marker, timeline_number: int, database: str | None
) -> RollbackSignal | None:
    """Return the evidence in a JOIN that the writer's database was restored; None if there is no such evidence.

    If the database was restored, it may give out IDs above `marker.no_reuse_up_to` again.

    A JOIN below the linear position, or below the position of another writer, is no evidence: the writer read the
    allocated ID before others advanced. If the writer has not joined in this timeline, its own chain and start are no
    evidence: the restore that began the timeline explains the difference.

    Args:
        writer: the writer that joins, in its state before the JOIN; None if it never joined.
        unjoined: incarnations that have not joined.
        marker: the JOIN.
        timeline_number: number of the stream's current timeline.
        database: the newest `DatabaseStart.database` that a JOIN of the stream named; None if no JOIN named one.
    """
    if _has_another_database(marker, database):
        return "database"
    incarnations = unjoined.incarnations(marker.writer)
    earlier = (unjoined[incarnation].chain for incarnation in incarnations if incarnation[1] < marker.epoch)
    if any(chain.has_pending_beyond(marker.no_reuse_up_to) for chain in earlier):
        return "position"
    if writer is None or writer.timeline_number < timeline_number:
        return None
    if marker.no_reuse_up_to < writer.highest_settled_by_writer:
        return "position"
    return "start" if has_another_start(writer, marker) else None


def is_repeated_join(writer: WriterState, marker: Marker, timeline_number: int, database: str | None) -> bool:
    """True if a JOIN names the current epoch of its writer and is consistent with the JOIN that began the epoch.

    - An operator's JOIN is consistent, and so is a JOIN with the same checksum.
    - A JOIN with another checksum is consistent only if the writer has joined in this timeline and `detect_rollback`
      finds no rollback.
    - If the epoch began by an operator's JOIN or without a JOIN, no checksum is stored. Then a JOIN is consistent if it
      has no timeline or the writer's last start, or if neither its database nor its start differs from the known ones.

    Epochs rise with each start (docs/design.md 4), so two starts with one epoch show that the database was restored.
    """
    if marker.epoch != writer.epoch:
        return False
    if marker.is_override or writer.join_crc == join_checksum(marker):
        return True
    if writer.join_crc:
        return (
            writer.timeline_number == timeline_number
            and detect_rollback(writer, _NO_UNJOINED, marker, timeline_number, database) is None
        )
    if marker.timeline is None or marker.timeline.start == writer.start_token:
        return True
    return not (_has_another_database(marker, database) or has_another_start(writer, marker))


def _has_another_database(marker: Marker, database: str | None) -> bool:
    return (
        marker.timeline is not None
        and None not in (database, marker.timeline.database)
        and database != (marker.timeline.database)
    )


def has_another_start(writer: WriterState, marker: Marker) -> bool:
    """True if the start in a JOIN is neither the writer's last start, nor the start after that one in a new epoch.

    False if the JOIN names no start, or the writer's last start is not known.
    """
    if marker.timeline is None or writer.start_token in (None, marker.timeline.start):
        return False
    is_next = writer.start_token == marker.timeline.after
    return not is_next or (marker.epoch == writer.epoch and writer.join_crc != 0)


_NO_UNJOINED = UnjoinedWriters()


def begin_epoch(
    writers: MutableMapping[str, WriterState],
    unjoined: UnjoinedWriters,
    marker: Marker,
    uncertain_up_to: int,
    batch: BatchOutcome,
) -> tuple[WriterState, int | None]:
    """Begin the epoch of a JOIN.

    IDs that earlier epochs completed up to `marker.no_reuse_up_to` keep their evidence. The JOIN settles the IDs up to
    `marker.id` that these epochs left open. If an earlier epoch completed an ID beyond `marker.no_reuse_up_to`, the ID
    was rolled back with the writer's database (docs/design.md 3), and is late.

    IDs of rejected records are uncertain (`Chain.uncertain_up_to`). After the JOIN, IDs of earlier epochs' records are
    certain again. IDs of the following rejected records stay uncertain:

    - records of the JOIN's epoch that came before the JOIN;
    - records that have no order relative to the JOIN;
    - records that were rejected at the bound `Bounds.unjoined`.

    Args:
        writers: the joined writers. A new writer is added.
        unjoined: incarnations that have not joined. The writer's incarnations up to the epoch of the JOIN are removed.
        uncertain_up_to: `StreamState.uncertain_up_to`, for a new writer.

    Returns:
        The writer, and the ID of the RETIRE that was buffered for this JOIN; None if there is no such RETIRE.
    """
    writer = writers.setdefault(marker.writer, WriterState(marker.epoch, Chain(uncertain_up_to=uncertain_up_to)))
    writer.roll_back(marker.no_reuse_up_to, marker.writer, batch)
    writer.chain.deferred.clear()
    retire, uncertain_up_to = None, 0
    for incarnation in unjoined.incarnations(marker.writer):
        _, epoch = incarnation
        if epoch > marker.epoch:
            continue
        before = unjoined.pop(incarnation)
        if epoch < marker.epoch:
            spans = before.chain.cut_above(marker.no_reuse_up_to)
            record_rolled_back(epoch, spans, NO_INTERVALS, marker.writer, batch)
        else:
            retire, uncertain_up_to, writer.chain.deferred = (
                before.retire_id,
                before.chain.uncertain_up_to,
                before.chain.deferred,
            )
            for low, high in writer.late_ranges.above(marker.id):
                record_rolled_back(
                    marker.epoch, before.chain.spans_within(low, high), NO_INTERVALS, marker.writer, batch
                )
        writer.chain.adopt(before.chain, writer.published_position)
    # IDs up to the JOIN that an operator settled: only the epoch that ends now could complete them.
    writer.chain.declare_empty(writer.late_ranges.up_to(marker.id))
    writer.epoch, writer.retired_at = marker.epoch, None
    writer.late_ranges = writer.late_ranges.above(marker.id)
    settle_by_marker(writer, 0, marker, "joined", batch)
    if not batch.has_unordered_rejections and OVERFLOW_SLOT not in unjoined:
        writer.chain.uncertain_up_to = uncertain_up_to
    return writer, retire


def record_rolled_back(
    epoch: int, spans: Iterable[Span], overridden: Intervals, writer: str, batch: BatchOutcome
) -> None:
    """Record settled ranges of an earlier timeline as late. Ranges that certainly have no fact are left out.

    Args:
        epoch: the epoch that settled the ranges.
        spans: the settled ranges, none of them published.
        overridden: ranges that only an operator settled; they are left out too.
    """
    for span in spans:
        for low, high in overridden.missing(span.prev, span.id):
            evidence = span.evidence.at_most(high - low)
            if evidence.facts or evidence.unseen:
                batch.late_ranges.append(LateRange(writer, epoch, low, high, evidence.facts, "regressed"))


def settle_by_marker(writer: WriterState, prev: int, marker: Marker, how: SettledBy, batch: BatchOutcome) -> Intervals:
    """Settle a writer's open IDs in `(prev, marker.id]`, because of a marker.

    If an operator sent the marker, later completions of these IDs are late. IDs up to the published position get no
    evidence, because their evidence was already published. Also marks the writer as touched in `batch`.

    Returns:
        The ranges that were open.
    """
    open_ranges = Intervals.of(writer.chain.open_ranges(prev, marker.id))
    for low, high in open_ranges.up_to(writer.published_position):
        writer.chain.settle(low, high, NO_EVIDENCE, 0, how, batch.now)
    for low, high in open_ranges.above(writer.published_position):
        evidence = _evidence(marker, low, high, writer.chain.uncertain_up_to)
        writer.chain.settle(low, high, evidence, 0, how, batch.now)
        if evidence.empty:
            writer.chain.declare_empty(Intervals.of([(high - evidence.empty, high)]))
    if marker.is_override:
        writer.late_ranges = writer.late_ranges.union(open_ranges)
    batch.touch(marker.writer, marker.time)
    return open_ranges


def _evidence(marker: Marker, low: int, high: int, uncertain_up_to: int) -> Evidence:
    """The evidence of the open range `(low, high]` that `marker` settles.

    IDs up to `uncertain_up_to` count as `unseen`: a rejected record may contain their facts, and the writer does not
    learn of a rejection.
    """
    width = high - low
    if marker.is_override:
        return Evidence(skipped=width)
    unseen = width if marker.unseen else min(max(uncertain_up_to - low, 0), width)
    return Evidence(unseen=unseen, empty=width - unseen)


HEADS_MAX = 16
"""The largest length of `LinearPosition.heads`. If `heads` is longer, every second entry is dropped. Some IDs then
appear older than they are; none appears younger.
"""


@dataclass(slots=True)
class LinearPosition:
    """The linear position of a stream, with the completed IDs above it.

    Attributes:
        position: every ID up to this one is settled, whichever writer it belongs to.
        completed_ids: completed IDs above the position: facts and voids of any writer, in the current timeline.
        heads: the history of the highest allocated ID as `(head, since)`, ascending. At the time `since` (ms), a batch
            first allocated IDs beyond `head`. The first `head` is the position itself. Empty if there is no linear lag.
    """

    position: int = 0
    completed_ids: Intervals = NO_INTERVALS
    heads: list[tuple[int, int]] = field(default_factory=list)

    def add_completed(self, ids: Ids, offsets: Ids, eligible: Mask) -> Mask:
        """Store completed IDs above the position.

        Args:
            ids: completed IDs, in any order; an ID may occur more than once.
            offsets: Kafka offset of each ID's record.
            eligible: mask of the IDs to store.

        Returns:
            Mask of the IDs that were already final: the position has passed the ID, an earlier call stored the ID, or
            an eligible record at a lower offset completes the ID.
        """
        final = (ids <= self.position) | self.completed_ids.contains(ids)
        added = Intervals.from_ids(ids)
        if added.width() < len(ids):
            order = np.lexsort((offsets, ids))
            ordered, indexes = ids[order], np.arange(len(ids))
            # For each ID but the first: the index of the last ID before it that counts.
            last = np.maximum.accumulate(np.where(eligible[order], indexes, -1))[:-1]
            final[order[1:]] |= (last >= 0) & (ordered[1:] == ordered[last])
        if not eligible.all():
            added = Intervals.from_ids(ids[eligible])
        self.completed_ids = self.completed_ids.union(added.above(self.position))
        return final

    def advance(self, floor: int) -> None:
        """Advance to `floor`, and over the completed IDs that follow without a hole. Never goes back."""
        self.position = self.completed_ids.contiguous_end(max(self.position, floor))
        self.completed_ids = self.completed_ids.above(self.position)

    def update_heads(self, head_before: int, head: int, now: int) -> None:
        """Update `heads`, once after a batch.

        Args:
            head_before: highest allocated ID before the batch.
            head: highest allocated ID after the batch.
            now: time (ms) of the batch.
        """
        if head <= self.position:
            self.heads = []
            return
        if passed := bisect_right(self.heads, self.position, key=itemgetter(0)):
            self.heads[:passed] = [(self.position, self.heads[passed - 1][1])]
        if not self.heads:
            self.heads = [(self.position, now)]
        while self.heads[-1][0] >= head:  # the database was restored
            self.heads.pop()
        last, since = self.heads[-1]
        if head > head_before > last and now > since:
            self.heads.append((head_before, now))
            if len(self.heads) > HEADS_MAX:
                del self.heads[1::2]

    def forget_above(self, id: int) -> int:
        """Remove the completed IDs beyond `id`, which may be given out again. Returns the number of removed IDs."""
        return self._replace_completed(self.completed_ids.up_to(id))

    def forget_excess(self, intervals_max: int) -> int:
        """Keep only the lowest `intervals_max` intervals of completed IDs. Returns the number of removed IDs.

        If a completed ID is removed, the linear position may move later, but never too early.
        """
        return self._replace_completed(self.completed_ids.lowest(intervals_max))

    def _replace_completed(self, remaining: Intervals) -> int:
        if remaining is self.completed_ids:
            return 0
        forgotten = self.completed_ids.width() - remaining.width()
        self.completed_ids = remaining
        return forgotten
