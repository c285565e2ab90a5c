"""What was put off comes again, on a real Kafka and Postgres: the records as they were, and none but those."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from tests.sinks.given import advance, batch, stream
from tests.waiting import eventually
from tidemark.sinks.dead_letters import RequeueConfig, Requeuer
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.positions import PendingRequeue, RequeueStatus
from tidemark.sinks.postgres.store import Postgres
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming.core.effects import RequeuedRange, WriterRow
from tidemark.streaming.wire.records import FactRun, Join, Position, Rdata, Record, Retire, Void, encode, encode_row

HEADERS = [("own", b"1")]


@pytest.fixture
def facts(prefix: str, admin: AdminClient) -> str:
    """A topic with two partitions."""
    for made in admin.create_topics([NewTopic(f"{prefix}.facts", 2, 1)]).values():
        made.result(60)
    return f"{prefix}.facts"


@pytest.fixture
def config(connection: KafkaConnection, facts: str) -> RequeueConfig:
    return RequeueConfig(facts, connection.client_settings(), connection.producer_settings(), poll_seconds=0.05)


@pytest.fixture
def requeuer(config: RequeueConfig, store: Postgres, lease: Lease) -> Iterator[Requeuer]:
    """Not running: its steps are taken by the test."""
    requeuer = Requeuer(config, store, lease, lambda _: None)
    yield requeuer
    requeuer.close()


def fact(id: int, writer: str = "a", epoch: int = 1, text: str = "") -> Rdata:
    return Rdata(stream="s", writer=writer, epoch=epoch, id=id, row=encode_row(text))


def produce(connection: KafkaConnection, topic: str, *records: Record, **more: str) -> Producer:
    producer = Producer(connection.producer_settings() | more)
    if more:
        producer.init_transactions()
        producer.begin_transaction()
    for record in records:
        producer.produce(topic, key=record.stream, value=encode(record), partition=1, headers=HEADERS)
    producer.flush(60)
    return producer


def read(connection: KafkaConnection, topic: str, start: int, count: int) -> list[Message]:
    consumer = Consumer(connection.client_settings() | {"group.id": "test", "enable.auto.commit": "false"})
    consumer.assign([TopicPartition(topic, 1, start)])
    found: list[Message] = consumer.consume(count, timeout=60)
    assert consumer.consume(1, timeout=0.3) == []
    consumer.close()
    return found


def kept(first: int, last: int, **more: Any) -> PendingRequeue:
    return replace(PendingRequeue(1, "s", "a", 1, 1, first, last, 0), **more)


def test_the_writers_edges_come_again_as_they_were(connection: KafkaConnection, facts: str, requeuer: Requeuer) -> None:
    """Key, value, headers and partition are the same; other writers', other epochs' and markers stay where they are."""
    ours: list[Record] = [fact(1), Void(stream="s", writer="a", epoch=1, prev=1, id=2)]
    ours.append(FactRun(stream="s", writer="a", epoch=1, prev=2, ids=[3, 5], rows=[[encode_row(1), encode_row(2)], []]))
    ours.append(Position(stream="s", writer="a", epoch=1, prev=5, id=9))
    others: list[Record] = [fact(3, "b"), fact(3, epoch=2), Join(stream="s", writer="a", epoch=1, id=0)]
    others.append(Retire(stream="s", writer="a", epoch=1, id=9))
    mixed = [fact(77), *(record for pair in zip(ours, others, strict=True) for record in pair), fact(8)]
    produce(connection, facts, *mixed)
    assert requeuer.step(kept(1, 8)) == (kept(9, 8), None)
    again = read(connection, facts, 10, 4)
    assert [it.value() for it in again] == [encode(record) for record in ours]
    assert {(it.key(), it.partition()) for it in again} == {(b"s", 1)}
    assert all(it.headers() == HEADERS for it in again)


def test_what_was_aborted_does_not_come_again(connection: KafkaConnection, facts: str, requeuer: Requeuer) -> None:
    """Rule 1: it never happened, and would be evidence once it is produced without its transaction."""
    produce(connection, facts, fact(1))
    produce(connection, facts, fact(2), **{"transactional.id": facts}).abort_transaction()
    produce(connection, facts, fact(3))
    assert requeuer.step(kept(0, 3)) == (kept(4, 3), None)
    assert [it.value() for it in read(connection, facts, 4, 2)] == [encode(fact(1)), encode(fact(3))]


def test_a_step_is_bounded(
    connection: KafkaConnection, facts: str, config: RequeueConfig, store: Postgres, lease: Lease
) -> None:
    """In records, in bytes and in what is read: an hour of records of others is no reason to stop for an hour."""
    produce(connection, facts, *(fact(id, "ab"[id % 2], text="x" * 100) for id in range(1, 9)))
    counted: list[int] = []
    for bounded, following in (
        (replace(config, max_records=1), 2),
        (replace(config, max_bytes=250), 4),
        (replace(config, max_read=1), 1),
    ):
        requeuer = Requeuer(bounded, store, lease, counted.append)
        assert requeuer.step(kept(0, 7)) == (kept(following, 7), None)
        requeuer.close()
    assert counted == [1, 2, 0]


def test_what_is_gone_is_counted_and_the_rest_comes_again(
    connection: KafkaConnection, facts: str, requeuer: Requeuer, admin: AdminClient
) -> None:
    """Rule 9: by retention, or by a limit of size that is lower than it was; nothing is stepped over for that."""
    large = fact(4, text=os.urandom(3000).hex())
    produce(connection, facts, fact(1), fact(2), fact(3))
    produce(connection, facts, large)
    for deleted in admin.delete_records([TopicPartition(facts, 1, 2)]).values():
        deleted.result(60)
    lower = ConfigEntry("max.message.bytes", "300", incremental_operation=AlterConfigOpType.SET)
    for done in admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, facts, incremental_configs=[lower])]
    ).values():
        done.result(60)
    assert requeuer.step(kept(0, 3)) == (kept(4, 3, gone=2 + 1), None)
    assert [it.value() for it in read(connection, facts, 4, 1)] == [encode(fact(3))]


def test_records_that_are_not_there_yet_are_waited_for(
    connection: KafkaConnection, facts: str, requeuer: Requeuer
) -> None:
    """A broker that took over may not show for a moment what was read before: nothing is given up for that."""
    produce(connection, facts, fact(1))
    left, problem = requeuer.step(kept(0, 1))
    expected = "cannot read offset 1: open transaction, restarted broker, or lost records"
    assert (left, problem) == (kept(1, 1), expected)


def waiting(store: Postgres, token: int, *recalls: RequeuedRange, number: int = 1) -> None:
    """A batch that recalls."""
    store.apply(batch(number, stream("s", advance("a", 0, 3), requeues=[*recalls]), token=token))


def test_the_thread_brings_back_all_that_batches_have_recalled(
    connection: KafkaConnection, facts: str, config: RequeueConfig, store: Postgres, lease: Lease
) -> None:
    """Step by step, until nothing is left to do; a batch that is repeated recalls nothing twice."""
    produce(connection, facts, *(fact(id) for id in range(1, 6)))
    for _ in range(2):
        waiting(store, lease.token, RequeuedRange("a", 1, 1, 0, 2), RequeuedRange("a", 1, 1, 4, 4))
    counted: list[int] = []
    with Requeuer(replace(config, max_records=2), store, lease, counted.append):
        eventually(lambda: not store.conditions.requeues(), 30, lambda: f"nothing left of {store.pending_requeues()}")
    assert counted == [2, 1, 1]
    assert [it.value() for it in read(connection, facts, 5, 4)] == [encode(fact(id)) for id in (1, 2, 3, 5)]


def test_a_problem_is_noted_and_gone_when_it_is_over(
    facts: str, config: RequeueConfig, store: Postgres, lease: Lease, sql: psycopg.Connection
) -> None:
    """For whoever asks why a position holds; a recall that nothing hinders goes before."""
    waiting(store, lease.token, RequeuedRange("a", 1, 1, 0, 2))
    away = {"bootstrap.servers": "127.0.0.1:1", "log_level": "2"}
    with Requeuer(replace(config, client=away, producer=away, timeout_seconds=0.3), store, lease, lambda _: None):
        eventually(lambda: store.conditions.requeues()[0].problem, 30, lambda: "the problem stands there")
    ((number,),) = sql.execute("select number from tidemark.requeues").fetchall()
    waiting(store, lease.token, RequeuedRange("a", 1, 0, 5, 6), number=2)
    other, hindered = store.pending_requeues()
    assert (other.partition, hindered.number) == (0, number)
    store.note_requeue(replace(hindered, next=1))
    assert [(it.number, it.next) for it in store.pending_requeues()] == [(number, 1), (other.number, 5)]


def test_what_nobody_expected_is_told_to_whoever_supervises(
    connection: KafkaConnection, facts: str, config: RequeueConfig, store: Postgres, lease: Lease
) -> None:
    """The thread does not end in silence, with what was put off for ever behind."""
    produce(connection, facts, fact(1))
    waiting(store, lease.token, RequeuedRange("a", 1, 1, 0, 0))
    unexpected = ZeroDivisionError()

    def recalled(_: int) -> None:
        raise unexpected

    with Requeuer(config, store, lease, recalled) as requeuer:
        eventually(lambda: requeuer.failure, 30, lambda: "the failure")
    assert requeuer.failure is unexpected


@pytest.mark.parametrize("later", [WriterRow("a", 2, 3, is_retired=False), WriterRow("a", 1, 3, is_retired=True)])
def test_a_later_epoch_or_the_writers_end_takes_it_back(store: Postgres, lease: Lease, later: WriterRow) -> None:
    """Its records would be zombies; what they might have told was settled by its JOIN or RETIRE."""
    waiting(store, lease.token, RequeuedRange("a", 1, 1, 0, 2))
    store.apply(batch(2, stream("s", writers=[later]), token=lease.token))
    assert not store.pending_requeues()
    assert not store.conditions.requeues()


def test_what_is_given_up_stays_for_people(store: Postgres, lease: Lease) -> None:
    """Where the offsets mean nothing any more, none is read; the reason stands until the writer begins anew."""
    waiting(store, lease.token, RequeuedRange("a", 1, 1, 0, 2))
    store.give_up_requeues([("s", RequeuedRange("b", 1, 1, 10, 19))], "an operator accepted loss")
    assert store.pending_requeues() == []
    found = [(it.writer, it.gone, it.problem) for it in store.conditions.requeues()]
    assert found == [("a", 3, "an operator accepted loss"), ("b", 10, "an operator accepted loss")]
    assert all(isinstance(it, RequeueStatus) for it in store.conditions.requeues())
