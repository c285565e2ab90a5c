"""Applies recorded records of a stream again, and computes the stream's positions, without Spark and without a
database.

If the first records or the first days of the history are missing, `find_start` finds the batch after which the replay
starts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from tidemark.common.errors import BadRecord
from tidemark.sinks.postgres.inspect import BatchAdvance, StoredBatch, StreamBatches
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import States
from tidemark.streaming.ingest.compact import pack
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import RecordBatch
from tidemark.streaming.values.direction import is_beyond
from tidemark.streaming.values.limits import Bounds, Evidence
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Join, Rdata, Record, Retire, Topic
from tidemark.streaming.wire.runs import Packet

NO_EVIDENCE: Final = Evidence()


class _StreamName(msgspec.Struct):
    stream: str = ""


_stream_decoder = msgspec.json.Decoder(_StreamName)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The state of a stream in a replay.

    Attributes:
        stream: the name of the stream.
        bounds: the limits with which the pipeline ran.
        encoded_state: the encoded state; None before the first record.
        linear: the linear position, signed.
        positions: writer -> the position, signed.
        evidence_by_writer: writer -> the sum of its evidence.
    """

    stream: str
    bounds: Bounds
    encoded_state: bytes | None = None
    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    evidence_by_writer: Mapping[str, Evidence] = field(default_factory=dict)

    def apply(self, messages: Sequence[RecordedMessage], topic_roles: Mapping[str, Topic], now: int) -> "Replayed":
        """Return the state after a batch of more records. Does not change this object.

        Args:
            messages: the records of the batch.
            topic_roles: the role of each topic, by name.
            now: batch time, milliseconds since 1970.
        """
        if not messages:
            return self
        states = {} if self.encoded_state is None else {self.stream: self.encoded_state}
        batch = apply_batch(0, States(states), make_packets(messages, topic_roles), now, self.bounds)
        for effects in batch.streams:
            if effects.stream == self.stream:
                positions, counts = dict(self.positions), dict(self.evidence_by_writer)
                for move in effects.advances:
                    positions[move.writer] = move.id
                    counts[move.writer] = counts.get(move.writer, NO_EVIDENCE) + move.evidence
                return replace(
                    self,
                    encoded_state=states[self.stream],
                    linear=effects.linear,
                    positions=positions,
                    evidence_by_writer=counts,
                )
        return self

    def without_counts(self) -> "Replayed":
        return replace(self, evidence_by_writer={})

    def has_reached(self, batch: StoredBatch) -> bool:
        """Whether the linear position, and the writers that the batch moved, have reached their positions after the
        batch."""
        return not is_beyond(self.linear if batch.linear is None else batch.linear, self.linear) and not any(
            is_beyond(move.id, self.positions.get(move.writer, 0)) for move in batch.advances
        )


def group_messages_by_stream(messages: Iterable[RecordedMessage]) -> dict[str, list[RecordedMessage]]:
    """Group records by stream, in order. If key and value of a record name different streams, the record is in both
    groups: the pipeline rejected the record, and may have counted it for either stream."""
    streams: dict[str, list[RecordedMessage]] = defaultdict(list)
    for message in messages:
        key_stream = (message.key or b"").decode(errors="replace")
        try:
            value_stream = _stream_decoder.decode(message.value or b"").stream or key_stream
        except (ValueError, RecursionError):
            value_stream = key_stream
        for stream in {key_stream, value_stream}:
            streams[stream].append(message)
    return streams


def make_packets(messages: Iterable[RecordedMessage], topic_roles: Mapping[str, Topic]) -> list[Packet]:
    """Pack records of any partitions into packets, as the pipeline does. `topic_roles`: the role of each topic, by
    name."""
    by_partition: dict[tuple[str, int], list[RecordedMessage]] = defaultdict(list)
    for message in messages:
        by_partition[message.topic, message.partition].append(message)
    packets: list[Packet] = []
    for (topic, partition), partition_messages in by_partition.items():
        decoder = Decoder(topic_roles[topic])
        decoder.add(_record_batch(partition_messages))
        packets += [packet for _, packet in pack(topic, partition, decoder, 1)]
    return packets


def _record_batch(messages: Sequence[RecordedMessage]) -> RecordBatch:
    numbers = np.array([(message.offset, message.time) for message in messages], np.int64)
    return RecordBatch.of([message.key for message in messages], [message.value for message in messages], *numbers.T)


def read_fact_record(message: RecordedMessage) -> Record | None:
    """The record in a message of a topic of facts; None if the pipeline rejects it."""
    try:
        return records.read(message.value, message.key, Topic.FACTS)
    except BadRecord:
        return None


def fact_ids(record: Record | None) -> Iterator[tuple[str, int]]:
    """(writer, ID) of each fact in a record."""
    if isinstance(record, Rdata) and isinstance(record.id, int):
        yield record.writer, record.id
    elif isinstance(record, FactRun):
        yield from ((record.writer, id) for id, rows in zip(record.ids, record.rows, strict=True) if rows)


@dataclass(frozen=True, slots=True)
class SeedWriter:
    """The state of a writer after a batch, according to the history.

    Attributes:
        is_named_later: whether only later batches name the writer. Then `epoch` may be a later epoch.
    """

    writer: str
    epoch: int
    position: int
    is_named_later: bool


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """The state with which a comparison starts, if older records or older history are missing.

    Attributes:
        uncompared_batches: the number of batches that are not compared.
        last_skipped_batch: the last of these batches.
        replayed: the state of the stream after `last_skipped_batch`.
        highest_position: the highest position in `replayed`.
        joining_positions: writer -> its position in `replayed`. Has the writers whose first recorded record is a JOIN
            after `last_skipped_batch`.
    """

    uncompared_batches: int
    last_skipped_batch: StoredBatch
    replayed: Replayed
    highest_position: int
    joining_positions: Mapping[str, int]

    def is_linear_comparable(self, now: Replayed) -> bool:
        """Whether the linear position of the replay can be compared. True if the linear position of `now` has reached
        `highest_position`, and each writer in `joining_positions` has moved."""
        return not is_beyond(self.highest_position, now.linear) and all(
            now.positions.get(writer, position) != position for writer, position in self.joining_positions.items()
        )


def find_start(
    history: StreamBatches, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, *, is_truncated: bool
) -> ReplayStart | None:
    """Find the first batch at whose end no gap was open.

    Args:
        history: the stored data of the stream.
        stream: the name of the stream.
        facts: the records of the facts topic.
        bounds: the limits with which the pipeline ran.
        is_truncated: whether records before the first of `facts` are missing. If so, the search begins at the first
            batch that read one of `facts`.

    Returns:
        The state after this batch; None if there is no such batch.
    """
    recorded = {fact for message in facts for fact in fact_ids(read_fact_record(message))} if is_truncated else set()
    has_read = not is_truncated
    for number, batch in enumerate(history.batches, 1):
        # Only facts count: IDs that a JOIN or an operator settled may have no record.
        has_read = has_read or any(
            (move.writer, move.id) in recorded and not any(move.evidence.counts[1:]) for move in batch.advances
        )
        if has_read and not any(
            gap.opened <= batch.time and (gap.closed is None or gap.closed > batch.time) for gap in history.gaps
        ):
            return _start_after(history, stream, facts, bounds, number)
    return None


def _start_after(
    history: StreamBatches, stream: str, facts: Sequence[RecordedMessage], bounds: Bounds, uncompared: int
) -> ReplayStart:
    """Construct the state after the first `uncompared` batches, from a JOIN of each writer and a RETIRE of each retired
    writer."""
    after, first_records = history.batches[uncompared - 1], dict[str, Record]()
    parsed = [record for message in facts if (record := read_fact_record(message)) is not None]
    for record in parsed:
        first_records.setdefault(record.writer, record)
    joins = {(join.writer, join.epoch): join.id for join in parsed if isinstance(join, Join)}
    joined, retired, joining = list[Join](), list[Retire](), dict[str, int]()
    for writer in _writers_at(history, uncompared):
        if writer.is_named_later and not writer.position and (writer.writer, writer.epoch) in joins:
            continue
        # If the epoch began after the batch, the recording has its JOIN: seed the writer with the epoch before.
        joins_later = writer.is_named_later and not is_beyond(
            writer.position, joins.get((writer.writer, writer.epoch), 0)
        )
        epoch = writer.epoch - 1 if joins_later and writer.epoch else writer.epoch
        joined.append(Join(stream=stream, writer=writer.writer, epoch=epoch, id=writer.position))
        first = first_records.get(writer.writer)
        if isinstance(first, Join) and first.epoch > epoch:
            joining[writer.writer] = writer.position
        elif first is None and writer.writer in history.retired_writers:
            retired.append(Retire(stream=stream, writer=writer.writer, epoch=epoch, id=writer.position))
    joined.sort(
        key=lambda join: (abs(join.id), join.writer)
    )  # ascending: a high JOIN first would let the linear position pass other writers
    markers: list[Join | Retire] = [*joined, *retired]
    topic = facts[0].topic if facts else ""
    seeds = [
        RecordedMessage(topic, 0, offset, 0, stream.encode(), records.encode(marker))
        for offset, marker in enumerate(markers)
    ]
    now = Replayed(stream, bounds).apply(seeds, {topic: Topic.FACTS}, int(after.time.timestamp() * 1000))
    highest = max((join.id for join in joined), key=abs, default=0)
    return ReplayStart(uncompared, after, now.without_counts(), highest, joining)


def _writers_at(history: StreamBatches, uncompared: int) -> Iterator[SeedWriter]:
    """The writers of the stream after the first `uncompared` batches."""
    before, later = dict[str, BatchAdvance](), dict[str, tuple[int, int]]()
    for batch in history.batches[:uncompared]:
        before |= {move.writer: move for move in batch.advances}
    for batch in history.batches[uncompared:]:
        for move in batch.advances:
            later.setdefault(move.writer, (move.epoch, move.prev))
    for writer, position in history.positions.items():
        if writer in before:
            yield SeedWriter(writer, before[writer].epoch, before[writer].id, is_named_later=False)
        else:
            epoch, at = later.get(writer, (history.epochs[writer], position))
            yield SeedWriter(writer, epoch, at, is_named_later=True)
