"""The highest positions that this process has answered or seen, so that it never answers a lower one. Pure.

A Redis that was restored from an older copy, or a Postgres that lags behind, may say less than was said before.
What was true stays true (DESIGN 2, rule 2), so the union of both is answered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tidemark.sinks.reader.order import beyond, farther

Source = Literal["redis", "postgres", "memory"]


@dataclass(frozen=True, slots=True)
class Known:
    """The positions of a stream. `late` is the number of its newest late completion, `head` the highest ID that any
    record of it named (None: unknown); `read_at` (s, of the process's monotonic clock) is when `source` said so."""

    linear: int
    vector: Mapping[str, int]
    late: int
    head: int | None
    source: Source
    read_at: float


class Highest:
    """One per process; for one thread."""

    def __init__(self) -> None:
        self._streams: dict[str, Known] = {}

    def __contains__(self, stream: str) -> bool:
        return stream in self._streams

    @property
    def streams(self) -> frozenset[str]:
        return frozenset(self._streams)

    def raised(self, stream: str, said: Known) -> Known:
        """What to answer where `said` was read: never less than before. A writer that is said no more is left out once
        the line has passed it, which changes no token: it retired long ago."""
        before = self._streams.get(stream)
        if before is not None:
            linear = farther(said.linear, before.linear)
            vector = {
                writer: farther(position, before.vector.get(writer, position))
                for writer, position in said.vector.items()
            }
            vector |= {
                writer: position
                for writer, position in before.vector.items()
                if writer not in said.vector and beyond(position, linear)
            }
            head = before.head if said.head is None or beyond(before.head or 0, said.head) else said.head
            said = replace(said, linear=linear, vector=vector, late=max(said.late, before.late), head=head)
        self._streams[stream] = said
        return said

    def recalled(self, stream: str) -> Known | None:
        """The last answer, for when nobody can be asked; None: there was none."""
        before = self._streams.get(stream)
        return before and replace(before, source="memory")
