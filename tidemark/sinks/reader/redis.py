"""Redis as the reader library uses it: the commands of a request, the meaning of the replies, sessions and errors.

A client of redis-py, for threads or for asyncio, carries the commands out. `publish.lua` writes the lists that are
parsed here.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec
import redis
import redis.asyncio
from redis.commands import CoreCommands

from tidemark.sinks.reader.events import Advance, Late
from tidemark.sinks.reader.requests import AwaitEntry, ListEntry, ReadKeys, ReadList, ReadNewest, StreamKeys
from tidemark.sinks.redis.client import (
    FOREIGN,
    SENTINEL,
    STREAMS,
    RedisAddress,
    RedisSession,
    Remedies,
    aclose,
    key,
    redis_address,
    redis_error,
    whereabouts,
)
from tidemark.streaming.values.limits import Evidence

TIMEOUT = 5.0  # seconds for a connection or an answer

REMEDIES = Remedies(
    access="check user and password of the Redis address",
    transport="check that the Redis address begins with rediss, its host name, and the CA file",
    rights="allow the user to read the keys tidemark:* (+@read +multi +exec)",
)


class AsyncSession:
    """A client for asyncio. `aclose` closes it if it was made here."""

    def __init__(self, client: Any, *, is_owned: bool) -> None:
        self._client = client
        self._is_owned = is_owned

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The client. Turns what redis-py raises into `Unavailable` (call again) and `Refused`."""
        with translated(self._client):
            yield self._client

    async def aclose(self) -> None:
        if self._is_owned:
            await aclose(self._client)


class CallersSession:
    """A client for threads that belongs to the caller, in the form of a `RedisSession`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @contextmanager
    def use(self) -> Iterator[Any]:
        with translated(self._client):
            yield self._client

    def close(self) -> None:
        """The client stays open."""


def open_async_session(redis: "str | RedisAddress | redis.asyncio.Redis") -> AsyncSession:
    if isinstance(redis, str | RedisAddress):
        return AsyncSession(redis_address(redis).async_client(TIMEOUT), is_owned=True)
    return AsyncSession(redis, is_owned=False)


def open_session(redis: "str | RedisAddress | redis.Redis") -> RedisSession | CallersSession:
    if isinstance(redis, str | RedisAddress):
        return RedisSession(redis_address(redis), REMEDIES, TIMEOUT)
    return CallersSession(redis)


@contextmanager
def translated(client: Any) -> Iterator[None]:
    """Turn what `client`, of either form, raises into `Unavailable` (call again) and `Refused`."""
    try:
        yield
    except FOREIGN as error:
        raise redis_error(error, whereabouts(client), REMEDIES) from error


# There are tens of thousands of advances, and neighbours have equal evidence, linear position, batch and time.
_shared = lru_cache(1024)(int)


@lru_cache(1024)
def _evidence(*counts: str) -> Evidence:
    return Evidence(*map(int, counts))


def parse_entry(entry: ListEntry) -> Advance | Late | None:
    """None for a kind that this version does not know."""
    fields = entry.fields

    def number(name: str) -> int:
        return int(fields[name])

    match fields["kind"]:
        case "POSITION":
            prev = number("prev")
            return Advance(
                sys.intern(fields["writer"]),
                number("epoch"),
                prev,
                number("id"),
                _evidence(*(fields[name] for name in Evidence.__struct_fields__)),
                prev,
                _shared(fields["linear"]),
                _shared(fields["batch"]),
                _shared(fields["time"]),
            )
        case "LATE":
            return Late(
                number("number"),
                fields["writer"],
                number("epoch"),
                number("prev"),
                number("id"),
                number("facts"),
                fields["why"],
                number("batch"),
                number("time"),
            )
        case _:
            return None


_AT_ONCE = """
local replies = {}
for place, command in ipairs(cmsgpack.unpack(ARGV[1])) do
    replies[place] = redis.call(unpack(command))
end
return replies
"""
PAGE = 1000  # list entries per reading: an event loop decodes them in about 15 ms


def queue_commands(pipe: Any, request: ReadList | ReadNewest | ReadKeys) -> None:
    """Put the commands of `request` on a pipeline of either form of redis-py."""
    pipe.get(key(request.stream, "linear"))
    pipe.hgetall(key(request.stream, "positions"))
    pipe.hget(key(request.stream, "fence"), "late")
    pipe.get(key(request.stream, "allocated"))
    match request:
        case ReadList(stream, None):
            pipe.xrange(key(stream, "advances"), count=PAGE)
        case ReadList(stream, ListEntry(name)):
            pipe.xrange(key(stream, "advances"), min=name, count=PAGE + 1)
        case ReadNewest(stream) | ReadKeys(stream):
            pipe.xrevrange(key(stream, "advances"), count=1)


def send_request(client: Any, request: ReadList | ReadNewest | ReadKeys) -> Any:
    """The replies to the commands of `request`, all of one moment; for an asyncio client, the coroutine."""
    if not isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster):
        pipe = client.pipeline(transaction=True)
        queue_commands(pipe, request)
        return pipe.execute()
    # Transactions of a cluster's asyncio client run on a loop of their own. A script is one moment too, on one node.
    noted = _CommandRecorder()
    queue_commands(noted, request)
    names = dict.fromkeys(command[1] for command in noted.commands)
    return client.eval(_AT_ONCE, len(names), *names, msgspec.msgpack.encode(noted.commands))


class _CommandRecorder(CoreCommands):
    """Records the commands that redis-py would send, and sends none."""

    _event_dispatcher: Any = None  # the type of these commands needs it; the commands used here do not

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def execute_command(self, *words: Any, **_: Any) -> None:
        self.commands.append([_text(word) if isinstance(word, bytes) else str(word) for word in words])


def is_named(client: Any, stream: str) -> Any:
    """Whether Redis lists the stream; for an asyncio client, the coroutine."""
    return client.sismember(STREAMS, stream)


def is_filled(client: Any) -> Any:
    """Whether a pipeline keeps this Redis filled; for an asyncio client, the coroutine."""
    return client.exists(SENTINEL)


def await_entry(client: Any, request: AwaitEntry) -> Any:
    """Block until the list has a new entry, or until the time is over; for an asyncio client, the coroutine."""
    milliseconds = max(1, round(1000 * request.seconds))  # 0 would block for ever
    return client.xread({key(request.stream, "advances"): request.after}, count=1, block=milliseconds)


def read_reply(request: ReadList | ReadNewest | ReadKeys, reply: Sequence[Any]) -> StreamKeys:
    """Raises redis-py's `ResponseError` if the keys hold what Tidemark does not write."""
    try:
        return _read_reply(request, reply)
    except ValueError as error:
        raise redis.ResponseError(
            f"stream {request.stream}: its keys contain a value that is not a number: {error}"
        ) from None


def _read_reply(request: ReadList | ReadNewest | ReadKeys, reply: Sequence[Any]) -> StreamKeys:
    linear, positions, late, allocated, listed = reply
    entries = [ListEntry(_text(name), _texts(fields)) for name, fields in listed]
    last = entries[-1].name if entries else "0-0"
    joined, more = True, False
    match request:
        case ReadKeys():
            entries = []
        case ReadList(after=None):
            more = len(entries) == PAGE
        case ReadList():
            joined = entries[:1] == [request.after]
            more = joined and len(entries) == PAGE + 1
            entries = entries[1:] if joined else []
    return StreamKeys(
        linear=None if linear is None else int(linear),
        positions={writer: int(position) for writer, position in _texts(positions).items()},
        late=int(late or 0),
        allocated=None if allocated is None else int(allocated),
        entries=entries,
        joined=joined,
        more=more,
        last=last,
    )


def _texts(fields: Mapping[Any, Any] | Sequence[Any]) -> dict[str, str]:
    """Fields as text. The replies of a script have names and values in turn."""
    pairs = fields.items() if isinstance(fields, Mapping) else zip(fields[::2], fields[1::2], strict=True)
    return {
        name.decode() if isinstance(name, bytes) else name: value.decode() if isinstance(value, bytes) else value
        for name, value in pairs
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
