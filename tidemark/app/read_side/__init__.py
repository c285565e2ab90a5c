"""The read side: reads the published positions of streams once for all clients of this process.

The sidecar and the line protocol use the read side. Positions come from Redis, or from Postgres if Redis cannot be read
or does not know the stream. Postgres is also read to detect writes that Redis lacks.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidemark.app.read_side.fallback import RequestHandler
from tidemark.app.read_side.followers import Followers
from tidemark.app.read_side.postgres_reader import PostgresReader, StreamHistoryReader
from tidemark.app.read_side.redis_reader import Notifications, RedisReader
from tidemark.app.read_side.replay import ReplayReader
from tidemark.app.read_side.snapshots import AnsweredPositions, Snapshots
from tidemark.common.errors import Stop, Unavailable
from tidemark.common.postgres_session import Dsn
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader import History
from tidemark.sinks.redis.client import RedisAddress, redis_address


@dataclass(frozen=True, slots=True)
class ReadSideConfig:
    """The addresses of the servers, which may contain passwords.

    Attributes:
        redis: the address of Redis.
        postgres: the address of Tidemark's database.
        policy_defaults: the settings of streams without a policy (see `streaming.values.limits.Policies`).
        readers: the address of the database with the places of readers; None: Tidemark's database.
    """

    redis: str | RedisAddress = field(repr=False)
    postgres: Dsn = field(repr=False)
    policy_defaults: Mapping[str, int] = field(default_factory=dict)
    readers: Dsn | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ReadSide:
    """The shared readers of positions in this process, for one event loop."""

    redis_reader: RedisReader
    postgres_reader: PostgresReader
    snapshots: Snapshots
    notifications: Notifications
    request_handler: RequestHandler
    followers: Followers
    replay_reader: ReplayReader
    stream_history: StreamHistoryReader

    async def problems(self) -> list[str]:
        """Query Redis and Postgres. Returns a message for each server that does not answer, refuses this user, or has
        data that this version cannot read.
        """
        problems = []
        for check in (self.redis_reader.ping, self.postgres_reader.check):
            try:
                await check()
            except (Unavailable, Stop) as problem:
                problems.append(str(problem))
        return problems


@asynccontextmanager
async def open_read_side(config: ReadSideConfig) -> AsyncIterator[ReadSide]:
    """Open the read side for the duration of the block. Connects to Redis at once, and to Postgres at the first query.
    Servers may be down. Raises `BadSetting` if an address is invalid.
    """
    redis_reader = RedisReader(redis_address(config.redis))
    postgres = Postgres(PostgresConfig(config.postgres))
    history = History(config.postgres)
    postgres_reader = PostgresReader(postgres, history, config.policy_defaults)
    stream_history = StreamHistoryReader(config.postgres, config.readers)
    try:
        snapshots = Snapshots(redis_reader, postgres_reader, AnsweredPositions(), time.monotonic)
        notifications = Notifications(redis_reader)
        request_handler = RequestHandler(redis_reader, postgres_reader)
        followers = Followers(request_handler, notifications, snapshots, postgres_reader)
        async with notifications.listening(), followers.running():
            replay_reader = ReplayReader(request_handler, postgres_reader)
            yield ReadSide(
                redis_reader,
                postgres_reader,
                snapshots,
                notifications,
                request_handler,
                followers,
                replay_reader,
                stream_history,
            )
    finally:
        await redis_reader.aclose()
        await postgres_reader.aclose()
        await stream_history.aclose()
        postgres.close()
        history.close()
