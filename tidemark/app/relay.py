"""`tidemark relay`: sends the appended facts of a service's database to Kafka. Also creates the schema in the database,
retires writers, and lists blocking transactions.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from prometheus_client import CollectorRegistry
from psycopg import errors

from tidemark.app.logs import run_in_thread, shutdown_event
from tidemark.app.output import applied_migrations, progress
from tidemark.app.serving import http_health
from tidemark.app.settings import Settings, is_set
from tidemark.common.backoff import wait_out
from tidemark.common.errors import BadSetting, PrerequisitePending, Refused, Stopping, TopicMissing, Unavailable
from tidemark.common.migrations import run_with_lock_timeout
from tidemark.common.postgres_session import Connection, Dsn, PostgresSession, first_line
from tidemark.sinks.reader_database import install
from tidemark.sources.producer import NO_TIME_LIMIT, make_topic_producer
from tidemark.sources.relay import queries
from tidemark.sources.relay.local_positions import LocalPositions
from tidemark.sources.relay.queries import SCHEMA, session_of
from tidemark.sources.relay.relay import AppendRelay, RelayMetrics
from tidemark.sources.run_loop import LoopMetrics
from tidemark.sources.topics import Topics
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.values.direction import DirectionName
from tidemark.streaming.wire.records import explain_bad_name, is_name

Say = Callable[[str], None]


STALE_SECONDS = 60.0
"""Seconds without an iteration of the loop after which a relay or bridge counts as hanging. A relay usually iterates
twenty times a second."""


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """The arguments of `run`.

    Attributes:
        dsn: the service's database.
        writer: the writer name of the database; None: the name of the database.
        metrics_address: host:port at which metrics and probes are served; None: serve none.
    """

    dsn: Dsn
    writer: str | None
    metrics_address: str | None


def run(settings: Settings, plan: RelayPlan) -> None:
    """Run the relay until SIGTERM or SIGINT. Waits while servers are down. Raises `Stop` if a person must decide."""
    halt = shutdown_event()
    metrics = RelayMetrics(CollectorRegistry())
    with ExitStack() as stack:
        stack.enter_context(suppress(Stopping))
        if plan.metrics_address is not None:
            address = http_health.parse_metrics_address(plan.metrics_address)
            health = LoopHealth(metrics, "the database")
            stack.enter_context(http_health.serve_health("--metrics", address, health))
            if find_spec("redis") is not None:  # the reader library needs it
                from tidemark.app.follow_positions import ReaderWatch  # noqa: PLC0415

                watch = ReaderWatch(plan.dsn, metrics.registry, halt)
                stack.enter_context(run_in_thread(watch.run, halt))
        is_local = _follow_positions(settings, plan.dsn, halt, stack)
        positions = LocalPositions(session_of(plan.dsn, "tidemark relay positions"), halt, is_local)
        stack.enter_context(run_in_thread(positions.run, halt))
        wait_out(lambda: require_facts_topic(settings), halt)
        session = stack.enter_context(session_of(plan.dsn, "tidemark relay"))
        AppendRelay(
            session,
            lambda: make_topic_producer(settings.kafka, settings.kafka_facts_topic, give_up_after=NO_TIME_LIMIT),
            plan.writer,
            metrics,
            halt,
            heartbeat=settings.heartbeat_seconds,
        ).run()


def _follow_positions(settings: Settings, dsn: Dsn, halt: threading.Event, stack: ExitStack) -> Callable[[str], bool]:
    """Start a thread that copies the published positions into the database, if TIDEMARK_REDIS_URL is set. The thread
    ends when `stack` is closed.

    Returns a function that gets the name of a stream, and returns whether this database decides the stream's position.
    Without TIDEMARK_REDIS_URL, this is always True.
    """
    if not is_set("redis_url"):
        return lambda _: True
    from tidemark.app.follow_positions import PositionFollower  # noqa: PLC0415 - needs redis-py

    follower = PositionFollower(settings.redis, dsn, halt)
    stack.enter_context(run_in_thread(partial(follower.run, retries_refusals=True), halt))
    return follower.is_local


def require_facts_topic(settings: Settings) -> None:
    """Raise `Unavailable` if Kafka does not answer, or if the facts topic is missing. The caller may try again: another
    program may create the topic later."""
    try:
        Topics(settings.kafka).describe([settings.kafka_facts_topic])
    except TopicMissing as problem:
        raise Unavailable("the facts topic", settings.kafka.bootstrap, str(problem)) from problem


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """The health of the relay or of the bridge to Synapse, for probes. `database`: the text for its databases in
    messages."""

    metrics: LoopMetrics
    database: str

    @property
    def registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def liveness_problem(self, now: float) -> str | None:
        is_active = http_health.gauge_value(self.metrics.active) == 1
        is_stale = is_active and now - http_health.gauge_value(self.metrics.heartbeat) >= STALE_SECONDS
        return f"the loop has not run for {STALE_SECONDS:.0f} s" if is_stale else None

    def readiness_problem(self) -> str | None:
        """Why the process is not ready; None if it is ready. A standby is ready, so that a rolling update can
        proceed."""
        is_working = http_health.gauge_value(self.metrics.active) or http_health.gauge_value(self.metrics.standby)
        return None if is_working else f"starting, or waiting for Kafka or {self.database}"


@dataclass(frozen=True, slots=True)
class StreamCreation:
    """A stream that the caller of `migrate` asked for. `created`: whether `migrate` has created the stream now."""

    stream: str
    created: bool


@dataclass(frozen=True, slots=True)
class RelayMigrationResult:
    """The result of `migrate`.

    Attributes:
        applied: the versions of the migrations that were applied now.
        readers_installed: whether the functions of readers were created or updated now.
        streams: the streams that the caller asked for.
    """

    applied: Sequence[int]
    readers_installed: bool
    streams: Sequence[StreamCreation]


def migrate(dsn: Dsn, streams: Sequence[str], direction: DirectionName, say: Say) -> RelayMigrationResult:
    """Create or update the tables and functions of the relay and of readers, and create the streams that are missing.
    Calls `say` with a line of text for each step.

    Args:
        dsn: the service's database.
        streams: the streams to create.
        direction: the direction of the IDs of `streams`.
        say: called with each line of text.

    Raises:
        BadSetting: a stream's name is not allowed, or the encoding of the database is not UTF8.
        Unavailable: the database does not answer, or its tables are locked for too long.
    """
    for name in streams:
        if not is_name(name):
            raise BadSetting("stream", explain_bad_name(name))
    with session_of(dsn, "tidemark relay migrate") as session:
        with session.use() as connection:
            row = connection.execute("show server_encoding").fetchone()
            if row is None or row[0] != "UTF8":
                raise BadSetting(
                    "dsn", f"the database has encoding {row and row[0]}; create a database WITH ENCODING 'UTF8'"
                )
        applied = SCHEMA.migrate(session, partial(progress, "migrating", unit="migration"))
        say(applied_migrations(applied))
        installed = install(session, partial(progress, "installing", unit="script"))
        if installed:
            say("installed the functions of readers")
        created = list[StreamCreation]()
        for name in streams:
            is_new = run_with_lock_timeout(session, f"creating stream {name}", partial(_create_stream, name, direction))
            say(f"created stream {name}" if is_new else f"stream {name} exists")
            created.append(StreamCreation(name, is_new))
    return RelayMigrationResult(applied, installed, created)


def _create_stream(name: str, direction: DirectionName, connection: Connection) -> bool:
    """Create the stream. Returns False if the stream existed in this direction; then no lock was taken. The database
    raises an error if the stream exists in the other direction."""
    existing = connection.execute(
        "select from tidemark.append_streams where stream = %s and ids is not null and direction = %s",
        [name, 1 if direction == "forward" else -1],
    ).fetchone()
    if existing is None:
        connection.execute("select tidemark.create_stream(%s, %s)", [name, direction])
    return existing is None


@dataclass(frozen=True, slots=True)
class RetireOrder:
    """The arguments of `retire`.

    Attributes:
        writer: the writer to retire.
        stream: the stream; None: all streams of the writer.
        wait_seconds: how long to try for each stream.
    """

    writer: str
    stream: str | None
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Retirement:
    """The ID of a stream at which a writer retires, signed."""

    stream: str
    id: int


def retire(dsn: Dsn, order: RetireOrder, halt: threading.Event, say: Say) -> list[Retirement]:
    """Retire a writer in one or all of its streams. The relay sends the RETIRE records later, after all facts of the
    writer. Calls `say` with a line of text for each stream. Returns an empty list if `order.stream` is None and the
    writer is active in no stream.

    Raises:
        Refused: the writer or the stream does not exist, or the writer is the database itself.
        PrerequisitePending: after `order.wait_seconds`, the writer still has open transactions or unsent facts, or the
            next ID already has a row because the sequence was set back. Earlier streams are retired.
        Stopping: `halt` was set.
    """
    retired = list[Retirement]()
    with session_of(dsn, "tidemark relay retire") as session:
        streams = [order.stream] if order.stream is not None else _streams_of(session, order.writer)
        for stream in streams:
            id = wait_out(partial(_retire_writer, session, order.writer, stream), halt, order.wait_seconds)
            say(f"{order.writer} retires at ID {id} of {stream}")
            retired.append(Retirement(stream, id))
        if not streams:
            say(f"no stream has an active writer {order.writer}")
    return retired


def _streams_of(session: PostgresSession, writer: str) -> list[str]:
    """Read the streams in which the writer is active. Empty for the database's own writer, which cannot retire."""
    with session.use() as connection:
        SCHEMA.check_writable(connection)
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


def _retire_writer(session: PostgresSession, writer: str, stream: str) -> int:
    """Retire a writer in one stream. Returns the ID at which the writer retires, signed. Raises `PrerequisitePending`
    and `Refused` as `retire` does."""
    with session.use() as connection:
        try:
            row = connection.execute("select tidemark.retire_writer(%s, %s)", [writer, stream]).fetchone()
        except (errors.ObjectInUse, errors.ObjectNotInPrerequisiteState, errors.UniqueViolation) as error:
            raise PrerequisitePending(f"the retirement of {writer}", session.where, first_line(error)) from error
        except (errors.UndefinedObject, errors.InvalidParameterValue) as error:
            remedy = error.diag.message_hint or "give the name of an existing writer and stream"
            raise Refused("Postgres", session.where, first_line(error), remedy) from error
    assert row is not None
    return int(row[0])


def read_blockers(dsn: str) -> list[OpenTransaction]:
    """Read the open transactions that block any stream of the database. Transactions whose start this user may not see
    come first, then the others, the oldest first."""
    with session_of(dsn, "tidemark relay blockers") as session, session.use() as connection:
        SCHEMA.check_writable(connection)
        return queries.read_blockers(connection)
