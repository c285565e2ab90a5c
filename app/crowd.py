"""Who gives way where every place is taken: the oldest that says nothing, of whoever has most of those. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """`since` is of any clock that only goes forward."""

    it: T
    address: str
    since: float


def crowding(waiting: Sequence[Waiting[T]]) -> T | None:
    """The one that waits longest, of the address from which most wait; None where nobody does."""
    if not waiting:
        return None
    [(address, _)] = Counter(each.address for each in waiting).most_common(1)
    return min((each for each in waiting if each.address == address), key=lambda each: each.since).it
