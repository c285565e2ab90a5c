"""The path of a batch in the driver:

Spark's thread collects and checks it, another thread publishes and counts it. So Spark computes a batch while the
previous one is published (docs/decisions/0024-batch-ahead.md). Spark turns the exception of a callback into a text, so
the exception is stored here for the pipeline. If Postgres refuses a batch, a bisection in rolled-back transactions
finds the refused records. A batch is one transaction of all streams, so otherwise one record would block all of them.
The first bisection finds the streams with refused effects. A second one reads the records of such a stream from Kafka
again, and runs the state machine from the states in Postgres, until it finds the first refused record. Nothing is
written. The query starts again and rejects those records as it reads them (`ingest.compact`), so order, fencing and
counts are those of any rejected record."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tidemark.sinks.publisher import Published, Publisher
from tidemark.sources.topics import RememberedTopic
from tidemark.streaming.core.batch import advance
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.engine.query import collect, decoded
from tidemark.streaming.ingest.compact import MOST_FACTS, compact
from tidemark.streaming.ingest.ranges import RangeReader, TopicOffsets
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.ingest.source import LIGHT_RECORDS, ONE_TASK
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Join, Rdata, Record, Skip, Topic, encode, row
from tidemark.streaming.wire.runs import Packet

log = get_logger(__name__)

LET_GO_AFTER = 50
"""Collect garbage after this many batches. The objects that pyspark makes for a batch form reference cycles, and keep
40 KB of plans in the JVM until a collection, which is otherwise rare (`app.pipeline.supervisor`).
"""
FEWER = 4  # divisor of the number of records when a batch is repeated with fewer records


class BatchTrace(Protocol):
    """Receives the progress of one attempt at one batch, in this order. After a failure the remaining calls are not
    made.
    """

    def computed(self, batch: DataFrame, effects: Sequence[ShardEffects]) -> None:
        """Spark has read the records and advanced the states."""

    def published(self, published: Published) -> None:
        """All sinks have the batch, and its dead letters are sent."""


Trace: TypeAlias = Callable[[str, int], AbstractContextManager[BatchTrace]]
"""Takes the query and the number of a batch. An error raised inside the block is recorded in the trace."""


class _NoTrace:
    def computed(self, batch: DataFrame, effects: Sequence[ShardEffects]) -> None:
        pass

    def published(self, published: Published) -> None:
        pass


def untraced(_query: str, _number: int) -> AbstractContextManager[BatchTrace]:
    return nullcontext(_NoTrace())


@contextmanager
def tracing(endpoint: str | None, owner: str, token: int) -> Iterator[Trace]:
    """Send traces to the OpenTelemetry collector at `endpoint`; None sends no traces.

    Args:
        endpoint: base URL of OTLP/HTTP.
        owner: the owner of the lease, for the attribute `service.instance.id`.
        token: the fencing token of the lease.

    Raises:
        ExtraMissing: the OpenTelemetry SDK is not installed.
    """
    if endpoint is None:
        yield untraced
        return
    try:
        from tidemark.app.pipeline.tracing import collector  # noqa: PLC0415  # the SDK need not be installed
    except ModuleNotFoundError as error:
        raise ExtraMissing.instead_of(error, "TIDEMARK_OTLP_URL", "otel") from None
    with collector(endpoint, owner, token) as trace:
        yield trace


@dataclass(frozen=True, slots=True)
class _Collected:
    """A batch that Spark `began` (by the monotonic clock) and has computed."""

    number: int
    began: float
    effects: list[ShardEffects]
    trace: BatchTrace


class Batches:
    """The query's sink.

    `seed`: the states at the start of the query. `topics`: the topics that are read. `trace`: called for each batch.
    `isolate`: returns the exception for a batch whose content Postgres refuses. Batches are published one at a time, in
    order, until a `failure`. After `finish`, running batches are completed and no new ones begin."""

    def __init__(
        self,
        publisher: Publisher,
        board: StreamCollector,
        seed: Seed,
        topics: Mapping[str, RememberedTopic],
        trace: Trace,
        isolate: Callable[[int, list[ShardEffects], ContentRefused], TidemarkError] = lambda *given: given[-1],
        *,
        one_task: bool = False,
    ) -> None:
        self._publisher = publisher
        self._board = board
        self._seed = seed
        self._topics = topics
        self._trace = trace
        self._isolate = isolate
        self._one_task = one_task
        self._large_at = time.monotonic()
        self._finishing = threading.Event()
        self._in_hand = threading.Lock()
        self._publishing: threading.Thread | None = None
        self.failure: TidemarkError | None = None
        self.published = 0

    def __call__(self, batch: DataFrame, number: int) -> None:
        with self._in_hand:
            try:
                if self._finishing.is_set():
                    raise Stopping("asked to end between two batches")
                self._take(batch, number)
            except TidemarkError as error:
                self.failure = self.failure or error
                raise

    def finish(self, seconds: float | None = None) -> bool:
        """Complete the running batches without starting new ones. Returns False after `seconds` (None: no limit)."""
        self._finishing.set()
        deadline = None if seconds is None else time.monotonic() + seconds
        if not self._in_hand.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._in_hand.release()
        if self._publishing is None:
            return True
        self._publishing.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._publishing.is_alive()

    def seconds_without_large_batch(self) -> float:
        """Seconds since the last batch that was large enough for more than one task."""
        return time.monotonic() - self._large_at

    def _take(self, batch: DataFrame, number: int) -> None:
        began = time.monotonic()
        with ExitStack() as traced:
            trace = traced.enter_context(self._trace(self._seed.lineage, number))
            encoded = collect(batch)
            self._await_published()
            effects = decoded(encoded)
            trace.computed(batch, effects)
            self._require_known_partitions(effects)
            collected = _Collected(number, began, effects, trace)
            read = self._board.new_offsets(effects)
            if read > ONE_TASK:
                self._large_at = time.monotonic()
            if any(shard.cut for shard in effects):
                # The rest of the range is read by the next query, because this one ends before it computes another
                # batch.
                self._publish(collected)
                raise BatchTooLarge(read, max(1, read // FEWER))
            if self._one_task and read >= LIGHT_RECORDS:
                self._publish(collected)
                raise ConfigurationChanged("the amount of traffic")
            work = collected, traced.pop_all()
        # A daemon thread, so that the process can exit while it waits for a server.
        self._publishing = threading.Thread(target=self._publish_beside, args=work, name="publish", daemon=True)
        self._publishing.start()

    def _await_published(self) -> None:
        """Wait until the previous batch is published. Raises the error that prevented it."""
        if self._publishing is not None:
            self._publishing.join()
        if self.failure is not None:
            raise self.failure

    def _publish_beside(self, collected: _Collected, traced: ExitStack) -> None:
        try:
            with traced:
                self._publish(collected)
        except TidemarkError as error:
            self.failure = error
        except Exception as error:  # the supervisor raises it
            log.exception("A batch could not be published", batch=collected.number)
            self.failure = QueryFailed(f"{type(error).__name__}: {error}")

    def _publish(self, batch: _Collected) -> None:
        line, before = self._seed.lineage, self._seed.before(batch.number)
        try:
            published = self._publisher.publish(line, batch.number, batch.effects, before)
        except ContentRefused as error:
            raise self._isolate(batch.number, batch.effects, error) from error
        batch.trace.published(published)
        self._board.update(batch.effects)
        seconds = time.monotonic() - batch.began
        metrics.count_batch(batch.effects, published, seconds)
        self.published += 1
        if self.published % LET_GO_AFTER == 0:
            gc.collect()
        log.debug("Published a batch", batch=batch.number, seconds=round(seconds, 3))

    def _require_known_partitions(self, effects: list[ShardEffects]) -> None:
        """Raise if a partition was added: Spark would read it, and streams could have records in two partitions."""
        for shard in effects:
            for progress in shard.progress:
                known = self._topics[progress.topic].partitions
                if progress.partition >= known:
                    raise PartitionsChanged(progress.topic, known, progress.partition + 1)


MOST_REFUSED = 100
"""The largest number of refused records of a stream that one attempt finds."""

_PROBE: Final = "tidemark.probe"
_packets = msgspec.msgpack.Decoder(Packet)


class _Taken(NamedTuple):
    """A Kafka record; `time` in ms."""

    topic: Topic
    partition: int
    offset: int
    time: int
    key: bytes
    value: bytes

    @property
    def place(self) -> tuple[Topic, int, int]:
        return self.topic, self.partition, self.offset


_Place = tuple[Topic, int, int]


@dataclass(frozen=True, slots=True)
class Isolation:
    """Finds the records that Postgres refuses, for one query. `line`: the lineage of its batches. `offsets`: the
    offsets at its start. `names`: the names of its topics. `client`: librdkafka's settings, which may contain a
    password."""

    postgres: Postgres
    lease: Fence
    line: str
    client: Mapping[str, str]
    names: Mapping[Topic, str]
    offsets: TopicOffsets
    bounds: Bounds

    def find(self, number: int, effects: Sequence[ShardEffects], refused: ContentRefused) -> TidemarkError:
        """Return the error to raise for batch `number`, which Postgres has `refused`. The previous batch must be
        applied.

        `RecordsRefused`: these records are refused. `ContentRefused`: no single record is refused; a smaller batch is
        needed. `QueryFailed`: Postgres refuses every batch. Raises `Unavailable`, `LeaseLost`.
        """
        if (problem := self._refusal(number, self._probe(effects[0].now))) is not None:
            return QueryFailed(f"Postgres refuses every batch, not only this one: {problem}")
        unacceptable: dict[_Place, str] = {}
        for stream in self._streams(number, effects):
            unacceptable |= self._records(number, effects, stream)
        if not unacceptable:
            return refused
        places: dict[str, dict[int, list[int]]] = {}
        for topic, partition, offset in sorted(
            unacceptable, key=lambda offset_key: (offset_key[0].value, *offset_key[1:])
        ):
            places.setdefault(self.names[topic], {}).setdefault(partition, []).append(offset)
        return RecordsRefused(len(unacceptable), next(iter(unacceptable.values())), places)

    def _refusal(self, number: int, effects: Sequence[ShardEffects]) -> str | None:
        return self.postgres.refusal(Batch(self.line, number, self.lease.token, effects))

    def _streams(self, number: int, effects: Sequence[ShardEffects]) -> list[str]:
        """The streams whose effects Postgres refuses even without the other streams."""

        def refused(names: list[str]) -> list[str]:
            chosen = [
                msgspec.structs.replace(
                    shard,
                    streams=[
                        effects_of_stream for effects_of_stream in shard.streams if effects_of_stream.stream in names
                    ],
                    rejected=[],
                )
                for shard in effects
            ]
            if not names or self._refusal(number, chosen) is None:
                return []
            half = len(names) // 2
            return names if not half else [*refused(names[:half]), *refused(names[half:])]

        return refused([stream.stream for shard in effects for stream in shard.streams])

    def _records(self, number: int, effects: Sequence[ShardEffects], stream: str) -> dict[_Place, str]:
        """The records of `stream` that Postgres refuses, each with its message."""
        state = self.postgres.states([stream])
        records = [*self._read(effects, stream)]
        unacceptable: dict[_Place, str] = {}

        def refusal(count: int) -> str | None:
            """The refusal of the first `number` records, or None."""
            return self._refusal(number, [self._advance(state, records[:count], unacceptable, effects[0].now)])

        while len(unacceptable) < MOST_REFUSED and (problem := refusal(len(records))) is not None:
            taken, stopped = 0, len(records)
            while stopped - taken > 1:
                half = (taken + stopped) // 2
                if (refused := refusal(half)) is None:
                    taken = half
                else:
                    stopped, problem = half, refused
            record = records[stopped - 1]
            if record.place in unacceptable or refusal(taken) is not None:
                log.error("Postgres refuses a stream whatever its records contain", stream=stream, problem=problem)
                return {}
            unacceptable[record.place] = problem
            log.error(
                "Postgres refuses what follows from a record: it goes to the dead letters",
                stream=stream,
                topic=self.names[record.topic],
                partition=record.partition,
                offset=record.offset,
                problem=problem,
            )
        return unacceptable

    def _read(self, effects: Sequence[ShardEffects], stream: str) -> Iterator[_Taken]:
        """The batch's records of the stream, in the order in which they are applied."""
        ends, begins = Batch(self.line, 0, 0, effects).offsets(), self.postgres.offsets()
        key = stream.encode()
        with closing(RangeReader(self.client, self.names)) as reader:
            for topic in (Topic.FACTS, Topic.CONTROL):
                name = self.names[topic]
                known = {**self.offsets.get(name, {}), **begins.get(name, {})}
                for partition, end in sorted(ends.get(name, {}).items()):
                    for _, part in reader.read([PlannedRange(topic, partition, known.get(partition, 0), end)]):
                        for at in range(part.size):
                            if part.key(at) == key:
                                offset, time = int(part.offsets[at]), int(part.times[at])
                                yield _Taken(topic, partition, offset, time, key, part.value(at))

    def _advance(
        self, state: dict[str, bytes], records: Sequence[_Taken], refused: Mapping[_Place, str], now: int
    ) -> ShardEffects:
        """The effects of these records on their stream, without the refused records."""
        parts: dict[tuple[Topic, int], list[_Taken]] = {}
        for record in records:
            parts.setdefault((record.topic, record.partition), []).append(record)
        read = []
        for (topic, partition), part in parts.items():
            wanted = PlannedRange(topic, partition, part[0].offset, part[-1].offset + 1)
            offsets, times = np.array([record.offset for record in part]), np.array([record.time for record in part])
            read.append(
                (
                    [wanted],
                    [
                        (
                            wanted,
                            RecordBatch.of(
                                [record.key for record in part], [record.value for record in part], offsets, times
                            ),
                        )
                    ],
                )
            )
        places: dict[str, dict[int, list[int]]] = {}
        for topic, partition, offset in refused:
            places.setdefault(self.names[topic], {}).setdefault(partition, []).append(offset)
        made = compact(read, keys=[0], names=dict(self.names), max_facts=MOST_FACTS, refused=places)
        packets = [_packets.decode(packet) for batch in made for packet in batch.column("packet").to_pylist()]
        return advance(0, States(dict(state)), packets, now, self.bounds)

    def _probe(self, now: int) -> list[ShardEffects]:
        """The effects of a fact and an operator's SKIP on an unused stream: a healthy database accepts them."""
        facts: list[Record] = [
            Join(stream=_PROBE, writer="probe", epoch=1, id=0),
            Rdata(stream=_PROBE, writer="probe", epoch=1, prev=0, id=1, row=row({})),
            Rdata(stream=_PROBE, writer="probe", epoch=1, prev=2, id=3, row=row({})),
        ]
        skip = Skip(stream=_PROBE, writer="probe", epoch=1, prev=1, id=2, by="tidemark", why="a probe")
        records = [
            _Taken(topic, 0, offset, now, _PROBE.encode(), encode(record))
            for topic, offset, record in [
                *((Topic.FACTS, offset, record) for offset, record in enumerate(facts)),
                (Topic.CONTROL, 0, skip),
            ]
        ]
        return [msgspec.structs.replace(self._advance({}, records, {}, now), progress=[])]
