"""Two readers of a topic: `RecordReader` reads the records between two offsets, and `Tail` follows the end of a topic.

Both readers start at the offsets that the caller gives. They use no consumer group and commit no offsets.
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
    """A record with its topic, partition and offset. `time`: Kafka's timestamp of the record, in ms since 1970."""

    topic: str
    partition: int
    offset: int
    time: int
    key: bytes | None
    value: bytes | None


class RecordReader:
    """Reads the records between two offsets of a partition. A context manager. Not thread-safe.

    Methods raise `Refused` if Kafka refuses the request, and `Unavailable` after another error or after `timeout`
    seconds without an answer.
    """

    def __init__(self, connection: KafkaConnection, timeout: float = 10.0) -> None:
        self._connection = connection
        self._timeout = timeout
        self._errors = ErrorListener(connection.bootstrap)
        self._partition_reader: PartitionReader | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._partition_reader is not None:
            self._partition_reader.close()

    def offset_range(self, topic: str, partition: int) -> tuple[int, int]:
        """Query the range `[oldest, end)` of the readable offsets of a partition.

        The end is the first offset of the oldest open Kafka transaction. Without an open transaction, the end is the
        offset that the next written record will get.
        """
        try:
            return self._reader().offsets(topic, partition)
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error

    def between(self, topic: str, partition: int, first_offset: int, end_offset: int) -> Iterator[RecordedMessage]:
        """Read the records with offsets in `[first, end)`. The range must lie within `offset_range`.

        Leaves out records of aborted Kafka transactions. If retention removes the next record, ends early without an
        error.
        """
        if first_offset >= end_offset:
            return
        try:
            with closing(self._reader().read(topic, partition, first_offset)) as messages:
                for message in messages:
                    if message is None or (offset := message.offset() or 0) >= end_offset:
                        return
                    yield RecordedMessage(
                        topic, partition, offset, message.timestamp()[1], message.key(), message.value()
                    )
                    if offset == end_offset - 1:
                        return
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error

    def _reader(self) -> PartitionReader:
        """Return the reader of all partitions. The first call makes the reader."""
        if self._partition_reader is None:
            # The pipeline also skips records of aborted transactions.
            self._partition_reader = PartitionReader(
                self._connection.client_settings(), self._errors, self._timeout, "read_committed"
            )
        return self._partition_reader


MAX_RECORDS_PER_READ = 2_000
"""The largest number of records that one call of `Tail.read` returns, after each RUN was split."""
_OFFSET_GONE_CODES = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


class Tail:
    """Reads the new records of a topic. A context manager that closes the consumer. Not thread-safe.

    Call `begin` first, and again after an error. Methods raise `Unavailable` and `Refused`.

    Args:
        connection: the address and the credentials of Kafka.
        topic: the topic of facts.
        timeout: the time limit of each request to the brokers, in seconds.
    """

    def __init__(self, connection: KafkaConnection, topic: str, timeout: float = 2.0) -> None:
        self.topic = topic
        self._connection = connection
        self._timeout = timeout
        self._errors = ErrorListener(connection.bootstrap)
        self._consumer: Consumer | None = None
        self._remaining_records: Iterator[tuple[int, Record]] = iter(())  # the rest of the last message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading. `begin` starts again."""
        self._remaining_records = iter(())
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def begin(self, offsets: Mapping[int, int]) -> dict[int, bool]:
        """Start to read all partitions. Stops an earlier read. Raises `TopicMissing` if the topic does not exist.

        Args:
            offsets: partition -> the first offset to read. Other partitions are read from their oldest record.

        Returns:
            Partition -> whether the first offset to read is 0, so that no record of the partition is missing.
        """
        self.close()
        self._errors.forget()
        try:
            return self._assign(self._connect(), offsets)
        except KafkaException as error:
            self.close()
            raise self._errors.explain(error.args[0]) from error

    def read(self, seconds: float) -> list[tuple[int, Record]]:
        """Wait up to `seconds` for records, and return at most `MAX_RECORDS_PER_READ` of them.

        Raises `Unavailable` if retention has removed records that were not read yet.

        Returns:
            Pairs of a partition and a record, in order within a partition; empty if no record came. Each RUN is split
            (`split_run`). Records that cannot be decoded are left out.
        """
        assert self._consumer is not None, "call begin first"
        try:
            records = [*islice(self._remaining_records, MAX_RECORDS_PER_READ)]
            if not records:
                first = self._consumer.poll(seconds)
                messages = [] if first is None else [first, *self._consumer.consume(MAX_RECORDS_PER_READ - 1, 0)]
                self._remaining_records = (record for message in messages for record in self._records(message))
                records = [*islice(self._remaining_records, MAX_RECORDS_PER_READ)]
            self._errors.raise_refusal()
        except KafkaException as error:
            raise self._errors.explain(error.args[0]) from error
        return records

    def _connect(self) -> Consumer:
        self._consumer = Consumer(
            {
                **self._connection.client_settings(),
                "group.id": "tidemark-tail",  # librdkafka requires a group; offsets are never committed
                "enable.auto.commit": "false",
                "enable.auto.offset.store": "false",
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",  # as in the pipeline
                "fetch.wait.max.ms": "50",
                "queued.max.messages.kbytes": "16384",
                "error_cb": self._errors,
            }
        )
        return self._consumer

    def _assign(self, consumer: Consumer, offsets: Mapping[int, int]) -> dict[int, bool]:
        """Assign all partitions to the consumer. The arguments and the result are as in `begin`."""
        topic = consumer.list_topics(self.topic, self._timeout).topics[self.topic]
        if topic.error is not None:
            raise TopicMissing(self.topic)
        begins_at_zero, assignments = {}, []
        for partition in topic.partitions:
            assignment = TopicPartition(self.topic, partition)
            earliest, _ = consumer.get_watermark_offsets(assignment, self._timeout, cached=False)
            assignment.offset = offsets.get(partition, earliest)
            begins_at_zero[partition] = assignment.offset == 0
            assignments.append(assignment)
        consumer.assign(assignments)
        return begins_at_zero

    def _records(self, message: Message) -> Iterator[tuple[int, Record]]:
        """Decode a message of Kafka, and split a RUN. Yields pairs of the partition and a record.

        Yields nothing if the message cannot be decoded.
        """
        if (error := message.error()) is not None:
            if is_group_refusal(error):
                return
            if error.code() in _OFFSET_GONE_CODES:
                raise Unavailable(
                    "Kafka",
                    self._connection.bootstrap,
                    f"retention of topic {self.topic} removed records that were not read yet",
                )
            raise KafkaException(error)
        with suppress(BadRecord):
            for record in split_run(read(message.value(), message.key(), Topic.FACTS)):
                yield message.partition(), record


def split_run(record: Record) -> Iterator[Record]:
    """Split a RUN into an RDATA for each row, and a VOID for each ID without rows. Yields another record unchanged."""
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
