"""How long the records of each Kafka partition have waited, and whether an open transaction blocks them. Pure.

A reader with `read_committed` gets nothing at or beyond the last stable offset: the first offset of the oldest
transaction that is still open. If its producer hangs or is lost, the partition is blocked, though its end moves on.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from tidemark.app import metrics
from tidemark.app.stream_metrics import Board, Crossings
from tidemark.common.errors import Retry, Stop, TopicMissing
from tidemark.common.log import get_logger
from tidemark.sources.topic_checks import RememberedTopic, require_same, require_uncompacted
from tidemark.sources.topics import Topics

Partition = tuple[str, int]

SAMPLES: Final = 512
"""End offsets remembered for each partition; past that every second one is dropped, so an age may look older by one gap
between samples, and never younger."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """`records` wait to be read, the oldest for `seconds`. `stable` is the last stable offset; if an open transaction
    blocks the partition there, `blocked_seconds` is for how long, else 0."""

    records: int
    seconds: float
    stable: int
    blocked_seconds: float


@dataclass(slots=True)
class _Watched:
    ends: list[tuple[int, float]] = field(default_factory=list)
    """End offsets that are not read yet, each with when it was first observed."""
    stable: int = -1
    since: float | None = None
    """When the last stable offset was first observed to be `stable`, below the end."""


class LagTracker:
    """Not for threads. A new process counts from what it observes first."""

    def __init__(self) -> None:
        self._watched: dict[Partition, _Watched] = {}

    def observe(self, partition: Partition, now: float, *, read: int, stable: int, end: int) -> PartitionLag:
        """Take the offsets of a partition as they were asked at `now` (s, of any clock that does not go back).

        Args:
            read: the offset of the next record that the pipeline reads.
            stable: the last stable offset.
            end: the offset of the next record that will be written, of open transactions too.
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
    what crosses a threshold meanwhile (`app.stream_metrics`). `note` is called with the partitions that lag, as
    `sinks.postgres.status.note_lagging` takes them; it may raise `Retry`.
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
