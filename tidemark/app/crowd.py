"""Who gives way where every place is taken: the oldest that say nothing, of whoever has most of those. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Generic, TypeVar

SHARE = 64  # of the places: one of so many is made free at once

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """`since` is of any clock that only goes forward."""

    it: T
    address: str
    since: float


def crowding(waiting: Sequence[Waiting[T]], places: int) -> list[T]:
    """Those that wait longest, of the address from which most wait; none where nobody does. More than one where there
    are many `places`: a crowd that goes on coming would be looked through for each of them."""
    if not waiting:
        return []
    [(address, _)] = Counter(each.address for each in waiting).most_common(1)
    here = (each for each in waiting if each.address == address)
    return [each.it for each in nsmallest(max(1, places // SHARE), here, key=lambda each: each.since)]
