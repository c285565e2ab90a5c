"""Notifications on the channels of Redis. They wake tasks that wait for a stream, and are only hints.

One connection listens for the whole process, and is opened again when it is lost. While Redis is down no task is woken:
each task also reads once a second.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from redis.exceptions import RedisError

from tidemark.app.read_side.redis_reader import RedisReader
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.common.errors import Stop, Unavailable
from tidemark.sinks.reader import translated
from tidemark.sinks.redis.client import channels, database_of, stream_of

PAUSE = 1.0  # seconds until a lost subscription is opened again; less than the time-out of the client


async def listen(
    client: Any, subscribe: Callable[[Any], Awaitable[None]], receive: Callable[[Mapping[str, Any]], None]
) -> NoReturn:
    """Call `subscribe` with the pub/sub object of each connection, and `receive` with every message.

    Messages that are published while Redis is down are lost. For one event loop; end the task with `cancel_until_done`.
    """
    while True:
        with suppress(Unavailable, Stop), translated(client):
            await client.initialize()  # the client of a Cluster picks one of its nodes
            async with _subscription(client) as pubsub:
                await subscribe(pubsub)
                while True:
                    # Without a time-out: for many thousand messages a second it would cost more than all the rest.
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=None)
                    if message is not None:
                        receive(message)
        await asyncio.sleep(PAUSE)


@asynccontextmanager
async def _subscription(client: Any) -> AsyncIterator[Any]:
    async with client.pubsub() as pubsub:
        try:
            yield pubsub
        finally:
            # redis-py does not wait here. An event loop that ends before TLS is closed would leave the socket open.
            if pubsub.connection is not None:
                with suppress(RedisError):
                    await pubsub.connection.disconnect()


class Notifications:
    """For one event loop."""

    def __init__(self, redis_reader: RedisReader) -> None:
        self._redis_reader = redis_reader
        # Weak: requests for streams that do not exist must not fill the memory.
        self._waiting: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        client = self._redis_reader.client
        pattern = channels(database_of(client))
        task = asyncio.create_task(listen(client, lambda pubsub: pubsub.psubscribe(pattern), self._received))
        try:
            yield
        finally:
            await cancel_until_done(task)

    def next(self, stream: str) -> asyncio.Event:
        """The event of the next notification of the stream. Take it before you read, so that a notification meanwhile
        is not missed, and keep a reference to it."""
        return self._waiting.setdefault(stream, asyncio.Event())

    def _received(self, message: Mapping[str, Any]) -> None:
        self.notify(stream_of(message["channel"]))

    def notify(self, stream: str) -> None:
        """Wake the tasks that wait for the stream."""
        waiting = self._waiting.pop(stream, None)
        if waiting is not None:
            waiting.set()


async def wait_for_notification(notified: asyncio.Event, seconds: float) -> None:
    """Return when `notified` is set, or after `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(notified.wait(), seconds)
