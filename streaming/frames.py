"""Frames: Kafka's records on their way into Python, one binary value each, taken apart by numpy on whole Arrow batches.

A frame is `HEADER`, then the key, then the value; what is null is empty. One column instead of five, because Spark asks
for the size of an Arrow batch before it adds a row, at a price per column: a quarter of the JVM's time with five. The
query makes the frames (`streaming.query.frames`).

`Incarnations` numbers the writers (stream, writer, epoch) that a task meets, so that arrays can hold them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemark.streaming.intervals import Ids
from tidemark.streaming.records import is_name, is_writer

HEADER: Final = np.dtype([("offset", ">i8"), ("time", ">i8"), ("origin", ">i4"), ("key_length", ">i4")])
"""In Java's byte order. `time` is in ms since 1970, `origin` as of `streaming.records.Topic`."""

_Bytes = npt.NDArray[np.uint8]
_NO_KEY: Final = object()


@dataclass(frozen=True, slots=True)
class Frames:
    """The records of an Arrow batch or of a part of it, at least one.

    `data` is the batch's own memory; the columns of numbers are not, and may outlive it.
    """

    data: _Bytes
    starts: Ids
    ends: Ids
    offsets: Ids
    times: Ids
    origins: Ids
    key_lengths: Ids

    @classmethod
    def of(cls, framed: pa.BinaryArray) -> "Frames":
        _, bounds, memory = framed.buffers()
        edges = np.frombuffer(bounds, np.int32)[framed.offset : framed.offset + len(framed) + 1].astype(np.int64)
        data = np.frombuffer(memory, np.uint8)
        header = _windows(data, HEADER)[edges[:-1]]
        return cls(data, edges[:-1], edges[1:], *(header[name].astype(np.int64) for name in HEADER.names or ()))

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, first: int, stop: int) -> "Frames":
        return Frames(self.data, *(getattr(self, name)[first:stop] for name in self.__slots__[1:]))

    def key(self, at: int) -> bytes:
        start = int(self.starts[at]) + HEADER.itemsize
        return self.data[start : start + int(self.key_lengths[at])].tobytes()

    def value(self, at: int) -> bytes:
        return self.data[int(self.values[at]) : int(self.ends[at])].tobytes()

    @property
    def values(self) -> Ids:
        """Where in `data` the values begin."""
        return self.starts + HEADER.itemsize + self.key_lengths

    def _in_braces(self) -> bool:
        values = self.values
        return bool(
            np.all(values < self.ends)
            and np.all(self.data[values] == ord("{"))
            and np.all(self.data[self.ends - 1] == ord("}"))
        )

    def lines(self) -> memoryview | None:
        """The values, each behind a newline and blanks, which stand where its header and key were; None where one does
        not begin with `{` and end with `}`.
        """
        if not self._in_braces():
            return None
        text = self.data[self.starts[0] : self.ends[-1]].copy()
        for length, chosen in self._by_key_length():
            blank = b"\n".ljust(HEADER.itemsize + length)
            _windows(text, np.dtype((bytes, len(blank))))[self.starts[chosen] - self.starts[0]] = blank
        return text.data

    def have_keys(self, keys: "Keys", numbers: Ids) -> npt.NDArray[np.bool_]:
        """For each record whether its key is that of its number."""
        right = np.zeros(len(self), np.bool_)
        for length, chosen in self._by_key_length():
            found = self.data, self.starts[chosen] + HEADER.itemsize
            right[chosen] = keys.are(numbers[chosen], length, *found)
        return right

    def _by_key_length(self) -> Iterator[tuple[int, slice | npt.NDArray[np.intp]]]:
        if np.all(self.key_lengths == self.key_lengths[0]):
            yield int(self.key_lengths[0]), slice(None)
            return
        for length in np.unique(self.key_lengths).tolist():
            yield length, np.flatnonzero(self.key_lengths == length)


class Keys:
    """Keys by number, laid out so that many are compared at once. None is equal to nothing."""

    def __init__(self) -> None:
        self._keys: npt.NDArray[np.object_] = np.zeros(0, np.object_)
        self._memory: _Bytes = np.zeros(0, np.uint8)
        self._starts: Ids = np.zeros(0, np.int64)
        self._lengths: Ids = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def extend(self, keys: Sequence[bytes | None]) -> None:
        self._keys = np.append(self._keys, np.array([_NO_KEY if key is None else key for key in keys], np.object_))
        lengths = np.array([-1 if key is None else len(key) for key in keys])
        sizes = np.maximum(lengths, 0)
        self._starts = np.append(self._starts, len(self._memory) + np.cumsum(sizes) - sizes)
        self._lengths = np.append(self._lengths, lengths)
        self._memory = np.append(self._memory, np.frombuffer(b"".join(filter(None, keys)), np.uint8))

    def of(self, numbers: Ids) -> list[object]:
        """For each of `numbers` its key, or something that is equal to no key."""
        found: list[object] = self._keys[numbers].tolist()
        return found

    def are(self, numbers: Ids, length: int, data: _Bytes, starts: Ids) -> npt.NDArray[np.bool_]:
        """For each of `numbers` whether its key is the `length` bytes that begin in `data` at the same of `starts`."""
        equal: npt.NDArray[np.bool_] = self._lengths[numbers] == length
        if length and equal.any():
            kind = np.dtype((bytes, length))
            ours = _windows(self._memory, kind)[np.where(equal, self._starts[numbers], 0)]
            equal &= ours == _windows(data, kind)[starts]
        return equal


def _windows(data: _Bytes, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """What begins at each byte of `data`, seen as one of `kind`; no copy."""
    return np.ndarray((len(data) - kind.itemsize + 1,), kind, data, strides=(1,))


Incarnation = tuple[str, str, int]


class Incarnations:
    """Numbered from 0 in the order in which they are met, which says nothing about the records.

    `number_of[writer][epoch][stream]` is asked once per record, hence plain dicts, the largest last: where streams are
    many, their writers are few. Who misses there calls `number`.
    """

    def __init__(self) -> None:
        self.number_of: dict[str, dict[int, dict[str, int]]] = {}
        self._all: list[Incarnation] = []
        self._keys = Keys()

    def number(self, stream: str, writer: str, epoch: int) -> int:
        """The number of an incarnation, new or known."""
        numbers = self.number_of.setdefault(writer, {}).setdefault(epoch, {})
        if stream not in numbers:
            numbers[stream] = len(self._all)
            self._all.append((stream, writer, epoch))
        return numbers[stream]

    def keys(self) -> Keys:
        """By number: the Kafka key of the incarnation's records; None where stream or writer has no legal name."""
        if new := self._all[len(self._keys) :]:
            self._keys.extend(
                [stream.encode() if is_name(stream) and is_writer(writer) else None for stream, writer, _ in new]
            )
        return self._keys

    def ranked(self) -> tuple[list[Incarnation], npt.NDArray[np.int64]]:
        """All in their natural order, and by number the rank in it: the same records give the same ranks."""
        numbers = sorted(range(len(self._all)), key=self._all.__getitem__)
        ranks = np.empty(len(numbers), np.int64)
        ranks[numbers] = np.arange(len(numbers))
        return [self._all[number] for number in numbers], ranks
