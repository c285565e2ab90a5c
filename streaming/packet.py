"""What compaction hands to the state function: per task and shard, runs of edges and single markers.

A run is a chain of edges of one writer and one epoch (DESIGN 5): edge `i` is `(ids[i-1], ids[i]]`, the first one
`(start, ids[0]]`. IDs are magnitudes here and in everything behind; `backward` keeps the sign.
All edges of a run lie in one *stretch*: between two neighbouring JOIN or RETIRE records of the stream.
"""

from enum import IntEnum

import msgspec


class Kind(IntEnum):
    """How an edge was completed; also the code in a run's `kinds`."""

    RDATA = 0
    VOID = 1
    POSITION = 2


class MarkerKind(IntEnum):
    JOIN = 0
    RETIRE = 1
    SKIP = 2


class PackedRun(msgspec.Struct, array_like=True, frozen=True):
    """`ids` are little-endian int64, `kinds` uint8, `offsets` uint32 above `first_offset`; equal counts.

    `first_offset` and `last_offset` are the smallest and largest of the run; `oldest` and `newest` are Kafka record
    times in ms since 1970. The edges are in chain order, which need not be the order of their offsets.
    """

    stream: str
    writer: str
    epoch: int
    backward: bool
    start: int
    ids: bytes
    kinds: bytes
    offsets: bytes
    first_offset: int
    last_offset: int
    oldest: int
    newest: int


class Rows(msgspec.Struct, array_like=True, frozen=True):
    """RDATA with `"id": "batch"`: counted, moves nothing. `offsets` are uint32 above `first_offset`, ascending."""

    stream: str
    writer: str
    epoch: int
    offsets: bytes
    first_offset: int
    last_offset: int


class Marker(msgspec.Struct, array_like=True, frozen=True):
    """A JOIN, RETIRE or SKIP; `by` and `why` are set where it came from the control topic, else None.

    `prev` is only of meaning for a SKIP. `backward` is None where `id` is 0 and so has no sign.
    """

    stream: str
    writer: str
    epoch: int
    kind: MarkerKind
    prev: int
    id: int
    backward: bool | None
    unseen: bool
    by: str | None
    why: str | None
    offset: int
    time: int


class Rejected(msgspec.Struct, array_like=True, frozen=True):
    """Records that go to the dead letters unchanged; `offsets` are little-endian int64, ascending."""

    topic: str
    partition: int
    reason: str
    offsets: bytes

    @property
    def records(self) -> int:
        return len(self.offsets) // 8


class Unread(msgspec.Struct, array_like=True, frozen=True):
    """A rejected fact that nobody could read: any writer of the stream that its key names may have sent it."""

    stream: str
    offset: int


class Packet(msgspec.Struct, array_like=True, frozen=True):
    """What one task (an offset range of one Kafka partition) saw of one shard.

    `next_offset` is one more than the highest offset that the task read; it is the same in all packets of a task.
    Rejected records and tasks without any good record travel with the shard `partition % shards`; `unread` tells the
    streams of those that were rejected unread, at least the first between two markers of a stream.
    """

    topic: str
    partition: int
    control: bool
    next_offset: int
    runs: list[PackedRun]
    rows: list[Rows]
    markers: list[Marker]
    rejected: list[Rejected]
    unread: list[Unread] = []
