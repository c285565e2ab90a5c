"""The calls of the one script that writes positions to Redis (`publish.lua`).

Changes from a batch and from what Postgres holds both go through it, and it refuses to go back: so everything in Redis
can be made again. The keys of a stream share a hash tag; one call changes many streams, which in a Cluster are of one
slot.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec

from tidemark.common.errors import LeaseLost
from tidemark.sinks.redis.changes import Change
from tidemark.sinks.redis.client import RedisAddress, RedisSession, database_of, redis_address
from tidemark.sinks.redis.errors import Remedies, StreamFault, of_stream, sound
from tidemark.sinks.redis.held import RedisPositions, entry_time, fencing_token, held
from tidemark.sinks.redis.names import SENTINEL, STREAMS, database_suffix
from tidemark.sinks.redis.scripts import Script, slots, together

STREAMS_AT_ONCE = 500  # in one pipeline: bounds the memory of both sides
MOVES_AT_ONCE = 200  # in one call, for some milliseconds of which nobody else has his turn; one stream may have more

_SCRIPT = Script("publish.lua")

Mode = Literal["new", "known", "mend", "anew"]
"""How a change is published; `publish.lua` says what each means."""

_Call = tuple[Mode, Change]

_REMEDIES = Remedies(
    access="check user and password in TIDEMARK_REDIS_URL, or TIDEMARK_REDIS_PASSWORD",
    transport="check that TIDEMARK_REDIS_URL begins with rediss, the name in it, and TIDEMARK_REDIS_CA_FILE",
    rights="give the user all rights on the keys and channels tidemark:*, and see that nothing else writes there",
)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """`redis_advances_max` bounds each stream's list of advances, about. `timeout` in seconds."""

    address: str | RedisAddress = field(repr=False)
    redis_advances_max: int = 10_000
    timeout: float = 5.0


class Redis:
    """One server or a Cluster. Any thread may call; all methods raise `Unavailable` (call again) and `Refused`.

    `faults`: streams that it cannot show because of what their keys hold, and what it said; until they are written.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._kept = config.redis_advances_max
        self._session = RedisSession(redis_address(config.address), _REMEDIES, config.timeout)
        self.where = self._session.where
        self.faults: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def check(self) -> None:
        """Raise `Refused` where Redis does not let us in: at the start, rather than at the first batch."""
        with self._session.use() as client:
            client.ping()

    def publish(self, token: int, calls: Sequence[tuple[Mode, Change]]) -> list[str]:
        """Publish each change; returns the streams for which nothing was written because Redis has lost data.

        Not one transaction: readers see stream after stream, and after an error some are published. A repeat of a call
        changes nothing. Raises `LeaseLost` when a newer token was seen; nothing of that stream is written then.
        """
        lost = []
        for start in range(0, len(calls), STREAMS_AT_ONCE):
            chunk = calls[start : start + STREAMS_AT_ONCE]
            newest = token
            for change, answer in self._run(token, chunk):
                try:
                    said, _, seen = sound(answer).partition(b" ")
                    if said == b"fenced":
                        newest = max(newest, fencing_token(seen.decode(errors="replace")))
                        continue
                except StreamFault as fault:
                    self.faults[change.stream] = str(fault)
                    continue
                self.faults.pop(change.stream, None)
                if said == b"lost":
                    lost.append(change.stream)
            if newest > token:
                raise LeaseLost(token, newest)
        return lost

    def name(self, streams: Collection[str]) -> None:
        """Add to the set of stream names."""
        if streams:
            with self._session.use() as client:
                client.sadd(STREAMS, *streams)

    def held(self, streams: Sequence[str]) -> dict[str, RedisPositions]:
        """Without those that are among the `faults` now."""
        with self._session.use() as client:
            found, faults = held(client, streams)
        self.faults |= faults
        return found

    def published(self, stream: str, writer: str, id: int) -> int | None:
        """When (ms, its own clock) it took `writer` over `id`; None where its list of advances does not tell."""
        with self._session.use() as client:
            return entry_time(client, stream, writer, id)

    def names(self) -> set[str]:
        """The streams that it lists."""
        with self._session.use() as client:
            return set(client.smembers(STREAMS))

    def stamp(self, value: str) -> str | None:
        """Leave `value` at the sentinel and take what was there: anything but our last stamp means lost writes."""
        with self._session.use() as client:
            before = client.set(SENTINEL, value, get=True)
            return None if before is None else str(before)

    def _run(self, token: int, chunk: Sequence[_Call]) -> Iterator[tuple[Change, Any]]:
        """Each change with the script's word on it, or its error."""
        with self._session.use() as client:
            calls = together(
                ((change.stream, _moves(change), (mode, change)) for mode, change in chunk),
                slots(client),
                MOVES_AT_ONCE,
            )
            alone: list[list[_Call]] = []
            for call, answer in zip(calls, self._answers(client, token, calls), strict=True):
                if not isinstance(answer, Exception):
                    yield from zip((change for _, change in call), answer, strict=True)
                elif len(call) == 1:
                    yield call[0][1], answer
                else:
                    alone += [[it] for it in call]  # one of them has a fault
            for call, answer in zip(alone, self._answers(client, token, alone), strict=True):
                yield call[0][1], answer if isinstance(answer, Exception) else answer[0]

    def _answers(self, client: Any, token: int, calls: Sequence[Sequence[_Call]]) -> list[Any]:
        suffix = database_suffix(database_of(client))
        answers = _SCRIPT.answers(
            client,
            (
                (
                    [change.stream for _, change in call],
                    (str(token), str(self._kept), msgspec.msgpack.encode(call), suffix),
                )
                for call in calls
            ),
        )
        for answer in answers:  # what no stream is to blame for is translated
            if isinstance(answer, Exception) and not of_stream(answer):
                raise answer
        return answers


def _moves(change: Change) -> int:
    return 1 + len(change.entries) + len(change.late)
