"""The query: Kafka -> compact -> state per shard -> effects. The only module in which Spark meets the core.

The functions here run in Spark's Python workers. They are found by name there, so whatever they are given travels in a
`functools.partial` as plain bytes.
"""

import gc
from collections.abc import Iterator
from functools import cache, partial

import msgspec
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import coalesce, col, concat, lit, octet_length, unix_millis, when
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tidemark.streaming import effects
from tidemark.streaming.batch import advance
from tidemark.streaming.compact import Compactor, compactor
from tidemark.streaming.model import Bounds, shard_of
from tidemark.streaming.records import Topic
from tidemark.streaming.runs import Packet

PACKETS = "shard int, packet binary"
EFFECTS = "shard int, effects binary"
STATE = "streams binary"

_packets = msgspec.msgpack.Decoder(Packet)
_states = msgspec.msgpack.Decoder(dict[str, bytes])


@cache
def _freeze() -> None:
    """Once per worker: what was imported lives for ever, so the collector need not walk it (10 ms a batch)."""
    gc.collect()
    gc.freeze()


def by_shard(states: dict[str, bytes], shards: int) -> dict[int, bytes]:
    """Streams' states, packed per shard: the seeds of a query."""
    parted: dict[int, dict[str, bytes]] = {}
    for stream, state in sorted(states.items()):
        parted.setdefault(shard_of(stream, shards), {})[stream] = state
    return {shard: msgspec.msgpack.encode(streams) for shard, streams in parted.items()}


def compact_frames(batches: Iterator[pa.RecordBatch], *, compact: Compactor) -> Iterator[pa.RecordBatch]:
    """One task's frames as packets."""
    _freeze()
    return compact(batches)


def advance_shard(
    key: tuple[int],
    frames: Iterator[pd.DataFrame],
    state: GroupState,
    *,
    seeds: dict[int, bytes],
    bounds: Bounds,
) -> Iterator[pd.DataFrame]:
    """One batch of one shard. A shard without state begins with its seed, so an empty checkpoint costs nothing."""
    _freeze()
    shard = int(key[0])
    packed = state.get[0] if state.exists else seeds.get(shard)
    states = _states.decode(packed) if packed is not None else {}
    packets = [_packets.decode(data) for frame in frames for data in frame["packet"]]
    done = advance(shard, states, packets, state.getCurrentProcessingTimeMs(), bounds)
    state.update((msgspec.msgpack.encode(states),))
    yield pd.DataFrame({"shard": [shard], "effects": [effects.encode(done)]})


def positions(packets: DataFrame, *, seeds: dict[int, bytes], bounds: Bounds) -> DataFrame:
    """From packets (`PACKETS`) to one row of effects per shard and batch (`EFFECTS`)."""
    return packets.groupBy("shard").applyInPandasWithState(
        partial(advance_shard, seeds=seeds, bounds=bounds),
        outputStructType=EFFECTS,
        stateStructType=STATE,
        outputMode="append",
        timeoutConf=GroupStateTimeout.NoTimeout,
    )


def compacted(records: DataFrame, *, facts: str, control: str, shards: int, most: int) -> DataFrame:
    """Packets of what Spark's Kafka source gives; `facts` and `control` name the topics, `most` as of
    `streaming.compact`.
    """
    compact = compactor(shards, facts, control, most)
    return frames(records, control).mapInArrow(partial(compact_frames, compact=compact), PACKETS)


def frames(records: DataFrame, control: str) -> DataFrame:
    """The Kafka source's records as compaction takes them: one column, laid out as of `streaming.frames`."""
    partition = col("partition")
    origin = when(col("topic") == control, Topic.CONTROL.origin(partition)).otherwise(Topic.FACTS.origin(partition))
    nothing = lit(b"")
    header = [col("offset"), unix_millis("timestamp"), origin, coalesce(octet_length("key"), lit(0))]
    parts = [*(number.cast("binary") for number in header), coalesce("key", nothing), coalesce("value", nothing)]
    return records.select(concat(*parts).alias("frame"))


def source(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    """Spark's Kafka source."""
    return spark.readStream.format("kafka").options(**options).load()


def collect(batch: DataFrame) -> list[effects.ShardEffects]:
    """Run the batch; effects by shard, ascending."""
    found = [effects.decode(row["effects"]) for row in batch.collect()]
    return sorted(found, key=lambda done: done.shard)
