"""What a request may use: the read side, what watchers see, how many requests may be held open, and who has to wait
before one is."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tidemark.app.read_side import metrics
from tidemark.app.read_side.opened import ReadSide
from tidemark.app.read_side.tasks import ended
from tidemark.app.sidecar.event_texts import SnapshotTexts
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


class Churn:
    """How much clients come and go, by address. To begin a stream of events costs as much as to hear hundreds, so where
    very many end young, whoever comes next from there waits a little. Whoever is there already, or stayed for longer
    than `YOUNG`, however many they are that come back, has nothing to do with it. Pure."""

    YOUNG = 1.0  # seconds
    FREE = 100  # young ends that cost nothing
    FORGIVEN = 5.0  # a second
    EACH = 0.05  # seconds to wait, for each beyond
    LONGEST = 1.0  # seconds
    ADDRESSES = 10_000

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends: dict[str, tuple[float, float]] = {}

    def pause(self, address: str) -> float:
        """Seconds that who comes now waits."""
        return min(self.LONGEST, max(0.0, self._count(address) - self.FREE) * self.EACH)

    def ended(self, address: str, began: float) -> None:
        """A stream of events that `began` then."""
        now = self._now()
        if now - began >= self.YOUNG:
            return
        count = min(self._count(address) + 1, self.FREE + self.LONGEST / self.EACH)
        self._ends.pop(address, None)
        self._ends[address] = count, now
        if len(self._ends) > self.ADDRESSES:
            del self._ends[next(iter(self._ends))]

    def _count(self, address: str) -> float:
        count, at = self._ends.get(address, (0.0, 0.0))
        return max(0.0, count - (self._now() - at) * self.FORGIVEN)


@dataclass(frozen=True, slots=True)
class Service:
    """One per process, for one event loop."""

    read_side: ReadSide
    watch: Watch
    snapshot_texts: SnapshotTexts
    limiter: Limiter
    churn: Churn
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
            yield Service(read_side, watch, texts, limiter, Churn(), limits, stopping, stopped)
    finally:
        await ended(stopped)
