"""Numbers for the incarnations (stream, writer, epoch) that a task meets, so that arrays can hold them."""

import numpy as np
import numpy.typing as npt

from tidemark.streaming.framing import Keys
from tidemark.streaming.wire import is_name

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
        """By number: the Kafka key of the incarnation's records; None where a name is none (`wire.is_name`)."""
        if new := self._all[len(self._keys) :]:
            self._keys.extend(
                [stream.encode() if is_name(stream) and is_name(writer) else None for stream, writer, _ in new]
            )
        return self._keys

    def ranked(self) -> tuple[list[Incarnation], npt.NDArray[np.int64]]:
        """All in their natural order, and by number the rank in it: the same records give the same ranks."""
        numbers = sorted(range(len(self._all)), key=self._all.__getitem__)
        ranks = np.empty(len(numbers), np.int64)
        ranks[numbers] = np.arange(len(numbers))
        return [self._all[number] for number in numbers], ranks
