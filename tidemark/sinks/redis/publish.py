"""Calls of the scripts `publish.lua`, which writes the keys of streams in Redis, and `snapshot.lua`, which reads them.

No other script writes positions to Redis. `publish.lua` applies changes from a batch or from Postgres. The script never
moves a position back, so every call may be repeated. The keys of a stream share a hash tag. One call changes many
streams. In a Cluster, all streams of a call are in one slot.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from tidemark.common.errors import BadToken, LeaseLost
from tidemark.sinks.port import Batch, CommitResult
from tidemark.sinks.postgres.history import StoredAdvance, StoredLate
from tidemark.sinks.postgres.store import StreamPositions
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis.client import (
    SENTINEL_KEY,
    STREAMS_KEY,
    RedisAddress,
    RedisSession,
    Remedies,
    Script,
    StreamFault,
    check_answer,
    database_of,
    database_suffix,
    group_by_slot,
    is_about_stream,
    key,
    redis_address,
    slot_function,
)
from tidemark.streaming.core.effects import LateCompletion, StreamEffects, WriterAdvance

_ENTRIES_PER_READ = 1000  # of a list of advances
_STREAMS_PER_CALL = 100  # such a call blocks the server for less than a millisecond
_POSITIONS_PER_CALL = 2000  # a call stops after the stream that reaches this number
_SNAPSHOT_SCRIPT = Script("snapshot.lua")
HIGHEST_TOKEN = 2**62  # a higher token was not written by Tidemark


class RedisPositions(msgspec.Struct, frozen=True, gc=False):
    """The content of a stream's keys in Redis; None, 0 and {} for missing keys.

    Attributes:
        linear: the linear position.
        allocated: the highest ID that any record has named.
        positions: writer -> position.
        last_late_number: the number of the newest late completion that was written to the list of advances.
        fence: the highest lease token under which the stream was published.
        token: the positions token, such as `m7~web.9`.
        is_token_current: whether `token` matches `linear` and `positions`.
        is_in_stream_names: whether the set of stream names has the stream.
    """

    linear: int | None
    allocated: int
    positions: dict[str, int]
    last_late_number: int
    fence: int
    token: str | None
    is_token_current: bool
    is_in_stream_names: bool


def read_snapshots(client: Any, streams: Sequence[str]) -> tuple[dict[str, RedisPositions], dict[str, str]]:
    """Read the keys of streams.

    Returns:
        Stream -> content of its keys, also for streams without keys; and stream -> problem, for streams whose keys have
        invalid content.
    """
    snapshots, faults = {}, {}
    is_published = dict(zip(streams, client.smismember(STREAMS_KEY, streams), strict=True)) if streams else {}
    waiting = group_by_slot(((stream, 1, stream) for stream in streams), slot_function(client), _STREAMS_PER_CALL)
    while waiting:
        calls = ((names, (str(_POSITIONS_PER_CALL), str(len(names)))) for names in waiting)
        remaining = []
        for names, answers in zip(waiting, _SNAPSHOT_SCRIPT.call(client, calls), strict=True):
            if isinstance(answers, Exception):
                raise answers
            for stream, answer in zip(names, answers, strict=False):
                try:
                    snapshots[stream] = _parse_positions(
                        check_answer(answer), is_in_stream_names=bool(is_published[stream])
                    )
                except StreamFault as fault:
                    faults[stream] = str(fault)
            if len(answers) < len(names):
                remaining.append(names[len(answers) :])
        waiting = remaining
    return snapshots, faults


def read_move_time(client: Any, stream: str, writer: str, id: int) -> int | None:
    """Read the time at which the position of `writer` moved to `id` or beyond: ms since 1970, by the clock of Redis.

    Reads the list of advances from its newest entry. None if the writer has not reached `id`, or if the list no longer
    has this move.
    """
    newest = "+"
    while entries := client.xrevrange(key(stream, "advances"), max=newest, count=_ENTRIES_PER_READ):
        for name, entry in entries:
            if entry.get("writer") == writer and entry.get("kind") == "POSITION":
                if abs(int(entry["id"])) < abs(id):
                    return None
                if abs(int(entry["prev"])) < abs(id):
                    return int(name.partition("-")[0])
        newest = f"({entries[-1][0]}"
    return None


class _SnapshotAnswer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    linear: str | None
    allocated: str | None
    positions: dict[str, str]
    late: str | None
    fence: str | None


_decoder = msgspec.json.Decoder(_SnapshotAnswer)


def _parse_positions(answer: bytes, *, is_in_stream_names: bool) -> RedisPositions:
    """Parse an answer of `snapshot.lua`. Raises `StreamFault` if a key has invalid content."""
    try:
        json, newline, text = answer.partition(b"\n")
        keys = _decoder.decode(json)
        token = text.decode(errors="replace") if newline else None
        linear = None if keys.linear is None else _parse_id(keys.linear)
        positions = {writer: _parse_id(position) for writer, position in keys.positions.items()}
        return RedisPositions(
            linear,
            _parse_id(keys.allocated or "0"),
            positions,
            _parse_id(keys.late or "0"),
            parse_fencing_token(keys.fence or "0"),
            token,
            token == _expected_token(linear, positions),
            is_in_stream_names,
        )
    except msgspec.DecodeError as error:
        raise StreamFault(f"its keys contain a value that is not text: {error}") from None
    except ValueError as error:
        raise StreamFault(f"its keys contain a value that is not a number: {error}") from None
    except BadToken as error:
        raise StreamFault(f"its keys contradict each other: {error}") from None


def _expected_token(linear: int | None, positions: dict[str, int]) -> str | None:
    """The token that `publish.lua` writes for these positions; None if there is no linear position.

    Fast for a stream whose writers are all at or below the linear position.
    """
    if linear is None:
        return None
    reached = abs(linear)
    for position in positions.values():
        if abs(position) > reached:
            return str(Token.of(linear, positions))
    return f"m{linear}"


def _parse_id(text: str) -> int:
    """Parse an ID. Only the text form that `publish.lua` writes is valid, because the script compares IDs as text.

    Raises:
        ValueError: the text has another form.
    """
    number = int(text)
    if str(number) != text or not -(2**63) <= number < 2**63:
        raise ValueError(f"{text[:40]!r} is not an ID in decimal form")
    return number


def parse_fencing_token(text: str) -> int:
    """Parse the lease token in a stream's key `fence`. Raises `StreamFault` if `text` is not a token."""
    if not text.isdecimal() or int(text) > HIGHEST_TOKEN:
        raise StreamFault(f"its fence is {text!r}, which is not a token")
    return int(text)


class AdvanceEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `POSITION` entry of the list of advances: an advance of a writer. All fields are text for Redis."""

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
    """A `LATE` entry of the list of advances. All fields are text for Redis.

    `number`: the number of the late completion in Postgres. Numbers ascend, so Redis lacks entries if the newest number
    in Redis is lower than the newest number in Postgres.
    """

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
    """The change of a stream, as an argument of `publish.lua`. IDs are text.

    Attributes:
        linear: the new linear position.
        entries: advances; the entries of one writer are in the order of its chain.
        positions: new positions, as (writer, position). The change of a batch leaves out a position at which an entry
            in `entries` already ends.
        late: late completions, in ascending order of number.
        dropped_writers: writers to remove.
        allocated: the highest ID that any record has named.
    """

    stream: str
    linear: str
    entries: list[AdvanceEntry] = []
    positions: list[tuple[str, str]] = []
    late: list[LateEntry] = []
    dropped_writers: list[str] = []
    allocated: str = "0"


def changes_of_batch(batch: Batch, committed: CommitResult) -> list[Change]:
    """Convert a committed batch to changes. Streams of which readers see no change are left out."""
    changes = []
    for shard in batch.effects:
        origin = str(batch.number), str(shard.now)
        changes += [_change_of_stream(origin, stream, committed) for stream in shard.streams if _is_visible(stream)]
    return changes


def _is_visible(effects: StreamEffects) -> bool:
    moved = effects.linear != effects.linear_prev or effects.allocated != effects.allocated_prev
    return moved or bool(effects.writers or effects.late or effects.dropped_writers)


def _change_of_stream(origin: tuple[str, str], effects: StreamEffects, committed: CommitResult) -> Change:
    """Convert the effects on one stream. `origin`: the number and the time (ms since 1970) of the batch, as text."""
    name, linear = effects.stream, str(effects.linear)
    advances: Iterable[WriterAdvance | None] = effects.advances
    if committed.corrected_advances:
        advances = [committed.corrected_advances.get((name, advance.writer), advance) for advance in effects.advances]
    entries, reached = [], {}
    for advance in advances:
        if advance is not None:
            entries.append(_advance_entry(advance, linear, *origin))
            reached[advance.writer] = advance.id
    rows = [(row.writer, row.position) for row in effects.writers]
    if committed.higher_positions:
        rows = [(writer, committed.higher_positions.get((name, writer), position)) for writer, position in rows]
    positions = [(writer, str(position)) for writer, position in rows if reached.get(writer) != position]
    numbers = committed.late_numbers.get(name, [])
    late = [_late_entry(number, late, *origin) for number, late in zip(numbers, effects.late, strict=True)]
    return Change(name, linear, entries, positions, late, effects.dropped_writers, str(effects.allocated))


def change_of_history(
    stream: str, stored: StreamPositions, advances: Iterable[Sequence[StoredAdvance]], late: Iterable[StoredLate]
) -> Change:
    """Create the change that copies a stream from Postgres.

    Args:
        stored: the committed positions.
        advances: one chain of advances for each writer, oldest first.
        late: the late completions, oldest first.
    """
    history: list[tuple[int, StoredAdvance]] = []
    for chain in advances:
        newest = 0
        for advance in chain:
            # If a clock was set back, the order of a writer's advances must not change.
            newest = max(newest, advance.time)
            history.append((newest, advance))
    history.sort(key=lambda item: item[0])
    return Change(
        stream,
        str(stored.linear),
        entries=[
            _advance_entry(item.advance, str(item.linear), str(item.batch), str(item.time)) for _, item in history
        ],
        positions=[(writer, str(position)) for writer, position in stored.positions.items()],
        late=[_late_entry(item.number, item.late, str(item.batch), str(item.time)) for item in late],
        dropped_writers=sorted(stored.forgotten_writers),
        allocated=str(stored.allocated),
    )


def _advance_entry(advance: WriterAdvance, linear: str, batch: str, time: str) -> AdvanceEntry:
    a = advance
    counts = str(a.facts), str(a.empty), str(a.unseen), str(a.skipped)
    return AdvanceEntry(a.writer, str(a.epoch), str(a.prev), str(a.id), *counts, linear, batch, time)


def _late_entry(number: int, late: LateCompletion, batch: str, time: str) -> LateEntry:
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


STREAMS_PER_PIPELINE = 500  # bounds the memory of client and server
MOVES_PER_CALL = 200  # such a call blocks the server for a few milliseconds; a single stream may have more

_SCRIPT = Script("publish.lua")

Mode = Literal["new", "known", "repair", "rebuild"]
"""How a change is published; `publish.lua` explains each mode."""

_Call = tuple[Mode, Change]

_REMEDIES = Remedies(
    login="check user and password in TIDEMARK_REDIS_URL, or TIDEMARK_REDIS_PASSWORD",
    transport="check TIDEMARK_REDIS_URL (rediss:// for TLS, and the host name) and TIDEMARK_REDIS_CA_FILE",
    rights="give the user all rights on the keys and channels tidemark:*; no other program may write these keys",
)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The address of Redis, and settings of the sink.

    Attributes:
        address: a URL or an address.
        redis_advances_max: the largest length of each stream's list of advances, approximately.
        timeout: seconds to wait for a connection, and for an answer.
    """

    address: str | RedisAddress = field(repr=False)
    redis_advances_max: int = 10_000
    timeout: float = 5.0


@dataclass(frozen=True, slots=True)
class RedisReport:
    """The rights of Tidemark's user on the server, and what the server reports. See `Redis.report`.

    Attributes:
        info: fields of INFO; empty if the user may not query them.
        can_read: whether the user may read keys.
        can_write: whether the user may call scripts.
        clock: the server's time, seconds since 1970; None if the user may not query it.
    """

    info: Mapping[str, str]
    can_read: bool
    can_write: bool
    clock: float | None


def _answer_or_error(call: Callable[[], Any]) -> Any:
    """Call the server, and return its answer. A `ResponseError` is returned, not raised."""
    try:
        return call()
    except ResponseError as error:
        return error


class Redis:
    """The pipeline's access to Redis (one server or a Cluster). A context manager that closes its client. Thread-safe.

    All methods raise `Unavailable` (call again) and `Refused`.

    Attributes:
        where: the address without user and password, for messages.
        faults: stream -> problem, for streams that cannot be read or written because their keys have invalid content.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._advances_max = config.redis_advances_max
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
        """Send a PING, to check the connection and the login. Called at the start, before the first batch."""
        with self._session.use() as client:
            client.ping()

    def report(self) -> RedisReport:
        """Test this user's rights, and query the server. Writes nothing."""
        with self._session.use() as client:
            can_read = not isinstance(_answer_or_error(lambda: client.get("tidemark:doctor")), NoPermissionError)
            # Call a script that is not loaded: the answer is NOSCRIPT, unless scripts are not allowed.
            can_write = not isinstance(
                _answer_or_error(lambda: client.evalsha("0" * 40, 1, STREAMS_KEY)), NoPermissionError
            )
            info, clock = _answer_or_error(client.info), _answer_or_error(client.time)
        return RedisReport(
            {name: str(value) for name, value in info.items()} if isinstance(info, dict) else {},
            can_read,
            can_write,
            clock[0] + clock[1] / 1e6 if isinstance(clock, tuple) else None,
        )

    def publish(self, token: int, calls: Sequence[tuple[Mode, Change]]) -> list[str]:
        """Publish changes. Readers see each change as a whole. A repeated call changes nothing.

        Updates `faults`: adds streams that could not be written, and removes streams that were written.

        Args:
            token: the token of the lease.
            calls: (mode, change); see `publish.lua` for the modes.

        Returns:
            The streams of which Redis has lost data. Nothing was written for these streams.

        Raises:
            LeaseLost: a stream in Redis has a newer token. Nothing was written for the streams with a newer token.
        """
        lost = []
        for start in range(0, len(calls), STREAMS_PER_PIPELINE):
            chunk = calls[start : start + STREAMS_PER_PIPELINE]
            newest = token
            for change, answer in self._run(token, chunk):
                try:
                    outcome, _, seen = check_answer(answer).partition(b" ")
                    if outcome == b"fenced":
                        newest = max(newest, parse_fencing_token(seen.decode(errors="replace")))
                        continue
                except StreamFault as fault:
                    self.faults[change.stream] = str(fault)
                    continue
                self.faults.pop(change.stream, None)
                if outcome == b"lost":
                    lost.append(change.stream)
            if newest > token:
                raise LeaseLost(token, newest)
        return lost

    def add_names(self, streams: Collection[str]) -> None:
        """Add streams to the set of names in Redis."""
        if streams:
            with self._session.use() as client:
                client.sadd(STREAMS_KEY, *streams)

    def snapshots(self, streams: Sequence[str]) -> dict[str, RedisPositions]:
        """Read the keys of streams: stream -> content. Streams with invalid keys are added to `faults` instead."""
        with self._session.use() as client:
            snapshots, faults = read_snapshots(client, streams)
        self.faults |= faults
        return snapshots

    def read_move_time(self, stream: str, writer: str, id: int) -> int | None:
        """Read the time at which the position of `writer` moved to `id` or beyond: see `read_move_time`."""
        with self._session.use() as client:
            return read_move_time(client, stream, writer, id)

    def names(self) -> set[str]:
        """Read the set of names: the streams that were published to this Redis."""
        with self._session.use() as client:
            return set(client.smembers(STREAMS_KEY))

    def replace_sentinel(self, value: str) -> str | None:
        """Replace the sentinel in Redis by `value`, and return the old sentinel; None if there was none.

        If the old sentinel differs from the `value` of the previous call, Redis has lost writes, or another process has
        replaced the sentinel.
        """
        with self._session.use() as client:
            before = client.set(SENTINEL_KEY, value, get=True)
            return None if before is None else str(before)

    def _run(self, token: int, chunk: Sequence[_Call]) -> Iterator[tuple[Change, Any]]:
        """Run `publish.lua` for a chunk of changes. Yields each change with its answer, or with an error of its stream.

        If a call for several streams fails, the script runs again for each of these streams.
        """
        with self._session.use() as client:
            calls = group_by_slot(
                ((change.stream, _count_moves(change), (mode, change)) for mode, change in chunk),
                slot_function(client),
                MOVES_PER_CALL,
            )
            single: list[list[_Call]] = []
            for call, answer in zip(calls, self._call_script(client, token, calls), strict=True):
                if not isinstance(answer, Exception):
                    yield from zip((change for _, change in call), answer, strict=True)
                elif len(call) == 1:
                    yield call[0][1], answer
                else:
                    single += [[item] for item in call]  # one of them has a fault
            for call, answer in zip(single, self._call_script(client, token, single), strict=True):
                yield call[0][1], answer if isinstance(answer, Exception) else answer[0]

    def _call_script(self, client: Any, token: int, calls: Sequence[Sequence[_Call]]) -> list[Any]:
        """Run `publish.lua` for each call, and return the answers. Errors of one stream are returned, others raised."""
        suffix = database_suffix(database_of(client))
        answers = _SCRIPT.call(
            client,
            (
                (
                    [change.stream for _, change in call],
                    (str(token), str(self._advances_max), msgspec.msgpack.encode(call), suffix),
                )
                for call in calls
            ),
        )
        for answer in answers:  # the session converts errors that do not concern one stream
            if isinstance(answer, Exception) and not is_about_stream(answer):
                raise answer
        return answers


def _count_moves(change: Change) -> int:
    """The size of a change, for the limit `MOVES_PER_CALL`."""
    return 1 + len(change.entries) + len(change.late)
