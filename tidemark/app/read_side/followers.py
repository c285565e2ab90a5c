"""Follows streams for listeners. Each stream has one follower, which reads its events once for all listeners.

A follower runs while its stream has a listener, and some seconds longer, because clients reconnect. A follower never
waits for a listener: a slow listener is disconnected, and resumes later from its place.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from tidemark.app.read_side import metrics
from tidemark.app.read_side.fallback import RequestHandler
from tidemark.app.read_side.metrics import ChainChecker
from tidemark.app.read_side.postgres_reader import PostgresReader
from tidemark.app.read_side.redis_reader import Notifications
from tidemark.app.read_side.replay import BufferedReplay, ReplayBuffer
from tidemark.app.read_side.snapshots import KnownPositions, Snapshots
from tidemark.app.read_side.subscription import (
    EventBatch,
    FollowerStarted,
    Item,
    Listener,
    StreamAdded,
    Watermark,
    complete_future,
)
from tidemark.common.errors import Refused, SchemaMismatch, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.postgres.history import ChangesSince, DurableMark, StreamChange
from tidemark.sinks.reader import (
    LONGEST_WAIT_SECONDS,
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
from tidemark.streaming.values.direction import is_beyond

log = get_logger(__name__)

DISCOVER_INTERVAL_SECONDS = 1.0  # between two reads of the names of streams
MAX_BATCH_EVENTS = 500
LINGER_SECONDS = 10.0  # how long a stream is followed after its last listener has left
PAUSE_FACTOR = 10  # the pause between two reads of all followed streams, as a multiple of the duration of a read


class Follower:
    """Follows one stream in a task, for its `listeners`. `left_at`: when a listener last left (seconds, monotonic)."""

    def __init__(
        self, stream: str, request_handler: RequestHandler, notifications: Notifications, replay_buffer: ReplayBuffer
    ) -> None:
        self.listeners: set[Listener] = set()
        self.left_at = 0.0
        self._replay_buffer = replay_buffer
        self._stream = stream
        self._request_handler = request_handler
        self._chain_checker = ChainChecker()
        self._notifications = notifications
        self._notification = notifications.next_event(stream)
        self._program = FollowProgram(stream, "vector", None)
        self._place: Place | None = None
        self._started: FollowerStarted | None = None
        self._events: list[Event] = []
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_task_done)

    @property
    def has_failed(self) -> bool:
        return self._task.done()

    def add(self, listener: Listener, replay: BufferedReplay | None) -> None:
        """Add a listener, and put its first items into its queue: the batches of `replay`. If `replay` is None, a
        `FollowerStarted` with the place of the follower, now or after the first read of the follower.
        """
        if replay is not None:
            for batch in replay.batches:
                listener.put(self._stream, batch)
        elif self._place is not None:
            if self._started is None or self._started.place is not self._place:
                self._started = FollowerStarted(self._place)
            listener.put(self._stream, self._started)
        self.listeners.add(listener)

    def check_reached(self, known: KnownPositions | StreamChange) -> bool:
        """Return whether the follower is at or beyond the `known` positions. If not, trigger another read of the
        stream."""
        place = self._place
        if place is not None and known.is_reached_by(place.linear, place.positions, place.late):
            return True
        self._notifications.notify(self._stream)
        return False

    def stop(self) -> None:
        self._task.cancel()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """If the follower has failed, disconnect its listeners, because they cannot distinguish a failure from an idle
        stream.
        """
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error(
                "A follower of a stream failed; its clients are disconnected",
                stream=self._stream,
                problem=repr(problem),
            )
            for listener in self.listeners:
                complete_future(listener.disconnect_signal)

    async def _run(self) -> None:
        driver: Driver[Event | CaughtUp] = Driver(self._program.steps())
        while True:
            step = driver.step()
            if isinstance(step, Request):
                try:
                    driver.send_answer(await self._carry_out(step))
                except Unavailable as problem:
                    driver.throw(problem)
                except (Refused, SchemaMismatch) as problem:  # retried until a person resolves it
                    driver.throw(Unavailable("Redis or Postgres", "the configured address", str(problem)))
                continue
            assert step is not None
            driver.mark_handed_over()
            if not isinstance(step, CaughtUp):
                self._events.append(step)
            if isinstance(step, CaughtUp) or len(self._events) == MAX_BATCH_EVENTS:
                self._publish_events()

    async def _carry_out(self, request: Request) -> Answer:
        match request:
            case ReadList() | ReadNewest():
                # Take the event before reading, so that a notification during the read sets it.
                self._notification = self._notifications.next_event(self._stream)
                keys = await self._request_handler.carry_out(request)
                for fault in self._chain_checker.check(request, keys):
                    metrics.CHAIN_FAULTS.labels(fault.kind).inc()
                    log.error(
                        "The list of advances in Redis breaks a rule of docs/design.md",
                        stream=self._stream,
                        fault=fault,
                    )
                return keys
            case AwaitEntry():
                await self._notification.wait()
                return None
            case ReadHistory():
                if self._place is None:
                    self._publish_events()  # publish `FollowerStarted` before the events of the history
                # While Postgres is down, Redis alone is enough: missing entries become `Reread` events.
                with suppress(Unavailable):
                    return await self._request_handler.carry_out(request)
                return None
        return await self._request_handler.carry_out(request)

    def _publish_events(self) -> None:
        """Put the new events into the queues of the listeners, and move `_place`. If there are no events, and the
        linear position has not moved, `_place` stays the same object."""
        before, after, events = self._place, self._program.place, self._events
        assert after is not None
        if before is None:
            self._replay_buffer.begin_stream(self._stream, after)
            self._put_item(FollowerStarted(after))
        elif events or is_beyond(after.linear, before.linear):
            batch = EventBatch(self._stream, before, after, events)
            self._replay_buffer.add(batch)
            self._put_item(batch)
        else:
            return
        self._place, self._events = after, []

    def _put_item(self, item: Item) -> None:
        for listener in self.listeners:
            listener.put(self._stream, item)


class Followers:
    """Runs a follower for each stream that has a listener. One per process, for one event loop."""

    def __init__(
        self,
        request_handler: RequestHandler,
        notifications: Notifications,
        snapshots: Snapshots,
        postgres_reader: PostgresReader,
    ) -> None:
        self._request_handler = request_handler
        self._notifications = notifications
        self._snapshots = snapshots
        self._postgres_reader = postgres_reader
        self._changes: ChangesSince | None = None  # the last changes in Postgres
        self._is_watermark_sent = False
        self._subscription_count = 0  # since the start
        self._followers: dict[str, Follower] = {}
        self._replay_buffer = ReplayBuffer()
        self._new_stream_listeners: set[Listener] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(task) for task in (self._discover_streams(), self._compare_periodically())]
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
        """Put the events of `streams` into the queue of `listener` during the block.

        Args:
            listener: the queue to fill.
            streams: the streams to follow.
            resume_from: where the listener continues: a mark, or stream -> the listener's place. The mapping may lack
                streams.

        Yields:
            Stream -> the place after which the items of the stream begin. Contains only streams whose events since
            `resume_from` are still in memory. The items of other streams begin with a `FollowerStarted`.
        """
        # Forget the last changes, because a new listener also needs changes of streams that were not followed.
        self._changes, self._subscription_count = None, self._subscription_count + 1
        replays = self._buffered_replays(streams, resume_from)
        try:
            for stream in streams:
                self._add_listener(listener, stream, replays.get(stream))
            yield {stream: replay.place for stream, replay in replays.items()}
        finally:
            self._remove_listener(listener)

    def follow_new_streams(self, listener: Listener) -> None:
        """Also subscribe the listener to streams that are created later, until the block of `subscribe` ends."""
        self._new_stream_listeners.add(listener)

    def _buffered_replays(
        self, streams: Collection[str], resume_from: Mapping[str, Place] | DurableMark
    ) -> dict[str, BufferedReplay]:
        if isinstance(resume_from, DurableMark):
            return self._replay_buffer.batches_since(resume_from, streams)
        known_places = {stream: resume_from[stream] for stream in streams if stream in resume_from}
        replays = {stream: self._replay_buffer.batches_after(stream, place) for stream, place in known_places.items()}
        return {stream: replay for stream, replay in replays.items() if replay is not None}

    def _add_listener(self, listener: Listener, stream: str, replay: BufferedReplay | None = None) -> None:
        follower = self._followers.get(stream)
        if follower is None or follower.has_failed:
            follower = self._followers[stream] = Follower(
                stream, self._request_handler, self._notifications, self._replay_buffer
            )
        follower.add(listener, replay)

    def _remove_listener(self, listener: Listener) -> None:
        self._new_stream_listeners.discard(listener)
        now = time.monotonic()
        for follower in self._followers.values():
            if listener in follower.listeners:
                follower.listeners.remove(listener)
                follower.left_at = now

    def _stop_idle_followers(self) -> None:
        latest = time.monotonic() - LINGER_SECONDS
        for stream, follower in list(self._followers.items()):
            if not follower.listeners and (follower.has_failed or follower.left_at < latest):
                follower.stop()
                self._replay_buffer.end_stream(stream)
                del self._followers[stream]

    async def _compare_periodically(self) -> None:
        """Read all followed streams together about once a second, because notifications may be lost, and a linear
        position may move without a notification. Read Postgres too, because Redis may have gone back, or may lack a
        write.
        """
        due = 0.0
        while True:
            await asyncio.sleep(LONGEST_WAIT_SECONDS)
            self._stop_idle_followers()
            self._replay_buffer.drop_old()
            followed = list(self._followers)
            began = time.monotonic()
            if followed and began >= due:
                for stream, known in (await self._snapshots.known_positions(followed)).items():
                    if stream in self._followers:
                        self._followers[stream].check_reached(known)
                due = began + PAUSE_FACTOR * (time.monotonic() - began)
            if followed:
                with suppress(Unavailable, Refused, SchemaMismatch):
                    await self._compare_with_postgres(followed)

    async def _compare_with_postgres(self, followed_streams: Sequence[str]) -> None:
        before, subscription_count = self._changes, self._subscription_count
        # If Redis still lacks changes of the last comparison, their streams are read from Postgres.
        lagging = {} if before is None or self._is_watermark_sent else self._undelivered_changes(before)
        self._request_handler.lagging_streams = lagging
        if before is not None and not lagging:
            self._send_watermark(before)
        changes = await self._postgres_reader.changes(
            None if before is None else before.mark, None if self._new_stream_listeners else followed_streams
        )
        for stream in changes.streams:
            self._add_new_stream(stream)
        if (
            self._subscription_count == subscription_count
            and not lagging
            and (before is None or changes.mark != before.mark)
        ):
            self._changes, self._is_watermark_sent = changes, False
            if not self._undelivered_changes(changes):
                self._send_watermark(changes)

    def _undelivered_changes(self, changes: ChangesSince) -> dict[str, StreamChange]:
        """The changes that followers have not reached yet, by stream. Triggers a read of these streams."""
        return {
            stream: moved
            for stream, moved in changes.streams.items()
            if stream in self._followers and not self._followers[stream].check_reached(moved)
        }

    def _send_watermark(self, changes: ChangesSince) -> None:
        if not self._is_watermark_sent:
            self._is_watermark_sent = True
            self._replay_buffer.add_mark(changes.mark)
            for listener in {
                listener
                for follower in self._followers.values()
                for listener in follower.listeners
                if listener.receives_watermarks
            }:
                listener.put("", Watermark(changes.mark))

    async def _discover_streams(self) -> None:
        while True:
            await asyncio.sleep(DISCOVER_INTERVAL_SECONDS)
            if self._new_stream_listeners:
                for stream in await self._snapshots.names():
                    self._add_new_stream(stream)

    def _add_new_stream(self, stream: str) -> None:
        for listener in self._new_stream_listeners:
            if stream not in self._followers or listener not in self._followers[stream].listeners:
                listener.put(stream, StreamAdded())
                self._add_listener(listener, stream)
