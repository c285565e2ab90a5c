"""`tidemark relay`: sends appended facts of a service's database to Kafka, creates its schema, and lists blocking
transactions.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from prometheus_client import CollectorRegistry
from psycopg import errors

from tidemark.app.logs import beside, shutdown_event
from tidemark.app.output import progress
from tidemark.app.serving import http_health
from tidemark.app.settings import Settings
from tidemark.common.backoff import wait_out
from tidemark.common.errors import BadSetting, PrerequisitePending, Refused, Stopping, TopicMissing, Unavailable
from tidemark.common.migrations import run_locking
from tidemark.common.postgres_session import Connection, Dsn, PostgresSession, first_line
from tidemark.sinks.reader_database import install
from tidemark.sources.producer import FOR_EVER, topic_producer
from tidemark.sources.relay import queries
from tidemark.sources.relay.local_positions import LocalPositions
from tidemark.sources.relay.queries import SCHEMA, session_of
from tidemark.sources.relay.relay import AppendRelay, RelayMetrics
from tidemark.sources.run_loop import LoopMetrics
from tidemark.sources.topics import Topics
from tidemark.streaming.values.direction import DirectionName
from tidemark.streaming.wire.records import is_name, why_no_name

Say = Callable[[str], None]


# The loop runs twenty times a second. Only a server that does not answer can delay it for this long.
STALE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """The arguments of `run`. `writer`: the database's writer name in Tidemark; None: the name of the database.
    `metrics`: the listening address for metrics.
    """

    dsn: Dsn
    writer: str | None
    metrics: str | None


def run(settings: Settings, plan: RelayPlan) -> None:
    """Run the relay until SIGTERM or SIGINT. Raises `Stop` if a person must decide."""
    halt = shutdown_event()
    metrics = RelayMetrics(CollectorRegistry())
    with ExitStack() as stack:
        stack.enter_context(suppress(Stopping))
        if plan.metrics is not None:
            stack.enter_context(
                http_health.serve_health(
                    "--metrics", http_health.metrics_address(plan.metrics), LoopHealth(metrics, "the database")
                )
            )
            if find_spec("redis") is not None:  # the reader library needs it
                from tidemark.app.follow_positions import ReaderWatch  # noqa: PLC0415

                watch = ReaderWatch(plan.dsn, metrics.registry, halt)
                stack.enter_context(beside(watch.run, halt))
        is_ours = _followed(settings, plan.dsn, halt, stack)
        positions = LocalPositions(session_of(plan.dsn, "tidemark relay positions"), halt, is_ours)
        stack.enter_context(beside(positions.run, halt))
        wait_out(lambda: find_topic(settings), halt)
        session = stack.enter_context(session_of(plan.dsn, "tidemark relay"))
        AppendRelay(
            session,
            lambda: topic_producer(settings.kafka, settings.kafka_facts_topic, give_up_after=FOR_EVER),
            plan.writer,
            metrics,
            halt,
            heartbeat=settings.heartbeat_seconds,
        ).run()


def _followed(settings: Settings, dsn: Dsn, halt: threading.Event, stack: ExitStack) -> Callable[[str], bool]:
    """Follow the published positions, if a Redis is configured. Returns a function: whether all writers of a stream are
    in this database.
    """
    if "redis_url" not in settings.model_fields_set:
        return lambda _: True
    from tidemark.app.follow_positions import PositionFollower  # noqa: PLC0415 - it needs the library of Redis

    follower = PositionFollower(settings.redis, dsn, halt)
    stack.enter_context(beside(partial(follower.run, patient=True), halt))
    return follower.is_ours


def find_topic(settings: Settings) -> None:
    """Check the facts topic. Raises `Unavailable` also if it is missing, because the program that creates it may start
    later.
    """
    try:
        Topics(settings.kafka).describe([settings.kafka_facts_topic])
    except TopicMissing as problem:
        raise Unavailable("the facts topic", settings.kafka.bootstrap, str(problem)) from problem


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """The health of a process with a run loop, for probes: the relay, or the bridge to Synapse."""

    metrics: LoopMetrics
    database: str

    @property
    def registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def liveness_problem(self, now: float) -> str | None:
        is_active = http_health.gauge_value(self.metrics.active) == 1
        is_stale = is_active and now - http_health.gauge_value(self.metrics.heartbeat) >= STALE_SECONDS
        return "the loop does not run" if is_stale else None

    def readiness_problem(self) -> str | None:
        """The reason why the process is not ready. A standby is ready, so that a rolling update can proceed."""
        works = http_health.gauge_value(self.metrics.active) or http_health.gauge_value(self.metrics.standby)
        return None if works else f"starting, or waiting for Kafka or {self.database}"


def migrate(dsn: Dsn, streams: Sequence[str], direction: DirectionName, say: Say) -> None:
    """Update schema and functions, and create the missing streams."""
    for name in streams:
        if not is_name(name):
            raise BadSetting("stream", why_no_name(name))
    with session_of(dsn, "tidemark relay migrate") as session:
        with session.use() as connection:
            row = connection.execute("show server_encoding").fetchone()
            if row is None or row[0] != "UTF8":
                raise BadSetting("dsn", f"the database has encoding {row and row[0]}; create it WITH ENCODING 'UTF8'")
        applied = SCHEMA.migrate(session, partial(progress, "migrating", unit="migration"))
        say(f"applied {', '.join(map(str, applied))}" if applied else "the schema is up to date")
        if install(session):
            say("installed the functions of readers")
        for name in streams:
            made = run_locking(session, f"making stream {name}", partial(_make_stream, name, direction))
            say(f"{'made stream' if made else 'there is stream'} {name}")


def _make_stream(name: str, direction: DirectionName, connection: Connection) -> bool:
    """Create the stream if it is missing; returns whether it was. Takes no lock otherwise."""
    existing = connection.execute(
        "select from tidemark.append_streams where stream = %s and ids is not null and direction = %s",
        [name, 1 if direction == "forward" else -1],
    ).fetchone()
    if existing is None:
        connection.execute("select tidemark.create_stream(%s, %s)", [name, direction])
    return existing is None


@dataclass(frozen=True, slots=True)
class RetireOrder:
    """The writer to retire, in `stream` or (None) in all its streams. `wait`: seconds to try."""

    writer: str
    stream: str | None
    wait: float


def retire(dsn: Dsn, order: RetireOrder, halt: threading.Event, say: Say) -> None:
    """End the writer's epochs. The relay publishes that after all facts of the writer.

    Raises `Refused` if there is no such writer, and `PrerequisitePending` if it has open transactions or unpublished
    facts, or if the next ID already has a row because the sequence was set back.
    """
    with session_of(dsn, "tidemark relay retire") as session:
        streams = [order.stream] if order.stream is not None else _streams_of(session, order.writer)
        for stream in streams:
            id = wait_out(partial(_retired, session, order.writer, stream), halt, order.wait)
            say(f"{order.writer} ends at {id} of {stream}")
        if not streams:
            say(f"no stream has a writer {order.writer} that is not retired")


def _streams_of(session: PostgresSession, writer: str) -> list[str]:
    with session.use() as connection:
        SCHEMA.check(connection)
        rows = connection.execute(
            """
            select stream from tidemark.append_writers known
            join tidemark.append_streams using (number) join tidemark.append_progress progress using (number)
            where known.writer = %s and known.state in ('joining', 'joined') and progress.writer <> known.writer
            order by stream
            """,
            [writer],
        ).fetchall()
    return [stream for (stream,) in rows]


def _retired(session: PostgresSession, writer: str, stream: str) -> int:
    """The ID at which the writer ends, signed."""
    with session.use() as connection:
        try:
            row = connection.execute("select tidemark.retire_writer(%s, %s)", [writer, stream]).fetchone()
        except (errors.ObjectInUse, errors.ObjectNotInPrerequisiteState, errors.UniqueViolation) as error:
            raise PrerequisitePending(f"the end of {writer}", session.where, first_line(error)) from error
        except (errors.UndefinedObject, errors.InvalidParameterValue) as error:
            do = error.diag.message_hint or "give another name"
            raise Refused("Postgres", session.where, first_line(error), do) from error
    assert row is not None
    return int(row[0])


def blockers(dsn: str, say: Say) -> None:
    """Print the open transactions that block a stream."""
    with session_of(dsn, "tidemark relay blockers") as session, session.use() as connection:
        SCHEMA.check(connection)
        transactions = queries.blockers(connection)
    for transaction in transactions:
        say(str(transaction))
    if not transactions:
        say("no open transaction blocks a stream")
