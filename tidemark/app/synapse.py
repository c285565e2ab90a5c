"""`tidemark synapse`: sends the facts of Synapse's workers to Kafka. Also creates the bridge's tables, retires workers,
and lists blocking transactions."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from prometheus_client import CollectorRegistry

from tidemark.app.logs import shutdown_event
from tidemark.app.output import progress
from tidemark.app.relay import LoopHealth, Retirement, Say, require_facts_topic
from tidemark.app.serving import http_health
from tidemark.app.settings import Settings
from tidemark.common.backoff import wait_out
from tidemark.common.errors import BadSetting, PrerequisitePending, Stopping
from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.redis.client import RedisAddress
from tidemark.sources.producer import NO_TIME_LIMIT, make_topic_producer
from tidemark.sources.synapse import state
from tidemark.sources.synapse.bridge import BridgeMetrics, SynapseBridge
from tidemark.sources.synapse.channel import SynapseChannel
from tidemark.sources.synapse.state import SCHEMA, state_session
from tidemark.sources.synapse.streams import BridgedStream
from tidemark.sources.synapse.tables import REFUSED, STREAMS, TableWriter, read_table_writers, synapse_session
from tidemark.sources.transactions import is_reported
from tidemark.streaming.wire.records import explain_bad_name, is_name, is_writer_name

REDIS_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class BridgePlan:
    """The arguments of `run`.

    Attributes:
        server: Synapse's server_name.
        streams: Synapse's names of the streams to send.
        writers: the workers of some of the streams, as texts `stream=worker,worker`. A text must name all workers that
            write to its stream.
        prefix: the prefix of the streams' names in Kafka.
        metrics_address: host:port at which metrics and probes are served; None: serve none.
    """

    server: str
    streams: Sequence[str]
    writers: Sequence[str] = ()
    prefix: str = ""
    metrics_address: str | None = None

    def bridged_streams(self) -> list[BridgedStream]:
        """The streams to send, each once. Raises `BadSetting` if an argument is wrong, or a stream cannot be sent."""
        writers = dict(map(_parse_writers, self.writers))
        for stream in [*self.streams, *writers]:
            option = "--stream" if stream in self.streams else "--writers"
            if stream in REFUSED:
                raise BadSetting(option, f"the stream {stream} cannot be sent: {REFUSED[stream]}")
            if stream not in STREAMS:
                raise BadSetting(
                    option,
                    f"{stream!r} is not a stream of Synapse that can be sent; the streams are {', '.join(STREAMS)}",
                )
        if unused := writers.keys() - {*self.streams}:
            raise BadSetting(
                "--writers",
                f"names streams that are not sent: {', '.join(sorted(unused))}. Add each of them with --stream",
            )
        streams = [
            BridgedStream(STREAMS[name], self.prefix + name, writers.get(name, ()))
            for name in dict.fromkeys(self.streams)
        ]
        for bridged in streams:
            if not is_name(bridged.name):
                raise BadSetting("--prefix", explain_bad_name(bridged.name))
        return streams


def _parse_writers(text: str) -> tuple[str, Sequence[str]]:
    stream, sign, names = text.partition("=")
    workers = names.split(",")
    if not sign or not all(map(is_writer_name, workers)):
        raise BadSetting("--writers", f"{text!r} is not a list of workers such as events=event1,event2")
    return stream, workers


def run(settings: Settings, plan: BridgePlan) -> None:
    """Run the bridge until SIGTERM or SIGINT. Waits while servers are down. Raises `Stop` if a person must decide."""
    streams = plan.bridged_streams()
    dsn, redis = _synapse_dsn(settings), settings.secret("synapse_redis_url")
    if redis is None:
        raise BadSetting("TIDEMARK_SYNAPSE_REDIS_URL", "is not set: give the URL of the Redis of Synapse's workers")
    address = RedisAddress(redis, name="TIDEMARK_SYNAPSE_REDIS_URL")
    halt = shutdown_event()
    metrics = BridgeMetrics(CollectorRegistry())
    health = LoopHealth(metrics, "a database")
    with ExitStack() as stack:
        stack.enter_context(suppress(Stopping))
        if plan.metrics_address is not None:
            stack.enter_context(
                http_health.serve_health("--metrics", http_health.parse_metrics_address(plan.metrics_address), health)
            )
        wait_out(lambda: require_facts_topic(settings), halt)
        synapse = stack.enter_context(synapse_session(lambda: settings.secret("synapse_dsn") or dsn))
        own = stack.enter_context(state_session(settings.postgres))
        channel = SynapseChannel(lambda: address.client(REDIS_TIMEOUT_SECONDS), plan.server, halt)
        stack.enter_context(channel)
        SynapseBridge(
            synapse,
            own,
            channel,
            lambda: make_topic_producer(settings.kafka, settings.kafka_facts_topic, give_up_after=NO_TIME_LIMIT),
            streams,
            metrics,
            halt,
            heartbeat=settings.heartbeat_seconds,
        ).run()


def _synapse_dsn(settings: Settings) -> str:
    """The DSN of Synapse's database. Raises `BadSetting` if the setting is missing."""
    if (dsn := settings.secret("synapse_dsn")) is None:
        raise BadSetting("TIDEMARK_SYNAPSE_DSN", "is not set: give the address of Synapse's own database")
    return dsn


def read_blockers(settings: Settings) -> list[TableWriter]:
    """Read the open transactions that write to tables of Synapse's streams, if they are old enough for OPEN records
    (`is_reported`).

    Transactions whose start this user may not see come first, then the others, the oldest first.
    """
    dsn = _synapse_dsn(settings)
    with synapse_session(lambda: dsn) as session, session.use() as connection:
        return [
            writer
            for writer in read_table_writers(connection, STREAMS.values())
            if is_reported(writer.transaction, datetime.now(UTC))
        ]


def migrate(settings: Settings) -> list[int]:
    """Create or update the tables of the bridge's state. Returns the versions of the migrations that were applied
    now."""
    with state_session(settings.postgres) as session:
        return SCHEMA.migrate(session, partial(progress, "migrating", unit="migration"))


@dataclass(frozen=True, slots=True)
class WorkerRetirement:
    """The arguments of `retire`.

    Attributes:
        writer: the worker to retire.
        stream: the stream's name in Kafka; None: all streams of the worker.
        wait_seconds: how long to wait for each stream.
    """

    writer: str
    stream: str | None
    wait_seconds: float


def retire(settings: Settings, order: WorkerRetirement, halt: threading.Event, say: Say) -> list[Retirement]:
    """Request the retirement of a worker, and wait until the bridge has retired the worker. The bridge first sends all
    facts of the worker. Calls `say` with a line of text for each stream.

    Returns:
        The retirements; empty if no stream has the worker and another active writer. A stream keeps its last active
        writer.

    Raises:
        BadSetting: the worker still runs, so the bridge has cancelled the retirement.
        PrerequisitePending: the bridge has not retired the worker after `order.wait_seconds`. The request remains in
            the database.
        Stopping: `halt` was set.
    """
    retired = list[Retirement]()
    with state_session(settings.postgres) as session:
        with session.use() as connection:
            SCHEMA.check_writable(connection)
            streams = state.request_retirement(connection, order.writer, order.stream)
            known = state.read_active_writers(connection, order.stream)
        for stream in streams:
            id = wait_out(partial(_retirement_id, session, order.writer, stream), halt, order.wait_seconds)
            say(f"{order.writer} retires at ID {id} of {stream}")
            retired.append(Retirement(stream, id))
        if not streams:
            existing = f"active writers are {', '.join(known)}" if known else "there are no active writers"
            say(f"no stream has {order.writer} and another active writer; {existing}")
    return retired


def _retirement_id(session: PostgresSession, writer: str, stream: str) -> int:
    """Read the ID at which the bridge has retired the writer.

    Raises:
        PrerequisitePending: the bridge has not retired the writer yet.
        BadSetting: the worker still runs, or the stream no longer has this writer.
    """
    with session.use() as connection:
        retired = state.read_retired_id(connection, writer, stream)
    if retired is None:
        problem = "a bridge must run, and every other worker of the stream must have answered"
        raise PrerequisitePending(f"the retirement of {writer}", session.where, problem)
    return retired
