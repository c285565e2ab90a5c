"""Compaction: from Kafka's records to packets of runs, rows and markers by shard. Runs in Spark's Python workers.

A task reads offset ranges of Kafka's partitions, some together and some one after another. The records are decoded a
thousand or so at a time (`ingest.decode`), then linked and packed when a range is at its end: about 13 bytes leave
for a record of 140 (docs/design.md 5). Loops here are over runs, markers and incarnations; over records go only the
decoder and numpy. The same records give the same packets, byte for byte, so a task may be run again.

JOIN and RETIRE records cut the records of their stream into *segments*, and no run crosses a cut
(docs/decisions/0001-segments.md). A run also ends where the 32 bits for its offsets do not reach.

Kafka's records bound a batch and RUN records hold any number of facts, so a task stops where it holds too many more: it
says so in its packets, and how far it came. What it left is read again by a query that begins anew (`app.batches`).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

import msgspec
import numpy as np
import pyarrow as pa

from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.edge_chains import link
from tidemark.streaming.ingest.incarnations import Incarnation
from tidemark.streaming.ingest.record_batch import Edges, PlannedRange, RecordBatch
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.values.limits import Rejected, shard_of
from tidemark.streaming.wire.records import ROW, Topic
from tidemark.streaming.wire.runs import NUMBERS, BatchRows, Marker, PackedRuns, Packet, RunColumns, TurnedAway

MOST_FACTS = 2_000_000
"""That a task holds beside one for each record: about 250 bytes each, all in all."""

MOST_EDGES = 16_384
"""Of a packet, about: 200 KiB. The JVM copies each half a dozen times, and takes new memory for what is larger."""

PACKETS = pa.schema([("key", pa.int32()), ("packet", pa.binary())])

_BYTES = 1 << 20  # that are handed to the JVM together

_encoder = msgspec.msgpack.Encoder()


RefusedOffsets = Mapping[str, Mapping[int, Sequence[int]]]
"""Offsets by topic and partition: of records from which something follows that the database refuses."""

RangesRead = tuple[Sequence[PlannedRange], Iterable[tuple[PlannedRange, RecordBatch]]]
"""Ranges that are read together, and their records as they come."""


def compact(
    read: Iterable[RangesRead],
    *,
    keys: Sequence[int],
    names: dict[Topic, str],
    max_facts: int,
    refused: RefusedOffsets | None = None,
) -> Iterator[pa.RecordBatch]:
    """Rows, a packet each, for each range and shard that has anything to say; each range speaks at least once, and says
    how far it was read. That is to its end, but where the task held `most` facts more than records, or still more.
    `keys` are those of the shards (`values.shards`). Records at `refused` places are rejected as not storable.
    """
    rejected_offsets = refused or {}
    extra = 0  # facts beside one for each record
    for ranges, records in read:
        decoders = {
            planned: Decoder(planned.topic, rejected_offsets.get(names[planned.topic], {}).get(planned.partition, ()))
            for planned in ranges
        }
        cut = False
        for planned, batch in records:
            if cut := extra >= max_facts:
                break
            decoder = decoders[planned]
            before = decoder.size
            decoder.add(batch)
            extra += max(0, decoder.size - before - batch.size)
        for planned, decoder in decoders.items():
            decoder.next_offset = max(decoder.next_offset, planned.start) if cut else planned.end
            packets = pack(names[planned.topic], planned.partition, decoder, len(keys), cut=cut)
            yield from _encoded((keys[shard], packet) for shard, packet in packets)


def _encoded(packets: Iterable[tuple[int, Packet]]) -> Iterator[pa.RecordBatch]:
    keys: list[int] = []
    encoded: list[bytes] = []
    size = 0
    for key, packet in packets:
        keys.append(key)
        encoded.append(_encoder.encode(packet))
        size += len(encoded[-1])
        if size > _BYTES:
            yield _batch(keys, encoded)
            keys, encoded, size = [], [], 0
    if encoded:
        yield _batch(keys, encoded)


def _batch(keys: list[int], packets: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(keys, pa.int32()), pa.array(packets, pa.binary())], schema=PACKETS)


OFFSET_BITS = 32


def pack(topic: str, partition: int, columns: Decoder, shards: int, *, cut: bool = False) -> list[tuple[int, Packet]]:
    """Packets with their shards: at least one, so that the offsets read are known. Same records, same packets."""
    packets: list[tuple[int, Packet]] = []
    first: dict[int, Packet] = {}

    def put(shard: int, runs: PackedRuns) -> Packet:
        packet = Packet(topic, partition, columns.topic, columns.next_offset, runs, [], [], [], [], cut)
        packets.append((shard, packet))
        return first.setdefault(shard, packet)

    def packet_of(shard: int) -> Packet:
        return first[shard] if shard in first else put(shard, PackedRuns())

    markers = [Marker.of(*marker) for marker in sorted(columns.markers, key=itemgetter(1))]
    if columns.size:
        edges = columns.edges()
        incarnations, ranks = columns.incarnations.ranked()
        shard = {stream: shard_of(stream, shards) for stream, _, _ in incarnations}
        order = sorted(range(len(incarnations)), key=lambda at: shard[incarnations[at][0]])
        incarnations = [incarnations[at] for at in order]
        edges = edges._replace(incarnations=np.argsort(order)[ranks][edges.incarnations])
        segments = _segments(edges, incarnations, markers)
        is_row = edges.kinds == ROW
        runs = _runs(edges.where(~is_row), segments[~is_row], incarnations)
        for number, part in runs.divided(np.array([shard[stream] for stream in runs.streams]), MOST_EDGES):
            put(number, part)
        for rows in _rows(edges.where(is_row), segments[is_row], incarnations):
            packet_of(shard[rows.stream]).rows.append(rows)
    for marker in markers:
        packet_of(shard_of(marker.stream, shards)).markers.append(marker)

    for reason, offsets in sorted(columns.rejected.items()):
        rejected = Rejected(topic, partition, reason, np.sort(np.array(offsets, "<i8")).tobytes())
        packet_of(partition % shards).rejected.append(rejected)
    for refused in _refused(columns.refused, markers):
        packet_of(shard_of(refused.stream, shards)).refused.append(refused)
    if not packets:
        packet_of(partition % shards)
    return packets


def _refused(refused: list[TurnedAway], markers: list[Marker]) -> list[TurnedAway]:
    """One of each incarnation between two markers of its stream."""
    marks: dict[str, list[int]] = defaultdict(list)
    for marker in markers:
        marks[marker.stream].append(marker.offset)
    merged: dict[tuple[str, str | None, int, bool, int], TurnedAway] = {}
    for fact in sorted(refused, key=attrgetter("first_offset")):
        key = fact.stream, fact.writer, fact.epoch, fact.only_known, bisect(marks[fact.stream], fact.first_offset)
        first = merged.setdefault(key, fact)
        if fact.reach > first.reach:
            merged[key] = msgspec.structs.replace(first, reach=fact.reach)
    return [*merged.values()]


def _segments(edges: Edges, incarnations: list[Incarnation], markers: list[Marker]) -> Ids:
    """For each edge the number of cuts before it: by JOIN and RETIRE of its stream, and by blocks of offsets."""
    blocks: Ids = (edges.offsets - edges.offsets[0]) >> OFFSET_BITS
    numbers = {stream: number for number, (stream, _, _) in enumerate(incarnations)}
    cutting = [marker for marker in markers if marker.stream in numbers]  # no SKIP: those come without facts
    if not cutting:
        return blocks
    # Streams side by side on one line, each with room for every edge: one search finds the cuts of all.
    room = len(edges.ids) + 1
    before = np.searchsorted(edges.offsets, [marker.offset for marker in cutting])
    cuts = np.sort(np.array([numbers[marker.stream] for marker in cutting]) * room + before)
    begins = np.array([numbers[stream] for stream, _, _ in incarnations])[edges.incarnations] * room
    passed: Ids = np.searchsorted(cuts, begins + np.arange(room - 1), side="right") - np.searchsorted(cuts, begins)
    return blocks + passed


def _rows(rows: Edges, segments: Ids, incarnations: list[Incarnation]) -> Iterator[BatchRows]:
    if not len(rows.ids):
        return
    groups = rows.incarnations * (segments.max() + 1) + segments
    order = np.argsort(groups, kind="stable")
    offsets, groups = rows.offsets[order], groups[order]
    firsts = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(offsets)], strict=True):
        stream, writer, epoch = incarnations[rows.incarnations[order[first]]]
        low, high = int(offsets[first]), int(offsets[stop - 1])
        yield BatchRows(stream, writer, epoch, (offsets[first:stop] - low).astype("<u4").tobytes(), low, high)


def _runs(edges: Edges, segments: Ids, incarnations: list[Incarnation]) -> RunColumns:
    """In the order of their incarnations."""
    if not len(edges.ids):
        return RunColumns.of([])
    parts = int(segments.max()) + 1  # of an incarnation and a direction
    groups = (edges.incarnations * 2 + (edges.ids < 0)) * parts + segments
    edges = edges._replace(incarnations=groups, prevs=np.abs(edges.prevs), ids=np.abs(edges.ids))
    chains, firsts = link(edges, MOST_EDGES)
    numbers, backward = np.divmod(chains.incarnations[firsts] // parts, 2)
    writers = [incarnations[number] for number in numbers.tolist()]
    rows = np.empty(len(firsts), NUMBERS)
    rows["epoch"] = [epoch for _, _, epoch in writers]
    rows["direction"], rows["start"] = 1 - 2 * backward, chains.prevs[firsts]
    rows["stop"] = np.append(firsts[1:], len(chains.ids))
    for column, first, last in ((chains.offsets, "first_offset", "last_offset"), (chains.times, "oldest", "newest")):
        rows[first], rows[last] = np.minimum.reduceat(column, firsts), np.maximum.reduceat(column, firsts)
    offsets = chains.offsets - np.repeat(rows["first_offset"], np.diff(firsts, append=len(chains.ids)))
    return RunColumns(
        [stream for stream, _, _ in writers],
        [writer for _, writer, _ in writers],
        rows,
        chains.ids,
        chains.kinds,
        offsets.astype("<u4"),
    )
