"""What a request may use: the read side, encoded snapshots and changes, and the limits of requests that stay open."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest

from tidemark.app.diagnosis.reader_lag import ReaderStatus
from tidemark.app.read_side import ReadSide, metrics
from tidemark.app.read_side.single_flight import ReadCoalescer, cancel_until_done
from tidemark.app.serving.tls_listener import FairQueue, NoFreeSlot, SlotPool, network_of
from tidemark.app.sidecar.event_stream import SnapshotTexts
from tidemark.app.sidecar.problems import Busy
from tidemark.app.sidecar.watch import Watch
from tidemark.common.errors import Slow, Stop, Unavailable


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the sidecar.

    Attributes:
        open_requests: requests that may stay open at the same time.
        wait_seconds: seconds that one wait may last.
        streams: streams with metrics of their own.
    """

    open_requests: int = 2500
    wait_seconds: float = 60.0
    streams: int = 1000


class OpenRequest:
    """A request that stays open. `is_evicted`: its slot went to a client of another address, so it must end."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.is_evicted = False
        self._end = end

    def evict(self) -> None:
        self.is_evicted = True
        self._end()


def _nothing() -> None: ...


class Limiter:
    """The slots of requests that stay open: waits, event streams and watchers together, shared by address."""

    def __init__(self, limit: int) -> None:
        self._slots: SlotPool[OpenRequest] = SlotPool(limit)

    @contextmanager
    def one(self, operation: str, address: str, end: Callable[[], None] = _nothing) -> Iterator[OpenRequest]:
        """Hold a slot while the block runs. `end` is called if the request is evicted for another address.

        Raises `Busy` if every slot is taken and no request is evicted for this address.
        """
        request = OpenRequest(end)
        try:
            evicted = self._slots.take(request, address)
        except NoFreeSlot:
            raise Busy(
                f"{self._slots.limit} requests are open already, and this address has its share of them; ask"
                " another sidecar, or try again"
            ) from None
        if evicted is not None:
            metrics.GAVE_WAY.inc()
            evicted.evict()
        try:
            with metrics.OPEN.labels(operation).track_inprogress():
                yield request
        finally:
            self._slots.leave(request)


class StartQueue:
    """Bounds how many event streams start at once, with turns that go round by address. To start one costs as much as
    some requests, and thousands that start together would delay every client. For one event loop."""

    AT_ONCE = 32
    LONGEST = 0.25  # seconds: a client that does not read must not keep others from starting

    def __init__(self) -> None:
        self._starting = 0
        self._queue = FairQueue()

    async def turn(self, address: str) -> Callable[[], None]:
        """Return when it is the caller's turn, with a function that ends the turn. Call it when the stream has started
        or failed; it may be called again, and is called after `LONGEST`."""
        loop = asyncio.get_running_loop()
        if self._starting >= self.AT_ONCE:
            turn: asyncio.Future[None] = loop.create_future()
            self._queue.add(address, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        else:
            self._starting += 1
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
        while self._queue:
            if self._queue.start_next():
                return
        self._starting -= 1


class ReconnectThrottle:
    """Delays clients of an address from which very many event streams end soon after they began. Pure.

    To start an event stream costs as much as to send hundreds of events. Clients that stayed for longer than `YOUNG`
    seconds are not delayed, however many of them come back.
    """

    YOUNG = 1.0  # seconds
    FREE = 100  # young ends without a delay
    FORGIVEN = 5.0  # young ends a second
    EACH = 0.05  # seconds of delay for each young end beyond
    LONGEST = 1.0  # seconds
    ADDRESSES = 10_000

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends: dict[str, tuple[float, float]] = {}

    def pause(self, address: str) -> float:
        """The delay of a new client of this address, in seconds."""
        return min(self.LONGEST, max(0.0, self._count(network_of(address)) - self.FREE) * self.EACH)

    def stream_ended(self, address: str, began: float) -> None:
        """An event stream that `began` then has ended."""
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


class MetricsText:
    """The text of `/metrics`, which all requests that wait for it share. For one event loop.

    To write it takes long if there are many streams, and the requests have no slots. So a rest follows.
    """

    REST = 4  # the pause after writing the text, as a multiple of the time that it took
    FRESH = 10.0  # seconds for which a read position counts as current; followed streams are read once a second

    def __init__(self, read_side: ReadSide, streams: int) -> None:
        self._read_side = read_side
        self._streams = streams
        self._next = 0.0
        self._texts: ReadCoalescer[str, bytes] = ReadCoalescer(self._write)

    async def get(self) -> bytes:
        return (await self._texts.get([""]))[""]

    async def _write(self, _: Collection[str]) -> Mapping[str, bytes]:
        await asyncio.sleep(self._next - time.monotonic())
        read_side = self._read_side
        for server, reader in (("redis", read_side.redis_reader), ("postgres", read_side.postgres_reader)):
            metrics.UP.labels(server).set(reader.circuit_breaker.problem is None)
        readers: Sequence[ReaderStatus] = ()
        with suppress(Unavailable, Slow, Stop):
            readers = await read_side.stream_history.readers()
        began = time.monotonic()
        positions = sorted(read_side.snapshots.fresh(self.FRESH).items())
        metrics.LINE.clear()  # no await until they are set again
        for stream, position in positions[: self._streams]:
            metrics.LINE.labels(stream, "sidecar").set(position)
        metrics.READERS.show(readers[: self._streams])
        metrics.LINES_LEFT_OUT.set(len(positions[self._streams :]))
        text = generate_latest(metrics.REGISTRY)
        ended = time.monotonic()
        self._next = ended + self.REST * (ended - began)
        return {"": text}


@dataclass(frozen=True, slots=True)
class Service:
    """One per process, for one event loop."""

    read_side: ReadSide
    watch: Watch
    snapshot_texts: SnapshotTexts
    limiter: Limiter
    reconnect_throttle: ReconnectThrottle
    start_queue: StartQueue
    limits: Limits
    metrics_text: MetricsText
    stopping: asyncio.Event
    """Set when the process stops: open requests are answered then."""
    stopped: asyncio.Future[Any]
    """Done when `stopping` is set; for tasks that wait for several things."""


@asynccontextmanager
async def serving(read_side: ReadSide, limits: Limits, stopping: asyncio.Event) -> AsyncIterator[Service]:
    """The service on a read side that stays open for longer."""
    watch = Watch(read_side)
    stopped = asyncio.create_task(stopping.wait())
    try:
        async with watch.running():
            texts, limiter = SnapshotTexts(read_side.snapshots), Limiter(limits.open_requests)
            yield Service(
                read_side,
                watch,
                texts,
                limiter,
                ReconnectThrottle(),
                StartQueue(),
                limits,
                MetricsText(read_side, limits.streams),
                stopping,
                stopped,
            )
    finally:
        await cancel_until_done(stopped)
