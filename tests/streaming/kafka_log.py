"""A topic of a real broker, written as a test wants it, and what a reader of ranges has gone through."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.streaming.builders import contents
from tests.waiting import eventually
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.ingest.consumer import PythonConsumer, PythonMessages
from tidemark.streaming.ingest.native_consumer import NativeConsumer, NativeMessages
from tidemark.streaming.ingest.ranges import EndOffsets
from tidemark.streaming.ingest.record_batch import RecordBatch

PARTITIONS = 2


class Log:
    """A topic of its own; records are numbers."""

    def __init__(self, connection: KafkaConnection, name: str, partitions: int = PARTITIONS) -> None:
        Topics(connection).create_missing([TopicPlan(name, partitions, 3_600_000)])
        self.connection, self.name = connection, name
        self.plain = Producer(connection.producer_settings())
        self.careful = Producer({**connection.producer_settings(), "transactional.id": name})
        self.careful.init_transactions(30)

    def send(self, *numbers: int, partition: int = 0) -> None:
        for number in numbers:
            self.plain.produce(self.name, partition=partition, key=b"k", value=str(number).encode())
        assert self.plain.flush(30) == 0

    def begin(self, *numbers: int, partition: int = 0) -> None:
        self.careful.begin_transaction()
        for number in numbers:
            self.careful.produce(self.name, partition=partition, value=str(number).encode())
        self.careful.flush(30)

    def commit(self) -> None:
        self.careful.commit_transaction(30)
        self._ended()

    def abort(self) -> None:
        self.careful.abort_transaction(30)
        self._ended()

    def _ended(self) -> None:
        """Brokers write the mark of a transaction's end after they have acknowledged it."""
        topics = Topics(self.connection)

        def marked() -> bool:
            ends = topics.end_offsets({self.name: PARTITIONS})
            return all(self.end(partition) == end for (_, partition), end in ends.items())

        eventually(marked)

    def end(self, partition: int = 0) -> int:
        return EndOffsets(self.connection.client_settings()).fetch({self.name: {partition: 0}})[self.name][partition]


def values(part: RecordBatch) -> list[bytes]:
    return [value for _, value in contents(part)]


class Seen:
    """How many messages a consumer has handed over."""

    def __init__(self, patch: pytest.MonkeyPatch, consumer: type[NativeConsumer | PythonConsumer]) -> None:
        self.count, consume = 0, consumer.consume

        @contextmanager
        def counted(*arguments: Any) -> Iterator[NativeMessages | PythonMessages]:
            with consume(*arguments) as messages:
                self.count += len(messages.codes)
                yield messages

        patch.setattr(consumer, "consume", counted)
