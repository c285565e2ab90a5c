"""Applies a batch of records to the streams of one shard: packets in, effects and new states out. Pure; no Spark.

The records of a stream are sorted by offset and cut into segments at the markers (docs/decisions/0001-segments.md).
`core.stream` applies the segments. Markers of the control topic have no order relative to the facts (docs/design.md 3).
They are applied last, because the facts of the batch may make an override needless.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

import msgspec
import numpy as np

from tidemark.streaming.core import codec
from tidemark.streaming.core.classify import BatchOutcome, LateRange, Rejection
from tidemark.streaming.core.effects import (
    ClosedGap,
    Gap,
    LateCompletion,
    NewTimeline,
    NextOffset,
    OperatorOverride,
    RequeuedRange,
    ShardEffects,
    StreamEffects,
    WriterAdvance,
    WriterRow,
    summarize,
)
from tidemark.streaming.core.fast_path import advance_in_order
from tidemark.streaming.core.store import (
    UNREADABLE_STATE,
    AcceptedRecord,
    Partition,
    States,
    StreamInput,
    group_by_stream,
    split_segments,
)
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writers import BatchRowOffsets, UnjoinedWriter, WriterState
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.values.limits import Bounds, EncodedState, Reason, RejectedRecords
from tidemark.streaming.wire.records import CURRENT_EPOCH
from tidemark.streaming.wire.runs import BatchRows, Marker, PackedRun, Packet, PossibleFacts, Run, RunColumns


def apply_batch(shard: int, states: States, packets: list[Packet], now: int, bounds: Bounds) -> ShardEffects:
    """Apply the records of a batch to the streams of a shard, and return the effects.

    The same input gives the same effects, byte for byte.

    Args:
        shard: number of the shard.
        states: encoded states of the shard's streams. The new states replace them in this object.
        packets: the records of the batch for this shard, in any order.
        now: time of the batch, milliseconds since 1970. Spark replays a batch with the same value.
        bounds: bounds of the streams' states.
    """
    rejected: dict[tuple[str, int, Reason], list[Rejection]] = defaultdict(list)
    for packet in packets:
        for bad in packet.rejected:
            reason = Reason(bad.reason)
            rejection = Rejection.of_records(reason, np.frombuffer(bad.offsets, np.int64))
            rejected[bad.topic, bad.partition, reason].append(rejection)
    streams = []
    columns = RunColumns.of([packet.runs for packet in packets])
    inputs = group_by_stream(packets, columns, states, bounds)
    states.prepare_lookups(len(inputs))
    # If the bound of unreadable streams is reached, records of a new stream may have been dropped in an earlier batch.
    is_full = states.unreadable_count() >= bounds.unreadable and any(name not in states for name in inputs)
    in_order = advance_in_order(inputs, columns, states, now, bounds)
    for name, stream_input in sorted(inputs.items()):
        if (done := in_order.get(name)) is not None:
            streams.append(done.effects)
            states[name] = done.whole
            continue
        batch = StreamBatch(
            name, states.get(name) or (UNREADABLE_STATE if is_full else None), now, bounds.for_stream(name)
        )
        batch.feed(stream_input)
        for topic, partition, rejection in batch.rejections:
            rejected[topic, partition, rejection.reason].append(rejection)
        streams.append(batch.finish())
        states[name] = batch.encoded.whole
    return ShardEffects(
        shard,
        now,
        streams,
        [_merge_rejections(*key, rejections) for key, rejections in sorted(rejected.items())],
        _next_offsets(packets),
        any(packet.is_cut_short for packet in packets),
    )


def _merge_rejections(topic: str, partition: int, reason: Reason, rejections: list[Rejection]) -> RejectedRecords:
    """Merge rejections of one partition and reason. Each record occurs once in the result.

    Its ID is the rejected ID nearest to 0, or 0 if the whole record is rejected.
    """
    offsets, ids = (
        np.concatenate([getattr(rejection, name) for rejection in rejections]) for name in ("offsets", "ids")
    )
    order = np.lexsort((np.abs(ids), offsets))
    offsets, firsts = np.unique(offsets[order], return_index=True)
    ids = ids[order][firsts]
    return RejectedRecords(topic, partition, reason, offsets.tobytes(), ids.tobytes() if ids.any() else b"")


def _next_offsets(packets: list[Packet]) -> list[NextOffset]:
    """The next offset to read of each partition: the highest `next_offset` of its packets."""
    offsets: dict[Partition, int] = {}
    for packet in packets:
        partition = packet.topic, packet.partition
        offsets[partition] = max(packet.next_offset, offsets.get(partition, 0))
    return [NextOffset(topic, partition, offset) for (topic, partition), offset in sorted(offsets.items())]


class StreamBatch:
    """One batch of one stream: call `feed` once to apply the records, then `finish` once to end the batch.

    Args:
        name: name of the stream.
        encoded_state: the encoded state before the batch; None for a new stream.
        now: time (ms) of the batch.
        bounds: bounds of the stream's state.

    Attributes:
        stream: the state, decoded.
        outcome: the changes of the batch so far.
        rejections: rejected records and edges as `(topic, partition, rejection)`; IDs are signed.
        overrides: the accepted operator overrides as `(marker, by, why)`.
        requeues: deferred records to read again, because their edges now have room; set by `feed`.
        encoded: the new state; set by `finish`.
    """

    def __init__(self, name: str, encoded_state: bytes | None, now: int, bounds: Bounds) -> None:
        self.name = name
        self.stream = StreamState() if encoded_state is None else codec.decode(encoded_state)
        self.outcome = BatchOutcome(now)
        self.rejections: list[tuple[str, int, Rejection]] = []
        self.overrides: list[tuple[Marker, str, str]] = []
        self.requeues: list[RequeuedRange] = []
        self.encoded = EncodedState(b"", b"", None)
        self._bounds = bounds
        self._linear_before = self.stream.linear.position
        self._allocated_before = self.stream.allocated

    def feed(self, stream_input: StreamInput) -> None:
        """Apply all records of the batch, then the bounds of the state."""
        partitions = sorted(stream_input.partitions() | stream_input.possible_facts.keys())
        home = self.stream.home_partition
        if home is None:
            home = min((partition for _, partition in stream_input.partitions()), default=None)
        # Records of other partitions have no order relative to the rest.
        self._feed_as_rejected(stream_input, [key for key in partitions if key[1] != home])
        for partition in partitions:
            if self.stream.home_partition in (None, partition[1]):
                count = self.outcome.counts.total()
                self._feed_facts(
                    *partition, [*stream_input.items(partition), *stream_input.possible_facts.get(partition, ())]
                )
                if self.outcome.counts.total() > count:  # rejected records do not set the home partition
                    self.stream.home_partition = partition[1]
            else:
                self._reject_wrong_partition(*partition, stream_input.items(partition))
        self._feed_as_rejected(
            stream_input, [key for key in partitions if self.stream.home_partition not in (None, key[1])]
        )
        for (topic, number), marker in sorted(stream_input.control, key=lambda item: (item[0], item[1].offset)):
            self._apply_marker(topic, number, marker)
        self.stream.apply_bounds(self._bounds, self.outcome)
        if (home := self.stream.home_partition) is not None:
            self.requeues = [
                RequeuedRange(name, epoch, home, deferred.first_offset, deferred.last_offset)
                for name, epoch, deferred in self.stream.pop_deferred(self._bounds)
            ]

    def _feed_as_rejected(self, stream_input: StreamInput, partitions: list[Partition]) -> None:
        """Apply the facts that the records of `partitions` may contain, as if all of these records were rejected.

        Also applies the facts that rejected records of the control topic may contain.
        """
        possible_facts = [
            *stream_input.possible_control_facts,
            *(record for partition in partitions for record in stream_input.as_rejected(partition)),
        ]
        if possible_facts:
            self.outcome.has_unordered_rejections = True
            self.stream.apply_segment((), possible_facts, self._bounds, self.outcome)

    def _feed_facts(self, topic: str, partition: int, items: list[AcceptedRecord | PossibleFacts]) -> None:
        """Apply the records of one partition of the facts topic, segment by segment."""
        for segment, marker in split_segments(items):
            runs = [Run.unpack(item) for item in segment if isinstance(item, PackedRun)]
            others = [
                BatchRowOffsets(item.writer, item.epoch, _offsets(item), item.first_offset)
                if isinstance(item, BatchRows)
                else item
                for item in segment
                if not isinstance(item, PackedRun)
            ]
            if segment:
                self.stream.apply_segment(runs, others, self._bounds, self.outcome)
            if marker is not None:
                self._apply_marker(topic, partition, marker)
        sign = self.stream.direction.signed(1)
        for rejection in self.outcome.rejections:
            self.rejections.append(
                (topic, partition, Rejection(rejection.reason, rejection.offsets, sign * rejection.ids))
            )
        self.outcome.rejections.clear()
        for item in items:
            if not isinstance(item, PossibleFacts):
                self._note_seen(item)

    def _note_seen(self, item: AcceptedRecord) -> None:
        """Set `last_seen` of the record's writer to the time of the batch, even if the state rejected the record.

        The timestamp of the record is not used: it comes from the writer's clock, which may be wrong.
        """
        incarnation = item.writer, item.epoch
        writer: WriterState | UnjoinedWriter | None = self.stream.unjoined.get(incarnation)
        if writer is None:
            joined = self.stream.writers.get(item.writer)
            if joined is None or joined.epoch != item.epoch:
                return
            writer = joined
        writer.last_seen = max(writer.last_seen, self.outcome.now)

    def _reject_wrong_partition(self, topic: str, partition: int, items: Iterable[AcceptedRecord]) -> None:
        for item in items:
            offsets = np.array([item.offset]) if isinstance(item, Marker) else _offsets(item)
            self.rejections.append((topic, partition, Rejection.of_records(Reason.WRONG_PARTITION, offsets)))

    def _apply_marker(self, topic: str, partition: int, marker: Marker) -> None:
        if marker.epoch == CURRENT_EPOCH:
            marker = msgspec.structs.replace(marker, epoch=self.stream.current_epoch(marker.writer))
        reason = self.stream.apply_marker(marker, self._bounds, self.outcome)
        if reason is not None:
            self.rejections.append((topic, partition, Rejection.of_records(reason, np.array([marker.offset]))))
        elif marker.by is not None and marker.why is not None:
            self.overrides.append((marker, marker.by, marker.why))

    def finish(self) -> StreamEffects:
        """End the batch: encode the new state and return the effects."""
        stream, outcome = self.stream, self.outcome
        signed, allocated = stream.direction.signed, stream.allocated
        stream.linear.update_heads(self._allocated_before, allocated, outcome.now)
        advances: list[WriterAdvance] = []
        gaps: list[Gap] = []
        closed: list[ClosedGap] = []
        for name, oldest in sorted(outcome.touch_times.items()):
            writer = stream.writers.get(name)
            if writer is None:
                continue
            moves = writer.take_changes()
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
            gaps.extend(
                Gap(name, writer.epoch, signed(low), signed(top), since) for low, top, since in moves.changed_gaps
            )
            closed.extend(ClosedGap(name, signed(top), how) for top, how in sorted(moves.closed_gaps.items()))
        self.encoded = codec.encode_parts(stream)
        moved = {move.writer for move in advances}
        return StreamEffects(
            self.name,
            stream.direction,
            signed(self._linear_before),
            signed(stream.linear.position),
            signed(self._allocated_before),
            signed(allocated),
            advances,
            [
                WriterRow(name, writer.epoch, signed(writer.position), writer.retired_at is not None)
                for name, writer in sorted(stream.writers.decoded.items())
                if name in moved
                or stream.writers.before_batch.get(name) != (writer.epoch, writer.retired_at is not None)
            ],
            gaps,
            closed,
            [
                LateCompletion(late.writer, late.epoch, signed(late.prev), signed(late.id), late.facts, late.why)
                for late in _merge_late_ranges(outcome.late_ranges)
            ],
            [
                OperatorOverride(
                    marker.writer, marker.epoch, marker.kind.name, signed(marker.prev), signed(marker.id), by, why
                )
                for marker, by, why in self.overrides
            ],
            [
                NewTimeline(
                    start.writer, start.epoch, signed(start.id), signed(start.position), start.number, start.why
                )
                for start in outcome.timelines
            ],
            outcome.dropped_writers,
            {name: count for name, count in sorted(outcome.counts.items()) if count},
            summarize(stream),
            self.encoded.state,
            self.encoded.retired_table,
            self.requeues,
        )


def _merge_late_ranges(ranges: list[LateRange]) -> list[LateRange]:
    """Merge late ranges of one writer, epoch and reason that touch or overlap.

    The effects then do not depend on how edges were packed into runs.
    """
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
