"""The Redis side of the reader library: sends the commands for a `Request`, parses replies, and converts errors.

A redis-py client, for threads or for asyncio, runs the commands. The script `publish.lua` writes the keys. The list of
advances of a stream is a Redis Stream.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import Any

import msgspec
import redis
import redis.asyncio
from redis.commands import CoreCommands

from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.reader.events import Advance, Late
from tidemark.sinks.reader.requests import (
    LONGEST_WAIT_SECONDS,
    AwaitEntry,
    ListEntry,
    ReadKeys,
    ReadList,
    ReadNewest,
    StreamKeys,
)
from tidemark.sinks.redis.client import (
    REDIS_PY_ERRORS,
    SENTINEL_KEY,
    STREAMS_KEY,
    RedisAddress,
    RedisSession,
    Remedies,
    aclose,
    display_address,
    explain_redis_error,
    key,
    redis_address,
)
from tidemark.streaming.values.limits import Evidence

TIMEOUT_SECONDS = 5.0  # seconds for a connection or an answer

REMEDIES = Remedies(
    login="check user and password of the Redis address",
    transport="check the Redis address (rediss:// for TLS, and the host name) and the CA file",
    rights="allow the user to read the keys tidemark:* (+@read +multi +exec)",
)


class AsyncSession:
    """Carries out requests with a redis-py client for asyncio.

    Tasks share connections: one connection reads the keys of all streams, and one or two wait for entries of all lists.
    So any number of tasks can wait. With a Cluster, each stream has such connections of its own.

    Args:
        client: the redis-py client.
        is_owned: whether `aclose` closes `client`; False for the client of a service.
    """

    def __init__(self, client: Any, *, is_owned: bool) -> None:
        self._client = client
        self._is_owned = is_owned
        self._is_cluster = isinstance(client, redis.asyncio.RedisCluster)
        self._unshared_limit = asyncio.Semaphore(MAX_UNSHARED_CONNECTIONS)
        self._reads: dict[str, _SharedReads] = {}
        self._watches: dict[str, _SharedWatch] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Any]:
        """Give the block the client. Waits while `MAX_UNSHARED_CONNECTIONS` blocks run.

        Converts errors of redis-py to `Unavailable` (call again) and `Refused`.
        """
        async with self._unshared_limit:
            with translate_errors(self._client):
                yield self._client

    async def read_keys(self, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
        """Read the keys of a stream. Raises `Unavailable` and `Refused`.

        Requests of several tasks may be carried out in one transaction.
        """
        if isinstance(request, ReadList):
            async with self.use() as client:
                return read_reply(request, await send_request(client, request))
        group = request.stream if self._is_cluster else ""
        reads = self._reads.get(group) or self._reads.setdefault(group, _SharedReads(self._client))
        with translate_errors(self._client):
            return read_reply(request, await reads.read(request))

    async def await_entry(self, request: AwaitEntry) -> None:
        """Wait until the list has an entry after `request.after`, at most `request.seconds`.

        Raises `Unavailable` and `Refused`.
        """
        group = request.stream if self._is_cluster else ""
        watch = self._watches.get(group) or self._watches.setdefault(group, _SharedWatch(self._client))
        with translate_errors(self._client):
            await watch.wait(request)

    async def aclose(self) -> None:
        """Stop the shared reads and the shared waits. Close the client if it is owned."""
        for reads in self._reads.values():
            await reads.aclose()
        for watch in self._watches.values():
            await watch.aclose()
        if self._is_owned:
            await aclose(self._client)


MAX_UNSHARED_CONNECTIONS = 32  # the most connections of an asyncio client that each serve one task
STREAMS_PER_READ = 100  # the most streams in one transaction of Redis
SECOND_CONNECTION_WAIT_SECONDS = 0.05  # seconds that the second connection waits before it takes further streams


class _SharedReads:
    """Reads the keys of streams with one connection. All requests that arrive during a read share the next read."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._answers: dict[ReadNewest | ReadKeys, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None

    async def read(self, request: ReadNewest | ReadKeys) -> Any:
        """Carry out the request with the next read, and return the reply of Redis. Raises errors of redis-py."""
        if request not in self._answers:
            self._answers[request] = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        # Shielded: a task that is cancelled must not cancel the read of the others.
        return await asyncio.shield(self._answers[request])

    async def aclose(self) -> None:
        if self._task is not None:
            await cancel_until_done(self._task)

    async def _run(self) -> None:
        try:
            while self._answers:
                requests = [*self._answers][:STREAMS_PER_READ]
                answers = [self._answers.pop(request) for request in requests]
                try:
                    replies = await self._send(requests)
                except BaseException as error:
                    _fail(answers, error)
                    if not isinstance(error, Exception):
                        raise
                else:
                    for answer, reply in zip(answers, replies, strict=True):
                        problem = next((part for part in reply if isinstance(part, Exception)), None)
                        if problem is None:
                            answer.set_result(reply)
                        else:
                            _fail([answer], problem)
        finally:
            self._task = None
            _fail([*self._answers.values()], redis.ConnectionError("the client was closed"))
            self._answers.clear()

    async def _send(self, requests: Sequence[ReadNewest | ReadKeys]) -> list[Any]:
        if isinstance(self._client, redis.asyncio.RedisCluster):
            return [await send_request(self._client, request) for request in requests]
        pipe = self._client.pipeline(transaction=True)
        for request in requests:
            queue_commands(pipe, request)
        replies = await pipe.execute(raise_on_error=False)
        size = len(replies) // len(requests)
        return [replies[start : start + size] for start in range(0, len(replies), size)]


class _SharedWatch:
    """Waits for new entries of the lists of all streams, with one connection.

    A connection cannot add a stream to its wait. So a second connection waits for the streams that are added, with a
    short time-out, until the wait of the first connection has ended.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._waiting_by_stream: dict[str, dict[asyncio.Future[None], tuple[int, int]]] = {}
        self._watched: dict[bool, dict[str, tuple[int, int]]] = {}  # by connection; True: the first one
        self._tasks: dict[bool, asyncio.Task[None]] = {}  # by connection, as in `_watched`

    async def wait(self, request: AwaitEntry) -> None:
        """Wait until the list has an entry after `request.after`, at most `request.seconds`.

        Raises errors of redis-py.
        """
        done, after = asyncio.get_running_loop().create_future(), _parse_entry_number(request.entry_name)
        self._waiting_by_stream.setdefault(request.stream, {})[done] = after
        if True not in self._tasks:
            self._tasks[True] = asyncio.create_task(self._run(is_first=True))
        elif False not in self._tasks and not self._covers(request.stream, after):
            self._tasks[False] = asyncio.create_task(self._run(is_first=False))
        try:
            await asyncio.wait([done], timeout=request.seconds)
            if done.done():
                done.result()
        finally:
            self._remove(request.stream, done)

    async def aclose(self) -> None:
        for task in [*self._tasks.values()]:
            await cancel_until_done(task)

    def _covers(self, stream: str, after: tuple[int, int]) -> bool:
        """Whether the first connection waits, or is about to wait, for entries of the list after `after`."""
        watched = self._watched.get(True)
        return watched is None or watched.get(stream, (after[0] + 1, 0)) <= after

    async def _run(self, *, is_first: bool) -> None:
        try:
            while streams := {
                stream: min(afters.values())
                for stream, afters in self._waiting_by_stream.items()
                if is_first or not self._covers(stream, min(afters.values()))
            }:
                self._watched[is_first] = streams
                await self._watch(streams, LONGEST_WAIT_SECONDS if is_first else SECOND_CONNECTION_WAIT_SECONDS)
        except BaseException as error:
            _fail([done for waiting in self._waiting_by_stream.values() for done in waiting], error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._watched.pop(is_first, None)
            self._tasks.pop(is_first)

    async def _watch(self, streams: Mapping[str, tuple[int, int]], seconds: float) -> None:
        lists = {key(stream, "advances"): stream for stream in streams}
        after = {name: "{}-{}".format(*streams[stream]) for name, stream in lists.items()}
        reply = await self._client.xread(after, count=1, block=max(1, round(1000 * seconds)))
        for name, entries in reply.items() if isinstance(reply, dict) else reply or ():
            stream = lists[_decode(name)]
            first = entries[0] if isinstance(reply, dict) else entries
            newest = _parse_entry_number(_decode(first[0][0]))
            for done, number in [*self._waiting_by_stream.get(stream, {}).items()]:
                if number < newest and not done.done():
                    done.set_result(None)
                    self._remove(stream, done)

    def _remove(self, stream: str, done: "asyncio.Future[None]") -> None:
        waiting = self._waiting_by_stream.get(stream, {})
        waiting.pop(done, None)
        if not waiting:
            self._waiting_by_stream.pop(stream, None)


def _parse_entry_number(name: str) -> tuple[int, int]:
    """Parse the name of a list entry, such as `1700000000000-0`, to numbers that can be compared."""
    time, _, number = name.partition("-")
    return int(time), int(number or 0)


def _fail(answers: Sequence["asyncio.Future[Any]"], error: BaseException) -> None:
    """Make the tasks that wait for `answers` raise `error`; a connection error if `error` is a cancellation."""
    for answer in answers:
        if not answer.done():
            cause = error if isinstance(error, Exception) else redis.ConnectionError("the client was closed")
            answer.set_exception(cause)
            answer.exception()  # all waiting tasks may be cancelled, and asyncio logs errors that no task retrieves


async def async_read_keys(session: AsyncSession, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
    """`read_keys` for asyncio."""
    return await session.read_keys(request)


async def async_await_entry(session: AsyncSession, request: AwaitEntry) -> None:
    """`await_entry` for asyncio."""
    await session.await_entry(request)


class CallerSession:
    """Adapts the redis-py client of a service, for threads, to the interface of `RedisSession`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @contextmanager
    def use(self) -> Iterator[Any]:
        with translate_errors(self._client):
            yield self._client

    def close(self) -> None:
        """Do nothing: the client of the service stays open."""


def open_async_session(redis: "str | RedisAddress | redis.asyncio.Redis") -> AsyncSession:
    if isinstance(redis, str | RedisAddress):
        return AsyncSession(redis_address(redis).async_client(TIMEOUT_SECONDS), is_owned=True)
    return AsyncSession(redis, is_owned=False)


def open_session(redis: "str | RedisAddress | redis.Redis") -> RedisSession | CallerSession:
    if isinstance(redis, str | RedisAddress):
        return RedisSession(redis_address(redis), REMEDIES, TIMEOUT_SECONDS)
    return CallerSession(redis)


@contextmanager
def translate_errors(client: Any) -> Iterator[None]:
    """Convert errors of redis-py in the block to `Unavailable` (call again) and `Refused`.

    `client` is the client (for threads or asyncio) whose address the errors name.
    """
    try:
        yield
    except REDIS_PY_ERRORS as error:
        raise explain_redis_error(error, display_address(client), REMEDIES) from error


# Neighbouring advances have equal evidence, linear position, batch and time. A cache stores equal values once.
_cached_int = lru_cache(1024)(int)


@lru_cache(1024)
def _cached_evidence(*counts: str) -> Evidence:
    return Evidence(*map(int, counts))


def parse_entry(entry: ListEntry) -> Advance | Late | None:
    """Parse a list entry. Returns None if this version does not know the kind of the entry."""
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
                _cached_evidence(*(fields[name] for name in Evidence.__struct_fields__)),
                prev,
                _cached_int(fields["linear"]),
                _cached_int(fields["batch"]),
                _cached_int(fields["time"]),
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


_ATOMIC_SCRIPT = """
local replies = {}
for place, command in ipairs(cmsgpack.unpack(ARGV[1])) do
    replies[place] = redis.call(unpack(command))
end
return replies
"""
LIST_PAGE_ENTRIES = 1000  # the most entries of one `ReadList`: an event loop decodes them in about 15 ms


def queue_commands(pipe: Any, request: ReadList | ReadNewest | ReadKeys) -> None:
    """Add the five commands of `request` to `pipe`, a redis-py pipeline for threads or asyncio. Sends nothing."""
    pipe.get(key(request.stream, "linear"))
    pipe.hgetall(key(request.stream, "positions"))
    pipe.hget(key(request.stream, "fence"), "late")
    pipe.get(key(request.stream, "allocated"))
    match request:
        case ReadList(stream, None):
            pipe.xrange(key(stream, "advances"), count=LIST_PAGE_ENTRIES)
        case ReadList(stream, ListEntry(name)):
            pipe.xrange(key(stream, "advances"), min=name, count=LIST_PAGE_ENTRIES + 1)
        case ReadNewest(stream) | ReadKeys(stream):
            pipe.xrevrange(key(stream, "advances"), count=1)


def send_request(client: Any, request: ReadList | ReadNewest | ReadKeys) -> Any:
    """Run the commands of `request` atomically, and return the list of replies (`read_reply` parses it).

    With an asyncio client, returns a coroutine of the list.
    """
    if not isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster):
        pipe = client.pipeline(transaction=True)
        queue_commands(pipe, request)
        return pipe.execute()
    # A Cluster's asyncio client runs transactions on a separate event loop. A script is atomic too, on one node.
    recorder = _CommandRecorder()
    queue_commands(recorder, request)
    names = dict.fromkeys(command[1] for command in recorder.commands)
    return client.eval(_ATOMIC_SCRIPT, len(names), *names, msgspec.msgpack.encode(recorder.commands))


class _CommandRecorder(CoreCommands):
    """Records the commands that redis-py would send, and sends none."""

    _event_dispatcher: Any = None  # required by the type of these commands, but not used

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def execute_command(self, *words: Any, **_: Any) -> None:
        self.commands.append([_decode(word) if isinstance(word, bytes) else str(word) for word in words])


def query_is_published(client: Any, stream: str) -> Any:
    """Query whether the set of stream names in Redis contains the stream.

    Returns 1 or 0; with an asyncio client, a coroutine that returns 1 or 0.
    """
    return client.sismember(STREAMS_KEY, stream)


def query_filled(client: Any) -> Any:
    """Query whether a pipeline publishes to this Redis.

    Returns 1 or 0; with an asyncio client, a coroutine that returns 1 or 0.
    """
    return client.exists(SENTINEL_KEY)


def read_keys(session: RedisSession | CallerSession, request: ReadList | ReadNewest | ReadKeys) -> StreamKeys:
    """Carry out `request` and return the keys of the stream. Raises `Unavailable` and `Refused`."""
    with session.use() as client:
        return read_reply(request, send_request(client, request))


def await_entry(session: RedisSession | CallerSession, request: AwaitEntry) -> None:
    """Block until the list has an entry after `request.after`, at most `request.seconds`.

    Raises `Unavailable` and `Refused`.
    """
    milliseconds = max(1, round(1000 * request.seconds))  # 0 would block without a limit
    with session.use() as client:
        client.xread({key(request.stream, "advances"): request.entry_name}, count=1, block=milliseconds)


def read_reply(request: ReadList | ReadNewest | ReadKeys, reply: Sequence[Any]) -> StreamKeys:
    """Parse the replies to the commands of `request`. Raises redis-py's `ResponseError` if a value is no number."""
    try:
        return _read_reply(request, reply)
    except ValueError as error:
        raise redis.ResponseError(
            f"stream {request.stream}: its keys contain a value that is not a number: {error}"
        ) from None


def _read_reply(request: ReadList | ReadNewest | ReadKeys, reply: Sequence[Any]) -> StreamKeys:
    linear, positions, last_late_number, allocated, raw_entries = reply
    entries = [ListEntry(_decode(name), _decode_fields(fields)) for name, fields in raw_entries]
    last = entries[-1].name if entries else "0-0"
    is_continuous, has_more = True, False
    match request:
        case ReadKeys():
            entries = []
        case ReadList(after=None):
            has_more = len(entries) == LIST_PAGE_ENTRIES
        case ReadList():
            is_continuous = entries[:1] == [request.after]
            has_more = is_continuous and len(entries) == LIST_PAGE_ENTRIES + 1
            entries = entries[1:] if is_continuous else []
    return StreamKeys(
        linear=None if linear is None else int(linear),
        positions={writer: int(position) for writer, position in _decode_fields(positions).items()},
        last_late_number=int(last_late_number or 0),
        allocated=None if allocated is None else int(allocated),
        entries=entries,
        is_continuous=is_continuous,
        has_more=has_more,
        last_entry_name=last,
    )


def _decode_fields(fields: Mapping[Any, Any] | Sequence[Any]) -> dict[str, str]:
    """Return the fields of a hash or entry as text: name -> value.

    The replies of a script are flat lists of names and values.
    """
    pairs = fields.items() if isinstance(fields, Mapping) else zip(fields[::2], fields[1::2], strict=True)
    return {
        name.decode() if isinstance(name, bytes) else name: value.decode() if isinstance(value, bytes) else value
        for name, value in pairs
    }


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
