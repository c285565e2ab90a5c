"""Redis, as the sidecar reads it: the positions of many streams in one round trip, and their names."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from tidemark.app.sidecar.fuse import Fuse
from tidemark.app.sidecar.gathered import Gathered
from tidemark.sinks.reader.asks import Glance, Look, Newest, Seen
from tidemark.sinks.reader.connection import translated
from tidemark.sinks.reader.keys import queue, reply, seen
from tidemark.sinks.redis import STREAMS
from tidemark.sinks.redis_address import RedisAddress, aclose

TIMEOUT = 2.0  # seconds for a connection or an answer: then Postgres is asked
TOGETHER = 200  # streams in one transaction: bounds how long other clients of Redis wait
Asked = Glance | Look | Newest
REPLIES = 5  # that `sinks.reader.keys.queue` asks for, for each stream


class Live:
    """For one event loop. Methods raise `Unavailable` and `Refused`; all may be called again."""

    def __init__(self, address: RedisAddress) -> None:
        """Raises `BadSetting`."""
        self.fuse = Fuse("Redis")
        self._looks: Gathered[Asked, Seen] = Gathered(self._look)
        self.client: Any = address.async_client(TIMEOUT)
        self._clustered = address.clustered

    async def aclose(self) -> None:
        await aclose(self.client)

    async def ping(self) -> None:
        with self.fuse.guarding(), translated(self.client):
            await self.client.ping()

    async def names(self) -> set[str]:
        """The streams that Redis knows."""
        with self.fuse.guarding(), translated(self.client):
            return set(await self.client.smembers(STREAMS))

    async def glances(self, streams: Collection[str]) -> dict[str, Seen]:
        """Each stream's keys as they were at one moment."""
        found = await self._look([Glance(name) for name in streams])
        return {ask.stream: told for ask, told in found.items()}

    async def look(self, ask: Look | Newest) -> Seen:
        """Together with what others ask for meanwhile."""
        return (await self._looks.get([ask]))[ask]

    async def _look(self, asked: Collection[Asked]) -> dict[Asked, Seen]:
        asks = list(asked)
        replies: list[Any] = []
        with self.fuse.guarding(), translated(self.client):
            for start in range(0, len(asks), TOGETHER):
                chunk = asks[start : start + TOGETHER]
                # A transaction in a Cluster is of one server.
                replies += await (self._each(chunk) if self._clustered else self._at_once(chunk))
            return {ask: seen(ask, found) for ask, found in zip(asks, replies, strict=True)}

    async def _at_once(self, asks: Sequence[Asked]) -> list[Any]:
        pipe = self.client.pipeline(transaction=True)
        for ask in asks:
            queue(pipe, ask)
        found = await pipe.execute()
        return [found[place * REPLIES : (place + 1) * REPLIES] for place in range(len(asks))]

    async def _each(self, asks: Sequence[Asked]) -> list[Any]:
        return await asyncio.gather(*(reply(self.client, ask) for ask in asks))
