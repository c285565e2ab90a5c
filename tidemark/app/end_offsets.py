"""The end offsets of Kafka's partitions, asked on a thread of their own, and not of the query: its own lag can read 0
while it is dead.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import structlog

from tidemark.app import metrics
from tidemark.app.board import Board
from tidemark.app.crossings import Crossings
from tidemark.app.partition_lag import LagTracker, Partition, PartitionLag
from tidemark.common.errors import Retry, Stop, TopicMissing
from tidemark.sources.topic_checks import RememberedTopic, require_same, require_uncompacted
from tidemark.sources.topics import Topics

log = structlog.get_logger(__name__)

SECONDS = 2.0  # between two rounds
ROUNDS_PER_CHECK = 15
LAGGING_SECONDS = 10.0  # a healthy pipeline reads a record sooner, and a transaction of a healthy producer ends sooner
NOTED_SECONDS = 10.0  # between two notes of partitions that lag
ROUNDS_MISSING = 5  # in a row: a broker that has just started may not know its topics yet


Note = tuple[str, int, int, float, int | None, float | None]


class EndOffsets:
    """Keeps the metrics of end offsets and lag up to date. `remembered` are the topics as they were at the start.

    It also notices at run time what is checked at every start: a topic that was repartitioned or replaced, in every
    round, and one that was compacted; `failure` is the Stop that was found, for the thread that supervises. And it logs
    what crosses a threshold meanwhile (`app.crossings`). `note` is called with the partitions that lag, as
    `sinks.postgres.kafka_lag.note_lagging` takes them; it may raise `Retry`.
    """

    def __init__(
        self,
        topics: Topics,
        remembered: Mapping[str, RememberedTopic],
        board: Board,
        note: Callable[[Sequence[Note]], None] = lambda _: None,
    ) -> None:
        self._topics = topics
        self._remembered = remembered
        self._partitions = {name: topic.partitions for name, topic in remembered.items()}
        self._board = board
        self._note = note
        self._noted: tuple[float, Sequence[Note]] | None = None
        self._lag = LagTracker()
        self._blocked: dict[Partition, int] = {}  # the offset at which each partition that is logged is blocked
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
        away = False
        rounds = missing = 0
        crossings = Crossings(self._board)
        while not self._closing.is_set():
            crossings.look()
            try:
                require_same(self._topics.identities(self._remembered), self._remembered)
                read = dict(self._board.read)  # first, so that what is read meanwhile makes no lag below 0
                stable = self._topics.stable_offsets(self._partitions)  # before the ends: it is never beyond them
                ends = self._topics.end_offsets(self._partitions)
                if self._closing.is_set():  # it may have been long until Kafka answered, and another process reads now
                    return
                self._show(read, stable, ends)
                rounds, missing = rounds + 1, 0
                if rounds % ROUNDS_PER_CHECK == 0:
                    require_uncompacted(self._topics.describe(self._remembered))
                if away:
                    log.info("Kafka answers again")
                away = False
            except Retry as error:
                if not away:
                    log.warning("Waiting for Kafka", problem=str(error))
                away = True
                metrics.RETRIES.labels("Kafka").inc()
            except Stop as error:
                missing += 1
                if not isinstance(error, TopicMissing) or missing == ROUNDS_MISSING:
                    self.failure = error
                    return
            self._closing.wait(SECONDS)

    def _show(
        self, read: Mapping[Partition, int], stable: Mapping[Partition, int], ends: Mapping[Partition, int]
    ) -> None:
        now, lags = time.monotonic(), dict[Partition, PartitionLag]()
        for place, end in ends.items():
            lags[place] = lag = self._lag.observe(place, now, read=read[place], stable=stable[place], end=end)
            seconds, blocked = lag.seconds, lag.blocked_seconds
            metrics.set_offsets(*place, end=end, read=read[place], seconds=seconds, blocked=blocked)
        self._log_blocked(lags)
        found = [_note(place, lag) for place, lag in lags.items() if _lags(lag)]
        if self._noted is not None and (found or not self._noted[1]):
            same = [note[:2] for note in found] == [note[:2] for note in self._noted[1]]
            if same and (not found or now - self._noted[0] < NOTED_SECONDS):
                return
        try:
            self._note(found)
        except Retry as error:  # the batches wait for Postgres too, and say so
            log.debug("Partitions that lag could not be noted", problem=str(error))
        else:
            self._noted = now, found

    def _log_blocked(self, lags: Mapping[Partition, PartitionLag]) -> None:
        """One line when an open transaction blocks a partition, one when it does no more."""
        blocked = {place: lag for place, lag in lags.items() if lag.blocked_seconds >= LAGGING_SECONDS}
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
            log.info("No transaction blocks the partition any more", topic=topic, partition=partition)
        self._blocked = {place: lag.stable for place, lag in blocked.items()}


def _lags(lag: PartitionLag) -> bool:
    return max(lag.seconds, lag.blocked_seconds) >= LAGGING_SECONDS


def _note(place: Partition, lag: PartitionLag) -> Note:
    if lag.blocked_seconds < LAGGING_SECONDS:
        return (*place, lag.records, lag.seconds, None, None)
    return (*place, lag.records, lag.seconds, lag.stable, lag.blocked_seconds)
