"""The thread that requeues deferred records: it reads them from Kafka again and produces them to the same partition.

Key, value and headers stay the same, so the pipeline reads them like any other record. At least once: a crash between
producing and noting it repeats some records, which are then duplicates. It has a thread of its own, because it may read
hours of records to find a few; batches go on meanwhile.
"""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from confluent_kafka import KafkaException

from tidemark.common.errors import BadRecord, LeaseLost, TidemarkError, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.background import LeasedThread
from tidemark.sinks.dead_letters import KafkaConnections, Outbox, Outgoing
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.requeues import PendingRequeue
from tidemark.sinks.postgres.store import Postgres
from tidemark.streaming.wire import records

log = get_logger(__name__)

RETRY_AFTER = 5.0  # seconds after a problem


@dataclass(frozen=True, slots=True)
class RequeueConfig:
    """Settings of the thread.

    Attributes:
        client: librdkafka settings of the consumer; may hold a password. So may `producer`.
        patience: seconds without progress before a problem is reported.
        records: bound of the records that one step produces.
        volume: about the bytes that one step produces.
        read: bound of the records that one step reads.
        poll: seconds between two steps. 10,000 requeued records/s leave room for new ones.
    """

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    patience: float = 5.0
    records: int = 5_000
    volume: int = 4 << 20
    read: int = 100_000
    poll: float = 0.5


class Requeuer(LeasedThread):
    """Requeues deferred records. Problems are logged, noted for `tidemark status`, and retried.

    Positions of the writers concerned stay where they are meanwhile. `produced` is called with the number of records
    that a step has produced.
    """

    def __init__(
        self, config: RequeueConfig, postgres: Postgres, lease: Lease, produced: Callable[[int], object]
    ) -> None:
        super().__init__("requeuer", lease)
        self._config = config
        self._postgres = postgres
        self._produced = produced
        # Records of an aborted transaction must not be requeued: they would be produced outside of a transaction.
        self._kafka = KafkaConnections(config.client, config.producer, config.patience, "read_committed")
        self._problem = ""

    def work(self) -> float:
        requeue = None
        try:
            requeue = next(iter(self._postgres.pending_requeues()), None)
            if requeue is not None:
                self._postgres.note_requeue(*self.step(requeue))
            if self._problem:
                log.info("Requeuing deferred records again")
            self._problem = ""
        except LeaseLost:
            raise
        except TidemarkError as error:
            problem = str(error)
            if problem != self._problem:  # once, not at every retry
                log.warning("Cannot requeue deferred records; trying again", problem=problem)
            self._problem = problem
            if requeue is not None:
                with suppress(Unavailable):
                    self._postgres.note_requeue(requeue, problem)
        return RETRY_AFTER if self._problem else self._config.poll

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.close()

    def close(self) -> None:
        """Close the connections to Kafka."""
        self._kafka.close()

    def step(self, requeue: PendingRequeue) -> tuple[PendingRequeue, str | None]:
        """Produce some of the records.

        Returns:
            The rest, once the brokers have acknowledged the records, and the problem that prevents the rest.
        """
        try:
            return self._step(requeue)
        except KafkaException as error:
            self._kafka.close()
            raise self._kafka.errors.explain(error.args[0]) from error
        except TidemarkError:
            self._kafka.close()
            raise

    def _step(self, requeue: PendingRequeue) -> tuple[PendingRequeue, str | None]:
        self._kafka.errors.forget()
        topic, problem = self._config.topic, None
        outbox = Outbox(self._kafka.writer(), topic, instead=lambda _: None)
        oldest, end = self._kafka.reader().offsets(topic, requeue.partition)
        following = min(max(requeue.next, oldest), requeue.last + 1)
        gone = following - requeue.next
        sent = volume = read = 0
        with closing(self._kafka.reader().read(topic, requeue.partition, following)) as records:
            while following <= requeue.last and sent < self._config.records and volume < self._config.volume:
                record = next(records, None)
                if record is None or record.offset() >= end:  # later records were requeued just now
                    problem = "the partition ends before the records, or has just lost them"
                    break
                key, value = record.key(), record.value()
                if record.offset() <= requeue.last and is_edge(
                    value, key, requeue.stream, requeue.writer, requeue.epoch
                ):
                    outbox.put(Outgoing((), key, value, record.headers() or (), requeue.partition))
                    sent, volume = sent + 1, volume + len(key) + len(value)
                following, read = min(record.offset(), requeue.last) + 1, read + 1
                if read == self._config.read:
                    break
        if (error := outbox.flush()) is not None:
            raise KafkaException(error)
        self._produced(sent - outbox.gone)
        if gone or outbox.gone:
            log.warning(
                "Deferred records are gone from Kafka: their IDs stay open until the writer's next JOIN",
                stream=requeue.stream,
                writer=requeue.writer,
                partition=requeue.partition,
                gone=gone,
                too_large=outbox.gone,
            )
        return replace(requeue, next=following, gone=requeue.gone + gone + outbox.gone), problem


def is_edge(value: bytes | None, key: bytes | None, stream: str, writer: str, epoch: int) -> bool:
    """True if a record of the facts topic has edges of this writer and epoch. Only such records are requeued."""
    if key != stream.encode():
        return False
    try:
        record = records.read(value, key, records.Topic.FACTS)
    except BadRecord:
        return False
    if isinstance(record, records.Rdata) and record.id == "batch":
        return False
    kinds = records.Rdata | records.Void | records.Position | records.FactRun
    return isinstance(record, kinds) and (record.writer, record.epoch) == (writer, epoch)
