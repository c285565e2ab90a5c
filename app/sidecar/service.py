"""What a request may use: the read side, what watchers see, and how many requests may be held open."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tidemark.app.read_side import metrics
from tidemark.app.read_side.opened import ReadSide
from tidemark.app.read_side.tasks import ended
from tidemark.app.sidecar.events_client import SnapshotTexts
from tidemark.app.sidecar.problems import Busy
from tidemark.app.sidecar.watch import Watch


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests may be held open at once, for how long one wait may last (s), and how many streams have series
    of their own in the metrics."""

    held: int = 2500
    wait: float = 60.0
    streams: int = 1000


class Limiter:
    """Counts the requests that are held open: waits, event streams and watchers together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0

    @contextmanager
    def one(self, operation: str) -> Iterator[None]:
        """Raises `Busy` where as many are open as may be."""
        if self._open >= self._most:
            raise Busy(f"{self._open} requests are held open already; ask another sidecar, or try again")
        self._open += 1
        try:
            with metrics.OPEN.labels(operation).track_inprogress():
                yield
        finally:
            self._open -= 1


@dataclass(frozen=True, slots=True)
class Service:
    """One per process, for one event loop."""

    read_side: ReadSide
    watch: Watch
    snapshot_texts: SnapshotTexts
    limiter: Limiter
    limits: Limits
    stopping: asyncio.Event
    """Set when the process ends: what is held open is answered then."""
    stopped: asyncio.Future[Any]
    """Done when that is set; for all who wait for it among other things."""


@asynccontextmanager
async def serving(read_side: ReadSide, limits: Limits, stopping: asyncio.Event) -> AsyncIterator[Service]:
    """The service on a read side that stays open for longer."""
    watch = Watch(read_side)
    stopped = asyncio.create_task(stopping.wait())
    try:
        async with watch.running():
            texts, limiter = SnapshotTexts(read_side.snapshots), Limiter(limits.held)
            yield Service(read_side, watch, texts, limiter, limits, stopping, stopped)
    finally:
        await ended(stopped)
