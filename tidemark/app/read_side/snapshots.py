"""Snapshots: where streams stand now, from Redis, else from Postgres, else from memory; never less than before.

A Redis that was restored from an older copy, or a Postgres that lags behind, may say less than this process has
answered already. What was true stays true (docs/design.md, rule 2), so the farther of both is answered. And a Redis
that a failover set back may say less than was published before: Postgres, which never does, is read beside it once a
second.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tidemark.app.read_side.postgres_reader import Details, PostgresReader
from tidemark.app.read_side.redis_reader import RedisReader
from tidemark.app.read_side.single_flight import ReadCoalescer
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.postgres.changes import StreamChange
from tidemark.sinks.reader import MonotonicPositions, PublishedPositions
from tidemark.streaming.values.direction import beyond

COPIES: Final = ("redis", "postgres")


@dataclass(frozen=True, slots=True)
class PositionDifference:
    """Where each stood when it was last seen; `since` in s since 1970."""

    redis: int
    postgres: int
    since: float


class DivergenceDetector:
    """For one thread."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lines: dict[str, dict[str, int]] = {name: {} for name in COPIES}
        self._found: dict[str, tuple[str, PositionDifference]] = {}  # by stream: which copy lacks something

    def read(self, copy: str, lines: Mapping[str, int]) -> None:
        """What a copy, `redis` or `postgres`, has just told, by stream."""
        other = self._lines[COPIES[copy == "redis"]]
        for stream, line in lines.items():
            self._lines[copy][stream] = line
            before = self._found.get(stream)
            if stream in other and beyond(other[stream], line):
                since = before[1].since if before and before[0] == copy else self._now()
                both = (line, other[stream]) if copy == "redis" else (other[stream], line)
                self._found[stream] = copy, PositionDifference(*both, since)
            elif before and before[0] == copy:
                del self._found[stream]

    def of(self, stream: str) -> PositionDifference | None:
        found = self._found.get(stream)
        return found and found[1]


DETAILS_AGE = 1.0  # seconds for which details are not read again: they take decoding
BESIDE_AGE = 1.0  # seconds for which Postgres is not asked again for what Redis tells
NAMES_AGE = 10.0  # seconds for which Postgres is not asked for names again: Redis may lack some while it is filled
DETAILS_PATIENCE = 0.25  # seconds that an answer waits for details, and for what Postgres says beside Redis

Source = Literal["redis", "postgres", "memory"]


@dataclass(frozen=True, slots=True)
class KnownPositions(PublishedPositions):
    """The positions of a stream, and when `source` was read for them (`read_at`, seconds of a monotonic clock)."""

    source: Source
    read_at: float

    def reached(self, linear: int, positions: Mapping[str, int], late: int) -> bool:
        """Whether a follower at these positions has everything that is known here."""
        return StreamChange(self.linear, 0, self.late, self.vector).reached(linear, positions, late)


class AnsweredPositions(MonotonicPositions[KnownPositions]):
    """The farthest positions that this process has read or answered. One per process, for one thread; pure."""

    def merge(self, before: KnownPositions, found: KnownPositions) -> KnownPositions:
        """`source` stays the one that the farthest positions were read from."""
        farthest = super().merge(before, found)
        is_found = (farthest.linear, farthest.vector) == (found.linear, found.vector)
        return farthest if is_found else replace(farthest, source=before.source)

    @property
    def streams(self) -> frozenset[str]:
        return frozenset(stream for stream, _ in self.items())

    def linear_positions(self, since: float) -> dict[str, int]:
        """By stream, those that were read after `since`."""
        return {stream: known.linear for stream, known in self.items() if known.read_at >= since}

    def remembered(self, stream: str) -> KnownPositions | None:
        """The last answer, for when no server answers; None: there was none."""
        before = self.get(stream)
        return before and replace(before, source="memory")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What can be found of `stream`. `exists` is False where Postgres knows of no such stream, None where nobody can
    tell; `known` is None where it is recovering."""

    stream: str
    exists: bool | None
    known: KnownPositions | None
    details: Details | None = None
    details_read_at: float | None = None
    apart: PositionDifference | None = None


class Snapshots:
    """One per process, for one event loop. Never raises for a server that is away: it answers with what there is."""

    def __init__(
        self,
        live: RedisReader,
        durable: PostgresReader,
        answered: AnsweredPositions,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._durable = durable
        self._answered = answered
        self._now = now
        self._positions = ReadCoalescer(self._read_positions)
        self._details = ReadCoalescer(self._read_details)
        self._stored = ReadCoalescer(self._read_stored)
        self._stored_at: dict[str, float] = {}
        self._divergence = DivergenceDetector()
        self._detailed: dict[str, tuple[Details, float]] = {}
        self._names: frozenset[str] = frozenset()
        self._named_at = -NAMES_AGE

    @property
    def remembers(self) -> bool:
        """Whether it can say something of a stream while neither server answers."""
        return bool(self._answered.streams)

    def has(self, stream: str) -> bool:
        """Whether the stream was read before: it exists, whatever the servers say now. Asks nobody."""
        return stream in self._answered

    def fresh(self, seconds: float) -> dict[str, int]:
        """The linear positions that were read in the last so many seconds, by stream; asks nobody."""
        return self._answered.linear_positions(self._now() - seconds)

    async def names(self) -> frozenset[str]:
        """Every stream that Redis, Postgres or this process knows, or knew."""
        found: set[str] = set()
        with suppress(Unavailable, Stop):
            found = await self._live.names()
        if not found or self._now() - self._named_at >= NAMES_AGE:
            with suppress(Unavailable, Stop):
                found |= await self._durable.names()
                self._named_at = self._now()
        self._names |= found | self._answered.streams
        return self._names

    async def get(self, streams: Collection[str]) -> list[Snapshot]:
        """In the order of `streams`; what was read is not older than this call, but for details."""
        found = await self._positions.get(streams)
        stale = [name for name in streams if self._is_stale(name) and found[name].exists is not False]
        await asyncio.gather(self._look(self._details, stale), self._beside(found))
        return [self._detailed_now(found[name]) for name in streams]

    async def positions(self, stream: str) -> KnownPositions | None:
        """The stream's positions alone; None: nobody can say."""
        found = await self._positions.get([stream])
        await self._beside(found)
        return self._detailed_now(found[stream]).known

    async def known(self, streams: Collection[str]) -> dict[str, KnownPositions]:
        """Their positions alone, without streams of which nobody can say."""
        found = await self._positions.get(streams)
        return {name: known for name in sorted(streams) if (known := found[name].known) is not None}

    async def _beside(self, found: Mapping[str, Snapshot]) -> None:
        """Look what Postgres says of what Redis told."""
        now = self._now()
        due = [
            name
            for name, it in found.items()
            if it.known and it.known.source == "redis" and now - self._stored_at.get(name, -math.inf) >= BESIDE_AGE
        ]
        await self._look(self._stored, due)

    async def _look(self, reads: ReadCoalescer[str, Any], streams: Collection[str]) -> None:
        if streams:
            with suppress(TimeoutError):  # it comes with a later answer then
                await asyncio.wait_for(reads.get(streams), DETAILS_PATIENCE)

    def _detailed_now(self, found: Snapshot) -> Snapshot:
        # What was answered since we read may be more.
        known = found.known and self._answered.raise_to(found.stream, found.known)
        details, read_at = self._detailed.get(found.stream, (None, None))
        apart = self._divergence.of(found.stream)
        return replace(found, known=known, details=details, details_read_at=read_at, apart=apart)

    async def _read_positions(self, streams: Collection[str]) -> Mapping[str, Snapshot]:
        found = await self._from_redis(streams)
        missing = [name for name in streams if name not in found]
        exists: bool | None = None
        if missing:
            with suppress(Unavailable, Stop):
                found |= await self._from_postgres(missing)
                exists = False
        answer = {}
        for name in streams:
            if name in found:
                answer[name] = Snapshot(name, exists=True, known=self._answered.raise_to(name, found[name]))
            elif last := self._answered.remembered(name):
                answer[name] = Snapshot(name, exists=True, known=last)
            else:
                answer[name] = Snapshot(name, exists=True if name in self._names else exists, known=None)
        return answer

    async def _from_redis(self, streams: Collection[str]) -> dict[str, KnownPositions]:
        now = self._now()
        with suppress(Unavailable, Stop):
            seen = await self._live.keys(streams)
            self._divergence.read("redis", {name: it.linear for name, it in seen.items() if it.linear is not None})
            return {
                name: KnownPositions(it.linear, it.positions, it.late, it.allocated, "redis", now)
                for name, it in seen.items()
                if it.linear is not None
            }
        return {}

    async def _from_postgres(self, streams: Collection[str]) -> dict[str, KnownPositions]:
        now = self._now()
        stored = await self._durable.positions(streams)
        return {
            name: KnownPositions(it.linear, it.positions, it.late, it.allocated, "postgres", now)
            for name, it in stored.items()
        }

    async def _read_stored(self, streams: Collection[str]) -> Mapping[str, KnownPositions]:
        self._stored_at |= dict.fromkeys(streams, self._now())
        with suppress(Unavailable, Stop):
            found = await self._from_postgres(streams)
            self._divergence.read("postgres", {name: it.linear for name, it in found.items()})
            return {name: self._answered.raise_to(name, known) for name, known in found.items()}
        return {}

    def _is_stale(self, stream: str) -> bool:
        detailed = self._detailed.get(stream)
        return detailed is None or self._now() - detailed[1] >= DETAILS_AGE

    async def _read_details(self, streams: Collection[str]) -> Mapping[str, Details]:
        now = self._now()
        found: Mapping[str, Details] = {}
        with suppress(Unavailable, Stop):
            found = await self._durable.details(streams)
            self._detailed |= {name: (details, now) for name, details in found.items()}
        return found
