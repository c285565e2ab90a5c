"""One follower per stream for all listeners: what moves a stream is read once and given to all of them.

A follower runs while its stream has a listener, and for some seconds more, because clients come back. It never waits
for a listener: one that does not take its items is cut off, and goes on later from where it stood.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from tidemark.app.read_side import metrics
from tidemark.app.read_side.fallback import RequestHandler
from tidemark.app.read_side.notifications import Notifications
from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.replay import BufferedReplay, ReplayBuffer
from tidemark.app.read_side.sentinel import Sentinel
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.app.read_side.snapshots import KnownPositions, Snapshots
from tidemark.app.read_side.subscription import EventBatch, Item, Listener, Started, StreamAdded, Watermark, settle
from tidemark.common.errors import Refused, SchemaMismatch, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.postgres.changes import ChangesSince, DurableMark, StreamChange
from tidemark.sinks.reader import (
    LONGEST_WAIT,
    Answer,
    AwaitEntry,
    CaughtUp,
    Driver,
    Event,
    FollowProgram,
    Place,
    ReadHistory,
    ReadList,
    ReadNewest,
    Request,
)
from tidemark.streaming.values.direction import beyond

log = get_logger(__name__)

DISCOVER_EVERY = 1.0  # seconds until new streams are looked for again
LARGEST = 500  # events of one slice
LINGER = 10.0  # seconds that a stream is followed still when its last listener has gone
SHARE = 10  # reading all followed streams is due again after so many times as long as it took: there may be thousands


class Follower:
    """Follows one stream for its `listeners`; without any since `left` (s, monotonic)."""

    def __init__(
        self, stream: str, requests: RequestHandler, notifications: Notifications, recent: ReplayBuffer
    ) -> None:
        self.listeners: set[Listener] = set()
        self.left = 0.0
        self._recent = recent
        self._stream = stream
        self._requests = requests
        self._sentinel = Sentinel()
        self._notifications = notifications
        self._notified = notifications.next(stream)
        self._following = FollowProgram(stream, "vector", None)
        self._place: Place | None = None
        self._begun: Started | None = None
        self._events: list[Event] = []
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    @property
    def broken(self) -> bool:
        return self._task.done()

    def add(self, listener: Listener, missed: BufferedReplay | None) -> None:
        """`missed` is what it is given first; None: it is told where the stream stands."""
        if missed is not None:
            for piece in missed.slices:
                listener.give(self._stream, piece)
        elif self._place is not None:
            if self._begun is None or self._begun.place is not self._place:
                self._begun = Started(self._place)
            listener.give(self._stream, self._begun)
        self.listeners.add(listener)

    def compare(self, known: KnownPositions | StreamChange) -> bool:
        """Whether all that is known of the stream was given to listeners; read again where it was not."""
        place = self._place
        if place is not None and known.reached(place.linear, place.positions, place.late):
            return True
        self._notifications.notify(self._stream)
        return False

    def stop(self) -> None:
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Listeners must not take a follower that broke for a stream that is quiet."""
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("FollowProgram a stream broke off", stream=self._stream, problem=repr(problem))
            for listener in self.listeners:
                settle(listener.cut_off)

    async def _run(self) -> None:
        driver: Driver[Event | CaughtUp] = Driver(self._following.steps())
        while True:
            step = driver.step()
            if isinstance(step, Request):
                try:
                    driver.answered(await self._carry_out(step))
                except Unavailable as problem:
                    driver.failed(problem)
                except (Refused, SchemaMismatch) as problem:  # until a person has mended it
                    driver.failed(Unavailable("A server", "its address", str(problem)))
                continue
            assert step is not None
            driver.handed_over()
            if not isinstance(step, CaughtUp):
                self._events.append(step)
            if isinstance(step, CaughtUp) or len(self._events) == LARGEST:
                self._hand_out()

    async def _carry_out(self, request: Request) -> Answer:
        match request:
            case ReadList() | ReadNewest():
                # Before it reads: what is published meanwhile must set it.
                self._notified = self._notifications.next(self._stream)
                found = await self._requests.carry_out(request)
                for fault in self._sentinel.look(request, found):
                    metrics.CHAIN_FAULTS.labels(fault.kind).inc()
                    log.error("A list of advances breaks a rule", stream=self._stream, fault=fault)
                return found
            case AwaitEntry():
                await self._notified.wait()
                return None
            case ReadHistory():
                if self._place is None:
                    self._hand_out()  # it has begun: what is recalled came since then
                # Redis alone will do: what it does not hold comes as ranges to read again.
                with suppress(Unavailable):
                    return await self._requests.carry_out(request)
                return None
        return await self._requests.carry_out(request)

    def _hand_out(self) -> None:
        """Give the listeners what moved since the last time. Their place stays the same object where nothing did."""
        before, after, events = self._place, self._following.place, self._events
        assert after is not None
        if before is None:
            self._recent.begin(self._stream, after)
            self._give(Started(after))
        elif events or beyond(after.linear, before.linear):
            piece = EventBatch(self._stream, before, after, events)
            self._recent.keep(piece)
            self._give(piece)
        else:
            return
        self._place, self._events = after, []

    def _give(self, item: Item) -> None:
        for listener in self.listeners:
            listener.give(self._stream, item)


class Followers:
    """For one event loop."""

    def __init__(
        self, requests: RequestHandler, notifications: Notifications, snapshots: Snapshots, durable: PostgresReader
    ) -> None:
        self._requests = requests
        self._notifications = notifications
        self._snapshots = snapshots
        self._durable = durable
        self._changes: ChangesSince | None = None  # what is waited for until it was given, or the last that was
        self._given = False
        self._came = 0  # listeners, so far
        self._feeds: dict[str, Follower] = {}
        self._recent = ReplayBuffer()
        self._to_all: set[Listener] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(task) for task in (self._discover(), self._compare())]
        try:
            yield
        finally:
            for feed in self._feeds.values():
                feed.stop()
            for task in tasks:
                await cancel_until_done(task)

    @contextmanager
    def listening(
        self, listener: Listener, streams: Collection[str], stands: Mapping[str, Place] | DurableMark
    ) -> Iterator[dict[str, Place]]:
        """`listener` is given what moves `streams` while the block runs. Gives the places from which on that joins what
        it has: of all streams in which it `stands` somewhere, those that moved no more since than is remembered."""
        # Whoever is new has to be given what was not followed before, too.
        self._changes, self._came = None, self._came + 1
        missed = self._missed(streams, stands)
        try:
            for stream in streams:
                self._add(listener, stream, missed.get(stream))
            yield {stream: found.place for stream, found in missed.items()}
        finally:
            self._remove(listener)

    def to_all(self, listener: Listener) -> None:
        """Give it new streams as well, until it stops listening."""
        self._to_all.add(listener)

    def _missed(self, streams: Collection[str], stands: Mapping[str, Place] | DurableMark) -> dict[str, BufferedReplay]:
        if isinstance(stands, DurableMark):
            return self._recent.since(stands, streams)
        asked = {stream: stands[stream] for stream in streams if stream in stands}
        found = {stream: self._recent.after(stream, place) for stream, place in asked.items()}
        return {stream: missed for stream, missed in found.items() if missed is not None}

    def _add(self, listener: Listener, stream: str, missed: BufferedReplay | None = None) -> None:
        feed = self._feeds.get(stream)
        if feed is None or feed.broken:
            feed = self._feeds[stream] = Follower(stream, self._requests, self._notifications, self._recent)
        feed.add(listener, missed)

    def _remove(self, listener: Listener) -> None:
        self._to_all.discard(listener)
        now = time.monotonic()
        for feed in self._feeds.values():
            if listener in feed.listeners:
                feed.listeners.remove(listener)
                feed.left = now

    def _end_idle(self) -> None:
        latest = time.monotonic() - LINGER
        for stream, feed in list(self._feeds.items()):
            if not feed.listeners and (feed.broken or feed.left < latest):
                feed.stop()
                self._recent.end(stream)
                del self._feeds[stream]

    async def _compare(self) -> None:
        """Notifications may be lost, and a linear position moves without one: so all followed streams are read
        together, once a second. So is what Postgres took in: Redis may have gone back, or not been written."""
        due = 0.0
        while True:
            await asyncio.sleep(LONGEST_WAIT)
            self._end_idle()
            self._recent.forget()
            followed = list(self._feeds)
            began = time.monotonic()
            if followed and began >= due:
                for stream, known in (await self._snapshots.known(followed)).items():
                    if stream in self._feeds:
                        self._feeds[stream].compare(known)
                due = began + SHARE * (time.monotonic() - began)
            if followed:
                with suppress(Unavailable, Refused, SchemaMismatch):
                    await self._compare_with_postgres(followed)

    async def _compare_with_postgres(self, followed: Sequence[str]) -> None:
        before, came = self._changes, self._came
        # What was waited for since the last time is for Postgres to tell, where Redis still does not.
        behind = {} if before is None or self._given else self._missing(before)
        self._requests.behind = behind
        if before is not None and not behind:
            self._tell(before)
        changes = await self._durable.changes(
            None if before is None else before.mark, None if self._to_all else followed
        )
        for stream in changes.streams:
            self._appear(stream)
        if self._came == came and not behind and (before is None or changes.mark != before.mark):
            self._changes, self._given = changes, False
            if not self._missing(changes):
                self._tell(changes)

    def _missing(self, changes: ChangesSince) -> dict[str, StreamChange]:
        """What of the changes was not given to those who follow those streams."""
        return {
            stream: moved
            for stream, moved in changes.streams.items()
            if stream in self._feeds and not self._feeds[stream].compare(moved)
        }

    def _tell(self, changes: ChangesSince) -> None:
        if not self._given:
            self._given = True
            self._recent.told(changes.mark)
            for listener in {it for feed in self._feeds.values() for it in feed.listeners if it.marks}:
                listener.give("", Watermark(changes.mark))

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_EVERY)
            if self._to_all:
                for stream in await self._snapshots.names():
                    self._appear(stream)

    def _appear(self, stream: str) -> None:
        for listener in self._to_all:
            if stream not in self._feeds or listener not in self._feeds[stream].listeners:
                listener.give(stream, StreamAdded())
                self._add(listener, stream)
