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

from tidemark.streaming.columns import Columns
from tidemark.streaming.framing import Frames
from tidemark.streaming.packing import pack
from tidemark.streaming.wire import Topic

PACKETS = pa.schema([("shard", pa.int32()), ("packet", pa.binary())])

Compactor = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_encoder = msgspec.msgpack.Encoder()


def compactor(shards: int, facts_topic: str, control_topic: str) -> Compactor:
    """The function for `mapInArrow`: from frames (`streaming.framing`) to (shard, packet)."""
    return partial(compact, shards=shards, names={Topic.FACTS: facts_topic, Topic.CONTROL: control_topic})


def origin_of(topic: Topic, partition: int) -> int:
    """Topic and partition in one: the partition for the facts; -1, -2, ... for 0, 1, ... of the control topic."""
    return partition if topic is Topic.FACTS else -1 - partition


def compact(batches: Iterator[pa.RecordBatch], *, shards: int, names: dict[Topic, str]) -> Iterator[pa.RecordBatch]:
    """One row for each Kafka partition and shard that has anything to say; each partition speaks at least once."""
    origins: dict[int, Columns] = {}
    for batch in batches:
        for origin, part in _by_origin(batch):
            if origin not in origins:
                origins[origin] = Columns(Topic.FACTS if origin >= 0 else Topic.CONTROL)
            origins[origin].add(part)
    for origin, columns in origins.items():
        packets = pack(names[columns.topic], origin if origin >= 0 else -1 - origin, columns, shards)
        encoded = [_encoder.encode(packet) for packet in packets.values()]
        yield pa.record_batch([pa.array(packets, pa.int32()), pa.array(encoded, pa.binary())], schema=PACKETS)


def _by_origin(batch: pa.RecordBatch) -> Iterator[tuple[int, Frames]]:
    """The parts of a batch that come from one Kafka partition each, in their order."""
    if not batch.num_rows:
        return
    frames = Frames.of(batch.column(0))
    firsts = [0, *(np.flatnonzero(np.diff(frames.origins)) + 1).tolist()]
    for first, stop in zip(firsts, [*firsts[1:], len(frames)], strict=True):
        yield int(frames.origins[first]), frames.part(first, stop)
