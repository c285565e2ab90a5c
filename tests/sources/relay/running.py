"""A relay in a thread beside real servers, and what a test asks of it. The fixtures are those of `conftest`."""

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from tests.sources.relay.judge import Judge
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.postgres_session import Dsn
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import NO_TIME_LIMIT, make_topic_producer
from tidemark.sources.relay.queries import session_of
from tidemark.sources.relay.relay import AppendRelay, RelayMetrics
from tidemark.sources.topics import TopicPlan, Topics


@pytest.fixture
def topic(kafka: KafkaServer, prefix: str) -> str:
    Topics(KafkaConnection(kafka.bootstrap_servers)).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    return prefix


@pytest.fixture
def judge(kafka: KafkaServer, topic: str) -> Judge:
    return Judge(KafkaConnection(kafka.bootstrap_servers), topic)


@pytest.fixture
def sql(ready: str) -> Iterator[psycopg.Connection]:
    """A session of the service."""
    with psycopg.connect(ready, autocommit=True) as connection:
        connection.execute("select tidemark.create_stream('orders')")
        yield connection


class Running:
    """A relay in a thread; `failure` is what it ended with."""

    def __init__(self, dsn: Dsn, kafka: KafkaServer, topic: str, writer: str, most_facts: int) -> None:
        self.halt = threading.Event()
        self.metrics = RelayMetrics(CollectorRegistry())
        self.failure: BaseException | None = None
        connection = KafkaConnection(kafka.bootstrap_servers)
        self._session = session_of(dsn, "tidemark relay")
        self.relay = AppendRelay(
            self._session,
            lambda: make_topic_producer(connection, topic, NO_TIME_LIMIT),
            writer,
            self.metrics,
            self.halt,
            most_facts,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._session:
                self.relay.run()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def stop(self) -> None:
        self.halt.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def ended(self) -> BaseException | None:
        self._thread.join(60)
        return self.failure

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


Run = Callable[..., Running]


@pytest.fixture
def run(ready: str, kafka: KafkaServer, topic: str) -> Iterator[Run]:
    """Starts relays, which end with the test."""
    started: list[Running] = []

    def run(writer: str = "shop", dsn: Dsn = ready, most_facts: int = 1) -> Running:
        started.append(Running(dsn, kafka, topic, writer, most_facts))
        return started[-1]

    yield run
    for each in started:
        each.stop()


def settled(sql: psycopg.Connection) -> bool:
    """Whether everything that was given out is decided and in Kafka."""
    row = sql.execute(
        "select bool_and(abs(floor) = abs(coalesce(pg_sequence_last_value(ids), s.after)))"
        " from tidemark.append_progress join tidemark.append_streams s using (number)"
    ).fetchone()
    return row is not None and bool(row[0])


def agrees(judge: Judge, sql: psycopg.Connection, facts: set[int]) -> None:
    """The position of the database has passed every ID, and the facts are these, each counted once."""
    verdict = judge.verdict()
    row = sql.execute("select pg_sequence_last_value('tidemark.append_ids_1')").fetchone()
    assert row is not None
    assert verdict.announced.get("orders", set()) == facts
    assert verdict.position("orders", "shop") == row[0]
    moves = verdict.effects["orders"].advances
    assert sum(move.facts for move in moves) == len(facts)
    assert sum(move.unseen + move.skipped for move in moves) == 0
    assert verdict.effects["orders"].late == []
    assert sql.execute("select count(*) from tidemark.append_outbox").fetchone() == (0,)


def append(sql: psycopg.Connection, count: int = 1) -> set[int]:
    row = sql.execute(
        "select tidemark.append_many('orders', array_agg(to_jsonb(at))) from generate_series(1, %s) as at", [count]
    ).fetchone()
    assert row is not None
    return set(row[0])
