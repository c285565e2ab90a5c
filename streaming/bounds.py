"""What a stream's state may hold. Past a bound it holds, rejects, or forgets towards holding (DESIGN 2, rule 9)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """`pending`: spans per writer; an edge that would add one is rejected. `completed`: intervals above the line; the
    highest are forgotten. `held`: incarnations that never joined; further ones are rejected. `retired`: retired
    writers; the longest retired are dropped. `retirement` (ms): after that a retired writer is dropped in any case.
    """

    pending: int = 10_000
    completed: int = 10_000
    held: int = 1_000
    retired: int = 10_000
    retirement: int = 7 * 24 * 3600 * 1000
