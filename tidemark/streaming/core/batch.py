"""One batch of one shard: packets in, effects and new states out. Pure; no Spark.

Restores each stream's total order from offsets, cuts it into segments (docs/decisions/0001-segments.md), and feeds them
to `core.stream`. Operators' records come after the facts of the same batch: the control topic has no order against
them (docs/design.md 3), and what the facts settle needs no force.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

import msgspec
import numpy as np

from tidemark.streaming.core import codec as state
from tidemark.streaming.core.effects import (
    Forced,
    Gap,
    GapClosed,
    LateCompletion,
    NewTimeline,
    Progress,
    Recall,
    ShardEffects,
    StreamEffects,
    WriterAdvance,
    WriterRow,
    summarize,
)
from tidemark.streaming.core.fast_path import advance_plain
from tidemark.streaming.core.outcome import BatchOutcome, LateRange, Refusal
from tidemark.streaming.core.store import UNREADABLE, States
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.stream_input import Fact, Inbox, Partition, inboxes_of, segments
from tidemark.streaming.core.writers import PartialRows, UnjoinedWriter, WriterState
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.values.limits import Bounds, Encoded, Reason, Rejected
from tidemark.streaming.wire.records import CURRENT_EPOCH
from tidemark.streaming.wire.runs import BatchRows, Marker, PackedRun, Packet, Run, RunColumns, TurnedAway


def advance(shard: int, states: States, packets: list[Packet], now: int, bounds: Bounds) -> ShardEffects:
    """Feed `packets` (in any order) to the streams of `states`, which is changed in place; `now` is in ms since 1970.

    The same input gives the same effects, byte for byte.
    """
    rejected: dict[tuple[str, int, Reason], list[Refusal]] = defaultdict(list)
    for seen in packets:
        for bad in seen.rejected:
            reason = Reason(bad.reason)
            refusal = Refusal.whole(reason, np.frombuffer(bad.offsets, np.int64))
            rejected[bad.topic, bad.partition, reason].append(refusal)
    streams = []
    columns = RunColumns.of([seen.runs for seen in packets])
    inboxes = inboxes_of(packets, columns, states, bounds)
    states.expect(len(inboxes))
    crowded = states.unread() >= bounds.unread and any(name not in states for name in inboxes)
    plain = advance_plain(inboxes, columns, states, now, bounds)
    for name, inbox in sorted(inboxes.items()):
        if (done := plain.get(name)) is not None:
            streams.append(done.effects)
            states[name] = done.whole
            continue
        batch = StreamBatch(name, states.get(name) or (UNREADABLE if crowded else None), now, bounds.of(name))
        batch.feed(inbox)
        for topic, partition, refusal in batch.rejected:
            rejected[topic, partition, refusal.reason].append(refusal)
        streams.append(batch.effects())
        states[name] = batch.encoded.whole
    return ShardEffects(
        shard,
        now,
        streams,
        [_once(*place, refusals) for place, refusals in sorted(rejected.items())],
        _progress(packets),
        any(seen.cut for seen in packets),
    )


def _once(topic: str, partition: int, reason: Reason, refusals: list[Refusal]) -> Rejected:
    """Each record once, with the lowest of the IDs for which it was refused."""
    offsets, ids = (np.concatenate([getattr(it, name) for it in refusals]) for name in ("offsets", "ids"))
    order = np.lexsort((np.abs(ids), offsets))
    offsets, firsts = np.unique(offsets[order], return_index=True)
    ids = ids[order][firsts]
    return Rejected(topic, partition, reason, offsets.tobytes(), ids.tobytes() if ids.any() else b"")


def _progress(packets: list[Packet]) -> list[Progress]:
    offsets: dict[Partition, int] = {}
    for seen in packets:
        origin = seen.topic, seen.partition
        offsets[origin] = max(seen.next_offset, offsets.get(origin, 0))
    return [Progress(topic, partition, offset) for (topic, partition), offset in sorted(offsets.items())]


class StreamBatch:
    """One stream during one batch."""

    def __init__(self, name: str, stored: bytes | None, now: int, bounds: Bounds) -> None:
        self.name = name
        self.stream = StreamState() if stored is None else state.decode(stored)
        self.changes = BatchOutcome(now)
        self.rejected: list[tuple[str, int, Refusal]] = []
        self.forced: list[tuple[Marker, str, str]] = []
        self.recalls: list[Recall] = []
        self._bounds = bounds
        self._line_before = self.stream.linear.position
        self._allocated_before = self.stream.allocated
        self.encoded = Encoded(b"", b"", None)

    def feed(self, inbox: Inbox) -> None:
        places = sorted(inbox.places() | inbox.refused.keys())
        likely = (
            self.stream.home if self.stream.home is not None else min((at for _, at in inbox.places()), default=None)
        )
        # What came elsewhere has no order against the rest: it may have been before it, and may have been after it.
        self._feed_elsewhere(inbox, [place for place in places if place[1] != likely])
        for place in places:
            if self.stream.home in (None, place[1]):
                taken = self.changes.counts.total()
                self._feed_facts(*place, [*inbox.items(place), *inbox.refused.get(place, ())])
                if self.changes.counts.total() > taken:  # of records that are refused no stream has its home
                    self.stream.home = place[1]
            else:
                self._turn_away(*place, inbox.items(place))
        self._feed_elsewhere(inbox, [place for place in places if self.stream.home not in (None, place[1])])
        for (topic, partition), marker in sorted(inbox.control, key=lambda found: (found[0], found[1].offset)):
            self._mark(topic, partition, marker)
        self.stream.keep_within(self._bounds, self.changes)
        if (home := self.stream.home) is not None:
            recalled = self.stream.recall(self._bounds)
            self.recalls = [Recall(name, epoch, home, it.first, it.last) for name, epoch, it in recalled]

    def _feed_elsewhere(self, inbox: Inbox, places: list[Partition]) -> None:
        refused = [*inbox.apart, *(it for place in places for it in inbox.claims(place))]
        if refused:
            self.changes.elsewhere = True
            self.stream.apply_segment((), refused, self._bounds, self.changes)

    def _feed_facts(self, topic: str, partition: int, items: list[Fact | TurnedAway]) -> None:
        for segment, marker in segments(items):
            runs = [Run.unpack(item) for item in segment if isinstance(item, PackedRun)]
            others = [
                PartialRows(item.writer, item.epoch, _offsets(item), item.first_offset)
                if isinstance(item, BatchRows)
                else item
                for item in segment
                if not isinstance(item, PackedRun)
            ]
            if segment:
                self.stream.apply_segment(runs, others, self._bounds, self.changes)
            if marker is not None:
                self._mark(topic, partition, marker)
        sign = self.stream.direction.signed(1)
        for it in self.changes.rejected:
            self.rejected.append((topic, partition, Refusal(it.reason, it.offsets, sign * it.ids)))
        self.changes.rejected.clear()
        for item in items:
            if not isinstance(item, TurnedAway):
                self._note_life(item)

    def _note_life(self, item: Fact) -> None:
        """The writer lives, whatever became of the record. The time is the batch's: a record's own timestamp comes from
        the clock of the writer, which may be wrong."""
        incarnation = item.writer, item.epoch
        found: WriterState | UnjoinedWriter | None = self.stream.unjoined.get(incarnation)
        if found is None and ((found := self.stream.writers.get(item.writer)) is None or found.epoch != item.epoch):
            return
        found.seen = max(found.seen, self.changes.now)

    def _turn_away(self, topic: str, partition: int, items: Iterable[Fact]) -> None:
        for item in items:
            offsets = np.array([item.offset]) if isinstance(item, Marker) else _offsets(item)
            self.rejected.append((topic, partition, Refusal.whole(Reason.WRONG_PARTITION, offsets)))

    def _mark(self, topic: str, partition: int, marker: Marker) -> None:
        if marker.epoch == CURRENT_EPOCH:
            marker = msgspec.structs.replace(marker, epoch=self.stream.current_epoch(marker.writer))
        refused = self.stream.apply_marker(marker, self._bounds, self.changes)
        if refused is not None:
            self.rejected.append((topic, partition, Refusal.whole(refused, np.array([marker.offset]))))
            return
        if marker.by is not None and marker.why is not None:
            self.forced.append((marker, marker.by, marker.why))

    def effects(self) -> StreamEffects:
        """What came of it; ends the batch. `encoded` is the new state from then on."""
        stream, changes = self.stream, self.changes
        signed, allocated = stream.direction.signed, stream.allocated
        stream.linear.follow(self._allocated_before, allocated, changes.now)
        advances: list[WriterAdvance] = []
        gaps: list[Gap] = []
        closed: list[GapClosed] = []
        for name, oldest in sorted(changes.touched.items()):
            writer = stream.writers.get(name)
            if writer is None:
                continue
            moves = writer.take()
            if moves.prev != moves.id:
                advances.append(
                    WriterAdvance(
                        name,
                        writer.epoch,
                        signed(moves.prev),
                        signed(moves.id),
                        *moves.evidence.counts,
                        oldest,
                    )
                )
            gaps.extend(Gap(name, writer.epoch, signed(low), signed(top), since) for low, top, since in moves.changed)
            closed.extend(GapClosed(name, signed(top), how) for top, how in sorted(moves.closed.items()))
        self.encoded = state.encode_apart(stream)
        moved = {move.writer for move in advances}
        return StreamEffects(
            self.name,
            stream.direction,
            signed(self._line_before),
            signed(stream.linear.position),
            signed(self._allocated_before),
            signed(allocated),
            advances,
            [
                WriterRow(name, writer.epoch, signed(writer.position), writer.retired is not None)
                for name, writer in sorted(stream.writers.open.items())
                if name in moved or stream.writers.before.get(name) != (writer.epoch, writer.retired is not None)
            ],
            gaps,
            closed,
            [
                LateCompletion(it.writer, it.epoch, signed(it.prev), signed(it.id), it.facts, it.why)
                for it in _merged(changes.late)
            ],
            [
                Forced(it.writer, it.epoch, it.kind.name, signed(it.prev), signed(it.id), by, why)
                for it, by, why in self.forced
            ],
            [
                NewTimeline(it.writer, it.epoch, signed(it.id), signed(it.position), it.number, it.why)
                for it in changes.timelines
            ],
            changes.dropped,
            {outcome: count for outcome, count in sorted(changes.counts.items()) if count},
            summarize(stream),
            self.encoded.state,
            self.encoded.retired,
            self.recalls,
        )


def _merged(ranges: list[LateRange]) -> list[LateRange]:
    """Ranges that touch or overlap as one, so that it does not show in which runs they came."""
    merged: list[LateRange] = []
    for late in sorted(ranges, key=attrgetter("writer", "epoch", "why", "prev", "id")):
        last = merged[-1] if merged else None
        if last and (last.writer, last.epoch, last.why) == (late.writer, late.epoch, late.why) and late.prev <= last.id:
            merged[-1] = replace(last, id=max(last.id, late.id), facts=last.facts + late.facts)
        else:
            merged.append(late)
    return merged


def _offsets(item: PackedRun | BatchRows) -> Ids:
    return np.frombuffer(item.offsets, np.uint32).astype(np.int64) + item.first_offset
