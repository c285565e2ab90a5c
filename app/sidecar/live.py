"""Redis, as the sidecar reads it: the positions of many streams in one round trip, and their names."""

from collections.abc import Collection
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from app.sidecar.fuse import Fuse
from app.sidecar.gathered import Gathered
from sinks.reader.asks import Glance, Look, Newest, Seen
from sinks.reader.connection import bad_address, translated
from sinks.reader.keys import queue, seen
from sinks.redis import STREAMS

TIMEOUT = 2.0  # seconds for a connection or an answer: then Postgres is asked
TOGETHER = 200  # streams in one transaction: bounds how long other clients of Redis wait
Asked = Glance | Look | Newest
REPLIES = 5  # that `sinks.reader.keys.queue` asks for, for each stream


class Live:
    """For one event loop. Methods raise `Unavailable` and `Refused`; all may be called again."""

    def __init__(self, url: str) -> None:
        self.fuse = Fuse("Redis")
        self._looks: Gathered[Asked, Seen] = Gathered(self._look)
        try:
            self.client: Any = redis.asyncio.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=TIMEOUT,
                socket_connect_timeout=TIMEOUT,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:
            raise bad_address() from None

    async def aclose(self) -> None:
        await self.client.aclose()

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
        found: dict[Asked, Seen] = {}
        with self.fuse.guarding(), translated(self.client):
            for start in range(0, len(asks), TOGETHER):
                chunk = asks[start : start + TOGETHER]
                pipe = self.client.pipeline(transaction=True)
                for ask in chunk:
                    queue(pipe, ask)
                replies = await pipe.execute()
                for place, ask in enumerate(chunk):
                    found[ask] = seen(ask, replies[place * REPLIES : (place + 1) * REPLIES])
        return found
