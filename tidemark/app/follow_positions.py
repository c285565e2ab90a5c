"""`tidemark follow`: keeps the published positions in a database of readers. The relay does so in its own database.

It copies the published positions from Redis: channels wake this process, and once a second it reads all streams.
Several processes may copy into one database, because stored positions only rise.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from prometheus_client import CollectorRegistry, Gauge

from tidemark.app.diagnosis.reader_lag import PositionSamples, ReaderLag, ReaderMetrics
from tidemark.app.logs import beside, shutdown_event
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
    LateLost,
    Place,
    Positions,
    ReaderPlaces,
    ReadKeys,
    StreamKeys,
    read_reply,
    send_request,
)
from tidemark.sinks.reader_database import KnownStream, Move, PublishedLate, reader_session
from tidemark.sinks.redis.client import STREAMS, RedisAddress, RedisSession, channels, database_of, stream_of
from tidemark.streaming.values.direction import beyond

log = get_logger(__name__)

READERS_EVERY = 5.0
"""Seconds between two reads of the places of readers."""
SILENT = 15.0
"""Seconds without a read of all streams after which the process is not ready."""
HANGS = 60.0
"""Seconds without a round of the loop after which the process counts as hanging."""
TIMEOUT = 2.0
"""Time-out in seconds of a connection to Redis, and of an answer."""
ALL_EVERY = 1.0
"""Seconds between two reads of all streams, because messages on channels may be lost."""
_COLLECT = 0.01
"""Seconds for which further messages are collected after the first."""
REFUSED_PAUSE = 5.0


class FollowMetrics:
    """The metrics of `tidemark follow`, and its health for probes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.heartbeat = Gauge(
            "tidemark_follow_heartbeat_timestamp_seconds",
            "Time of the last turn of the loop, also while a server is away (s since 1970).",
            registry=registry,
        )
        self.last_read = Gauge(
            "tidemark_follow_last_read_timestamp_seconds",
            "Time of the last reading of all streams (s since 1970). Not rising: Redis or the database does not"
            " answer.",
            registry=registry,
        )
        self.streams = Gauge(
            "tidemark_follow_streams", "Streams whose positions the database of readers has.", registry=registry
        )
        self.heartbeat.set_to_current_time()

    def liveness_problem(self, now: float) -> str | None:
        return "the loop does not run" if now - http_health.gauge_value(self.heartbeat) >= HANGS else None

    def readiness_problem(self) -> str | None:
        is_silent = time.time() - http_health.gauge_value(self.last_read) >= SILENT
        return "starting, or waiting for Redis or the database of readers" if is_silent else None


class ReaderWatch:
    """Updates the metrics of the readers in the database that this process writes to, until `halt` is set."""

    def __init__(self, dsn: Dsn, registry: CollectorRegistry, halt: threading.Event) -> None:
        self._session = reader_session(dsn, "tidemark reader metrics")
        self._places = ReaderPlaces(dsn, "tidemark reader metrics")
        self._lag = ReaderLag(PositionSamples(self._session))
        self._metrics = ReaderMetrics(registry)
        self._halt = halt

    def run(self) -> None:
        is_shown = True
        try:
            while not self._halt.is_set():
                try:
                    self._metrics.show(self._lag.statuses(self._places.places()))
                    is_shown = True
                except (Unavailable, Refused) as problem:
                    self._metrics.show(())
                    if is_shown:
                        log.warning("The metrics of readers are missing", problem=str(problem))
                    is_shown = False
                self._halt.wait(READERS_EVERY)
        finally:
            self._session.close()
            self._places.close()


class PositionFollower:
    """Copies published positions to a database of readers until `halt` is set.

    Args:
        redis: the Redis with the published positions.
        dsn: the database of readers.
        streams: the streams to follow; None for all.
        history: the address of Tidemark's Postgres, for late completions that Redis no longer lists.
        metrics: the metrics to update.
    """

    def __init__(
        self,
        redis: RedisAddress,
        dsn: Dsn,
        halt: threading.Event,
        streams: Collection[str] | None = None,
        history: str | None = None,
        metrics: FollowMetrics | None = None,
    ) -> None:
        self._redis = RedisSession(redis, REMEDIES, TIMEOUT)
        self._session = reader_session(dsn, "tidemark follow")
        self._positions = Positions(redis, history)
        self._halt = halt
        self._metrics = metrics or FollowMetrics(CollectorRegistry())
        self._streams = None if streams is None else frozenset(streams)
        self._known: dict[str, KnownStream] = {}
        self._here: Mapping[str, tuple[int, Mapping[str, int]]] = {}
        self._published: dict[str, tuple[int, Mapping[str, int], int]] = {}
        self._is_full_read = False
        """Whether the positions of this database were read a moment ago."""
        self._ours = set[str]()

    def is_ours(self, stream: str) -> bool:
        """Whether all writers of the stream are in this database, according to the last read of Redis. Thread-safe."""
        return stream in self._ours

    def run(self, *, patient: bool = False) -> None:
        """Run until `halt` is set; wait while servers are unavailable. Raises `Refused`, unless `patient`. Closes all
        sessions at the end.
        """
        patience = WaitLog()
        try:
            while not self._halt.is_set():
                self._metrics.heartbeat.set_to_current_time()
                try:
                    self._follow(patience)
                except Unavailable as problem:
                    self._halt.wait(patience.pause_after(problem))
                except Refused as problem:
                    if not patient:
                        raise
                    log.warning("Published positions are not followed", problem=str(problem))
                    self._halt.wait(REFUSED_PAUSE)
        finally:
            self._redis.close()
            self._positions.close()
            self._session.close()

    def _follow(self, patience: WaitLog) -> None:
        self._published.clear()
        with self._redis.use() as client, client.pubsub() as pubsub:
            pubsub.psubscribe(channels(database_of(client)))
            read_at = -ALL_EVERY
            while not self._halt.is_set():
                self._metrics.heartbeat.set_to_current_time()
                moved = _moved(pubsub)
                self._is_full_read = time.monotonic() - read_at >= ALL_EVERY
                if self._is_full_read:
                    read_at = time.monotonic()
                    self._known = reader_database.known_streams(self._session)
                    self._here = reader_database.writers_here(self._session)
                    moved = {*client.smembers(STREAMS), *self._here}
                if self._streams is not None:
                    moved &= self._streams
                self._read(client, sorted(moved))
                patience.succeeded()
                if self._is_full_read:
                    self._metrics.last_read.set_to_current_time()
                    self._metrics.streams.set(len(self._known))

    def _read(self, client: object, streams: Collection[str]) -> None:
        names = [*streams]
        for start in range(0, len(names), STREAMS_PER_TRANSACTION):
            moves = dict[str, Move]()
            for stream in names[start : start + STREAMS_PER_TRANSACTION]:
                request = ReadKeys(stream)
                keys = read_reply(request, send_request(client, request))
                if self._is_followed(stream, keys) and (move := self._move(stream, keys)) is not None:
                    moves[stream] = move
            if moves:
                reader_database.publish(self._session, moves)
                for stream, move in moves.items():
                    known = self._known.get(stream, KnownStream(0, 0, is_decided_here=False))
                    newest = max([known.late, move.late_after, *(late.number for late in move.late)])
                    self._known[stream] = KnownStream(move.linear, newest, is_decided_here=False)

    def _is_followed(self, stream: str, keys: StreamKeys) -> bool:
        """Whether the published positions move the stream. They do not if all its writers are in this database, whose
        transactions decide its position then.
        """
        known = self._known.get(stream)
        is_decided_here = known is not None and known.is_decided_here
        if stream in self._here:
            after, writers = self._here[stream]
            if any(writer not in writers and beyond(id, after) for writer, id in keys.positions.items()):
                reason = "it has writers elsewhere"
            elif known is not None and is_decided_here and self._is_overridden(stream, keys, known, writers):
                reason = "an operator has settled IDs that are open here"
            elif known is None or is_decided_here:
                self._ours.add(stream)
                return False
            else:
                reason = ""
            self._ours.discard(stream)
            if is_decided_here:
                log.warning("Published positions move a stream now", stream=stream, reason=reason)
                reader_database.share(self._session, stream, keys.late)
                self._known[stream] = KnownStream(keys.linear or 0, keys.late, is_decided_here=False)
                is_decided_here = False
        return keys.linear is not None and not is_decided_here

    def _is_overridden(self, stream: str, keys: StreamKeys, known: KnownStream, epochs: Mapping[str, int]) -> bool:
        """Whether an operator has settled IDs beyond the position of this database, in the current epoch of a writer.
        An override of an earlier epoch happened before a restore."""
        if keys.linear is None or not beyond(keys.linear, known.linear) or not self._is_full_read:
            return False
        return any(
            isinstance(event, Advance) and event.evidence.skipped and event.epoch >= epochs.get(event.writer, 0)
            for event in self._events(stream, Place(known.linear, {}, keys.late, is_settled=True))
        )

    def _move(self, stream: str, keys: StreamKeys) -> Move | None:
        assert keys.linear is not None
        published = (keys.linear, keys.positions, keys.late)
        if self._published.get(stream) == published:
            return None
        self._published[stream] = published
        writers = {writer: id for writer, id in keys.positions.items() if beyond(id, keys.linear)}
        known = self._known.get(stream)
        if known is None:
            return Move(keys.linear, writers, late_after=keys.late)
        if keys.late <= known.late:
            return Move(keys.linear, writers)
        events = self._events(stream, Place(keys.linear, keys.positions, known.late, is_settled=True))
        late = [
            PublishedLate(event.number, event.writer, event.epoch, event.prev, event.id, event.facts, event.why)
            for event in events
            if isinstance(event, Late)
        ]
        lost = max((event.number for event in events if isinstance(event, LateLost)), default=0)
        return Move(keys.linear, writers, lost, late)

    def _events(self, stream: str, since: Place) -> list[Event]:
        """The events beyond a place, up to the currently published positions."""
        driver: Driver[Event | CaughtUp] = Driver(FollowProgram(stream, "vector", since).steps())
        events = list[Event]()
        while not isinstance(step := driver.step(), CaughtUp):
            if isinstance(step, Event):
                driver.handed_over()
                events.append(step)
            else:
                assert step is not None
                driver.answered(self._positions.carry_out(step, self._halt))
        return events


def run(
    settings: Settings, dsn: Dsn, streams: Collection[str] | None, history: str | None, metrics: str | None
) -> None:
    """Follow until SIGTERM or SIGINT; serve metrics and probes at the address `metrics`."""
    halt = shutdown_event()
    shown = FollowMetrics(CollectorRegistry())
    with ExitStack() as stack:
        if metrics is not None:
            stack.enter_context(http_health.serve_health("--metrics", http_health.metrics_address(metrics), shown))
            stack.enter_context(beside(ReaderWatch(dsn, shown.registry, halt).run, halt))
        PositionFollower(settings.redis, dsn, halt, streams, history, shown).run()


def _moved(pubsub: object) -> set[str]:
    """The streams with new messages, collected over a short wait."""
    moved, wait = set[str](), 0.05
    deadline = time.monotonic() + wait + _COLLECT
    while time.monotonic() < deadline:
        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=0.0 if moved else wait)  # type: ignore[attr-defined]
        if message is None:
            break
        moved.add(stream_of(message["channel"]))
    return moved


def migrate(dsn: Dsn, halt: threading.Event, wait: float, say: Callable[[str], None]) -> None:
    """Install or update the schema `tidemark_reader`; try for `wait` seconds."""
    with reader_session(dsn, "tidemark follow migrate") as session:
        installed = wait_out(lambda: reader_database.install(session), halt, wait)
    say("installed the functions of readers" if installed else "the functions of readers are up to date")
