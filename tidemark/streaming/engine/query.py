"""The query: packets -> state per shard -> effects.

These functions run in Spark's Python workers, which import them by name. A `functools.partial` contains their
arguments.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import count

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
from pyspark.core.broadcast import Broadcast
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tidemark.common.gc_tuning import freeze, gc_disabled
from tidemark.streaming.core import effects
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.store import NO_STATES, PackedStates, States
from tidemark.streaming.values.limits import Bounds, shard_of
from tidemark.streaming.wire.runs import Packet

EFFECTS = "shard int, effects binary"
STATE = "streams binary"

_packets = msgspec.msgpack.Decoder(Packet)


_seeds_by_line: dict[str, dict[int, bytes]] = {}
"""In a worker: query -> shard -> seed, for the current query."""


def _seeds_of(line: str, seeds: "Broadcast[dict[int, bytes]]") -> dict[int, bytes]:
    """The seeds of a query, cached for the process.

    Spark removes a broadcast from a worker after each task that does not use it, such as a task that reads Kafka.
    Reading the broadcast again costs about 90 MB for a million streams.
    """
    if line not in _seeds_by_line:
        _seeds_by_line.clear()
        _seeds_by_line[line] = seeds.value
    return _seeds_by_line[line]


def by_shard(states: dict[str, bytes], shards: int) -> dict[int, bytes]:
    """Pack the states of streams by shard: the seeds of a query (`streaming.core.store`)."""
    parted: dict[int, dict[str, bytes]] = {}
    for stream, state in states.items():
        parted.setdefault(shard_of(stream, shards), {})[stream] = state
    return {shard: bytes(PackedStates.of(streams).data) for shard, streams in sorted(parted.items())}


def advance_shard(
    key: tuple[int],
    frames: Iterator[pd.DataFrame],
    state: GroupState,
    *,
    shards: int,
    seeds: "Broadcast[dict[int, bytes]]",
    bounds: Bounds,
    line: str,
) -> Iterator[pd.DataFrame]:
    """Advance one shard by one batch.

    Spark stores the states that have changed since the query began. Each worker has the seeds with all other states.

    Args:
        key: Spark's group-by key; `key % shards` is the shard.
        frames: data frames with a column `packet`.
        state: the changed states, packed.
        line: identifies the query of `seeds`.

    Yields:
        One row of `EFFECTS`.
    """
    computed_from = time.time_ns() // 1_000_000
    freeze()
    shard = int(key[0]) % shards  # `streaming.engine.query`
    seed = _seeds_of(line, seeds).get(shard)
    states = States.unpack(state.get[0] if state.exists else None, NO_STATES if seed is None else PackedStates(seed))
    with gc_disabled():
        packets = [_packets.decode(data) for frame in frames for data in frame["packet"]]
        done = advance(shard, states, packets, state.getCurrentProcessingTimeMs(), bounds)
        encoded = effects.encode(msgspec.structs.replace(done, computation_start=computed_from))
    state.update((states.pack(),))
    yield pd.DataFrame({"shard": [shard], "effects": [encoded]})


def positions(
    packets: DataFrame,
    *,
    shards: int,
    seeds: "Broadcast[dict[int, bytes]]",
    bounds: Bounds,
    line: str,
    one_task: bool,
) -> DataFrame:
    """Turn packets (`streaming.ingest.source`) into one row of `EFFECTS` for each shard and batch.

    Args:
        packets: see `streaming.ingest.source`.
        seeds: from `by_shard`. They must not change for this `line`, which identifies the query.
        one_task: whether one task computes the whole batch, which requires `TASKS` = 1 (`streaming.engine.spark`).
            Spark's plan then has no exchange, and a batch takes only 67 % of the CPU.
    """
    if one_task:
        packets = packets.coalesce(1)
    return packets.groupBy("key").applyInPandasWithState(
        partial(advance_shard, shards=shards, seeds=seeds, bounds=bounds, line=line),
        outputStructType=EFFECTS,
        stateStructType=STATE,
        outputMode="append",
        timeoutConf=GroupStateTimeout.NoTimeout,
    )


def collect(batch: DataFrame) -> list[bytes]:
    """Run the batch. Returns the effects encoded, because they may wait, and take far more memory when decoded."""
    return [bytes(row["effects"]) for row in batch.collect()]


def decoded(collected: list[bytes]) -> list[effects.ShardEffects]:
    """Decode effects, and sort them by shard."""
    return sorted(map(effects.decode, collected), key=lambda done: done.shard)


_WORDS = npt.NDArray[np.uint32]


def keys_of(shards: int, tasks: int) -> list[int]:
    """Group-by keys such that `key % shards` is the shard, and Spark's hash spreads the shards evenly over `tasks`.

    With the shard number as key, the distribution is uneven: of 16 shards, one of four tasks had three and another six.
    """
    keys = np.zeros(shards, np.int64)
    left = np.arange(shards)
    for turn in count():
        if not len(left):
            break
        tried = left + turn * shards
        fitting = spark_hash(tried).astype(np.int64) % tasks == left % tasks
        keys[left[fitting]] = tried[fitting]
        left = left[~fitting]
    return [int(key) for key in keys]


def spark_hash(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Spark's `hash` of an `int` column: MurmurHash3 (x86, 32 bits), seed 42.

    If Spark changes it, the load of the tasks becomes uneven; nothing else depends on it.
    """
    mixed = _rotated(numbers.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    hashed = _rotated(mixed ^ np.uint32(42), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed ^= np.uint32(4)  # bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ (hashed >> np.uint32(shift))) * np.uint32(factor)
    hashed ^= hashed >> np.uint32(16)
    return hashed.view(np.int32)


def _rotated(words: _WORDS, bits: int) -> _WORDS:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
