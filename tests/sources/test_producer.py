"""Records on a real broker: the key, the partition, the order, and an outage."""

import pytest
from confluent_kafka import Consumer, TopicPartition

from tidemark.app.stack.server import free_port
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import FOR_EVER, RecordProducer
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.errors import Unavailable

# From the JVM client's own test of its hash, modulo 4 partitions.
JAVA_PARTITIONS = {"21": 0, "foobar": 2, "a-little-bit-longer-string": 3}


@pytest.fixture
def topic(connection: KafkaConnection, prefix: str) -> str:
    Topics(connection).create_missing([TopicPlan(prefix, 4, 3_600_000)])
    return prefix


def values(connection: KafkaConnection, topic: str, partition: int, count: int) -> list[bytes]:
    consumer = Consumer({**connection.client(), "group.id": "test", "enable.auto.commit": "false"})
    consumer.assign([TopicPartition(topic, partition, 0)])
    try:
        return [message.value() for message in consumer.consume(count, timeout=60)]
    finally:
        consumer.close()


def test_a_stream_lands_where_a_java_producer_would_put_it(connection: KafkaConnection, topic: str) -> None:
    """Writers in other languages share our streams: two partitions of one stream would have no order."""
    producer = RecordProducer(connection, topic, give_up_after=60)
    for stream, partition in JAVA_PARTITIONS.items():
        producer.send(stream, b"x")
        assert producer.flush(60) == 0
        assert producer.last == (partition, 0)
    assert producer.delivered == len(JAVA_PARTITIONS)


def test_records_outlast_an_outage_in_their_order(kafka: KafkaServer, connection: KafkaConnection, topic: str) -> None:
    """The broker is killed in the middle: every record arrives once and in place."""
    producer = RecordProducer(connection, topic, give_up_after=FOR_EVER)
    sent = [str(number).encode() for number in range(300)]
    for value in sent[:100]:
        producer.send("21", value)
    producer.flush(60)
    kafka.kill()
    try:
        for value in sent[100:]:
            producer.send("21", value)
        assert producer.flush(0.5) == producer.backlog() == 200
    finally:
        kafka.start()
    assert producer.flush(60) == 0
    assert values(connection, topic, JAVA_PARTITIONS["21"], 300) == sent


def test_a_hand_tool_gives_up_after_its_time() -> None:
    """Nobody listens: the record fails with the reason instead of waiting for ever."""
    producer = RecordProducer(KafkaConnection(f"127.0.0.1:{free_port()}"), "any", give_up_after=0.5)
    producer.send("events", b"x")
    with pytest.raises(Unavailable, match="refused"):
        producer.flush(60)
