"""Redis, as the sidecar reads it: the positions of many streams in one round trip, and their names."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from tidemark.app.read_side.circuit_breaker import CircuitBreaker
from tidemark.app.read_side.coalescer import Coalescer
from tidemark.sinks.reader.io import KeysFound, ReadKeys, ReadList, ReadNewest
from tidemark.sinks.reader.redis import queue, reply, seen, translated
from tidemark.sinks.redis.client import RedisAddress, aclose
from tidemark.sinks.redis.publish import STREAMS

TIMEOUT = 2.0  # seconds for a connection or an answer: then Postgres is asked
TOGETHER = 200  # streams in one transaction: bounds how long other clients of Redis wait
Asked = ReadKeys | ReadList | ReadNewest
REPLIES = 5  # that `sinks.reader.redis.queue` asks for, for each stream


class Live:
    """For one event loop. Methods raise `Unavailable` and `Refused`; all may be called again."""

    def __init__(self, address: RedisAddress) -> None:
        """Raises `BadSetting`."""
        self.fuse = CircuitBreaker("Redis")
        self._looks: Coalescer[Asked, KeysFound] = Coalescer(self._look)
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

    async def glances(self, streams: Collection[str]) -> dict[str, KeysFound]:
        """Each stream's keys as they were at one moment."""
        found = await self._look([ReadKeys(name) for name in streams])
        return {ask.stream: told for ask, told in found.items()}

    async def look(self, ask: ReadList | ReadNewest) -> KeysFound:
        """Together with what others ask for meanwhile."""
        return (await self._looks.get([ask]))[ask]

    async def _look(self, asked: Collection[Asked]) -> dict[Asked, KeysFound]:
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
