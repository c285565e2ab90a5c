"""The end offsets of Kafka's partitions, asked on a thread of their own, and not of the query: its own lag can read 0
while it is dead.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import structlog

from tidemark.app import metrics
from tidemark.app.board import Board
from tidemark.app.crossings import Crossings
from tidemark.sources.start import RememberedTopic, require_same, require_uncompacted
from tidemark.sources.topics import Topics
from tidemark.streaming.errors import Retry, Stop, TopicMissing

log = structlog.get_logger(__name__)

SECONDS = 2.0  # between two rounds
ROUNDS_PER_CHECK = 15
ROUNDS_MISSING = 5  # in a row: a broker that has just started may not know its topics yet


class EndOffsets:
    """Keeps the metrics of end offsets and lag up to date. `remembered` are the topics as they were at the start.

    It also notices at run time what is checked at every start: a topic that was repartitioned or replaced, in every
    round, and one that was compacted; `failure` is the Stop that was found, for the thread that supervises. And it logs
    what crosses a threshold meanwhile (`app.crossings`).
    """

    def __init__(self, topics: Topics, remembered: Mapping[str, RememberedTopic], board: Board) -> None:
        self._topics = topics
        self._remembered = remembered
        self._partitions = {name: topic.partitions for name, topic in remembered.items()}
        self._board = board
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
                ends = self._topics.end_offsets(self._partitions)
                if self._closing.is_set():  # it may have been long until Kafka answered, and another process reads now
                    return
                for (topic, partition), end in ends.items():
                    metrics.set_offsets(topic, partition, end=end, read=read[topic, partition])
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
