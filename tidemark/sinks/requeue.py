"""The thread that brings back what was put off: it reads the records again and produces them to the topic as they were.

Bytes, headers and partition are theirs, so they are fed like any record. At least once: a crash between producing and
noting it repeats some, which are duplicates. In its own thread, since it may have to read over hours of records of
which few come again; batches go on meanwhile.
"""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from confluent_kafka import KafkaException

from tidemark.common.errors import LeaseLost, TidemarkError, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.background import LeasedThread
from tidemark.sinks.dead_letters import KafkaConnections, Outbox, Outgoing
from tidemark.sinks.postgres.deferred import KeptRecall
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.core.deferred import is_edge

log = get_logger(__name__)

AGAIN = 5.0  # seconds after a problem


@dataclass(frozen=True, slots=True)
class RecallerConfig:
    """`client` and `producer` are librdkafka settings and may hold a password. `patience`: seconds without progress.

    Each `recall` produces at most `records` or about `volume` bytes, and reads at most `read` records. One follows
    another after `poll` s: 10,000 records/s of what comes again leave room for what is new.
    """

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    patience: float = 5.0
    records: int = 5_000
    volume: int = 4 << 20
    read: int = 100_000
    poll: float = 0.5


class Recaller(LeasedThread):
    """Problems are logged, noted for `tidemark status`, and tried again: meanwhile positions hold.

    `recalled` is called with the number of records of each `recall` that were produced again.
    """

    def __init__(
        self, config: RecallerConfig, postgres: Postgres, lease: Lease, recalled: Callable[[int], object]
    ) -> None:
        super().__init__("recaller", lease)
        self._config = config
        self._postgres = postgres
        self._recalled = recalled
        # Of a transaction that was aborted nothing may come again: it would be produced without one.
        self._kafka = KafkaConnections(config.client, config.producer, config.patience, "read_committed")
        self._problem = ""

    def work(self) -> float:
        recall = None
        try:
            recall = next(iter(self._postgres.recalls()), None)
            if recall is not None:
                self._postgres.recalled(*self.recall(recall))
            if self._problem:
                log.info("What was put off comes again")
            self._problem = ""
        except LeaseLost:
            raise
        except TidemarkError as error:
            problem = str(error)
            if problem != self._problem:  # once, not at every look
                log.warning("Cannot bring back what was put off; trying again", problem=problem)
            self._problem = problem
            if recall is not None:
                with suppress(Unavailable):
                    self._postgres.recalled(recall, problem)
        return AGAIN if self._problem else self._config.poll

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.close()

    def close(self) -> None:
        """Its connections to Kafka."""
        self._kafka.close()

    def recall(self, recall: KeptRecall) -> tuple[KeptRecall, str | None]:
        """Produce some of it; gives what is left, once the brokers have it, and what hinders the rest."""
        try:
            return self._step(recall)
        except KafkaException as error:
            self._kafka.close()
            raise self._kafka.errors.explain(error.args[0]) from error
        except TidemarkError:
            self._kafka.close()
            raise

    def _step(self, recall: KeptRecall) -> tuple[KeptRecall, str | None]:
        self._kafka.errors.forget()
        topic, problem = self._config.topic, None
        outbox = Outbox(self._kafka.writer(), topic, instead=lambda _: None)
        oldest, end = self._kafka.reader().offsets(topic, recall.partition)
        following = min(max(recall.next, oldest), recall.last + 1)
        gone = following - recall.next
        sent = volume = read = 0
        with closing(self._kafka.reader().read(topic, recall.partition, following)) as records:
            while following <= recall.last and sent < self._config.records and volume < self._config.volume:
                record = next(records, None)
                if record is None or record.offset() >= end:  # what lies there was produced again just now
                    problem = "the partition ends before them, or lost them just now"
                    break
                key, value = record.key(), record.value()
                if record.offset() <= recall.last and is_edge(value, key, recall.stream, recall.writer, recall.epoch):
                    outbox.put(Outgoing((), key, value, record.headers() or (), recall.partition))
                    sent, volume = sent + 1, volume + len(key) + len(value)
                following, read = min(record.offset(), recall.last) + 1, read + 1
                if read == self._config.read:
                    break
        if (error := outbox.flush()) is not None:
            raise KafkaException(error)
        self._recalled(sent - outbox.gone)
        if gone or outbox.gone:
            log.warning(
                "Records that were put off cannot come again: what is open waits for the writer's next JOIN",
                stream=recall.stream,
                writer=recall.writer,
                partition=recall.partition,
                gone=gone,
                too_large=outbox.gone,
            )
        return replace(recall, next=following, gone=recall.gone + gone + outbox.gone), problem
