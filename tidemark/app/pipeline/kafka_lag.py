"""The lag of each Kafka partition, and whether an open transaction blocks the partition.

A reader with `read_committed` gets no record at or beyond the last stable offset: the first offset of the oldest open
transaction. If the producer of that transaction hangs or is lost, the partition is blocked although its end advances.
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
from tidemark.sources.topics import RememberedTopic, Topics, require_policy, require_same

Partition = tuple[str, int]

SAMPLES: Final = 512
"""The largest number of stored end offsets of each partition.

Beyond it, every second one is dropped, so that an age is at most the interval between two samples too high, and never
too low."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a partition.

    Attributes:
        records: number of unread records.
        seconds: age of the oldest unread record.
        stable: the last stable offset.
        blocked_seconds: seconds for which an open transaction has blocked the partition at `stable`; 0 if none does.
    """

    records: int
    seconds: float
    stable: int
    blocked_seconds: float


@dataclass(slots=True)
class _Watched:
    ends: list[tuple[int, float]] = field(default_factory=list)
    """Unread end offsets, each with the time of its first observation."""
    stable: int = -1
    since: float | None = None
    """The time at which the last stable offset was first observed at `stable`, below the end."""


class LagTracker:
    """Computes the lag from offsets over time. For one thread. Ages count from the first observation of this
    process.
    """

    def __init__(self) -> None:
        self._watched: dict[Partition, _Watched] = {}

    def observe(self, partition: Partition, now: float, *, read: int, stable: int, end: int) -> PartitionLag:
        """Add one observation of a partition, and return its lag.

        Args:
            now: seconds of a monotonic clock.
            read: the offset of the next record that the pipeline reads.
            stable: the last stable offset.
            end: the offset of the next record to be written, including open transactions.
        """
        watched = self._watched.setdefault(partition, _Watched())
        watched.ends = [(offset, at) for offset, at in watched.ends if read < offset <= end]
        if end > read and (not watched.ends or watched.ends[-1][0] < end):
            watched.ends.append((end, now))
        if len(watched.ends) > SAMPLES:
            del watched.ends[1:-1:2]
        if stable >= end:
            watched.since = None
        elif watched.since is None or watched.stable != stable:
            watched.since = now
        watched.stable = stable
        waited = now - watched.ends[0][1] if watched.ends else 0.0
        return PartitionLag(end - read, waited, stable, 0.0 if watched.since is None else now - watched.since)


log = get_logger(__name__)

SECONDS = 2.0  # between two checks
CHECKS_PER_DESCRIPTION = 15  # the configuration of the topics is checked less often
LAGGING_SECONDS = 10.0  # reads of a healthy pipeline and transactions of healthy producers take less
NOTED_SECONDS = 10.0  # between two calls of `note` for lagging partitions
CHECKS_MISSING = 5  # consecutive checks without a topic: a broker that has just started may not know its topics


Note = tuple[str, int, int, float, int | None, float | None]


class LagMonitor:
    """Updates the metrics of end offsets and lag, and checks the topics.

    `remembered` are the topics at the start. If a topic was repartitioned, replaced or compacted since, `failure` is
    set, and the supervising thread raises it. The thread also logs crossed thresholds (`app.pipeline.stream_metrics`).
    `note` is called with the lagging partitions (see `sinks.postgres.status.note_lagging`), and may raise `Retry`.
    """

    def __init__(
        self,
        topics: Topics,
        remembered: Mapping[str, RememberedTopic],
        board: StreamCollector,
        note: Callable[[Sequence[Note]], None] = lambda _: None,
    ) -> None:
        self._topics = topics
        self._remembered = remembered
        self._partitions = {name: topic.partitions for name, topic in remembered.items()}
        self._board = board
        self._note = note
        self._noted: tuple[float, Sequence[Note]] | None = None
        self._lag = LagTracker()
        self._blocked: dict[Partition, int] = {}  # offset of each partition that was logged as blocked
        self._closing = threading.Event()
        self.failure: Stop | None = None

    @contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self._run, name="end-offsets", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing.set()
            thread.join(timeout=1.0)

    def _run(self) -> None:
        away_since: float | None = None
        checks = missing = 0
        thresholds = ThresholdLog(self._board)
        while not self._closing.is_set():
            thresholds.check()
            try:
                require_same(self._topics.identities(self._remembered), self._remembered)
                read = dict(self._board.read)  # before the ends, so that the lag is never negative
                stable = self._topics.stable_offsets(self._partitions)  # before the ends: never beyond them
                ends = self._topics.end_offsets(self._partitions)
                if self._closing.is_set():  # Kafka may have taken long to answer, and another process may read now
                    return
                self._update(read, stable, ends)
                checks, missing = checks + 1, 0
                if checks % CHECKS_PER_DESCRIPTION == 0:
                    require_policy(self._topics.describe(self._remembered).values())
                if away_since is not None:
                    log.info("Kafka answers again")
                    self._board.set_reading(is_reading=True)
                away_since = None
            except Retry as error:
                if away_since is None:
                    log.warning("Waiting for Kafka", problem=str(error))
                    away_since = time.monotonic()
                    self._board.set_reading(is_reading=False)
                self._note_all_unread(time.monotonic() - away_since)
                metrics.RETRIES.labels("Kafka").inc()
            except Stop as error:
                missing += 1
                if not isinstance(error, TopicMissing) or missing == CHECKS_MISSING:
                    self.failure = error
                    return
            self._closing.wait(SECONDS)

    def _note_all_unread(self, seconds: float) -> None:
        """Note all partitions as lagging: while Kafka does not answer, unread records are unknown, so no writer counts
        as silent.
        """
        if seconds >= LAGGING_SECONDS:
            partitions = [(name, number) for name, count in self._partitions.items() for number in range(count)]
            self._note_lagging([(*partition, 0, seconds, None, None) for partition in partitions])

    def _update(
        self, read: Mapping[Partition, int], stable: Mapping[Partition, int], ends: Mapping[Partition, int]
    ) -> None:
        now, lags = time.monotonic(), dict[Partition, PartitionLag]()
        for key, end in ends.items():
            lags[key] = lag = self._lag.observe(key, now, read=read[key], stable=stable[key], end=end)
            seconds, blocked = lag.seconds, lag.blocked_seconds
            metrics.set_offsets(*key, end=end, read=read[key], seconds=seconds, blocked=blocked)
        self._log_blocked(lags)
        self._note_lagging([_note(partition, lag) for partition, lag in lags.items() if _is_lagging(lag)])

    def _note_lagging(self, notes: Sequence[Note]) -> None:
        now = time.monotonic()
        if self._noted is not None and (notes or not self._noted[1]):
            is_same = [note[:2] for note in notes] == [note[:2] for note in self._noted[1]]
            if is_same and (not notes or now - self._noted[0] < NOTED_SECONDS):
                return
        try:
            self._note(notes)
        except Retry as error:  # batches wait for Postgres too, and log that
            log.debug("Could not note lagging partitions", problem=str(error))
        else:
            self._noted = now, notes

    def _log_blocked(self, lags: Mapping[Partition, PartitionLag]) -> None:
        """Log once when an open transaction blocks a partition, and once when it no longer does."""
        blocked = {key: lag for key, lag in lags.items() if lag.blocked_seconds >= LAGGING_SECONDS}
        for (topic, partition), lag in blocked.items():
            if self._blocked.get((topic, partition)) != lag.stable:
                log.warning(
                    "An open Kafka transaction blocks a partition",
                    topic=topic,
                    partition=partition,
                    offset=lag.stable,
                    records=lag.records,
                    seconds=round(lag.blocked_seconds),
                    help="`tidemark status` prints the commands that find and abort it",
                )
        for topic, partition in self._blocked.keys() - blocked.keys():
            log.info("No transaction blocks the partition now", topic=topic, partition=partition)
        self._blocked = {key: lag.stable for key, lag in blocked.items()}


def _is_lagging(lag: PartitionLag) -> bool:
    return max(lag.seconds, lag.blocked_seconds) >= LAGGING_SECONDS


def _note(partition: Partition, lag: PartitionLag) -> Note:
    if lag.blocked_seconds < LAGGING_SECONDS:
        return (*partition, lag.records, lag.seconds, None, None)
    return (*partition, lag.records, lag.seconds, lag.stable, lag.blocked_seconds)
