"""`tidemark writer`: what an operator sees and does."""

import subprocess
import sys
import threading

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from tidemark.app.settings import child_environment
from tidemark.app.stack.servers import KafkaServer
from tidemark.app.writer import FenceOrder, fence_writer, migrate, plan, report
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicPlan, Topics
from tidemark.sources.writer import Writer
from tidemark.streaming.errors import SchemaMismatch, SequenceUnfit, UnknownWriter


@pytest.fixture
def connection(kafka: KafkaServer, prefix: str) -> KafkaConnection:
    """A broker with one topic, called as `prefix`."""
    connection = KafkaConnection(kafka.bootstrap_servers)
    Topics(connection).create_missing([TopicPlan(prefix, 1, 3_600_000)])
    return connection


def live_in_epoch_1(database: str, connection: KafkaConnection, topic: str) -> None:
    """A writer `shop-1` that joins and ends."""
    writer = Writer(
        *(database, connection),
        instance="shop-1",
        streams=["orders"],
        topic=topic,
        registry=CollectorRegistry(),
        clock=lambda: 0.0,
    )
    with writer:
        pass


def say_nothing(_: str) -> None:
    pass


def test_migrate_says_what_it_did_and_does_nothing_twice(database: str) -> None:
    """The dry run says the same before and changes nothing."""
    said: list[str] = []
    plan(database, ["shop_seq"], "backward", said.append)
    migrate(database, ["shop_seq"], "backward", said.append)
    migrate(database, ["shop_seq"], "backward", said.append)
    plan(database, ["shop_seq"], "backward", said.append)
    assert said == [
        *("would apply 1, 2, 3", "would make sequence shop_seq"),
        *("applied 1, 2, 3", "made sequence shop_seq"),
        "the writer's schema is up to date",
        *("the writer's schema is up to date", "sequence shop_seq is fit"),
    ]
    with pytest.raises(SequenceUnfit, match="goes by -1 and the stream goes forward"):
        plan(database, ["shop_seq"], "forward", say_nothing)


def test_it_shares_a_database_with_the_pipeline_in_any_order(database: str) -> None:
    """Both have the schema `tidemark`, each with a version of its own."""
    from tidemark.sinks.postgres.database import migrate as migrate_pipeline

    migrate(database, [], "forward", say_nothing)
    assert migrate_pipeline(database)
    said: list[str] = []
    migrate(database, [], "forward", said.append)
    assert said == ["the writer's schema is up to date"]


def test_a_newer_schema_is_left_alone(database: str) -> None:
    """An old Tidemark does not touch it, and a writer does not start on it."""
    migrate(database, [], "forward", say_nothing)
    with psycopg.connect(database, autocommit=True) as sql:
        sql.execute("insert into tidemark.writer_schema_version values (99, 'x')")
    with pytest.raises(SchemaMismatch, match="upgrade this Tidemark"):
        migrate(database, [], "forward", say_nothing)


def test_an_ordinary_user_with_the_role_can_write(database: str, connection: KafkaConnection, prefix: str) -> None:
    """The service needs to own nothing."""
    migrate(database, ["orders_id_seq"], "forward", say_nothing)
    with psycopg.connect(database, autocommit=True) as sql:
        sql.execute("drop role if exists clerk")
        sql.execute("create role clerk login password 'clerk' in role tidemark_writer")
        sql.execute("grant usage, select on orders_id_seq to clerk")
    dsn = psycopg.conninfo.make_conninfo(database, user="clerk", password="clerk")
    with (
        Writer(
            dsn, connection, instance="shop-1", streams=["orders"], topic=prefix, registry=CollectorRegistry()
        ) as writer,
        psycopg.connect(dsn) as service,
        writer.transaction(service) as facts,
    ):
        assert facts.append("orders", {}) == 1
    with psycopg.connect(database, autocommit=True) as sql:
        sql.execute("drop owned by clerk")
        sql.execute("drop role clerk")


def test_fence_shows_what_it_finds_and_settles_it(database: str, connection: KafkaConnection, prefix: str) -> None:
    """A dead writer with a fact in its outbox and a transaction that hangs: named, ended, told, joined, retired."""
    migrate(database, ["orders_id_seq"], "forward", say_nothing)
    live_in_epoch_1(database, connection, prefix)
    with psycopg.connect(database, application_name="till") as hanging, psycopg.connect(database) as sql:
        sql.execute("insert into tidemark.outbox values ('shop-1', 1, 'orders', nextval('orders_id_seq'), 0, '{}')")
        sql.commit()
        hanging.execute("select tidemark.reserve('shop-1', 1, 'orders', 'orders_id_seq'::regclass, 1, 0, 1, null)")
        pid = hanging.info.backend_pid
        found: list[str] = []
        report(database, "shop-1", found.append)
        said: list[str] = []
        order = FenceOrder("shop-1", terminate=True, retire=True)
        fence_writer(database, connection, prefix, order, said.append, lambda: 0.0)
        with pytest.raises(psycopg.OperationalError):
            hanging.execute("select 1")
    assert found[0] == "shop-1 is in epoch 1"
    assert found[1].startswith(f"open transaction: pid {pid} since ")
    assert "idle in transaction, application till: select tidemark.reserve" in found[1]
    assert found[2:] == ["orders: 1 row in the outbox, would join at 2"]
    assert said[0].startswith(f"ended open transaction: pid {pid}")
    assert said[1:] == [
        "shop-1 was in epoch 1, which is over; now 2",
        "orders: told 1 fact from the outbox, everything up to 2 is settled",
        "shop-1 is retired: it holds no linear position back any more",
    ]


def test_fence_waits_for_an_open_transaction_and_names_it_once(
    database: str, connection: KafkaConnection, prefix: str
) -> None:
    """Without --terminate nothing is ended; the fence goes on as soon as the transaction has."""
    migrate(database, ["orders_id_seq"], "forward", say_nothing)
    live_in_epoch_1(database, connection, prefix)
    with psycopg.connect(database) as hanging:
        hanging.execute("select tidemark.reserve('shop-1', 1, 'orders', 'orders_id_seq'::regclass, 1, 0, 1, null)")
        said: list[str] = []

        def hear(line: str) -> None:
            said.append(line)
            if line.startswith("waiting"):
                threading.Timer(1.5, hanging.commit).start()

        fence_writer(database, connection, prefix, FenceOrder("shop-1", terminate=False, retire=False), hear)
    assert [line.split(":")[0] for line in said] == ["waiting for open transaction", said[1], "orders"]


def test_a_typing_error_is_told_in_one_line(database: str) -> None:
    """An unknown instance ends with exit code 2; so does a database without the schema, which says what to run."""

    def tidemark(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidemark.app.cli", "writer", *words, "--dsn", database]
        return subprocess.run(
            command, env=child_environment({}), capture_output=True, text=True, timeout=60, check=False
        )

    before = tidemark("fence", "shop-1", "--dry-run")
    assert (before.returncode, before.stderr.count("\n")) == (2, 1)
    assert "tidemark writer migrate" in before.stderr
    assert tidemark("migrate", "--sequence", "orders_id_seq").stdout == "applied 1, 2, 3\nmade sequence orders_id_seq\n"
    unknown = tidemark("fence", "shop-1", "--dry-run")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    with pytest.raises(UnknownWriter):
        report(database, "shop-1", say_nothing)
