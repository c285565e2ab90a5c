"""Combines the moves of streams with rows from Kafka into announcements, which are the same for all subscribers.

The hub follows streams and reads rows only while it has a subscriber. For one event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from tidemark.app.lines.rows import Announcement, Announcer, RowBuffer, Writer
from tidemark.app.read_side import ReadSide, metrics
from tidemark.app.read_side.subscription import EventBatch, FollowerStarted, Item, Listener
from tidemark.common.errors import Stop, TidemarkError, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.reader import Advance, Event, Reread
from tidemark.sources.kafka_lookup import Tail
from tidemark.streaming.values.direction import is_beyond
from tidemark.streaming.wire.line_protocol import PositionCommand
from tidemark.streaming.wire.records import Record

log = get_logger(__name__)

ROW_TIMEOUT_SECONDS = 0.5  # for the rows of an advance
TIMEOUT_CHECK_SECONDS = 0.1  # between two checks for rows that did not arrive in time
RETRY_SECONDS = 1.0
BATCHES_PER_ITERATION = 8  # other tasks run between two iterations
FORGET_INTERVAL_SECONDS = 60.0  # between two checks for removed writers
POLL_SECONDS = 0.2  # how long the thread that reads Kafka waits for a record

Subscriber = Callable[[Sequence[Announcement]], None]


class Hub:
    """Makes announcements for its subscribers.

    Args:
        read_side: the source of positions and moves.
        create_tail: creates a reader of the facts topic.
        max_row_bytes: the approximate largest size of all buffered rows together.
    """

    def __init__(self, read_side: ReadSide, create_tail: Callable[[], Tail], max_row_bytes: int) -> None:
        self._read_side = read_side
        self._create_tail = create_tail
        self._announced_positions: dict[Writer, int] = {}
        self._rows = RowBuffer(max_row_bytes, self._announced_positions)
        self._announcer = Announcer(self._rows, self._announced_positions, ROW_TIMEOUT_SECONDS)
        self._subscribers: list[Subscriber] = []
        self._running_tasks: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # includes cancelled tasks that have not ended yet
        self._is_closed = False
        self._started = asyncio.Event()
        self._starting_streams: set[str] = set()  # streams whose followers have not started yet

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Hub"]:
        try:
            yield self
        finally:
            self._is_closed = True  # so that no subscriber starts a task during shutdown
            self._running_tasks = set()
            for task in [*self._tasks]:
                await cancel_until_done(task)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with each later group of announcements, until `unsubscribe`. The first subscriber starts
        the hub, and `unsubscribe` of the last one stops it."""
        self._subscribers.append(subscriber)
        if not self._running_tasks:
            self._start()

    async def wait_until_started(self) -> None:
        """Wait until the hub has read the positions of the streams that the servers return. If the caller then reads
        `positions` before its next await, no announcement is made in between.
        """
        await self._started.wait()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.remove(subscriber)
        if not self._subscribers:
            self._stop()
            self._started.clear()

    def positions(self) -> list[PositionCommand]:
        """A POSITION with the announced position of every writer, for the answer to REPLICATE. Sorted by stream and
        writer.
        """
        return [
            PositionCommand(stream, writer, id, id)
            for (stream, writer), id in sorted(self._announced_positions.items())
        ]

    async def removed_writers(self, announced_positions: Mapping[Writer, int]) -> list[Writer]:
        """Find the writers in `announced_positions` (writer -> announced position) whose positions subscribers no
        longer need.

        Such a writer retired long ago: its stream no longer lists the writer, and the linear position has passed the
        announced position. Reads the positions of streams.
        """
        known = await self._read_side.snapshots.known_positions({stream for stream, _ in announced_positions})
        return [
            (stream, writer)
            for (stream, writer), id in announced_positions.items()
            if stream in known and writer not in known[stream].vector and not is_beyond(id, known[stream].linear)
        ]

    async def _forget_removed_writers(self) -> None:
        while True:
            await asyncio.sleep(FORGET_INTERVAL_SECONDS)
            self._announcer.forget(await self.removed_writers(self._announced_positions))

    def _announce(self, announcements: Iterable[Announcement]) -> None:
        announced = list(announcements)
        for announcement in announced:
            metrics.ANNOUNCEMENTS.labels(announcement.kind).inc()
        if announced:
            for subscriber in [*self._subscribers]:
                subscriber(announced)

    def _start(self) -> None:
        if self._is_closed:
            return
        self._rows.clear()
        # No TaskGroup, which cancels a task only once: see `cancel_until_done`.
        self._running_tasks = {
            self._create_task(run())
            for run in (self._follow_streams, self._read_rows, self._announce_overdue, self._forget_removed_writers)
        }
        for task in self._running_tasks:
            task.add_done_callback(self._on_task_done)

    def _stop(self) -> None:
        for task in self._running_tasks:
            self._create_task(cancel_until_done(task))
        self._running_tasks = set()

    def _create_task(self, run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """If a task has failed, restart all tasks, because clients cannot distinguish a failure from idle streams."""
        if task in self._running_tasks and not task.cancelled() and (problem := task.exception()) is not None:
            log.error(
                "A task of the line protocol failed; restarting all tasks of the line protocol", problem=repr(problem)
            )
            self._stop()
            self._running_tasks = {self._create_task(self._restart())}

    async def _restart(self) -> None:
        await asyncio.sleep(RETRY_SECONDS)
        self._start()

    async def _follow_streams(self) -> None:
        while True:
            listener = Listener()
            names = await self._read_side.snapshots.names()
            self._starting_streams = set(names)
            self._read_side.followers.follow_new_streams(listener)
            with self._read_side.followers.subscribe(listener, names, {}):
                for stream, known in (await self._read_side.snapshots.known_positions(names)).items():
                    self._announce(self._announcer.catch_up(stream, known.vector))
                # Wait for the first read of each follower: earlier moves cannot be announced with rows.
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        while self._starting_streams:
                            await self._announce_next(listener)
                self._started.set()
                while not listener.disconnect_signal.done():
                    await self._announce_next(listener)
            log.warning(
                "The line protocol missed moves: there were too many, or a follower failed; clients fetch the rows"
            )
            await asyncio.sleep(RETRY_SECONDS)

    async def _announce_next(self, listener: Listener) -> None:
        if not await listener.wait_for_item(RETRY_SECONDS):
            return
        now = time.monotonic()
        self._announce(
            [
                announcement
                for stream, item in listener.take(BATCHES_PER_ITERATION)
                for announcement in self._make_announcements(stream, item, now)
            ]
        )
        await asyncio.sleep(0)  # other tasks must run even if the queue is never empty

    def _make_announcements(self, stream: str, item: Item, now: float) -> Iterable[Announcement]:
        match item:
            case FollowerStarted(place):
                self._starting_streams.discard(stream)
                yield from self._announcer.catch_up(stream, place.positions)
            case EventBatch(events=events):
                for event in events:
                    yield from self._event_announcements(stream, event, now)

    def _event_announcements(self, stream: str, event: Event, now: float) -> Iterable[Announcement]:
        match event:
            case Advance():
                return self._announcer.add_advance(stream, event, now)
            case Reread(writer=str() as writer):
                return self._announcer.catch_up(stream, {writer: event.id})
        return ()  # the protocol has no command for late completions

    async def _announce_overdue(self) -> None:
        while True:
            await asyncio.sleep(TIMEOUT_CHECK_SECONDS)
            self._announce(self._announcer.announce_timed_out(time.monotonic()))

    async def _read_rows(self) -> None:
        loop, tail = asyncio.get_running_loop(), self._create_tail()
        thread = ThreadPoolExecutor(1, thread_name_prefix="tail")
        problem: TidemarkError | None = None
        try:
            while True:
                try:
                    progress = await self._read_side.postgres_reader.topic_progress(tail.topic)
                    has_first_record = await loop.run_in_executor(thread, tail.begin, progress.offsets)
                    self._rows.begin_read(has_first_record, progress.allocated_ids)
                    if problem is not None:
                        log.info("Rows can be read again")
                    problem = None
                    while True:
                        self._add_records(await loop.run_in_executor(thread, tail.read, POLL_SECONDS))
                except (Unavailable, Stop) as error:
                    if problem is None:
                        log.warning(
                            "Cannot read rows, because Kafka or Postgres failed; clients get positions without rows,"
                            " and must read the table",
                            problem=str(error),
                        )
                    problem = error
                    self._rows.clear()
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            thread.submit(tail.close)
            thread.shutdown(wait=False)

    def _add_records(self, records: Iterable[tuple[int, Record]]) -> None:
        read = {writer for partition, record in records if (writer := self._rows.add(partition, record))}
        self._announce(self._announcer.retry(read, time.monotonic()))
        metrics.ROW_BUFFER_BYTES.set(self._rows.size_bytes)
        metrics.ROWS_DROPPED.inc(self._rows.dropped_count)
        self._rows.dropped_count = 0
