"""Streams of which Redis and Postgres tell different linear positions, seen by reading one after the other. Pure.

A batch is in Postgres first and in Redis a moment later. So Redis is behind where it lacks what Postgres had before it
was asked, and ahead where it had what Postgres lacks that was asked after it. Behind may be a moment; `since` tells.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tidemark.streaming.values.direction import beyond

NAMES: Final = ("redis", "postgres")


@dataclass(frozen=True, slots=True)
class Apart:
    """Where each stood when it was last seen; `since` in s since 1970."""

    redis: int
    postgres: int
    since: float


class Divergence:
    """For one thread."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lines: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self._found: dict[str, tuple[str, Apart]] = {}  # by stream: which copy lacks something

    def read(self, copy: str, lines: Mapping[str, int]) -> None:
        """What a copy, `redis` or `postgres`, has just told, by stream."""
        other = self._lines[NAMES[copy == "redis"]]
        for stream, line in lines.items():
            self._lines[copy][stream] = line
            before = self._found.get(stream)
            if stream in other and beyond(other[stream], line):
                since = before[1].since if before and before[0] == copy else self._now()
                both = (line, other[stream]) if copy == "redis" else (other[stream], line)
                self._found[stream] = copy, Apart(*both, since)
            elif before and before[0] == copy:
                del self._found[stream]

    def of(self, stream: str) -> Apart | None:
        found = self._found.get(stream)
        return found and found[1]
