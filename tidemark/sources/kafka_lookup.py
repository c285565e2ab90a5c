"""Readers of a topic: `RecordReader` reads records between two offsets of a partition, `Tail` follows the end of a
topic.

Neither has a consumer group or commits offsets: the caller gives the offsets, and starts again after every error.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from tidemark.common.errors import BadRecord, TopicMissing, Unavailable
from tidemark.common.kafka import ErrorListener, PartitionReader, is_group_refusal
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming.wire.records import FactRun, Rdata, Record, Topic, Void, read


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A record with its position. `time`: Kafka's timestamp, in ms since 1970."""

    topic: str
    partition: int
    offset: int
    time: int
    key: bytes | None
    value: bytes | None


class RecordReader:
    """For one thread; a context manager. Methods raise `Unavailable` after `timeout` seconds without an answer, and
    `Refused`."""

    def __init__(self, connection: KafkaConnection, timeout: float = 10.0) -> None:
        self._connection = connection
        self._timeout = timeout
        self._errors = ErrorListener(connection.bootstrap)
        self._opened: PartitionReader | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._opened is not None:
            self._opened.close()

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The oldest available offset, and the offset of the next record that will be written."""
        try:
            return self._reader().offsets(topic, partition)
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error

    def between(self, topic: str, partition: int, first: int, end: int) -> Iterator[RecordedMessage]:
        """The records in `[first, end)`, within `bounds`. Records that retention removes meanwhile are missing."""
        if first >= end:
            return
        try:
            with closing(self._reader().read(topic, partition, first)) as messages:
                for message in messages:
                    if message is None or (offset := message.offset() or 0) >= end:
                        return
                    yield RecordedMessage(
                        topic, partition, offset, message.timestamp()[1], message.key(), message.value()
                    )
                    if offset == end - 1:
                        return
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error

    def _reader(self) -> PartitionReader:
        if self._opened is None:
            # The pipeline also skips records of aborted transactions.
            self._opened = PartitionReader(self._connection.client(), self._errors, self._timeout, "read_committed")
        return self._opened


AT_ONCE = 2_000
"""The largest number of records that one `read` returns: a RUN has any number of edges, each a record."""
_GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


class Tail:
    """For one thread; a context manager. Methods raise `Unavailable`, `Refused` and `TopicMissing`; call `begin` again
    afterwards.

    `timeout`: time limit of each request to the brokers, in seconds.
    """

    def __init__(self, connection: KafkaConnection, topic: str, timeout: float = 2.0) -> None:
        self.topic = topic
        self._connection = connection
        self._timeout = timeout
        self._errors = ErrorListener(connection.bootstrap)
        self._consumer: Consumer | None = None
        self._left: Iterator[tuple[int, Record]] = iter(())  # the rest of the last message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def begin(self, offsets: Mapping[int, int]) -> dict[int, bool]:
        """Read each partition from its offset in `offsets`; a partition without one from its start.

        Returns:
            For every partition, whether the partition never had a record before that offset.
        """
        self.close()
        self._errors.forget()
        try:
            return self._assign(self._connected(), offsets)
        except KafkaException as error:
            self.close()
            raise self._errors.explain(error.args[0]) from error

    def read(self, seconds: float) -> list[tuple[int, Record]]:
        """Wait up to `seconds` for records, and return the new ones with their partitions; none if none arrived.

        The records of a partition are in order and complete, but bad records are left out. Each edge of a RUN is a
        record.
        """
        assert self._consumer is not None, "begin first"
        try:
            records = [*islice(self._left, AT_ONCE)]
            if not records:
                first = self._consumer.poll(seconds)
                messages = [] if first is None else [first, *self._consumer.consume(AT_ONCE - 1, 0)]
                self._left = (record for message in messages for record in self._records(message))
                records = [*islice(self._left, AT_ONCE)]
            self._errors.raise_refusal()
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error
        return records

    def _connected(self) -> Consumer:
        self._consumer = Consumer(
            {
                **self._connection.client(),
                "group.id": "tidemark-tail",  # librdkafka requires it; offsets are never committed
                "enable.auto.commit": "false",
                "enable.auto.offset.store": "false",
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",  # same as the pipeline
                "fetch.wait.max.ms": "50",
                "queued.max.messages.kbytes": "16384",
                "error_cb": self._errors,
            }
        )
        return self._consumer

    def _assign(self, consumer: Consumer, offsets: Mapping[int, int]) -> dict[int, bool]:
        topic = consumer.list_topics(self.topic, self._timeout).topics[self.topic]
        if topic.error is not None:
            raise TopicMissing(self.topic)
        whole, places = {}, []
        for partition in topic.partitions:
            place = TopicPartition(self.topic, partition)
            earliest, _ = consumer.get_watermark_offsets(place, self._timeout, cached=False)
            place.offset = offsets.get(partition, earliest)
            whole[partition] = place.offset == 0
            places.append(place)
        consumer.assign(places)
        return whole

    def _records(self, message: Message) -> Iterator[tuple[int, Record]]:
        if (error := message.error()) is not None:
            if is_group_refusal(error):
                return
            if error.code() in _GONE:
                raise Unavailable("Kafka", self._connection.bootstrap, "retention removed records before we read them")
            raise KafkaException(error)
        with suppress(BadRecord):
            for record in singles(read(message.value(), message.key(), Topic.FACTS)):
                yield message.partition(), record


def singles(record: Record) -> Iterator[Record]:
    """Split `record` into records of one edge each."""
    if not isinstance(record, FactRun):
        yield record
        return
    stream, writer, epoch = record.stream, record.writer, record.epoch
    for (prev, id), rows in zip(pairwise([record.prev, *record.ids]), record.rows, strict=True):
        if not rows:
            yield Void(stream=stream, writer=writer, epoch=epoch, prev=prev, id=id)
            continue
        for row in rows[:-1]:
            yield Rdata(stream=stream, writer=writer, epoch=epoch, id="batch", row=row)
        yield Rdata(stream=stream, writer=writer, epoch=epoch, prev=prev, id=id, row=rows[-1])
