"""Postgres, as the sidecar reads it, on threads: positions where Redis does not have them, and details always."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from app.sidecar.fuse import Fuse
from sinks.postgres import Postgres, StreamPositions
from sinks.reader.asks import Past, Recall
from sinks.reader.history import History
from streaming import state
from streaming.effects import Blocker
from streaming.errors import StateTooNew, Unavailable
from streaming.positions import Stream
from streaming.summary import blockers, summarize

T = TypeVar("T")

PATIENCE = 2.0  # seconds that a request waits for Postgres; its thread goes on


@dataclass(frozen=True, slots=True)
class Details:
    """What is known of a stream besides positions: of each writer its epoch, who retired, how many completed edges wait
    above their writer's position, and every gap and writer that never joined, longest first."""

    epochs: Mapping[str, int]
    retired: frozenset[str]
    pending: int
    gaps: list[Blocker]


class Durable:
    """For one event loop. Methods raise `Unavailable`, `Refused` and `SchemaMismatch`; all may be called again."""

    def __init__(self, postgres: Postgres, history: History) -> None:
        self.fuse = Fuse("Postgres")
        self._postgres = postgres
        self._history = history

    async def check(self) -> None:
        await self._asked(self._postgres.check)

    async def names(self) -> set[str]:
        return set(await self._asked(self._postgres.streams))

    async def positions(self, streams: Collection[str]) -> dict[str, StreamPositions]:
        """Without those that do not exist."""
        return await self._asked(lambda: self._postgres.positions(streams))

    async def details(self, streams: Collection[str]) -> dict[str, Details]:
        """Without streams that do not exist, or whose state a later Tidemark wrote."""
        return await self._asked(lambda: _decoded(self._postgres.states(streams)))

    async def past(self, ask: Recall) -> Past:
        return await self._asked(lambda: self._history.past(ask))

    async def _asked(self, ask: Callable[[], T]) -> T:
        with self.fuse.guarding():
            try:
                return await asyncio.wait_for(asyncio.to_thread(ask), PATIENCE)
            except TimeoutError:
                problem = f"no answer within {PATIENCE:g} s"
                raise Unavailable("Postgres", self._postgres.where, problem) from None


def _decoded(states: Mapping[str, bytes]) -> dict[str, Details]:
    found = {}
    for name, stored in states.items():
        try:
            found[name] = _details(state.decode(stored))
        except StateTooNew:
            continue
    return found


def _details(stream: Stream) -> Details:
    return Details(
        epochs={writer: known.epoch for writer, known in stream.writers.items()},
        retired=frozenset(writer for writer, known in stream.writers.items() if known.retired is not None),
        pending=summarize(stream).pending,
        gaps=blockers(stream),
    )
