"""Every metric of the pipeline: name, type, meaning, and what to do when it changes.

`docs/reference/metrics.md` is generated from this module (`make docs`). Only the driver has metrics: Spark's workers
are not scraped. `app.pipeline.stream_metrics` computes the metrics of streams at the time of a scrape.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tidemark.app.serving.http_health import gauge_value
from tidemark.sinks.publisher import PublishResult
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.values.limits import Reason


class BatchHistogram(Histogram):
    """A histogram without labels that counts many observations at once."""

    def observe_all(self, amounts: Iterable[tuple[float, int]]) -> None:
        """Add observations. `amounts`: pairs (observed value, number of observations with this value)."""
        total, counts = 0.0, [0] * len(self._upper_bounds)
        for amount, count in amounts:
            total += amount * count
            counts[bisect_left(self._upper_bounds, amount)] += count
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            bucket.inc(count)


REGISTRY = CollectorRegistry()

# The supervising loop runs twice a second. The description of HEARTBEAT contains the same limit.
STALE_SECONDS = 15.0

# A record's timestamp usually comes from the producer's clock. Outside these limits, the clock or the unit is wrong.
MAX_PLAUSIBLE_AGE_SECONDS = 30 * 86_400.0
MAX_CLOCK_AHEAD_SECONDS = 3600.0

RECORDS = Counter(
    "tidemark_records",
    "Records by outcome; each fact of a RUN counts. applied; buffered: the writer never joined; deferred: the writer"
    " has too many pending records, and these are requeued; duplicate; late; batch: rows without an ID; forgotten:"
    " completed IDs dropped at a bound. If buffered or late rises: `tidemark status` names the writer.",
    ["outcome"],
    registry=REGISTRY,
)
DEAD_LETTERS = Counter(
    "tidemark_dead_letters",
    "Records sent to the dead letters, by reason; a RUN counts once. Any rise means that a writer breaks the contract:"
    " read the topic, whose headers name partition, offset and defect.",
    ["reason"],
    registry=REGISTRY,
)
REQUEUED = Counter(
    "tidemark_requeued_records",
    "Deferred records (`deferred` of tidemark_records_total) that were produced to the facts topic again. If it does"
    " not rise although gaps close: `tidemark status` names the problem.",
    registry=REGISTRY,
)
REGRESSIONS = Counter(
    "tidemark_source_regressions",
    "New timelines of streams: a database was restored, or a failover lost commits, so IDs are given out again. Readers"
    " must repair the reused IDs.",
    registry=REGISTRY,
)
OVERRIDES = Counter(
    "tidemark_operator_overrides",
    "Operator overrides that settled IDs without the writer's evidence, by kind of record: SKIP, RETIRE, JOIN. The"
    " table `tidemark.skips` in Postgres has operator and reason; readers must read the skipped range from the source"
    " table.",
    ["kind"],
    registry=REGISTRY,
)
BATCH_SECONDS = Histogram(
    "tidemark_batch_seconds",
    "Wall time of a batch, from the start of Spark's computation to the last sink and the dead letters. Includes the"
    " wait until the batch before is published. If it rises with constant traffic, a sink is slow: see"
    " tidemark_sink_seconds.",
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6),
)
SINK_SECONDS = Histogram(
    "tidemark_sink_seconds",
    "Time of one batch in one sink, including waits for the sink.",
    ["sink"],
    registry=REGISTRY,
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 60),
)
SINK_FAULTS = Gauge(
    "tidemark_sink_errors",
    "Streams that a sink cannot publish because of their data. The sink publishes the other streams. Readers of these"
    " streams get no new positions. `tidemark status` names each stream and the error of the sink.",
    ["sink"],
    registry=REGISTRY,
)
CLOCK_DIFFERENCE = Gauge(
    "tidemark_clock_difference_seconds",
    "Seconds by which the clock of the pipeline's host is ahead of Postgres's; negative: behind. Measured once a"
    " minute. The history has the times of the host. Set both clocks by NTP: while they differ, history is dropped"
    " late.",
    registry=REGISTRY,
)
LATENCY = BatchHistogram(
    "tidemark_completion_to_published_seconds",
    "Time from the Kafka timestamp of a writer's oldest record in a batch until the last sink has the advance. One"
    " observation for each advance.",
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2, 5, 10, 60),
)
IMPLAUSIBLE_TIMES = Counter(
    "tidemark_implausible_timestamps",
    "Advances whose oldest record has a Kafka timestamp more than 30 days old, or more than an hour ahead of this"
    " host's clock. tidemark_completion_to_published_seconds leaves them out. If it rises: a producer sets timestamps"
    " in another unit than milliseconds, or its clock is wrong.",
    registry=REGISTRY,
)
KAFKA_END = Gauge(
    "tidemark_kafka_end_offset",
    "The offset of the next record to be written, from the brokers and not from the query: it moves even if the"
    " query is dead.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_READ = Gauge(
    "tidemark_kafka_read_offset",
    "The offset of the next record to read, as committed in Postgres.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_LAG = Gauge(
    "tidemark_kafka_lag_records",
    "End offset minus read offset. If it rises: the pipeline is too slow or has stopped; compare with the heartbeat."
    " Negative: Kafka has lost records that were read, or the brokers belong to another cluster.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_LAG_SECONDS = Gauge(
    "tidemark_kafka_lag_seconds",
    "Age of the oldest unread record of a partition, as this process has observed it.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_BLOCKED_SECONDS = Gauge(
    "tidemark_kafka_blocked_seconds",
    "Seconds for which an open Kafka transaction has blocked the last stable offset of a partition; 0 if none does. No"
    " record beyond that offset can be read, and no position of the partition moves. `tidemark status` prints the"
    " commands that find the producer and abort its transaction.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_GAUGES = KAFKA_END, KAFKA_READ, KAFKA_LAG, KAFKA_LAG_SECONDS, KAFKA_BLOCKED_SECONDS
STARTED = Gauge(
    "tidemark_started_timestamp_seconds",
    "Start of this process (s since 1970), when its counters are 0. Alerts use it to notice a counter that is above 0"
    " in the first scrape.",
    registry=REGISTRY,
)
HEARTBEAT = Gauge(
    "tidemark_heartbeat_timestamp_seconds",
    "Time of the last run of the pipeline's own loop (s since 1970). Older than 15 s: the process hangs; restart it.",
    registry=REGISTRY,
)
LAST_BATCH = Gauge(
    "tidemark_last_batch_timestamp_seconds",
    "Time at which the last batch was published (s since 1970), or at which a query without a batch began. If it is old"
    " while the lag is not 0: the query has stopped.",
    registry=REGISTRY,
)
READY = Gauge(
    "tidemark_pipeline_ready",
    "1 if the query runs, has the lease and has an executor for its batches. 0 if the query starts, or waits for the"
    " lease, an executor or a server: /readyz on the same port names the cause.",
    registry=REGISTRY,
)
LEASE_TOKEN = Gauge(
    "tidemark_lease_token",
    "The fencing token of the lease of this process; 0 if it has none. Two processes never have the same token.",
    registry=REGISTRY,
)
RETRIES = Counter(
    "tidemark_retries",
    "Failed attempts that are retried, by the server that did not answer.",
    ["what"],
    registry=REGISTRY,
)

# Prometheus does not see the first increase of a counter that did not exist before.
for _outcome in ("applied", "buffered", "deferred", "duplicate", "late", "batch", "forgotten"):
    RECORDS.labels(_outcome)
for _reason in Reason:
    DEAD_LETTERS.labels(_reason)
for _kind in ("SKIP", "RETIRE", "JOIN"):
    OVERRIDES.labels(_kind)

STREAM_GAUGES = {  # for `app.pipeline.stream_metrics`: name, labels, description
    "position": (
        "tidemark_position",
        ["stream", "writer"],
        "The position of a writer (negative in a backward stream), until it retires. If it does not move while"
        " others do: see its gap.",
    ),
    "linear": (
        "tidemark_linear_position",
        ["stream"],
        "The linear position of a stream, until all its writers have retired.",
    ),
    "allocated": (
        "tidemark_allocated_position",
        ["stream"],
        "The highest ID of a stream that a record has named. If it moves while the linear position does not:"
        " tidemark_linear_blocked_seconds names the blocker.",
    ),
    "copy": (
        "tidemark_sink_linear_position",
        ["stream", "copy"],
        "The linear position of a stream in `postgres`, in `redis` and in `kafka` (the topic of positions) at the last"
        " comparison, before the refill: once a minute, less often with very many streams. If the position is beyond"
        " tidemark_allocated_position: a server was set back to an older state.",
    ),
    "bound": (
        "tidemark_bound_used_ratio",
        ["stream", "bound"],
        "The part of a bound that a stream fills, from 0.5 on. At 1: `pending` (TIDEMARK_PENDING_BOUND): records of"
        " one writer are deferred; `completed` (TIDEMARK_COMPLETED_BOUND): the linear position may move later;"
        " `unknown`: records of further writers that never joined are rejected. `tidemark gaps` names the cause.",
    ),
    "pending": (
        "tidemark_pending_ids",
        ["stream"],
        "Completed IDs beyond their writer's position, which wait for a gap to close.",
    ),
    "gaps": ("tidemark_gaps", ["stream"], "Open gaps of a stream."),
    "age": (
        "tidemark_oldest_gap_age_seconds",
        ["stream"],
        "Age of the oldest gap, or of the oldest record of an unknown writer, since it was first seen; 0 if there is"
        " none. If it exceeds the time of a transaction: `tidemark status` names the blocker.",
    ),
    "behind": (
        "tidemark_linear_lag_ids",
        ["stream"],
        "Distance of the linear position from the highest ID that a record has named.",
    ),
    "behind_seconds": (
        "tidemark_linear_lag_seconds",
        ["stream"],
        "Age of the oldest IDs beyond the linear position, since a batch first saw them; 0 if there are none. If the"
        " position follows slowly, the age stays about the same. If the position is blocked, the age rises with the"
        " clock: tidemark_linear_blocked_seconds names the blocker.",
    ),
    "blocked": (
        "tidemark_linear_blocked_seconds",
        ["stream", "writer", "reason"],
        "Seconds for which a writer has blocked the linear position of a stream, from 10 s on. `reason`: a `gap`; an"
        " open `transaction` that the writer reported; `unknown`: it never joined; `silent`: no gap, but no record"
        " beyond its position. At most TIDEMARK_METRICS_MAX_STREAMS blockers have a series, the longest first; one"
        " series has the longest of the others. `tidemark status` shows more.",
    ),
    "blocker_last_seen": (
        "tidemark_blocker_last_seen_seconds",
        ["stream", "writer", "reason"],
        "Seconds since the newest record of each writer in tidemark_linear_blocked_seconds; absent if no record was"
        " noted. Rising: the writer or its connection to Kafka is gone. Low: the writer is alive, and is slow or waits"
        " for a transaction.",
    ),
    "source_silent": (
        "tidemark_source_silent_seconds",
        ["stream", "writer"],
        "Seconds since the newest record of a relay or bridge that promised a heartbeat and has missed it twice; no"
        " series otherwise. `writer` is the name under which it reports. Whether the stream is complete is not"
        " known: start the relay. At most TIDEMARK_METRICS_MAX_STREAMS series, the longest first; one has the others.",
    ),
    "source_blocked": (
        "tidemark_source_blocked_seconds",
        ["stream", "writer"],
        "Seconds for which a relay or bridge has sent nothing new of a stream, as it reports: its sequence is unfit,"
        " rows are hidden, or a fact is too large. `tidemark gaps` has the cause and the remedy.",
    ),
    "unknown": (
        "tidemark_unknown_writers",
        ["stream"],
        "Writers that never joined; while there is one, the linear position of the stream does not move.",
    ),
    "policy_gap_seconds": (
        "tidemark_policy_gap_seconds",
        ["stream"],
        "Age of a gap, and time without a move of the linear position, that cause an alert: from the policy of the"
        " stream (`tidemark policy`), else TIDEMARK_ALERT_GAP_SECONDS. The series `other streams` has the lowest value"
        " of its streams, as in all metrics of policies.",
    ),
    "policy_silent_seconds": (
        "tidemark_policy_silent_seconds",
        ["stream"],
        "Time without a record after which a writer of the stream counts as silent: from its policy, else"
        " TIDEMARK_SILENT_SECONDS.",
    ),
    "policy_behind_seconds": (
        "tidemark_policy_linear_lag_seconds",
        ["stream"],
        "The linear lag of the stream in seconds that causes an alert; absent if no policy sets it.",
    ),
    "policy_behind_ids": (
        "tidemark_policy_linear_lag_ids",
        ["stream"],
        "The linear lag of the stream in IDs that causes an alert; absent if no policy sets it.",
    ),
    "omitted": (
        "tidemark_series_omitted",
        ["what"],
        "Streams, writers and blockers (`blockers`) beyond TIDEMARK_METRICS_MAX_STREAMS and"
        " TIDEMARK_METRICS_MAX_WRITERS. They have no series of their own: the series `other streams` has their sum, or"
        " the highest age. `tidemark status` lists all of them.",
    ),
}


class PipelineHealth:
    """The state of the pipeline for probes and for the gauge `READY`. The supervising loop calls `set_state`."""

    registry = REGISTRY

    def __init__(self) -> None:
        self._problem: str | None = "Spark starts"

    def set_state(self, problem: str | None) -> None:
        """Set the state and the gauge `READY`.

        `problem`: the reason why no batch can run, as text for people; None if the next batch can run.
        """
        self._problem = problem
        READY.set(problem is None)

    def readiness_problem(self) -> str | None:
        """The `problem` of the last call of `set_state`; None if the next batch can run."""
        return self._problem

    def liveness_problem(self, now: float) -> str | None:
        """A text if the supervising loop hangs, otherwise None. None also while the pipeline is not ready, because the
        loop may not run then. `now`: seconds since 1970."""
        is_stale = self._problem is None and now - gauge_value(HEARTBEAT) >= STALE_SECONDS
        return f"the supervising loop has not run for {STALE_SECONDS:g} s" if is_stale else None


def _observe_latency(advances_by_time: Mapping[int, int], published_at: float) -> None:
    """Add the latencies of advances to the histogram, and count the advances with an implausible time.

    Args:
        advances_by_time: time of the oldest record of an advance (milliseconds since 1970) -> number of such advances.
        published_at: when the advances were published, in seconds since 1970.
    """
    latencies = {published_at - time / 1000: count for time, count in advances_by_time.items()}
    plausible = {
        seconds: count
        for seconds, count in latencies.items()
        if -MAX_CLOCK_AHEAD_SECONDS <= seconds <= MAX_PLAUSIBLE_AGE_SECONDS
    }
    LATENCY.observe_all((max(0.0, seconds), count) for seconds, count in plausible.items())
    IMPLAUSIBLE_TIMES.inc(sum(latencies.values()) - sum(plausible.values()))


def set_partition_metrics(
    topic: str, partition: int, *, end_offset: int, read_offset: int, lag_seconds: float, blocked_seconds: float
) -> None:
    """Set the metrics of a partition.

    Args:
        topic: the name of the topic.
        partition: the number of the partition.
        end_offset: the offset of the next record to be written.
        read_offset: the offset of the next record to read.
        lag_seconds: the age of the oldest unread record; 0 if all records are read.
        blocked_seconds: for how long an open transaction has blocked the partition; 0 if no transaction does.
    """
    KAFKA_END.labels(topic, partition).set(end_offset)
    KAFKA_READ.labels(topic, partition).set(read_offset)
    KAFKA_LAG.labels(topic, partition).set(end_offset - read_offset)
    KAFKA_LAG_SECONDS.labels(topic, partition).set(lag_seconds)
    KAFKA_BLOCKED_SECONDS.labels(topic, partition).set(blocked_seconds)


def count_batch(effects: Iterable[ShardEffects], published: PublishResult, seconds: float) -> None:
    """Update the metrics for one published batch. A batch that is published again after a failure is counted again.

    `seconds`: the wall time of the batch.
    """
    BATCH_SECONDS.observe(seconds)
    LAST_BATCH.set(published.published_at)
    for step, waited in published.seconds.items():
        SINK_SECONDS.labels(step).observe(waited)
    outcomes = Tally[str]()
    for shard in effects:
        for stream in shard.streams:
            for outcome, count in stream.counts.items():
                outcomes[outcome] += count
            for override in stream.overrides:
                OVERRIDES.labels(override.kind).inc()
        REGRESSIONS.inc(sum(len(stream.timelines) for stream in shard.streams))
        oldest = Tally(advance.oldest for stream in shard.streams for advance in stream.advances)
        _observe_latency(oldest, published.published_at)
        for rejected in shard.rejected:
            DEAD_LETTERS.labels(rejected.reason).inc(rejected.count)
    for outcome, count in outcomes.items():
        RECORDS.labels(outcome).inc(count)
