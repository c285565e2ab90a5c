"""The query: packets -> state per shard -> effects.

The functions here run in Spark's Python workers. They are found by name there, so whatever they are given travels in a
`functools.partial` as plain bytes.
"""

import gc
from collections.abc import Iterator
from functools import cache, partial

import msgspec
import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tidemark.streaming import effects
from tidemark.streaming.batch import advance
from tidemark.streaming.model import Bounds, shard_of
from tidemark.streaming.runs import Packet

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
    """From packets (`streaming.kafka_source`) to one row of effects per shard and batch (`EFFECTS`)."""
    return packets.groupBy("shard").applyInPandasWithState(
        partial(advance_shard, seeds=seeds, bounds=bounds),
        outputStructType=EFFECTS,
        stateStructType=STATE,
        outputMode="append",
        timeoutConf=GroupStateTimeout.NoTimeout,
    )


def collect(batch: DataFrame) -> list[effects.ShardEffects]:
    """Run the batch; effects by shard, ascending."""
    found = [effects.decode(row["effects"]) for row in batch.collect()]
    return sorted(found, key=lambda done: done.shard)
