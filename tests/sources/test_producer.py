"""Records on a real broker: the key, the partition, the order, and an outage."""

import random
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tidemark.app.stack.processes import KafkaServer, free_port
from tidemark.common.errors import Refused, TidemarkError, Unavailable
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import NO_TIME_LIMIT, RecordProducer, make_topic_producer
from tidemark.sources.topics import TopicPlan, Topics

# From the JVM client's own test of its hash, modulo 4 partitions.
JAVA_PARTITIONS = {"21": 0, "foobar": 2, "a-little-bit-longer-string": 3}


@pytest.fixture
def topic(connection: KafkaConnection, prefix: str) -> str:
    Topics(connection).create_missing([TopicPlan(prefix, 4, 3_600_000)])
    return prefix


def values(connection: KafkaConnection, topic: str, partition: int, count: int) -> list[bytes]:
    consumer = Consumer({**connection.client_settings(), "group.id": "test", "enable.auto.commit": "false"})
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
        assert producer.last_acknowledged == (partition, 0)
    assert producer.delivered_count == len(JAVA_PARTITIONS)


def test_records_outlast_an_outage_in_their_order(kafka: KafkaServer, connection: KafkaConnection, topic: str) -> None:
    """The broker is killed in the middle: every record arrives once and in place."""
    producer = RecordProducer(connection, topic, give_up_after=NO_TIME_LIMIT)
    sent = [str(number).encode() for number in range(300)]
    for value in sent[:100]:
        producer.send("21", value)
    producer.flush(60)
    kafka.kill()
    try:
        for value in sent[100:]:
            producer.send("21", value)
        assert producer.flush(0.5) == producer.poll_backlog() == 200
    finally:
        kafka.start()
    assert producer.flush(60) == 0
    assert values(connection, topic, JAVA_PARTITIONS["21"], 300) == sent


def test_the_limits_of_the_topic_are_those_of_the_producer(
    admin: AdminClient, connection: KafkaConnection, topic: str
) -> None:
    """Where somebody raised `max.message.bytes`, a record may have more than the megabyte that librdkafka lets pass."""
    entry = ConfigEntry("max.message.bytes", "5000000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(60)
    producer = make_topic_producer(connection, topic, give_up_after=60)
    assert producer.max_bytes == 5_000_000
    producer.send("21", random.Random(1).randbytes(producer.max_value_bytes("21")))
    producer.deliver(60)
    with pytest.raises(Refused, match=r"raise max\.message\.bytes"):
        producer.send("21", bytes(5_000_001))


def test_nothing_follows_a_record_that_the_broker_refused(
    admin: AdminClient, connection: KafkaConnection, topic: str
) -> None:
    """Of a fact of several rows the last has the ID: without one of the others it would look complete."""
    entry = ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(60)
    producer = RecordProducer(connection, topic, give_up_after=NO_TIME_LIMIT)
    acknowledged = list[bytes]()

    def sent(value: bytes) -> None:
        producer._produce(b"21", value, lambda error, _: None if error else acknowledged.append(value))

    sent(b"1")
    producer.deliver(60)
    sent(random.Random(1).randbytes(500_000))
    time.sleep(0.03)  # more than linger.ms: the next ones are a batch of their own
    with pytest.raises(TidemarkError, match="Message size too large"):
        _send_rest(sent, producer)
    assert acknowledged == [b"1"]


def _send_rest(sent: Callable[[bytes], None], producer: RecordProducer) -> None:
    sent(b"2")
    sent(b"3")
    producer.flush(60)


def test_a_hand_tool_gives_up_after_its_time() -> None:
    """Nobody listens: the record fails with the reason instead of waiting for ever."""
    producer = RecordProducer(KafkaConnection(f"127.0.0.1:{free_port()}"), "any", give_up_after=0.5)
    producer.send("events", b"x")
    with pytest.raises(Unavailable, match="refused"):
        producer.flush(60)
