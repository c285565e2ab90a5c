"""Sets of stream IDs as sorted, disjoint, half-open intervals `(low, high]`. Pure; magnitudes only.

An `Intervals` is immutable. Most operations work on whole arrays with numpy, so a set of a million IDs costs one sort.
Only `intersection` and `difference` take a step of Python for each interval of one of the two sets.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, np.int64)

_TYPE_CODES = {2: "H", 4: "I", 8: "Q"}
"""Type codes of `array` for packed steps, by their width in bytes. A width of one byte is not used: many steps need
more, and a step that does not fit requires repacking the set.
"""

_BITMAP_BITS_PER_ID_MAX = 8
"""IDs are sorted by a bitmap if it needs at most this many bits for each ID. It takes a tenth of the time of a sort."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """A set of IDs: the union of the intervals `(lows[i], highs[i]]`, which ascend.

    Intervals that touch are always merged: `lows[i] < highs[i] < lows[i + 1]`. `len` and iteration refer to intervals.
    """

    lows: Ids
    highs: Ids

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Self:
        """The union of the intervals `(low, high]`, in any order; they may overlap. `low` must be below `high`."""
        listed = [*pairs]
        if not listed:
            return cls(_NO_IDS, _NO_IDS)
        flat = np.array(listed, np.int64)
        return cls._merge(flat[:, 0], flat[:, 1])

    @classmethod
    def from_ids(cls, ids: Ids) -> Self:
        """The set of `ids`, given in any order; an ID may be repeated. Each ID is the interval `(id - 1, id]`."""
        if not len(ids):
            return cls(_NO_IDS, _NO_IDS)
        if (bitmap := _bitmap(ids)) is None:
            # The stable sort is six times as fast as the default for a few ascending IDs, which is the usual case.
            ordered = np.sort(ids, kind="stable")
            return cls._merge(ordered - 1, ordered)
        low, present = bitmap
        bounds = np.flatnonzero(present[1:] != present[:-1]) + low
        return cls(bounds[::2], bounds[1::2])

    @classmethod
    def from_bounds(cls, lows: Ids, highs: Ids) -> Self:
        """The union of the intervals `(lows[i], highs[i]]`, given in any order; they may overlap. None may be empty."""
        return cls._merge(lows, highs)

    @classmethod
    def _merge(cls, lows: Ids, highs: Ids) -> Self:
        if (lows[1:] > highs[:-1]).all():  # the usual case, which is five times faster
            return cls(lows, highs)
        order = np.argsort(lows, kind="stable")
        lows, reach = lows[order], np.maximum.accumulate(highs[order])
        first = np.flatnonzero(np.concatenate(([True], lows[1:] > reach[:-1])))
        last = np.append(first[1:], len(lows)) - 1
        return cls(lows[first], reach[last])

    def union(self, other: "Intervals") -> "Intervals":
        if not len(other):
            return self
        if not len(self):
            return other
        return Intervals._merge(np.concatenate((self.lows, other.lows)), np.concatenate((self.highs, other.highs)))

    def above(self, position: int) -> "Intervals":
        """The part of the set beyond `position`."""
        if not len(self) or self.lows[0] >= position:
            return self
        skip = int(np.searchsorted(self.highs, position, side="right"))
        return Intervals(np.maximum(self.lows[skip:], position), self.highs[skip:])

    def up_to(self, position: int) -> "Intervals":
        """The part of the set up to and including `position`."""
        if not len(self) or self.highs[-1] <= position:
            return self
        keep = int(np.searchsorted(self.lows, position, side="left"))
        return Intervals(self.lows[:keep], np.minimum(self.highs[:keep], position))

    def without(self, prev: int, id: int) -> "Intervals":
        """The part of the set outside `(prev, id]`."""
        if not len(self.within(prev, id)):
            return self
        below, above = self.up_to(prev), self.above(id)
        return Intervals(np.concatenate((below.lows, above.lows)), np.concatenate((below.highs, above.highs)))

    def within(self, prev: int, id: int) -> "Intervals":
        """The part of the set inside `(prev, id]`."""
        return self.above(prev).up_to(id) if len(self) else self

    def intersection(self, other: "Intervals") -> "Intervals":
        """The IDs that are in both sets. The time grows with the number of intervals of `other`."""
        return Intervals.of(part for low, high in other for part in self.within(low, high))

    def missing(self, prev: int, id: int) -> "Intervals":
        """The part of `(prev, id]` that is not in the set."""
        inside = self.within(prev, id)
        lows, highs = np.append(prev, inside.highs), np.append(inside.lows, id)
        open_ = lows < highs
        return Intervals(lows[open_], highs[open_])

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """A mask of `ids`, which may be in any order: True for each ID that is in the set."""
        if not len(self):
            return np.zeros(len(ids), np.bool_)
        at = np.minimum(np.searchsorted(self.highs, ids, side="left"), len(self) - 1)
        inside: npt.NDArray[np.bool_] = (self.lows[at] < ids) & (ids <= self.highs[at])
        return inside

    def difference(self, other: "Intervals") -> "Intervals":
        """The IDs of this set that are not in `other`. The time grows with the number of intervals of this set."""
        if not len(self.within(int(other.lows[0]), int(other.highs[-1])) if len(other) else NO_INTERVALS):
            return self
        return Intervals.of(part for low, high in self for part in other.missing(low, high))

    def highest(self, count: int) -> "Intervals":
        """The `count` highest intervals of the set; all of them if there are fewer. `count` must be positive."""
        if len(self) <= count:
            return self
        return Intervals(self.lows[-count:], self.highs[-count:])

    def lowest(self, count: int) -> "Intervals":
        """The `count` lowest intervals of the set; all of them if there are fewer."""
        if len(self) <= count:
            return self
        return Intervals(self.lows[:count], self.highs[:count])

    def contiguous_end(self, position: int) -> int:
        """The largest ID such that the set contains all IDs in `(position, ID]`; `position` if there is none."""
        at = int(np.searchsorted(self.highs, position, side="right"))
        if at < len(self) and self.lows[at] <= position:
            return int(self.highs[at])
        return position

    def pack(self) -> bytes:
        """Encode the set as bytes. An empty set is encoded as no bytes.

        The first byte is the width of a step in bytes, and the next 8 bytes are the last bound. The rest are the steps,
        which are the differences from bound to bound.
        """
        if not len(self):
            return b""
        bounds = np.empty(2 * len(self), np.int64)
        bounds[::2], bounds[1::2] = self.lows, self.highs
        steps = bounds[1:] - bounds[:-1]
        longest = int(steps.max())
        size = next(size for size in _TYPE_CODES if not longest >> 8 * size)
        return bytes([size]) + int(bounds[-1]).to_bytes(8, "little") + steps.astype(f"<u{size}").tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        if not packed:
            return cls(_NO_IDS, _NO_IDS)
        # numpy converts uint64 to float if it meets int64.
        steps = np.frombuffer(packed, f"<u{packed[0]}", offset=9).astype(np.int64)
        bounds = np.zeros(len(steps) + 1, np.int64)
        np.cumsum(steps, out=bounds[1:])
        bounds += last_bound(packed) - bounds[-1]
        return cls(bounds[::2], bounds[1::2])

    def width(self) -> int:
        """The number of IDs in the set."""
        return int((self.highs - self.lows).sum())

    def __len__(self) -> int:
        return len(self.lows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.lows.tolist(), self.highs.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def _bitmap(ids: Ids) -> tuple[int, npt.NDArray[np.bool_]] | None:
    """A bitmap of `ids`, and the ID of its first bit. None if `ids` are sparse.

    The bitmap has one more bit below the lowest ID, and one more above the highest.
    """
    low, high = int(ids.min()) - 1, int(ids.max())
    if high - low > _BITMAP_BITS_PER_ID_MAX * len(ids):
        return None
    present = np.zeros(high - low + 2, np.bool_)
    present[ids - low] = True
    return low, present


def are_distinct(ids: Ids) -> bool:
    if not len(ids):
        return True
    bitmap = _bitmap(ids)
    count = Intervals.from_ids(ids).width() if bitmap is None else int(np.count_nonzero(bitmap[1]))
    return count == len(ids)


def last_bound(packed: bytes) -> int:
    """The last bound of a packed set, 0 if the set is empty."""
    return int.from_bytes(packed[1:9], "little")


class PackedSteps(NamedTuple):
    """Disjoint intervals, encoded so that they can be appended to a packed set.

    Attributes:
        low: the first bound.
        high: the last bound.
        step_bytes: the width of each step in bytes, as small as the longest step allows.
        steps: the differences from bound to bound, as unsigned little-endian integers.
    """

    low: int
    high: int
    step_bytes: int
    steps: bytes

    @classmethod
    def split(cls, lows: Ids, highs: Ids, firsts: npt.NDArray[np.intp]) -> "list[PackedSteps]":
        """Split ascending intervals into several sets. `firsts` has the index of the first interval of each set."""
        bounds = np.empty(2 * len(lows), np.int64)
        bounds[::2], bounds[1::2] = lows, highs
        steps = np.append(bounds[1:] - bounds[:-1], 0)
        lasts = np.append(firsts[1:], len(lows)) - 1
        begins, ends = 2 * firsts, 2 * lasts + 1  # of each set's steps; the step in between leads to the next set
        longest = np.maximum.reduceat(steps, np.column_stack((begins, ends)).ravel())[::2]
        sizes = np.select([longest >> 16 == 0, longest >> 32 == 0], [2, 4], 8)
        packed = {size: steps.astype(f"<u{size}").tobytes() for size in set(sizes.tolist())}
        numbers = (lows[firsts], highs[lasts], sizes, begins, ends)
        return [
            cls(low, high, size, packed[size][size * begin : size * end])
            for low, high, size, begin, end in zip(*(column.tolist() for column in numbers), strict=True)
        ]


def append_steps(packed: bytes, added: PackedSteps | None, count_max: int) -> bytes:
    """Append intervals to a packed set, in most cases without unpacking it.

    Args:
        packed: a packed set.
        added: at most `count_max` intervals, none of them below the last bound of the set; None for no interval.
        count_max: the largest number of intervals of the result.

    Returns:
        The packed union, limited to its `count_max` highest intervals.
    """
    if added is None:
        return packed
    step_bytes, last = packed[0] if packed else 0, last_bound(packed)
    end, added_count = added.high.to_bytes(8, "little"), len(added.steps) // added.step_bytes
    is_adjacent = bool(packed) and added.low == last
    if not is_adjacent and (not packed or added_count == 2 * count_max - 1):
        return bytes([added.step_bytes]) + end + added.steps
    gap = added.low - last
    if is_adjacent or step_bytes < added.step_bytes or gap >> 8 * step_bytes:
        return _repack(packed, added, count_max)
    step_count = (len(packed) - 9) // step_bytes
    dropped = max(0, step_count + 1 + added_count - (2 * count_max - 1))
    # If the dropped steps include the longest one, a smaller width may be enough for the rest.
    if (
        dropped
        and step_bytes > 2
        and max(array(_TYPE_CODES[step_bytes], packed[9 : 9 + dropped * step_bytes])) >> 4 * step_bytes
    ):
        return _repack(packed, added, count_max)
    steps = added.steps
    if step_bytes > added.step_bytes:
        steps = array(_TYPE_CODES[step_bytes], array(_TYPE_CODES[added.step_bytes], steps)).tobytes()
    return packed[:1] + end + packed[9 + dropped * step_bytes :] + gap.to_bytes(step_bytes, "little") + steps


def _repack(packed: bytes, added: PackedSteps, count_max: int) -> bytes:
    """Like `append_steps`, but slower and for any sets: unpack both, and pack their union."""
    added_set = Intervals.unpack(bytes([added.step_bytes]) + added.high.to_bytes(8, "little") + added.steps)
    return Intervals.unpack(packed).union(added_set).highest(count_max).pack()


NO_INTERVALS = Intervals(_NO_IDS, _NO_IDS)
