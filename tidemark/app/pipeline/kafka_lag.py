"""Monitors the lag of each Kafka partition, and open transactions that block a partition.

A `read_committed` consumer gets no record at or beyond the last stable offset, which is the first offset of the oldest
open transaction. If the producer of that transaction hangs or is lost, the partition is blocked while its end offset
rises.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from tidemark.app.pipeline import metrics
from tidemark.app.pipeline.stream_metrics import StreamCollector, ThresholdLog
from tidemark.common.errors import Retry, Stop, TopicMissing
from tidemark.common.log import get_logger
from tidemark.sources.topics import TopicIdentity, Topics, require_policy, require_unchanged

Partition = tuple[str, int]

MAX_SAMPLES: Final = 512
"""The largest number of stored end offsets per partition. If there are more, every second one is dropped. Then the age
of the oldest unread record may be too low, by less than the interval between two stored samples. The age is never too
high."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a partition.

    Attributes:
        records: the number of unread records.
        seconds: the age of the oldest unread record in seconds; 0 if all records are read.
        stable_offset: the last stable offset.
        blocked_seconds: for how many seconds an open transaction has blocked the partition at `stable_offset`; 0 if no
            transaction does.
    """

    records: int
    seconds: float
    stable_offset: int
    blocked_seconds: float


@dataclass(slots=True)
class _PartitionHistory:
    """The stored observations of one partition."""

    end_offsets: list[tuple[int, float]] = field(default_factory=list)
    """End offsets beyond the read offset, each with the time of its first observation."""
    stable_offset: int = -1
    """The last stable offset in the last observation."""
    blocked_since: float | None = None
    """When the last stable offset was first observed at `stable_offset`; None if no open transaction blocks the
    partition."""


class LagTracker:
    """Computes the lag of partitions from repeated observations of their offsets. For one thread.

    The age of a record counts from the first observation that includes the record.
    """

    def __init__(self) -> None:
        self._histories: dict[Partition, _PartitionHistory] = {}

    def observe(
        self, partition: Partition, now: float, *, read_offset: int, stable_offset: int, end_offset: int
    ) -> PartitionLag:
        """Add an observation of a partition, and return its lag.

        Args:
            partition: topic and partition number.
            now: the time of the observation (seconds, monotonic).
            read_offset: the offset of the next record that the pipeline reads.
            stable_offset: the last stable offset.
            end_offset: the offset of the next record to be written, including open transactions.
        """
        history = self._histories.setdefault(partition, _PartitionHistory())
        history.end_offsets = [(offset, at) for offset, at in history.end_offsets if read_offset < offset <= end_offset]
        if end_offset > read_offset and (not history.end_offsets or history.end_offsets[-1][0] < end_offset):
            history.end_offsets.append((end_offset, now))
        if len(history.end_offsets) > MAX_SAMPLES:
            del history.end_offsets[1:-1:2]
        if stable_offset >= end_offset:
            history.blocked_since = None
        elif history.blocked_since is None or history.stable_offset != stable_offset:
            history.blocked_since = now
        history.stable_offset = stable_offset
        age = now - history.end_offsets[0][1] if history.end_offsets else 0.0
        blocked = 0.0 if history.blocked_since is None else now - history.blocked_since
        return PartitionLag(end_offset - read_offset, age, stable_offset, blocked)


log = get_logger(__name__)

CHECK_INTERVAL_SECONDS = 2.0
CHECKS_PER_POLICY_CHECK = 15  # the cleanup policies of the topics are checked less often
LAGGING_SECONDS = 10.0  # a healthy pipeline has less lag, and transactions of healthy producers are shorter
NOTE_INTERVAL_SECONDS = 10.0  # between two calls of `note` for the same partitions
MAX_MISSING_CHECKS = 5  # consecutive checks: a broker that has just started may not list all topics


LagNote = tuple[str, int, int, float, int | None, float | None]
"""A lagging partition: topic; partition; number of unread records; age of the oldest unread record in seconds; last
stable offset; seconds for which an open transaction has blocked the partition. The last two are None if no transaction
blocks the partition."""


class LagMonitor:
    """A thread that updates the metrics of Kafka offsets and lag, checks the topics, and runs the `ThresholdLog`.

    The thread waits while Kafka does not answer. After a `Stop`, the thread sets `failure` and ends: for example if a
    topic is repartitioned, replaced or compacted, or missing in `MAX_MISSING_CHECKS` checks. The supervising thread
    raises `failure`.

    Args:
        topics: queries Kafka.
        remembered_topics: topic name -> the topic at the start of the query.
        collector: the metrics of streams.
        note: stores the lagging partitions, in place of the partitions of the last call. May raise `Retry`.
    """

    def __init__(
        self,
        topics: Topics,
        remembered_topics: Mapping[str, TopicIdentity],
        collector: StreamCollector,
        note: Callable[[Sequence[LagNote]], None] = lambda _: None,
    ) -> None:
        self._topics = topics
        self._remembered_topics = remembered_topics
        self._partitions = {name: topic.partitions for name, topic in remembered_topics.items()}
        self._collector = collector
        self._note = note
        # Time (seconds, monotonic) and argument of the last call of `note`.
        self._last_notes: tuple[float, Sequence[LagNote]] | None = None
        self._lag_tracker = LagTracker()
        self._blocked_offsets: dict[Partition, int] = {}  # partitions that were logged as blocked, with the offset
        self._closing = threading.Event()
        self.failure: Stop | None = None

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run the thread while the block runs. The end of the block waits for at most a second for the thread."""
        thread = threading.Thread(target=self._run, name="end-offsets", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing.set()
            thread.join(timeout=1.0)

    def _run(self) -> None:
        outage_began: float | None = None
        checks = missing = 0
        thresholds = ThresholdLog(self._collector)
        while not self._closing.is_set():
            thresholds.check()
            try:
                require_unchanged(self._topics.identities(self._remembered_topics), self._remembered_topics)
                # Read and stable offsets before end offsets, so that they are never beyond the end offsets.
                read = dict(self._collector.read_offsets)
                stable = self._topics.stable_offsets(self._partitions)
                ends = self._topics.end_offsets(self._partitions)
                if self._closing.is_set():  # Kafka may have taken long, and another process may have the lease now
                    return
                self._update(read, stable, ends)
                checks, missing = checks + 1, 0
                if checks % CHECKS_PER_POLICY_CHECK == 0:
                    require_policy(self._topics.describe(self._remembered_topics).values())
                if outage_began is not None:
                    log.info("Kafka answers again")
                    self._collector.set_kafka_answers(is_answering=True)
                outage_began = None
            except Retry as error:
                missing = 0
                if outage_began is None:
                    log.warning("Waiting for Kafka", problem=str(error))
                    outage_began = time.monotonic()
                    self._collector.set_kafka_answers(is_answering=False)
                self._note_all_lagging(time.monotonic() - outage_began)
                metrics.RETRIES.labels("Kafka").inc()
            except Stop as error:
                missing += 1
                if not isinstance(error, TopicMissing) or missing == MAX_MISSING_CHECKS:
                    self.failure = error
                    return
            self._closing.wait(CHECK_INTERVAL_SECONDS)

    def _note_all_lagging(self, outage_seconds: float) -> None:
        """Record all partitions as lagging if Kafka has not answered for `LAGGING_SECONDS` or longer.

        Each partition may then have unread records, so no writer must count as silent.
        """
        if outage_seconds >= LAGGING_SECONDS:
            partitions = [(name, number) for name, count in self._partitions.items() for number in range(count)]
            self._note_lagging([(*partition, 0, outage_seconds, None, None) for partition in partitions])

    def _update(
        self,
        read_offsets: Mapping[Partition, int],
        stable_offsets: Mapping[Partition, int],
        end_offsets: Mapping[Partition, int],
    ) -> None:
        """Update the metrics of all partitions, log blocked partitions, and note lagging partitions."""
        now, lags = time.monotonic(), dict[Partition, PartitionLag]()
        for key, end in end_offsets.items():
            lags[key] = lag = self._lag_tracker.observe(
                key, now, read_offset=read_offsets[key], stable_offset=stable_offsets[key], end_offset=end
            )
            seconds, blocked = lag.seconds, lag.blocked_seconds
            metrics.set_partition_metrics(
                *key, end_offset=end, read_offset=read_offsets[key], lag_seconds=seconds, blocked_seconds=blocked
            )
        self._log_blocked(lags)
        self._note_lagging([_make_note(partition, lag) for partition, lag in lags.items() if _is_lagging(lag)])

    def _note_lagging(self, notes: Sequence[LagNote]) -> None:
        """Call `note`, unless the last call was for the same partitions and less than `NOTE_INTERVAL_SECONDS` ago.
        Calls `note` only once while no partition lags."""
        now = time.monotonic()
        if self._last_notes is not None and (notes or not self._last_notes[1]):
            is_same = [note[:2] for note in notes] == [note[:2] for note in self._last_notes[1]]
            if is_same and (not notes or now - self._last_notes[0] < NOTE_INTERVAL_SECONDS):
                return
        try:
            self._note(notes)
        except Retry as error:  # batches also wait for Postgres, and log a warning
            log.debug("Could not store the lagging partitions", problem=str(error))
        else:
            self._last_notes = now, notes

    def _log_blocked(self, lags: Mapping[Partition, PartitionLag]) -> None:
        """Log once when an open transaction has blocked a partition for `LAGGING_SECONDS`, and once when no transaction
        does any more."""
        blocked = {key: lag for key, lag in lags.items() if lag.blocked_seconds >= LAGGING_SECONDS}
        for (topic, partition), lag in blocked.items():
            if self._blocked_offsets.get((topic, partition)) != lag.stable_offset:
                log.warning(
                    "An open Kafka transaction blocks a partition",
                    topic=topic,
                    partition=partition,
                    offset=lag.stable_offset,
                    records=lag.records,
                    seconds=round(lag.blocked_seconds),
                    help="`tidemark status` prints the commands that find and abort it",
                )
        for topic, partition in self._blocked_offsets.keys() - blocked.keys():
            log.info("No transaction blocks the partition now", topic=topic, partition=partition)
        self._blocked_offsets = {key: lag.stable_offset for key, lag in blocked.items()}


def _is_lagging(lag: PartitionLag) -> bool:
    return max(lag.seconds, lag.blocked_seconds) >= LAGGING_SECONDS


def _make_note(partition: Partition, lag: PartitionLag) -> LagNote:
    if lag.blocked_seconds < LAGGING_SECONDS:
        return (*partition, lag.records, lag.seconds, None, None)
    return (*partition, lag.records, lag.seconds, lag.stable_offset, lag.blocked_seconds)
