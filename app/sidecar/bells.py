"""Who waits for a stream is woken when its channel in Redis speaks. A hint: sleepers look by themselves as well.

One connection listens for the whole process. While Redis is away nobody is woken, and everybody looks once a second.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

from app.sidecar.ending import ended
from app.sidecar.live import Live
from sinks.reader.connection import translated
from streaming.errors import Stop, Unavailable

CHANNELS = "tidemark:{*}"
PAUSE = 1.0  # seconds until a lost subscription is made again; less than the client's time-out


class Bells:
    """For one event loop."""

    def __init__(self, live: Live) -> None:
        self._live = live
        # Weak: whoever asks for streams that do not exist must not fill the memory.
        self._bells: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            await ended(task)

    def bell(self, stream: str) -> asyncio.Event:
        """Set at the next hint. Take it before you look, so that what comes meanwhile is not missed, and keep it."""
        return self._bells.setdefault(stream, asyncio.Event())

    async def _listen(self) -> None:
        while True:
            with suppress(Unavailable, Stop), translated(self._live.client):
                await self._live.client.initialize()  # a Cluster's client picks one of its nodes
                async with self._live.client.pubsub() as hints:
                    await hints.psubscribe(CHANNELS)
                    while True:
                        hint = await hints.get_message(ignore_subscribe_messages=True, timeout=PAUSE)
                        if hint is not None:
                            self.ring(hint["channel"].removeprefix("tidemark:{").removesuffix("}"))
            await asyncio.sleep(PAUSE)

    def ring(self, stream: str) -> None:
        """Wake who waits for the stream."""
        bell = self._bells.pop(stream, None)
        if bell is not None:
            bell.set()


async def slept(bell: asyncio.Event, seconds: float) -> None:
    """Return when it rings, or after `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(bell.wait(), seconds)
