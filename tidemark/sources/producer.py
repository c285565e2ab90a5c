"""Sends records to one topic. The key of a record is its stream, so the records of a stream stay in one partition and
in order."""

from collections.abc import Callable, Iterable
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemark.common.errors import Stop, Unavailable
from tidemark.common.kafka import ErrorListener, explain_kafka_error
from tidemark.sources.kafka import MAX_MESSAGE_BYTES, KafkaConnection
from tidemark.sources.topics import Topics

NO_TIME_LIMIT = 0.0
"""A value of `give_up_after`: the producer retries the delivery of a record without a time limit."""
_FRAME_BYTES = 150
"""The largest size of a batch of one record in bytes, without the key and the value."""


def make_topic_producer(connection: KafkaConnection, topic: str, give_up_after: float) -> "RecordProducer":
    """Query the topic's `max.message.bytes`, and make a producer with this limit.

    Args:
        connection: the address and the credentials of Kafka.
        topic: the topic of all records.
        give_up_after: the delivery time limit of a record in seconds, or `NO_TIME_LIMIT`.

    Raises:
        Unavailable: Kafka does not answer.
        TopicMissing: the topic does not exist.
        Refused: Kafka refused the connection, or this user may not describe the topic.
    """
    return RecordProducer(connection, topic, give_up_after, Topics(connection).max_message_bytes(topic))


def query_producer_settings(connection: KafkaConnection, topic: str) -> dict[str, str]:
    """Query the topic's `max.message.bytes`, and return the librdkafka settings of a producer with this limit.

    If the topic is missing, or Kafka refuses the query, the limit is Kafka's default. Raises `Unavailable` if Kafka
    does not answer.
    """
    try:
        return connection.producer_settings(Topics(connection).max_message_bytes(topic))
    except Stop:
        return connection.producer_settings()


class RecordProducer:
    """Sends records to one topic. Not thread-safe. All records are in Kafka only after `flush` has returned 0.

    If a record failed, this producer sends nothing more: each later call raises `Unavailable` or `Refused`. Then make a
    new producer.

    Args:
        connection: the address and the credentials of Kafka.
        topic: the topic of all records.
        give_up_after: the delivery time limit of a record in seconds, or `NO_TIME_LIMIT`. Retries keep the order.
        max_bytes: the topic's `max.message.bytes`.

    Attributes:
        where: the address of Kafka, for messages.
        delivered_count: the number of acknowledged records.
    """

    def __init__(
        self, connection: KafkaConnection, topic: str, give_up_after: float, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._topic = topic
        self.max_bytes = max_bytes
        self.where = connection.bootstrap
        self._errors = ErrorListener(connection.bootstrap)
        self._failure: KafkaError | None = None
        self.delivered_count = 0
        self.last_acknowledged: tuple[int, int] | None = None
        """The partition and the offset of the record that was acknowledged last; None if none was."""
        settings = connection.producer_settings(max_bytes) | {
            "message.timeout.ms": str(int(give_up_after * 1000)),
            # Callers limit their backlog, so the queue is rarely full. A send to a full queue blocks.
            "queue.buffering.max.messages": "500000",
            # Send nothing after a refused record: the last record of a fact completes the fact, even if Kafka refused
            # one of its other records.
            "enable.gapless.guarantee": "true",
        }
        try:
            self._producer = Producer({**settings, "error_cb": self._errors})
        except KafkaException as error:
            raise explain_kafka_error(error.args[0], self.where) from error

    def send(self, stream: str, value: bytes) -> None:
        """Queue a record. Blocks while the queue is full. Raises the error of an earlier record, if a record failed.

        Args:
            stream: the key of the record.
            value: the value of the record.
        """
        self._produce(stream.encode(), value, self._on_delivery)
        self._poll(0)

    def send_all(self, stream: str, values: Iterable[bytes], on_acknowledged: Callable[[], None]) -> None:
        """Queue several records. Blocks while the queue is full. Raises the error of an earlier record, if a record
        failed.

        Args:
            stream: the key of the records.
            values: the values of the records.
            on_acknowledged: called once for each record that Kafka has acknowledged, during this call or a later call
                of any method of this producer, and in the thread of that call.
        """
        key, on_delivery = stream.encode(), partial(self._on_delivery, on_acknowledged=on_acknowledged)
        for value in values:
            self._produce(key, value, on_delivery)
        self._poll(0)

    def _produce(self, key: bytes, value: bytes, on_delivery: Callable[[KafkaError | None, Message], None]) -> None:
        while True:
            try:
                self._producer.produce(self._topic, value=value, key=key, on_delivery=on_delivery)
            except BufferError:
                self._poll(0.1)
            except KafkaException as error:
                self._poll(0)  # raises the reason if the client has failed permanently
                raise explain_kafka_error(error.args[0], self.where) from error
            else:
                return

    def max_value_bytes(self, stream: str) -> int:
        """The largest value, in bytes before compression, that certainly fits into the topic with this key."""
        return self.max_bytes - len(stream.encode()) - _FRAME_BYTES

    def poll_backlog(self) -> int:
        """Process Kafka's acknowledgements without waiting. Returns the number of records that Kafka has not
        acknowledged.

        Raises the error of an earlier record, if a record failed.
        """
        self._poll(0)
        return len(self._producer)

    def flush(self, seconds: float) -> int:
        """Wait up to `seconds` until Kafka has acknowledged every record.

        Returns the number of records that Kafka has not acknowledged. Raises `Unavailable` or `Refused` if a record
        failed.
        """
        with self._errors.translate_errors():  # raises the reason if the client has failed permanently
            unacknowledged: int = self._producer.flush(seconds)
        self._raise_failure()
        return unacknowledged

    def deliver(self, seconds: float) -> None:
        """Wait until Kafka has acknowledged every record.

        Raises `Unavailable` if Kafka has not acknowledged every record after `seconds`. Raises `Unavailable` or
        `Refused` if a record failed.
        """
        if unacknowledged := self.flush(seconds):
            raise Unavailable("Kafka", self.where, f"{unacknowledged} records were not acknowledged")

    @property
    def problem(self) -> str:
        """The newest error of the connection to the brokers; empty if there was none."""
        return self._errors.reason

    def _poll(self, seconds: float) -> None:
        with self._errors.translate_errors():
            self._producer.poll(seconds)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._errors.explain(self._failure)
        self._errors.raise_refusal()

    def _on_delivery(
        self, error: KafkaError | None, message: Message, on_acknowledged: Callable[[], None] | None = None
    ) -> None:
        if error is not None:
            self._failure = self._failure or error
            return
        self.delivered_count += 1
        self.last_acknowledged = message.partition(), message.offset()
        if on_acknowledged is not None:
            on_acknowledged()
