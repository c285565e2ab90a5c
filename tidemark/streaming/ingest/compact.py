"""Compaction: from Kafka's records to packets of runs, rows and markers by shard. Runs in Spark's Python workers.

A task reads offset ranges of Kafka's partitions. `ingest.decode` decodes the records, some thousand at a time. When a
range has been read, its edges are linked and packed: a record of 140 bytes becomes about 5 bytes (docs/design.md 5). A
range with many edges is packed in several pieces (`MAX_UNPACKED_EDGES`), each with the records of consecutive offsets.
Python loops run over runs, markers and writer epochs; only the decoder and numpy loop over records. The same records
give the same packets, byte for byte, so Spark may run a task again.

JOIN, RETIRE and OPEN records cut the records of their stream into *segments*. All edges of a run are in one segment
(docs/decisions/0001-segments.md). The offsets of a run span less than 2**32.

The number of records of a batch is bounded, but a RUN record may have any number of facts. So a task stops early if
there are too many facts. The packets of the task then have the flag `Packet.is_cut_short` and the next offset to read.
A new query reads the rest (`app.pipeline.batches`).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.jit_loader import get_module, load_kernels
from tidemark.streaming.ingest.record_batch import Edges, PlannedRange, RecordBatch, WriterEpoch
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.values.limits import RejectedRecords, shard_of
from tidemark.streaming.wire.records import ROW, Topic
from tidemark.streaming.wire.runs import RUN_DTYPE, BatchRows, Marker, PackedRuns, Packet, PossibleFacts, RunColumns

Order = npt.NDArray[np.intp]

MAX_NUMPY_EDGES = 16_384
"""Compiled code is loaded to sort more edges than this; numpy sorts this many edges in 2 ms. A batch with fewer bytes
than `decode.Decoder.MIN_COMPILED_BYTES` has fewer edges, so a process with such batches loads no compiled code.
"""

EDGE_SECONDS = 2e-7  # seconds that numpy needs to sort one edge
_MAX_GROUPS_PER_EDGE = 4
"""With this many groups per edge or more, numpy sorts the edges: the compiled sort takes a step for each group."""


def link(edges: Edges, max_edges: int) -> tuple[Edges, Order]:
    """Sort edges and link them into chains.

    Args:
        edges: at least one, in the order of arrival. `prevs` and `ids` are magnitudes. `writer_epochs` has the number
            of each edge's group; a chain has edges of one group.
        max_edges: the largest number of edges of a chain. Ignored if edges of a group overlap or repeat.

    Returns:
        The edges chain by chain, and the index of each chain's first edge.
    """
    ordered = _sort_by_group(edges)
    is_same_group = ordered.writer_epochs[1:] == ordered.writer_epochs[:-1]
    if np.any(is_same_group & (ordered.prevs[1:] < ordered.ids[:-1])):
        order, firsts = _link_overlapping(edges.writer_epochs, edges.prevs, edges.ids, np.arange(len(edges.ids)))
        return edges.take(order), firsts
    return ordered, _split_chains(
        _firsts(is_same_group & (ordered.prevs[1:] == ordered.ids[:-1])), len(edges.ids), max_edges
    )


def _split_chains(firsts: Order, count: int, max_edges: int) -> Order:
    """Split chains that have more than `max_edges` edges.

    Args:
        firsts: the index of each chain's first edge.
        count: the number of edges of all chains together.

    Returns:
        The index of each chain's first edge after the split.
    """
    lengths = np.diff(firsts, append=count)
    cuts = [
        np.arange(firsts[chain] + max_edges, firsts[chain] + lengths[chain], max_edges)
        for chain in np.flatnonzero(lengths > max_edges)
    ]
    return np.sort(np.concatenate((firsts, *cuts)))


def _sort_by_group(edges: Edges) -> Edges:
    """Sort edges by group and `prev`. The groups are in `edges.writer_epochs`."""
    count, groups = len(edges.ids), int(edges.writer_epochs.max()) + 1
    if (
        count > MAX_NUMPY_EDGES
        and groups < _MAX_GROUPS_PER_EDGE * count
        and (kernels := get_module(load_kernels, count * EDGE_SECONDS)) is not None
    ):
        sorted_edges = Edges.allocate(count)
        if kernels.sort_edges(edges, sorted_edges, np.zeros(groups + 2, np.int64), Edges.allocate(1)):
            return sorted_edges
    return edges.take(_lexsort(edges.writer_epochs, edges.prevs))


def _lexsort(groups: Ids, prevs: Ids) -> Order:
    """Like `np.lexsort((prevs, groups))` at a third of the cost: a radix sort of the groups, then a stable sort."""
    order = np.argsort(groups.astype(np.uint16), kind="stable")  # numpy has a radix sort for up to 16 bits
    for shift in range(16, int(groups.max()).bit_length(), 16):
        order = order[np.argsort((groups[order] >> shift).astype(np.uint16), kind="stable")]
    ordered_groups, ordered_prevs = groups[order], prevs[order]
    ranks = np.cumsum(np.concatenate(([0], ordered_groups[1:] != ordered_groups[:-1])))
    low = int(ordered_prevs.min())
    span = int(ordered_prevs.max()) - low + 1
    if (int(ranks[-1]) + 1) * span >= 2**63:
        return np.lexsort((prevs, groups))
    return order[np.argsort(ranks * span + (ordered_prevs - low), kind="stable")]


def _firsts(is_joined: npt.NDArray[np.bool_]) -> Order:
    """The index of each chain's first edge. `is_joined[i]`: edge `i + 1` continues the chain of edge `i`."""
    return np.flatnonzero(np.concatenate(([True], ~is_joined)))


def _link_overlapping(groups: Ids, prevs: Ids, ids: Ids, arrival: Order) -> tuple[Order, Order]:
    """Like `link`, for edges that may overlap or repeat. An edge that overlaps another one is a chain of its own.

    Args:
        arrival: the position of each edge in the order of arrival.

    Returns:
        The indexes of the edges chain by chain, and for each chain the place of its first edge in this order.
    """
    order = np.lexsort((arrival, ids, prevs, groups))
    groups, prevs, ids, arrival = groups[order], prevs[order], ids[order], arrival[order]
    indexes = np.arange(len(groups))
    is_duplicate = np.concatenate(
        ([False], (groups[1:] == groups[:-1]) & (prevs[1:] == prevs[:-1]) & (ids[1:] == ids[:-1]))
    )
    layers = indexes - np.maximum.accumulate(np.where(is_duplicate, 0, indexes))
    overlapping = _find_overlapping(groups[~is_duplicate], prevs[~is_duplicate], ids[~is_duplicate])[
        np.cumsum(~is_duplicate) - 1
    ]

    # Layer 0 has each edge once, and layer `n` has its repetition number `n`. The first edge of a layer begins below
    # the end of the previous layer, so no chain crosses layers.
    order = np.lexsort((prevs, layers, groups))
    groups, prevs, ids, overlapping = groups[order], prevs[order], ids[order], overlapping[order]
    is_joined = (groups[1:] == groups[:-1]) & (prevs[1:] == ids[:-1])
    return arrival[order], _firsts(is_joined & ~overlapping[1:] & ~overlapping[:-1])


def _find_overlapping(groups: Ids, prevs: Ids, ids: Ids) -> npt.NDArray[np.bool_]:
    """A mask of the edges that overlap another edge of their group, directly or through a third edge.

    The edges must be distinct, and sorted by group and `prev`.
    """
    by_id = np.lexsort((ids, groups))
    ranks = np.empty_like(by_id)
    ranks[by_id] = np.arange(len(by_id))
    reach = ids[by_id][np.maximum.accumulate(ranks)]  # ranks ascend with groups, so groups do not mix
    begins = np.concatenate(([True], (groups[1:] != groups[:-1]) | (prevs[1:] >= reach[:-1])))
    clusters = np.cumsum(begins) - 1
    sizes = np.bincount(clusters)
    overlapping: npt.NDArray[np.bool_] = sizes[clusters] > 1
    return overlapping


MAX_FACTS = 4_000_000
"""A task stops reading when it has this many facts beyond one for each record. The state function takes 60 to 110 bytes
for each of them. With more facts, glibc does not reuse the memory of its arrays (`MALLOC_MMAP_THRESHOLD_` in
`engine.spark`), and the page faults cost more than a smaller number of batches saves.
"""

MAX_UNPACKED_EDGES = 1 << 20
"""When a range has this many edges that are not packed, they are packed as one piece. The rest is packed at the end of
the range. Packing takes up to 150 bytes for each edge of the piece. With a smaller number, the records of a stream are
in more pieces, so the stream has more runs.
"""

MAX_EDGES = 16_384
"""The largest number of edges of a packet, about 80 KiB. The JVM copies each packet six times, and would allocate new
memory for each copy of a larger packet.
"""

PACKETS_SCHEMA = pa.schema([("key", pa.int32()), ("packet", pa.binary())])

_FLUSH_BYTES = 1 << 20  # size of the packets that are passed to the JVM together

_encoder = msgspec.msgpack.Encoder()


NotStorableOffsets = Mapping[str, Mapping[int, Sequence[int]]]
"""Topic -> partition -> offsets of the records whose effects the database cannot store."""

RangeRecords = tuple[Sequence[PlannedRange], Iterable[tuple[PlannedRange, RecordBatch]]]
"""Ranges that are fetched together, and an iterable of their records."""


def compact(
    groups: Iterable[RangeRecords],
    *,
    keys: Sequence[int],
    names: dict[Topic, str],
    max_facts: int,
    not_storable: NotStorableOffsets | None = None,
) -> Iterator[pa.RecordBatch]:
    """Compact the ranges of a task.

    Args:
        groups: groups of ranges that are fetched together, and the records of the ranges.
        keys: Spark's group-by key of each shard (`engine.query.shard_keys`).
        names: the names of the topics.
        max_facts: the task stops reading when it has this many facts beyond one for each record.
        not_storable: offsets of records to reject with the reason `not_storable`.

    Yields:
        Rows of `PACKETS_SCHEMA`. There are packets for each range and each shard with records of the range, and at
        least one packet for each range.
    """
    rejected_offsets = not_storable or {}
    extra_facts = 0  # facts beyond one for each record
    for ranges, records in groups:
        decoders = {
            planned: Decoder(planned.topic, rejected_offsets.get(names[planned.topic], {}).get(planned.partition, ()))
            for planned in ranges
        }
        packed: dict[PlannedRange, list[tuple[int, Packet]]] = defaultdict(list)
        is_cut_short = False
        for planned, batch in records:
            if is_cut_short := extra_facts >= max_facts:
                break
            decoder = decoders[planned]
            before = decoder.size
            decoder.add(batch)
            extra_facts += max(0, decoder.size - before - batch.size)
            while decoder.size >= MAX_UNPACKED_EDGES:
                oldest = decoder.split(MAX_UNPACKED_EDGES)
                packed[planned] += pack(names[planned.topic], planned.partition, oldest, len(keys))
        for planned, decoder in decoders.items():
            packets = packed.pop(planned, []) + pack(names[planned.topic], planned.partition, decoder, len(keys))
            end = max(decoder.next_offset, planned.start) if is_cut_short else planned.end
            yield from _encode(
                (keys[shard], msgspec.structs.replace(packet, next_offset=end, is_cut_short=is_cut_short))
                for shard, packet in packets
            )


def _encode(packets: Iterable[tuple[int, Packet]]) -> Iterator[pa.RecordBatch]:
    """Encode packets with their group-by keys as rows of `PACKETS_SCHEMA`, about `_FLUSH_BYTES` at a time."""
    keys: list[int] = []
    encoded: list[bytes] = []
    size = 0
    for key, packet in packets:
        keys.append(key)
        encoded.append(_encoder.encode(packet))
        size += len(encoded[-1])
        if size > _FLUSH_BYTES:
            yield _arrow_batch(keys, encoded)
            keys, encoded, size = [], [], 0
    if encoded:
        yield _arrow_batch(keys, encoded)


def _arrow_batch(keys: list[int], packets: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(keys, pa.int32()), pa.array(packets, pa.binary())], schema=PACKETS_SCHEMA)


OFFSET_BITS = 32


def pack(topic: str, partition: int, decoder: Decoder, shards: int) -> list[tuple[int, Packet]]:
    """Pack the decoded records of one range, or of a piece of it.

    Args:
        topic: the name of the Kafka topic.
        decoder: the decoder that has decoded the records.
        shards: number of shards.

    Returns:
        Packets with their shards. At least one packet, because a packet has the next offset to read. The same records
        give the same packets.
    """
    packets: list[tuple[int, Packet]] = []
    first_packets: dict[int, Packet] = {}

    def put(shard: int, runs: PackedRuns) -> Packet:
        packet = Packet(topic, partition, decoder.topic, decoder.next_offset, runs, [], [], [])
        packets.append((shard, packet))
        return first_packets.setdefault(shard, packet)

    def packet_of(shard: int) -> Packet:
        return first_packets[shard] if shard in first_packets else put(shard, PackedRuns())

    markers = [Marker.of(*marker) for marker in sorted(decoder.markers, key=itemgetter(1))]
    if decoder.size:
        edges = decoder.edges()
        writer_epochs, ranks = decoder.writer_epochs.ranked()
        shard = {stream: shard_of(stream, shards) for stream, _, _ in writer_epochs}
        order = sorted(range(len(writer_epochs)), key=lambda at: shard[writer_epochs[at][0]])
        writer_epochs = [writer_epochs[at] for at in order]
        edges = edges._replace(writer_epochs=np.argsort(order)[ranks][edges.writer_epochs])
        segments = _segments(edges, writer_epochs, markers)
        batch_rows: list[BatchRows] = []
        is_row = edges.kinds == ROW
        if is_row.any():
            batch_rows = [*_batch_rows(edges.take(is_row), segments[is_row], writer_epochs)]
            edges, segments = edges.take(~is_row), segments[~is_row]
        runs = _link_runs(edges, segments, writer_epochs)
        for number, part in runs.divide(np.array([shard[stream] for stream in runs.streams]), MAX_EDGES):
            put(number, part)
        for rows in batch_rows:
            packet_of(shard[rows.stream]).rows.append(rows)
    for marker in markers:
        packet_of(shard_of(marker.stream, shards)).markers.append(marker)

    for reason, offsets in sorted(decoder.rejected_offsets.items()):
        rejected = RejectedRecords(topic, partition, reason, np.sort(np.array(offsets, "<i8")).tobytes())
        packet_of(partition % shards).rejected.append(rejected)
    for facts in _merge_possible_facts(decoder.possible_facts, markers):
        packet_of(shard_of(facts.stream, shards)).possible_facts.append(facts)
    if not packets:
        packet_of(partition % shards)
    return packets


def _merge_possible_facts(facts: list[PossibleFacts], markers: list[Marker]) -> list[PossibleFacts]:
    """Merge the possible facts of each writer epoch between two neighbouring markers of its stream."""
    marker_offsets: dict[str, list[int]] = defaultdict(list)
    for marker in markers:
        marker_offsets[marker.stream].append(marker.offset)
    merged: dict[tuple[str, str | None, int, bool, int], PossibleFacts] = {}
    for fact in sorted(facts, key=attrgetter("first_offset")):
        key = (
            fact.stream,
            fact.writer,
            fact.epoch,
            fact.is_key_only,
            bisect(marker_offsets[fact.stream], fact.first_offset),
        )
        first = merged.setdefault(key, fact)
        if fact.reach > first.reach:
            merged[key] = msgspec.structs.replace(first, reach=fact.reach)
    return [*merged.values()]


def _segments(edges: Edges, writer_epochs: list[WriterEpoch], markers: list[Marker]) -> Ids:
    """For each edge the number of its segment: how many cuts come before the edge.

    A cut is a JOIN, RETIRE or OPEN of the edge's stream. There is also a cut of all streams at every 2**32 offsets
    after the first edge.
    """
    blocks: Ids = np.broadcast_to(np.int64(0), len(edges.offsets))
    if (edges.offsets[-1] - edges.offsets[0]) >> OFFSET_BITS:
        blocks = (edges.offsets - edges.offsets[0]) >> OFFSET_BITS
    numbers = {stream: number for number, (stream, _, _) in enumerate(writer_epochs)}
    cutting = [marker for marker in markers if marker.stream in numbers]  # a SKIP is on the other topic
    if not cutting:
        return blocks
    # Each stream gets a range of numbers with room for all edges, so that one search finds the cuts of all streams.
    room = len(edges.ids) + 1
    indexes = np.searchsorted(edges.offsets, [marker.offset for marker in cutting])
    cuts = np.sort(np.array([numbers[marker.stream] for marker in cutting]) * room + indexes)
    begins = np.array([numbers[stream] for stream, _, _ in writer_epochs])[edges.writer_epochs] * room
    cuts_before: Ids = np.searchsorted(cuts, begins + np.arange(room - 1), side="right") - np.searchsorted(cuts, begins)
    return blocks + cuts_before


def _batch_rows(rows: Edges, segments: Ids, writer_epochs: list[WriterEpoch]) -> Iterator[BatchRows]:
    groups = rows.writer_epochs * (segments.max() + 1) + segments
    order = np.argsort(groups, kind="stable")
    offsets, groups = rows.offsets[order], groups[order]
    firsts = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(offsets)], strict=True):
        stream, writer, epoch = writer_epochs[rows.writer_epochs[order[first]]]
        low, high = int(offsets[first]), int(offsets[stop - 1])
        yield BatchRows(stream, writer, epoch, (offsets[first:stop] - low).astype("<u4").tobytes(), low, high)


def _link_runs(edges: Edges, segments: Ids, writer_epochs: list[WriterEpoch]) -> RunColumns:
    """Link edges into runs. The runs are in the order of `writer_epochs`."""
    if not len(edges.ids):
        return RunColumns.of([])
    segment_count = int(segments.max()) + 1  # for each writer epoch and direction
    groups = edges.writer_epochs * (2 * segment_count)
    if segment_count > 1:
        groups += segments
    is_backward = edges.ids < 0
    if is_backward.any():
        groups += is_backward * segment_count
        edges = edges._replace(prevs=np.abs(edges.prevs), ids=np.abs(edges.ids))
    chains, firsts = link(edges._replace(writer_epochs=groups), MAX_EDGES)
    numbers, backward = np.divmod(chains.writer_epochs[firsts] // segment_count, 2)
    run_writer_epochs = [writer_epochs[number] for number in numbers.tolist()]
    rows = np.empty(len(firsts), RUN_DTYPE)
    rows["epoch"] = [epoch for _, _, epoch in run_writer_epochs]
    rows["direction"], rows["start"] = 1 - 2 * backward, chains.prevs[firsts]
    rows["stop"] = np.append(firsts[1:], len(chains.ids))
    for column, first, last in ((chains.offsets, "first_offset", "last_offset"), (chains.times, "oldest", "newest")):
        rows[first], rows[last] = np.minimum.reduceat(column, firsts), np.maximum.reduceat(column, firsts)
    offsets = chains.offsets - np.repeat(rows["first_offset"], np.diff(firsts, append=len(chains.ids)))
    return RunColumns(
        [stream for stream, _, _ in run_writer_epochs],
        [writer for _, writer, _ in run_writer_epochs],
        rows,
        chains.ids,
        chains.kinds,
        offsets.astype("<u4"),
    )
