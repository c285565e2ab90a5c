"""The commands that an ask means to Redis, and what their replies mean. No sockets: a client carries them out.

A client may decode its replies or not; both are understood.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import redis
import redis.asyncio
from redis.commands import CoreCommands

from tidemark.sinks.reader.asks import Doorbell, Entry, Glance, Look, Newest, Seen
from tidemark.sinks.redis import key

_AT_ONCE = """
local replies = {}
for place, command in ipairs(cmsgpack.unpack(ARGV[1])) do
    replies[place] = redis.call(unpack(command))
end
return replies
"""
PAGE = 1000  # entries of a list that one look reads: an event loop decodes them in about 15 ms


def queue(pipe: Any, ask: Look | Newest | Glance) -> None:
    """Put the commands on a transaction of either form of redis-py's client."""
    pipe.get(key(ask.stream, "linear"))
    pipe.hgetall(key(ask.stream, "positions"))
    pipe.hget(key(ask.stream, "fence"), "late")
    pipe.get(key(ask.stream, "head"))
    match ask:
        case Look(stream, None):
            pipe.xrange(key(stream, "advances"), count=PAGE)
        case Look(stream, Entry(name)):
            pipe.xrange(key(stream, "advances"), min=name, count=PAGE + 1)
        case Newest(stream) | Glance(stream):
            pipe.xrevrange(key(stream, "advances"), count=1)


def reply(client: Any, ask: Look | Newest | Glance) -> Any:
    """What the commands of `ask` give, all at one moment; of an asyncio client's, the coroutine."""
    if not isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster):
        pipe = client.pipeline(transaction=True)
        queue(pipe, ask)
        return pipe.execute()
    # Its transactions for asyncio run on a loop of their own. A script is as much one moment, on the stream's node.
    noted = _Noted()
    queue(noted, ask)
    names = dict.fromkeys(command[1] for command in noted.commands)
    return client.eval(_AT_ONCE, len(names), *names, msgspec.msgpack.encode(noted.commands))


class _Noted(CoreCommands):
    """Takes redis-py's commands, and sends none."""

    _event_dispatcher: Any = None  # wanted by the type of these commands, and used by none of ours

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def execute_command(self, *words: Any, **_: Any) -> None:
        self.commands.append([_text(word) if isinstance(word, bytes) else str(word) for word in words])


def ring(client: Any, ask: Doorbell) -> Any:
    """Block until the list goes on or the time is over; of an asyncio client's, the coroutine."""
    milliseconds = max(1, round(1000 * ask.seconds))  # 0 would be for ever
    return client.xread({key(ask.stream, "advances"): ask.after}, count=1, block=milliseconds)


def seen(ask: Look | Newest | Glance, reply: Sequence[Any]) -> Seen:
    linear, positions, late, head, listed = reply
    entries = [Entry(_text(name), _texts(fields)) for name, fields in listed]
    last = entries[-1].name if entries else "0-0"
    joined, more = True, False
    match ask:
        case Glance():
            entries = []
        case Look(after=None):
            more = len(entries) == PAGE
        case Look():
            joined = entries[:1] == [ask.after]
            more = joined and len(entries) == PAGE + 1
            entries = entries[1:] if joined else []
    return Seen(
        linear=None if linear is None else int(linear),
        positions={writer: int(position) for writer, position in _texts(positions).items()},
        late=int(late or 0),
        head=None if head is None else int(head),
        entries=entries,
        joined=joined,
        more=more,
        last=last,
    )


def _texts(fields: Mapping[Any, Any] | Sequence[Any]) -> dict[str, str]:
    """From names and values, also in turn, as a script's replies have them."""
    pairs = fields.items() if isinstance(fields, Mapping) else zip(fields[::2], fields[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
