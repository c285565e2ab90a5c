"""The run loop of the relay and of the bridge to Synapse: connect, wait for the lock, work, back off, start again.

The relay and the bridge read a database and send records to Kafka. Any number of processes may run for one database.
One process holds an advisory lock and works; the others are on standby until its session ends.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Gauge

from tidemark.common.backoff import Backoff
from tidemark.common.errors import PrerequisitePending, Refused, Retry, SchemaMismatch, TidemarkError, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection, PostgresSession, describe_sessions
from tidemark.sources.producer import RecordProducer
from tidemark.sources.transactions import OldestOpenGauge, OpenTransaction, SourceReports
from tidemark.streaming.wire import records

log = get_logger(__name__)

FIRST_LIMIT_PAUSE, LONGEST_LIMIT_PAUSE = 5.0, 60.0
"""Shortest and longest pause between two queries of the topic's limit, in seconds."""


class OversizedRecords:
    """The records that exceed the limit of the Kafka topic and were not sent. `gauge` shows their number by stream."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._bytes: dict[tuple[str, int | None], int] = {}
        self.causes: dict[str, str] = {}
        """By stream: the record that is too large, and what to do."""
        self._backoff = Backoff(FIRST_LIMIT_PAUSE, LONGEST_LIMIT_PAUSE)
        self._next_query = 0.0

    def __contains__(self, stream: str) -> bool:
        """Whether a record of the stream is too large."""
        return any(name == stream for name, _ in self._bytes)

    def clear(self) -> None:
        """Remove all records, so that the caller checks each record again."""
        for stream, _ in self._bytes:
            self._gauge.labels(stream).set(0)
        self._bytes, self.causes = {}, {}

    def add(self, stream: str, writer: str, id: int | None, size: int, producer: RecordProducer, now: float) -> None:
        """Note a record that was not sent, and log it.

        Args:
            stream: the stream of the record.
            writer: the writer of the record; empty if not known.
            id: the signed stream ID of the record's fact; None if not known.
            size: bytes of the record's value.
            producer: the producer whose limit is too low.
            now: seconds of a monotonic clock.
        """
        if not self._bytes:
            self._backoff = Backoff(FIRST_LIMIT_PAUSE, LONGEST_LIMIT_PAUSE)
            self._next_query = now + FIRST_LIMIT_PAUSE
        self._bytes[stream, id] = size
        self._gauge.labels(stream).set(sum(1 for name, _ in self._bytes if name == stream))
        needed = size + producer.max_bytes - producer.max_value_bytes(stream)
        remedy = f"raise max.message.bytes of the topic to at least {needed}"
        fact = "a fact" if id is None else f"fact {id}"
        self.causes[stream] = (
            f"{fact} is too large for the Kafka topic, which takes {producer.max_bytes} bytes: {remedy}"
        )
        log.error(
            "A record is too large for the Kafka topic; its stream is blocked, other streams go on",
            stream=stream, writer=writer, id=id, bytes=needed, limit=producer.max_bytes,
            do=remedy,
        )  # fmt: skip

    def make_larger_producer(self, make: Callable[[], RecordProducer], now: float) -> RecordProducer | None:
        """Make a producer with the topic's current `max.message.bytes`, if this limit accepts a waiting record.

        Args:
            make: makes the producer.
            now: seconds of a monotonic clock.

        Returns:
            None if every waiting record is still too large, Kafka is unavailable, or Kafka was queried a short time
            ago. The pause between two queries grows.
        """
        if not self._bytes or now < self._next_query:
            return None
        self._next_query = now + self._backoff.next()
        try:
            producer = make()
        except Unavailable:
            return None
        fits = any(size <= producer.max_value_bytes(stream) for (stream, _), size in self._bytes.items())
        return producer if fits else None


FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
_RESET_BACKOFF_AFTER = 60.0
"""After this many seconds of work the back-off begins again with the first pause."""
_STANDBY_PAUSE = 1.0
"""Seconds between two attempts of a standby to get the lock."""
LOCK_TIMEOUT = "10s"
"""Lock time-out of a statement. Afterwards the log names the sessions that hold the lock."""
DELIVERY_TIMEOUT = 30.0
"""Seconds to wait until Kafka has acknowledged every record. Afterwards the work starts again."""
SILENCE_LOGGED_AFTER = 5.0
"""A warning is logged after this many seconds without an acknowledgement."""
FAILURE_REPORTED_AFTER = 5.0
"""A failure is reported to readers only after this many seconds: most outages are shorter."""
_LOCK_HOLDERS = """
select array_agg(distinct pid) from pg_locks where locktype = 'advisory' and objsubid = 2 and granted
    and classid = %s::bigint::oid and objid::bigint = any (select key & 4294967295 from unnest(%s::bigint[]) as key)
    and database = (select oid from pg_database where datname = current_database())
"""


class LoopMetrics:
    """The metrics that every run loop has."""

    def __init__(
        self, registry: CollectorRegistry, prefix: str, process: str, transaction_labels: Sequence[str]
    ) -> None:
        """
        Args:
            registry: the metrics are registered there.
            prefix: the beginning of each metric's name, such as `tidemark_relay`.
            process: the command after `tidemark`, for the descriptions.
            transaction_labels: the fields of `OpenTransaction` that label the oldest transaction.
        """
        self.registry = registry
        self._transaction_labels = transaction_labels
        self.active = Gauge(
            f"{prefix}_active",
            "1 while this process sends facts to Kafka, 0 while it waits for a server or is a standby. 0 everywhere:"
            " facts wait in the database, and none is lost.",
            registry=registry,
        )
        self.standby = Gauge(
            f"{prefix}_standby",
            f"1 while this process waits because another `tidemark {process}` works on its database.",
            registry=registry,
        )
        self.heartbeat = Gauge(
            f"{prefix}_heartbeat_timestamp_seconds",
            "Time of the last round of the active process's loop (s since 1970). Older than a minute: the loop hangs.",
            registry=registry,
        )
        self.oversized = Gauge(
            f"{prefix}_oversized_facts",
            "Facts above the topic's max.message.bytes, which are not sent. Above 0: the stream waits for them; the log"
            " names each with its ID and size. Raise max.message.bytes of the topic.",
            ["stream"],
            registry=registry,
        )
        self.blocked = Gauge(
            f"{prefix}_blocked_streams",
            "1 while no new ID of the stream is published, because its sequence is unfit. The log has the problem and"
            " the statement that repairs it.",
            ["stream"],
            registry=registry,
        )
        self.oldest = Gauge(
            f"{prefix}_oldest_transaction_seconds",
            "Age of the oldest open transaction that blocks a stream; no series if none is open. Rising: it hangs, and"
            f" readers wait for it; `tidemark {process} blockers` names it.",
            transaction_labels,
            registry=registry,
        )
        self.oldest_open = OldestOpenGauge(self.oldest)

    def show_open_transactions(self, transactions: Sequence[OpenTransaction], now: datetime) -> None:
        """Set the gauge of the oldest open transaction that blocks a stream."""
        self.oldest_open.show(
            (tuple(getattr(transaction, label) for label in self._transaction_labels), transaction.age(now))
            for transaction in transactions
        )

    def clear(self) -> None:
        """Reset the gauges of the present state, after this process has stopped working."""
        self.active.set(0)
        self.standby.set(0)
        self.oldest_open.show([])


class KafkaWait:
    """Logs when Kafka has acknowledged no record of a producer for a while, and when it acknowledges records again."""

    def __init__(self) -> None:
        self._delivered = -1
        self._since = 0.0
        self._is_logged = False

    def check(self, producer: RecordProducer, unacknowledged: int) -> None:
        """Log if due. `unacknowledged`: the number of records that Kafka has not acknowledged now."""
        now = time.monotonic()
        if not unacknowledged or producer.delivered_count != self._delivered:
            if self._is_logged:
                log.info("Kafka acknowledges records again", seconds=round(now - self._since, 1))
            self._delivered, self._since, self._is_logged = producer.delivered_count, now, False
        elif now - self._since >= SILENCE_LOGGED_AFTER and not self._is_logged:
            self._is_logged = True
            log.warning("Waiting for Kafka", kafka=producer.where, records=unacknowledged, problem=producer.problem)


class StandbyLocks:
    """The advisory locks that the active process of one kind holds. Logs when a wait for the locks begins and ends."""

    def __init__(self, lock_space: int) -> None:
        """`lock_space` is the first half of each lock's key."""
        self._lock_space = lock_space
        self._since: float | None = None

    def take(self, connection: Connection, keys: Sequence[int]) -> bool:
        """Take all locks, or none if one is not free. Does not wait. The locks last as long as the session.

        Args:
            connection: the session that gets the locks.
            keys: the second half of each lock's key.

        Returns:
            Whether the session has the locks.
        """
        row = connection.execute(
            "select bool_and(pg_try_advisory_lock(%s, key)) from unnest(%s::integer[]) as key",
            [self._lock_space, [*keys]],
        ).fetchone()
        if row is not None and row[0]:
            if self._since is not None:
                seconds = round(time.monotonic() - self._since, 1)
                log.info("The other process has ended; this process takes over", seconds=seconds)
                self._since = None
            return True
        connection.execute("select pg_advisory_unlock_all()")
        if self._since is None:
            self._since = time.monotonic()
            row = connection.execute(_LOCK_HOLDERS, [self._lock_space, [*keys]]).fetchone()
            blockers = (
                describe_sessions(connection, row[0] if row and row[0] else []) or "a session that has ended since"
            )
            log.info("Another process works on this database; waiting for its end", holder=blockers)
        return False


class RunLoop(ABC):
    """Runs in the thread that calls `run`, until `halt` is set. A subclass does the work.

    `session` holds the locks of `lock_space`. Its database must have the version of `schema`.
    """

    def __init__(
        self,
        session: PostgresSession,
        schema: Migrations,
        lock_space: int,
        make_producer: Callable[[], RecordProducer],
        metrics: LoopMetrics,
        halt: threading.Event,
        heartbeat: int = 0,
    ) -> None:
        """`heartbeat`: seconds between two reports of each stream; 0: report only changes."""
        self._session = session
        self._schema = schema
        self._make_producer = make_producer
        self._loop_metrics = metrics
        self._halt = halt
        self._standby = StandbyLocks(lock_space)
        self._oversized = OversizedRecords(metrics.oversized)
        self._heartbeat = heartbeat
        self._reports = SourceReports({}, heartbeat)
        self._producer: RecordProducer
        self._has_producer = False
        """Whether a producer exists, and nothing has failed since it was made."""
        self._kafka_wait = KafkaWait()
        self._has_worked = False
        """Whether this process has ever worked. If so, a refusal of a server may be temporary, and the loop retries."""
        self._problem = ""
        """Why no facts are sent; empty while facts are sent."""
        self._problem_since = 0.0

    def run(self) -> None:
        """Work until `halt` is set.

        Raises:
            Stop: a person must decide.
            Refused: a server refused before this process ever worked.
            Exception: an unexpected error, which ends the process.
        """
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while not self._halt.is_set():
            began = time.monotonic()
            try:
                with self._session.use() as connection:
                    self._schema.check(connection)
                    if self._wait_for_turn(connection):
                        began = time.monotonic()
                        self._work(connection)
            except (Retry, Refused, SchemaMismatch) as error:
                # If a schema that this process has used is missing, it is being restored.
                is_final = isinstance(error, SchemaMismatch) and error.found != 0
                if is_final or not (self._has_worked or isinstance(error, Retry)):
                    raise
                problem = str(self._restore_of_database(error) or error)
                if self._problem != problem:
                    log.warning("Cannot send facts; they stay in the database; trying again", problem=problem)
                    self._problem_since = time.monotonic()
                self._problem = problem
                self._report_failure()
                self._close()
                self._has_producer = False
                if time.monotonic() - began > _RESET_BACKOFF_AFTER:
                    backoff.reset()
                self._halt.wait(backoff.next())
            finally:
                self._loop_metrics.clear()

    @abstractmethod
    def _lock_keys(self, connection: Connection) -> Sequence[int]:
        """The keys of the locks. One process holds all of them."""

    @abstractmethod
    def _work(self, connection: Connection) -> None:
        """Work until something fails, or `halt` is set. Sets `_has_worked`."""

    def _close(self) -> None:
        """Close all sessions after a failure."""
        self._session.close()

    def _wait_for_turn(self, connection: Connection) -> bool:
        """Wait until this process has the locks. Returns False if `halt` is set. Polls, because a statement that waits
        for a lock would hold a snapshot.
        """
        keys = self._lock_keys(connection)
        while not self._halt.is_set():
            if self._standby.take(connection, keys):
                self._loop_metrics.standby.set(0)
                return True
            self._loop_metrics.standby.set(1)
            self._halt.wait(_STANDBY_PAUSE)
        return False

    def _connect_producer(self) -> None:
        """Make a producer, unless one exists that works."""
        if not self._has_producer:
            self._use_producer(self._make_producer())

    def _use_producer(self, producer: RecordProducer) -> None:
        self._producer, self._kafka_wait, self._has_producer = producer, KafkaWait(), True

    def _deliver(self) -> None:
        """Wait until Kafka has acknowledged every record.

        Raises `Unavailable` after `DELIVERY_TIMEOUT` seconds, or when `halt` is set before that.
        """
        deadline = time.monotonic() + DELIVERY_TIMEOUT
        while (left := self._producer.flush(0.5)) and time.monotonic() < deadline and not self._halt.is_set():
            self._kafka_wait.check(self._producer, left)
        self._producer.deliver(0)

    def _poll_kafka(self) -> None:
        """Process Kafka's acknowledgements, and log if none arrive for a long time."""
        self._kafka_wait.check(self._producer, self._producer.backlog())

    def _grow_producer(self) -> bool:
        """Make a new producer if the topic accepts an oversized record now. Returns whether it was made."""
        if (producer := self._oversized.make_larger_producer(self._make_producer, time.monotonic())) is None:
            return False
        self._deliver()
        self._use_producer(producer)
        log.info("The Kafka topic takes larger records now", limit=producer.max_bytes)
        return True

    def _log_recovery(self) -> None:
        """Log that facts are sent again after a failure."""
        if self._problem:
            log.info("Facts are sent again")
            self._problem = ""

    def _report(self, transactions: Sequence[OpenTransaction], blocked: Mapping[str, str]) -> None:
        """Update the metrics of open transactions, and send the OPEN records that are due.

        Args:
            transactions: the open transactions that block a stream.
            blocked: by stream, why nothing new is sent. Oversized records are added here.
        """
        now = datetime.now(UTC)
        self._loop_metrics.show_open_transactions(transactions, now)
        for report in self._reports.due_records(transactions, now, {**self._oversized.causes, **blocked}):
            self._producer.send(report.stream, records.encode(report))

    def _restore_of_database(self, error: TidemarkError) -> PrerequisitePending | None:
        """The running restore of the database, if it explains the refusal `error`; otherwise None.

        During a restore a table may be missing. Then the remedy in `error`, to run a migration, would be wrong.
        """
        if isinstance(error, Refused):
            with suppress(Retry, Refused, SchemaMismatch):
                try:
                    with self._session.use() as connection:
                        self._schema.check(connection)
                except PrerequisitePending as restore:
                    return restore
        return None

    def _report_failure(self) -> None:
        """Send OPEN records that say why nothing is sent, if the failure lasts and Kafka is reachable."""
        if not self._reports.reporters or time.monotonic() - self._problem_since < FAILURE_REPORTED_AFTER:
            return  # without reporters no record was sent yet, and there is no producer
        causes = dict.fromkeys(self._reports.reporters, self._problem)
        with suppress(Retry, Refused):
            for report in self._reports.due_records([], datetime.now(UTC), causes):
                self._producer.send(report.stream, records.encode(report))
            self._producer.flush(0.5)


def set_lock_timeout(connection: Connection) -> None:
    """Set `lock_timeout` of this session to `LOCK_TIMEOUT`."""
    connection.execute("select set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
