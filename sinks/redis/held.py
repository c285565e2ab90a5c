"""What Redis holds of streams: the keys that `publish.lua` writes, as they are compared with Postgres."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemark.sinks.redis.errors import StreamFault, sound
from tidemark.sinks.redis.names import key

_PAGE = 1000  # entries of a list in one reading
HIGHEST_TOKEN = 2**62  # of a lease; what is higher was not written by us


@dataclass(frozen=True, slots=True)
class RedisPositions:
    """A stream as Redis holds it: None, 0 and {} where it holds nothing. `late` is the number of the newest entry
    about a late completion, `fence` the highest token seen."""

    linear: int | None
    allocated: int
    positions: dict[str, int]
    late: int
    fence: int


def held(client: Any, streams: Sequence[str]) -> tuple[dict[str, RedisPositions], dict[str, str]]:
    """By stream; and of those that cannot be read because of what their keys hold, what is wrong."""
    pipeline = client.pipeline(transaction=False)
    for stream in streams:
        pipeline.get(key(stream, "linear"))
        pipeline.get(key(stream, "allocated"))
        pipeline.hgetall(key(stream, "positions"))
        pipeline.hmget(key(stream, "fence"), "late", "token")
    answers = pipeline.execute(raise_on_error=False)
    found, faults = {}, {}
    for place, stream in enumerate(streams):
        try:
            found[stream] = _positions(*map(sound, answers[4 * place : 4 * place + 4]))
        except StreamFault as fault:
            faults[stream] = str(fault)
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


def _positions(
    linear: str | None, allocated: str | None, positions: dict[str, str], fence: Sequence[str | None]
) -> RedisPositions:
    try:
        late, token = fence
        return RedisPositions(
            linear=None if linear is None else int(linear),
            allocated=int(allocated or 0),
            positions={writer: int(position) for writer, position in positions.items()},
            late=int(late or 0),
            fence=fencing_token(token or "0"),
        )
    except ValueError as error:
        raise StreamFault(f"its keys hold what is no number: {error}") from None


def fencing_token(text: str) -> int:
    if not text.isdecimal() or int(text) > HIGHEST_TOKEN:
        raise StreamFault(f"its fence holds {text!r}, which is no token")
    return int(text)
