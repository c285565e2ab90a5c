"""How fast, once warm: progress noted while something runs, and the rate of its steady part. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateMark:
    """So many `records` were through by the time `at` (s since 1970)."""

    records: int
    at: float


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What counts: from the first mark at `warm` records to the first at `total` records or after `window` s."""

    warm: int
    total: int
    window: float

    def over(self, began: RateMark, mark: RateMark) -> bool:
        return mark.records >= self.total or mark.at >= began.at + self.window


@dataclass(frozen=True, slots=True)
class Rate:
    """So many `records` between two moments (s since 1970)."""

    records: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def per_second(self) -> float:
        return self.records / self.seconds


def steady(marks: Sequence[RateMark], limits: RateLimits) -> Rate:
    """Raises ValueError where fewer than two marks count."""
    counting = [mark for mark in marks if mark.records >= limits.warm]
    if len(counting) < 2:
        raise ValueError(f"{len(counting)} marks after {limits.warm} records: too few records, or too large batches")
    first, *rest = counting
    last = next((mark for mark in rest if limits.over(first, mark)), rest[-1])
    return Rate(last.records - first.records, first.at, last.at)


class Meter:
    """Notes marks, and says when enough is known."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self.marks: list[RateMark] = []
        self.done = False
        self._began: RateMark | None = None

    def note(self, records: int, at: float) -> None:
        mark = RateMark(records, at)
        self.marks.append(mark)
        if self._began is not None:
            self.done = self.done or self.limits.over(self._began, mark)
        elif records >= self.limits.warm:
            self._began = mark
