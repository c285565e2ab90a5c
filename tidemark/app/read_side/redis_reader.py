"""Reads Redis: the positions of many streams in one round trip, the names of streams, and notifications.

Notifications on Redis channels wake tasks that wait for a stream. Notifications may be lost: while Redis is down, no
task is woken. So each task also reads once a second. One connection receives the notifications of the whole process,
and is opened again after a loss.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from redis.exceptions import RedisError, ResponseError

from tidemark.app.read_side.single_flight import CircuitBreaker, ReadCoalescer
from tidemark.common.errors import Refused, Stop, Unavailable
from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.reader import (
    REMEDIES,
    ReadKeys,
    ReadList,
    ReadNewest,
    StreamKeys,
    queue_commands,
    read_reply,
    send_request,
    translate_errors,
)
from tidemark.sinks.redis.client import (
    STREAMS_KEY,
    RedisAddress,
    StreamFault,
    aclose,
    channel_pattern,
    check_answer,
    database_of,
    stream_of,
)

TIMEOUT_SECONDS = 2.0  # for a connection or an answer; then Postgres is queried instead
STREAMS_PER_TRANSACTION = 200  # a transaction blocks other Redis clients
REPLIES_PER_STREAM = 5  # the number of commands of `queue_commands`

RedisRequest = ReadKeys | ReadList | ReadNewest


class RedisReader:
    """Reads Redis, for one event loop. Methods raise `Unavailable` and `Refused`, and may be called again after an
    error.
    """

    def __init__(self, address: RedisAddress) -> None:
        """Create a client, which connects at its first use. Raises `BadSetting` if the address is invalid."""
        self.circuit_breaker = CircuitBreaker("Redis")
        self._reads: ReadCoalescer[RedisRequest, StreamKeys | Refused] = ReadCoalescer(self._read)
        self.client: Any = address.async_client(TIMEOUT_SECONDS)
        self._is_cluster = address.is_cluster
        self.where = address.where

    async def aclose(self) -> None:
        await aclose(self.client)

    async def ping(self) -> None:
        with self.circuit_breaker.guarding(), translate_errors(self.client):
            await self.client.ping()

    async def names(self) -> set[str]:
        """Read the names of all streams in Redis."""
        with self.circuit_breaker.guarding(), translate_errors(self.client):
            return set(await self.client.smembers(STREAMS_KEY))

    async def keys(self, streams: Collection[str]) -> dict[str, StreamKeys]:
        """Read the keys of each stream; the keys of one stream are read atomically. If Redis does not have a stream,
        its `StreamKeys.linear` is None. Leaves out streams whose keys have invalid content."""
        replies = await self._read([ReadKeys(name) for name in streams])
        return {request.stream: keys for request, keys in replies.items() if isinstance(keys, StreamKeys)}

    async def read(self, request: ReadList | ReadNewest) -> StreamKeys:
        """Read the keys of one stream, in one round trip with other concurrent requests. Raises `Refused` also if the
        keys of the stream have invalid content.
        """
        keys = (await self._reads.get([request]))[request]
        if isinstance(keys, Refused):
            raise keys
        return keys

    async def _read(self, keys: Collection[RedisRequest]) -> dict[RedisRequest, StreamKeys | Refused]:
        requests = list(keys)
        answers: dict[RedisRequest, StreamKeys | Refused] = {}
        with self.circuit_breaker.guarding(), translate_errors(self.client):
            for start in range(0, len(requests), STREAMS_PER_TRANSACTION):
                chunk = requests[start : start + STREAMS_PER_TRANSACTION]
                # A Cluster has no transactions across servers.
                replies = await (self._read_separately(chunk) if self._is_cluster else self._read_in_transaction(chunk))
                # Parse each chunk in this loop, so that other tasks run between chunks.
                answers |= {
                    request: self._parse_replies(request, reply) for request, reply in zip(chunk, replies, strict=True)
                }
        return answers

    def _parse_replies(self, request: RedisRequest, replies: Sequence[Any]) -> StreamKeys | Refused:
        try:
            answers = [check_answer(reply) for reply in replies]
        except StreamFault as fault:
            return Refused("Redis", self.where, f"stream {request.stream}: {fault}", REMEDIES.rights)
        try:
            return read_reply(request, answers)
        except ResponseError as fault:
            return Refused("Redis", self.where, str(fault), REMEDIES.rights)

    async def _read_in_transaction(self, requests: Sequence[RedisRequest]) -> list[Any]:
        pipe = self.client.pipeline(transaction=True)
        for request in requests:
            queue_commands(pipe, request)
        replies = await pipe.execute(raise_on_error=False)
        return [
            replies[number * REPLIES_PER_STREAM : (number + 1) * REPLIES_PER_STREAM] for number in range(len(requests))
        ]

    async def _read_separately(self, requests: Sequence[RedisRequest]) -> list[Any]:
        replies = await asyncio.gather(
            *(send_request(self.client, request) for request in requests), return_exceptions=True
        )
        return [[reply] if isinstance(reply, BaseException) else reply for reply in replies]


RECONNECT_SECONDS = 1.0  # less than the time-out of the client
MESSAGES_PER_ITERATION = 8  # of the event loop; a batch of the pipeline may send thousands of messages at once


async def listen(
    client: Any, subscribe: Callable[[Any], Awaitable[None]], receive: Callable[[Mapping[str, Any]], None]
) -> NoReturn:
    """Receive the messages of a pub/sub subscription without end. Connects again `RECONNECT_SECONDS` after an error of
    Redis. Messages that are published in between are lost. For one event loop. End the task with `cancel_until_done`.

    Args:
        client: a redis.asyncio client.
        subscribe: called with the pub/sub object of each new connection.
        receive: called with each message.
    """
    while True:
        with suppress(Unavailable, Stop), translate_errors(client):
            await client.initialize()  # a Cluster's client selects one of its nodes
            async with _subscription(client) as pubsub:
                await subscribe(pubsub)
                for number in itertools.count(1):
                    # No time-out, which would need most of the CPU at thousands of messages a second.
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=None)
                    if message is not None:
                        receive(message)
                    if number % MESSAGES_PER_ITERATION == 0:
                        await asyncio.sleep(0)  # `get_message` does not wait while messages are in its buffer
        await asyncio.sleep(RECONNECT_SECONDS)


@asynccontextmanager
async def _subscription(client: Any) -> AsyncIterator[Any]:
    async with client.pubsub() as pubsub:
        try:
            yield pubsub
        finally:
            # redis-py would not wait for the disconnection, and an end of the event loop would leave the socket open.
            if pubsub.connection is not None:
                with suppress(RedisError):
                    await pubsub.connection.disconnect()


class Notifications:
    """Receives the notifications of all streams, and wakes the tasks that wait for them. For one event loop."""

    def __init__(self, redis_reader: RedisReader) -> None:
        self._redis_reader = redis_reader
        # Weak references, so that requests for unknown streams do not fill the memory.
        self._event_by_stream: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        client = self._redis_reader.client
        pattern = channel_pattern(database_of(client))
        task = asyncio.create_task(listen(client, lambda pubsub: pubsub.psubscribe(pattern), self._receive))
        try:
            yield
        finally:
            await cancel_until_done(task)

    def next_event(self, stream: str) -> asyncio.Event:
        """Return an event that the stream's next notification sets. Call this method before a read, so that no
        notification is missed, and keep a reference to the event.
        """
        return self._event_by_stream.setdefault(stream, asyncio.Event())

    def _receive(self, message: Mapping[str, Any]) -> None:
        self.notify(stream_of(message["channel"]))

    def notify(self, stream: str) -> None:
        """Wake the tasks that wait for the stream."""
        waiting = self._event_by_stream.pop(stream, None)
        if waiting is not None:
            waiting.set()


async def wait_for_notification(notification: asyncio.Event, seconds: float) -> None:
    """Wait until `notification` is set, or for `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(notification.wait(), seconds)
