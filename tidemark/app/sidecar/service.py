"""The objects that requests share: the read side, encoded texts, and the limits of long-running requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from prometheus_client import generate_latest

from tidemark.app.diagnosis.reader_lag import ReaderStatus
from tidemark.app.read_side import ReadSide, metrics
from tidemark.app.read_side.single_flight import ReadCoalescer
from tidemark.app.serving.tls_listener import FairQueue, NoFreeSlot, SlotPool, network_of
from tidemark.app.sidecar.answers import Busy
from tidemark.app.sidecar.event_stream import SnapshotTexts
from tidemark.app.sidecar.watch import Watch
from tidemark.common.errors import Slow, Stop, Unavailable
from tidemark.common.tasks import cancel_until_done

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the sidecar.

    Attributes:
        open_requests: the largest number of concurrent waits, event streams and watchers together.
        wait_seconds: the longest wait for a token. Longer time-outs of clients are reduced to this limit.
        metrics_streams: the largest number of streams, and also of readers, that have series in `/metrics`.
    """

    open_requests: int = 2500
    wait_seconds: float = 60.0
    metrics_streams: int = 1000


class OpenRequest:
    """A long-running request. If `is_evicted`, a client of another address got the slot, and the request must end."""

    def __init__(self, on_evicted: Callable[[], None]) -> None:
        self.is_evicted = False
        self._on_evicted = on_evicted

    def evict(self) -> None:
        self.is_evicted = True
        self._on_evicted()


def _do_nothing() -> None: ...


class OpenRequestSlots:
    """A pool of slots for long-running requests: waits, event streams and watchers. The slots are shared fairly by
    client address (`SlotPool`).
    """

    def __init__(self, limit: int) -> None:
        self._slots: SlotPool[OpenRequest] = SlotPool(limit)

    @contextmanager
    def take_slot(
        self, operation: str, address: str, on_evicted: Callable[[], None] = _do_nothing
    ) -> Iterator[OpenRequest]:
        """Take a slot for the duration of the block. May evict an open request of another address.

        Args:
            operation: the name of the operation, for the metrics.
            address: the address of the client.
            on_evicted: called if the slot goes to a client of another address.

        Yields:
            The open request. The caller must end it if `is_evicted` becomes true.

        Raises:
            Busy: every slot is taken, and no open request is evicted for this address.
        """
        request = OpenRequest(on_evicted)
        try:
            evicted = self._slots.take(request, address)
        except NoFreeSlot:
            raise Busy(
                f"all {self._slots.limit} slots for open requests are taken, and no other client has to give up its"
                " slot; ask another sidecar, or try again"
            ) from None
        if evicted is not None:
            metrics.EVICTED_REQUESTS.inc()
            evicted.evict()
        try:
            with metrics.REQUESTS_IN_FLIGHT.labels(operation).track_inprogress():
                yield request
        finally:
            self._slots.release(request)


class StartQueue:
    """Limits the number of event streams that start at the same time. Further event streams wait, and start
    round-robin by address. The start of an event stream costs as much as several requests, so thousands of
    simultaneous starts would delay every client. For one event loop."""

    MAX_STARTING = 32
    MAX_START_SECONDS = 0.25  # a client that does not read must not block the starts of other clients

    def __init__(self) -> None:
        self._starting_count = 0
        self._queue = FairQueue()

    async def wait_for_start(self, address: str) -> Callable[[], None]:
        """Wait until an event stream of a client at `address` may start.

        Returns:
            A function that lets the next event stream start. The caller must call the function when its own event
            stream has started or failed. The queue calls the function after `MAX_START_SECONDS`. Only the first call
            has an effect.
        """
        loop = asyncio.get_running_loop()
        if self._starting_count >= self.MAX_STARTING:
            start: asyncio.Future[None] = loop.create_future()
            self._queue.add(address, start)
            try:
                await start
            except asyncio.CancelledError:
                if start.done() and not start.cancelled():
                    self._start_next()
                raise
        else:
            self._starting_count += 1
        has_started = False

        def on_started() -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                timer.cancel()
                self._start_next()

        timer = loop.call_later(self.MAX_START_SECONDS, on_started)
        return on_started

    def _start_next(self) -> None:
        while self._queue:
            if self._queue.start_next():
                return
        self._starting_count -= 1


class WakeQueue:
    """Wakes the tasks of event streams in small groups, round-robin by address. Between two groups the event loop
    handles requests, which would otherwise wait until every event stream has sent its events. For one event loop."""

    GROUP_SIZE = 2

    def __init__(self) -> None:
        self._queue = FairQueue()

    def add(self, address: str, waiter: "asyncio.Future[None]") -> None:
        """Complete `waiter` when the turn of the client at `address` comes."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._wake_group)
        self._queue.add(address, waiter)

    async def wait_for_turn(self, address: str) -> None:
        """Wait until it is the turn of a client at `address`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.add(address, turn)
        await turn

    def _wake_group(self) -> None:
        woken = 0
        while self._queue and woken < self.GROUP_SIZE:
            woken += self._queue.start_next()
        if self._queue:
            asyncio.get_running_loop().call_soon(self._wake_group)


class LargeRequestThrottle:
    """Parses the large parameters of an address one after the other, with pauses, so that one client cannot keep the
    event loop busy. For one event loop."""

    LARGE_CHARACTERS = 16_384
    PAUSE_FACTOR = 6  # the pause after parsing, as a multiple of the duration

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def parse(self, address: str, text: str, parse: Callable[[str], T]) -> T:
        """Call `parse(text)` for a client at `address`. Returns its result, or raises its error.

        If `text` has `LARGE_CHARACTERS` characters or more, first waits for other large texts of the address, and
        pauses before it returns."""
        if len(text) < self.LARGE_CHARACTERS:
            return parse(text)
        lock = self._locks.setdefault(network_of(address), asyncio.Lock())
        async with lock:
            began = time.monotonic()
            try:
                return parse(text)
            finally:
                await asyncio.sleep(self.PAUSE_FACTOR * (time.monotonic() - began))


class ReconnectThrottle:
    """Computes how long a new event stream is delayed, if many event streams of its address ended soon after their
    start.

    The start of an event stream costs as much as hundreds of events. Only event streams shorter than
    `SHORT_LIVED_SECONDS` count, so clients that reconnect after a long event stream are not delayed.
    """

    SHORT_LIVED_SECONDS = 1.0
    RECONNECTS_WITHOUT_DELAY = 100  # short event streams of an address
    FORGOTTEN_PER_SECOND = 5.0  # how much the count of an address falls in a second
    DELAY_SECONDS = 0.05  # for each short event stream beyond `RECONNECTS_WITHOUT_DELAY`
    MAX_DELAY_SECONDS = 1.0
    MAX_ADDRESSES = 10_000

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._count_by_network: dict[str, tuple[float, float]] = {}  # by network: the count, and the time of the count

    def delay_seconds(self, address: str) -> float:
        """The delay of a new event stream of a client at `address`; 0 if there is no delay."""
        excess = max(0.0, self._count(network_of(address)) - self.RECONNECTS_WITHOUT_DELAY)
        return min(self.MAX_DELAY_SECONDS, excess * self.DELAY_SECONDS)

    def count_ended_stream(self, address: str, began_at: float) -> None:
        """Count an event stream that ends now, if it was short. `began_at`: when it began (seconds, monotonic)."""
        now, address = self._now(), network_of(address)
        if now - began_at >= self.SHORT_LIVED_SECONDS:
            return
        count = min(
            self._count(address) + 1, self.RECONNECTS_WITHOUT_DELAY + self.MAX_DELAY_SECONDS / self.DELAY_SECONDS
        )
        self._count_by_network.pop(address, None)
        self._count_by_network[address] = count, now
        if len(self._count_by_network) > self.MAX_ADDRESSES:
            del self._count_by_network[next(iter(self._count_by_network))]

    def _count(self, address: str) -> float:
        count, counted_at = self._count_by_network.get(address, (0.0, 0.0))
        return max(0.0, count - (self._now() - counted_at) * self.FORGOTTEN_PER_SECOND)


class MetricsText:
    """The text of `/metrics`, shared by concurrent requests. For one event loop.

    If there are many streams, generating the text takes long. The number of requests for `/metrics` is not limited, so
    a pause follows each generation.
    """

    PAUSE_FACTOR = 4  # the pause after generating the text, as a multiple of the duration
    FRESH_SECONDS = 10.0  # positions that were read longer ago have no series

    def __init__(self, read_side: ReadSide, max_streams: int) -> None:
        self._read_side = read_side
        self._max_streams = max_streams
        self._next_generation_at = 0.0
        self._texts: ReadCoalescer[str, bytes] = ReadCoalescer(self._generate)

    async def get(self) -> bytes:
        """Wait for a text that is generated after this call."""
        return (await self._texts.get([""]))[""]

    async def _generate(self, _: Collection[str]) -> Mapping[str, bytes]:
        await asyncio.sleep(self._next_generation_at - time.monotonic())
        read_side = self._read_side
        for server, reader in (("redis", read_side.redis_reader), ("postgres", read_side.postgres_reader)):
            metrics.SERVER_UP.labels(server).set(reader.circuit_breaker.problem is None)
        readers: Sequence[ReaderStatus] = ()
        with suppress(Unavailable, Slow, Stop):
            readers = await read_side.stream_history.readers()
        began = time.monotonic()
        positions = sorted(read_side.snapshots.recent_linear_positions(self.FRESH_SECONDS).items())
        metrics.LINEAR_POSITION.clear()  # no await before the new series are set
        for stream, position in positions[: self._max_streams]:
            metrics.LINEAR_POSITION.labels(stream, "sidecar").set(position)
        metrics.READERS.show(readers[: self._max_streams])
        metrics.STREAMS_OMITTED.set(len(positions[self._max_streams :]))
        text = generate_latest(metrics.REGISTRY)
        ended = time.monotonic()
        self._next_generation_at = ended + self.PAUSE_FACTOR * (ended - began)
        return {"": text}


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that all requests of a process share, for one event loop."""

    read_side: ReadSide
    watch: Watch
    snapshot_texts: SnapshotTexts
    open_request_slots: OpenRequestSlots
    reconnect_throttle: ReconnectThrottle
    start_queue: StartQueue
    wake_queue: WakeQueue
    large_request_throttle: LargeRequestThrottle
    limits: Limits
    metrics_text: MetricsText
    stopping: asyncio.Event
    """Set when the process stops. Long-running requests then end."""
    stop_signal: asyncio.Future[Any]
    """Done when `stopping` is set; for `asyncio.wait`."""


@asynccontextmanager
async def open_service(read_side: ReadSide, limits: Limits, stopping: asyncio.Event) -> AsyncIterator[Service]:
    """Create the service for the duration of the block, and run the rounds of its `Watch`.

    Args:
        read_side: the source of positions. It must stay open during the block.
        limits: the limits of long-running requests and of metrics.
        stopping: when this event is set, long-running requests end.
    """
    watch = Watch(read_side)
    stop_signal = asyncio.create_task(stopping.wait())
    try:
        async with watch.running():
            texts, open_request_slots = SnapshotTexts(read_side.snapshots), OpenRequestSlots(limits.open_requests)
            yield Service(
                read_side,
                watch,
                texts,
                open_request_slots,
                ReconnectThrottle(),
                StartQueue(),
                WakeQueue(),
                LargeRequestThrottle(),
                limits,
                MetricsText(read_side, limits.metrics_streams),
                stopping,
                stop_signal,
            )
    finally:
        await cancel_until_done(stop_signal)
