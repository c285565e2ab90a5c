"""Runs as they travel from compaction to the state function: many as columns, and one of them as a row. Pure.

A run is a chain of edges of one writer and one epoch (docs/design.md 5): edge `i` is `(ids[i-1], ids[i]]`, the first
one `(start, ids[0]]`. IDs are magnitudes here and in everything behind; `direction` keeps the sign.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from tidemark.streaming.values.intervals import Ids

_NUMBERS = "epoch", "direction", "start", "stop", "first_offset", "last_offset", "oldest", "newest"
NUMBERS = np.dtype([(name, "<i8") for name in _NUMBERS])
"""Of each run; `stop` is where its edges end among those of all, the others are as in `PackedRun`."""


class PackedRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`ids` are little-endian int64, `kinds` uint8, `offsets` uint32 above `first_offset`; equal counts.

    `first_offset` and `last_offset` are the smallest and largest of the run; `oldest` and `newest` are Kafka record
    times in ms since 1970. The edges are in chain order, which need not be the order of their offsets.
    """

    stream: str
    writer: str
    epoch: int
    direction: int  # as a number, so that the garbage collector need not look at runs, which are many
    start: int
    ids: bytes
    kinds: bytes
    offsets: bytes
    first_offset: int
    last_offset: int
    oldest: int
    newest: int


class PackedRuns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Runs as a packet has them: `numbers` as of `NUMBERS`, and the edges of all end to end, as in `PackedRun`."""

    streams: list[str] = []
    writers: list[str] = []
    numbers: bytes = b""
    ids: bytes = b""
    kinds: bytes = b""
    offsets: bytes = b""

    @classmethod
    def of(cls, runs: Iterable[PackedRun]) -> Self:
        listed = [*runs]
        stops = np.cumsum([len(it.kinds) for it in listed], dtype=np.int64).tolist()
        rows = [
            (it.epoch, it.direction, it.start, stop, it.first_offset, it.last_offset, it.oldest, it.newest)
            for it, stop in zip(listed, stops, strict=True)
        ]
        return cls(
            [it.stream for it in listed],
            [it.writer for it in listed],
            np.array(rows, NUMBERS).tobytes(),
            b"".join(it.ids for it in listed),
            b"".join(it.kinds for it in listed),
            b"".join(it.offsets for it in listed),
        )

    def __len__(self) -> int:
        return len(self.streams)

    def __iter__(self) -> Iterator[PackedRun]:
        columns = RunColumns.of([self])
        return map(columns.run, range(len(self)))


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Runs of one task or of many, by number. `rows` are `NUMBERS`; `offsets` are above those of their run."""

    streams: list[str]
    writers: list[str]
    rows: npt.NDArray[np.void]
    ids: Ids
    kinds: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, parts: Sequence[PackedRuns]) -> Self:
        """All of them, one part after the other."""
        rows = np.frombuffer(b"".join([it.numbers for it in parts]), NUMBERS).copy()
        edges = np.array([len(it.kinds) for it in parts], np.int64)
        rows["stop"] += np.repeat(np.cumsum(edges) - edges, np.array([len(it) for it in parts], np.int64))
        return cls(
            [name for it in parts for name in it.streams],
            [name for it in parts for name in it.writers],
            rows,
            np.frombuffer(b"".join([it.ids for it in parts]), "<i8"),
            np.frombuffer(b"".join([it.kinds for it in parts]), np.uint8),
            np.frombuffer(b"".join([it.offsets for it in parts]), "<u4"),
        )

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def begins(self) -> Ids:
        """Where the edges of each run begin."""
        begins = np.zeros(len(self), np.int64)
        begins[1:] = self.rows["stop"][:-1]
        return begins

    def run(self, at: int) -> PackedRun:
        epoch, direction, start, stop, *offsets_and_times = self.rows[at].item()
        begin = int(self.rows["stop"][at - 1]) if at else 0
        return PackedRun(
            self.streams[at],
            self.writers[at],
            epoch,
            direction,
            start,
            self.ids[begin:stop].tobytes(),
            self.kinds[begin:stop].tobytes(),
            self.offsets[begin:stop].tobytes(),
            *offsets_and_times,
        )

    def packed(self, first: int, stop: int) -> PackedRuns:
        """The runs `first .. stop - 1`."""
        rows = self.rows[first:stop].copy()
        begin, end = int(self.rows["stop"][first - 1]) if first else 0, int(rows["stop"][-1])
        rows["stop"] -= begin
        return PackedRuns(
            self.streams[first:stop],
            self.writers[first:stop],
            rows.tobytes(),
            self.ids[begin:end].tobytes(),
            self.kinds[begin:end].tobytes(),
            self.offsets[begin:end].tobytes(),
        )

    def divided(self, groups: Ids, most: int) -> Iterator[tuple[int, PackedRuns]]:
        """Runs of one of `groups` (a number for each run, ascending) with up to `most` edges together, or one run."""
        stops = self.rows["stop"]
        first = edges = 0
        while first < len(self):
            group = int(groups[first])
            full = max(int(np.searchsorted(stops, edges + most, side="right")), first + 1)
            stop = min(full, int(np.searchsorted(groups, group, side="right")))
            yield group, self.packed(first, stop)
            first, edges = stop, int(stops[stop - 1])
