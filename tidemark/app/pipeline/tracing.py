"""Sends traces of batches to an OpenTelemetry collector over OTLP/HTTP, on a thread of the SDK.

A batch is one trace. The trace ID is computed from the name of the query and the number of the batch, so all attempts
at a batch are in one trace. The span `batch` has the child spans `read` (records to runs) and `state` (the state
machine), then one for each sink and one for the dead letters. The times of `read` and `state` are the times of Spark's
stages. A query for light traffic has only one stage, so its shards measure when `state` begins.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from tidemark.app.connections import mask_url
from tidemark.app.versions import OURS
from tidemark.common.log import get_logger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidemark.app.pipeline.batches import BatchTrace, Trace
    from tidemark.sinks.publisher import PublishResult
    from tidemark.streaming.core.effects import ShardEffects

log = get_logger(__name__)

TIMEOUT_SECONDS = 2.0  # for the collector, because the pipeline must end within ten seconds
NANOSECONDS_PER_MILLISECOND = 1_000_000
SPARK_STAGES = ("read", "state")  # in order


def trace_id(query: str, number: int) -> int:
    """The trace ID of batch `number` of a query: the first 16 bytes of the SHA-256 of `query/number`."""
    return int.from_bytes(sha256(f"{query}/{number}".encode()).digest()[:16])


@contextmanager
def open_exporter(endpoint: str, owner: str, token: int) -> "Iterator[Trace]":
    """Yield the function that opens the trace of a batch. The end of the block sends the remaining spans.

    Spans that the collector does not accept within `TIMEOUT_SECONDS` are dropped.

    Args:
        endpoint: the base URL of OTLP/HTTP.
        owner: the owner of the lease, for the attribute `service.instance.id`.
        token: the fencing token of the lease.
    """
    attributes = {"service.name": "tidemark-pipeline", "service.instance.id": owner, "service.version": OURS}
    ids = _BatchIds()
    provider = TracerProvider(resource=Resource.create(attributes), id_generator=ids, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(_Exporter(exporter, mask_url(endpoint))))
    try:
        yield partial(_open_trace, provider.get_tracer("tidemark", OURS), ids, token)
    finally:
        provider.shutdown()


class _BatchIds(RandomIdGenerator):
    """Gives each root span the trace ID in `next_trace_id`. Set `next_trace_id` before you start the span."""

    next_trace_id = 0

    def generate_trace_id(self) -> int:
        return self.next_trace_id


class _Exporter(SpanExporter):
    """Exports spans. Logs once when the collector refuses spans, and once when the collector accepts spans again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            log.warning("The collector does not accept traces; dropping them", endpoint=self._endpoint)
        if self._is_failing and not is_failing:
            log.info("The collector accepts traces again", endpoint=self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


@contextmanager
def _open_trace(tracer: Tracer, ids: _BatchIds, token: int, query: str, number: int) -> "Iterator[BatchTrace]":
    """Trace one attempt at a batch while the block runs. An exception is recorded and raised again."""
    ids.next_trace_id = trace_id(query, number)
    attributes: dict[str, str | int] = {
        "tidemark.query": query,
        "tidemark.batch": number,
        "tidemark.lease_token": token,
    }
    root = tracer.start_span("batch", Context(), attributes=attributes)
    try:
        yield _BatchSpans(tracer, root)
    except Exception as error:
        root.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        raise
    finally:
        root.end()


class _BatchSpans:
    """Records one attempt at one batch as a root span with a child span for each step. Implements `BatchTrace`."""

    def __init__(self, tracer: Tracer, root: Span) -> None:
        self._tracer = tracer
        self._root = root

    def record_compute(self, batch: "DataFrame", effects: "Sequence[ShardEffects]") -> None:
        stages = [*_read_stages(batch.sparkSession)]
        if len(stages) == 1:
            stages = _split_stage(stages[0], effects)
        for name, (began, ended) in zip(SPARK_STAGES, stages, strict=False):
            self._record_span(name, began * NANOSECONDS_PER_MILLISECOND, ended * NANOSECONDS_PER_MILLISECOND)
        streams = [stream for shard in effects for stream in shard.streams]
        self._root.set_attributes(
            {
                "tidemark.streams": len(streams),
                "tidemark.advances": sum(len(stream.advances) for stream in streams),
                "tidemark.records": sum(count for stream in streams for count in stream.counts.values()),
                "tidemark.rejected": sum(bad.count for shard in effects for bad in shard.rejected),
            }
        )

    def record_publish(self, result: "PublishResult") -> None:
        """Record a child span for each step of publishing. Assumes that the steps ran in sequence until now."""
        began = time.time_ns() - int(sum(result.seconds.values()) * 1e9)
        for name, seconds in result.seconds.items():
            began = self._record_span(name, began, began + int(seconds * 1e9))
        self._root.set_attribute("tidemark.repeated", result.is_repeat)

    def _record_span(self, name: str, began_ns: int, ended_ns: int) -> int:
        """Record a child span. Times are nanoseconds since 1970. Returns `ended_ns`."""
        self._tracer.start_span(name, set_span_in_context(self._root), start_time=began_ns).end(ended_ns)
        return ended_ns


def _split_stage(stage: tuple[int, int], effects: "Sequence[ShardEffects]") -> list[tuple[int, int]]:
    """Split the only stage of a query for light traffic into `read` and `state`, each as (start, end).

    All times are in milliseconds since 1970.
    """
    began, ended = stage
    state_began = min((shard.computation_start for shard in effects), default=ended)
    state_began = max(began, min(state_began, ended))
    return [(began, state_began), (state_began, ended)]


def _read_stages(session: "SparkSession") -> Iterator[tuple[int, int]]:
    """Yield start and end (milliseconds since 1970) of each stage of the last job of this thread's query, in order.

    Waits a few milliseconds until Spark has recorded the times. Stages without times are left out.
    """
    context = session.sparkContext
    spark = context._jsc.sc()
    spark.listenerBus().waitUntilEmpty()
    jobs = context.statusTracker().getJobIdsForGroup(context.getLocalProperty("spark.jobGroup.id"))
    if not jobs:
        return
    of_job = spark.statusStore().job(max(jobs)).stageIds().mkString(" ").split()
    for stage in sorted(map(int, of_job)):
        stage_data = spark.statusStore().lastStageAttempt(stage)
        began, ended = stage_data.submissionTime(), stage_data.completionTime()
        if began.isDefined() and ended.isDefined():
            yield began.get().getTime(), ended.get().getTime()
