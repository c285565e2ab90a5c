"""What Redis holds of streams: the keys that `publish.lua` writes, as they are compared with Postgres."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemark.sinks.redis.errors import StreamFault, sound
from tidemark.sinks.redis.names import key
from tidemark.sinks.redis.scripts import Script, slots, together

_PAGE = 1000  # entries of a list in one reading
_AT_ONCE = 100  # streams in one call, for less than a millisecond of which nobody else has his turn
_ENOUGH = 2000  # positions in one call; one stream may have more
_SCRIPT = Script("held.lua")
HIGHEST_TOKEN = 2**62  # of a lease; what is higher was not written by us


class RedisPositions(msgspec.Struct, frozen=True, gc=False):
    """A stream as Redis holds it: None, 0 and {} where it holds nothing. `late` is the number of the newest entry
    about a late completion, `fence` the highest token seen."""

    linear: int | None
    allocated: int
    positions: dict[str, int]
    late: int
    fence: int


def held(client: Any, streams: Sequence[str]) -> tuple[dict[str, RedisPositions], dict[str, str]]:
    """By stream; and of those that cannot be read because of what their keys hold, what is wrong."""
    found, faults = {}, {}
    waiting = together(((stream, 1, stream) for stream in streams), slots(client), _AT_ONCE)
    while waiting:
        calls = (([key(stream, "positions") for stream in names], (str(_ENOUGH),)) for names in waiting)
        further = []
        for names, answers in zip(waiting, _SCRIPT.answers(client, calls), strict=True):
            if isinstance(answers, Exception):
                raise answers
            for stream, answer in zip(names, answers, strict=False):
                try:
                    found[stream] = _positions(sound(answer))
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


def tokens(client: Any, streams: Sequence[str]) -> dict[str, str | None]:
    """The tokens as readers find them; None where there is none, or no text."""
    pipeline = client.pipeline(transaction=False)
    for stream in streams:
        pipeline.get(key(stream, "token"))
    found: dict[str, str | None] = {}
    for stream, answer in zip(streams, pipeline.execute(raise_on_error=False), strict=True):
        try:
            found[stream] = sound(answer)
        except StreamFault:
            found[stream] = None
    return found


class _HeldAnswer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    linear: str | None
    allocated: str | None
    positions: dict[str, str]
    late: str | None
    token: str | None


_held = msgspec.json.Decoder(_HeldAnswer)


def _positions(answer: bytes) -> RedisPositions:
    try:
        it = _held.decode(answer)
        return RedisPositions(
            None if it.linear is None else int(it.linear),
            int(it.allocated or 0),
            {writer: int(position) for writer, position in it.positions.items()},
            int(it.late or 0),
            fencing_token(it.token or "0"),
        )
    except msgspec.DecodeError as error:
        raise StreamFault(f"its keys hold what is no text: {error}") from None
    except ValueError as error:
        raise StreamFault(f"its keys hold what is no number: {error}") from None


def fencing_token(text: str) -> int:
    if not text.isdecimal() or int(text) > HIGHEST_TOKEN:
        raise StreamFault(f"its fence holds {text!r}, which is no token")
    return int(text)
