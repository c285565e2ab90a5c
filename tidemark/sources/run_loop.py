"""The run loop of the relay and of the bridge to Synapse: connect, get the locks, work, back off, start again.

The relay and the bridge read a database and send records to Kafka. Several processes may run for the same streams. The
process that has the advisory locks works. The others are on standby until the session with the locks ends.
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

FIRST_LIMIT_PAUSE_SECONDS, LONGEST_LIMIT_PAUSE_SECONDS = 5.0, 60.0
"""Shortest and longest pause between two queries of the topic's `max.message.bytes`, in seconds."""


class OversizedRecords:
    """The records that were not sent because they exceed `max.message.bytes` of the Kafka topic.

    Args:
        gauge: shows the number of these records for each stream.

    Attributes:
        cause_by_stream: stream -> text that names the stream's newest oversized record and the remedy.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._size_by_fact: dict[tuple[str, int | None], int] = {}
        self.cause_by_stream: dict[str, str] = {}
        self._backoff = Backoff(FIRST_LIMIT_PAUSE_SECONDS, LONGEST_LIMIT_PAUSE_SECONDS)
        self._next_query = 0.0

    def __contains__(self, stream: str) -> bool:
        """Whether the stream has an oversized record."""
        return any(name == stream for name, _ in self._size_by_fact)

    def clear(self) -> None:
        """Remove all records, so that the caller can check each record again."""
        for stream, _ in self._size_by_fact:
            self._gauge.labels(stream).set(0)
        self._size_by_fact, self.cause_by_stream = {}, {}

    def add(self, stream: str, writer: str, id: int | None, size: int, producer: RecordProducer, now: float) -> None:
        """Add a record that was not sent, and log it.

        Args:
            stream: the stream of the record.
            writer: the writer of the record; empty if not known.
            id: the signed stream ID of the record's fact; None if not known.
            size: the size of the record's value in bytes.
            producer: the producer whose limit the record exceeds.
            now: seconds of a monotonic clock.
        """
        if not self._size_by_fact:
            self._backoff = Backoff(FIRST_LIMIT_PAUSE_SECONDS, LONGEST_LIMIT_PAUSE_SECONDS)
            self._next_query = now + FIRST_LIMIT_PAUSE_SECONDS
        self._size_by_fact[stream, id] = size
        self._gauge.labels(stream).set(sum(1 for name, _ in self._size_by_fact if name == stream))
        needed = size + producer.max_bytes - producer.max_value_bytes(stream)
        remedy = f"raise max.message.bytes of the topic to at least {needed}"
        fact = "a fact" if id is None else f"fact {id}"
        self.cause_by_stream[stream] = (
            f"{fact} is too large for the Kafka topic, whose max.message.bytes is {producer.max_bytes}: {remedy}"
        )
        log.error(
            "A record is too large for the Kafka topic; its stream is blocked, other streams go on",
            stream=stream, writer=writer, id=id, bytes=needed, limit=producer.max_bytes,
            do=remedy,
        )  # fmt: skip

    def make_larger_producer(self, make: Callable[[], RecordProducer], now: float) -> RecordProducer | None:
        """Query the topic's current limit, and make a producer with this limit if an oversized record now fits.

        Does nothing if the pause since the last query has not ended. The pause grows with each query. Raises the errors
        of `make`, except `Unavailable`.

        Args:
            make: queries the limit and makes the producer.
            now: seconds of a monotonic clock.

        Returns:
            The producer. None if there are no oversized records, if all of them are still too large, if Kafka is
            unavailable, or if the pause has not ended.
        """
        if not self._size_by_fact or now < self._next_query:
            return None
        self._next_query = now + self._backoff.next()
        try:
            producer = make()
        except Unavailable:
            return None
        fits = any(size <= producer.max_value_bytes(stream) for (stream, _), size in self._size_by_fact.items())
        return producer if fits else None


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""Shortest and longest pause before the loop starts again after a failure, in seconds."""
_RESET_BACKOFF_AFTER_SECONDS = 60.0
"""If the work lasted this many seconds before a failure, the back-off begins again with the first pause."""
_STANDBY_PAUSE_SECONDS = 1.0
"""Seconds between two attempts of a standby process to get the locks."""
LOCK_TIMEOUT = "10s"
"""Postgres' `lock_timeout` of each statement. After a time-out, the error names the sessions that have the lock."""
DELIVERY_TIMEOUT_SECONDS = 30.0
"""The longest wait for Kafka's acknowledgement of every record, in seconds. Afterwards the loop starts again."""
SILENCE_LOGGED_AFTER_SECONDS = 5.0
"""A warning is logged if records are sent and Kafka acknowledges none for this many seconds."""
FAILURE_REPORTED_AFTER_SECONDS = 5.0
"""A failure is reported in OPEN records only after this many seconds, because most outages are shorter."""
_LOCK_SESSIONS = """
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
            registry: the registry of the metrics.
            prefix: the beginning of each metric's name, such as `tidemark_relay`.
            process: the name of the command, such as `relay`, for the descriptions.
            transaction_labels: the fields of `OpenTransaction` that are labels of the gauge of the oldest transaction.
        """
        self.registry = registry
        self._transaction_labels = transaction_labels
        self.active = Gauge(
            f"{prefix}_active",
            "1 while this process sends facts to Kafka, 0 while it is on standby or retries. If no process has 1, facts"
            " stay in the database, and none is lost.",
            registry=registry,
        )
        self.standby = Gauge(
            f"{prefix}_standby",
            f"1 while this process is on standby, because another `tidemark {process}` has the locks.",
            registry=registry,
        )
        self.heartbeat = Gauge(
            f"{prefix}_heartbeat_timestamp_seconds",
            "Time of the last round of the active process's loop (s since 1970). If it is older than a minute, the loop"
            " hangs.",
            registry=registry,
        )
        self.oversized = Gauge(
            f"{prefix}_oversized_facts",
            "Facts above the topic's max.message.bytes, which are not sent. If there are any, the stream is blocked"
            " until you raise max.message.bytes of the topic. The log names the ID and the size of each fact.",
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
        self.oldest_transaction = Gauge(
            f"{prefix}_oldest_transaction_seconds",
            "Age of the oldest open transaction that blocks a stream; no series if none is open. If the age keeps"
            " rising, the transaction hangs, and readers get no newer facts;"
            f" `tidemark {process} blockers` names the transaction.",
            transaction_labels,
            registry=registry,
        )
        self.oldest_open = OldestOpenGauge(self.oldest_transaction)

    def show_open_transactions(self, transactions: Sequence[OpenTransaction], now: datetime) -> None:
        """Set the gauges of the oldest open transaction. `transactions`: all open transactions that block a stream."""
        self.oldest_open.show(
            (tuple(getattr(transaction, label) for label in self._transaction_labels), transaction.age(now))
            for transaction in transactions
        )

    def clear(self) -> None:
        """Set `active` and `standby` to 0, and remove the ages of transactions. Called when the work has stopped."""
        self.active.set(0)
        self.standby.set(0)
        self.oldest_open.show([])


class AcknowledgementMonitor:
    """Logs when Kafka has acknowledged no record of a producer for a while, and when Kafka acknowledges records again.

    For one producer.
    """

    def __init__(self) -> None:
        self._delivered_count = -1
        self._since = 0.0
        self._is_logged = False

    def check(self, producer: RecordProducer, unacknowledged: int) -> None:
        """Log once if Kafka has acknowledged none of the producer's records for `SILENCE_LOGGED_AFTER_SECONDS`.

        Also logs when Kafka acknowledges records again.

        Args:
            producer: the same producer in every call.
            unacknowledged: the number of the producer's records that Kafka has not acknowledged.
        """
        now = time.monotonic()
        if not unacknowledged or producer.delivered_count != self._delivered_count:
            if self._is_logged:
                log.info("Kafka acknowledges records again", seconds=round(now - self._since, 1))
            self._delivered_count, self._since, self._is_logged = producer.delivered_count, now, False
        elif now - self._since >= SILENCE_LOGGED_AFTER_SECONDS and not self._is_logged:
            self._is_logged = True
            log.warning("Waiting for Kafka", kafka=producer.where, records=unacknowledged, problem=producer.problem)


class StandbyLocks:
    """Takes the advisory locks that only the active process has. Logs when a wait for the locks begins and ends.

    Args:
        lock_space: the first half of the key of each lock.
    """

    def __init__(self, lock_space: int) -> None:
        self._lock_space = lock_space
        self._since: float | None = None

    def take(self, connection: Connection, keys: Sequence[int]) -> bool:
        """Take all locks, or none if another session has one of them. Does not wait.

        The locks last until the session ends. If the result is False, the session has no advisory locks at all.

        Args:
            connection: the session that gets the locks.
            keys: the second half of the key of each lock.

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
                log.info("The locks are free; this process takes over", seconds=seconds)
                self._since = None
            return True
        connection.execute("select pg_advisory_unlock_all()")
        if self._since is None:
            self._since = time.monotonic()
            row = connection.execute(_LOCK_SESSIONS, [self._lock_space, [*keys]]).fetchone()
            blockers = (
                describe_sessions(connection, row[0] if row and row[0] else []) or "a session that has ended since"
            )
            log.info(
                "Another process has the locks of this relay or bridge; waiting as standby until the locks are free",
                blockers=blockers,
            )
        return False


class RunLoop(ABC):
    """Base class of the loop that sends a source's records to Kafka, in the thread that calls `run`.

    `run` connects, takes the locks, calls the subclass's `_work`, and retries until `halt` is set.

    Args:
        session: the session that holds the locks.
        schema: the schema that the database of `session` must have.
        lock_space: the first half of the key of each lock.
        make_producer: makes a producer with the topic's current limit.
        metrics: the metrics to update.
        halt: ends the loop.
        heartbeat: seconds between two OPEN records of each stream; 0 to send OPEN records only after a change.
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
        """Whether `_producer` exists, and nothing has failed since the producer was made."""
        self._kafka_wait = AcknowledgementMonitor()
        self._has_worked = False
        """Whether this process has ever worked. If so, a refusal of a server is taken for temporary, and the loop
        retries."""
        self._problem = ""
        """Why no facts are sent; empty while facts are sent."""
        self._problem_since = 0.0

    def run(self) -> None:
        """Work until `halt` is set. After a `Retry`, pauses and starts again.

        A `Refused`, or a schema of version 0, is retried too if this process has worked before: a server may be
        starting, or a restore may be running.

        Raises:
            Stop: a person must act.
            Exception: an unexpected error.
        """
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while not self._halt.is_set():
            began = time.monotonic()
            try:
                with self._session.use() as connection:
                    self._schema.check_writable(connection)
                    if self._wait_for_turn(connection):
                        began = time.monotonic()
                        self._work(connection)
            except (Retry, Refused, SchemaMismatch) as error:
                # Version 0 means that there is no schema: a restore is running if this process has used the schema.
                is_final = isinstance(error, SchemaMismatch) and error.found != 0
                if is_final or not (self._has_worked or isinstance(error, Retry)):
                    raise
                problem = str(self._find_running_restore(error) or error)
                if self._problem != problem:
                    log.warning("Cannot send facts; they stay in the database; trying again", problem=problem)
                    self._problem_since = time.monotonic()
                self._problem = problem
                self._report_failure()
                self._close()
                self._has_producer = False
                if time.monotonic() - began > _RESET_BACKOFF_AFTER_SECONDS:
                    backoff.reset()
                self._halt.wait(backoff.next())
            finally:
                self._loop_metrics.clear()

    @abstractmethod
    def _lock_keys(self, connection: Connection) -> Sequence[int]:
        """Return the second half of the key of each lock. The active process has all these locks."""

    @abstractmethod
    def _work(self, connection: Connection) -> None:
        """Work until an error is raised, or `halt` is set. Must set `_has_worked`. `connection`: the session of the
        locks."""

    def _close(self) -> None:
        """Close the session after a failure. A subclass with more sessions closes them too."""
        self._session.close()

    def _wait_for_turn(self, connection: Connection) -> bool:
        """Try to take the locks again and again until this process has them. Returns False if `halt` is set first.

        This method polls, because a statement that waits for a lock keeps a snapshot open, which delays vacuum.
        """
        keys = self._lock_keys(connection)
        while not self._halt.is_set():
            if self._standby.take(connection, keys):
                self._loop_metrics.standby.set(0)
                return True
            self._loop_metrics.standby.set(1)
            self._halt.wait(_STANDBY_PAUSE_SECONDS)
        return False

    def _connect_producer(self) -> None:
        """Make a producer, unless `_has_producer`."""
        if not self._has_producer:
            self._use_producer(self._make_producer())

    def _use_producer(self, producer: RecordProducer) -> None:
        """Use `producer` from now on."""
        self._producer, self._kafka_wait, self._has_producer = producer, AcknowledgementMonitor(), True

    def _flush(self) -> None:
        """Wait for Kafka's acknowledgement of every record.

        Raises `Unavailable` if a record is not acknowledged after `DELIVERY_TIMEOUT_SECONDS`, or when `halt` is
        set. Raises `Unavailable` or `Refused` if a record failed.
        """
        deadline = time.monotonic() + DELIVERY_TIMEOUT_SECONDS
        while (queued_records := self._producer.flush(0.5)) and time.monotonic() < deadline and not self._halt.is_set():
            self._kafka_wait.check(self._producer, queued_records)
        self._producer.deliver(0)

    def _poll_kafka(self) -> None:
        """Process Kafka's acknowledgements, and log if none arrive for a long time."""
        self._kafka_wait.check(self._producer, self._producer.poll_backlog())

    def _switch_to_larger_producer(self) -> bool:
        """Change to a new producer if the topic now accepts an oversized record. Returns whether the producer changed.

        Before the change, waits until Kafka has acknowledged every record of the old producer. Raises as `_flush`.
        """
        if (producer := self._oversized.make_larger_producer(self._make_producer, time.monotonic())) is None:
            return False
        self._flush()
        self._use_producer(producer)
        log.info("The Kafka topic accepts larger records now", limit=producer.max_bytes)
        return True

    def _log_recovery(self) -> None:
        """If a failure was logged, log that facts are sent again. Called when facts are sent."""
        if self._problem:
            log.info("Facts are sent again")
            self._problem = ""

    def _report(self, transactions: Sequence[OpenTransaction], blocked_reasons: Mapping[str, str]) -> None:
        """Update the metrics of open transactions, and send the OPEN records that are due.

        Args:
            transactions: the open transactions that block a stream.
            blocked_reasons: stream -> why no new facts are sent. Streams with oversized records are added.
        """
        now = datetime.now(UTC)
        self._loop_metrics.show_open_transactions(transactions, now)
        for report in self._reports.take_due_records(
            transactions, now, {**self._oversized.cause_by_stream, **blocked_reasons}
        ):
            self._producer.send(report.stream, records.encode(report))

    def _find_running_restore(self, error: TidemarkError) -> PrerequisitePending | None:
        """If `error` is a refusal, check whether a restore of the database is running. Returns the restore, or None.

        During a restore, a table may be missing. Then the remedy in `error`, to run a migration, would be wrong.
        """
        if isinstance(error, Refused):
            with suppress(Retry, Refused, SchemaMismatch):
                try:
                    with self._session.use() as connection:
                        self._schema.check_writable(connection)
                except PrerequisitePending as restore:
                    return restore
        return None

    def _report_failure(self) -> None:
        """If the failure has lasted `FAILURE_REPORTED_AFTER_SECONDS`, send OPEN records with the reason.

        Errors of Kafka are ignored.
        """
        if not self._reports.reporters or time.monotonic() - self._problem_since < FAILURE_REPORTED_AFTER_SECONDS:
            return  # without reporters no record was sent yet, and there is no producer
        causes = dict.fromkeys(self._reports.reporters, self._problem)
        with suppress(Retry, Refused):
            for report in self._reports.take_due_records([], datetime.now(UTC), causes):
                self._producer.send(report.stream, records.encode(report))
            self._producer.flush(0.5)


def set_lock_timeout(connection: Connection) -> None:
    """Set `lock_timeout` of this session to `LOCK_TIMEOUT`."""
    connection.execute("select set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
