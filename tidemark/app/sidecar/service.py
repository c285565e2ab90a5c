"""What a request may use: the read side, what watchers see, how many requests may be held open, and who has to wait
before one is."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tidemark.app.eviction import NoFreeSlot, SlotPool, network_of
from tidemark.app.read_side import ReadSide, metrics
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.app.sidecar.event_stream import SnapshotTexts
from tidemark.app.sidecar.problems import Busy
from tidemark.app.sidecar.watch import Watch


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests may be held open at once, for how long one wait may last (s), and how many streams have series
    of their own in the metrics."""

    held: int = 2500
    wait: float = 60.0
    streams: int = 1000


class OpenRequest:
    """One request that is held open. `gave_way`: its place went to a client of another address, so it must end."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.gave_way = False
        self._end = end

    def give_way(self) -> None:
        self.gave_way = True
        self._end()


def _nothing() -> None: ...


class Limiter:
    """The places of requests that are held open: waits, event streams and watchers together, shared by address."""

    def __init__(self, most: int) -> None:
        self._places: SlotPool[OpenRequest] = SlotPool(most)

    @contextmanager
    def one(self, operation: str, address: str, end: Callable[[], None] = _nothing) -> Iterator[OpenRequest]:
        """Hold a place while the block runs; `end` is called if the request has to give way to another address.

        Raises `Busy` if all places are taken and nobody gives way to this address.
        """
        held = OpenRequest(end)
        try:
            displaced = self._places.take(held, address)
        except NoFreeSlot:
            raise Busy(
                f"{self._places.most} requests are held open already, and this address has its share of them; ask"
                " another sidecar, or try again"
            ) from None
        if displaced is not None:
            metrics.GAVE_WAY.inc()
            displaced.give_way()
        try:
            with metrics.OPEN.labels(operation).track_inprogress():
                yield held
        finally:
            self._places.leave(held)


class StartQueue:
    """How many streams of events begin at once, with turns that go round by address: to begin one costs as much as to
    answer some requests, and thousands that begin together would delay everybody. For one event loop."""

    AT_ONCE = 32
    LONGEST = 0.25  # seconds: whoever does not read must not keep others from beginning

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def turn(self, address: str) -> Callable[[], None]:
        """Return when it is the caller's turn, with what ends the turn: to be called when the stream has begun, or
        cannot; it may be called again, and is after `LONGEST`."""
        loop = asyncio.get_running_loop()
        if self._begun >= self.AT_ONCE:
            mine: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(network_of(address), deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._next()
                raise
        else:
            self._begun += 1
        done = False

        def end() -> None:
            nonlocal done
            if not done:
                done = True
                timer.cancel()
                self._next()

        timer = loop.call_later(self.LONGEST, end)
        return end

    def _next(self) -> None:
        while self._waiting:
            network, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[network] = turns
            if not turn.done():  # a client that waited may be gone
                turn.set_result(None)
                return
        self._begun -= 1


class ReconnectThrottle:
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
        return min(self.LONGEST, max(0.0, self._count(network_of(address)) - self.FREE) * self.EACH)

    def ended(self, address: str, began: float) -> None:
        """A stream of events that `began` then."""
        now, address = self._now(), network_of(address)
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
    churn: ReconnectThrottle
    beginnings: StartQueue
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
            yield Service(
                read_side, watch, texts, limiter, ReconnectThrottle(), StartQueue(), limits, stopping, stopped
            )
    finally:
        await cancel_until_done(stopped)
