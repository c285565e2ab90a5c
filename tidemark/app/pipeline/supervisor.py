"""`tidemark pipeline`: the composition root of the query, its source and its sinks.

Its threads: the main thread supervises; Spark's callback publishes batches (`app.pipeline.batches`); one renews the
lease; one refills Redis; others query Kafka for end offsets and Postgres for policies; `app.serving.http_health`
answers scrapes and probes.
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
from tidemark.app.pipeline.batches import Batches, Isolation, tracing
from tidemark.app.pipeline.kafka_lag import LagMonitor
from tidemark.app.pipeline.preflight import Start, prepare
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
from tidemark.sinks.background import LeasedThread, Maintenance, MaintenanceConfig, WaitWatch
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
from tidemark.sources.producer import producer_settings
from tidemark.sources.topics import Acceptance, Topics
from tidemark.streaming.engine import query
from tidemark.streaming.engine.checkpoint import locked, query_folder, store_folder
from tidemark.streaming.engine.jvm import is_local
from tidemark.streaming.engine.spark import executors, set_tasks
from tidemark.streaming.ingest.compact import RefusedOffsets
from tidemark.streaming.ingest.source import LIGHT_RECORDS
from tidemark.streaming.values.limits import Policies
from tidemark.streaming.wire.records import Topic

log = get_logger(__name__)

SECONDS = 2.0  # between two checks
SHOWN = 10  # names in the log


class PolicyWatch(LeasedThread):
    """Calls `follow` with changed policies. A query cannot change its bounds, so if bounds differ, `failure` requests a
    new query.
    """

    def __init__(
        self, table: PolicyTable, lease: Lease, policies: Policies, follow: Callable[[Policies], None]
    ) -> None:
        super().__init__("policies", lease)
        self._table = table
        self._policies = policies
        self._follow = follow
        self._away = False

    def work(self) -> float:
        try:
            given = self._table.given()
        except Unavailable as problem:
            if not self._away:
                log.warning("Could not read the policies; trying again", problem=str(problem))
            self._away = True
            return SECONDS
        self._away = False
        if given != self._policies.given:
            before, self._policies = self._policies, replace(self._policies, given=given)
            changed = [name for name in sorted({*given, *before.given}) if given.get(name) != before.given.get(name)]
            log.info("Follows other policies", changed=changed[:SHOWN], count=len(changed))
            self._follow(self._policies)
            if self._policies.bounds() != before.bounds():
                self.failure = ConfigurationChanged("bounds of streams")
        return SECONDS


# The time limit of the current batch after SIGTERM, so that the process ends within 10 s.
LAST_BATCH_SECONDS = 6.0
# After this time, threads that wait for a server are abandoned, because an orchestrator kills the process after 10 s.
LAST_SECONDS = 9.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
# A query that fails so often without publishing one batch will not mend itself. Slow starts of Python are not counted.
FAILURES = 6
SECRETS_SECONDS = 5.0  # between two readings of Kafka's secrets
# New objects until a garbage collection; 700 by default. A batch of 10,000 streams creates 500,000 objects and no
# cycle, and collections took longer than the rest of the driver's work.
CYCLES = 100_000, 20, 50
# A query for light traffic computes a batch in one task, with two thirds of the CPU. A query for heavy traffic uses all
# cores. The choice is made at the start of a query, and a restart takes a second. With many streams it takes longer, so
# a query with more streams than this is always for heavy traffic.
LIGHT_STREAMS = 10_000
LIGHT_SECONDS = 120.0  # without a large batch until a query for heavy traffic is replaced
NO_EXECUTOR = "no executor of Spark has come: look at its pods, or at the workers of its cluster"


def run(settings: Settings, accept: Set[Acceptance]) -> None:
    """Run until SIGTERM or SIGINT, then complete the running batch and return. `accept`: the checks that an operator
    overrides for this start: `partitions`, `loss`, `shards`. Raises Stop if a person must decide, and QueryFailed if
    the query fails repeatedly."""
    gc.set_threshold(*CYCLES)
    stopping = shutdown_event(_leave_late)
    metrics.STARTED.set_to_current_time()
    board = StreamCollector(streams=settings.metrics_max_streams, writers=settings.metrics_max_writers)
    metrics.REGISTRY.register(board)
    health = metrics.PipelineHealth()
    with (
        suppress(Stopping),
        http_health.serve_health("TIDEMARK_METRICS_PORT", (settings.metrics_host, settings.metrics_port), health),
        locked(settings.checkpoint, stopping),
        engine.running(settings) as spark,
    ):
        failures = highest_token = 0
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        most = settings.max_records_per_batch
        refused: dict[str, dict[int, list[int]]] = {}
        while not stopping.is_set():
            attempt = Attempt(settings, spark, board, health, stopping, highest_token, most, refused)
            most = settings.max_records_per_batch
            try:
                attempt.run(accept)
            except Refused as error:
                if not attempt.outdated:
                    raise
                log.warning("Trying again with the secrets as they are now", problem=str(error))
            except Retry as error:
                if not (isinstance(error, QueryFailed) and error.problem == engine.SLOW_START):
                    failures += 1
                if attempt.published or isinstance(error, ConfigurationChanged):
                    failures = 0
                    backoff.reset()
                if isinstance(error, Unavailable):
                    metrics.RETRIES.labels(error.what).inc()
                if isinstance(error, LeaseLost):
                    highest_token = max(highest_token, error.own, error.newest)
                    board.forget()
                if isinstance(error, BatchTooLarge | ContentRefused):
                    most = error.fewer
                if isinstance(error, RecordsRefused):
                    _add(error.offsets, refused)
                if isinstance(error, QueryFailed | ChainBroken) and failures >= FAILURES:
                    raise
                pause = backoff.next()
                log.warning("Trying again", problem=str(error), pause=pause)
                health.set_state(str(error))
                stopping.wait(pause)
            finally:
                if attempt.prepared:  # the accepted loss is recorded; later losses are not accepted
                    accept = frozenset()
    log.info("Ended")


class Attempt:
    """One run of the query, from taking the lease to losing it. For one use."""

    def __init__(
        self,
        settings: Settings,
        spark: engine.Engine,
        board: StreamCollector,
        health: metrics.PipelineHealth,
        stopping: threading.Event,
        highest_token: int,
        most: int,
        refused: RefusedOffsets,
    ) -> None:
        self._settings = settings
        self._refused = refused
        self._most = most  # records of a batch
        self._spark = spark
        self._board = board
        self._health = health
        self._stopping = stopping
        self._highest_token = highest_token
        self._batches: Batches | None = None
        self.prepared = False
        """Whether all that could be wrong at a start was checked, and `accept` was used up."""
        self._local = is_local(settings.spark_master)
        self._ends_when_light = False
        self._holders: frozenset[str] = frozenset()  # executors at the first batch, which have states
        self._kafka = settings.kafka
        self._secrets = self._settings.kafka.carried()

    @property
    def outdated(self) -> bool:
        """Whether a secret for Kafka has changed since the start: running clients do not reload secrets."""
        return self._settings.kafka.carried() != self._secrets

    @property
    def published(self) -> bool:
        """Whether a batch was published."""
        return self._batches is not None and self._batches.published > 0

    def run(self, accept: Set[Acceptance]) -> None:
        """Run until asked to stop. Raises Retry if another attempt may succeed, and Stop."""
        settings, stopping, kafka = self._settings, self._stopping, self._kafka
        with ExitStack() as stack:
            stack.enter_context(self._spark.alive())
            retention = Retention(history=settings.history_days, audit=settings.audit_days)
            postgres = stack.enter_context(Postgres(PostgresConfig(settings.postgres, retention)))
            postgres.check()
            require_successor(postgres.pipeline_version())
            self._health.set_state("another pipeline holds the lease, or has not let it run out yet")
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
            self.prepared = True
            self._board.follow(start.policies)
            self._board.load(start.states, start.offsets)
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # the garbage collector skips the loaded states of up to a million streams
            sinks = self._sinks(stack, postgres, lease)
            stack.enter_context(self._board.comparing(sinks))
            for sink in sinks:
                with suppress(Unavailable):  # publishing waits for Redis later
                    sink.check()
            maintenance = stack.enter_context(
                Maintenance(sinks, postgres, lease, MaintenanceConfig(), metrics.CLOCK.set)
            )
            facts, dead = settings.kafka_facts_topic, settings.kafka_dead_letters_topic
            dead_letters = stack.enter_context(
                DeadLetters(DeadLettersConfig(dead, kafka.client(), producer_settings(kafka, dead)))
            )
            publisher = Publisher(
                postgres, sinks, dead_letters, lease, stopping, lambda error: metrics.RETRIES.labels(error.what).inc()
            )
            publisher.send_unsent()
            end_offsets = stack.enter_context(
                LagMonitor(topics, start.topics, self._board, postgres.note_lagging).running()
            )
            requeue = RequeueConfig(facts, kafka.client(), producer_settings(kafka, facts))
            requeuing = stack.enter_context(Requeuer(requeue, postgres, lease, metrics.RECALLED.inc))
            waits = stack.enter_context(WaitWatch(postgres.waits, lease))
            watching = stack.enter_context(PolicyWatch(postgres.policies, lease, start.policies, self._board.follow))
            trace = stack.enter_context(tracing(settings.secret("otlp_url"), settings.owner, lease.token))
            names = {Topic.FACTS: settings.kafka_facts_topic, Topic.CONTROL: settings.kafka_control_topic}
            bounds, line = start.policies.bounds(), start.seed.lineage
            isolation = Isolation(postgres, lease, line, kafka.carried(), names, start.offsets, bounds)
            one_task = self._local and is_light(len(start.states), start.lag)
            self._ends_when_light = self._local and not one_task and is_light(len(start.states), 0)
            self._batches = Batches(
                publisher, self._board, start.seed, start.topics, trace, isolation.find, one_task=one_task
            )
            spark, store = self._spark.session(stopping), settings.checkpoint_store
            location = stack.enter_context(
                query_folder(settings.checkpoint) if store is None else store_folder(spark, store)
            )
            running = stack.enter_context(self._query(spark, start, location, self._batches, lease, one_task=one_task))
            threads = self._batches, end_offsets, maintenance, requeuing, watching, waits
            self._supervise(spark, running, lease, sinks, threads, waits)

    def _sinks(self, stack: ExitStack, postgres: Postgres, lease: Lease) -> list[Sink]:
        """The sinks, in the order in which they publish."""
        redis = RedisConfig(self._settings.redis, self._settings.redis_advances_max)
        shown = partial(progress, "filling Redis", unit="stream")
        sinks: list[Sink] = [Mirror(postgres, stack.enter_context(Redis(redis)), lease, shown)]
        if (topic := self._settings.kafka_positions_topic) is not None:
            config = PositionsTopicConfig(topic, self._kafka.client(), producer_settings(self._kafka, topic))
            sinks.append(stack.enter_context(PositionsTopic(postgres, config, Topics(self._kafka), lease)))
        return sinks

    @contextmanager
    def _query(
        self, spark: SparkSession, start: Start, location: str, batches: Batches, lease: Lease, *, one_task: bool
    ) -> Iterator[StreamingQuery]:
        try:
            if self._local:
                set_tasks(spark, one_task=one_task)
            packets = engine.packets(
                spark, self._settings, self._kafka, start, self._most, self._refused, one_task=one_task
            )
            seeds = spark.sparkContext.broadcast(start.seed.states)
            bounds, shards = start.policies.bounds(), self._settings.shards
            effects = query.positions(
                packets, shards=shards, seeds=seeds, bounds=bounds, line=start.seed.lineage, one_task=one_task
            )
            writer = effects.writeStream.queryName("tidemark").option("checkpointLocation", location)
            running = writer.foreachBatch(batches).start()
        except Py4JJavaError as error:  # of Python processes that were killed
            raise QueryFailed(engine.cause(str(error.java_exception.toString()).splitlines()[0])) from error
        except PySparkException as error:
            raise QueryFailed((str(error).splitlines() or [type(error).__name__])[0]) from error
        tasks = "one" if one_task else "all cores"
        log.info("The query runs", lineage=start.seed.lineage, streams=len(start.states), tasks=tasks)
        metrics.LAST_BATCH.set_to_current_time()
        try:
            yield running
        finally:
            self._health.set_state("the query ended")
            if not batches.finish(LAST_BATCH_SECONDS):
                # The thread may still wait for a server. The next query reads its batch again.
                log.warning("The query ended, and a batch of it still waits for a server")
                lease.give_up()
            with suppress(PySparkException, Py4JJavaError):  # a batch may take longer than Spark waits
                running.stop()
            batches.finish()
            with suppress(Py4JError, OSError, PySparkException):
                seeds.destroy()

    def _supervise(
        self,
        spark: SparkSession,
        running: StreamingQuery,
        lease: Lease,
        sinks: Sequence[Sink],
        threads: Sequence[Batches | LagMonitor | LeasedThread],
        waits: WaitWatch,
    ) -> None:
        looked = time.monotonic()
        batches = self._batches if self._ends_when_light else None
        while not self._stopping.is_set():
            metrics.HEARTBEAT.set_to_current_time()
            for sink in sinks:
                metrics.SINK_FAULTS.labels(sink.name).set(len(sink.faults()))
            is_active = running.isActive  # read before the failures: if the query has ended, its cause is already set
            lease.check()
            for thread in threads:
                if thread.failure is not None:
                    raise thread.failure
            if time.monotonic() - looked > SECRETS_SECONDS:
                looked = time.monotonic()
                if self.outdated:
                    raise ConfigurationChanged("a secret for Kafka")
            if batches is not None and batches.seconds_without_large_batch() > LIGHT_SECONDS:
                raise ConfigurationChanged("the amount of traffic")
            if not is_active:
                raise QueryFailed(engine.cause(str(running.exception() or "")))
            if not running.status["message"].startswith("Initializing"):
                present = frozenset() if self._local else executors(spark)
                if self._settings.checkpoint_store is None:
                    if not self.published:
                        self._holders |= present
                    engine.require_states(spark, self._holders, present)
                lacks = waits.problem if self._local or present else NO_EXECUTOR
                if lacks is not None and lacks != self._health.readiness_problem():
                    log.warning("No batch can run", problem=lacks)
                self._health.set_state(lacks)
            self._stopping.wait(0.5)


def is_light(streams: int, lag: int) -> bool:
    """Whether a local query that starts with `streams` streams and `lag` unread records is for light traffic."""
    return streams <= LIGHT_STREAMS and lag < LIGHT_RECORDS


def _add(places: RefusedOffsets, known: dict[str, dict[int, list[int]]]) -> None:
    for topic, by in places.items():
        for partition, offsets in by.items():
            known.setdefault(topic, {}).setdefault(partition, []).extend(offsets)


def _leave_late() -> None:
    """End the process if it has not ended `LAST_SECONDS` after the signal."""
    time.sleep(LAST_SECONDS)
    log.warning("Left what still waited for a server; the next start does it again")
    os._exit(0)
