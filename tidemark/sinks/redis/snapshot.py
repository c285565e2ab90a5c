"""What Redis holds of streams: the keys that `publish.lua` writes, as they are compared with Postgres."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemark.common.errors import BadToken
from tidemark.sinks.reader.token import Token
from tidemark.sinks.redis.client import STREAMS, StreamFault, key, sound
from tidemark.sinks.redis.scripts import Script, slots, together

_PAGE = 1000  # entries of a list in one reading
_AT_ONCE = 100  # streams in one call, for less than a millisecond of which nobody else has his turn
_ENOUGH = 2000  # positions in one call; one stream may have more
_SCRIPT = Script("held.lua")
HIGHEST_TOKEN = 2**62  # of a lease; what is higher was not written by us


class RedisPositions(msgspec.Struct, frozen=True, gc=False):
    """A stream as Redis holds it: None, 0 and {} where it holds nothing. `late` is the number of the newest entry
    about a late completion, `fence` the highest lease token seen; `agrees`: the token says what the other keys do;
    `listed`: among the names of streams."""

    linear: int | None
    allocated: int
    positions: dict[str, int]
    late: int
    fence: int
    token: str | None
    agrees: bool
    listed: bool


def held(client: Any, streams: Sequence[str]) -> tuple[dict[str, RedisPositions], dict[str, str]]:
    """By stream; and of those that cannot be read because of what their keys hold, what is wrong."""
    found, faults = {}, {}
    listed = dict(zip(streams, client.smismember(STREAMS, streams), strict=True)) if streams else {}
    waiting = together(((stream, 1, stream) for stream in streams), slots(client), _AT_ONCE)
    while waiting:
        calls = ((names, (str(_ENOUGH), str(len(names)))) for names in waiting)
        further = []
        for names, answers in zip(waiting, _SCRIPT.answers(client, calls), strict=True):
            if isinstance(answers, Exception):
                raise answers
            for stream, answer in zip(names, answers, strict=False):
                try:
                    found[stream] = _positions(sound(answer), listed=bool(listed[stream]))
                except StreamFault as fault:
                    faults[stream] = str(fault)
            if len(answers) < len(names):
                further.append(names[len(answers) :])
        waiting = further
    return found, faults


def entry_time(client: Any, stream: str, writer: str, id: int) -> int | None:
    """Redis's time (ms) of the entry that took `writer` over `id`; None where the list has none, or no longer."""
    newest = "+"
    while entries := client.xrevrange(key(stream, "advances"), max=newest, count=_PAGE):
        for name, it in entries:
            if it.get("writer") == writer and it.get("kind") == "POSITION":
                if abs(int(it["id"])) < abs(id):
                    return None
                if abs(int(it["prev"])) < abs(id):
                    return int(name.partition("-")[0])
        newest = f"({entries[-1][0]}"
    return None


class _HeldAnswer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    linear: str | None
    allocated: str | None
    positions: dict[str, str]
    late: str | None
    fence: str | None


_held = msgspec.json.Decoder(_HeldAnswer)


def _positions(answer: bytes, *, listed: bool) -> RedisPositions:
    try:
        json, newline, text = answer.partition(b"\n")
        it = _held.decode(json)
        token = text.decode(errors="replace") if newline else None
        linear = None if it.linear is None else _number(it.linear)
        positions = {writer: _number(position) for writer, position in it.positions.items()}
        return RedisPositions(
            linear,
            _number(it.allocated or "0"),
            positions,
            _number(it.late or "0"),
            fencing_token(it.fence or "0"),
            token,
            token == _token(linear, positions),
            listed,
        )
    except msgspec.DecodeError as error:
        raise StreamFault(f"its keys hold what is no text: {error}") from None
    except ValueError as error:
        raise StreamFault(f"its keys hold what is no number: {error}") from None
    except BadToken as error:
        raise StreamFault(f"its keys do not go together: {error}") from None


def _token(linear: int | None, positions: dict[str, int]) -> str | None:
    """As `publish.lua` writes it; quick for a stream at rest."""
    if linear is None:
        return None
    reached = abs(linear)
    for position in positions.values():
        if abs(position) > reached:
            return str(Token.of(linear, positions))
    return f"m{linear}"


def _number(text: str) -> int:
    """As we write them: `publish.lua` compares their texts, so no other form of one is ever passed. Raises
    ValueError."""
    number = int(text)
    if str(number) != text or not -(2**63) <= number < 2**63:
        raise ValueError(f"{text[:40]!r} is no ID as we write it")
    return number


def fencing_token(text: str) -> int:
    if not text.isdecimal() or int(text) > HIGHEST_TOKEN:
        raise StreamFault(f"its fence holds {text!r}, which is no token")
    return int(text)
