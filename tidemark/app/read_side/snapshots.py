"""Snapshots: the current positions of streams, from Redis, else from Postgres, else from memory. Positions never go
back.

Redis may be restored from an older copy, and Postgres may be a replica that lags. So a server may return lower
positions than this process has answered before. A published position never becomes wrong (Rule 2), so the farther
position is answered. After a failover, Redis may lack published positions. So the requested streams are also read from
Postgres, at most once a second.
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
from tidemark.sinks.postgres.history import StreamChange
from tidemark.sinks.reader import MonotonicPositions, PublishedPositions
from tidemark.streaming.values.direction import is_beyond

SERVERS: Final = ("redis", "postgres")


@dataclass(frozen=True, slots=True)
class PositionDifference:
    """The linear positions of a stream in Redis and in Postgres when each server was last read. `since`: when the
    difference was first seen (seconds since 1970).
    """

    redis: int
    postgres: int
    since: float


class DivergenceDetector:
    """Finds streams whose linear positions in Redis and Postgres differ. Does no I/O. For one thread.

    Each batch is written to Postgres first and to Redis a moment later. So Redis lacks data if a lower position is read
    from Redis after a higher one was read from Postgres. Postgres lacks data if a lower position is read from Postgres
    after a higher one was read from Redis. Short differences are normal: `PositionDifference.since` is the time at
    which the difference began.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._linear_by_server: dict[str, dict[str, int]] = {name: {} for name in SERVERS}
        self._differences: dict[str, tuple[str, PositionDifference]] = {}  # stream -> the server that lacks data

    def add_positions(self, server: str, positions: Mapping[str, int]) -> None:
        """Add the linear positions, by stream, that `server` (`redis` or `postgres`) has just returned."""
        other = self._linear_by_server[SERVERS[server == "redis"]]
        for stream, position in positions.items():
            self._linear_by_server[server][stream] = position
            before = self._differences.get(stream)
            if stream in other and is_beyond(other[stream], position):
                since = before[1].since if before and before[0] == server else self._now()
                pair = (position, other[stream]) if server == "redis" else (other[stream], position)
                self._differences[stream] = server, PositionDifference(*pair, since)
            elif before and before[0] == server:
                del self._differences[stream]

    def difference(self, stream: str) -> PositionDifference | None:
        """The difference of the stream; None if neither server is known to lack data."""
        difference = self._differences.get(stream)
        return difference and difference[1]


DETAILS_CACHE_SECONDS = 1.0  # because decoding is expensive
COMPARE_INTERVAL_SECONDS = 1.0  # between two comparisons of Postgres with Redis, for each stream
NAMES_CACHE_SECONDS = 10.0  # for names from Postgres, which are needed because Redis may lack names while it is filled
DETAILS_TIMEOUT_SECONDS = 0.25  # how long a request waits for details, and for the comparison with Postgres

Source = Literal["redis", "postgres", "memory"]


@dataclass(frozen=True, slots=True)
class KnownPositions(PublishedPositions):
    """The positions of a stream.

    Attributes:
        source: where the positions were read: `redis`, `postgres` or `memory`.
        read_at: when the positions were read (seconds, monotonic).
    """

    source: Source
    read_at: float

    def is_reached_by(self, linear: int, positions: Mapping[str, int], late: int) -> bool:
        """Whether a follower at `linear`, `positions` (writer -> position) and `late` (the number of the last late
        completion) has reached or passed the known positions.
        """
        return StreamChange(self.linear, 0, self.last_late_number, self.vector).is_reached_by(linear, positions, late)


class AnsweredPositions(MonotonicPositions[KnownPositions]):
    """The farthest positions of each stream that this process has read. One per process, for one thread."""

    def merge(self, before: KnownPositions, published: KnownPositions) -> KnownPositions:
        """Return the farther position of each writer (see `MonotonicPositions.merge`), with the `read_at` of
        `published`.

        `source` is that of `published` if `published` has the farthest positions, otherwise that of `before`.
        """
        farthest = super().merge(before, published)
        is_found = (farthest.linear, farthest.vector) == (published.linear, published.vector)
        return farthest if is_found else replace(farthest, source=before.source)

    @property
    def streams(self) -> frozenset[str]:
        return frozenset(stream for stream, _ in self.items())

    def linear_positions(self, since: float) -> dict[str, int]:
        """The linear positions that were read at or after `since` (seconds, monotonic), by stream."""
        return {stream: known.linear for stream, known in self.items() if known.read_at >= since}

    def from_memory(self, stream: str) -> KnownPositions | None:
        """The farthest positions of the stream, with the source `memory`; None if none were read."""
        before = self.get(stream)
        return before and replace(before, source="memory")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of `stream`, as far as known.

    Attributes:
        exists: False if neither Redis nor Postgres has the stream. None if Redis has not returned the stream, Postgres
            cannot be read, and the stream is not in memory.
        positions: None if the stream does not exist, or is recovering.
        details: None until they are read from Postgres for the first time.
        details_read_at: when the details were read (seconds, monotonic).
        divergence: the difference between the positions in Redis and Postgres, if there is one.
    """

    stream: str
    exists: bool | None
    positions: KnownPositions | None
    details: Details | None = None
    details_read_at: float | None = None
    divergence: PositionDifference | None = None


class Snapshots:
    """Reads snapshots. While servers are down, answers from memory and raises no error. One per process, for one event
    loop.
    """

    def __init__(
        self,
        redis_reader: RedisReader,
        postgres_reader: PostgresReader,
        answered: AnsweredPositions,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis_reader = redis_reader
        self._postgres_reader = postgres_reader
        self._answered = answered
        self._now = now
        self._position_reads = ReadCoalescer(self._read_positions)
        self._details_reads = ReadCoalescer(self._read_details)
        self._postgres_reads = ReadCoalescer(self._read_for_comparison)
        self._compared_at_by_stream: dict[str, float] = {}
        self._divergence_detector = DivergenceDetector()
        self._details_by_stream: dict[str, tuple[Details, float]] = {}
        self._names: frozenset[str] = frozenset()
        self._names_read_at = -NAMES_CACHE_SECONDS

    @property
    def has_positions(self) -> bool:
        """Whether the positions of any stream are in memory."""
        return bool(self._answered.streams)

    def has_read(self, stream: str) -> bool:
        """Whether the positions of the stream were read before. If True, the stream exists. Queries no server."""
        return stream in self._answered

    def recent_linear_positions(self, seconds: float) -> dict[str, int]:
        """The linear positions that were read in the last `seconds`, by stream. Queries no server."""
        return self._answered.linear_positions(self._now() - seconds)

    async def names(self) -> frozenset[str]:
        """Read the names of all streams in Redis and Postgres, and add the names that were read before. Reads Postgres
        at most every `NAMES_CACHE_SECONDS`, unless Redis returns no names."""
        names: set[str] = set()
        with suppress(Unavailable, Stop):
            names = await self._redis_reader.names()
        if not names or self._now() - self._names_read_at >= NAMES_CACHE_SECONDS:
            with suppress(Unavailable, Stop):
                names |= await self._postgres_reader.names()
                self._names_read_at = self._now()
        self._names |= names | self._answered.streams
        return self._names

    async def get(self, streams: Collection[str]) -> list[Snapshot]:
        """Read the snapshots of `streams`, in this order. Positions are read from a store after this call has begun, or
        come from memory. Details may be older: waits at most `DETAILS_TIMEOUT_SECONDS` for them."""
        snapshots = await self._position_reads.get(streams)
        stale = [name for name in streams if self._is_stale(name) and snapshots[name].exists is not False]
        await asyncio.gather(
            self._read_within_timeout(self._details_reads, stale), self._compare_with_postgres(snapshots)
        )
        return [self._with_details(snapshots[name]) for name in streams]

    async def positions(self, stream: str) -> KnownPositions | None:
        """The positions of one stream, read after this call has begun or from memory; None if they are not known."""
        snapshots = await self._position_reads.get([stream])
        await self._compare_with_postgres(snapshots)
        return self._with_details(snapshots[stream]).positions

    async def known_positions(self, streams: Collection[str]) -> dict[str, KnownPositions]:
        """Read positions. Returns stream -> positions, without the streams whose positions are not known."""
        snapshots = await self._position_reads.get(streams)
        return {name: known for name in sorted(streams) if (known := snapshots[name].positions) is not None}

    async def _compare_with_postgres(self, snapshots: Mapping[str, Snapshot]) -> None:
        """Also read from Postgres the streams whose positions came from Redis, each stream at most once a second."""
        now = self._now()
        due = [
            name
            for name, snapshot in snapshots.items()
            if snapshot.positions
            and snapshot.positions.source == "redis"
            and now - self._compared_at_by_stream.get(name, -math.inf) >= COMPARE_INTERVAL_SECONDS
        ]
        await self._read_within_timeout(self._postgres_reads, due)

    async def _read_within_timeout(self, reads: ReadCoalescer[str, Any], streams: Collection[str]) -> None:
        """Request a read of `streams`, and wait at most `DETAILS_TIMEOUT_SECONDS` for its end."""
        if streams:
            with suppress(TimeoutError):  # a later answer will contain the result
                await asyncio.wait_for(reads.get(streams), DETAILS_TIMEOUT_SECONDS)

    def _with_details(self, snapshot: Snapshot) -> Snapshot:
        # Another request may have answered farther positions since this read.
        known = snapshot.positions and self._answered.update(snapshot.stream, snapshot.positions)
        details, read_at = self._details_by_stream.get(snapshot.stream, (None, None))
        divergence = self._divergence_detector.difference(snapshot.stream)
        return replace(snapshot, positions=known, details=details, details_read_at=read_at, divergence=divergence)

    async def _read_positions(self, streams: Collection[str]) -> Mapping[str, Snapshot]:
        positions = await self._read_redis(streams)
        missing = [name for name in streams if name not in positions]
        exists: bool | None = None
        if missing:
            with suppress(Unavailable, Stop):
                positions |= await self._read_postgres(missing)
                exists = False
        answer = {}
        for name in streams:
            if name in positions:
                answer[name] = Snapshot(name, exists=True, positions=self._answered.update(name, positions[name]))
            elif last := self._answered.from_memory(name):
                answer[name] = Snapshot(name, exists=True, positions=last)
            else:
                answer[name] = Snapshot(name, exists=True if name in self._names else exists, positions=None)
        return answer

    async def _read_redis(self, streams: Collection[str]) -> dict[str, KnownPositions]:
        now = self._now()
        with suppress(Unavailable, Stop):
            replies = await self._redis_reader.keys(streams)
            self._divergence_detector.add_positions(
                "redis", {name: keys.linear for name, keys in replies.items() if keys.linear is not None}
            )
            return {
                name: KnownPositions(keys.linear, keys.positions, keys.last_late_number, keys.allocated, "redis", now)
                for name, keys in replies.items()
                if keys.linear is not None
            }
        return {}

    async def _read_postgres(self, streams: Collection[str]) -> dict[str, KnownPositions]:
        now = self._now()
        stored = await self._postgres_reader.positions(streams)
        return {
            name: KnownPositions(
                positions.linear, positions.positions, positions.last_late_number, positions.allocated, "postgres", now
            )
            for name, positions in stored.items()
        }

    async def _read_for_comparison(self, streams: Collection[str]) -> Mapping[str, KnownPositions]:
        """Read the positions in Postgres, merge them into the answered positions, and compare them with Redis."""
        self._compared_at_by_stream |= dict.fromkeys(streams, self._now())
        with suppress(Unavailable, Stop):
            positions = await self._read_postgres(streams)
            self._divergence_detector.add_positions(
                "postgres", {name: known.linear for name, known in positions.items()}
            )
            return {name: self._answered.update(name, known) for name, known in positions.items()}
        return {}

    def _is_stale(self, stream: str) -> bool:
        detailed = self._details_by_stream.get(stream)
        return detailed is None or self._now() - detailed[1] >= DETAILS_CACHE_SECONDS

    async def _read_details(self, streams: Collection[str]) -> Mapping[str, Details]:
        now = self._now()
        by_stream: Mapping[str, Details] = {}
        with suppress(Unavailable, Stop):
            by_stream = await self._postgres_reader.details(streams)
            self._details_by_stream |= {name: (details, now) for name, details in by_stream.items()}
        return by_stream
