"""Data of a task as columns: records from Kafka's client, their decoded edges, and numbered writer epochs.

A *writer epoch* is a stream, a writer and an epoch.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import Topic, is_name, is_writer_name
from tidemark.streaming.wire.runs import Mask

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """The offsets `[start, end)` of one partition. Some have no record, such as those of transaction markers."""

    topic: Topic
    partition: int
    start: int
    end: int


class RecordBatch(NamedTuple):
    """Records of one partition as columns.

    The value of record `i` is `values[value_bounds[i] : value_bounds[i + 1]]`. Keys are stored in the same way. A null
    value or key is stored as an empty one. `times` are milliseconds since 1970.
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
        return cls(*_join(values), *_join(keys), np.ascontiguousarray(offsets), np.ascontiguousarray(times))

    @property
    def size(self) -> int:
        return len(self.offsets)

    def key(self, index: int) -> bytes:
        return self.keys[self.key_bounds[index] : self.key_bounds[index + 1]].tobytes()

    def value(self, index: int) -> bytes:
        return self.values[self.value_bounds[index] : self.value_bounds[index + 1]].tobytes()


class Edges(NamedTuple):
    """Edges and batch rows as columns. Items with the same index belong to the same edge or batch row.

    Attributes:
        writer_epochs: numbers from `WriterEpochs`.
        kinds: codes of `Kind`, or `ROW` for a batch row.
        prevs: signed; meaningless for a batch row.
        ids: signed; meaningless for a batch row.
        offsets: Kafka offsets. The edges of a RUN have the same offset.
        times: Kafka times, milliseconds since 1970.
    """

    writer_epochs: Ids
    kinds: npt.NDArray[np.uint8]
    prevs: Ids
    ids: Ids
    offsets: Ids
    times: Ids

    @classmethod
    def allocate(cls, count: int) -> "Edges":
        """Columns with room for `count` rows, not initialised."""
        return cls(np.empty(count, np.int64), np.empty(count, np.uint8), *(np.empty(count, np.int64) for _ in range(4)))

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int, int]]) -> "Edges":
        writer_epochs, kinds, *others = np.array(rows, np.int64).reshape(-1, 6).T
        return cls(writer_epochs, kinds.astype(np.uint8), *others)

    @property
    def size(self) -> int:
        return len(self.ids)

    def concatenate(self, more: "Edges") -> "Edges":
        pairs: Any = zip(self, more, strict=True)
        return Edges(*map(np.concatenate, pairs))

    def with_room(self, count: int, more: int) -> "Edges":
        """A copy of the first `count` rows, with room for at least `more` further rows. Unused pages take no memory."""
        edges = Edges.allocate(max(count + more, 2 * self.size, 4096))
        pairs: Any = zip(edges, self, strict=True)
        for column, known in pairs:
            column[:count] = known[:count]
        return edges

    def take(self, selection: Mask | slice | npt.NDArray[np.intp]) -> "Edges":
        columns: Any = self
        return Edges(*(column[selection] for column in columns))


def read_only(data: Bytes) -> Bytes:
    """Make an array read-only. numba compiles a function for each type, and writable arrays have another type."""
    data.setflags(write=False)
    return data


def _join(parts: Sequence[bytes | None]) -> tuple[Bytes, Ids]:
    _, bounds, data = pa.array(parts, pa.large_binary()).buffers()
    return read_only(np.frombuffer(data or b"", np.uint8)), np.frombuffer(bounds, np.int64)[: len(parts) + 1]


WriterEpoch = tuple[str, str, int]
"""A stream, a writer and its epoch."""

_SEED = secrets.randbits(62)
_CACHE_LINE_BYTES = 64  # of the processor's cache
_MIN_PREFETCH = 500  # writer epochs; a smaller table needs no prefetch


class WriterEpochTable(NamedTuple):
    """A hash table of writer epochs, which compiled code searches and extends.

    Attributes:
        seed: the start value of all hashes. It is secret, so that no sender can choose names with equal hashes.
        counts: the number of writer epochs, and the total length of their names in bytes.
        names: the names of all streams and writers in one array.
        bounds: for each writer epoch the start of the stream's name, the start of the writer's name, the end of the
            writer's name, and the epoch.
        hashes: the hash of each writer epoch.
        are_legal: for each writer epoch, whether both names are legal.
        slots: the numbers of the writer epochs by hash; -1 if a slot is free.
    """

    seed: int
    counts: Ids
    names: Bytes
    bounds: Ids
    hashes: Ids
    are_legal: Mask
    slots: Ids

    def all(self) -> list[WriterEpoch]:
        """The writer epochs in the order of their numbers."""
        count, names = int(self.counts[0]), self.names[: self.counts[1]].tobytes()
        return [
            (names[stream:writer].decode(), names[writer:end].decode(), epoch)
            for stream, writer, end, epoch in self.bounds[:count].tolist()
        ]


class MissingWriterEpoch(NamedTuple):
    """A writer epoch that is not in the table. The names are given by their bounds in `RecordBatch.values`."""

    stream_begin: int
    stream_end: int
    writer_begin: int
    writer_end: int
    epoch: int
    hash: int


class WriterEpochs:
    """Gives each writer epoch a number.

    Writer epochs of records that compiled code decodes are in `table` and have the numbers 0, 1, ... Writer epochs of
    other records have the numbers -1, -2, ... A writer epoch may have one number of each kind. The numbers depend on
    the order of arrival. The ranks, which `ranked` returns, do not.
    """

    def __init__(self) -> None:
        self._numbers: dict[WriterEpoch, int] = {}
        self.table = WriterEpochTable(
            _SEED,
            np.zeros(2, np.int64),
            np.empty(4096, np.uint8),
            np.empty((128, 4), np.int64),
            np.empty(128, np.int64),
            np.empty(128, np.bool_),
            np.full(256, -1, np.int64),
        )

    def find_or_add(self, stream: str, writer: str, epoch: int) -> int:
        """Return the negative number of a writer epoch. Gives the next number to a writer epoch without one."""
        return self._numbers.setdefault((stream, writer, epoch), -1 - len(self._numbers))

    def add(self, missing: MissingWriterEpoch, values: Bytes) -> None:
        """Add a writer epoch that compiled code could not add: the table is full, or a name is not certain to be legal.

        Args:
            missing: the writer epoch.
            values: the array of bytes that contains the names.
        """
        stream, writer = (
            values[missing.stream_begin : missing.stream_end].tobytes(),
            values[missing.writer_begin : missing.writer_end].tobytes(),
        )
        number, begin = self.table.counts.tolist()
        middle, end = begin + len(stream), begin + len(stream) + len(writer)
        self._make_room(number + 1, end)
        table = self.table
        table.counts[:] = number + 1, end
        table.names[begin:end] = np.frombuffer(stream + writer, np.uint8)
        table.bounds[number] = begin, middle, end, missing.epoch
        table.hashes[number] = missing.hash
        table.are_legal[number] = is_name(stream.decode()) and is_writer_name(writer.decode())
        _insert(table.slots, missing.hash, number)

    def prefetch(self, records: int) -> None:
        """Load the table into the processor's cache before a large scan. This is ten times as fast as random cache
        misses.

        Does nothing for a small table, or if there are few records.

        Args:
            records: the number of records to scan.
        """
        table, (count, length) = self.table, self.table.counts.tolist()
        if _MIN_PREFETCH < count <= 4 * records:
            for array in (table.slots, table.hashes[:count], table.bounds[:count].ravel(), table.are_legal[:count]):
                array[:: _CACHE_LINE_BYTES // array.itemsize].sum()
            table.names[:length:_CACHE_LINE_BYTES].sum()

    def _make_room(self, writer_epochs: int, names: int) -> None:
        """Enlarge the table if it has no room for `writer_epochs` writer epochs with `names` bytes of names."""
        table = self.table
        if writer_epochs > len(table.hashes):
            slots = np.full(8 * len(table.slots), -1, np.int64)
            for number, hashed in enumerate(table.hashes.tolist()):
                _insert(slots, hashed, number)
            enlarged: Any = {name: _enlarge(getattr(table, name)) for name in ("bounds", "hashes", "are_legal")}
            self.table = table._replace(slots=slots, **enlarged)
        while names > len(self.table.names):
            self.table = self.table._replace(names=_enlarge(self.table.names))

    def ranked(self) -> tuple[list[WriterEpoch], Ids]:
        """All writer epochs, sorted, and an array with the rank of each number. The same records give the same ranks.

        The rank of a writer epoch is its index in the sorted list. Negative numbers index the array from its end.
        """
        writer_epochs = [*self.table.all(), *reversed(self._numbers)]
        ordered = sorted({*writer_epochs})
        rank = {writer_epoch: rank_ for rank_, writer_epoch in enumerate(ordered)}
        return ordered, np.array([rank[writer_epoch] for writer_epoch in writer_epochs], np.int64)


def _insert(slots: Ids, hashed: int, number: int) -> None:
    """Put a number into the slot of its hash, or the next free one, where `field_scan.find_or_add` looks it up."""
    mask = len(slots) - 1
    slot = (hashed ^ (hashed >> 32)) & mask
    while slots[slot] >= 0:
        slot = (slot + 1) & mask
    slots[slot] = number


def _enlarge(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    enlarged = np.empty((8 * len(array), *array.shape[1:]), array.dtype)
    enlarged[: len(array)] = array
    return enlarged
