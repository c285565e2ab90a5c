"""`tidemark pipeline`: creates the query, its source and its sinks, and supervises them.

The main thread supervises. Other threads publish batches (`app.pipeline.batches`), renew the lease, refill the sinks,
monitor the lag of Kafka (`app.pipeline.kafka_lag`), read policies, and answer scrapes and probes
(`app.serving.http_health`).
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tidemark.app.logs import shutdown_event
from tidemark.app.output import progress
from tidemark.app.pipeline import engine, metrics
from tidemark.app.pipeline.batches import BatchHandler, RefusedRecordFinder, open_tracing
from tidemark.app.pipeline.kafka_lag import LagMonitor
from tidemark.app.pipeline.preflight import QueryStart, prepare
from tidemark.app.pipeline.stream_metrics import StreamCollector
from tidemark.app.serving import http_health
from tidemark.app.settings import Settings
from tidemark.app.versions import OURS, require_successor
from tidemark.common.backoff import Backoff
from tidemark.common.errors import (
    BatchTooLarge,
    ChainBroken,
    ConfigurationChanged,
    ContentRefused,
    LeaseLost,
    QueryFailed,
    RecordsRefused,
    Refused,
    Retry,
    Stopping,
    Unavailable,
)
from tidemark.common.log import get_logger
from tidemark.sinks.background import BatchWaitMonitor, LeasedThread, Maintenance, MaintenanceConfig
from tidemark.sinks.dead_letters import DeadLetters, DeadLettersConfig, RequeueConfig, Requeuer
from tidemark.sinks.port import Sink
from tidemark.sinks.positions_topic import PositionsTopic, PositionsTopicConfig
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.operators import PolicyTable
from tidemark.sinks.postgres.retention import Retention
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.publisher import Publisher
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.sources.producer import query_producer_settings
from tidemark.sources.topics import Acceptance, Topics
from tidemark.streaming.engine import query
from tidemark.streaming.engine.checkpoint import directory_lock, query_folder, store_folder
from tidemark.streaming.engine.jvm import is_local
from tidemark.streaming.engine.spark import executor_addresses, set_tasks
from tidemark.streaming.ingest.compact import NotStorableOffsets
from tidemark.streaming.ingest.source import LIGHT_RECORDS
from tidemark.streaming.values.limits import Policies
from tidemark.streaming.wire.records import Topic

log = get_logger(__name__)

POLICY_CHECK_SECONDS = 2.0
MAX_LOGGED_NAMES = 10


class PolicyWatch(LeasedThread):
    """A thread that reads the policies, and calls `on_change` with all policies when a policy has changed.

    If a bound of a stream has changed, the thread sets `failure`, because only a new query can use the new bound.
    """

    def __init__(
        self, table: PolicyTable, lease: Lease, policies: Policies, on_change: Callable[[Policies], None]
    ) -> None:
        super().__init__("policies", lease)
        self._table = table
        self._policies = policies
        self._on_change = on_change
        self._is_failing = False

    def work(self) -> float:
        """Read the policies once. Returns the seconds until the next read."""
        try:
            given = self._table.read()
        except Unavailable as problem:
            if not self._is_failing:
                log.warning("Could not read the policies; trying again", problem=str(problem))
            self._is_failing = True
            return POLICY_CHECK_SECONDS
        self._is_failing = False
        if given != self._policies.by_name:
            before, self._policies = self._policies, replace(self._policies, by_name=given)
            changed = [
                name for name in sorted({*given, *before.by_name}) if given.get(name) != before.by_name.get(name)
            ]
            log.info("Policies changed", changed=changed[:MAX_LOGGED_NAMES], count=len(changed))
            self._on_change(self._policies)
            if self._policies.bounds() != before.bounds():
                self.failure = ConfigurationChanged("bounds of streams")
        return POLICY_CHECK_SECONDS


# The time limit of the running batch when the query ends. After SIGTERM, the process must end within 10 s.
LAST_BATCH_TIMEOUT_SECONDS = 6.0
# After SIGTERM, the longest wait for threads that query servers. An orchestrator kills the process after 10 s.
EXIT_TIMEOUT_SECONDS = 9.0
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 5.0
MAX_FAILURES = 6  # the process ends after this number of failed queries without a published batch between them
SECRETS_CHECK_SECONDS = 5.0
# Python's first threshold is 700. A batch of 10,000 streams creates 500,000 objects without reference cycles, and
# collections took longer than the rest of the driver's work.
GC_THRESHOLDS = 100_000, 20, 50
# A query for light traffic computes a batch in one task, which needs a third less CPU. A query for heavy traffic uses
# all cores. A change requires a new query, which starts in a second, but more slowly with many streams. So a query with
# more streams than this is always for heavy traffic.
LIGHT_STREAMS = 10_000
LIGHT_TRAFFIC_SECONDS = 120.0  # after this time without a large batch, a query for light traffic starts
NO_EXECUTOR = "no Spark executor has registered; check the executor pods, or the workers of the Spark cluster"


def run(settings: Settings, accept: Set[Acceptance]) -> None:
    """Run the pipeline until SIGTERM or SIGINT. Then waits up to `LAST_BATCH_TIMEOUT_SECONDS` for the running batch.

    Args:
        settings: the settings of the pipeline.
        accept: the failed checks that the operator accepts for this start: `partitions`, `loss`, `shards`.

    Raises:
        Stop: a person must decide.
        SparkDied: Spark ended, or did not start.
        QueryFailed, ChainBroken: the query failed `MAX_FAILURES` times since the last published batch.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    stopping = shutdown_event(_exit_after_timeout)
    metrics.STARTED.set_to_current_time()
    collector = StreamCollector(max_streams=settings.metrics_max_streams, max_writers=settings.metrics_max_writers)
    metrics.REGISTRY.register(collector)
    health = metrics.PipelineHealth()
    with (
        suppress(Stopping),
        http_health.serve_health("TIDEMARK_METRICS_PORT", (settings.metrics_host, settings.metrics_port), health),
        directory_lock(settings.checkpoint, stopping),
        engine.open_engine(settings) as spark_engine,
    ):
        failures = highest_token = 0
        backoff = Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        max_records, too_many_records = settings.max_records_per_batch, 0
        not_storable: dict[str, dict[int, list[int]]] = {}
        while not stopping.is_set():
            pipeline_run = PipelineRun(
                settings,
                spark_engine,
                collector,
                health,
                stopping,
                highest_token,
                max_records,
                too_many_records,
                not_storable,
            )
            max_records, too_many_records = settings.max_records_per_batch, 0
            try:
                pipeline_run.run(accept)
            except Refused as error:
                if not pipeline_run.has_outdated_secrets:
                    raise
                log.warning("A server refused old secrets; trying again with the new ones", problem=str(error))
            except Retry as error:
                failures += counts_as_failure(error)
                if pipeline_run.has_published or isinstance(error, ConfigurationChanged):
                    failures = 0
                    backoff.reset()
                if isinstance(error, Unavailable):
                    metrics.RETRIES.labels(error.what).inc()
                if isinstance(error, LeaseLost):
                    highest_token = max(highest_token, error.own, error.newest)
                    collector.forget()
                if isinstance(error, BatchTooLarge | ContentRefused):
                    max_records = error.max_records
                if isinstance(error, BatchTooLarge):
                    too_many_records = error.records
                if isinstance(error, RecordsRefused):
                    _add_offsets(error.offsets, not_storable)
                if counts_as_failure(error) and failures >= MAX_FAILURES:
                    raise
                pause = backoff.next()
                log.warning(
                    "The pipeline's Spark query ended or could not start; trying again",
                    problem=str(error),
                    pause_seconds=pause,
                )
                health.set_state(str(error))
                stopping.wait(pause)
            finally:
                if pipeline_run.is_prepared:  # the operator's `accept` is for one start only
                    accept = frozenset()
    log.info("The pipeline has stopped")


def counts_as_failure(error: Retry) -> bool:
    """Whether the error counts towards `MAX_FAILURES`: only a failure of the query itself does.

    An outage of a server, the loss of the lease, and a slow start of Python do not count.
    """
    if isinstance(error, QueryFailed):
        return error.problem != engine.SLOW_PYTHON_START
    return isinstance(error, ChainBroken)


class PipelineRun:
    """One run of the query: acquires the lease, and supervises the query until it ends. For one use."""

    def __init__(
        self,
        settings: Settings,
        spark_engine: engine.Engine,
        collector: StreamCollector,
        health: metrics.PipelineHealth,
        stopping: threading.Event,
        highest_token: int,
        max_records: int,
        too_many_records: int,
        not_storable: NotStorableOffsets,
    ) -> None:
        self._settings = settings
        self._not_storable = not_storable
        self._max_records = max_records  # of the first batch
        self._too_many_records = too_many_records
        self._spark_engine = spark_engine
        self._collector = collector
        self._health = health
        self._stopping = stopping
        self._highest_token = highest_token
        self._batches: BatchHandler | None = None
        self.is_prepared = False
        """Whether the checks of the start have passed, and the accepted differences are recorded."""
        self._is_local = is_local(settings.spark_master)
        self._ends_when_light = False
        self._executors_with_states: frozenset[str] = frozenset()
        self._kafka = settings.kafka
        self._secrets = self._settings.kafka.portable_settings()

    @property
    def has_outdated_secrets(self) -> bool:
        """Whether a secret for Kafka has changed since this run was created. Running clients do not reload secrets."""
        return self._settings.kafka.portable_settings() != self._secrets

    @property
    def has_published(self) -> bool:
        """Whether a batch was published."""
        return self._batches is not None and self._batches.published_count > 0

    def run(self, accept: Set[Acceptance]) -> None:
        """Run the query until the process must stop.

        Raises:
            Retry: another run may succeed.
            Stop: a person must decide.
        """
        settings, stopping, kafka = self._settings, self._stopping, self._kafka
        with ExitStack() as stack:
            stack.enter_context(self._spark_engine.detecting_exit())
            retention = Retention(settings.history_days, settings.audit_days)
            postgres = stack.enter_context(Postgres(PostgresConfig(settings.postgres, retention)))
            postgres.check_writable()
            require_successor(postgres.pipeline_version())
            self._health.set_state("another pipeline has the lease, or its lease has not expired yet")
            lease = stack.enter_context(
                Lease.acquire(
                    settings.postgres,
                    LeaseConfig(settings.owner, settings.lease_seconds, version=OURS),
                    stopping,
                    self._highest_token,
                )
            )
            metrics.LEASE_TOKEN.set(lease.token)
            stack.callback(metrics.LEASE_TOKEN.set, 0)
            self._health.set_state("the query starts")
            topics = Topics(kafka)
            start = prepare(settings, postgres, topics, accept)
            self.is_prepared = True
            self._collector.set_policies(start.policies)
            self._collector.load(start.states, start.offsets)
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # the garbage collector skips the loaded states of up to a million streams
            sinks = self._open_sinks(stack, postgres, lease)
            stack.enter_context(self._collector.showing_sinks(sinks))
            for sink in sinks:
                with suppress(Unavailable):  # the publisher waits for the sink later
                    sink.check()
            maintenance = stack.enter_context(
                Maintenance(sinks, postgres, lease, MaintenanceConfig(), metrics.CLOCK_DIFFERENCE.set)
            )
            facts, dead_letters_topic = settings.kafka_facts_topic, settings.kafka_dead_letters_topic
            dead_letters = stack.enter_context(
                DeadLetters(
                    DeadLettersConfig(
                        dead_letters_topic,
                        kafka.client_settings(),
                        query_producer_settings(kafka, dead_letters_topic),
                    )
                )
            )
            publisher = Publisher(
                postgres, sinks, dead_letters, lease, stopping, lambda error: metrics.RETRIES.labels(error.what).inc()
            )
            publisher.send_unsent_dead_letters()
            lag_monitor = stack.enter_context(
                LagMonitor(topics, start.topics, self._collector, postgres.note_lagging_partitions).running()
            )
            requeue = RequeueConfig(facts, kafka.client_settings(), query_producer_settings(kafka, facts))
            requeuer = stack.enter_context(Requeuer(requeue, postgres, lease, metrics.REQUEUED.inc))
            wait_monitor = stack.enter_context(BatchWaitMonitor(postgres.batch_wait, lease))
            policy_watch = stack.enter_context(
                PolicyWatch(postgres.policies, lease, start.policies, self._collector.set_policies)
            )
            trace = stack.enter_context(open_tracing(settings.secret("otlp_url"), settings.owner, lease.token))
            names = {Topic.FACTS: settings.kafka_facts_topic, Topic.CONTROL: settings.kafka_control_topic}
            bounds, query_name = start.policies.bounds(), start.seed.query
            refused_finder = RefusedRecordFinder(
                postgres, lease, query_name, kafka.portable_settings(), names, start.offsets, bounds
            )
            one_task = self._is_local and is_light(len(start.states), start.lag)
            self._ends_when_light = self._is_local and not one_task and is_light(len(start.states), 0)
            self._batches = BatchHandler(
                publisher,
                self._collector,
                start.seed,
                start.topics,
                trace,
                refused_finder.find,
                one_task=one_task,
            )
            spark, store = self._spark_engine.session(stopping), settings.checkpoint_store
            location = stack.enter_context(
                query_folder(settings.checkpoint) if store is None else store_folder(spark, store)
            )
            running = stack.enter_context(self._query(spark, start, location, self._batches, lease, one_task=one_task))
            threads = self._batches, lag_monitor, maintenance, requeuer, policy_watch, wait_monitor
            self._supervise(spark, running, lease, sinks, threads, wait_monitor)

    def _open_sinks(self, stack: ExitStack, postgres: Postgres, lease: Lease) -> list[Sink]:
        """Open the sinks, in the order in which they publish. `stack` closes them."""
        redis = RedisConfig(self._settings.redis, self._settings.redis_advances_max)
        show_progress = partial(progress, "filling Redis", unit="stream")
        sinks: list[Sink] = [Mirror(postgres, stack.enter_context(Redis(redis)), lease, show_progress)]
        if (topic := self._settings.kafka_positions_topic) is not None:
            config = PositionsTopicConfig(
                topic, self._kafka.client_settings(), query_producer_settings(self._kafka, topic)
            )
            sinks.append(stack.enter_context(PositionsTopic(postgres, config, Topics(self._kafka), lease)))
        return sinks

    @contextmanager
    def _query(
        self,
        spark: SparkSession,
        start: QueryStart,
        location: str,
        batches: BatchHandler,
        lease: Lease,
        *,
        one_task: bool,
    ) -> Iterator[StreamingQuery]:
        """Start the query, run the block, wait until the running batch is published, and stop the query.

        After `LAST_BATCH_TIMEOUT_SECONDS`, gives up the lease, so that the running batch fails instead of waiting for a
        server. Raises `QueryFailed` if the query does not start.
        """
        try:
            if self._is_local:
                set_tasks(spark, one_task=one_task)
            packets = engine.make_packets(
                spark,
                self._settings,
                self._kafka,
                start,
                self._max_records,
                self._too_many_records,
                self._not_storable,
                one_task=one_task,
            )
            seeds = spark.sparkContext.broadcast(start.seed.states)
            bounds, shards = start.policies.bounds(), self._settings.shards
            effects = query.compute_effects(
                packets, shards=shards, seeds=seeds, bounds=bounds, query=start.seed.query, one_task=one_task
            )
            writer = effects.writeStream.queryName("tidemark").option("checkpointLocation", location)
            running = writer.foreachBatch(batches).start()
        except Py4JJavaError as error:  # for example if a Python process of Spark was killed
            raise QueryFailed(engine.innermost_cause(str(error.java_exception.toString()).splitlines()[0])) from error
        except PySparkException as error:
            raise QueryFailed((str(error).splitlines() or [type(error).__name__])[0]) from error
        tasks = "one" if one_task else "all cores"
        log.info("The query runs", query=start.seed.query, streams=len(start.states), tasks=tasks)
        metrics.LAST_BATCH.set_to_current_time()
        try:
            yield running
        finally:
            self._health.set_state("the query ended")
            if not batches.finish(LAST_BATCH_TIMEOUT_SECONDS):
                # The thread of the batch may wait for a server. Without the lease, the thread stops waiting.
                log.warning("The query ended, but a batch still runs; the next query repeats the batch")
                lease.give_up()
            with suppress(PySparkException, Py4JJavaError):  # raised if the batch takes longer than Spark waits
                running.stop()
            batches.finish()
            with suppress(Py4JError, OSError, PySparkException):
                seeds.destroy()

    def _supervise(
        self,
        spark: SparkSession,
        query: StreamingQuery,
        lease: Lease,
        sinks: Sequence[Sink],
        threads: Sequence[BatchHandler | LagMonitor | LeasedThread],
        wait_monitor: BatchWaitMonitor,
    ) -> None:
        """Check the lease, the query and all threads twice a second until `stopping` is set. Raises the first failure.

        Also updates the heartbeat and the state of the pipeline for probes.
        """
        secrets_checked_at = time.monotonic()
        batches = self._batches if self._ends_when_light else None
        while not self._stopping.is_set():
            metrics.HEARTBEAT.set_to_current_time()
            for sink in sinks:
                metrics.SINK_FAULTS.labels(sink.name).set(len(sink.faults()))
            is_active = query.isActive  # before the failures: if the query has ended, a failure may be the cause
            lease.check()
            for thread in threads:
                if thread.failure is not None:
                    raise thread.failure
            if time.monotonic() - secrets_checked_at > SECRETS_CHECK_SECONDS:
                secrets_checked_at = time.monotonic()
                if self.has_outdated_secrets:
                    raise ConfigurationChanged("a secret for Kafka")
            if batches is not None and batches.seconds_without_large_batch() > LIGHT_TRAFFIC_SECONDS:
                raise ConfigurationChanged("the amount of traffic")
            if not is_active:
                raise QueryFailed(engine.innermost_cause(str(query.exception() or "")))
            if not query.status["message"].startswith("Initializing"):
                present = frozenset() if self._is_local else executor_addresses(spark)
                if self._settings.checkpoint_store is None:
                    if not self.has_published:
                        self._executors_with_states |= present
                    engine.require_executors(spark, self._executors_with_states, present)
                problem = wait_monitor.problem if self._is_local or present else NO_EXECUTOR
                if problem is not None and problem != self._health.readiness_problem():
                    log.warning("No batch can run", problem=problem)
                self._health.set_state(problem)
            self._stopping.wait(0.5)


def is_light(streams: int, lag: int) -> bool:
    """Whether a query that starts with `streams` streams and `lag` unread records is for light traffic."""
    return streams <= LIGHT_STREAMS and lag < LIGHT_RECORDS


def _add_offsets(added_offsets: NotStorableOffsets, known_offsets: dict[str, dict[int, list[int]]]) -> None:
    """Add the offsets in `added_offsets` to `known_offsets`."""
    for topic, partitions in added_offsets.items():
        for partition, offsets in partitions.items():
            known_offsets.setdefault(topic, {}).setdefault(partition, []).extend(offsets)


def _exit_after_timeout() -> None:
    """Sleep for `EXIT_TIMEOUT_SECONDS`, and then end the process. For a daemon thread that starts at the signal."""
    time.sleep(EXIT_TIMEOUT_SECONDS)
    log.warning("Stopped without waiting for servers that do not answer; the next start repeats the unfinished work")
    os._exit(0)
