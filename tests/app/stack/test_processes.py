from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest
import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg.conninfo import conninfo_to_dict

from tests.waiting import eventually
from tidemark.app import relay
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, PaymentsProcess, RedisServer


def test_postgres_keeps_what_was_committed_before_a_kill(postgres: PostgresServer, database: str) -> None:
    """A committed row is there after the server was killed and started again."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    postgres.kill()
    postgres.start()
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (7,)


def test_postgres_wants_the_password(postgres: PostgresServer) -> None:
    """Another user of the machine cannot become the superuser of the database, and so us."""
    stranger = postgres.dsn("postgres").replace(":", ":x", 2).replace(":x//", "://")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stranger)


def test_redis_keeps_what_it_was_told_before_a_stop(redis_server: RedisServer, redis_url: str) -> None:
    """A value is there after an orderly stop and a start."""
    with redis.Redis.from_url(redis_url) as client:
        client.set("kept", "7")
        redis_server.stop()
        redis_server.start()
        assert client.get("kept") == b"7"


def test_kafka_keeps_topics_through_a_kill_and_creates_none_by_accident(kafka: KafkaServer, prefix: str) -> None:
    """A topic is there after a kill and a start; one that was never created does not come into being."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic(prefix, 3)])[prefix].result(timeout=60)
    kafka.kill()
    kafka.start()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    assert len(admin.list_topics(timeout=60).topics[prefix].partitions) == 3
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "message.timeout.ms": 500, "log_level": 0})
    producer.produce(f"{prefix}.typo", b"{}")
    assert producer.flush(60) == 0
    assert f"{prefix}.typo" not in admin.list_topics(timeout=60).topics


def test_one_payment_of_the_demo_stays_open_for_many_seconds(
    database: str, java: str, jdbc: Path, tmp_path: Path
) -> None:
    """`tidemark status` names its session. The other sessions go on, and the payment is committed in the end."""
    relay.migrate(database, ["payments"], "forward", say=lambda _: None)
    address = conninfo_to_dict(database)
    names = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGPASSWORD": "password", "PGDATABASE": "dbname"}
    variables: Mapping[str, str] = {name: str(address[key]) for name, key in names.items()}
    open_ones = (
        "select count(*) from pg_stat_activity where datname = current_database() and state = 'idle in transaction'"
        " and application_name = 'slow-payment' and now() - xact_start > '14 s'"
    )
    payments = PaymentsProcess(Home(tmp_path), variables, java=java, jars=jdbc)
    with psycopg.connect(database, autocommit=True) as connection:

        def count(query: str) -> int:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return int(row[0])

        payments.start()
        try:
            eventually(lambda: count(open_ones) == 1, 60.0)
            assert count("select count(*) from tidemark.append_outbox") > 3
            eventually(lambda: count(open_ones) == 0, 60.0)
        finally:
            payments.stop()
