"""Kafka or Postgres away: the service goes on as far as it can, and afterwards all is as if nothing had been."""

from contextlib import suppress
from secrets import token_hex

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from structlog.testing import capture_logs

from tests.sources.writer.conftest import Make
from tests.sources.writer.judge import Judge
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.server import free_port
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.writer import Writer
from tidemark.streaming.errors import Unavailable


def test_facts_wait_out_an_outage_of_kafka_in_their_order(
    make: Make, connection: psycopg.Connection, sql: psycopg.Connection, kafka: KafkaServer, judge: Judge
) -> None:
    """Transactions go on while the broker is dead; what is kept in memory does not grow with them."""
    with make(patience=60.0) as writer:

        def write(number: int) -> None:
            with writer.transaction(connection) as facts:
                facts.write("orders", number, "insert into orders (id) values (%(id)s)")
                if number % 7 == 0:
                    raise psycopg.Rollback

        write(1)
        kafka.kill()
        try:
            for number in range(2, 1500):
                write(number)
            assert sql.execute("select count(*) > 1000 from tidemark.outbox").fetchone() == (True,)
        finally:
            kafka.start()
        write(1500)
    verdict = judge.agrees(sql)
    assert len(verdict.announced["orders"]) == 1500 - 1500 // 7
    ids = [id for kind, _, id in verdict.kinds() if kind == "RDATA"]
    assert ids == sorted(ids)
    assert verdict.effects["orders"].counts.get("duplicate", 0) == 0


def test_a_crash_of_postgres_is_the_callers_error_and_holds_nothing_for_ever(
    make: Make, dsn: str, postgres: PostgresServer, judge: Judge
) -> None:
    """The server dies with a transaction open, and right after a rollback whose number it may give again."""
    with make() as writer:

        def write(connection: psycopg.Connection) -> None:
            with writer.transaction(connection) as facts:
                facts.write("orders", {}, "insert into orders (id) values (%(id)s)")

        def write_slowly(connection: psycopg.Connection) -> None:
            with writer.transaction(connection) as facts:
                facts.write("orders", {}, "insert into orders (id) values (%(id)s)")
                with suppress(RuntimeError), psycopg.connect(dsn) as other, writer.transaction(other) as more:
                    more.reserve("orders")
                    raise RuntimeError
                postgres.kill()
                connection.execute("select 1")

        with psycopg.connect(dsn) as connection:
            write(connection)
        connection = psycopg.connect(dsn)
        try:
            with pytest.raises(psycopg.OperationalError):
                write_slowly(connection)
        finally:
            connection.close()
            postgres.start()
        with psycopg.connect(dsn) as connection:
            for _ in range(40):
                write(connection)
    with psycopg.connect(dsn, autocommit=True) as sql:
        verdict = judge.agrees(sql)
        assert len(verdict.announced["orders"]) == 41


def test_a_start_without_kafka_says_so_in_time(dsn: str) -> None:
    """The service is told within its patience, so that whoever started it starts it again."""
    writer = Writer(dsn, f"127.0.0.1:{free_port()}", instance="shop-1", streams=["orders"], patience=1.0)
    with pytest.raises(Unavailable), writer:
        pass


def test_a_record_that_kafka_refuses_holds_and_goes_out_once_that_is_mended(
    make: Make, connection: psycopg.Connection, sql: psycopg.Connection, kafka: KafkaServer, topic: str, judge: Judge
) -> None:
    """The topic takes smaller messages than the library knows of: nothing is lost or skipped over."""
    allow(kafka, topic, 2000)
    with capture_logs() as logs, make() as writer:
        for size in (10, 5000, 10):
            with writer.transaction(connection) as facts:
                facts.write("orders", token_hex(size), "insert into orders (id) values (%(id)s)")
        eventually(lambda: any("max.message.bytes" in line.get("problem", "") for line in logs))
        assert judge.verdict().position("orders") < 2
        allow(kafka, topic, 1_000_000)
    assert judge.agrees(sql).rejected == {}


def allow(kafka: KafkaServer, topic: str, bytes_: int) -> None:
    """Set the largest message of the topic."""
    entry = ConfigEntry("max.message.bytes", str(bytes_), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient(KafkaConnection(kafka.bootstrap_servers).client())
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(timeout=10)


def test_heartbeats_go_on_after_the_sessions_end(
    make: Make, connection: psycopg.Connection, sql: psycopg.Connection, judge: Judge
) -> None:
    """The library's own connection is ended by someone: it makes another."""
    with make() as writer:
        sql.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tidemark writer shop-1'"
        )
        with writer.transaction(connection) as facts:
            facts.write("orders", {}, "insert into orders (id) values (%(id)s)")
        eventually(lambda: ("RDATA", 1, 1) in judge.verdict().kinds())
    judge.agrees(sql)
