"""The writers (stream, writer, epoch) that a task meets, numbered, so that arrays can hold them."""

import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidemark.streaming.ingest.record_batch import Bytes
from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.records import is_name, is_writer
from tidemark.streaming.wire.runs import Mask

Incarnation = tuple[str, str, int]

_SEED = secrets.randbits(62)
_LINE = 64  # bytes of the processor's cache
_FEW = 500  # incarnations: records have as few back by themselves before it is worth a look


class IncarnationTable(NamedTuple):
    """Incarnations by number for compiled code, which adds to them; `held` is how many there are, and how long all
    their names.

    `places`: where in `names` that of the stream begins, that of the writer, and where it ends; and the epoch. `legal`:
    whether both names are. `slots` is a hash table of the numbers, -1 where none is. `seed`: nobody outside may know
    which names share a hash.
    """

    seed: int
    counts: Ids
    names: Bytes
    bounds: Ids
    hashes: Ids
    legal: Mask
    slots: Ids

    def all(self) -> list[Incarnation]:
        count, names = int(self.counts[0]), self.names[: self.counts[1]].tobytes()
        return [
            (names[stream:writer].decode(), names[writer:end].decode(), epoch)
            for stream, writer, end, epoch in self.bounds[:count].tolist()
        ]


class MissingIncarnation(NamedTuple):
    """An incarnation that the table does not have: where in the values its names are."""

    stream: int
    stream_end: int
    writer: int
    writer_end: int
    epoch: int
    hash: int


class Incarnations:
    """Those that compiled code met have the numbers of `table`, the others are numbered down from -1; one may have a
    number of both. The order in which they were met says nothing about the records.
    """

    def __init__(self) -> None:
        self._numbers: dict[Incarnation, int] = {}
        self.table = IncarnationTable(
            _SEED,
            np.zeros(2, np.int64),
            np.empty(4096, np.uint8),
            np.empty((128, 4), np.int64),
            np.empty(128, np.int64),
            np.empty(128, np.bool_),
            np.full(256, -1, np.int64),
        )

    def number(self, stream: str, writer: str, epoch: int) -> int:
        """The number of an incarnation, new or known."""
        return self._numbers.setdefault((stream, writer, epoch), -1 - len(self._numbers))

    def add(self, missing: MissingIncarnation, values: Bytes) -> None:
        """Put into the table what compiled code did not, for want of room or for letters that it does not know; its
        names are as they stand in `values`.
        """
        stream, writer = (
            values[missing.stream : missing.stream_end].tobytes(),
            values[missing.writer : missing.writer_end].tobytes(),
        )
        number, begin = self.table.counts.tolist()
        middle, end = begin + len(stream), begin + len(stream) + len(writer)
        self._make_room(number + 1, end)
        table = self.table
        table.counts[:] = number + 1, end
        table.names[begin:end] = np.frombuffer(stream + writer, np.uint8)
        table.bounds[number] = begin, middle, end, missing.epoch
        table.hashes[number] = missing.hash
        table.legal[number] = is_name(stream.decode()) and is_writer(writer.decode())
        _put(table.slots, missing.hash, number)

    def warm(self, records: int) -> None:
        """Bring the table into the processor's cache where so many records may ask for much of it. What they came with
        has driven it out; read in a row it comes at a tenth of what those pay who ask for one line after the other.
        """
        table, (count, length) = self.table, self.table.counts.tolist()
        if _FEW < count <= 4 * records:
            for array in (table.slots, table.hashes[:count], table.bounds[:count].ravel(), table.legal[:count]):
                array[:: _LINE // array.itemsize].sum()
            table.names[:length:_LINE].sum()

    def _make_room(self, incarnations: int, names: int) -> None:
        table = self.table
        if incarnations > len(table.hashes):
            slots = np.full(8 * len(table.slots), -1, np.int64)
            for number, hashed in enumerate(table.hashes.tolist()):
                _put(slots, hashed, number)
            longer: Any = {name: _longer(getattr(table, name)) for name in ("bounds", "hashes", "legal")}
            self.table = table._replace(slots=slots, **longer)
        while names > len(self.table.names):
            self.table = self.table._replace(names=_longer(self.table.names))

    def ranked(self) -> tuple[list[Incarnation], Ids]:
        """All in their natural order, and by number the rank in it: the same records give the same ranks."""
        listed = [*self.table.all(), *reversed(self._numbers)]
        ordered = sorted({*listed})
        rank = {incarnation: rank_ for rank_, incarnation in enumerate(ordered)}
        return ordered, np.array([rank[incarnation] for incarnation in listed], np.int64)


def _put(slots: Ids, hashed: int, number: int) -> None:
    """Where `incarnation_table.number_of` finds it: both probe alike."""
    mask = len(slots) - 1
    slot = (hashed ^ (hashed >> 32)) & mask
    while slots[slot] >= 0:
        slot = (slot + 1) & mask
    slots[slot] = number


def _longer(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    longer = np.empty((8 * len(array), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
