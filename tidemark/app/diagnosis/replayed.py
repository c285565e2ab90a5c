"""Applies recorded records of a stream again and computes its positions, without Spark and without a database."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from tidemark.common.errors import BadRecord
from tidemark.sinks.postgres.inspect import StoredBatch
from tidemark.sources.kafka_lookup import RecordedMessage
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.store import States
from tidemark.streaming.ingest.compact import pack
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.record_batch import RecordBatch
from tidemark.streaming.values.direction import beyond
from tidemark.streaming.values.limits import Bounds, Evidence
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import FactRun, Rdata, Record, Topic
from tidemark.streaming.wire.runs import Packet

NO_EVIDENCE: Final = Evidence()


class _StreamName(msgspec.Struct):
    stream: str = ""


_stream_decoder = msgspec.json.Decoder(_StreamName)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The state of a stream in a replay.

    Attributes:
        stream: its name.
        bounds: the limits with which the pipeline ran.
        encoded: the encoded state; None before the first record.
        linear: the linear position, signed.
        positions: by writer, the position, signed.
        counts: by writer, the sum of its evidence.
    """

    stream: str
    bounds: Bounds
    encoded: bytes | None = None
    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Evidence] = field(default_factory=dict)

    def apply(self, messages: Sequence[RecordedMessage], roles: Mapping[str, Topic], now: int) -> "Replayed":
        """The stream after a batch of more records. `roles`: the role of each topic. `now`: batch time,
        milliseconds since 1970."""
        if not messages:
            return self
        states = {} if self.encoded is None else {self.stream: self.encoded}
        batch = advance(0, States(states), make_packets(messages, roles), now, self.bounds)
        for effects in batch.streams:
            if effects.stream == self.stream:
                positions, counts = dict(self.positions), dict(self.counts)
                for move in effects.advances:
                    positions[move.writer] = move.id
                    counts[move.writer] = counts.get(move.writer, NO_EVIDENCE) + move.evidence
                return replace(
                    self, encoded=states[self.stream], linear=effects.linear, positions=positions, counts=counts
                )
        return self

    def without_counts(self) -> "Replayed":
        return replace(self, counts={})

    def reaches(self, batch: StoredBatch) -> bool:
        """Whether all positions have reached those after the batch."""
        return not beyond(self.linear if batch.linear is None else batch.linear, self.linear) and not any(
            beyond(move.id, self.positions.get(move.writer, 0)) for move in batch.advances
        )


def by_stream(messages: Iterable[RecordedMessage]) -> dict[str, list[RecordedMessage]]:
    """Group records by stream, in order. If key and value name different streams, a record belongs to both: it was
    rejected, and either stream may count it."""
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


def make_packets(messages: Iterable[RecordedMessage], roles: Mapping[str, Topic]) -> list[Packet]:
    """Make packets of records of any partitions, as the pipeline does. `roles`: the role of each topic."""
    by_partition: dict[tuple[str, int], list[RecordedMessage]] = defaultdict(list)
    for message in messages:
        by_partition[message.topic, message.partition].append(message)
    packets: list[Packet] = []
    for (topic, partition), partition_messages in by_partition.items():
        decoder = Decoder(roles[topic])
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
    """Writer and ID of each fact in a record."""
    if isinstance(record, Rdata) and isinstance(record.id, int):
        yield record.writer, record.id
    elif isinstance(record, FactRun):
        yield from ((record.writer, id) for id, rows in zip(record.ids, record.rows, strict=True) if rows)
