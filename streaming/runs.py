"""A run in memory: a chain of edges of one writer and one epoch, as arrays. Pure; magnitudes only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tidemark.streaming.chain import Evidence
from tidemark.streaming.intervals import Ids
from tidemark.streaming.packet import Kind, PackedRun

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Run:
    """Edge `i` is `(prevs[i], ids[i]]` and came with the record at `offsets[i]`; `ids` ascend strictly.

    `oldest` is the Kafka time (ms) of the run's oldest record.
    """

    writer: str
    epoch: int
    backward: bool
    start: int
    ids: Ids
    kinds: npt.NDArray[np.uint8]
    offsets: Ids
    first_offset: int
    oldest: int

    @classmethod
    def unpack(cls, packed: PackedRun) -> "Run":
        offsets = np.frombuffer(packed.offsets, np.uint32).astype(np.int64) + packed.first_offset
        ids, kinds = np.frombuffer(packed.ids, np.int64), np.frombuffer(packed.kinds, np.uint8)
        return cls(
            packed.writer,
            packed.epoch,
            packed.backward,
            packed.start,
            ids,
            kinds,
            offsets,
            packed.first_offset,
            packed.oldest,
        )

    @property
    def end(self) -> int:
        return int(self.ids[-1])

    @property
    def prevs(self) -> Ids:
        return np.concatenate(([self.start], self.ids[:-1]))

    def __len__(self) -> int:
        return len(self.ids)

    def overlapping(self, low: int, high: int) -> tuple[int, int]:
        """The edges `first .. stop - 1` that overlap `(low, high]`; none where `first >= stop`."""
        if self.start >= high:
            return 0, 0
        stop = min(int(np.searchsorted(self.ids, high, side="left")) + 1, len(self.ids))
        return int(np.searchsorted(self.ids, low, side="right")), stop

    def part(self, first: int, stop: int) -> "Run":
        """The edges `first .. stop - 1`."""
        if first == 0 and stop == len(self.ids):
            return self
        start = int(self.ids[first - 1]) if first else self.start
        offsets = self.offsets[first:stop]
        return replace(
            self,
            start=start,
            ids=self.ids[first:stop],
            kinds=self.kinds[first:stop],
            offsets=offsets,
            first_offset=int(offsets.min()),
        )

    def parts(self, chosen: Mask) -> Iterator["Run"]:
        """The longest parts in which every edge is chosen."""
        steps = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        for first, stop in zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True):
            yield self.part(first, stop)

    def evidence(self) -> Evidence:
        """Facts count one each, a void ID counts one, an announcement counts its width."""
        kinds = np.bincount(self.kinds, minlength=len(Kind))
        empty = int(kinds[Kind.VOID])
        if kinds[Kind.POSITION]:
            announced = self.kinds == Kind.POSITION
            empty += int((self.ids - self.prevs)[announced].sum())
        return Evidence(facts=int(kinds[Kind.RDATA]), empty=empty)

    def completed(self) -> Ids:
        """The IDs that are known to be complete: of facts and voids. An announced ID may be another writer's."""
        ids: Ids = self.ids[self.kinds != Kind.POSITION]
        return ids
