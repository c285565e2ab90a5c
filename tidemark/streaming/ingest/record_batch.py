"""Records as Kafka's client hands them over, in columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import Topic

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """The offsets `[start, end)` of one partition; transactions may have left any of them without a record."""

    topic: Topic
    partition: int
    start: int
    end: int


class Fetched(NamedTuple):
    """Records of one partition; `times` in ms since 1970. Record `i` has the bytes `[bounds[i], bounds[i + 1])` of all
    values, and so of all keys. What is null in Kafka is empty.
    """

    values: Bytes
    value_bounds: Ids
    keys: Bytes
    key_bounds: Ids
    offsets: Ids
    times: Ids

    @classmethod
    def of(cls, keys: Sequence[bytes | None], values: Sequence[bytes | None], offsets: Ids, times: Ids) -> "Fetched":
        return cls(*_joined(values), *_joined(keys), np.ascontiguousarray(offsets), np.ascontiguousarray(times))

    @property
    def size(self) -> int:
        return len(self.offsets)

    def key(self, at: int) -> bytes:
        return self.keys[self.key_bounds[at] : self.key_bounds[at + 1]].tobytes()

    def value(self, at: int) -> bytes:
        return self.values[self.value_bounds[at] : self.value_bounds[at + 1]].tobytes()


def read_only(data: Bytes) -> Bytes:
    """The same array, of the one type that compiled code is compiled for: to it one that can be written has another."""
    data.setflags(write=False)
    return data


def _joined(parts: Sequence[bytes | None]) -> tuple[Bytes, Ids]:
    _, bounds, data = pa.array(parts, pa.large_binary()).buffers()
    return read_only(np.frombuffer(data or b"", np.uint8)), np.frombuffer(bounds, np.int64)[: len(parts) + 1]
