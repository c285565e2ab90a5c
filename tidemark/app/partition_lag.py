"""How long the records of each Kafka partition have waited, and whether an open transaction blocks them. Pure.

A reader with `read_committed` gets nothing at or beyond the last stable offset: the first offset of the oldest
transaction that is still open. If its producer hangs or is lost, the partition is blocked, though its end moves on.
"""

from dataclasses import dataclass, field
from typing import Final

Partition = tuple[str, int]

SAMPLES: Final = 512
"""End offsets remembered for each partition; past that every second one is dropped, so an age may look older by one gap
between samples, and never younger."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """`records` wait to be read, the oldest for `seconds`. `stable` is the last stable offset; if an open transaction
    blocks the partition there, `blocked_seconds` is for how long, else 0."""

    records: int
    seconds: float
    stable: int
    blocked_seconds: float


@dataclass(slots=True)
class _Watched:
    ends: list[tuple[int, float]] = field(default_factory=list)
    """End offsets that are not read yet, each with when it was first observed."""
    stable: int = -1
    since: float | None = None
    """When the last stable offset was first observed to be `stable`, below the end."""


class LagTracker:
    """Not for threads. A new process counts from what it observes first."""

    def __init__(self) -> None:
        self._watched: dict[Partition, _Watched] = {}

    def observe(self, partition: Partition, now: float, *, read: int, stable: int, end: int) -> PartitionLag:
        """Take the offsets of a partition as they were asked at `now` (s, of any clock that does not go back).

        Args:
            read: the offset of the next record that the pipeline reads.
            stable: the last stable offset.
            end: the offset of the next record that will be written, of open transactions too.
        """
        watched = self._watched.setdefault(partition, _Watched())
        watched.ends = [(offset, at) for offset, at in watched.ends if read < offset <= end]
        if end > read and (not watched.ends or watched.ends[-1][0] < end):
            watched.ends.append((end, now))
        if len(watched.ends) > SAMPLES:
            del watched.ends[1:-1:2]
        if stable >= end:
            watched.since = None
        elif watched.since is None or watched.stable != stable:
            watched.since = now
        watched.stable = stable
        waited = now - watched.ends[0][1] if watched.ends else 0.0
        return PartitionLag(end - read, waited, stable, 0.0 if watched.since is None else now - watched.since)
