"""One follower per stream for everybody who listens: what moves a stream is read once and handed to all.

A follower runs while somebody listens to its stream. It never waits for a listener: one that does not take what it is
given is cut off, and goes on later from where it stood.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import structlog

from app.sidecar.bells import Bells, slept
from app.sidecar.program import Hands
from app.sidecar.snapshots import Snapshots
from sinks.reader.asks import Answer, Ask, Doorbell, Look, Recall
from sinks.reader.driver import Driver
from sinks.reader.events import Event
from sinks.reader.following import CaughtUp, Following
from sinks.reader.order import beyond
from sinks.reader.place import Place
from streaming.errors import Refused, SchemaMismatch, Unavailable

log = structlog.get_logger(__name__)

BUFFER = 20_000  # items that a listener may be behind
DISCOVER_EVERY = 1.0  # seconds between looks for new streams


@dataclass(frozen=True, slots=True)
class Begun:
    """The follower stands at `place`, and all that comes now goes on from there."""

    place: Place


@dataclass(frozen=True, slots=True)
class Line:
    """The linear position is at `linear`, after all events before this item."""

    linear: int


@dataclass(frozen=True, slots=True)
class Appeared:
    """A stream that was not there when the listener came."""


Item = Event | Begun | Line | Appeared


@dataclass(slots=True, eq=False)
class Listener:
    """`cut_off` is set when it was too slow: nothing more comes then."""

    items: asyncio.Queue[tuple[str, Item]] = field(default_factory=lambda: asyncio.Queue(BUFFER))
    cut_off: asyncio.Event = field(default_factory=asyncio.Event)

    def give(self, stream: str, item: Item) -> None:
        try:
            self.items.put_nowait((stream, item))
        except asyncio.QueueFull:
            self.cut_off.set()


class Feed:
    """Follows one stream for its `listeners`."""

    def __init__(self, stream: str, hands: Hands, bells: Bells) -> None:
        self.listeners: set[Listener] = set()
        self._stream = stream
        self._hands = hands
        self._bells = bells
        self._bell = bells.bell(stream)
        self._following = Following(stream, "vector", None)
        self._linear: int | None = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def add(self, listener: Listener) -> None:
        if self._linear is not None and self._following.place is not None:
            listener.give(self._stream, Begun(self._following.place))
        self.listeners.add(listener)

    def stop(self) -> None:
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Listeners must not take a follower that broke for a stream that is quiet."""
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("Following a stream broke off", stream=self._stream, problem=repr(problem))
            for listener in self.listeners:
                listener.cut_off.set()

    async def _run(self) -> None:
        driver: Driver[Event | CaughtUp] = Driver(self._following.steps())
        while True:
            step = driver.step()
            if isinstance(step, Ask):
                try:
                    driver.answered(await self._carry_out(step))
                except Unavailable as problem:
                    driver.failed(problem)
                except (Refused, SchemaMismatch) as problem:  # until a person has mended it
                    driver.failed(Unavailable("A server", "its address", str(problem)))
                continue
            assert step is not None
            driver.handed_over()
            if isinstance(step, CaughtUp):
                self._stand()
            else:
                self._give(step)

    async def _carry_out(self, ask: Ask) -> Answer:
        match ask:
            case Look():
                self._bell = self._bells.bell(self._stream)  # before: what comes meanwhile must ring it
            case Doorbell():
                await slept(self._bell, ask.seconds)
                return None
            case Recall():
                # Redis alone will do: what it does not tell comes as ranges to read again.
                with suppress(Unavailable):
                    return await self._hands.carry_out(ask)
                return None
        return await self._hands.carry_out(ask)

    def _stand(self) -> None:
        place = self._following.place
        assert place is not None
        if self._linear is None:
            self._give(Begun(place))
        elif beyond(place.linear, self._linear):
            self._give(Line(place.linear))
        self._linear = place.linear

    def _give(self, item: Item) -> None:
        for listener in self.listeners:
            listener.give(self._stream, item)


class Feeds:
    """For one event loop."""

    def __init__(self, hands: Hands, bells: Bells, snapshots: Snapshots) -> None:
        self._hands = hands
        self._bells = bells
        self._snapshots = snapshots
        self._feeds: dict[str, Feed] = {}
        self._to_all: set[Listener] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._discover())
        try:
            yield
        finally:
            for feed in self._feeds.values():
                feed.stop()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @contextmanager
    def listening(self, listener: Listener, streams: Iterable[str]) -> Iterator[None]:
        """`listener` is given what moves `streams` while the block runs."""
        try:
            for stream in streams:
                self._add(listener, stream)
            yield
        finally:
            self._remove(listener)

    def to_all(self, listener: Listener) -> None:
        """It shall hear of new streams as well, until it stops listening."""
        self._to_all.add(listener)

    def _add(self, listener: Listener, stream: str) -> None:
        if stream not in self._feeds:
            self._feeds[stream] = Feed(stream, self._hands, self._bells)
        self._feeds[stream].add(listener)

    def _remove(self, listener: Listener) -> None:
        self._to_all.discard(listener)
        for stream, feed in list(self._feeds.items()):
            feed.listeners.discard(listener)
            if not feed.listeners:
                feed.stop()
                del self._feeds[stream]

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_EVERY)
            if self._to_all:
                for stream in await self._snapshots.names():
                    for listener in self._to_all:
                        if stream not in self._feeds or listener not in self._feeds[stream].listeners:
                            listener.give(stream, Appeared())
                            self._add(listener, stream)
