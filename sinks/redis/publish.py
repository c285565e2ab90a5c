"""Positions in Redis: what is written for a stream, and the calls of the one script that writes it (`publish.lua`).

A `Change` is made from a batch or from what Postgres holds, and both go through the script, which refuses to go back:
so everything in Redis can be made again. The keys of a stream share a hash tag; one call changes one stream.

All numbers are text: an ID may have 63 bits, and a number in Redis's Lua has 53.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, Self

import msgspec
from redis import exceptions as problems

from tidemark.sinks.port import Batch, Committed
from tidemark.sinks.postgres.history import PastAdvance, PastLate
from tidemark.sinks.postgres.store import StreamPositions
from tidemark.sinks.redis.client import RedisAddress, RedisSession, redis_address
from tidemark.sinks.redis.errors import Remedies, StreamFault, of_stream, sound
from tidemark.sinks.redis.held import RedisPositions, entry_time, fencing_token, held, tokens
from tidemark.sinks.redis.names import SENTINEL, STREAMS, key
from tidemark.streaming.effects import LateCompletion, StreamEffects, WriterAdvance
from tidemark.streaming.errors import LeaseLost


class AdvanceEntry(msgspec.Struct, array_like=True, frozen=True):
    """A `POSITION` entry among the advances; moves its writer's position."""

    writer: str
    epoch: str
    prev: str
    id: str
    facts: str
    empty: str
    unseen: str
    skipped: str
    linear: str
    batch: str
    time: str


class LateEntry(msgspec.Struct, array_like=True, frozen=True):
    """A `LATE` entry among the advances. `number` is Postgres's, and tells which ones Redis has already."""

    number: str
    writer: str
    epoch: str
    prev: str
    id: str
    facts: str
    why: str
    batch: str
    time: str


class Change(msgspec.Struct, array_like=True, frozen=True):
    """One call of the script. Entries of a writer are in chain order; `positions` may name writers without entries."""

    stream: str
    linear: str
    entries: list[AdvanceEntry] = []
    positions: list[tuple[str, str]] = []
    late: list[LateEntry] = []
    dropped: list[str] = []
    allocated: str = "0"


def of_batch(batch: Batch, committed: Committed) -> list[Change]:
    """The changes of `batch`, as Postgres settled them; streams that only held or counted something are left out."""
    changes = (_of_stream(batch.number, shard.now, stream, committed) for shard, stream in batch.streams())
    return [change for change in changes if change is not None]


def _of_stream(batch: int, now: int, effects: StreamEffects, committed: Committed) -> Change | None:
    moved = (effects.linear, effects.allocated) != (effects.linear_prev, effects.allocated_prev)
    if not (moved or effects.writers or effects.late or effects.dropped):
        return None
    name = effects.stream
    advances = (committed.settled.get((name, advance.writer), advance) for advance in effects.advances)
    numbers = committed.late.get(name, [])
    return Change(
        name,
        str(effects.linear),
        entries=[_entry(advance, effects.linear, batch, now) for advance in advances if advance],
        positions=[
            (row.writer, str(committed.positions.get((name, row.writer), row.position))) for row in effects.writers
        ],
        late=[_late(number, late, batch, now) for number, late in zip(numbers, effects.late, strict=True)],
        dropped=effects.dropped,
        allocated=str(effects.allocated),
    )


def of_history(
    stream: str, held: StreamPositions, advances: Iterable[Sequence[PastAdvance]], late: Iterable[PastLate]
) -> Change:
    """A stream as Postgres holds it; `advances` has one chain per writer."""
    past: list[tuple[int, PastAdvance]] = []
    for chain in advances:
        newest = 0
        for advance in chain:
            # A clock that was set back must not put a writer's advances out of their order.
            newest = max(newest, advance.time)
            past.append((newest, advance))
    past.sort(key=lambda item: item[0])
    return Change(
        stream,
        str(held.linear),
        entries=[_entry(item.advance, item.linear, item.batch, item.time) for _, item in past],
        positions=[(writer, str(position)) for writer, position in held.positions.items()],
        late=[_late(item.number, item.late, item.batch, item.time) for item in late],
        dropped=sorted(held.forgotten),
        allocated=str(held.allocated),
    )


def _entry(advance: WriterAdvance, linear: int, batch: int, time: int) -> AdvanceEntry:
    a = advance
    numbers = (a.epoch, a.prev, a.id, *a.evidence.counts, linear, batch, time)
    return AdvanceEntry(a.writer, *map(str, numbers))


def _late(number: int, late: LateCompletion, batch: int, time: int) -> LateEntry:
    return LateEntry(
        str(number),
        late.writer,
        str(late.epoch),
        str(late.prev),
        str(late.id),
        str(late.facts),
        late.why,
        str(batch),
        str(time),
    )


CALLS_AT_ONCE = 500  # streams in one pipeline: bounds the memory of both sides, and how long a reader waits its turn

_SCRIPT = files("tidemark.sinks.redis").joinpath("publish.lua").read_text("utf-8")
_SHA = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
_KEYS = ("positions", "linear", "token", "advances", "fence", "allocated")

Mode = Literal["new", "known", "mend", "anew"]
"""How a change is published; `publish.lua` says what each means."""

_REMEDIES = Remedies(
    access="check user and password in TIDEMARK_REDIS_URL, or TIDEMARK_REDIS_PASSWORD",
    transport="check that TIDEMARK_REDIS_URL begins with rediss, the name in it, and TIDEMARK_REDIS_CA_FILE",
    rights="give the user all rights on the keys and channels tidemark:*, and see that nothing else writes there",
)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """`advances_kept` bounds each stream's list of advances, about. `timeout` in seconds."""

    address: str | RedisAddress = field(repr=False)
    advances_kept: int = 10_000
    timeout: float = 5.0


class Redis:
    """One server or a Cluster. Any thread may call; all methods raise `Unavailable` (call again) and `Refused`.

    `faults`: streams that it cannot show because of what their keys hold, and what it said; until they are written.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._kept = config.advances_kept
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
        for start in range(0, len(calls), CALLS_AT_ONCE):
            chunk = calls[start : start + CALLS_AT_ONCE]
            newest = token
            for (_, change), answer in zip(chunk, self._run(token, chunk), strict=True):
                try:
                    said, *more = sound(answer)
                    if said == "fenced":
                        newest = max(newest, fencing_token(more[0]))
                        continue
                except StreamFault as fault:
                    self.faults[change.stream] = str(fault)
                    continue
                self.faults.pop(change.stream, None)
                if said == "lost":
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

    def tokens(self, streams: Sequence[str]) -> dict[str, str | None]:
        """What readers find under the name `token`; None where there is nothing, or no text."""
        with self._session.use() as client:
            return tokens(client, streams)

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

    def _run(self, token: int, chunk: Sequence[tuple[Mode, Change]]) -> list[Any]:
        with self._session.use() as client:
            answers = self._called(client, token, chunk)
            if any(isinstance(answer, problems.NoScriptError) for answer in answers):
                client.script_load(_SCRIPT)  # a new server, or one that was restarted
                answers = self._called(client, token, chunk)
            for answer in answers:  # what no stream is to blame for is translated
                if isinstance(answer, Exception) and not of_stream(answer):
                    raise answer
            return answers

    def _called(self, client: Any, token: int, chunk: Sequence[tuple[Mode, Change]]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for mode, change in chunk:
            keys = [key(change.stream, name) for name in _KEYS]
            arguments = (mode, str(token), str(self._kept), msgspec.msgpack.encode(change))
            # Not `evalsha`, which redis-py does not want in a pipeline to a Cluster, although each call has its node.
            pipeline.execute_command("EVALSHA", _SHA, len(keys), *keys, *arguments)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers
