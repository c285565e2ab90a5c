"""A service's database with a table and a sequence, a topic, and what Tidemark makes of the topic."""

from collections.abc import Callable, Iterator

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from tests.sources.writer.judge import Judge
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.sources.writer import Writer, sequences
from tidemark.sources.writer.database import SCHEMA, session_of
from tidemark.streaming.direction import Direction

Make = Callable[..., Writer]


@pytest.fixture
def dsn(database: str) -> str:
    """A database with the writer's schema, a table `orders` and the sequences of two streams."""
    session = session_of(database, "test")
    SCHEMA.migrate(session)
    with session.use() as connection:
        sequences.create(connection, "orders_id_seq", Direction.FORWARD)
        sequences.create(connection, "history_id_seq", Direction.BACKWARD)
        connection.execute("create table orders (id bigint primary key, total integer not null default 0)")
    session.close()
    return database


@pytest.fixture
def sql(dsn: str) -> Iterator[psycopg.Connection]:
    """A session of the test's own, to look with."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of the service."""
    with psycopg.connect(dsn) as connection:
        yield connection


@pytest.fixture
def topic(kafka: KafkaServer, prefix: str) -> str:
    Topics(KafkaConnection(kafka.bootstrap_servers)).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    return prefix


@pytest.fixture
def make(dsn: str, kafka: KafkaServer, topic: str) -> Make:
    """Makes writers of stream `orders`, by default called `shop-1`."""

    def make(**changes: object) -> Writer:
        settings = {"instance": "shop-1", "streams": ["orders"], "topic": topic, "registry": CollectorRegistry()}
        settings["clock"] = lambda: 0.0  # epochs 1, 2, ...
        return Writer(dsn, kafka.bootstrap_servers, **(settings | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def judge(kafka: KafkaServer, topic: str) -> Judge:
    return Judge(KafkaConnection(kafka.bootstrap_servers), topic)
