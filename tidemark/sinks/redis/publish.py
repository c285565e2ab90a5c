"""The calls of the one script that writes positions to Redis (`publish.lua`).

Changes from a batch and from what Postgres holds both go through it, and it refuses to go back: so everything in Redis
can be made again. The keys of a stream share a hash tag; one call changes many streams, which in a Cluster are of one
slot.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from tidemark.common.errors import LeaseLost
from tidemark.sinks.port import Batch, Committed
from tidemark.sinks.postgres.history import StoredAdvance, StoredLate
from tidemark.sinks.postgres.store import StreamPositions
from tidemark.sinks.redis.client import (
    SENTINEL,
    STREAMS,
    RedisAddress,
    RedisSession,
    Remedies,
    StreamFault,
    database_of,
    database_suffix,
    of_stream,
    redis_address,
    sound,
)
from tidemark.sinks.redis.scripts import Script, slots, together
from tidemark.sinks.redis.snapshot import RedisPositions, entry_time, fencing_token, held
from tidemark.streaming.core.effects import LateCompletion, StreamEffects, WriterAdvance


class AdvanceEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
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


class LateEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
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


class Change(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the script does to a stream. Entries of a writer are in chain order; `positions` names writers that stand
    where none of their entries leads."""

    stream: str
    linear: str
    entries: list[AdvanceEntry] = []
    positions: list[tuple[str, str]] = []
    late: list[LateEntry] = []
    dropped: list[str] = []
    allocated: str = "0"


def of_batch(batch: Batch, committed: Committed) -> list[Change]:
    """The changes of `batch`, as Postgres settled them; streams that only held or counted something are left out."""
    changes = []
    for shard in batch.effects:
        told = str(batch.number), str(shard.now)
        changes += [_of_stream(told, stream, committed) for stream in shard.streams if _shows(stream)]
    return changes


def _shows(effects: StreamEffects) -> bool:
    moved = effects.linear != effects.linear_prev or effects.allocated != effects.allocated_prev
    return moved or bool(effects.writers or effects.late or effects.dropped)


def _of_stream(told: tuple[str, str], effects: StreamEffects, committed: Committed) -> Change:
    """`told` are the number of the batch and its time."""
    name, linear = effects.stream, str(effects.linear)
    advances: Iterable[WriterAdvance | None] = effects.advances
    if committed.settled:
        advances = [committed.settled.get((name, advance.writer), advance) for advance in effects.advances]
    entries, reached = [], {}
    for advance in advances:
        if advance is not None:
            entries.append(_entry(advance, linear, *told))
            reached[advance.writer] = advance.id
    rows = [(row.writer, row.position) for row in effects.writers]
    if committed.positions:
        rows = [(writer, committed.positions.get((name, writer), position)) for writer, position in rows]
    positions = [(writer, str(position)) for writer, position in rows if reached.get(writer) != position]
    numbers = committed.late.get(name, [])
    late = [_late(number, late, *told) for number, late in zip(numbers, effects.late, strict=True)]
    return Change(name, linear, entries, positions, late, effects.dropped, str(effects.allocated))


def of_history(
    stream: str, held: StreamPositions, advances: Iterable[Sequence[StoredAdvance]], late: Iterable[StoredLate]
) -> Change:
    """A stream as Postgres holds it; `advances` has one chain per writer."""
    past: list[tuple[int, StoredAdvance]] = []
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
        entries=[_entry(item.advance, str(item.linear), str(item.batch), str(item.time)) for _, item in past],
        positions=[(writer, str(position)) for writer, position in held.positions.items()],
        late=[_late(item.number, item.late, str(item.batch), str(item.time)) for item in late],
        dropped=sorted(held.forgotten),
        allocated=str(held.allocated),
    )


def _entry(advance: WriterAdvance, linear: str, batch: str, time: str) -> AdvanceEntry:
    a = advance
    counts = str(a.facts), str(a.empty), str(a.unseen), str(a.skipped)
    return AdvanceEntry(a.writer, str(a.epoch), str(a.prev), str(a.id), *counts, linear, batch, time)


def _late(number: int, late: LateCompletion, batch: str, time: str) -> LateEntry:
    return LateEntry(
        str(number),
        late.writer,
        str(late.epoch),
        str(late.prev),
        str(late.id),
        str(late.facts),
        late.why,
        batch,
        time,
    )


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


@dataclass(frozen=True, slots=True)
class RedisReport:
    """`info`: fields of INFO, if the user may ask. `clock`: the server's time, s since 1970, if the user may ask."""

    info: Mapping[str, str]
    reads: bool
    writes: bool
    clock: float | None


def _answer(call: Callable[[], Any]) -> Any:
    """The answer of the server, or the error that is its answer."""
    try:
        return call()
    except ResponseError as error:
        return error


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

    def report(self) -> RedisReport:
        """What the server says of itself and of our rights, for people. What is not allowed is left out."""
        with self._session.use() as client:
            reads = not isinstance(_answer(lambda: client.get("tidemark:doctor")), NoPermissionError)
            # A script that nobody has loaded: the answer is NOSCRIPT, unless scripts are not allowed.
            writes = not isinstance(_answer(lambda: client.evalsha("0" * 40, 1, STREAMS)), NoPermissionError)
            info, clock = _answer(client.info), _answer(client.time)
        return RedisReport(
            {name: str(value) for name, value in info.items()} if isinstance(info, dict) else {},
            reads,
            writes,
            clock[0] + clock[1] / 1e6 if isinstance(clock, tuple) else None,
        )

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
