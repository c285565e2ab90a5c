"""Reads the keys of streams that `publish.lua` writes, to compare them with Postgres."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemark.common.errors import BadToken
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis.client import STREAMS, Script, StreamFault, check_answer, group_by_slot, key, slot_function

_PAGE = 1000  # entries of a list in one read
_STREAMS_PER_CALL = 100  # such a call blocks the server for less than a millisecond
_POSITIONS_PER_CALL = 2000  # a call stops after the stream that reaches this number
_SCRIPT = Script("snapshot.lua")
HIGHEST_TOKEN = 2**62  # a higher token was not written by Tidemark


class RedisPositions(msgspec.Struct, frozen=True, gc=False):
    """The keys of a stream in Redis; None, 0 and {} for missing keys.

    Attributes:
        late: number of the newest late completion in the list.
        fence: the highest fencing token that a publisher of the stream had.
        agrees: the key `token` matches the other keys.
        listed: the stream is in the set of names.
    """

    linear: int | None
    allocated: int
    positions: dict[str, int]
    late: int
    fence: int
    token: str | None
    agrees: bool
    listed: bool


def read_snapshots(client: Any, streams: Sequence[str]) -> tuple[dict[str, RedisPositions], dict[str, str]]:
    """The snapshots by stream, and the faults by stream: keys with invalid content."""
    snapshots, faults = {}, {}
    listed = dict(zip(streams, client.smismember(STREAMS, streams), strict=True)) if streams else {}
    waiting = group_by_slot(((stream, 1, stream) for stream in streams), slot_function(client), _STREAMS_PER_CALL)
    while waiting:
        calls = ((names, (str(_POSITIONS_PER_CALL), str(len(names)))) for names in waiting)
        remaining = []
        for names, answers in zip(waiting, _SCRIPT.call(client, calls), strict=True):
            if isinstance(answers, Exception):
                raise answers
            for stream, answer in zip(names, answers, strict=False):
                try:
                    snapshots[stream] = _parse_positions(check_answer(answer), listed=bool(listed[stream]))
                except StreamFault as fault:
                    faults[stream] = str(fault)
            if len(answers) < len(names):
                remaining.append(names[len(answers) :])
        waiting = remaining
    return snapshots, faults


def entry_time(client: Any, stream: str, writer: str, id: int) -> int | None:
    """The time of the entry that moved `writer` over `id`: ms since 1970, by the clock of Redis. None if the list has
    no such entry.
    """
    newest = "+"
    while entries := client.xrevrange(key(stream, "advances"), max=newest, count=_PAGE):
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


def _parse_positions(answer: bytes, *, listed: bool) -> RedisPositions:
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
            listed,
        )
    except msgspec.DecodeError as error:
        raise StreamFault(f"its keys contain a value that is not text: {error}") from None
    except ValueError as error:
        raise StreamFault(f"its keys contain a value that is not a number: {error}") from None
    except BadToken as error:
        raise StreamFault(f"its keys contradict each other: {error}") from None


def _expected_token(linear: int | None, positions: dict[str, int]) -> str | None:
    """The token as `publish.lua` writes it. Fast for a stream whose writers are all at the linear position."""
    if linear is None:
        return None
    reached = abs(linear)
    for position in positions.values():
        if abs(position) > reached:
            return str(Token.of(linear, positions))
    return f"m{linear}"


def _parse_id(text: str) -> int:
    """Parse an ID. Only the form that `publish.lua` writes is valid, because the script compares IDs as text.

    Raises:
        ValueError: the text has another form.
    """
    number = int(text)
    if str(number) != text or not -(2**63) <= number < 2**63:
        raise ValueError(f"{text[:40]!r} is not an ID in decimal form")
    return number


def parse_fencing_token(text: str) -> int:
    """Parse the fencing token of a stream. Raises `StreamFault` if it is not a token."""
    if not text.isdecimal() or int(text) > HIGHEST_TOKEN:
        raise StreamFault(f"its fence is {text!r}, which is not a token")
    return int(text)
