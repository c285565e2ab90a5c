"""Listening to channels of Redis for as long as the process lives, through every loss of the connection.

Who waits for a stream is woken when its channel in Redis speaks. A hint: sleepers look by themselves as well.

One connection listens for the whole process. While Redis is away nobody is woken, and everybody looks once a second.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from tidemark.app.read_side.live import Live
from tidemark.app.read_side.tasks import ended
from tidemark.sinks.reader.redis import translated
from tidemark.streaming.errors import Stop, Unavailable

PAUSE = 1.0  # seconds until a lost subscription is made again; less than the client's time-out


async def listen(
    client: Any, subscribe: Callable[[Any], Awaitable[None]], hear: Callable[[Mapping[str, Any]], None]
) -> NoReturn:
    """Call `subscribe` with redis-py's pub/sub of each connection, and `hear` with every message that comes.

    What is said while Redis is away is lost. For one event loop; end it with `app.read_side.tasks.ended`.
    """
    while True:
        with suppress(Unavailable, Stop), translated(client):
            await client.initialize()  # a Cluster's client picks one of its nodes
            async with client.pubsub() as heard:
                await subscribe(heard)
                while True:
                    message = await heard.get_message(ignore_subscribe_messages=True, timeout=PAUSE)
                    if message is not None:
                        hear(message)
        await asyncio.sleep(PAUSE)


CHANNELS = "tidemark:{*}"


class Notifications:
    """For one event loop."""

    def __init__(self, live: Live) -> None:
        self._live = live
        # Weak: whoever asks for streams that do not exist must not fill the memory.
        self._bells: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        task = asyncio.create_task(listen(self._live.client, lambda hints: hints.psubscribe(CHANNELS), self._heard))
        try:
            yield
        finally:
            await ended(task)

    def bell(self, stream: str) -> asyncio.Event:
        """Set at the next hint. Take it before you look, so that what comes meanwhile is not missed, and keep it."""
        return self._bells.setdefault(stream, asyncio.Event())

    def _heard(self, hint: Mapping[str, Any]) -> None:
        self.ring(hint["channel"].removeprefix("tidemark:{").removesuffix("}"))

    def ring(self, stream: str) -> None:
        """Wake who waits for the stream."""
        bell = self._bells.pop(stream, None)
        if bell is not None:
            bell.set()


async def wait_for_hint(bell: asyncio.Event, seconds: float) -> None:
    """Return when it rings, or after `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(bell.wait(), seconds)
