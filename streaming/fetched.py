"""Records as Kafka's client hands them over: Python's own bytes, and columns of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq

import numpy as np
import numpy.typing as npt

from tidemark.streaming.intervals import Ids
from tidemark.streaming.records import Topic


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """The offsets `[start, end)` of one partition; transactions may have left any of them without a record."""

    topic: Topic
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records of one partition, at least one; `times` in ms since 1970. A value that is null in Kafka is empty."""

    keys: Sequence[bytes | None]
    values: Sequence[bytes]
    offsets: Ids
    times: Ids

    def __len__(self) -> int:
        return len(self.values)

    def key(self, at: int) -> bytes:
        return self.keys[at] or b""

    def value(self, at: int) -> bytes:
        return self.values[at]

    def lines(self) -> bytes | None:
        """The values, a newline between any two; None where one does not begin with `{` and end with `}`."""
        text = b"\n".join(self.values)
        data = np.frombuffer(text, np.uint8)
        lengths = np.fromiter(map(len, self.values), np.int64, len(self))
        if not lengths.all():
            return None
        ends = np.cumsum(lengths + 1) - 1
        braced = np.all(data[ends - lengths] == ord("{")) and np.all(data[ends - 1] == ord("}"))
        return text if braced else None

    def have_keys(self, wanted: list[object]) -> npt.NDArray[np.bool_]:
        """For each record whether its key is the wanted one."""
        if wanted == self.keys:
            return np.ones(len(self), np.bool_)
        return np.fromiter(map(eq, wanted, self.keys), np.bool_, len(self))
