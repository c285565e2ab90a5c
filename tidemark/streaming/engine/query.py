"""Spark's query: from packets to the effects of each shard, with a stored state for each shard.

`advance_shard` runs in Spark's Python workers, which import the function by name. The other public functions run in
the driver.
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
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import NO_STATES, PackedStates, States
from tidemark.streaming.values.limits import Bounds, shard_of
from tidemark.streaming.wire.runs import Packet

EFFECTS_SCHEMA = "shard int, effects binary"
STATE_SCHEMA = "streams binary"

_packet_decoder = msgspec.msgpack.Decoder(Packet)


_seeds_by_query: dict[str, dict[int, bytes]] = {}
"""In a worker: query -> shard -> seed, for the newest query only."""


def _seeds_of(query: str, seeds: "Broadcast[dict[int, bytes]]") -> dict[int, bytes]:
    """The seeds of a query by shard. This worker caches the seeds of the newest query.

    After a task that does not use the broadcast, such as a task that reads Kafka, Spark removes the broadcast from the
    worker. Reading the broadcast again takes about 90 MB for a million streams.
    """
    if query not in _seeds_by_query:
        _seeds_by_query.clear()
        _seeds_by_query[query] = seeds.value
    return _seeds_by_query[query]


def pack_by_shard(states: dict[str, bytes], shards: int) -> dict[int, bytes]:
    """Pack the encoded states of streams as the seeds of a query: shard -> `PackedStates.data`."""
    states_by_shard: dict[int, dict[str, bytes]] = {}
    for stream, state in states.items():
        states_by_shard.setdefault(shard_of(stream, shards), {})[stream] = state
    return {shard: bytes(PackedStates.of(streams).data) for shard, streams in sorted(states_by_shard.items())}


def advance_shard(
    key: tuple[int],
    frames: Iterator[pd.DataFrame],
    state: GroupState,
    *,
    shards: int,
    seeds: "Broadcast[dict[int, bytes]]",
    bounds: Bounds,
    query: str,
) -> Iterator[pd.DataFrame]:
    """Advance one shard by one batch, and update `state`.

    Spark stores only the states that have changed since the query began. All other states are in the seeds, which Spark
    sends to each worker.

    Args:
        key: Spark's group-by key; `key % shards` is the shard.
        frames: data frames with a column `packet`.
        state: the states that have changed since the query began (`States.pack`); replaced by the new ones.
        shards: number of shards.
        seeds: shard -> packed states at the start of the query (`pack_by_shard`).
        bounds: bounds of the streams' states.
        query: the name of the query, which identifies its seeds.

    Yields:
        One row of `EFFECTS_SCHEMA`.
    """
    computed_from = time.time_ns() // 1_000_000
    freeze()
    shard = int(key[0]) % shards  # see `shard_keys`
    seed = _seeds_of(query, seeds).get(shard)
    states = States.unpack(state.get[0] if state.exists else None, NO_STATES if seed is None else PackedStates(seed))
    with gc_disabled():
        packets = [_packet_decoder.decode(data) for frame in frames for data in frame["packet"]]
        shard_effects = apply_batch(shard, states, packets, state.getCurrentProcessingTimeMs(), bounds)
        encoded = effects.encode(msgspec.structs.replace(shard_effects, computation_start=computed_from))
    state.update((states.pack(),))
    yield pd.DataFrame({"shard": [shard], "effects": [encoded]})


def compute_effects(
    packets: DataFrame,
    *,
    shards: int,
    seeds: "Broadcast[dict[int, bytes]]",
    bounds: Bounds,
    query: str,
    one_task: bool,
) -> DataFrame:
    """Define the query: from packets to one row of `EFFECTS_SCHEMA` for each batch and each shard with packets.

    Args:
        packets: from `streaming.ingest.source.packets`.
        seeds: from `pack_by_shard`. They must be the same in all batches of one `query`.
        query: the name of the query (`app.pipeline.preflight.Seed`).
        one_task: True if one task computes the whole batch. Then Spark's plan has no exchange, and a batch takes only
            67 % of the CPU. Call `set_tasks` (`streaming.engine.spark`) with the same value before the query starts.
    """
    if one_task:
        packets = packets.coalesce(1)
    return packets.groupBy("key").applyInPandasWithState(
        partial(advance_shard, shards=shards, seeds=seeds, bounds=bounds, query=query),
        outputStructType=EFFECTS_SCHEMA,
        stateStructType=STATE_SCHEMA,
        outputMode="append",
        timeoutConf=GroupStateTimeout.NoTimeout,
    )


def collect(batch: DataFrame) -> list[bytes]:
    """Run the batch, which blocks until Spark has computed it, and return its effects, still encoded.

    The caller may have to keep the effects until the previous batch is published. Encoded effects take far less memory
    than decoded ones.
    """
    return [bytes(row["effects"]) for row in batch.collect()]


def decode_effects(encoded_effects: list[bytes]) -> list[effects.ShardEffects]:
    """Decode effects, and sort them by shard."""
    return sorted(map(effects.decode, encoded_effects), key=lambda shard_effects: shard_effects.shard)


_Words = npt.NDArray[np.uint32]


def shard_keys(shards: int, tasks: int) -> list[int]:
    """Choose a group-by key for each shard, so that Spark distributes the shards evenly over `tasks` tasks.

    `key % shards` is the shard. Spark chooses the task by the hash of the key. With the shard number as key, the
    distribution is uneven: of 16 shards, one of four tasks had three and another six.

    A task gets consecutive shards. If streams' names differ only in the last digit, their shards are often all even or
    all odd (a property of CRC-32): `events-0` to `events-3` have the shards 3, 5, 15 and 9 of 16.
    """
    keys = np.zeros(shards, np.int64)
    remaining = np.arange(shards)
    for attempt in count():
        if not len(remaining):
            break
        candidates = remaining + attempt * shards
        is_balanced = spark_hash(candidates).astype(np.int64) % tasks == remaining * tasks // shards
        keys[remaining[is_balanced]] = candidates[is_balanced]
        remaining = remaining[~is_balanced]
    return [int(key) for key in keys]


def spark_hash(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Spark's `hash` of an `int` column: MurmurHash3 (x86, 32 bits), seed 42.

    If Spark changes its hash, the load of the tasks becomes uneven. Nothing else depends on the hash.
    """
    mixed = _rotate_left(numbers.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    hashed = _rotate_left(mixed ^ np.uint32(42), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed ^= np.uint32(4)  # the length of an int in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ (hashed >> np.uint32(shift))) * np.uint32(factor)
    hashed ^= hashed >> np.uint32(16)
    return hashed.view(np.int32)


def _rotate_left(words: _Words, bits: int) -> _Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
