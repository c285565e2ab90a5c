"""Records as people write them, and the packets that hold them: each edge its own run, which is legal and slow.

IDs are signed here, as on Kafka. What decoding refuses is the business of the tests of `records`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest

from tidemark.streaming.core import codec, writer_table
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import ShardEffects, StreamEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.ingest.compact import MAX_FACTS, RangeRecords, compact
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import CURRENT_EPOCH, DatabaseStart, Kind, Topic
from tidemark.streaming.wire.runs import BatchRows, Marker, PackedRun, PackedRuns, Packet

STREAM = "events"
FACTS, CONTROL = "tidemark.facts", "tidemark.control"
Taken = tuple[int, int, tuple[Topic, int], bytes | None, bytes | None]
"""Offset, time (ms), topic and partition, key and value of a record."""
IN_FACTS = (Topic.FACTS, 0)
EDGES = {"RDATA": Kind.RDATA, "VOID": Kind.VOID, "POSITION": Kind.POSITION}


@dataclass(frozen=True)
class Record:
    """One record; `kind` is that of docs/design.md 3, and ROW for RDATA with `"id": "batch"`."""

    kind: str
    writer: str
    epoch: int = 0
    prev: int = 0
    id: int = 0
    unseen: bool = False
    by: str | None = None
    partition: int = 0
    stream: str = STREAM
    timeline: DatabaseStart | None = None
    beyond: bool = False
    transactions: tuple[str, ...] = ()
    published: int | None = None
    blocked: str = ""
    heartbeat: int = 0

    @property
    def control(self) -> bool:
        return self.by is not None

    @property
    def role(self) -> Topic:
        return Topic.CONTROL if self.control else Topic.FACTS


def rdata(writer: str, id: int, prev: int | None = None, epoch: int = 0) -> Record:
    """`prev` defaults to the neighbour of `id` towards 0."""
    return Record("RDATA", writer, epoch, (id - 1 if id > 0 else id + 1) if prev is None else prev, id)


def void(writer: str, prev: int, id: int, epoch: int = 0) -> Record:
    return Record("VOID", writer, epoch, prev, id)


def position(writer: str, prev: int, id: int, epoch: int = 0) -> Record:
    return Record("POSITION", writer, epoch, prev, id)


def row(writer: str, epoch: int = 0) -> Record:
    return Record("ROW", writer, epoch)


def join(
    writer: str,
    id: int,
    epoch: int = 1,
    *,
    unseen: bool = False,
    timeline: DatabaseStart | None = None,
    published: int | None = None,
) -> Record:
    return Record("JOIN", writer, epoch, id=id, unseen=unseen, timeline=timeline, published=published)


def retire(writer: str, id: int, epoch: int = 1) -> Record:
    return Record("RETIRE", writer, epoch, id=id)


def skip(writer: str, prev: int, id: int, epoch: int = 1, *, beyond: bool = False) -> Record:
    return Record("SKIP", writer, epoch, prev, id, by="ann", beyond=beyond)


def opened(writer: str, *transactions: str, epoch: int = 1, blocked: str = "", heartbeat: int = 0) -> Record:
    return Record("OPEN", writer, epoch, transactions=transactions, blocked=blocked, heartbeat=heartbeat)


def forced(record: Record, *, beyond: bool = False) -> Record:
    """The same act, by an operator on the control topic."""
    return replace(record, by="ann", beyond=beyond)


@dataclass(frozen=True)
class Sent:
    """A record at its offset; its Kafka time (ms) is the offset too."""

    offset: int
    record: Record


def sent(records: Iterable[Record], first_offset: int = 0) -> list[Sent]:
    return [Sent(offset, record) for offset, record in enumerate(records, first_offset)]


@contextmanager
def packing(few: int) -> Iterator[None]:
    """Streams with more than `few` active writers keep them packed, and writers with `few` spans or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_table, "UNPACKED_MAX", few)
        patch.setattr(writer_table, "PACKED_SPANS_MIN", max(few, 1))
        yield


def packets(batch: Iterable[Sent]) -> list[Packet]:
    """One packet per record."""
    return [_packet(item) for item in batch]


def _packet(item: Sent) -> Packet:
    record, offset = item.record, item.offset
    runs, rows, markers = [], [], []
    zero = np.zeros(1, np.uint32).tobytes()
    if record.kind in EDGES:
        ids, kinds = np.array([abs(record.id)], np.int64), np.array([EDGES[record.kind]], np.uint8)
        runs.append(
            PackedRun(
                record.stream,
                record.writer,
                record.epoch,
                Direction.of(record.id),
                abs(record.prev),
                ids.tobytes(),
                kinds.tobytes(),
                zero,
                offset,
                offset,
                offset,
                offset,
            )
        )
    elif record.kind == "ROW":
        rows.append(BatchRows(record.stream, record.writer, record.epoch, zero, offset, offset))
    else:
        published = None if record.control else record.published
        markers.append(
            Marker(
                record.stream,
                record.writer,
                record.epoch,
                Kind[record.kind],
                abs(record.prev),
                abs(record.id),
                Direction.of(record.id or published or 0),
                record.unseen,
                record.by,
                "because" if record.control else None,
                offset,
                offset,
                record.timeline,
                record.beyond,
                [*record.transactions],
                None if published is None else abs(published),
                record.blocked,
                record.heartbeat,
            )
        )
    return Packet(_topic(record), record.partition, record.role, offset + 1, PackedRuns.of(runs), rows, markers, [])


def compacted(batch: Sequence[Sent]) -> list[Packet]:
    """The packets that the pipeline's own compaction makes, from JSON."""
    return packed(
        (it.offset, it.offset, (it.record.role, it.record.partition), it.record.stream.encode(), as_json(it.record))
        for it in batch
    )


def packed(records: Iterable[Taken], facts: str = FACTS, control: str = CONTROL) -> list[Packet]:
    """What compaction makes of one task's records, all in one shard."""
    names = {Topic.FACTS: facts, Topic.CONTROL: control}
    out = compact(ranges(records), keys=[0], names=names, max_facts=MAX_FACTS)
    return [
        msgspec.msgpack.decode(packet, type=Packet) for batch in out for packet in batch.column("packet").to_pylist()
    ]


def ranges(records: Iterable[Taken], at_once: int = 10_000) -> list[RangeRecords]:
    """Of each partition one, to its last record, `at_once` of them at a time."""
    partitions: dict[tuple[Topic, int], list[Taken]] = defaultdict(list)
    for it in records:
        partitions[it[2]].append(it)

    def read(wanted: PlannedRange, of: Sequence[Taken]) -> RangeRecords:
        return [wanted], ((wanted, fetched(of[at : at + at_once])) for at in range(0, len(of), at_once))

    return [read(PlannedRange(*place, 0, max(offset for offset, *_ in of) + 1), of) for place, of in partitions.items()]


def fetched(records: Sequence[Taken]) -> RecordBatch:
    """As Kafka's client gives them."""
    offsets, times, _, keys, values = zip(*records, strict=True)
    return RecordBatch.of(list(keys), list(values), np.array(offsets), np.array(times))


def contents(part: RecordBatch) -> list[tuple[bytes, bytes]]:
    """Key and value of each record."""
    return [(part.key(at), part.value(at)) for at in range(part.size)]


def _topic(record: Record) -> str:
    return CONTROL if record.control else FACTS


def as_json(record: Record) -> bytes:
    value: dict[str, object] = {"stream": record.stream, "writer": record.writer}
    if record.epoch != CURRENT_EPOCH:
        value["epoch"] = record.epoch
    if record.kind == "ROW":
        value |= {"kind": "RDATA", "id": "batch", "row": {}}
    else:
        value |= {"kind": record.kind, "id": record.id}
    if record.kind in (*EDGES, "SKIP"):
        value |= {"prev": record.prev, "row": {}}
    if record.kind == "OPEN":
        value |= {"transactions": record.transactions, "blocked": record.blocked, "heartbeat": record.heartbeat}
    if record.kind == "JOIN":
        value |= {"unseen": record.unseen}
    if record.timeline is not None:
        value |= {"timeline": record.timeline}
    if record.published is not None:
        value |= {"published": record.published}
    if record.by is not None:
        value |= {"by": record.by, "why": "because"}
    if record.beyond:
        value["beyond"] = True
    return msgspec.json.encode(value)


@dataclass
class Shard:
    """A shard as the query keeps it: encoded states, advanced batch by batch. `now` (ms) goes up by 1000 a batch.

    `positions`, `linear` and `rejected` (offset -> reason) are those after the last `feed`; IDs are signed.
    """

    states: dict[str, bytes] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)
    now: int = 0
    next_offset: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    linear: int = 0
    rejected: dict[int, str] = field(default_factory=dict)

    def feed(self, *records: Record) -> StreamEffects:
        """One batch of one stream, at the next offsets."""
        batch = sent(records, self.next_offset)
        self.next_offset += len(batch)
        done = self.feed_packets(packets(batch))
        (stream,) = done.streams
        stored = self.stream(stream.stream)
        self.positions = {name: stored.direction.signed(it.position) for name, it in sorted(stored.writers.items())}
        self.linear = stream.linear
        self.rejected = rejections(done)
        return stream

    def feed_packets(self, batch: Sequence[Packet]) -> ShardEffects:
        self.now += 1000
        return apply_batch(0, States(self.states), list(batch), self.now, self.bounds)

    def left_by_a_dead_writer(self) -> StreamEffects:
        """w1 at 7 dies holding 8, w2 goes on to 20: there is no gap, and the line waits for w1 since 2 s."""
        self.feed(join("w1", 0), join("w2", 0), rdata("w1", 7, 0, epoch=1), position("w2", 0, 7, epoch=1))
        return self.feed(rdata("w2", 9, 7, epoch=1), position("w2", 9, 20, epoch=1))

    def stream(self, name: str = STREAM) -> StreamState:
        return codec.decode(self.states[name])


def behind_a_dead_writer(**ages: float) -> dict[str, object]:
    """As JSON tells of who is `left_by_a_dead_writer`; `ages` stand wherever there is a since."""
    since = {"since": "1970-01-01T00:00:02Z", **ages}
    last_seen = "1970-01-01T00:00:01Z"
    w1 = {"writer": "w1", "epoch": 1, "reason": "silent", "position": 7, **since, "last_seen": last_seen}
    return {"ids": 13, **since, "blockers": [w1], "blocker_count": 1}


def rejections(done: ShardEffects) -> dict[int, str]:
    """Offset -> reason, for topics and partitions that share no offset."""
    return {offset: bad.reason for bad in done.rejected for offset in np.frombuffer(bad.offsets, np.int64).tolist()}
