"""The consumer of Kafka messages: `NativeConsumer`, or `PythonConsumer` if librdkafka's symbols cannot be found.

Both classes have the same methods. All methods may raise `KafkaException`, and `RuntimeError` after `close`. Use a
consumer in one thread only.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from tidemark.common.log import get_logger
from tidemark.streaming.ingest.jit_loader import SLOW_DECODING
from tidemark.streaming.ingest.record_batch import RecordBatch
from tidemark.streaming.wire.runs import Mask

try:
    from tidemark.streaming.ingest.native_consumer import NativeConsumer

    _native_error: ImportError | None = None
except ImportError as error:
    _native_error = error

log = get_logger(__name__)

CONSUMER_WARNING = f"{SLOW_DECODING}: librdkafka cannot be called; a message takes about 2 µs of CPU instead of 0.3 µs"


def open_consumer(
    config: Mapping[str, str], on_error: Callable[[KafkaError], None]
) -> "NativeConsumer | PythonConsumer":
    """Open a `NativeConsumer` if possible. Otherwise log a warning, and open a `PythonConsumer`, which is slower.

    Args:
        config: settings by librdkafka's names.
        on_error: called on the thread that consumes, with errors that are not errors of a message.

    Raises:
        KafkaException: librdkafka refuses the settings.
    """
    if _native_error is None:
        return NativeConsumer(config, on_error)
    log.warning(CONSUMER_WARNING, cause=str(_native_error))
    return PythonConsumer(config, on_error)


class PythonConsumer:
    """confluent-kafka's consumer, with the methods of `NativeConsumer`. `close` also runs if the object is deleted."""

    def __init__(self, config: Mapping[str, str], on_error: Callable[[KafkaError], None]) -> None:
        self._consumer = Consumer({**config, "error_cb": on_error})
        self.close = weakref.finalize(self, self._consumer.close)
        self.close.atexit = False

    def assign(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Read the partitions in `offsets` and no others.

        Args:
            offsets: topic, partition number and first offset of each partition.
        """
        self._check_open()
        self._consumer.assign([TopicPartition(topic, number, offset) for topic, number, offset in offsets])

    def unassign(self) -> None:
        """Stop reading all partitions."""
        self._check_open()
        self._consumer.unassign()

    @contextmanager
    def consume(self, max_messages: int, timeout_seconds: float) -> Iterator["PythonMessages"]:
        """Wait for `max_messages` messages, up to the time-out. Yields the messages that have arrived."""
        self._check_open()
        yield PythonMessages(self._consumer.consume(max_messages, timeout_seconds))

    def _check_open(self) -> None:
        if not self.close.alive:
            raise RuntimeError("the consumer is closed")


class PythonMessages:
    """Messages of several partitions: records and errors. Like `NativeMessages`, but reads the messages one by one.

    Attributes:
        codes: the error code of each message; 0 for a record.
        offsets: the Kafka offset of each message; -1 if it has none.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        errors = [message.error() for message in messages]
        self.codes = np.array([0 if error is None else error.code() for error in errors], np.int32)
        self.offsets = np.array(
            [-1 if message.offset() is None else message.offset() for message in messages], np.int64
        )

    def masks_by_partition(self) -> dict[tuple[str, int], Mask]:
        """(topic, partition number) -> mask of the messages of the partition. Some errors belong to no partition."""
        masks: dict[tuple[str, int], Mask] = {}
        for index, message in enumerate(self._messages):
            if message.topic() is not None:
                partition = message.topic(), message.partition()
                mask = masks.setdefault(partition, np.zeros(len(self._messages), np.bool_))
                mask[index] = True
        return masks

    def error(self, index: int) -> KafkaError:
        """The error at `index`, which must not be a record. Its text names the partition, if there is one."""
        message = self._messages[index]
        text = message.error().str()
        if message.topic() is not None:
            text = f"{message.topic()}[{message.partition()}]: {text}"
        return KafkaError(message.error().code(), text)

    def record_batch(self, chosen: Mask) -> RecordBatch:
        """The messages in the mask `chosen` as columns. All of them must be records of one partition."""
        records = [self._messages[index] for index in np.flatnonzero(chosen).tolist()]
        return RecordBatch.of(
            [record.key() for record in records],
            [record.value() for record in records],
            self.offsets[chosen],
            np.array([record.timestamp()[1] for record in records], np.int64),
        )
