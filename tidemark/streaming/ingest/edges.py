"""The edges that a task decodes, as columns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidemark.streaming.values.intervals import Ids
from tidemark.streaming.wire.runs import Mask


class Edges(NamedTuple):
    """One row per edge or batch row; `prevs` and `ids` with their sign; those of a RUN share their offset.

    `kinds` are codes of `Kind`, or `ROW`, whose `prevs` and `ids` mean nothing. `incarnations` are numbers.
    """

    incarnations: Ids
    kinds: npt.NDArray[np.uint8]
    prevs: Ids
    ids: Ids
    offsets: Ids
    times: Ids

    @classmethod
    def room(cls, count: int) -> "Edges":
        """For so many; they hold anything."""
        return cls(np.empty(count, np.int64), np.empty(count, np.uint8), *(np.empty(count, np.int64) for _ in range(4)))

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int, int]]) -> "Edges":
        incarnations, kinds, *others = np.array(rows, np.int64).reshape(-1, 6).T
        return cls(incarnations, kinds.astype(np.uint8), *others)

    @property
    def size(self) -> int:
        return len(self.ids)

    def then(self, more: "Edges") -> "Edges":
        pairs: Any = zip(self, more, strict=True)
        return Edges(*map(np.concatenate, pairs))

    def longer(self, count: int, more: int) -> "Edges":
        """The first `count`, and room behind them for so many `more` at least; it takes no memory before it is used."""
        room = Edges.room(max(count + more, 2 * self.size, 4096))
        pairs: Any = zip(room, self, strict=True)
        for column, known in pairs:
            column[:count] = known[:count]
        return room

    def where(self, chosen: Mask) -> "Edges":
        if chosen.all():
            return self  # the usual case
        return self.at(chosen)

    def at(self, places: Mask | slice | npt.NDArray[np.intp]) -> "Edges":
        columns: Any = self
        return Edges(*(column[places] for column in columns))
