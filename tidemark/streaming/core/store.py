"""The encoded states of a shard's streams, in three layers. Pure; no Spark.

A shard may have a hundred thousand streams, and a batch may touch ten of them. A lookup must not decode other states.
The states that a new query loads from Postgres (the `seed`) are outside Spark's state store. The state store has only
the states that have changed since the query began: `packed` states, and `recent` states that shadow packed ones.

`group_by_stream` groups the records of a batch by stream, and `split_segments` cuts them into segments at the markers.
"""

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate, chain

import msgspec
import numpy as np

from tidemark.streaming.core import codec
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.values.limits import Bounds, shard_of
from tidemark.streaming.wire.records import Kind, Topic
from tidemark.streaming.wire.runs import UNBOUNDED, BatchRows, Marker, PackedRun, Packet, PossibleFacts, RunColumns

UNREADABLE_STATE = codec.encode(StreamState(uncertain_up_to=UNBOUNDED))
"""The state of a stream that only unreadable records have named."""

_RECENT_BYTES_MAX = 1 << 20
"""Recent states may have this many bytes, or a quarter of the bytes of the packed states if that is more. A batch
decodes and encodes a MiB within a few milliseconds.
"""


_LOOKUP_COST = 16
"""A lookup by bisection takes as long as a loop over this many states."""


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """The encoded form of `PackedStates`.

    Attributes:
        name_ends: for each stream the end of its name in `names`, as uint32.
        state_ends: for each stream the end of its state in `states`, as uint32.
        names: the names of the streams, ascending, concatenated.
        states: the states of the streams, concatenated.
        unreadable_count: number of states that are `UNREADABLE_STATE`.
    """

    name_ends: memoryview
    state_ends: memoryview
    names: memoryview
    states: memoryview
    unreadable_count: int


_columns_decoder = msgspec.msgpack.Decoder(_Columns)


class PackedStates:
    """Immutable encoded states by name of their stream. A lookup takes a few microseconds, for any number of states.

    Attributes:
        data: all states, encoded (`_Columns`), as passed to the constructor. A lookup decodes no other states.
        unreadable_count: number of states that are `UNREADABLE_STATE`.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        columns = _columns_decoder.decode(data)
        self.data = data
        self.unreadable_count = columns.unreadable_count
        self._name_ends, self._state_ends = columns.name_ends.cast("I"), columns.state_ends.cast("I")
        self._names, self._states = columns.names, columns.states
        self._by_name: dict[str, bytes] | None = None

    @classmethod
    def of(cls, states: Mapping[str, bytes]) -> "PackedStates":
        """Pack encoded states. `states`: name of the stream -> state."""
        ordered = sorted((name.encode(), data) for name, data in states.items())
        names, values = [name for name, _ in ordered], [data for _, data in ordered]
        unread = values.count(UNREADABLE_STATE)
        columns = _Columns(_ends(names), _ends(values), _join(names), _join(values), unread)
        return cls(msgspec.msgpack.encode(columns))

    def __len__(self) -> int:
        return len(self._name_ends)

    def prepare_lookups(self, count: int) -> None:
        """Build a dictionary of all states if that is cheaper than `count` bisections, for the next `get` calls."""
        if self._by_name is None and _LOOKUP_COST * count > len(self):
            self._by_name = dict(self.items())

    def get(self, name: str) -> bytes | None:
        if self._by_name is not None:
            return self._by_name.get(name)
        wanted = name.encode()
        index = bisect_left(range(len(self)), wanted, key=self._name)
        return self._state(index) if index < len(self) and self._name(index) == wanted else None

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield pairs of name and state, sorted by name."""
        return zip(self.names(), _split(self._states, self._state_ends), strict=True)

    def names(self) -> Iterator[str]:
        """The names, ascending."""
        return (name.decode() for name in _split(self._names, self._name_ends))

    def _name(self, index: int) -> bytes:
        return self._names[self._name_ends[index - 1] if index else 0 : self._name_ends[index]].tobytes()

    def _state(self, index: int) -> bytes:
        return self._states[self._state_ends[index - 1] if index else 0 : self._state_ends[index]].tobytes()


def _split(joined: memoryview, ends: memoryview) -> Iterator[bytes]:
    begin, data = 0, bytes(joined)
    for end in ends:
        yield data[begin:end]
        begin = end


def _ends(parts: list[bytes]) -> memoryview:
    return memoryview(array("I", accumulate(map(len, parts))).tobytes())


def _join(parts: list[bytes]) -> memoryview:
    return memoryview(b"".join(parts))


NO_STATES = PackedStates.of({})


class ShardedStates:
    """The encoded states of the streams of several shards.

    Args:
        shards: number of shards.
        packed: shard -> packed states of its streams (`PackedStates.data`).
    """

    def __init__(self, shards: int, packed: Mapping[int, bytes]) -> None:
        self._shards = shards
        self._packed = {shard: PackedStates(data) for shard, data in packed.items()}

    def __len__(self) -> int:
        return sum(map(len, self._packed.values()))

    def get(self, name: str) -> bytes | None:
        packed = self._packed.get(shard_of(name, self._shards))
        return None if packed is None else packed.get(name)

    def items(self) -> Iterator[tuple[str, bytes]]:
        return chain.from_iterable(packed.items() for packed in self._packed.values())

    def names(self) -> Iterator[str]:
        """The names, ascending."""
        return merge(*(packed.names() for packed in self._packed.values()))


class _Layers(msgspec.Struct, array_like=True, frozen=True):
    packed: memoryview
    recent: dict[str, bytes]


_layers_decoder = msgspec.msgpack.Decoder(_Layers)


class States:
    """Encoded states in three layers: `recent` (mutable) shadows `packed`, which shadows the read-only `seed`."""

    def __init__(
        self, recent: dict[str, bytes] | None = None, packed: PackedStates = NO_STATES, seed: PackedStates = NO_STATES
    ) -> None:
        self._recent = {} if recent is None else recent
        self._packed = packed
        self._seed = seed

    @classmethod
    def unpack(cls, data: bytes | None, seed: PackedStates) -> "States":
        """Decode the result of `pack`. `data` is None before the first batch of a query."""
        if data is None:
            return cls({}, NO_STATES, seed)
        layers = _layers_decoder.decode(data)
        return cls(layers.recent, PackedStates(layers.packed), seed)

    def pack(self) -> bytes:
        """Encode the recent and the packed layer. If the recent layer is too large, first merges it into the packed
        layer."""
        size = sum(map(len, self._recent.values()))
        if size > max(_RECENT_BYTES_MAX, len(self._packed.data) // 4):
            self._packed = PackedStates.of({**dict(self._packed.items()), **self._recent})
            self._recent = {}
        return msgspec.msgpack.encode(_Layers(memoryview(self._packed.data), self._recent))

    def prepare_lookups(self, count: int) -> None:
        """Prepare the packed layers for `count` calls of `get` (`PackedStates.prepare_lookups`)."""
        self._packed.prepare_lookups(count)
        self._seed.prepare_lookups(count)

    def get(self, name: str) -> bytes | None:
        if (recent := self._recent.get(name)) is not None:
            return recent
        return self._get_below_recent(name)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __setitem__(self, name: str, data: bytes) -> None:
        self._recent[name] = data

    def unreadable_count(self) -> int:
        """Number of streams whose current state is `UNREADABLE_STATE`."""
        count = self._packed.unreadable_count + self._seed.unreadable_count
        if self._seed.unreadable_count:
            count -= sum(self._seed.get(name) == UNREADABLE_STATE for name, _ in self._packed.items())
        if count:
            count -= sum(self._get_below_recent(name) == UNREADABLE_STATE for name in self._recent)
        return count + sum(data == UNREADABLE_STATE for data in self._recent.values())

    def _get_below_recent(self, name: str) -> bytes | None:
        packed = self._packed.get(name) if len(self._packed) else None
        return self._seed.get(name) if packed is None else packed


Partition = tuple[str, int]
"""Topic and number of a Kafka partition."""

AcceptedRecord = PackedRun | BatchRows | Marker
"""A record that compaction did not reject, or several such records as a run or as batch rows."""


@dataclass(slots=True)
class StreamInput:
    """The records of one stream in a batch.

    Attributes:
        columns: the runs of all streams.
        runs: indexes of this stream's runs in `columns`, by partition.
        rows_and_markers: batch rows, and markers of writers, by partition.
        possible_facts: the facts that rejected records of the facts topic may contain, by partition.
        possible_control_facts: the facts that rejected records of the control topic may contain.
        control: markers of operators, with their partitions.
    """

    columns: RunColumns
    runs: dict[Partition, list[int]] = field(default_factory=dict)
    rows_and_markers: dict[Partition, list[AcceptedRecord]] = field(default_factory=lambda: defaultdict(list))
    possible_facts: dict[Partition, list[PossibleFacts]] = field(default_factory=lambda: defaultdict(list))
    possible_control_facts: list[PossibleFacts] = field(default_factory=list)
    control: list[tuple[Partition, Marker]] = field(default_factory=list)

    def partitions(self) -> set[Partition]:
        """Partitions with records that are not rejected."""
        return self.runs.keys() | self.rows_and_markers.keys()

    def items(self, partition: Partition) -> list[AcceptedRecord]:
        """All records of a partition that are not rejected."""
        return [*map(self.columns.run, self.runs.get(partition, ())), *self.rows_and_markers.get(partition, ())]

    def as_rejected(self, partition: Partition) -> Iterator[PossibleFacts]:
        """The facts that the records of a partition may contain, if all of the records are rejected.

        Yields two items for each writer and epoch, one at the lowest offset of its records and one at the highest. Both
        have the highest reach of these records. So the items do not depend on how edges were packed into runs. The
        second item shows that records may come after the first record of another writer.
        """
        merged: dict[tuple[str | None, int], tuple[PossibleFacts, int]] = {}
        for facts, last_offset in self._facts_if_rejected(partition):
            key = facts.writer, facts.epoch
            first, highest = merged.get(key, (facts, last_offset))
            reach, offset = max(first.reach, facts.reach), min(first.first_offset, facts.first_offset)
            first = msgspec.structs.replace(first, reach=reach, first_offset=offset)
            merged[key] = first, max(highest, last_offset)
        for facts, last_offset in merged.values():
            yield facts
            yield msgspec.structs.replace(facts, first_offset=last_offset)

    def _facts_if_rejected(self, partition: Partition) -> Iterator[tuple[PossibleFacts, int]]:
        """Yield the facts that each record or run may contain, with its highest offset."""
        for facts in self.possible_facts.get(partition, ()):
            yield facts, facts.first_offset
        for item in self.items(partition):
            if isinstance(item, PackedRun):
                reach = int(np.frombuffer(item.ids[-8:], np.int64)[0])
                yield PossibleFacts(item.stream, item.writer, item.epoch, reach, item.first_offset), item.last_offset
            elif isinstance(item, BatchRows):
                facts = PossibleFacts(item.stream, item.writer, item.epoch, UNBOUNDED, item.first_offset)
                yield facts, item.last_offset
            elif item.kind is Kind.JOIN:
                yield PossibleFacts(item.stream, item.writer, item.epoch, 0, item.offset), item.offset


def group_by_stream(
    packets: list[Packet], columns: RunColumns, states: States, bounds: Bounds
) -> dict[str, StreamInput]:
    """Group the records of `packets` by stream.

    A rejected record whose writer cannot be read may name a new stream. Such streams are added in the order of their
    names while the shard has fewer than `bounds.unreadable` of them; further ones are left out. A new stream that only
    a key names is left out if the value names another stream.

    Args:
        columns: the runs of all packets, in the order of the packets.
        states: the states of the known streams; not changed.
    """
    inputs: dict[str, StreamInput] = defaultdict(lambda: StreamInput(columns))
    number = 0
    for packet in packets:
        partition = packet.topic, packet.partition
        last, numbers = "", list[int]()  # the runs of a stream are adjacent
        for stream in packet.runs.streams:
            if stream != last:
                last, numbers = stream, inputs[stream].runs.setdefault(partition, [])
            numbers.append(number)
            number += 1
        if packet.role is Topic.CONTROL:
            for marker in packet.markers:
                inputs[marker.stream].control.append((partition, marker))
            continue
        items: list[AcceptedRecord] = [*packet.rows, *packet.markers]
        for item in items:
            inputs[item.stream].rows_and_markers[partition].append(item)
    possible_facts = [(packet, record) for packet in packets for record in packet.possible_facts]
    if not possible_facts:
        return inputs
    admitted_streams = inputs.keys() | {
        record.stream for _, record in possible_facts if record.writer is not None or record.stream in states
    }
    unreadable_streams = {record.stream for _, record in possible_facts if not record.is_key_only} - admitted_streams
    if unreadable_streams:
        admitted_streams |= {*sorted(unreadable_streams)[: max(bounds.unreadable - states.unreadable_count(), 0)]}
    for packet, record in possible_facts:
        if record.stream not in admitted_streams:
            continue
        if packet.role is Topic.CONTROL:
            inputs[record.stream].possible_control_facts.append(record)
        else:
            inputs[record.stream].possible_facts[packet.topic, packet.partition].append(record)
    return inputs


def split_segments(
    items: list[AcceptedRecord | PossibleFacts],
) -> Iterator[tuple[list[PackedRun | BatchRows | PossibleFacts], Marker | None]]:
    """Sort records by offset and cut them after each marker.

    No run has records on both sides of a marker of its stream, because compaction cuts runs at markers.

    Yields:
        The records of a segment, and the marker after the segment; None if no marker follows.
    """
    ordered = sorted(items, key=lambda item: item.offset if isinstance(item, Marker) else item.first_offset)
    segment: list[PackedRun | BatchRows | PossibleFacts] = []
    for item in ordered:
        if isinstance(item, Marker):
            yield segment, item
            segment = []
        else:
            segment.append(item)
    if segment:
        yield segment, None
