"""How fast, once warm: progress noted while something runs, and the rate of its steady part. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """So many `records` were through by the time `at` (s, any zero)."""

    records: int
    at: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts: from the first mark at `warm` records, to `total` records or for `window` s, what comes first."""

    warm: int
    total: int
    window: float


@dataclass(frozen=True, slots=True)
class Rate:
    records: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.records / self.seconds


def steady(marks: Sequence[Mark], limits: Limits) -> Rate:
    """Raises ValueError where fewer than two marks count."""
    counting = [mark for mark in marks if mark.records >= limits.warm]
    counting = [mark for mark in counting if mark.at <= counting[0].at + limits.window]
    if len(counting) < 2:
        raise ValueError(f"{len(counting)} marks after {limits.warm} records: too few records, or too large batches")
    first, last = counting[0], counting[-1]
    return Rate(last.records - first.records, last.at - first.at)


class Meter:
    """Notes marks, and says when enough is known."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.marks: list[Mark] = []
        self._ends: float | None = None

    def note(self, records: int, at: float) -> None:
        self.marks.append(Mark(records, at))
        if self._ends is None and records >= self.limits.warm:
            self._ends = at + self.limits.window

    @property
    def done(self) -> bool:
        if not self.marks:
            return False
        last = self.marks[-1]
        return last.records >= self.limits.total or (self._ends is not None and last.at >= self._ends)
