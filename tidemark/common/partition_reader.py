"""A Kafka consumer that reads any partition from any offset on: for what was read before, and is looked at again.

One thread at a time. All of it raises `KafkaException` or `Unavailable`; after an error the owner closes it.
"""

import time
from collections.abc import Generator, Iterator, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from tidemark.common.errors import Unavailable
from tidemark.common.kafka_errors import ErrorListener, concerns_group


class PartitionReader:
    """A consumer that reads any partition from any offset on; `patience` (s) without progress is `Unavailable`."""

    def __init__(self, client: Mapping[str, str], errors: ErrorListener, patience: float, isolation: str) -> None:
        self._where = client["bootstrap.servers"]
        self._patience = patience
        self._consumer = Consumer(
            {
                **client,
                "group.id": "tidemark-dead-letters",  # wanted by librdkafka; nothing is ever committed to it
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
        """The oldest offset, and that of the next record that will be written.

        Waits within the patience until that lies behind `known`, where a record was: a broker that has just begun does
        not show its newest records at once.
        """
        place, deadline = TopicPartition(topic, partition), time.monotonic() + self._patience
        while True:
            found: tuple[int, int] = self._consumer.get_watermark_offsets(place, timeout=self._patience, cached=False)
            if found[1] > known or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def read(self, topic: str, partition: int, start: int) -> Generator[Message | None]:
        """Records from `start` on; None at the end of the partition; stops where retention overtakes the reading."""
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
