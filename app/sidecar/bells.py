"""Who waits for a stream is woken when its channel in Redis speaks. A hint: sleepers look by themselves as well.

One connection listens for the whole process. While Redis is away nobody is woken, and everybody looks once a second.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from tidemark.app.sidecar.ending import ended
from tidemark.app.sidecar.live import Live
from tidemark.app.sidecar.subscription import listen

CHANNELS = "tidemark:{*}"


class Bells:
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


async def slept(bell: asyncio.Event, seconds: float) -> None:
    """Return when it rings, or after `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(bell.wait(), seconds)
