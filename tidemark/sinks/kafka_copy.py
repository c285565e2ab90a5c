"""Records read from Kafka again by their offsets, and records on their way back: for dead letters and recalls.

One thread at a time. All of it raises `KafkaException` or `Unavailable`; after an error the owner closes what it has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from tidemark.common.kafka_errors import ErrorListener
from tidemark.common.partition_reader import PartitionReader

Headers = Sequence[tuple[str, Any]]
ANY_PARTITION = -1


class Outgoing(NamedTuple):
    """A record on its way: its own key, value and headers, and in `origin` headers of ours."""

    origin: Headers = ()
    key: Any = None
    value: Any = b""
    headers: Headers = ()
    partition: int = ANY_PARTITION


class Outbox:
    """Records between the producer and its acknowledgement. `gone` counts those of which the topic took nothing.

    `instead` says what to send in place of a record that is too large for the topic, None for nothing.
    """

    def __init__(self, producer: Producer, topic: str, instead: Callable[[Outgoing], Outgoing | None]) -> None:
        self.gone = 0
        self._producer = producer
        self._topic = topic
        self._instead = instead
        self._too_large: list[Outgoing] = []  # seen to in `flush`, as a callback may not produce
        self._error: KafkaError | None = None

    def put(self, record: Outgoing) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            bare = not (record.key or record.value or record.headers)
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE and not bare:
                self._too_large.append(record)
            elif error is not None:
                self._error = error

        headers = [*record.headers, *record.origin]
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    key=record.key,
                    value=record.value,
                    headers=headers,
                    partition=record.partition,
                    on_delivery=delivered,
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def put_instead(self, record: Outgoing | None) -> None:
        self.gone += 1
        if record is not None:
            self.put(record)

    def flush(self) -> KafkaError | None:
        """Wait for the acknowledgements, which come or fail within the message time-out; the first failure, if any."""
        self._await()
        too_large, self._too_large = self._too_large, []
        for record in too_large:
            # The brokers refuse a whole batch for one of its records, so each gets a batch of its own.
            self.put(record)
            self._await()
            if self._too_large:
                self._too_large.clear()
                self.put_instead(self._instead(record))
        self._await()
        return self._error

    def _await(self) -> None:
        while self._error is None and self._producer.flush(1.0):
            pass


class KafkaConnections:
    """Both directions, each connected when it is first asked for; `errors` hears of both. The producer's records fail
    after `patience` (s); `isolation` is the reader's.
    """

    def __init__(self, client: Mapping[str, str], producer: Mapping[str, str], patience: float, isolation: str) -> None:
        self.errors = ErrorListener(client["bootstrap.servers"])
        self._client = client
        self._producer = producer
        self._patience = patience
        self._isolation = isolation
        self._reader: PartitionReader | None = None
        self._writer: Producer | None = None

    def reader(self) -> PartitionReader:
        if self._reader is None:
            self._reader = PartitionReader(self._client, self.errors, self._patience, self._isolation)
        return self._reader

    def writer(self) -> Producer:
        if self._writer is None:
            self._writer = Producer(
                {
                    **self._producer,
                    "message.timeout.ms": str(int(self._patience * 1000)),
                    # Before the time-out, so that a missing topic is told from brokers that are away.
                    "topic.metadata.propagation.max.ms": str(int(self._patience * 500)),
                    "message.max.bytes": "100000000",  # the brokers decide, not our client
                    "error_cb": self.errors,
                }
            )
        return self._writer

    def close(self) -> None:
        """Drop both, and what is still unsent; they may be asked for again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._writer is not None:
            self._writer.purge()
            self._writer = None
