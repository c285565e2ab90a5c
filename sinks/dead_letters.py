"""The dead letters: rejected records, fetched from Kafka again by their offsets and sent on byte for byte.

At least once: a batch that is repeated sends its dead letters again; their headers show which are the same record.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tidemark.streaming.errors import TidemarkError, TopicMissing, Unavailable
from tidemark.streaming.kafka_errors import ErrorListener
from tidemark.streaming.model import Rejected

log = structlog.get_logger(__name__)

FAR = 2_000  # offsets that are read and thrown away rather than sought over

Headers = Sequence[tuple[str, Any]]


class DeadLetter(NamedTuple):
    """A record on its way: its own key, value and headers, and in `origin` the headers that say whence and why."""

    origin: Headers
    key: Any = None
    value: Any = b""
    headers: Headers = ()

    @property
    def bare(self) -> bool:
        """Whether nothing of the record is in it."""
        return not (self.key or self.value or self.headers)

    def without_record(self, why: str) -> "DeadLetter":
        return DeadLetter((*self.origin, ("gone", why.encode())))


class DeadLetterOutbox:
    """Dead letters between the producer and its acknowledgement. `gone` counts those that went without their record."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self.gone = 0
        self._producer = producer
        self._topic = topic
        self._too_large: list[DeadLetter] = []  # seen to in `flush`, as a callback may not produce
        self._error: KafkaError | None = None

    def put(self, dead_letter: DeadLetter) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE and not dead_letter.bare:
                self._too_large.append(dead_letter)
            elif error is not None:
                self._error = error

        headers = [*dead_letter.headers, *dead_letter.origin]
        while True:
            try:
                self._producer.produce(
                    self._topic, key=dead_letter.key, value=dead_letter.value, headers=headers, on_delivery=delivered
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def put_empty(self, dead_letter: DeadLetter, why: str) -> None:
        self.gone += 1
        self.put(dead_letter.without_record(why))

    def flush(self) -> KafkaError | None:
        """Wait for the acknowledgements, which come or fail within the message time-out; the first failure, if any."""
        self._await()
        too_large, self._too_large = self._too_large, []
        for dead_letter in too_large:
            # The brokers refuse a whole batch for one of its records, so each gets a batch of its own.
            self.put(dead_letter)
            self._await()
            if self._too_large:
                self._too_large.clear()
                self.put_empty(dead_letter, "too large for this topic")
        self._await()
        return self._error

    def _await(self) -> None:
        while self._error is None and self._producer.flush(1.0):
            pass


@dataclass(frozen=True, slots=True)
class DeadLettersConfig:
    """`client` and `producer` are librdkafka settings and may hold a password. `patience`: seconds without progress."""

    topic: str
    client: Mapping[str, str] = field(repr=False)
    producer: Mapping[str, str] = field(repr=False)
    patience: float = 5.0


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Records sent to the dead letters, and how many of them went without their value because it is gone."""

    sent: int = 0
    gone: int = 0


class DeadLetters:
    """One thread at a time. Connects when the first record is rejected; a context manager."""

    def __init__(self, config: DeadLettersConfig) -> None:
        self._config = config
        self._where = config.client["bootstrap.servers"]
        self._reader: Consumer | None = None
        self._writer: Producer | None = None
        self._errors = ErrorListener(self._where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop both connections, and what is still unsent with them; the next call opens new ones."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._writer is not None:
            self._writer.purge()
            self._writer = None

    def send(self, rejected: Sequence[Rejected]) -> DeadLettered:
        """Send every rejected record on and wait until the brokers have them.

        A dead letter has the key, value and headers of its record, and the headers `reason`, `topic`, `partition`,
        `offset`. Where retention removed the record meanwhile, or it is too large for the dead letters, the value is
        empty and a header `gone` says why. Raises `Unavailable` (call again: all are sent again), `Refused`,
        `TopicMissing`.
        """
        if not rejected:
            return DeadLettered()
        try:
            return self._send(rejected)
        except KafkaException as error:
            self.close()
            raise self._explained(error.args[0]) from error
        except TidemarkError:
            self.close()
            raise

    def _send(self, rejected: Sequence[Rejected]) -> DeadLettered:
        self._errors.forget()
        reasons: dict[tuple[str, int], dict[int, str]] = {}
        for item in rejected:
            wanted = reasons.setdefault((item.topic, item.partition), {})
            wanted.update(dict.fromkeys(np.frombuffer(item.offsets, "<i8").tolist(), item.reason))
        outbox = DeadLetterOutbox(self._producer(), self._config.topic)
        sent = 0
        for (topic, partition), wanted in reasons.items():
            before = outbox.gone
            for offset, record in self._records(topic, partition, sorted(wanted)):
                origin = _origin(wanted[offset], topic, partition, offset)
                if record is None:
                    outbox.put_empty(DeadLetter(origin), "removed by retention")
                else:
                    outbox.put(DeadLetter(origin, record.key(), record.value(), record.headers() or ()))
                sent += 1
            if gone := outbox.gone - before:
                log.warning(
                    "Rejected records were gone before they could be kept",
                    topic=topic,
                    partition=partition,
                    records=gone,
                )
        if (error := outbox.flush()) is not None:
            raise KafkaException(error)
        return DeadLettered(sent, outbox.gone)

    def _records(self, topic: str, partition: int, wanted: Sequence[int]) -> Iterator[tuple[int, Message | None]]:
        """Each wanted offset (ascending) with its record, None where there is no such record any more."""
        reader = self._consumer()
        pending = list(reversed(wanted))
        while pending:
            first, end = reader.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=self._config.patience, cached=False
            )
            while pending and not first <= pending[-1] < end:
                yield pending.pop(), None
            if not pending:
                break
            reader.assign([TopicPartition(topic, partition, pending[-1])])
            for record in self._read(reader, pending[-1]):
                here = None if record is None else record.offset()
                while pending and (here is None or pending[-1] < here):
                    yield pending.pop(), None
                if pending and pending[-1] == here:
                    yield pending.pop(), record
                if not pending or (here is not None and pending[-1] - here > FAR):
                    break
        reader.unassign()

    def _read(self, reader: Consumer, start: int) -> Iterator[Message | None]:
        """Records from `start` on; None at the end of the partition; stops where retention overtakes the reading."""
        deadline = time.monotonic() + self._config.patience
        while True:
            records = reader.consume(num_messages=500, timeout=0.2)
            if records:
                deadline = time.monotonic() + self._config.patience
            elif time.monotonic() > deadline:
                raise Unavailable("Kafka", self._where, f"no answer for records from offset {start}")
            for record in records:
                error = record.error()
                if error is None:
                    yield record
                elif error.code() == KafkaError._PARTITION_EOF:
                    yield None
                    return
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    return
                else:
                    raise KafkaException(error)

    def _consumer(self) -> Consumer:
        if self._reader is None:
            self._reader = Consumer(
                {
                    **self._config.client,
                    "group.id": "tidemark-dead-letters",  # wanted by librdkafka; nothing is ever committed to it
                    "enable.auto.commit": "false",
                    "enable.auto.offset.store": "false",
                    "enable.partition.eof": "true",
                    "auto.offset.reset": "error",
                    "isolation.level": "read_uncommitted",  # as Spark reads
                    "error_cb": self._errors,
                }
            )
        return self._reader

    def _producer(self) -> Producer:
        if self._writer is None:
            self._writer = Producer(
                {
                    **self._config.producer,
                    "message.timeout.ms": str(int(self._config.patience * 1000)),
                    # Before the time-out, so that a missing topic is told from brokers that are away.
                    "topic.metadata.propagation.max.ms": str(int(self._config.patience * 500)),
                    "message.max.bytes": "100000000",  # the brokers decide, not our client
                    "error_cb": self._errors,
                }
            )
        return self._writer

    def _explained(self, error: KafkaError) -> TidemarkError:
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            return TopicMissing(self._config.topic)
        return self._errors.explain(error)


def _origin(reason: str, topic: str, partition: int, offset: int) -> Headers:
    values = (("reason", reason), ("topic", topic), ("partition", partition), ("offset", offset))
    return [(name, str(value).encode()) for name, value in values]
