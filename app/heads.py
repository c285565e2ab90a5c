"""A thread that asks Kafka, and not the query, how far its topics reach: a lag can read 0 while the query is dead.

It also notices at run time what is checked at every start: a topic that was repartitioned, replaced or compacted.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import structlog

from tidemark.app import metrics
from tidemark.app.board import Board
from tidemark.sources.start import require_uncompacted
from tidemark.sources.topics import Topics
from tidemark.streaming.errors import PartitionsChanged, Retry, Stop

log = structlog.get_logger(__name__)

SECONDS = 2.0
ROUNDS_PER_CHECK = 15


class Heads:
    """`partitions` are the topics' counts. `failure` is the Stop that was found, for the thread that supervises."""

    def __init__(self, topics: Topics, partitions: Mapping[str, int], board: Board) -> None:
        self._topics = topics
        self._partitions = partitions
        self._board = board
        self._closing = threading.Event()
        self.failure: Stop | None = None

    @contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self._run, name="heads", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing.set()
            thread.join(timeout=1.0)

    def _run(self) -> None:
        away = False
        rounds = 0
        while not self._closing.is_set():
            try:
                for (topic, partition), head in self._topics.heads(self._partitions).items():
                    metrics.set_offsets(topic, partition, head=head, read=self._board.read[topic, partition])
                rounds += 1
                if rounds % ROUNDS_PER_CHECK == 0:
                    self._check()
                if away:
                    log.info("Kafka answers again")
                away = False
            except Retry as error:
                if not away:
                    log.warning("Waiting for Kafka", problem=str(error))
                away = True
                metrics.RETRIES.labels("Kafka").inc()
            except Stop as error:
                self.failure = error
                return
            self._closing.wait(SECONDS)

    def _check(self) -> None:
        topics = self._topics.describe(self._partitions)
        require_uncompacted(topics)
        for name, count in self._partitions.items():
            if len(topics[name].partitions) != count:
                raise PartitionsChanged(name, count, len(topics[name].partitions))
