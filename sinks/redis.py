"""Redis: what readers look at. Everything in it can be made again from Postgres, and its script refuses to go back.

The keys of a stream share a hash tag and are written by one script (`publish.lua`), one call per stream.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, Self

import msgspec
import redis
from redis import exceptions as problems
from redis.backoff import NoBackoff
from redis.retry import Retry

from sinks.changes import Change
from sinks.redis_problems import Remedies, explained
from streaming.errors import BadSetting, LeaseLost

STREAMS = "tidemark:streams"
SENTINEL = "tidemark:sentinel"
CALLS_AT_ONCE = 500  # streams in one pipeline: bounds the memory of both sides, and how long a reader waits its turn

_SCRIPT = files("sinks").joinpath("publish.lua").read_text("utf-8")
_SHA = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_KEYS = ("positions", "linear", "token", "advances", "fence", "head")

Mode = Literal["new", "known", "mend", "anew"]
"""How a change is published; `publish.lua` says what each means."""

_REMEDIES = Remedies(
    access="check user and password in TIDEMARK_REDIS_URL",
    rights="give the user all rights on the keys and channels tidemark:*, and see that nothing else writes there",
)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """`url` may hold a password. `advances_kept` bounds each stream's list of advances, about. `timeout` in seconds."""

    url: str = field(repr=False)
    advances_kept: int = 10_000
    timeout: float = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """What Redis holds of a stream: None, 0 and {} where it holds nothing. `late` is the number of the newest entry
    about a late completion."""

    linear: int | None
    head: int
    positions: dict[str, int]
    late: int


def key(stream: str, name: str) -> str:
    return f"tidemark:{{{stream}}}:{name}"


def address(options: Mapping[str, Any]) -> str:
    """Where a connection pool connects to, fit for a message: no user, no password."""
    return str(options.get("path") or f"{options.get('host')}:{options.get('port')}/{options.get('db', 0)}")


class Redis:
    """One server. Any thread may call; all methods raise `Unavailable` (call again) and `Refused`."""

    def __init__(self, config: RedisConfig) -> None:
        self._kept = config.advances_kept
        try:
            self._client = redis.Redis.from_url(
                config.url,
                decode_responses=True,
                socket_timeout=config.timeout,
                socket_connect_timeout=config.timeout,
                retry=Retry(NoBackoff(), 0),  # the publisher waits, and says so
            )
        except ValueError:
            raise BadSetting(
                "TIDEMARK_REDIS_URL", "is not a Redis address; write redis://user:password@host:6379/0"
            ) from None
        self.where = address(self._client.connection_pool.connection_kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def check(self) -> None:
        """Raise `Refused` where Redis does not let us in: at the start, rather than at the first batch."""
        with self._translated():
            self._client.ping()

    def publish(self, token: int, calls: Sequence[tuple[Mode, Change]]) -> list[str]:
        """Publish each change; returns the streams for which nothing was written because Redis has lost data.

        Not one transaction: readers see stream after stream, and after an error some are published. A repeat of a call
        changes nothing. Raises `LeaseLost` when a newer token was seen; nothing of that stream is written then.
        """
        lost = []
        for start in range(0, len(calls), CALLS_AT_ONCE):
            chunk = calls[start : start + CALLS_AT_ONCE]
            for (_, change), answer in zip(chunk, self._run(token, chunk), strict=True):
                if answer[0] == "fenced":
                    raise LeaseLost(token, int(answer[1]))
                if answer[0] == "lost":
                    lost.append(change.stream)
        return lost

    def name(self, streams: Collection[str]) -> None:
        """Add to the set of stream names."""
        if streams:
            with self._translated():
                self._client.sadd(STREAMS, *streams)

    def held(self, streams: Sequence[str]) -> dict[str, Held]:
        with self._translated():
            pipeline = self._client.pipeline(transaction=False)
            for stream in streams:
                pipeline.get(key(stream, "linear"))
                pipeline.get(key(stream, "head"))
                pipeline.hgetall(key(stream, "positions"))
                pipeline.hget(key(stream, "fence"), "late")
            answers = pipeline.execute()
        return {
            stream: Held(
                linear=None if linear is None else int(linear),
                head=int(head or 0),
                positions={writer: int(position) for writer, position in positions.items()},
                late=int(late or 0),
            )
            for stream, linear, head, positions, late in zip(
                streams, answers[0::4], answers[1::4], answers[2::4], answers[3::4], strict=True
            )
        }

    def stamp(self, value: str) -> str | None:
        """Leave `value` at the sentinel and take what was there: anything but our last stamp means lost writes."""
        with self._translated():
            before: Any = self._client.set(SENTINEL, value, get=True)
            return None if before is None else str(before)

    def _run(self, token: int, chunk: Sequence[tuple[Mode, Change]]) -> list[list[str]]:
        with self._translated():
            pipeline = self._client.pipeline(transaction=False)
            for place, (mode, change) in enumerate(chunk):
                keys = [key(change.stream, name) for name in _KEYS]
                arguments = (mode, str(token), str(self._kept), msgspec.msgpack.encode(change))
                # The first call teaches the server the script, whatever it forgot; the others name it.
                if place == 0:
                    pipeline.eval(_SCRIPT, len(keys), *keys, *arguments)
                else:
                    pipeline.evalsha(_SHA, len(keys), *keys, *arguments)
            answers: list[list[str]] = pipeline.execute()
            return answers

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except problems.RedisError as error:
            raise explained(error, self.where, _REMEDIES) from error
