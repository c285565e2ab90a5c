"""Columns of a task: the records as Kafka's client hands them over, and the edges that are decoded from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import Topic
from tidemark.streaming.wire.runs import Mask

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """The offsets `[start, end)` of one partition. Any of them may have no record, because transactions leave holes."""

    topic: Topic
    partition: int
    start: int
    end: int


class RecordBatch(NamedTuple):
    """Records of one partition as columns.

    The value of record `i` is `values[value_bounds[i] : value_bounds[i + 1]]`, and its key likewise. A null value or
    key is empty. `times` are milliseconds since 1970.
    """

    values: Bytes
    value_bounds: Ids
    keys: Bytes
    key_bounds: Ids
    offsets: Ids
    times: Ids

    @classmethod
    def of(
        cls, keys: Sequence[bytes | None], values: Sequence[bytes | None], offsets: Ids, times: Ids
    ) -> "RecordBatch":
        return cls(*_joined(values), *_joined(keys), np.ascontiguousarray(offsets), np.ascontiguousarray(times))

    @property
    def size(self) -> int:
        return len(self.offsets)

    def key(self, at: int) -> bytes:
        return self.keys[self.key_bounds[at] : self.key_bounds[at + 1]].tobytes()

    def value(self, at: int) -> bytes:
        return self.values[self.value_bounds[at] : self.value_bounds[at + 1]].tobytes()


class Edges(NamedTuple):
    """Edges and batch rows as columns, one row for each.

    `incarnations` are numbers that `incarnations.Incarnations` gives. `kinds` are codes of `Kind`, or `ROW` for a batch
    row, whose `prevs` and `ids` have no meaning. `prevs` and `ids` have their sign. The edges of a RUN share an offset.
    """

    incarnations: Ids
    kinds: npt.NDArray[np.uint8]
    prevs: Ids
    ids: Ids
    offsets: Ids
    times: Ids

    @classmethod
    def allocate(cls, count: int) -> "Edges":
        """Columns for `count` rows, not initialised."""
        return cls(np.empty(count, np.int64), np.empty(count, np.uint8), *(np.empty(count, np.int64) for _ in range(4)))

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int, int]]) -> "Edges":
        incarnations, kinds, *others = np.array(rows, np.int64).reshape(-1, 6).T
        return cls(incarnations, kinds.astype(np.uint8), *others)

    @property
    def size(self) -> int:
        return len(self.ids)

    def concatenated(self, more: "Edges") -> "Edges":
        pairs: Any = zip(self, more, strict=True)
        return Edges(*map(np.concatenate, pairs))

    def extended(self, count: int, more: int) -> "Edges":
        """A copy of the first `count` rows with room for `more` rows or more. Unused pages take no memory."""
        room = Edges.allocate(max(count + more, 2 * self.size, 4096))
        pairs: Any = zip(room, self, strict=True)
        for column, known in pairs:
            column[:count] = known[:count]
        return room

    def select(self, chosen: Mask) -> "Edges":
        if chosen.all():
            return self  # the usual case
        return self.take(chosen)

    def take(self, selection: Mask | slice | npt.NDArray[np.intp]) -> "Edges":
        columns: Any = self
        return Edges(*(column[selection] for column in columns))


def read_only(data: Bytes) -> Bytes:
    """Make an array read-only. numba compiles a function again for each type, and a writable array is another type."""
    data.setflags(write=False)
    return data


def _joined(parts: Sequence[bytes | None]) -> tuple[Bytes, Ids]:
    _, bounds, data = pa.array(parts, pa.large_binary()).buffers()
    return read_only(np.frombuffer(data or b"", np.uint8)), np.frombuffer(bounds, np.int64)[: len(parts) + 1]
