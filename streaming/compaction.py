"""From Kafka's records to packets: edges as runs, rows and markers per shard, bad records aside. Runs in `mapInArrow`.

A Spark task sees an offset range of one Kafka partition (or of several, one after another). It is decoded batch by
batch (`columns`), and linked and packed once its input is at an end: about 13 bytes leave for each record that came
in, and nothing loops over records but the decoder. Repeating a task repeats its packets, byte for byte.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming.columns import Batch, Columns
from streaming.packing import pack
from streaming.wire import Topic

PACKETS = pa.schema([("shard", pa.int32()), ("packet", pa.binary())])

Partition = tuple[str, int]
Compactor = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_encoder = msgspec.msgpack.Encoder()
_TICKS_PER_MS = {"ms": 1, "us": 1_000}


def compactor(shards: int, facts_topic: str, control_topic: str) -> Compactor:
    """The function for `mapInArrow`: from (topic, partition, offset, timestamp, key, value) to (shard, packet)."""
    return partial(compact, shards=shards, topics={facts_topic: Topic.FACTS, control_topic: Topic.CONTROL})


def compact(batches: Iterator[pa.RecordBatch], *, shards: int, topics: dict[str, Topic]) -> Iterator[pa.RecordBatch]:
    """One row for each Kafka partition and shard that has anything to say; each partition speaks at least once."""
    partitions: dict[Partition, Columns] = {}
    for batch in batches:
        for (topic, partition), part in _by_partition(batch):
            if (topic, partition) not in partitions:
                partitions[topic, partition] = Columns(topics[topic])
            partitions[topic, partition].add(part)
    for (topic, partition), columns in partitions.items():
        packets = pack(topic, partition, columns, shards)
        encoded = [_encoder.encode(packet) for packet in packets.values()]
        yield pa.record_batch([pa.array(packets, pa.int32()), pa.array(encoded, pa.binary())], schema=PACKETS)


def _by_partition(batch: pa.RecordBatch) -> Iterator[tuple[Partition, Batch]]:
    """The parts of a batch that come from one Kafka partition each, in their order."""
    if not batch.num_rows:
        return
    topics, partitions = batch.column("topic"), batch.column("partition")
    keys, values, stamps = batch.column("key"), batch.column("value"), batch.column("timestamp")
    # Copies both: a view would keep the whole batch, values and all, in memory until the task ends.
    offsets = np.array(batch.column("offset"), np.int64)
    times = stamps.cast(pa.int64()).to_numpy() // _TICKS_PER_MS[stamps.type.unit]
    changes = pc.or_(pc.not_equal(topics[1:], topics[:-1]), pc.not_equal(partitions[1:], partitions[:-1]))
    firsts = [0, *(np.flatnonzero(changes.to_numpy(zero_copy_only=False)) + 1).tolist()]
    for first, stop in zip(firsts, [*firsts[1:], batch.num_rows], strict=True):
        part = Batch(keys[first:stop], values[first:stop], offsets[first:stop], times[first:stop])
        yield (topics[first].as_py(), partitions[first].as_py()), part
