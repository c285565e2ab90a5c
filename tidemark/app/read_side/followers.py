"""One follower per stream for all listeners: events are read once and given to all of them.

A follower runs while its stream has a listener, and some seconds longer, because clients reconnect. It never waits for
a listener: a slow listener is cut off, and resumes later from its place.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from tidemark.app.read_side import metrics
from tidemark.app.read_side.fallback import RequestHandler
from tidemark.app.read_side.metrics import Sentinel
from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.redis_reader import Notifications
from tidemark.app.read_side.replay import BufferedReplay, ReplayBuffer
from tidemark.app.read_side.single_flight import cancel_until_done
from tidemark.app.read_side.snapshots import KnownPositions, Snapshots
from tidemark.app.read_side.subscription import EventBatch, Item, Listener, Started, StreamAdded, Watermark, settle
from tidemark.common.errors import Refused, SchemaMismatch, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.postgres.history import ChangesSince, DurableMark, StreamChange
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

DISCOVER_EVERY = 1.0  # seconds until names of streams are read again
LARGEST = 500  # events of one batch
LINGER = 10.0  # seconds for which a stream is followed after its last listener has left
SHARE = 10  # the pause between two reads of all followed streams, as a multiple of the duration of a read


class Follower:
    """Follows one stream for its `listeners`. `left_at`: the time at which the last listener left (s, monotonic)."""

    def __init__(
        self, stream: str, requests: RequestHandler, notifications: Notifications, replay_buffer: ReplayBuffer
    ) -> None:
        self.listeners: set[Listener] = set()
        self.left_at = 0.0
        self._replay_buffer = replay_buffer
        self._stream = stream
        self._requests = requests
        self._sentinel = Sentinel()
        self._notifications = notifications
        self._notified = notifications.next(stream)
        self._following = FollowProgram(stream, "vector", None)
        self._place: Place | None = None
        self._started: Started | None = None
        self._events: list[Event] = []
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._task_ended)

    @property
    def has_failed(self) -> bool:
        return self._task.done()

    def add(self, listener: Listener, missed: BufferedReplay | None) -> None:
        """Add a listener, which first gets `missed`; None: the place of the follower."""
        if missed is not None:
            for batch in missed.batches:
                listener.put(self._stream, batch)
        elif self._place is not None:
            if self._started is None or self._started.place is not self._place:
                self._started = Started(self._place)
            listener.put(self._stream, self._started)
        self.listeners.add(listener)

    def compare(self, known: KnownPositions | StreamChange) -> bool:
        """Whether listeners have all `known` positions of the stream. If not, trigger another read."""
        place = self._place
        if place is not None and known.reached(place.linear, place.positions, place.late):
            return True
        self._notifications.notify(self._stream)
        return False

    def stop(self) -> None:
        self._task.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Cut off the listeners if the follower failed, because they cannot distinguish that from an idle stream."""
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("A follower of a stream failed", stream=self._stream, problem=repr(problem))
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
                except (Refused, SchemaMismatch) as problem:  # a person must resolve it
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
                # Take the event before reading, so that a notification during the read sets it.
                self._notified = self._notifications.next(self._stream)
                keys = await self._requests.carry_out(request)
                for fault in self._sentinel.look(request, keys):
                    metrics.CHAIN_FAULTS.labels(fault.kind).inc()
                    log.error("A list of advances breaks a rule", stream=self._stream, fault=fault)
                return keys
            case AwaitEntry():
                await self._notified.wait()
                return None
            case ReadHistory():
                if self._place is None:
                    self._hand_out()  # the follower has started: later events are the history
                # Redis alone is enough: missing entries become ranges to read again.
                with suppress(Unavailable):
                    return await self._requests.carry_out(request)
                return None
        return await self._requests.carry_out(request)

    def _hand_out(self) -> None:
        """Give new events to the listeners. Their place stays the same object without events."""
        before, after, events = self._place, self._following.place, self._events
        assert after is not None
        if before is None:
            self._replay_buffer.begin(self._stream, after)
            self._give(Started(after))
        elif events or beyond(after.linear, before.linear):
            batch = EventBatch(self._stream, before, after, events)
            self._replay_buffer.keep(batch)
            self._give(batch)
        else:
            return
        self._place, self._events = after, []

    def _give(self, item: Item) -> None:
        for listener in self.listeners:
            listener.put(self._stream, item)


class Followers:
    """For one event loop."""

    def __init__(
        self,
        requests: RequestHandler,
        notifications: Notifications,
        snapshots: Snapshots,
        postgres_reader: PostgresReader,
    ) -> None:
        self._requests = requests
        self._notifications = notifications
        self._snapshots = snapshots
        self._postgres_reader = postgres_reader
        self._changes: ChangesSince | None = None  # the last changes, whether given to listeners or not
        self._is_given = False
        self._joined = 0  # the number of subscriptions so far
        self._followers: dict[str, Follower] = {}
        self._replay_buffer = ReplayBuffer()
        self._new_stream_listeners: set[Listener] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(task) for task in (self._discover(), self._compare())]
        try:
            yield
        finally:
            for follower in self._followers.values():
                follower.stop()
            for task in tasks:
                await cancel_until_done(task)

    @contextmanager
    def subscribe(
        self, listener: Listener, streams: Collection[str], resume_from: Mapping[str, Place] | DurableMark
    ) -> Iterator[dict[str, Place]]:
        """Give the events of `streams` to `listener` during the block.

        Args:
            listener: the queue to fill.
            streams: the streams to follow.
            resume_from: the state of the listener: its place in some streams, or a mark.

        Yields:
            The places from which the items continue, of streams whose events since `resume_from` are still in memory.
        """
        # Forget the last changes, because a new listener also needs changes of streams that were not followed.
        self._changes, self._joined = None, self._joined + 1
        replays = self._missed(streams, resume_from)
        try:
            for stream in streams:
                self._add(listener, stream, replays.get(stream))
            yield {stream: replay.place for stream, replay in replays.items()}
        finally:
            self._remove(listener)

    def follow_new_streams(self, listener: Listener) -> None:
        """Also give new streams to the listener, until it unsubscribes."""
        self._new_stream_listeners.add(listener)

    def _missed(
        self, streams: Collection[str], resume_from: Mapping[str, Place] | DurableMark
    ) -> dict[str, BufferedReplay]:
        if isinstance(resume_from, DurableMark):
            return self._replay_buffer.since(resume_from, streams)
        known_places = {stream: resume_from[stream] for stream in streams if stream in resume_from}
        replays = {stream: self._replay_buffer.after(stream, place) for stream, place in known_places.items()}
        return {stream: replay for stream, replay in replays.items() if replay is not None}

    def _add(self, listener: Listener, stream: str, replays: BufferedReplay | None = None) -> None:
        follower = self._followers.get(stream)
        if follower is None or follower.has_failed:
            follower = self._followers[stream] = Follower(
                stream, self._requests, self._notifications, self._replay_buffer
            )
        follower.add(listener, replays)

    def _remove(self, listener: Listener) -> None:
        self._new_stream_listeners.discard(listener)
        now = time.monotonic()
        for follower in self._followers.values():
            if listener in follower.listeners:
                follower.listeners.remove(listener)
                follower.left_at = now

    def _end_idle(self) -> None:
        latest = time.monotonic() - LINGER
        for stream, follower in list(self._followers.items()):
            if not follower.listeners and (follower.has_failed or follower.left_at < latest):
                follower.stop()
                self._replay_buffer.end(stream)
                del self._followers[stream]

    async def _compare(self) -> None:
        """Read all followed streams together once a second, because notifications may be lost, and a linear position
        may move without one. Postgres is compared too, because Redis may have gone back, or a write may be missing.
        """
        due = 0.0
        while True:
            await asyncio.sleep(LONGEST_WAIT)
            self._end_idle()
            self._replay_buffer.forget()
            followed = list(self._followers)
            began = time.monotonic()
            if followed and began >= due:
                for stream, known in (await self._snapshots.known(followed)).items():
                    if stream in self._followers:
                        self._followers[stream].compare(known)
                due = began + SHARE * (time.monotonic() - began)
            if followed:
                with suppress(Unavailable, Refused, SchemaMismatch):
                    await self._compare_with_postgres(followed)

    async def _compare_with_postgres(self, followed: Sequence[str]) -> None:
        before, joined = self._changes, self._joined
        # Read changes from Postgres that Redis has not shown since the last comparison.
        lagging = {} if before is None or self._is_given else self._missing(before)
        self._requests.lagging_streams = lagging
        if before is not None and not lagging:
            self._send_watermark(before)
        changes = await self._postgres_reader.changes(
            None if before is None else before.mark, None if self._new_stream_listeners else followed
        )
        for stream in changes.streams:
            self._appear(stream)
        if self._joined == joined and not lagging and (before is None or changes.mark != before.mark):
            self._changes, self._is_given = changes, False
            if not self._missing(changes):
                self._send_watermark(changes)

    def _missing(self, changes: ChangesSince) -> dict[str, StreamChange]:
        """The changes that were not given to listeners yet."""
        return {
            stream: moved
            for stream, moved in changes.streams.items()
            if stream in self._followers and not self._followers[stream].compare(moved)
        }

    def _send_watermark(self, changes: ChangesSince) -> None:
        if not self._is_given:
            self._is_given = True
            self._replay_buffer.mark_complete(changes.mark)
            for listener in {
                listener
                for follower in self._followers.values()
                for listener in follower.listeners
                if listener.wants_watermarks
            }:
                listener.put("", Watermark(changes.mark))

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_EVERY)
            if self._new_stream_listeners:
                for stream in await self._snapshots.names():
                    self._appear(stream)

    def _appear(self, stream: str) -> None:
        for listener in self._new_stream_listeners:
            if stream not in self._followers or listener not in self._followers[stream].listeners:
                listener.put(stream, StreamAdded())
                self._add(listener, stream)
