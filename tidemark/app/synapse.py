"""`tidemark synapse`: sends the facts of Synapse's workers to Kafka, and creates the tables of its state."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from prometheus_client import CollectorRegistry

from tidemark.app.logs import shutdown_event
from tidemark.app.output import progress
from tidemark.app.relay import LoopHealth, find_topic
from tidemark.app.serving import http_health
from tidemark.app.settings import Settings
from tidemark.common.backoff import wait_out
from tidemark.common.errors import BadSetting, PrerequisitePending, Stopping
from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.redis.client import RedisAddress
from tidemark.sources.producer import FOR_EVER, topic_producer
from tidemark.sources.synapse import state
from tidemark.sources.synapse.bridge import BridgeMetrics, SynapseBridge
from tidemark.sources.synapse.channel import SynapseChannel
from tidemark.sources.synapse.state import SCHEMA, state_session
from tidemark.sources.synapse.streams import BridgedStream
from tidemark.sources.synapse.tables import REFUSED, STREAMS, synapse_session, table_writers
from tidemark.sources.transactions import is_old
from tidemark.streaming.wire.records import is_name, is_writer, why_no_name

REDIS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class BridgePlan:
    """`server` is Synapse's server_name; `writers` are `stream=worker,worker`; `prefix` begins each stream's name on
    Kafka; `metrics` an address to serve them on."""

    server: str
    streams: Sequence[str]
    writers: Sequence[str] = ()
    prefix: str = ""
    metrics: str | None = None

    def bridged(self) -> list[BridgedStream]:
        """Raises `BadSetting` for a stream that is not published, with the reason."""
        named = dict(map(_writers, self.writers))
        for stream in [*self.streams, *named]:
            if stream in REFUSED:
                raise BadSetting("--stream", f"{stream} is not published: {REFUSED[stream]}")
            if stream not in STREAMS:
                raise BadSetting("--stream", f"{stream!r} is none of {', '.join(STREAMS)}")
        if unused := named.keys() - {*self.streams}:
            raise BadSetting("--writers", f"stream {', '.join(sorted(unused))} is not published: add --stream")
        streams = [
            BridgedStream(STREAMS[name], self.prefix + name, named.get(name, ()))
            for name in dict.fromkeys(self.streams)
        ]
        for bridged in streams:
            if not is_name(bridged.name):
                raise BadSetting("--prefix", why_no_name(bridged.name))
        return streams


def _writers(text: str) -> tuple[str, Sequence[str]]:
    stream, sign, names = text.partition("=")
    workers = names.split(",")
    if not sign or not all(map(is_writer, workers)):
        raise BadSetting("--writers", f"{text!r} is not a list of workers such as events=event1,event2")
    return stream, workers


def run(settings: Settings, plan: BridgePlan) -> None:
    """Run the bridge until SIGTERM or SIGINT. Raises `Stop` if a person must decide."""
    streams = plan.bridged()
    dsn, redis = _address(settings), settings.secret("synapse_redis_url")
    if redis is None:
        raise BadSetting("TIDEMARK_SYNAPSE_REDIS_URL", "is not set: the Redis of Synapse's workers")
    address = RedisAddress(redis)
    halt = shutdown_event()
    metrics = BridgeMetrics(CollectorRegistry())
    health = LoopHealth(metrics, "a database")
    with ExitStack() as stack:
        stack.enter_context(suppress(Stopping))
        if plan.metrics is not None:
            stack.enter_context(
                http_health.serve_health("--metrics", http_health.metrics_address(plan.metrics), health)
            )
        wait_out(lambda: find_topic(settings), halt)
        synapse = stack.enter_context(synapse_session(lambda: settings.secret("synapse_dsn") or dsn))
        own = stack.enter_context(state_session(settings.postgres))
        channel = SynapseChannel(lambda: address.client(REDIS_SECONDS), plan.server, halt)
        stack.enter_context(channel)
        SynapseBridge(
            synapse,
            own,
            channel,
            lambda: topic_producer(settings.kafka, settings.kafka_facts_topic, give_up_after=FOR_EVER),
            streams,
            metrics,
            halt,
            heartbeat=settings.heartbeat_seconds,
        ).run()


def _address(settings: Settings) -> str:
    if (dsn := settings.secret("synapse_dsn")) is None:
        raise BadSetting("TIDEMARK_SYNAPSE_DSN", "is not set: the address of Synapse's own database")
    return dsn


def blockers(settings: Settings, say: Callable[[str], None]) -> None:
    """Print the transactions that write to the tables of Synapse's streams for unusually long, the oldest first, and
    how to end them."""
    dsn = _address(settings)
    with synapse_session(lambda: dsn) as session, session.use() as connection:
        writing = [
            writer
            for writer in table_writers(connection, STREAMS.values())
            if is_old(writer.transaction, datetime.now(UTC))
        ]
    for writer in writing:
        transaction = writer.transaction
        say(
            f"{', '.join(sorted(writer.streams))}: {transaction.process}"
            + ("" if transaction.pid is None else f": {transaction.query or '-'}")
        )
        say(f"    to end it, in Synapse's database: {transaction.ending}")
    if not writing:
        say("no transaction of Synapse has been open for long")


def migrate(settings: Settings, say: Callable[[str], None]) -> None:
    """Create or update the tables of the bridge's state."""
    with state_session(settings.postgres) as session:
        applied = SCHEMA.migrate(session, partial(progress, "migrating", unit="migration"))
    say(f"applied {', '.join(map(str, applied))}" if applied else "the schema is up to date")


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker to retire. `stream`: its name on Kafka; None: all streams. `wait`: seconds."""

    writer: str
    stream: str | None
    wait: float


def retire(settings: Settings, gone: WorkerGone, halt: threading.Event, say: Callable[[str], None]) -> None:
    """Ask the active bridge to retire the writer after all its facts are sent. Raises `BadSetting` if the writer is
    still running, and `PrerequisitePending` if it was not retired in time; the request stays."""
    with state_session(settings.postgres) as session:
        with session.use() as connection:
            SCHEMA.check(connection)
            streams = state.order_retirement(connection, gone.writer, gone.stream)
            known = state.active_writers(connection, gone.stream)
        for stream in streams:
            id = wait_out(partial(_retired, session, gone.writer, stream), halt, gone.wait)
            say(f"{gone.writer} ends at {id} of {stream}")
        if not streams:
            existing = f"there are {', '.join(known)}" if known else "no bridge has published one here"
            say(f"no stream has a writer {gone.writer} beside others, that has not retired: {existing}")


def _retired(session: PostgresSession, writer: str, stream: str) -> int:
    with session.use() as connection:
        retired = state.retired_at(connection, writer, stream)
    if retired is None:
        problem = "it does as soon as a bridge runs and every other worker of the stream has answered"
        raise PrerequisitePending(f"the end of {writer}", session.where, problem)
    return retired
