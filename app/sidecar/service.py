"""What a request may use, put together once per process."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidemark.app.read_side.durable import Durable
from tidemark.app.read_side.feeds import Feeds
from tidemark.app.read_side.live import Live
from tidemark.app.read_side.notifications import Notifications
from tidemark.app.read_side.program import Hands
from tidemark.app.read_side.snapshots import Highest, Snapshots
from tidemark.app.sidecar import answers
from tidemark.app.sidecar.limiter import Limiter
from tidemark.app.sidecar.watch import Watch
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader.history import History
from tidemark.sinks.redis.client import RedisAddress, redis_address
from tidemark.streaming.errors import Stop, Unavailable
from tidemark.streaming.postgres_session import Dsn


@dataclass(frozen=True, slots=True)
class SidecarServers:
    """Addresses, which may hold passwords."""

    redis: str | RedisAddress = field(repr=False)
    postgres: Dsn = field(repr=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests may be held open at once, and for how long one wait may last (s)."""

    held: int = 2500
    wait: float = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    live: Live
    durable: Durable
    highest: Highest
    snapshots: Snapshots
    bells: Notifications
    hands: Hands
    feeds: Feeds
    watch: Watch
    held: Limiter
    longest_wait: float

    async def health(self) -> answers.Health:
        """Ask both servers. Ready while one of them answers."""
        problems = []
        for ask in (self.live.ping, self.durable.check):
            try:
                await ask()
            except (Unavailable, Stop) as problem:
                problems.append(str(problem))
        return answers.Health(ready=len(problems) < 2, problems=problems)


@asynccontextmanager
async def opened(servers: SidecarServers, limits: Limits) -> AsyncIterator[Service]:
    """Raises `BadSetting`. No server is asked before the first request."""
    live = Live(redis_address(servers.redis))
    postgres = Postgres(PostgresConfig(servers.postgres))
    history = History(servers.postgres)
    durable = Durable(postgres, history)
    try:
        highest = Highest()
        snapshots = Snapshots(live, durable, highest, time.monotonic)
        bells = Notifications(live)
        hands = Hands(live, durable)
        feeds = Feeds(hands, bells, snapshots)
        watch = Watch(live, durable, snapshots)
        async with bells.listening(), feeds.running(), watch.running():
            yield Service(
                live, durable, highest, snapshots, bells, hands, feeds, watch, Limiter(limits.held), limits.wait
            )
    finally:
        await live.aclose()
        await durable.aclose()
        postgres.close()
        history.close()
