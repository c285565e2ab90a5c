"""Holds what Redis says against what is true of simulated streams: an independent reader, without the sinks' code."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from tests.play.stream import SimulatedStream
from tidemark.common.errors import Refused, Unavailable


@dataclass(frozen=True, slots=True)
class Seen:
    """What Redis holds of a stream; `linear` is None while it knows nothing of it."""

    linear: int | None
    positions: dict[str, int]

    def line_and_positions(self) -> dict[str, int | None]:
        return {"linear": self.linear, **self.positions}


class RedisReader:
    """Reads as any reader would, by the keys of docs/design.md 6. Raises `Unavailable` (ask again) or `Refused`."""

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
