"""A Kafka consumer that reads one partition from any offset: for records that were read before and are needed again.

Not thread-safe. All methods raise `KafkaException` or `Unavailable`; after an error the owner closes the reader.
"""

import time
from collections.abc import Generator, Iterator, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from tidemark.common.errors import Unavailable
from tidemark.common.kafka_errors import ErrorListener, concerns_group


class PartitionReader:
    """Reads any partition from any offset.

    Args:
        client: settings of librdkafka.
        errors: remembers why the brokers are unreachable.
        patience: seconds without progress after which a method raises `Unavailable`.
        isolation: `read_committed` or `read_uncommitted`.
    """

    def __init__(self, client: Mapping[str, str], errors: ErrorListener, patience: float, isolation: str) -> None:
        self._where = client["bootstrap.servers"]
        self._patience = patience
        self._consumer = Consumer(
            {
                **client,
                "group.id": "tidemark-dead-letters",  # librdkafka needs a group; offsets are never committed
                "enable.auto.commit": "false",
                "enable.auto.offset.store": "false",
                "enable.partition.eof": "true",
                "auto.offset.reset": "error",
                "isolation.level": isolation,
                "error_cb": errors,
            }
        )

    def close(self) -> None:
        self._consumer.close()

    def offsets(self, topic: str, partition: int, known: int = -1) -> tuple[int, int]:
        """The oldest offset, and the offset of the next record.

        Args:
            known: offset of a record that was seen before. The method waits, at most for the patience, until the next
                offset is beyond it: a broker that has just started may not show its newest records.
        """
        target, deadline = TopicPartition(topic, partition), time.monotonic() + self._patience
        while True:
            offsets: tuple[int, int] = self._consumer.get_watermark_offsets(
                target, timeout=self._patience, cached=False
            )
            if offsets[1] > known or time.monotonic() > deadline:
                return offsets
            time.sleep(0.1)

    def read(self, topic: str, partition: int, start: int) -> Generator[Message | None]:
        """Yield records from the offset `start`, then None at the end of the partition.

        Ends without None if retention removes records that are not read yet.
        """
        self._consumer.assign([TopicPartition(topic, partition, start)])
        try:
            yield from self._records(start)
        finally:
            self._consumer.unassign()

    def _records(self, start: int) -> Iterator[Message | None]:
        deadline = time.monotonic() + self._patience
        while True:
            records = self._consumer.consume(num_messages=500, timeout=0.2)
            if records:
                deadline = time.monotonic() + self._patience
            elif time.monotonic() > deadline:
                raise Unavailable("Kafka", self._where, f"no answer for records from offset {start}")
            for record in records:
                error = record.error()
                if error is None:
                    yield record
                elif error.code() == KafkaError._PARTITION_EOF:
                    yield None
                    return
                elif concerns_group(error):
                    continue
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    return
                else:
                    raise KafkaException(error)
