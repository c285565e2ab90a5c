"""Records as they lie in Kafka, from one offset of a partition to another: for people who look back."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Self

from confluent_kafka import KafkaException

from tidemark.common.kafka_errors import ErrorListener
from tidemark.common.partition_reader import PartitionReader
from tidemark.sources.kafka import KafkaConnection


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """`time` is Kafka's, in ms since 1970."""

    topic: str
    partition: int
    offset: int
    time: int
    key: bytes | None
    value: bytes | None


class Recorded:
    """For one thread; a context manager. Methods raise `Unavailable` after `patience` seconds without an answer, and
    `Refused`."""

    def __init__(self, connection: KafkaConnection, patience: float = 10.0) -> None:
        self._connection = connection
        self._patience = patience
        self._errors = ErrorListener(connection.bootstrap)
        self._opened: PartitionReader | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._opened is not None:
            self._opened.close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The oldest offset that is kept, and that of the next record that will be written."""
        try:
            return self._reader().offsets(topic, partition)
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error

    def between(self, topic: str, partition: int, first: int, end: int) -> Iterator[RecordedMessage]:
        """Those in `[first, end)`, which lies within the bounds; fewer where retention is quicker."""
        if first >= end:
            return
        try:
            with closing(self._reader().read(topic, partition, first)) as messages:
                for it in messages:
                    if it is None or (offset := it.offset() or 0) >= end:
                        return
                    yield RecordedMessage(topic, partition, offset, it.timestamp()[1], it.key(), it.value())
                    if offset == end - 1:
                        return
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error

    def _reader(self) -> PartitionReader:
        if self._opened is None:
            # As the pipeline reads: what a writer's transaction aborted never happened.
            self._opened = PartitionReader(self._connection.client(), self._errors, self._patience, "read_committed")
        return self._opened
