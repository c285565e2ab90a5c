"""What a request may use, put together once per process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from app.sidecar import answers
from app.sidecar.durable import Durable
from app.sidecar.highest import Highest
from app.sidecar.live import Live
from app.sidecar.snapshots import Snapshots
from sinks.postgres import Postgres, PostgresConfig
from sinks.reader.history import History
from streaming.errors import Stop, Unavailable


@dataclass(frozen=True, slots=True)
class Servers:
    """Addresses, which may hold passwords."""

    redis: str = field(repr=False)
    postgres: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Service:
    live: Live
    durable: Durable
    highest: Highest
    snapshots: Snapshots

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
async def opened(servers: Servers) -> AsyncIterator[Service]:
    """Raises `Stop` where a server answers and refuses us: at the start, rather than at the first request."""
    live = Live(servers.redis)
    postgres = Postgres(PostgresConfig(servers.postgres))
    history = History(servers.postgres)
    try:
        durable = Durable(postgres, history)
        highest = Highest()
        yield Service(live, durable, highest, Snapshots(live, durable, highest, time.monotonic))
    finally:
        await live.aclose()
        postgres.close()
        history.close()
