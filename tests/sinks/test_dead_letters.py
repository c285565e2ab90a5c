"""Dead letters, on a real Kafka: the record as it was, and why and from where it came."""

import os
import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.sinks.given import batch, rejected
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.backoff import wait_out
from tidemark.common.errors import TopicMissing, Unavailable
from tidemark.sinks.dead_letters import MAX_DETAIL_LENGTH, DeadLetterResult, DeadLetters, DeadLettersConfig
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.publisher import Publisher
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis
from tidemark.sources.kafka import KafkaConnection


@pytest.fixture
def facts(prefix: str, admin: AdminClient) -> str:
    """A topic with two partitions, and the dead letters beside it with a small limit of record size."""
    topics = [
        NewTopic(f"{prefix}.facts", 2, 1),
        NewTopic(f"{prefix}.dead", 1, 1, config={"max.message.bytes": "2000"}),
    ]
    for made in admin.create_topics(topics).values():
        made.result(60)
    return f"{prefix}.facts"


@pytest.fixture
def dead(prefix: str) -> str:
    return f"{prefix}.dead"


@pytest.fixture
def dead_letters(connection: KafkaConnection, dead: str) -> Iterator[DeadLetters]:
    with DeadLetters(
        DeadLettersConfig(dead, connection.client_settings(), connection.producer_settings())
    ) as dead_letters:
        yield dead_letters


def produce(connection: KafkaConnection, topic: str, values: list[bytes | None], partition: int = 0) -> None:
    producer = Producer(connection.producer_settings())
    for n, value in enumerate(values):
        producer.produce(topic, key=f"key-{n}".encode(), value=value, partition=partition, headers=[("own", b"1")])
    assert producer.flush(60) == 0


def read(connection: KafkaConnection, topic: str, count: int) -> list[Message]:
    consumer = Consumer(connection.client_settings() | {"group.id": "test", "enable.auto.commit": "false"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Message] = consumer.consume(count, timeout=60)
    extra: list[Message] = consumer.consume(1, timeout=0.3)
    consumer.close()
    assert len(found) == count
    assert extra == []
    return found


def test_record_is_sent_on_unchanged(
    connection: KafkaConnection, facts: str, dead: str, dead_letters: DeadLetters
) -> None:
    """Rule 5: key, value (none at all too) and headers are the original ones; reason and origin stand in headers."""
    produce(connection, facts, [b"good", b"\xff\x00 bad", None], partition=1)
    assert dead_letters.send([rejected(facts, "not_json", [1, 2], partition=1)]) == DeadLetterResult(sent_count=2)
    bad, none = read(connection, dead, 2)
    assert (bad.key(), bad.value(), none.value()) == (b"key-1", b"\xff\x00 bad", None)
    origin = [("reason", b"not_json"), ("topic", facts.encode()), ("partition", b"1"), ("offset", b"1")]
    assert (bad.headers() or [])[:5] == [("own", b"1"), *origin]


RUN = b'{"kind":"RUN","stream":"key-%d","writer":"w","prev":-1,"ids":[-2,-5,%d],"rows":[[{}],[],[1,2]]}'
VOID = b'{"kind":"VOID","stream":"key-%d","writer":"w","prev":2,"id":5}'


def test_a_letter_says_which_fact_of_its_record_is_at_fault(
    connection: KafkaConnection, facts: str, dead: str, dead_letters: DeadLetters
) -> None:
    """What the record shows by itself, and else the first ID that the stream contradicts; nothing where all of it is
    refused, and never more than a person reads."""
    values = [RUN % (0, -4), RUN % (1, -7), VOID % 2, VOID % 3, RUN % (4, 0), b"[]"]
    produce(connection, facts, [*values])
    producer = Producer(connection.producer_settings())
    producer.produce(facts, key=b"k" * 1500, value=VOID % 6, partition=0)
    assert producer.flush(60) == 0
    dead_letters.send(
        [
            rejected(facts, "id_not_beyond_prev", [0, 4]),
            rejected(facts, "conflict", [1, 2], ids=[-5, 5]),
            rejected(facts, "zombie", [3]),
            rejected(facts, "not_an_object", [5]),
            rejected(facts, "key_mismatch", [6]),
        ]
    )
    found = {
        headers["offset"]: headers.get("detail", b"").decode()
        for message in read(connection, dead, len(values) + 1)
        if (headers := dict(message.headers() or ()))
    }
    assert found[b"0"] == "ids[2] -4 is not beyond prev -5"
    assert found[b"1"] == "ids[1] -5 contradicts what was settled before"
    assert found[b"2"] == "id 5 contradicts what was settled before"
    assert found[b"3"] == ""
    assert found[b"4"] == "ids[2] 0 is not beyond prev -5"
    assert found[b"5"]
    assert len(found[b"6"]) == MAX_DETAIL_LENGTH


def test_far_apart_records_are_all_found(
    connection: KafkaConnection, facts: str, dead: str, dead_letters: DeadLetters
) -> None:
    """Rule 5: dense runs and single records of several partitions and reasons arrive, each with its own reason."""
    for partition in (0, 1):
        produce(connection, facts, [str(n).encode() for n in range(6000)], partition)
    wanted = [rejected(facts, "zombie", range(100, 200)), rejected(facts, "conflict", [5, 150, 5990])]
    wanted[0] = rejected(facts, "zombie", [n for n in range(100, 200) if n != 150])
    assert dead_letters.send([*wanted, rejected(facts, "bad_name", [0, 5999], partition=1)]).sent_count == 104
    found = {
        (headers["partition"], headers["offset"]): (headers["reason"], message.value())
        for message in read(connection, dead, 104)
        if (headers := dict(message.headers() or ()))
    }
    assert found[b"0", b"150"] == (b"conflict", b"150")
    assert found[b"0", b"151"] == (b"zombie", b"151")
    assert found[b"0", b"5990"] == (b"conflict", b"5990")
    assert found[b"1", b"5999"] == (b"bad_name", b"5999")


def test_record_that_retention_removed_leaves_its_origin(
    connection: KafkaConnection, facts: str, dead: str, dead_letters: DeadLetters, admin: AdminClient
) -> None:
    """Rule 5: a record that is gone, or too large for the dead letters, leaves a letter without its value."""
    produce(connection, facts, [b"0", b"1", b"2", os.urandom(5000)])
    for deleted in admin.delete_records([TopicPartition(facts, 0, 2)]).values():
        deleted.result(60)
    assert dead_letters.send([rejected(facts, "not_json", [0, 2, 3, 77])]) == DeadLetterResult(
        sent_count=4, stripped_count=3
    )
    found = {dict(it.headers() or ())["offset"]: it for it in read(connection, dead, 4)}
    assert found[b"2"].value() == b"2"
    for offset in (b"0", b"3", b"77"):
        assert found[offset].value() == b""
        assert "gone" in dict(found[offset].headers() or ())
    causes = {offset: dict(found[offset].headers() or ())["gone"] for offset in (b"0", b"3", b"77")}
    assert causes == {
        b"0": b"removed by retention",
        b"3": b"too large for this topic",
        b"77": b"not in Kafka: the partition ends before the offset",
    }


def test_offset_without_a_record_is_not_said_to_be_removed_by_retention(
    connection: KafkaConnection, facts: str, dead: str, dead_letters: DeadLetters
) -> None:
    """The offset of a commit marker has no record, and the partition goes on behind it."""
    producer = Producer({**connection.producer_settings(), "transactional.id": facts})
    producer.init_transactions(60)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(facts, b"{}", partition=0)
        producer.commit_transaction(60)
    assert dead_letters.send([rejected(facts, "not_json", [0, 1, 2, 3])]) == DeadLetterResult(
        sent_count=4, stripped_count=2
    )
    found = {
        headers["offset"]: headers.get("gone")
        for it in read(connection, dead, 4)
        if (headers := dict(it.headers() or ()))
    }
    missing = b"not in Kafka: the partition has no record with the offset"
    assert found == {b"0": None, b"1": missing, b"2": None, b"3": missing}


def test_missing_topic_is_named(connection: KafkaConnection, facts: str) -> None:
    """Dead letters without their topic stop the pipeline with what to do."""
    produce(connection, facts, [b"0"])
    config = DeadLettersConfig(f"{facts}.none", connection.client_settings(), connection.producer_settings())
    with DeadLetters(config) as dead_letters, pytest.raises(TopicMissing, match="none"):
        dead_letters.send([rejected(facts, "not_json", [0])])


def test_kafka_that_was_away_is_asked_again(
    connection: KafkaConnection, facts: str, dead: str, kafka: KafkaServer
) -> None:
    """A broker that is away, or back and not yet itself, is unavailable, and a later call sends everything."""
    produce(connection, facts, [b"0", b"1"])
    with DeadLetters(
        DeadLettersConfig(dead, connection.client_settings(), connection.producer_settings(), timeout_seconds=1.0)
    ) as dead_letters:
        kafka.kill()
        try:
            with pytest.raises(Unavailable):
                dead_letters.send([rejected(facts, "not_json", [0, 1])])
        finally:
            kafka.start()
    with DeadLetters(
        DeadLettersConfig(dead, connection.client_settings(), connection.producer_settings())
    ) as dead_letters:
        dead_lettered = wait_out(lambda: dead_letters.send([rejected(facts, "not_json", [0, 1])]), threading.Event())
        assert dead_lettered.sent_count == 2
    assert [it.value() for it in read(connection, dead, 2)] == [b"0", b"1"]


def test_a_record_that_the_broker_does_not_show_yet_is_waited_for(
    connection: KafkaConnection, facts: str, dead: str, dead_letters: DeadLetters
) -> None:
    """As after a start that was no clean one: what the query has read was there, so it is not gone."""
    produce(connection, facts, [b"0"])
    later = threading.Timer(1.0, produce, (connection, facts, [b"1"]))
    later.start()
    assert dead_letters.send([rejected(facts, "not_json", [0, 1])]).stripped_count == 0
    later.join()
    assert [it.value() for it in read(connection, dead, 2)] == [b"0", b"1"]


def test_letters_that_a_query_left_are_sent_by_the_next(
    connection: KafkaConnection,
    facts: str,
    dead: str,
    dead_letters: DeadLetters,
    store: Postgres,
    shown: Redis,
    lease: Lease,
) -> None:
    """Rule 5: killed between the commit and the dead letters: nobody brings that batch again, and its record still
    arrives. Once: what is sent is not listed any more."""
    produce(connection, facts, [b"first", b"second"])
    publisher = Publisher(store, [Mirror(store, shown, lease)], dead_letters, lease, threading.Event())
    for query, offset in (("first", 0), ("second", 1)):
        lines = [rejected(facts, "not_json", [offset])]
        publisher.commit(batch(1, token=lease.token, query=query, rejected=lines))
    publisher.send_unsent_dead_letters()
    assert [letter.value() for letter in read(connection, dead, 2)] == [b"first", b"second"]
    assert store.unsent_dead_letters() == []
