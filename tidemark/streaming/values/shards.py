"""Which of Spark's tasks has which shards. Pure."""

from itertools import count

import numpy as np
import numpy.typing as npt

_WORDS = npt.NDArray[np.uint32]


def keys_of(shards: int, tasks: int) -> list[int]:
    """A key for each shard, which is the shard modulo `shards`, by which each of so many tasks gets as many shards as
    another, or one more. Spark hashes what it groups by: by its number, one of four tasks had three of 16 and one six.
    """
    keys = np.zeros(shards, np.int64)
    left = np.arange(shards)
    for turn in count():
        if not len(left):
            break
        tried = left + turn * shards
        there = spark_hash(tried).astype(np.int64) % tasks == left % tasks
        keys[left[there]] = tried[there]
        left = left[~there]
    return [int(key) for key in keys]


def spark_hash(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """What Spark's `hash` says of each, as an `int` column: 32 bits of MurmurHash3 (x86), seed 42. Were it to say
    something else one day, tasks would have more or less to do than others, and no more than that.
    """
    mixed = _turned(numbers.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    found = _turned(mixed ^ np.uint32(42), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    found ^= np.uint32(4)  # bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ (found >> np.uint32(shift))) * np.uint32(factor)
    found ^= found >> np.uint32(16)
    return found.view(np.int32)


def _turned(words: _WORDS, bits: int) -> _WORDS:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
