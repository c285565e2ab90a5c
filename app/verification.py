"""Holds what Redis says against what is true of simulated streams: an independent reader, without the sinks' code."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from sources.simulator.stream import SimulatedStream
from streaming.errors import Refused, TidemarkError, Unavailable

POLL_SECONDS = 0.2


class PositionsDiffer(TidemarkError):
    """Redis was ahead of the truth, or did not reach it. `lines` say where."""

    def __init__(self, lines: list[str]) -> None:
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        super().__init__("; ".join(lines[:3]) + more)
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Seen:
    """What Redis holds of a stream; `linear` is None while it knows nothing of it."""

    linear: int | None
    positions: dict[str, int]

    def line_and_positions(self) -> dict[str, int | None]:
        return {"linear": self.linear, **self.positions}


NOTHING_SEEN = Seen(None, {})


class RedisReader:
    """Reads positions as any reader would: the keys of DESIGN 6. Raises `Unavailable` (ask again) or `Refused`."""

    def __init__(self, url: str) -> None:
        self._redis: Any = redis.Redis.from_url(url, decode_responses=True, socket_timeout=5.0)
        where = self._redis.connection_pool.connection_kwargs
        self._where = f"{where.get('host', where.get('path'))}:{where.get('port', '')}".rstrip(":")

    def read(self, streams: Iterable[str]) -> dict[str, Seen]:
        """Each stream's line before its writers' positions, so that a line is never newer than they are."""
        names = list(streams)
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.get(f"tidemark:{{{name}}}:linear")
                    pipe.hgetall(f"tidemark:{{{name}}}:positions")
                answers = pipe.execute()
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise Refused("Redis", self._where, str(error), "check TIDEMARK_REDIS_URL") from error
        except redis.RedisError as error:
            raise Unavailable("Redis", self._where, str(error)) from error
        return {
            name: Seen(
                None if linear is None else int(linear),
                {writer: int(position) for writer, position in positions.items()},
            )
            for name, linear, positions in zip(names, answers[::2], answers[1::2], strict=True)
        }


class Verifier:
    """Samples Redis during a play and compares it at the end. Redis may be away meanwhile: that is no difference."""

    def __init__(self, reader: RedisReader) -> None:
        self._reader = reader
        self._ahead: list[str] = []

    def sample(self, streams: Sequence[SimulatedStream]) -> None:
        """Note what Redis published before it was true (rule 4). It is read first, so the truth may only be further."""
        try:
            seen = self._reader.read(stream.name for stream in streams)
        except Unavailable:
            return
        self._ahead += ahead(streams, seen)

    def conclude(self, streams: Sequence[SimulatedStream], seconds: float) -> None:
        """Wait up to `seconds` until Redis has the truth; raises `PositionsDiffer`, or what Redis failed with last."""
        deadline = time.monotonic() + seconds
        while True:
            late = time.monotonic() > deadline
            try:
                differ = differences(streams, self._reader.read(stream.name for stream in streams))
            except Unavailable:
                if late:
                    raise
            else:
                if late or not differ:
                    break
            time.sleep(POLL_SECONDS)
        if lines := self._ahead + differ:
            raise PositionsDiffer(lines)


def ahead(streams: Iterable[SimulatedStream], seen: dict[str, Seen]) -> list[str]:
    """Where Redis is beyond the truth, one line each."""
    return [
        f"{stream}: Redis has {what} at {found}, beyond its true {true}"
        for stream, what, found, true in _pairs(streams, seen)
        if abs(found or 0) > abs(true)
    ]


def differences(streams: Iterable[SimulatedStream], seen: dict[str, Seen]) -> list[str]:
    """Where Redis and the truth differ, one line each. A position of 0 need not be in Redis."""
    return [
        f"{stream}: Redis has {what} at {found}, and it is truly at {true}"
        for stream, what, found, true in _pairs(streams, seen)
        if (found or 0) != true
    ]


def _pairs(streams: Iterable[SimulatedStream], seen: dict[str, Seen]) -> Iterator[tuple[str, str, int | None, int]]:
    for stream in streams:
        if positions := stream.positions():  # else nobody played here in this run
            found = seen[stream.name].line_and_positions()
            for what, true in {"linear": stream.linear(), **positions}.items():
                yield stream.name, what, found.get(what), true
