"""The writers (stream, writer, epoch) that a task meets, numbered, so that arrays can hold them."""

from typing import Final

import numpy as np
import numpy.typing as npt

from tidemark.streaming.intervals import Ids
from tidemark.streaming.records import is_name, is_writer

_NO_KEY: Final = object()

Incarnation = tuple[str, str, int]


class Incarnations:
    """Numbered from 0 in the order in which they are met, which says nothing about the records.

    `number_of[writer][epoch][stream]` is asked once per record, hence plain dicts, the largest last: where streams are
    many, their writers are few. Who misses there calls `number`.
    """

    def __init__(self) -> None:
        self.number_of: dict[str, dict[int, dict[str, int]]] = {}
        self._all: list[Incarnation] = []
        self._keys: npt.NDArray[np.object_] = np.zeros(0, np.object_)

    def number(self, stream: str, writer: str, epoch: int) -> int:
        """The number of an incarnation, new or known."""
        numbers = self.number_of.setdefault(writer, {}).setdefault(epoch, {})
        if stream not in numbers:
            numbers[stream] = len(self._all)
            self._all.append((stream, writer, epoch))
        return numbers[stream]

    def keys(self, numbers: Ids) -> list[object]:
        """For each of `numbers` the Kafka key of its records; what is equal to no key where stream or writer has no
        legal name.
        """
        if new := self._all[len(self._keys) :]:
            keys = [stream.encode() if is_name(stream) and is_writer(writer) else _NO_KEY for stream, writer, _ in new]
            self._keys = np.append(self._keys, np.array(keys, np.object_))
        found: list[object] = self._keys[numbers].tolist()
        return found

    def ranked(self) -> tuple[list[Incarnation], npt.NDArray[np.int64]]:
        """All in their natural order, and by number the rank in it: the same records give the same ranks."""
        numbers = sorted(range(len(self._all)), key=self._all.__getitem__)
        ranks = np.empty(len(numbers), np.int64)
        ranks[numbers] = np.arange(len(numbers))
        return [self._all[number] for number in numbers], ranks
