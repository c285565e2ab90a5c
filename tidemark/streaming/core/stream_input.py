"""The records of a batch grouped by stream, and cut into segments at the markers. Pure."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Kind, Topic
from tidemark.streaming.wire.runs import UNBOUNDED, BatchRows, Marker, PackedRun, Packet, RunColumns, TurnedAway

Partition = tuple[str, int]
"""Topic and number of a Kafka partition."""

Fact = PackedRun | BatchRows | Marker
"""A record of the facts topic that is not rejected, or a run of such records."""


@dataclass(slots=True)
class StreamInput:
    """The records of one stream in a batch.

    Attributes:
        columns: the runs of all streams.
        runs: indexes of this stream's runs in `columns`, by partition.
        facts: rows without an ID, and markers of writers, by partition.
        refused: rejected records of the facts topic that may be facts, by partition.
        control_claims: rejected records of the control topic that may be facts.
        control: markers of operators.
    """

    columns: RunColumns
    runs: dict[Partition, list[int]] = field(default_factory=dict)
    facts: dict[Partition, list[Fact]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[Partition, list[TurnedAway]] = field(default_factory=lambda: defaultdict(list))
    control_claims: list[TurnedAway] = field(default_factory=list)
    control: list[tuple[Partition, Marker]] = field(default_factory=list)

    def partitions(self) -> set[Partition]:
        """Partitions with records that are not rejected."""
        return self.runs.keys() | self.facts.keys()

    def items(self, partition: Partition) -> list[Fact]:
        """All records of a partition that are not rejected."""
        return [*map(self.columns.run, self.runs.get(partition, ())), *self.facts.get(partition, ())]

    def as_rejected(self, partition: Partition) -> Iterator[TurnedAway]:
        """What the records of a partition may hide if all of them are rejected."""
        yield from self.refused.get(partition, ())
        for item in self.items(partition):
            if isinstance(item, PackedRun):
                reach = int(np.frombuffer(item.ids[-8:], np.int64)[0])
                yield TurnedAway(item.stream, item.writer, item.epoch, reach, item.first_offset)
            elif isinstance(item, BatchRows):
                yield TurnedAway(item.stream, item.writer, item.epoch, UNBOUNDED, item.first_offset)
            elif item.kind is Kind.JOIN:
                yield TurnedAway(item.stream, item.writer, item.epoch, 0, item.offset)


def group_by_stream(
    packets: list[Packet], columns: RunColumns, states: States, bounds: Bounds
) -> dict[str, StreamInput]:
    """Group the records of `packets` by stream.

    A new stream that only rejected records name is admitted while fewer than `bounds.unread` streams are known like
    that, in the order of the names.

    Args:
        columns: the runs of all packets, in the order of the packets.
        states: the streams that are known.
    """
    inputs: dict[str, StreamInput] = defaultdict(lambda: StreamInput(columns))
    number = 0
    for packet in packets:
        partition = packet.topic, packet.partition
        last, numbers = "", list[int]()  # the runs of a stream are neighbours
        for stream in packet.runs.streams:
            if stream != last:
                last, numbers = stream, inputs[stream].runs.setdefault(partition, [])
            numbers.append(number)
            number += 1
        if packet.role is Topic.CONTROL:
            for marker in packet.markers:
                inputs[marker.stream].control.append((partition, marker))
            continue
        items: list[Fact] = [*packet.rows, *packet.markers]
        for item in items:
            inputs[item.stream].facts[partition].append(item)
    refused = [(packet, record) for packet in packets for record in packet.refused]
    if not refused:
        return inputs
    admitted = inputs.keys() | {
        record.stream for _, record in refused if record.writer is not None or record.stream in states
    }
    unreadable = {record.stream for _, record in refused if not record.only_known} - admitted
    if unreadable:
        admitted |= {*sorted(unreadable)[: max(bounds.unread - states.unreadable_count(), 0)]}
    for packet, record in refused:
        if record.stream not in admitted:
            continue
        if packet.role is Topic.CONTROL:
            inputs[record.stream].control_claims.append(record)
        else:
            inputs[record.stream].refused[packet.topic, packet.partition].append(record)
    return inputs


def segments(
    items: list[Fact | TurnedAway],
) -> Iterator[tuple[list[PackedRun | BatchRows | TurnedAway], Marker | None]]:
    """Sort records by offset and cut them after each marker.

    A run never spans a marker of its stream: compaction cuts it there.

    Yields:
        The records of a segment and the marker that ends it; None for the marker of the last segment.
    """
    ordered = sorted(items, key=lambda item: item.offset if isinstance(item, Marker) else item.first_offset)
    segment: list[PackedRun | BatchRows | TurnedAway] = []
    for item in ordered:
        if isinstance(item, Marker):
            yield segment, item
            segment = []
        else:
            segment.append(item)
    if segment:
        yield segment, None
