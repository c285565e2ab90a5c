"""The reference for compaction: the same packets' content, record by record and with plain loops."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tidemark.common.errors import BadRecord
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Kind, Topic
from tidemark.streaming.wire.runs import Packet

FACTS, CONTROL = "tidemark.facts", "tidemark.control"


@dataclass(frozen=True)
class Message:
    value: bytes | None
    key: bytes | None
    offset: int
    time: int = 1_700_000_000_000
    partition: int = 0
    topic: str = FACTS


def message(record: records.Record, offset: int, topic: str = FACTS) -> Message:
    return Message(records.encode(record), record.stream.encode(), offset, topic=topic)


def _topic(message: Message) -> Topic:
    return Topic.FACTS if message.topic == FACTS else Topic.CONTROL


@dataclass(frozen=True, order=True)
class Edge:
    prev: int
    id: int
    kind: Kind
    offset: int

    def same_place(self, other: "Edge") -> bool:
        return (self.prev, self.id) == (other.prev, other.id)

    def overlaps(self, other: "Edge") -> bool:
        return self.prev < other.id and other.prev < self.id


@dataclass(frozen=True, order=True)
class Group:
    stream: str
    writer: str
    epoch: int
    direction: Direction
    segment: int


Chain = tuple[Edge, ...]


@dataclass
class Compacted:
    """What all packets of a Kafka partition say together; `runs` are group, chain, oldest and newest time."""

    runs: set[tuple[Group, Chain, int, int]] = field(default_factory=set)
    rows: Counter[tuple[str, str, int, int, int]] = field(default_factory=Counter)
    markers: list[tuple[object, ...]] = field(default_factory=list)
    rejected: dict[str, list[int]] = field(default_factory=dict)


def compact(messages: Iterable[Message]) -> Compacted:
    """All of one topic and partition, ascending by offset."""
    result = Compacted()
    segments: dict[str, int] = defaultdict(int)
    groups: dict[Group, list[Edge]] = defaultdict(list)
    rejected: dict[str, list[int]] = defaultdict(list)
    times: dict[int, int] = {}
    for message in messages:
        topic = _topic(message)
        try:
            record = records.read(message.value, message.key, topic)
        except BadRecord as bad:
            rejected[bad.reason].append(message.offset)
            continue
        segment = segments[record.stream]
        if isinstance(record, records.OverridableRecord | records.Open):
            result.markers.append(_marker(record, message))
            segments[record.stream] += not isinstance(record, records.Skip)
        elif isinstance(record, records.FactRun):
            group = Group(record.stream, record.writer, record.epoch, Direction.of(record.ids[0]), segment)
            for prev, id, rows in zip([record.prev, *record.ids], record.ids, record.rows, strict=False):
                kind = Kind.RDATA if rows else Kind.VOID
                groups[group].append(Edge(abs(prev), abs(id), kind, message.offset))
                if len(rows) > 1:
                    of = record.stream, record.writer, record.epoch, segment, message.offset
                    result.rows[of] += len(rows) - 1
            times[message.offset] = message.time
        elif isinstance(record.id, str):
            result.rows[record.stream, record.writer, record.epoch, segment, message.offset] += 1
        else:
            prev = records.effective_prev(record) if isinstance(record, records.Rdata) else record.prev
            kind = Kind[str(record.__struct_config__.tag)]
            group = Group(record.stream, record.writer, record.epoch, Direction.of(record.id), segment)
            groups[group].append(Edge(abs(prev), abs(record.id), kind, message.offset))
            times[message.offset] = message.time
    result.rejected = dict(rejected)
    for group, edges in groups.items():
        for chain in chains(edges):
            seen = [times[edge.offset] for edge in chain]
            result.runs.add((group, chain, min(seen), max(seen)))
    return result


def _marker(record: records.OverridableRecord | records.Open, message: Message) -> tuple[object, ...]:
    if isinstance(record, records.Open):
        nothing = (0, 0, Direction.UNKNOWN, False, None, None)
        who = record.stream, record.writer, record.epoch, "OPEN"
        beat = record.blocked, record.heartbeat
        return (*who, *nothing, message.offset, message.time, None, False, record.transactions, None, *beat)
    prev = record.prev if isinstance(record, records.Skip) else 0
    unseen = isinstance(record, records.Join) and record.unseen
    name = type(record).__name__.upper()
    published = record.published if isinstance(record, records.Join) and record.by is None else None
    direction = Direction.of(record.id or published or 0)
    return (
        *(record.stream, record.writer, record.epoch, name, abs(prev), abs(record.id), direction, unseen),
        *(record.by, record.why, message.offset, message.time),
        record.timeline if isinstance(record, records.Join) else None,
        record.beyond,
        [],
        None if published is None else abs(published),
        *("", 0),
    )


def chains(edges: list[Edge]) -> Iterator[Chain]:
    """The chains of one group: clashing edges alone, the others linked layer by layer."""
    layers: dict[int, list[Edge]] = defaultdict(list)
    for at, edge in enumerate(edges):
        if any(edge.overlaps(other) and not edge.same_place(other) for other in edges):
            yield (edge,)
        else:
            layers[sum(edge.same_place(other) for other in edges[:at])].append(edge)
    for layer in layers.values():
        after = {edge.prev: edge for edge in layer}
        reached = {edge.id for edge in layer}
        for edge in layer:
            if edge.prev not in reached:
                chain = [edge]
                while chain[-1].id in after:
                    chain.append(after[chain[-1].id])
                yield tuple(chain)


def unpack(packets: Iterable[Packet]) -> Compacted:
    """What packets say, in the same form; segments are counted anew from the markers."""
    packets = list(packets)
    result = Compacted()
    cuts: dict[str, list[int]] = defaultdict(list)
    for marker in (marker for packet in packets for marker in packet.markers):
        fields = msgspec.structs.astuple(marker)
        result.markers.append((*fields[:3], marker.kind.name, *fields[4:]))
        if marker.kind.name != "SKIP":
            cuts[marker.stream].append(marker.offset)

    def segment(stream: str, offset: int) -> int:
        return sum(cut < offset for cut in cuts[stream])

    for run in (run for packet in packets for run in packet.runs):
        ids = np.frombuffer(run.ids, "<i8").tolist()
        offsets = _offsets(run.offsets, run.first_offset, run.last_offset)
        (found,) = {segment(run.stream, offset) for offset in offsets}
        group = Group(run.stream, run.writer, run.epoch, Direction(run.direction), found)
        kinds = [Kind(kind) for kind in run.kinds]
        chain = tuple(Edge(*edge) for edge in zip([run.start, *ids[:-1]], ids, kinds, offsets, strict=True))
        result.runs.add((group, chain, run.oldest, run.newest))
    for rows in (rows for packet in packets for rows in packet.rows):
        offsets = _offsets(rows.offsets, rows.first_offset, rows.last_offset)
        assert offsets == sorted(offsets)
        (found,) = {segment(rows.stream, offset) for offset in offsets}
        result.rows.update((rows.stream, rows.writer, rows.epoch, found, offset) for offset in offsets)
    for rejected in (rejected for packet in packets for rejected in packet.rejected):
        assert rejected.reason not in result.rejected
        result.rejected[rejected.reason] = np.frombuffer(rejected.offsets, "<i8").tolist()
    result.markers.sort(key=lambda marker: marker[10])  # type: ignore[arg-type,return-value]  # the offset
    return result


def _offsets(packed: bytes, first: int, last: int) -> list[int]:
    offsets: list[int] = (np.frombuffer(packed, "<u4").astype(np.int64) + first).tolist()
    assert (min(offsets), max(offsets)) == (first, last)
    return offsets
