"""Handles the batches of the query in the driver, and finds the records that Postgres refuses.

Spark's thread collects and checks a batch. Another thread publishes and counts the batch, so that Spark can compute the
next batch at the same time (docs/decisions/0024-batch-ahead.md). Spark converts the exception of a callback to a text,
so `BatchHandler` also stores the exception.

A batch is one transaction of all streams, so one record that Postgres refuses would block all streams.
`RefusedRecordFinder` finds such records by bisection, in transactions that are rolled back. The first bisection finds
the streams with refused effects. For each of these streams, the finder reads the records from Kafka again, and runs the
state machine from the state in Postgres. The second bisection finds the first refused record. Then the query starts
again, and rejects the refused records as it reads them (`ingest.compact`). So the refused records have the same order,
fencing and counts as any rejected record.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from pyspark.sql import DataFrame

from tidemark.app.pipeline import metrics
from tidemark.app.pipeline.preflight import Seed
from tidemark.app.pipeline.stream_metrics import StreamCollector
from tidemark.common.errors import (
    BatchTooLarge,
    ConfigurationChanged,
    ContentRefused,
    ExtraMissing,
    PartitionsChanged,
    QueryFailed,
    RecordsRefused,
    Stopping,
    TidemarkError,
)
from tidemark.common.log import get_logger
from tidemark.sinks.port import Batch, Fence
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.publisher import Publisher, PublishResult
from tidemark.sources.topics import TopicIdentity
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.engine.query import collect, decode_effects
from tidemark.streaming.ingest.compact import MAX_FACTS, compact
from tidemark.streaming.ingest.ranges import RangeReader, TopicOffsets
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.ingest.source import LIGHT_RECORDS, RECORDS_PER_TASK
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Join, Rdata, Record, Skip, Topic, encode, encode_row
from tidemark.streaming.wire.runs import Packet

log = get_logger(__name__)

BATCHES_PER_COLLECTION = 50
"""Number of batches between two garbage collections. pyspark creates reference cycles for each batch, which keep 40 KB
of query plans in the JVM until a collection. Other collections are rare (`app.pipeline.supervisor`).
"""
RETRY_DIVISOR = 2  # after a batch that is too large, the next query begins with batches of half of its records


class BatchTrace(Protocol):
    """Receives the progress of one attempt at a batch. If the attempt fails, some methods are not called."""

    def record_compute(self, batch: DataFrame, effects: Sequence[ShardEffects]) -> None:
        """Called first, when Spark has computed the effects of the batch."""

    def record_publish(self, result: PublishResult) -> None:
        """Called last, when all sinks have stored the batch, and its dead letters are sent."""


Trace: TypeAlias = Callable[[str, int], AbstractContextManager[BatchTrace]]
"""Opens the trace of one attempt at a batch. Arguments: the name of the query, and the number of the batch. An error
that is raised inside the block is recorded in the trace."""


class _NoTrace:
    def record_compute(self, batch: DataFrame, effects: Sequence[ShardEffects]) -> None:
        pass

    def record_publish(self, result: PublishResult) -> None:
        pass


def no_trace(_query: str, _number: int) -> AbstractContextManager[BatchTrace]:
    """Open a trace that records nothing."""
    return nullcontext(_NoTrace())


@contextmanager
def open_tracing(endpoint: str | None, owner: str, token: int) -> Iterator[Trace]:
    """Send traces to an OpenTelemetry collector during the block. Yields the function that opens the trace of a batch.

    Args:
        endpoint: the base URL of the collector's OTLP/HTTP; None: send no traces.
        owner: the owner of the lease, for the attribute `service.instance.id`.
        token: the fencing token of the lease.

    Raises:
        ExtraMissing: the OpenTelemetry SDK is not installed.
    """
    if endpoint is None:
        yield no_trace
        return
    try:
        from tidemark.app.pipeline.tracing import open_exporter  # noqa: PLC0415  # the SDK need not be installed
    except ModuleNotFoundError as error:
        raise ExtraMissing.for_import_error(error, "TIDEMARK_OTLP_URL", "otel") from None
    with open_exporter(endpoint, owner, token) as trace:
        yield trace


@dataclass(frozen=True, slots=True)
class _ComputedBatch:
    """A batch that Spark has computed.

    Attributes:
        number: the number of the batch in the query.
        began_at: when Spark called the `foreachBatch` callback, in seconds of the monotonic clock.
        effects: the effects of the batch, one for each shard.
        trace: the trace of the attempt.
    """

    number: int
    began_at: float
    effects: list[ShardEffects]
    trace: BatchTrace


class BatchHandler:
    """The `foreachBatch` callback of the query. Publishes batches one by one and in order, until the first error.

    Args:
        publisher: publishes a batch to the sinks.
        collector: the metrics of streams.
        seed: the name of the query, the last applied batch, and the states of the streams.
        topics: topic name -> identity of each topic that the query reads.
        trace: opens the trace of each batch.
        find_refused: returns the exception to raise for a batch whose content Postgres refuses. Called with the number
            and the effects of the batch, and the error of Postgres.
        one_task: whether the query is for light traffic: one task computes a batch.

    Attributes:
        failure: the error that ended the handling of batches; None if there is none. No batch is published after this
            error.
        published_count: the number of batches that were published.
    """

    def __init__(
        self,
        publisher: Publisher,
        collector: StreamCollector,
        seed: Seed,
        topics: Mapping[str, TopicIdentity],
        trace: Trace,
        find_refused: Callable[
            [int, list[ShardEffects], ContentRefused], TidemarkError
        ] = lambda _number, _effects, refusal: refusal,
        *,
        one_task: bool = False,
    ) -> None:
        self._publisher = publisher
        self._collector = collector
        self._seed = seed
        self._topics = topics
        self._trace = trace
        self._find_refused = find_refused
        self._one_task = one_task
        self._last_large_batch_at = time.monotonic()
        self._finish_requested = threading.Event()
        self._batch_lock = threading.Lock()
        self._publish_thread: threading.Thread | None = None
        self.failure: TidemarkError | None = None
        self.published_count = 0

    def __call__(self, batch: DataFrame, number: int) -> None:
        with self._batch_lock:
            try:
                if self._finish_requested.is_set():
                    raise Stopping("the query must end before the next batch")
                self._handle(batch, number)
            except TidemarkError as error:
                self.failure = self.failure or error
                raise

    def finish(self, seconds: float | None = None) -> bool:
        """Refuse new batches, and wait until every running batch is published or has failed.

        Args:
            seconds: the longest wait; None: no limit.

        Returns:
            False if a batch still runs after `seconds`, otherwise True.
        """
        self._finish_requested.set()
        deadline = None if seconds is None else time.monotonic() + seconds
        if not self._batch_lock.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._batch_lock.release()
        if self._publish_thread is None:
            return True
        self._publish_thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._publish_thread.is_alive()

    def seconds_without_large_batch(self) -> float:
        """Seconds since the last batch that read more than `RECORDS_PER_TASK` offsets, or since the start of the query
        if there was no such batch."""
        return time.monotonic() - self._last_large_batch_at

    def _handle(self, batch: DataFrame, number: int) -> None:
        """Wait for Spark's result and for the previous batch. Then start a thread that publishes the batch.

        If the query must end after this batch, publishes the batch on this thread. Then raises the error with which the
        query ends.
        """
        began_at = time.monotonic()
        with ExitStack() as traced:
            trace = traced.enter_context(self._trace(self._seed.query, number))
            encoded = collect(batch)
            self._await_published()
            effects = decode_effects(encoded)
            trace.record_compute(batch, effects)
            self._require_known_partitions(effects)
            collected = _ComputedBatch(number, began_at, effects, trace)
            offset_count = self._collector.count_new_offsets(effects)
            if offset_count > RECORDS_PER_TASK:
                self._last_large_batch_at = time.monotonic()
            if any(shard.is_cut_short for shard in effects):
                # This query ends before it computes another batch. The next query reads the rest of the range.
                self._publish(collected)
                raise BatchTooLarge(offset_count, max(1, offset_count // RETRY_DIVISOR))
            if self._one_task and offset_count >= LIGHT_RECORDS:
                self._publish(collected)
                raise ConfigurationChanged("the amount of traffic")
            work = collected, traced.pop_all()
        # A daemon thread, so that the process can exit while the thread waits for a server.
        self._publish_thread = threading.Thread(target=self._publish_on_thread, args=work, name="publish", daemon=True)
        self._publish_thread.start()

    def _await_published(self) -> None:
        """Wait until the previous batch is published. Raises `failure` if publishing has failed."""
        if self._publish_thread is not None:
            self._publish_thread.join()
        if self.failure is not None:
            raise self.failure

    def _publish_on_thread(self, collected: _ComputedBatch, traced: ExitStack) -> None:
        """Publish the batch. Stores an exception in `failure` instead of raising it."""
        try:
            with traced:
                self._publish(collected)
        except TidemarkError as error:
            self.failure = error
        except Exception as error:  # a defect: the supervisor raises the failure
            log.exception("Could not publish a batch", batch=collected.number)
            self.failure = QueryFailed(f"{type(error).__name__}: {error}")

    def _publish(self, batch: _ComputedBatch) -> None:
        """Publish the batch, and update the metrics. If Postgres refuses the batch, raises the result of
        `find_refused`."""
        query, before = self._seed.query, self._seed.batch_before(batch.number)
        try:
            published = self._publisher.publish(query, batch.number, batch.effects, before)
        except ContentRefused as error:
            raise self._find_refused(batch.number, batch.effects, error) from error
        batch.trace.record_publish(published)
        self._collector.update(batch.effects)
        seconds = time.monotonic() - batch.began_at
        metrics.count_batch(batch.effects, published, seconds)
        self.published_count += 1
        if self.published_count % BATCHES_PER_COLLECTION == 0:
            gc.collect()
        log.debug("Published a batch", batch=batch.number, seconds=round(seconds, 3))

    def _require_known_partitions(self, effects: list[ShardEffects]) -> None:
        """Raise `PartitionsChanged` if a topic has a new partition, because a stream could then have records in two
        partitions."""
        for shard in effects:
            for next_offset in shard.next_offsets:
                known = self._topics[next_offset.topic].partitions
                if next_offset.partition >= known:
                    raise PartitionsChanged(next_offset.topic, known, next_offset.partition + 1)


MAX_REFUSED_RECORDS = 100
"""The largest number of refused records of a stream that one call of `RefusedRecordFinder.find` returns."""

_TEST_STREAM: Final = "tidemark.probe"
_packet_decoder = msgspec.msgpack.Decoder(Packet)


class _KafkaRecord(NamedTuple):
    """A Kafka record. `time`: milliseconds since 1970."""

    topic: Topic
    partition: int
    offset: int
    time: int
    key: bytes
    value: bytes

    @property
    def origin(self) -> tuple[Topic, int, int]:
        return self.topic, self.partition, self.offset


_RecordOrigin = tuple[Topic, int, int]


@dataclass(frozen=True, slots=True)
class RefusedRecordFinder:
    """Finds the records of one query that Postgres refuses. Writes nothing.

    Attributes:
        postgres: Tidemark's database.
        lease: the pipeline's lease.
        query: the name of the query.
        client_settings: librdkafka's settings, which may contain a password.
        topic_names: role of a topic -> name of the topic.
        offsets: the offsets at the start of the query.
        bounds: the bounds of the query's state machine.
    """

    postgres: Postgres
    lease: Fence
    query: str
    client_settings: Mapping[str, str]
    topic_names: Mapping[Topic, str]
    offsets: TopicOffsets
    bounds: Bounds

    def find(self, number: int, effects: Sequence[ShardEffects], refusal: ContentRefused) -> TidemarkError:
        """Find the refused records of a batch. Postgres must have applied all earlier batches.

        Args:
            number: the number of the batch.
            effects: the effects of the batch, one for each shard.
            refusal: the error of Postgres.

        Returns:
            The error to raise. `RecordsRefused` with the refused records, at most `MAX_REFUSED_RECORDS` of each stream.
            `refusal` itself if no single record is the cause; then the next batch must be smaller. `QueryFailed` if
            Postgres refuses even a test batch.

        Raises:
            Unavailable: Postgres or Kafka does not answer.
            LeaseLost: another process has the lease.
        """
        if (problem := self._find_refusal(number, self._make_test_batch(effects[0].now))) is not None:
            return QueryFailed(f"Postgres refuses every batch, even a test batch: {problem}")
        refused_records: dict[_RecordOrigin, str] = {}
        for stream in self._find_refused_streams(number, effects):
            refused_records |= self._find_refused_records(number, effects, stream)
        if not refused_records:
            return refusal
        offsets = self._by_partition(sorted(refused_records, key=lambda origin: (origin[0].value, *origin[1:])))
        return RecordsRefused(len(refused_records), next(iter(refused_records.values())), offsets)

    def _by_partition(self, origins: Iterable[_RecordOrigin]) -> dict[str, dict[int, list[int]]]:
        """Group offsets: name of the topic -> partition -> offsets."""
        offsets: dict[str, dict[int, list[int]]] = {}
        for topic, partition, offset in origins:
            offsets.setdefault(self.topic_names[topic], {}).setdefault(partition, []).append(offset)
        return offsets

    def _find_refusal(self, number: int, effects: Sequence[ShardEffects]) -> str | None:
        """Apply the effects in a transaction that is rolled back. Returns the error message of Postgres; None if
        Postgres accepts the effects."""
        return self.postgres.find_refusal(Batch(self.query, number, self.lease.token, effects))

    def _find_refused_streams(self, number: int, effects: Sequence[ShardEffects]) -> list[str]:
        """Find the streams whose effects Postgres refuses even without the effects of other streams."""

        def search(names: list[str]) -> list[str]:
            selected = [
                msgspec.structs.replace(
                    shard, streams=[stream for stream in shard.streams if stream.stream in names], rejected=[]
                )
                for shard in effects
            ]
            if not names or self._find_refusal(number, selected) is None:
                return []
            half = len(names) // 2
            return names if not half else [*search(names[:half]), *search(names[half:])]

        return search([stream.stream for shard in effects for stream in shard.streams])

    def _find_refused_records(
        self, number: int, effects: Sequence[ShardEffects], stream: str
    ) -> dict[_RecordOrigin, str]:
        """Find records of `stream` that Postgres refuses, at most `MAX_REFUSED_RECORDS`: origin -> error message.

        Logs each of these records. Returns an empty dict if no single record is the cause.
        """
        state = self.postgres.states([stream])
        records = [*self._read_records(effects, stream)]
        refused_records: dict[_RecordOrigin, str] = {}

        def refusal_of(count: int) -> str | None:
            """The error message of Postgres if Postgres refuses the first `count` records, otherwise None."""
            return self._find_refusal(number, [self._apply(state, records[:count], refused_records, effects[0].now)])

        while len(refused_records) < MAX_REFUSED_RECORDS and (problem := refusal_of(len(records))) is not None:
            # Postgres accepts the first `accepted_count` records, and refuses the first `refused_count` records.
            accepted_count, refused_count = 0, len(records)
            while refused_count - accepted_count > 1:
                half = (accepted_count + refused_count) // 2
                if (message := refusal_of(half)) is None:
                    accepted_count = half
                else:
                    refused_count, problem = half, message
            record = records[refused_count - 1]
            if record.origin in refused_records or refusal_of(accepted_count) is not None:
                log.error(
                    "Postgres refuses the changes of a stream, and no single record is the cause",
                    stream=stream,
                    problem=problem,
                )
                return {}
            refused_records[record.origin] = problem
            log.error(
                "Postgres refuses the effects of a record; the record goes to the dead letters",
                stream=stream,
                topic=self.topic_names[record.topic],
                partition=record.partition,
                offset=record.offset,
                problem=problem,
            )
        return refused_records

    def _read_records(self, effects: Sequence[ShardEffects], stream: str) -> Iterator[_KafkaRecord]:
        """Read the batch's records of the stream from Kafka, in the order in which the query applies them."""
        ends, committed = Batch(self.query, 0, 0, effects).offsets(), self.postgres.offsets()
        key = stream.encode()
        with closing(RangeReader(self.client_settings, self.topic_names)) as reader:
            for topic in (Topic.FACTS, Topic.CONTROL):
                name = self.topic_names[topic]
                starts = {**self.offsets.get(name, {}), **committed.get(name, {})}
                for partition, end in sorted(ends.get(name, {}).items()):
                    for _, records in reader.read([PlannedRange(topic, partition, starts.get(partition, 0), end)]):
                        for at in range(records.size):
                            if records.key(at) == key:
                                offset, time = int(records.offsets[at]), int(records.times[at])
                                yield _KafkaRecord(topic, partition, offset, time, key, records.value(at))

    def _apply(
        self,
        state: dict[str, bytes],
        records: Sequence[_KafkaRecord],
        refused_records: Mapping[_RecordOrigin, str],
        now: int,
    ) -> ShardEffects:
        """Apply records of one stream, except the `refused_records`, to a copy of `state`, and return their effects.

        `now` is the time of the batch in milliseconds since 1970.
        """
        by_partition: dict[tuple[Topic, int], list[_KafkaRecord]] = {}
        for record in records:
            by_partition.setdefault((record.topic, record.partition), []).append(record)
        read = []
        for (topic, partition), part in by_partition.items():
            planned = PlannedRange(topic, partition, part[0].offset, part[-1].offset + 1)
            offsets, times = np.array([record.offset for record in part]), np.array([record.time for record in part])
            keys, values = [record.key for record in part], [record.value for record in part]
            read.append(([planned], [(planned, RecordBatch.of(keys, values, offsets, times))]))
        compacted = compact(
            read,
            keys=[0],
            names=dict(self.topic_names),
            max_facts=MAX_FACTS,
            not_storable=self._by_partition(refused_records),
        )
        packets = [
            _packet_decoder.decode(packet) for batch in compacted for packet in batch.column("packet").to_pylist()
        ]
        return apply_batch(0, States(dict(state)), packets, now, self.bounds)

    def _make_test_batch(self, now: int) -> list[ShardEffects]:
        """Make the effects of a test batch for an unused stream: facts, and a SKIP of an operator. A healthy database
        accepts these effects. `now`: the time of the batch in milliseconds since 1970."""
        facts: list[Record] = [
            Join(stream=_TEST_STREAM, writer="probe", epoch=1, id=0),
            Rdata(stream=_TEST_STREAM, writer="probe", epoch=1, prev=0, id=1, row=encode_row({})),
            Rdata(stream=_TEST_STREAM, writer="probe", epoch=1, prev=2, id=3, row=encode_row({})),
        ]
        skip = Skip(stream=_TEST_STREAM, writer="probe", epoch=1, prev=1, id=2, by="tidemark", why="a probe")
        records = [
            _KafkaRecord(topic, 0, offset, now, _TEST_STREAM.encode(), encode(record))
            for topic, offset, record in [
                *((Topic.FACTS, offset, record) for offset, record in enumerate(facts)),
                (Topic.CONTROL, 0, skip),
            ]
        ]
        return [msgspec.structs.replace(self._apply({}, records, {}, now), next_offsets=[])]
