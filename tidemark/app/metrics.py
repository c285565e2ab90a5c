"""Every metric of the pipeline: its name, its kind, what it means and what to do when it moves.

`docs/reference/metrics.md` shows them (`make docs`). Only the driver changes them: nothing scrapes Spark's workers.
What is known of each stream comes from `app.stream_metrics` at the time of the scrape.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tidemark.app.http_health import reading
from tidemark.sinks.publisher import Published
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.values.limits import Reason


class BatchHistogram(Histogram):
    """Without labels."""

    def observe_all(self, amounts: Iterable[tuple[float, int]]) -> None:
        """Each amount so many times, as `observe` would count them."""
        total, found = 0.0, [0] * len(self._upper_bounds)
        for amount, count in amounts:
            total += amount * count
            found[bisect_left(self._upper_bounds, amount)] += count
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, found, strict=True):
            bucket.inc(count)


REGISTRY = CollectorRegistry()

# The loop goes round twice a second; the meaning of the heartbeat below names the same bound.
STALE_SECONDS = 15.0

# A record's timestamp comes from the clock of its producer. Outside of these bounds it is in another unit or wrong.
# Inside, a pipeline that reads a backlog of weeks still shows its true latency.
OLDEST_PLAUSIBLE_SECONDS = 30 * 86_400.0
AHEAD_PLAUSIBLE_SECONDS = 3600.0

RECORDS = Counter(
    "tidemark_records",
    "Records by outcome, each fact of a RUN counted: applied, held (their writer never joined), deferred (too much of"
    " their writer is pending; they come again), duplicate, late, batch (rows without a number),"
    " forgotten (completed IDs dropped at a bound). `held` or `late` rising: see `tidemark status` for the writer.",
    ["outcome"],
    registry=REGISTRY,
)
DEAD_LETTERS = Counter(
    "tidemark_dead_letters",
    "Records sent to the dead letters, by reason; a RUN is one. Any rise means a writer that breaks the contract: read"
    " the topic, its headers name partition, offset and what is wrong.",
    ["reason"],
    registry=REGISTRY,
)
RECALLED = Counter(
    "tidemark_requeued_records",
    "Records that were put off (`deferred` of tidemark_records_total) and produced to the facts topic again. Not rising"
    " although gaps close: `tidemark status` says what hinders it.",
    registry=REGISTRY,
)
REGRESSIONS = Counter(
    "tidemark_source_regressions",
    "New timelines of streams: a database went back (restored, or a failover lost commits), so IDs are given out again."
    " Readers must repair what was reused.",
    registry=REGISTRY,
)
FORCED = Counter(
    "tidemark_operator_overrides",
    "What operators settled without a writer's evidence, by kind of record: SKIP, RETIRE, JOIN. `tidemark.skips` in"
    " Postgres says who did it, and why; readers read the table for what it passed over.",
    ["kind"],
    registry=REGISTRY,
)
BATCH_SECONDS = Histogram(
    "tidemark_batch_seconds",
    "Wall time of a batch in the driver, from Spark's result to the last sink. Near the trigger's pace is normal;"
    " rising with flat traffic points at a sink.",
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6),
)
SINK_SECONDS = Histogram(
    "tidemark_sink_seconds",
    "Time of one batch in one sink, waiting for it included.",
    ["sink"],
    registry=REGISTRY,
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 60),
)
SINK_FAULTS = Gauge(
    "tidemark_sink_errors",
    "Streams that a sink cannot show by a fault of their own, while it shows the others: their readers wait."
    " `tidemark status` names each of them and what the sink said.",
    ["sink"],
    registry=REGISTRY,
)
CLOCK = Gauge(
    "tidemark_clock_difference_seconds",
    "Seconds by which the clock of the pipeline's host is ahead of Postgres's; below 0: behind. Asked once a minute."
    " Times in the history are the host's. Set both by NTP: while they differ, history is dropped late.",
    registry=REGISTRY,
)
LATENCY = BatchHistogram(
    "tidemark_completion_to_published_seconds",
    "From the Kafka time of a writer's oldest record in a batch to its advance in Redis: one observation per advance.",
    registry=REGISTRY,
    buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2, 5, 10, 60),
)
IMPLAUSIBLE_TIMES = Counter(
    "tidemark_implausible_timestamps",
    "Advances whose oldest record has a Kafka timestamp more than 30 days old or more than an hour ahead of this host's"
    " clock: tidemark_completion_to_published_seconds leaves them out. Rising: a producer sets timestamps in another"
    " unit than milliseconds, or its clock is wrong.",
    registry=REGISTRY,
)
KAFKA_END = Gauge(
    "tidemark_kafka_end_offset",
    "The offset of the next record that will be written, asked of the brokers and not of the query: it moves even"
    " when the query is dead.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_READ = Gauge(
    "tidemark_kafka_read_offset",
    "The offset of the next record to read, as committed to Postgres.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_LAG = Gauge(
    "tidemark_kafka_lag_records",
    "End minus read. Rising: the pipeline is too slow or stands still; compare with the heartbeat. Below 0: Kafka has"
    " lost records that were read, or is another one.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_LAG_SECONDS = Gauge(
    "tidemark_kafka_lag_seconds",
    "For how long the oldest record of a partition that is not read has been waiting, as this process observed it.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_BLOCKED_SECONDS = Gauge(
    "tidemark_kafka_blocked_seconds",
    "For how long an open Kafka transaction has kept the last stable offset of a partition from moving, 0 while none"
    " does. Nothing beyond that offset can be read, and every position of the partition stays. `tidemark status` prints"
    " the commands that find the producer and abort its transaction.",
    ["topic", "partition"],
    registry=REGISTRY,
)
KAFKA_GAUGES = KAFKA_END, KAFKA_READ, KAFKA_LAG, KAFKA_LAG_SECONDS, KAFKA_BLOCKED_SECONDS
STARTED = Gauge(
    "tidemark_started_timestamp_seconds",
    "When this process began (s since 1970). What it counts is 0 then, so that alerts see what the first scrape finds.",
    registry=REGISTRY,
)
HEARTBEAT = Gauge(
    "tidemark_heartbeat_timestamp_seconds",
    "When the pipeline's own loop last went round (s since 1970). Older than 15 s: the process hangs, restart it.",
    registry=REGISTRY,
)
LAST_BATCH = Gauge(
    "tidemark_last_batch_timestamp_seconds",
    "When the last batch was published (s since 1970), or the query began that has published none yet. Old while"
    " the lag is not 0: the query stands still.",
    registry=REGISTRY,
)
READY = Gauge(
    "tidemark_pipeline_ready",
    "1 while the query runs, holds the lease and has an executor for its batches; 0 while it starts, or waits for one"
    " of them or for a server: /readyz on the same port says for what.",
    registry=REGISTRY,
)
LEASE_TOKEN = Gauge(
    "tidemark_lease_token",
    "The fencing token of the lease that this process holds, 0 while it holds none. Two processes never show the same.",
    registry=REGISTRY,
)
RETRIES = Counter(
    "tidemark_retries",
    "Attempts that failed and will be made again, by what did not answer.",
    ["what"],
    registry=REGISTRY,
)

# Prometheus sees no increase in a counter that was not there before.
for _outcome in ("applied", "buffered", "deferred", "duplicate", "late", "batch", "forgotten"):
    RECORDS.labels(_outcome)
for _reason in Reason:
    DEAD_LETTERS.labels(_reason)
for _kind in ("SKIP", "RETIRE", "JOIN"):
    FORCED.labels(_kind)

STREAM_GAUGES = {  # from the board: name, labels, meaning
    "position": (
        "tidemark_position",
        ["stream", "writer"],
        "A writer's position (negative on a backward stream), until it retires. Standing still while others move: look"
        " at its gap.",
    ),
    "linear": (
        "tidemark_linear_position",
        ["stream"],
        "The linear position of a stream, until all its writers have retired.",
    ),
    "allocated": (
        "tidemark_allocated_position",
        ["stream"],
        "The head of a stream: the highest ID that a record named. Moving while the linear position stands:"
        " tidemark_linear_blocked_seconds names who is waited for.",
    ),
    "copy": (
        "tidemark_sink_linear_position",
        ["stream", "copy"],
        "The linear position of a stream in `postgres` and in `redis`, as the pipeline compared them last: once a"
        " minute, less often of very many, before it mends. Further on than tidemark_allocated_position: something went"
        " back to an older state.",
    ),
    "bound": (
        "tidemark_bound_used_ratio",
        ["stream", "bound"],
        "How much of a bound a stream fills, from a half on. At 1: `pending` (TIDEMARK_PENDING_BOUND): records of that"
        " writer are put off; `completed` (TIDEMARK_COMPLETED_BOUND): the linear position gets cautious; `unknown`:"
        " further writers that never joined are refused. `tidemark gaps` names what fills it.",
    ),
    "pending": (
        "tidemark_pending_ids",
        ["stream"],
        "Completed IDs that wait above their writer's position for a gap to close.",
    ),
    "gaps": ("tidemark_gaps", ["stream"], "Open gaps of a stream."),
    "age": (
        "tidemark_oldest_gap_age_seconds",
        ["stream"],
        "Age of the oldest gap, or of the writer held longest, counted from first sight; 0 while there is none."
        " Past what a transaction may take: `tidemark status` names the blocker.",
    ),
    "behind": (
        "tidemark_linear_lag_ids",
        ["stream"],
        "How far the linear position is below the highest ID that a record named.",
    ),
    "behind_seconds": (
        "tidemark_linear_lag_seconds",
        ["stream"],
        "For how long IDs are given out that the linear position has not passed; 0 while there are none. If the"
        " position follows slowly, the value stays about the same; if the position is blocked, it rises with the"
        " clock: tidemark_linear_blocked_seconds names the blocker.",
    ),
    "held": (
        "tidemark_linear_blocked_seconds",
        ["stream", "writer", "reason"],
        "How long a writer has blocked the linear position of a stream, from 10 s on. `reason`: a `gap`; an open"
        " `transaction` that the writer reported; `unknown`: it never joined; `silent`: no gap, but it has published"
        " nothing beyond its position. At most TIDEMARK_METRICS_MAX_STREAMS blockers have a series, the longest first;"
        " the longest of the others stands for all. `tidemark status` shows more.",
    ),
    "holder_silent": (
        "tidemark_blocker_last_seen_seconds",
        ["stream", "writer", "reason"],
        "Seconds since the newest record of each writer in tidemark_linear_blocked_seconds; absent if no record was"
        " noted. Rising: the writer or its connection to Kafka is gone. Low: the writer is alive, and is slow or waits"
        " for a transaction.",
    ),
    "unknown": (
        "tidemark_unknown_writers",
        ["stream"],
        "Incarnations that never joined; while there is one the stream's linear position stays.",
    ),
    "policy_gap_seconds": (
        "tidemark_policy_gap_seconds",
        ["stream"],
        "How old a gap of the stream may get, and how long its line may stand, before it is an alert: by its policy"
        " (`tidemark policy`), else TIDEMARK_GAP_SECONDS. Of streams without a series the least, as in all of these.",
    ),
    "policy_silent_seconds": (
        "tidemark_policy_silent_seconds",
        ["stream"],
        "For how long a writer of the stream may say nothing before it counts as silent: by its policy, else"
        " TIDEMARK_SILENT_SECONDS.",
    ),
    "policy_behind_seconds": (
        "tidemark_policy_linear_lag_seconds",
        ["stream"],
        "How far behind the stream's line may be in seconds, whoever holds it; none where no policy says so.",
    ),
    "policy_behind_ids": (
        "tidemark_policy_linear_lag_ids",
        ["stream"],
        "How far behind the stream's line may be in IDs, whoever holds it; none where no policy says so.",
    ),
    "together": (
        "tidemark_series_omitted",
        ["what"],
        "Streams, writers and blockers (`holders`) beyond TIDEMARK_METRICS_MAX_STREAMS and"
        " TIDEMARK_METRICS_MAX_WRITERS. They have no series of their own: the series `other streams` is their sum, or"
        " of ages the highest. `tidemark status` lists them all.",
    ),
}


class PipelineHealth:
    """What probes are told of the pipeline; its own loop says how things stand, and READY shows it."""

    registry = REGISTRY

    def __init__(self) -> None:
        self._lacks: str | None = "Spark starts"

    def stands(self, lacks: str | None) -> None:
        """`lacks` is what the pipeline waits for, None where its next batch can run."""
        self._lacks = lacks
        READY.set(lacks is None)

    def lacks(self) -> str | None:
        return self._lacks

    def hangs(self, now: float) -> str | None:
        stale = self._lacks is None and now - reading(HEARTBEAT) >= STALE_SECONDS
        return "the loop stands still" if stale else None


def _observe_latency(oldest: Mapping[int, int], published_at: float) -> None:
    """Observe the latency of advances, from how many have the same oldest record time (ms)."""
    latencies = {published_at - time / 1000: count for time, count in oldest.items()}
    plausible = {
        seconds: count
        for seconds, count in latencies.items()
        if -AHEAD_PLAUSIBLE_SECONDS <= seconds <= OLDEST_PLAUSIBLE_SECONDS
    }
    LATENCY.observe_all((max(0.0, seconds), count) for seconds, count in plausible.items())
    IMPLAUSIBLE_TIMES.inc(sum(latencies.values()) - sum(plausible.values()))


def set_offsets(topic: str, partition: int, *, end: int, read: int, seconds: float, blocked: float) -> None:
    """The offsets of the next record to be written and of the next one to read; for how many seconds records between
    them have waited, and for how many an open transaction has blocked the partition."""
    KAFKA_END.labels(topic, partition).set(end)
    KAFKA_READ.labels(topic, partition).set(read)
    KAFKA_LAG.labels(topic, partition).set(end - read)
    KAFKA_LAG_SECONDS.labels(topic, partition).set(seconds)
    KAFKA_BLOCKED_SECONDS.labels(topic, partition).set(blocked)


def count_batch(effects: Iterable[ShardEffects], published: Published, seconds: float) -> None:
    """A batch was published; one that is published again after a failure is counted again."""
    BATCH_SECONDS.observe(seconds)
    LAST_BATCH.set(published.published_at)
    for step, waited in published.seconds.items():
        SINK_SECONDS.labels(step).observe(waited)
    outcomes = Tally[str]()
    for shard in effects:
        for stream in shard.streams:
            for outcome, count in stream.counts.items():
                outcomes[outcome] += count
            for act in stream.forced:
                FORCED.labels(act.kind).inc()
        REGRESSIONS.inc(sum(len(stream.timelines) for stream in shard.streams))
        oldest = Tally(advance.oldest for stream in shard.streams for advance in stream.advances)
        _observe_latency(oldest, published.published_at)
        for rejected in shard.rejected:
            DEAD_LETTERS.labels(rejected.reason).inc(rejected.records)
    for outcome, count in outcomes.items():
        RECORDS.labels(outcome).inc(count)
