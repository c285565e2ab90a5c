"""Notifications on the channels of Redis: they wake whoever waits for a stream, and are hints alone.

One connection listens for the whole process, and is made again whenever it is lost. While Redis is away nobody is
woken: whoever waits also reads once a second by itself.
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

PAUSE = 1.0  # seconds until a lost subscription is made again; less than the client's time-out


async def listen(
    client: Any, subscribe: Callable[[Any], Awaitable[None]], receive: Callable[[Mapping[str, Any]], None]
) -> NoReturn:
    """Call `subscribe` with redis-py's pub/sub of each connection, and `receive` with every message that comes.

    Messages that are published while Redis is away are lost. For one event loop; end it with
    `app.read_side.single_flight.cancel_until_done`.
    """
    while True:
        with suppress(Unavailable, Stop), translated(client):
            await client.initialize()  # a Cluster's client picks one of its nodes
            async with _subscription(client) as pubsub:
                await subscribe(pubsub)
                while True:
                    # Without a time-out, which would cost each of many thousands a second more than all the rest.
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
            # Its own end waits for nothing, and a loop that ends before the server has answered the end of TLS leaves
            # the socket open.
            if pubsub.connection is not None:
                with suppress(RedisError):
                    await pubsub.connection.disconnect()


class Notifications:
    """For one event loop."""

    def __init__(self, live: RedisReader) -> None:
        self._live = live
        # Weak: whoever asks for streams that do not exist must not fill the memory.
        self._waiting: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        client = self._live.client
        pattern = channels(database_of(client))
        task = asyncio.create_task(listen(client, lambda pubsub: pubsub.psubscribe(pattern), self._received))
        try:
            yield
        finally:
            await cancel_until_done(task)

    def next(self, stream: str) -> asyncio.Event:
        """Set at the next notification of the stream. Take it before you read, so that what comes meanwhile is not
        missed, and hold a reference to it."""
        return self._waiting.setdefault(stream, asyncio.Event())

    def _received(self, message: Mapping[str, Any]) -> None:
        self.notify(stream_of(message["channel"]))

    def notify(self, stream: str) -> None:
        """Wake whoever waits for the stream."""
        waiting = self._waiting.pop(stream, None)
        if waiting is not None:
            waiting.set()


async def wait_for_notification(notified: asyncio.Event, seconds: float) -> None:
    """Return when `notified` is set, or after `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(notified.wait(), seconds)
