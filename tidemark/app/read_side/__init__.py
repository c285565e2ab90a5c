"""The read side: what is published of every stream, read once for all clients of this process.

The sidecar and the line protocol stand on it. It reads Redis, and Postgres if Redis does not answer.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidemark.app.read_side.fallback import RequestHandler
from tidemark.app.read_side.followers import Followers
from tidemark.app.read_side.notifications import Notifications
from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.redis_reader import RedisReader
from tidemark.app.read_side.replay import Resumptions
from tidemark.app.read_side.snapshots import AnsweredPositions, Snapshots
from tidemark.common.errors import Stop, Unavailable
from tidemark.common.postgres_session import Dsn
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader import History
from tidemark.sinks.redis.client import RedisAddress, redis_address


@dataclass(frozen=True, slots=True)
class ReadSideConfig:
    """Addresses, which may hold passwords."""

    redis: str | RedisAddress = field(repr=False)
    postgres: Dsn = field(repr=False)
    policy_defaults: Mapping[str, int] = field(default_factory=dict)
    """Of streams without a policy: see `streaming.values.policies`."""


@dataclass(frozen=True, slots=True)
class ReadSide:
    """For one event loop; shared by everything in the process that reads positions."""

    live: RedisReader
    durable: PostgresReader
    snapshots: Snapshots
    notifications: Notifications
    requests: RequestHandler
    feeds: Followers
    resumptions: Resumptions

    async def problems(self) -> list[str]:
        """Ask Redis and Postgres; a text for each that does not answer, or refuses us."""
        problems = []
        for ask in (self.live.ping, self.durable.check):
            try:
                await ask()
            except (Unavailable, Stop) as problem:
                problems.append(str(problem))
        return problems


@asynccontextmanager
async def open_read_side(config: ReadSideConfig) -> AsyncIterator[ReadSide]:
    """Raises `BadSetting`. No server is asked before somebody reads."""
    live = RedisReader(redis_address(config.redis))
    postgres = Postgres(PostgresConfig(config.postgres))
    history = History(config.postgres)
    durable = PostgresReader(postgres, history, config.policy_defaults)
    try:
        snapshots = Snapshots(live, durable, AnsweredPositions(), time.monotonic)
        notifications = Notifications(live)
        requests = RequestHandler(live, durable)
        feeds = Followers(requests, notifications, snapshots, durable)
        async with notifications.listening(), feeds.running():
            resumptions = Resumptions(requests, durable)
            yield ReadSide(live, durable, snapshots, notifications, requests, feeds, resumptions)
    finally:
        await live.aclose()
        await durable.aclose()
        postgres.close()
        history.close()
