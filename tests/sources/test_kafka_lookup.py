"""The end of a real topic: where reading begins, what comes, and what happens when the broker is away."""

from collections.abc import Iterator

import pytest

from tests.waiting import eventually
from tidemark.app.stack.processes import KafkaServer, free_port
from tidemark.common.errors import TopicMissing, Unavailable
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.kafka_lookup import MAX_RECORDS_PER_READ, Tail
from tidemark.sources.producer import RecordProducer
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.streaming.wire.records import FactRun, Rdata, Record, Void, encode, encode_row


@pytest.fixture
def connection(kafka: KafkaServer) -> KafkaConnection:
    return KafkaConnection(kafka.bootstrap_servers)


@pytest.fixture
def producer(connection: KafkaConnection, prefix: str) -> RecordProducer:
    Topics(connection).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    return RecordProducer(connection, prefix, give_up_after=60)


@pytest.fixture
def tail(connection: KafkaConnection, prefix: str) -> Iterator[Tail]:
    with Tail(connection, prefix) as tail:
        yield tail


def fact(id: int) -> Record:
    return Rdata(stream="s", writer="w", id=id, row=encode_row(id))


def sent(producer: RecordProducer, *values: bytes) -> None:
    for value in values:
        producer.send("s", value)
    assert producer.flush(60) == 0


def read(tail: Tail, count: int) -> list[object]:
    """The IDs of the next `count` records."""
    found: list[object] = []

    def enough() -> bool:
        found.extend(getattr(record, "id", None) for _, record in tail.read(0.2))
        return len(found) >= count

    eventually(enough)
    return found


def test_records_come_from_the_given_place_on(producer: RecordProducer, tail: Tail) -> None:
    """It is told whether anything came before that place, and bad records count for nothing."""
    sent(producer, encode(fact(1)), b"not json", encode(fact(2)))
    assert tail.begin({}) == {0: True}
    assert read(tail, 2) == [1, 2]
    sent(producer, encode(fact(3)))
    assert read(tail, 1) == [3]
    assert tail.begin({0: 2}) == {0: False}
    assert read(tail, 2) == [2, 3]
    assert tail.read(0.01) == []


def test_facts_of_one_record_come_one_by_one(producer: RecordProducer, tail: Tail) -> None:
    """A RUN is given as the records that say the same, each row of a fact with its own."""
    one, other = encode_row("a"), encode_row("b")
    sent(
        producer,
        encode(FactRun(stream="s", writer="w", epoch=2, prev=3, ids=[5, 6, 9], rows=[[one], [], [one, other]])),
    )
    assert tail.begin({}) == {0: True}
    assert eventually(lambda: tail.read(0.2)) == [
        (0, Rdata(stream="s", writer="w", epoch=2, prev=3, id=5, row=one)),
        (0, Void(stream="s", writer="w", epoch=2, prev=5, id=6)),
        (0, Rdata(stream="s", writer="w", epoch=2, id="batch", row=one)),
        (0, Rdata(stream="s", writer="w", epoch=2, prev=6, id=9, row=other)),
    ]


def test_one_record_of_many_facts_is_given_in_parts(producer: RecordProducer, tail: Tail) -> None:
    """Whoever takes them keeps an event loop waiting meanwhile; none is lost, also where reading begins anew."""
    many = 2 * MAX_RECORDS_PER_READ + 5
    sent(producer, encode(FactRun(stream="s", writer="w", prev=0, ids=[*range(1, many + 1)], rows=[[]] * many)))
    sent(producer, encode(fact(many + 1)))
    tail.begin({})
    assert [it.id for _, it in eventually(lambda: tail.read(0.2)) if isinstance(it, Void)] == [
        *range(1, MAX_RECORDS_PER_READ + 1)
    ]
    tail.begin({})
    parts: list[list[object]] = []
    while sum(map(len, parts)) <= many:
        parts.append([getattr(record, "id", None) for _, record in tail.read(0.2)])
    assert [id for part in parts for id in part] == [*range(1, many + 2)]
    assert max(map(len, parts)) == MAX_RECORDS_PER_READ


def test_place_that_is_gone_is_told(producer: RecordProducer, tail: Tail) -> None:
    """What retention removed cannot be read: to begin anew is the caller's business."""
    sent(producer, encode(fact(1)))
    tail.begin({0: 17})
    with pytest.raises(Unavailable, match="retention"):
        eventually(lambda: tail.read(0.2))


def test_topic_that_is_missing_is_told(connection: KafkaConnection) -> None:
    """Nothing is created by asking for it."""
    with Tail(connection, "nowhere") as tail, pytest.raises(TopicMissing):
        tail.begin({})


def test_broker_that_is_away_is_told() -> None:
    """With its address and why, after the time limit that was given."""
    nowhere = KafkaConnection(f"127.0.0.1:{free_port()}")
    with Tail(nowhere, "t", timeout=0.5) as tail, pytest.raises(Unavailable, match="refused"):
        tail.begin({})
