"""What happens to a batch in the driver: Spark's thread collects and checks it, one of ours publishes and counts it.

So Spark computes a batch while the one before is published (docs/decisions/0024-batch-ahead.md). It turns what a
callback raises into a text, so the error itself is kept here for the pipeline to act on.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pyspark.sql import DataFrame

from tidemark.app.pipeline import metrics
from tidemark.app.pipeline.preflight import Seed
from tidemark.app.pipeline.stream_metrics import StreamCollector
from tidemark.common.errors import (
    BatchTooLarge,
    ContentRefused,
    ExtraMissing,
    PartitionsChanged,
    QueryFailed,
    Stopping,
    TidemarkError,
)
from tidemark.common.log import get_logger
from tidemark.sinks.publisher import Published, Publisher
from tidemark.sources.topic_checks import RememberedTopic
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.engine.query import collect, decoded

log = get_logger(__name__)

LET_GO_AFTER = 50
"""Batches. What pyspark makes of one hangs together in cycles and keeps 40 KB of plans in the JVM until Python looks
for these, which it does seldom (`app.pipeline.supervisor`)."""
FEWER = 4  # so many times fewer records has a batch than were read of one that had to be cut


class BatchTrace(Protocol):
    """Receives the progress of one attempt at one batch, in this order. A failed attempt leaves out the rest."""

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
    """The query's sink. `seed` is what its batches began with; `topics` are those that are read; `trace` is told of
    each. `isolate` says what to raise for a batch whose content Postgres refuses (`app.pipeline.isolation`).

    One batch is published at a time, in their order, and none after a `failure`. After `finish` those in hand are
    completed and none begins.
    """

    def __init__(
        self,
        publisher: Publisher,
        board: StreamCollector,
        seed: Seed,
        topics: Mapping[str, RememberedTopic],
        trace: Trace,
        isolate: Callable[[int, list[ShardEffects], ContentRefused], TidemarkError] = lambda *given: given[-1],
    ) -> None:
        self._publisher = publisher
        self._board = board
        self._seed = seed
        self._topics = topics
        self._trace = trace
        self._isolate = isolate
        self._finishing = threading.Event()
        self._in_hand = threading.Lock()
        self._publishing: threading.Thread | None = None
        self.failure: TidemarkError | None = None
        self.published = 0

    def __call__(self, batch: DataFrame, number: int) -> None:
        with self._in_hand:
            try:
                if self._finishing.is_set():
                    raise Stopping("told to end between two batches")
                self._take(batch, number)
            except TidemarkError as error:
                self.failure = self.failure or error
                raise

    def finish(self, seconds: float | None = None) -> bool:
        """Let the batches in hand end and no other begin; False where they did not end in `seconds` (None: waits)."""
        self._finishing.set()
        deadline = None if seconds is None else time.monotonic() + seconds
        if not self._in_hand.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._in_hand.release()
        if self._publishing is None:
            return True
        self._publishing.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._publishing.is_alive()

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
            if any(shard.cut for shard in effects):
                # What is left of its range no other batch of this query would read: it ends before it computes one.
                read = self._board.new_offsets(effects)
                self._publish(collected)
                raise BatchTooLarge(read, max(1, read // FEWER))
            work = collected, traced.pop_all()
        # A daemon: a server that is waited for keeps no process that ends.
        self._publishing = threading.Thread(target=self._publish_beside, args=work, name="publish", daemon=True)
        self._publishing.start()

    def _await_published(self) -> None:
        """Return when the batch before is published. Raises what hindered that."""
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
        except Exception as error:  # whoever supervises raises it
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
        """Spark reads a partition that is added while it runs; its streams would have two orders."""
        for shard in effects:
            for progress in shard.progress:
                known = self._topics[progress.topic].partitions
                if progress.partition >= known:
                    raise PartitionsChanged(progress.topic, known, progress.partition + 1)
