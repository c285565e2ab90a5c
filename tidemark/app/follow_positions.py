"""`tidemark follow`: copies the published positions from Redis to a database of readers.

A relay does the same in its own database if TIDEMARK_REDIS_URL is set. The process reads a stream after a message on
the stream's Redis channel, and all streams once a second. Several processes may write to the same database, because
stored positions never move back.
"""

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from tidemark.app.diagnosis.reader_lag import PositionSamples, ReaderLag, ReaderMetrics
from tidemark.app.logs import run_in_thread, shutdown_event
from tidemark.app.output import progress
from tidemark.app.read_side.redis_reader import STREAMS_PER_TRANSACTION
from tidemark.app.serving import http_health
from tidemark.app.settings import Settings
from tidemark.common.backoff import WaitLog, wait_out
from tidemark.common.errors import Refused, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Dsn
from tidemark.sinks import reader_database
from tidemark.sinks.reader import (
    REMEDIES,
    Advance,
    CaughtUp,
    Driver,
    Event,
    FollowProgram,
    Late,
    MissingLateCompletions,
    Place,
    Positions,
    ReaderPlaces,
    ReadKeys,
    StreamKeys,
    read_reply,
    send_request,
)
from tidemark.sinks.reader_database import KnownStream, PublishedLate, StreamUpdate, reader_session
from tidemark.sinks.redis.client import STREAMS_KEY, RedisAddress, RedisSession, channel_pattern, database_of, stream_of
from tidemark.streaming.values.direction import is_beyond

log = get_logger(__name__)

READERS_INTERVAL_SECONDS = 5.0
"""Seconds between two reads of the places of readers."""
NOT_READY_SECONDS = 15.0
"""Seconds without a read of all streams after which the process is not ready."""
HANGING_SECONDS = 60.0
"""Seconds without an iteration of the loop after which the process counts as hanging."""
REDIS_TIMEOUT_SECONDS = 2.0
"""Timeout of a connection to Redis, and of an answer."""
FULL_READ_INTERVAL_SECONDS = 1.0
"""Seconds between two reads of all streams. These reads find the moves whose messages on channels were lost."""
_FIRST_MESSAGE_SECONDS, _ALL_MESSAGES_SECONDS = 0.05, 0.06
"""Time limits of `_receive_moved_streams`: for the first message, and for all messages."""
REFUSED_PAUSE_SECONDS = 5.0
"""Pause after a server has refused a statement."""


class FollowMetrics:
    """The metrics of `tidemark follow`, and its health for probes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.heartbeat = Gauge(
            "tidemark_follow_heartbeat_timestamp_seconds",
            "Time of the last iteration of the loop (s since 1970). It rises even if a server does not answer.",
            registry=registry,
        )
        self.last_read = Gauge(
            "tidemark_follow_last_read_timestamp_seconds",
            "Time of the last read of all streams (s since 1970). If it does not rise, Redis or the database does not"
            " answer.",
            registry=registry,
        )
        self.streams = Gauge(
            "tidemark_follow_streams",
            "Number of streams whose positions are in the database of readers.",
            registry=registry,
        )
        self.heartbeat.set_to_current_time()

    def liveness_problem(self, now: float) -> str | None:
        is_hanging = now - http_health.gauge_value(self.heartbeat) >= HANGING_SECONDS
        return f"the loop has not run for {HANGING_SECONDS:.0f} s" if is_hanging else None

    def readiness_problem(self) -> str | None:
        is_silent = time.time() - http_health.gauge_value(self.last_read) >= NOT_READY_SECONDS
        return "starting, or waiting for Redis or the database of readers" if is_silent else None


class ReaderWatch:
    """Updates the metrics of readers from the places in the database of readers. `run` returns when `halt` is set."""

    def __init__(self, dsn: Dsn, registry: CollectorRegistry, halt: threading.Event) -> None:
        self._session = reader_session(dsn, "tidemark reader metrics")
        self._places = ReaderPlaces(dsn, "tidemark reader metrics")
        self._lag = ReaderLag(PositionSamples(self._session))
        self._metrics = ReaderMetrics(registry)
        self._halt = halt

    def run(self) -> None:
        has_metrics = True
        try:
            while not self._halt.is_set():
                try:
                    self._metrics.show(self._lag.statuses(self._places.places()))
                    has_metrics = True
                except (Unavailable, Refused) as problem:
                    self._metrics.show(())
                    if has_metrics:
                        log.warning(
                            "Cannot read the places of readers; their metrics are missing", problem=str(problem)
                        )
                    has_metrics = False
                self._halt.wait(READERS_INTERVAL_SECONDS)
        finally:
            self._session.close()
            self._places.close()


class PositionFollower:
    """Copies published positions to a database of readers.

    Args:
        redis: the Redis with the published positions.
        dsn: the database of readers.
        halt: if this event is set, `run` returns.
        streams: the streams to follow; None for all.
        history_dsn: DSN of Tidemark's Postgres, for late completions that Redis no longer has; None: read only Redis.
        metrics: the metrics to update; None: metrics that are not served.
    """

    def __init__(
        self,
        redis: RedisAddress,
        dsn: Dsn,
        halt: threading.Event,
        streams: Collection[str] | None = None,
        history_dsn: str | None = None,
        metrics: FollowMetrics | None = None,
    ) -> None:
        self._redis = RedisSession(redis, REMEDIES, REDIS_TIMEOUT_SECONDS)
        self._session = reader_session(dsn, "tidemark follow")
        self._positions = Positions(redis, history_dsn)
        self._halt = halt
        self._metrics = metrics or FollowMetrics(CollectorRegistry())
        self._streams = None if streams is None else frozenset(streams)
        self._known_streams: dict[str, KnownStream] = {}
        """Stream -> the positions in the database of readers."""
        self._local_writers: Mapping[str, tuple[int, Mapping[str, int]]] = {}
        """Stream with writers in this database -> (ID, a magnitude, after which the stream begins; writer -> epoch)."""
        self._published_positions: dict[str, tuple[int, Mapping[str, int], int]] = {}
        """Stream -> the published positions at the last change: linear position, writer -> position, and the number of
        the newest late completion."""
        self._is_full_read = False
        """Whether this iteration reads all streams. Such an iteration first reads `_known_streams` and
        `_local_writers`."""
        self._local_streams = set[str]()
        """The streams whose position this database decides."""

    def is_local(self, stream: str) -> bool:
        """Whether this database decides the position of the stream. Then all writers of the stream are in this database
        (see `_decide_source`). False before the first read of Redis. Thread-safe."""
        return stream in self._local_streams

    def run(self, *, retries_refusals: bool = False) -> None:
        """Copy positions until `halt` is set. Waits while servers are unavailable. Closes all sessions at the end.

        Args:
            retries_refusals: whether to log a warning and try again if a server refuses a statement.

        Raises:
            Refused: a server refused a statement, and `retries_refusals` is not set.
        """
        wait_log = WaitLog()
        try:
            while not self._halt.is_set():
                self._metrics.heartbeat.set_to_current_time()
                try:
                    self._follow(wait_log)
                except Unavailable as problem:
                    self._halt.wait(wait_log.pause_after(problem))
                except Refused as problem:
                    if not retries_refusals:
                        raise
                    log.warning("Cannot copy the published positions; trying again", problem=str(problem))
                    self._halt.wait(REFUSED_PAUSE_SECONDS)
        finally:
            self._redis.close()
            self._positions.close()
            self._session.close()

    def _follow(self, wait_log: WaitLog) -> None:
        self._published_positions.clear()
        with self._redis.use() as client, client.pubsub() as pubsub:
            pubsub.psubscribe(channel_pattern(database_of(client)))
            read_at = -FULL_READ_INTERVAL_SECONDS
            while not self._halt.is_set():
                self._metrics.heartbeat.set_to_current_time()
                moved = _receive_moved_streams(pubsub)
                self._is_full_read = time.monotonic() - read_at >= FULL_READ_INTERVAL_SECONDS
                if self._is_full_read:
                    read_at = time.monotonic()
                    self._known_streams = reader_database.known_streams(self._session)
                    self._local_writers = reader_database.local_writers(self._session)
                    moved = {*client.smembers(STREAMS_KEY), *self._local_writers}
                if self._streams is not None:
                    moved &= self._streams
                self._copy(client, sorted(moved))
                wait_log.note_success()
                if self._is_full_read:
                    self._metrics.last_read.set_to_current_time()
                    self._metrics.streams.set(len(self._known_streams))

    def _copy(self, client: object, streams: Collection[str]) -> None:
        names = [*streams]
        for start in range(0, len(names), STREAMS_PER_TRANSACTION):
            updates = dict[str, StreamUpdate]()
            for stream in names[start : start + STREAMS_PER_TRANSACTION]:
                request = ReadKeys(stream)
                published = read_reply(request, send_request(client, request))
                if (
                    self._decide_source(stream, published)
                    and (update := self._next_update(stream, published)) is not None
                ):
                    updates[stream] = update
            if updates:
                reader_database.publish(self._session, updates)
                for stream, update in updates.items():
                    known = self._known_streams.get(stream, KnownStream(0, 0, "published"))
                    newest = max([known.last_late_number, update.late_after, *(late.number for late in update.late)])
                    self._known_streams[stream] = KnownStream(update.linear, newest, "published")

    def _decide_source(self, stream: str, published: StreamKeys) -> bool:
        """Whether to copy the published positions of the stream. Also updates `_local_streams`, and hands the stream
        over (`_hand_over`).

        False if this database decides the position of the stream, if the hand-over is not complete, or if Redis has no
        position. This database decides while all writers of the stream are in it, and until an operator override
        settles IDs that are open in it. The change to published positions is permanent.
        """
        known = self._known_streams.get(stream)
        if known is not None and known.source != "database":
            self._local_streams.discard(stream)
            if known.source == "handover":
                return self._hand_over(stream, published, known)
            return published.linear is not None
        if stream not in self._local_writers:
            return known is None and published.linear is not None
        after, writers = self._local_writers[stream]
        if any(writer not in writers and is_beyond(id, after) for writer, id in published.positions.items()):
            reason = "the stream has writers in other databases"
        elif known is not None and self._is_overridden(stream, published, known, writers):
            reason = "an operator has settled IDs that are open in this database"
        else:
            self._local_streams.add(stream)
            return False
        self._local_streams.discard(stream)
        if known is None:
            return published.linear is not None
        log.warning(
            "This database no longer decides the position of a stream. Readers get the published position once it has"
            " reached the position in this database. This change is permanent",
            stream=stream,
            reason=reason,
        )
        return self._hand_over(stream, published, known)

    def _hand_over(self, stream: str, published: StreamKeys, known: KnownStream) -> bool:
        """Change the stream from the position of this database to the published positions. The change is complete when
        the published positions have reached the position of this database: until then, call this method again.

        Returns True if the change is complete, and Redis has a position to copy.
        """
        source = reader_database.hand_over(
            self._session, stream, published.last_late_number, published.linear or 0, published.positions
        )
        late = published.last_late_number if known.source == "database" else known.last_late_number
        self._known_streams[stream] = KnownStream(published.linear or known.linear, late, source)
        return published.linear is not None and source == "published"

    def _is_overridden(self, stream: str, published: StreamKeys, known: KnownStream, epochs: Mapping[str, int]) -> bool:
        """Whether an operator override has settled IDs beyond the linear position `known.linear` of this database.

        An override of an earlier epoch than in `epochs` is ignored: it is older than a restore of this database. Reads
        the published events only in an iteration that reads all streams; in all other iterations, the result is False.
        """
        if published.linear is None or not is_beyond(published.linear, known.linear) or not self._is_full_read:
            return False
        return any(
            isinstance(event, Advance) and event.evidence.skipped and event.epoch >= epochs.get(event.writer, 0)
            for event in self._read_events(stream, Place(known.linear, {}, published.last_late_number, is_settled=True))
        )

    def _next_update(self, stream: str, published: StreamKeys) -> StreamUpdate | None:
        """Compute the update of a stream for the database, and remember its published positions. None if they have not
        changed since the last call. Reads new late completions from Redis, or from Postgres if Redis lacks them."""
        assert published.linear is not None
        positions = (published.linear, published.positions, published.last_late_number)
        if self._published_positions.get(stream) == positions:
            return None
        self._published_positions[stream] = positions
        writers = {writer: id for writer, id in published.positions.items() if is_beyond(id, published.linear)}
        known = self._known_streams.get(stream)
        if known is None:
            return StreamUpdate(published.linear, writers, late_after=published.last_late_number)
        if published.last_late_number <= known.last_late_number:
            return StreamUpdate(published.linear, writers)
        events = self._read_events(
            stream, Place(published.linear, published.positions, known.last_late_number, is_settled=True)
        )
        late = [
            PublishedLate(event.number, event.writer, event.epoch, event.prev, event.id, event.facts, event.why)
            for event in events
            if isinstance(event, Late)
        ]
        lost = max((event.number for event in events if isinstance(event, MissingLateCompletions)), default=0)
        return StreamUpdate(published.linear, writers, lost, late)

    def _read_events(self, stream: str, since: Place) -> list[Event]:
        """Read the events between the place `since` and the positions that are published now."""
        driver: Driver[Event | CaughtUp] = Driver(FollowProgram(stream, "vector", since).steps())
        events = list[Event]()
        while not isinstance(step := driver.step(), CaughtUp):
            if isinstance(step, Event):
                driver.mark_handed_over()
                events.append(step)
            else:
                assert step is not None
                driver.send_answer(self._positions.carry_out(step, self._halt))
        return events


def run(
    settings: Settings,
    dsn: Dsn,
    streams: Collection[str] | None,
    history_dsn: str | None,
    metrics_address: str | None,
) -> None:
    """Copy published positions until SIGTERM or SIGINT. Waits while servers are unavailable.

    Args:
        settings: the settings with the address of Redis.
        dsn: the database of readers.
        streams: the streams to copy; None for all.
        history_dsn: DSN of Tidemark's Postgres, for late completions that Redis no longer has; None: read only Redis.
        metrics_address: host:port at which metrics and probes are served; None: serve none.

    Raises:
        BadSetting: `metrics_address` is not `host:port`, or the process cannot listen on this address.
        Refused: a server refused a statement.
    """
    halt = shutdown_event()
    follow_metrics = FollowMetrics(CollectorRegistry())
    with ExitStack() as stack:
        if metrics_address is not None:
            address = http_health.parse_metrics_address(metrics_address)
            stack.enter_context(http_health.serve_health("--metrics", address, follow_metrics))
            stack.enter_context(run_in_thread(ReaderWatch(dsn, follow_metrics.registry, halt).run, halt))
        PositionFollower(settings.redis, dsn, halt, streams, history_dsn, follow_metrics).run()


def _receive_moved_streams(pubsub: object) -> set[str]:
    """Receive messages on the channels of streams, and return the names of these streams. Waits at most 50 ms for the
    first message, then takes the messages that have arrived, for at most 60 ms in all."""
    moved = set[str]()
    deadline = time.monotonic() + _ALL_MESSAGES_SECONDS
    while time.monotonic() < deadline:
        wait = 0.0 if moved else _FIRST_MESSAGE_SECONDS
        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=wait)  # type: ignore[attr-defined]
        if message is None:
            break
        moved.add(stream_of(message["channel"]))
    return moved


def migrate(dsn: Dsn, halt: threading.Event, wait_seconds: float) -> bool:
    """Install or update the schema `tidemark_reader`. Returns False if the schema was up to date.

    Raises:
        Unavailable: the database still did not answer, or its tables were locked, after `wait_seconds`.
        Stopping: `halt` was set.
    """
    show_progress = partial(progress, "installing", unit="script")
    with reader_session(dsn, "tidemark follow migrate") as session:
        return wait_out(lambda: reader_database.install(session, show_progress), halt, wait_seconds)
