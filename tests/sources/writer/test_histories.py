"""Databases that are restored or fail over under their writers, and what Tidemark's own core makes of it."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from psycopg import sql

from tests.fix_servers import Unsynced
from tests.sources.writer.judge import Judge
from tests.streaming.builders import packed
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.server import free_port
from tidemark.app.stack.servers import KafkaServer
from tidemark.sources.writer import Writer, sequences
from tidemark.sources.writer.database import SCHEMA, session_of
from tidemark.streaming.batch import advance
from tidemark.streaming.direction import Direction
from tidemark.streaming.effects import StreamEffects
from tidemark.streaming.errors import HistoryChanged
from tidemark.streaming.model import Bounds
from tidemark.streaming.records import Rdata, Topic, read

ORDER = "insert into orders (id) values (%(id)s)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A Postgres that these tests may put back and break."""
    server = Unsynced(Home(tmp_path_factory.mktemp("history")), free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def shop(server: PostgresServer, prefix: str) -> str:
    """The name of a database of that server, ready for a writer of `orders`."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(prefix)))
    with session_of(server.dsn(prefix), "test") as session:
        SCHEMA.migrate(session)
        with session.use() as connection:
            sequences.create(connection, "orders_id_seq", Direction.FORWARD)
            connection.execute("create table orders (id bigint primary key)")
    return prefix


@dataclass
class Told:
    """What the pipeline makes of `orders`, batch by batch; `ids` are the facts of the batch, and `epochs` theirs."""

    judge: Judge
    states: dict[str, bytes] = field(default_factory=dict)
    seen: int = 0
    ids: list[int] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)
    linear: int = 0
    timelines: list[tuple[str, int, int, str]] = field(default_factory=list)

    def more(self) -> StreamEffects:
        """One batch with all that came since the last; nothing of it is refused, nothing vanishes as a duplicate."""
        messages = [(message.key(), message.value()) for message in self.judge.messages()]
        framed = ((offset, 0, 0, *message) for offset, message in enumerate(messages) if offset >= self.seen)
        done = advance(0, self.states, packed(framed), 0, Bounds())
        records = [read(value, key, Topic.FACTS) for key, value in messages[self.seen :]]
        facts = [it for it in records if isinstance(it, Rdata) and isinstance(it.id, int)]
        self.ids = sorted(it.id for it in facts if isinstance(it.id, int))
        self.epochs = {it.epoch for it in facts}
        self.seen = len(messages)
        (orders,) = done.streams
        self.linear = orders.linear
        self.timelines += [(it.writer, it.id, it.number, it.why) for it in orders.timelines]
        assert (done.rejected, orders.counts.get("duplicate", 0)) == ([], 0)
        return orders


@pytest.fixture
def told(judge: Judge) -> Told:
    return Told(judge)


Make = Callable[[str, str], Writer]


@pytest.fixture
def make(kafka: KafkaServer, topic: str) -> Make:
    """Makes a writer of `orders`, at a DSN, of a name."""

    def make(dsn: str, instance: str) -> Writer:
        return Writer(
            *(dsn, kafka.bootstrap_servers),
            instance=instance,
            streams=["orders"],
            topic=topic,
            registry=CollectorRegistry(),
        )

    return make


def write(writer: Writer, dsn: str, count: int) -> None:
    with psycopg.connect(dsn) as connection:
        for number in range(count):
            with writer.transaction(connection) as facts:
                facts.write("orders", number, ORDER)


def insist(writer: Writer, dsn: str, count: int) -> None:
    """As a service does whose transactions are repeated when they may be."""

    def written() -> bool:
        try:
            write(writer, dsn, 1)
        except (HistoryChanged, psycopg.OperationalError):
            return False
        return True

    for _ in range(count):
        eventually(written)


def copied(server: PostgresServer, to: Path) -> Path:
    """The disk of the server, while that is down for a moment: an image as of a virtual machine."""
    server.stop()
    subprocess.run(["cp", "-a", server.home.data("postgres"), to], check=True)
    server.start()
    return to


def put_back(server: PostgresServer, image: Path) -> None:
    disk = server.home.data("postgres")
    server.stop()
    shutil.rmtree(disk)
    subprocess.run(["cp", "-a", image, disk], check=True)
    server.start()


def is_told(orders: StreamEffects, ids: list[int]) -> None:
    """Each of these facts counts in an advance or is late, and none stands in what is empty."""
    late = {id for it in orders.late for id in range(it.prev + 1, it.id + 1)}
    assert all(it.why in ("regressed", "final") for it in orders.late)
    counted = [id for id in ids if id not in late]
    assert len(counted) <= sum(it.facts for it in orders.advances) <= len(ids)
    assert sum(it.unseen + it.skipped for it in orders.advances) == 0
    for id in counted:
        assert any(it.prev < id <= it.id and it.facts for it in orders.advances)


@pytest.mark.parametrize("starts", [1, 3])
def test_an_image_of_the_disk_that_is_put_back_begins_a_timeline(
    server: PostgresServer, shop: str, make: Make, told: Told, tmp_path: Path, starts: int
) -> None:
    """System identifier and timeline are unchanged, and an idle writer joins first: its token shows it."""
    dsn = server.dsn(shop)
    with make(dsn, "busy") as busy, make(dsn, "idle"):
        write(busy, dsn, 3)
    image = copied(server, tmp_path / "image")
    for _ in range(starts):
        with make(dsn, "idle"):
            pass
    for _ in range(starts):
        with make(dsn, "busy") as busy:
            write(busy, dsn, 2)
    lost = 3 + 2 * starts
    told.more()
    assert told.linear == lost
    put_back(server, image)
    with make(dsn, "idle") as idle, make(dsn, "busy") as busy:
        write(idle, dsn, 2)
        write(busy, dsn, 2 * starts)
    orders = told.more()
    assert told.timelines == [("idle", 3, 2, "start")]
    assert told.ids == [*range(4, 4 + 2 + 2 * starts)]
    is_told(orders, told.ids)
    assert told.linear == lost + 2


def test_a_writer_that_runs_goes_on_over_a_restart_and_is_not_deceived_by_an_image(
    server: PostgresServer, shop: str, make: Make, told: Told, tmp_path: Path
) -> None:
    """An image from after its start holds its epoch and its token; but a sequence stands below what was announced."""
    dsn = server.dsn(shop)
    with make(dsn, "shop-1") as writer:
        write(writer, dsn, 3)
        with psycopg.connect(dsn, autocommit=True) as connection:
            empty = "select not exists (select from tidemark.outbox)"
            eventually(lambda: connection.execute(empty).fetchone() == (True,))
        image = copied(server, tmp_path / "image")
        write(writer, dsn, 3)
        eventually(lambda: told.judge.verdict().position("orders") == 6)
        first = writer.epoch
        put_back(server, image)
        eventually(lambda: writer.epoch > first)
        told.more()
        write(writer, dsn, 5)
    assert told.timelines == [("shop-1", 3, 2, "position")]
    orders = told.more()
    assert told.ids == [4, 5, 6, 7, 8]
    is_told(orders, told.ids)
    assert told.linear == 8


@pytest.fixture
def standby(server: PostgresServer, shop: str, tmp_path: Path) -> Iterator[PostgresServer]:
    """A second server that follows the first, until it is promoted."""
    other = Unsynced(Home(tmp_path / "standby"), free_port())
    copied(server, tmp_path / "base")
    disk = other.home.data("postgres")
    disk.rmdir()
    data = (tmp_path / "base").rename(disk) / "18"
    (data / "standby.signal").touch()
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(f"primary_conninfo = '{server.dsn('postgres')}'\n")
    other.start()
    yield other
    other.stop()
    if not server.running:
        server.start()


def test_writers_that_run_through_a_failover_that_lost_commits_join_anew(
    server: PostgresServer, standby: PostgresServer, shop: str, make: Make, told: Told
) -> None:
    """A standby that lagged is promoted: nothing is written there in an epoch of the lost history, and the idle one
    joins too, though nobody calls it.
    """
    hosts = f"127.0.0.1:{server.port},127.0.0.1:{standby.port}"
    first, second = server.dsn(shop), standby.dsn(shop)
    dsn = f"{first.rpartition('@')[0]}@{hosts}/{shop}?target_session_attrs=read-write"
    with make(dsn, "shop-1") as writer, make(dsn, "idle") as idle:
        write(writer, dsn, 3)
        with psycopg.connect(second, autocommit=True) as behind:
            alike = "select (select count(*) from orders), (select count(*) from tidemark.outbox)"
            eventually(lambda: behind.execute(alike).fetchone() == (3, 0))
            behind.execute("alter system set primary_conninfo = ''")
            behind.execute("select pg_reload_conf()")
            eventually(lambda: behind.execute("select count(*) from pg_stat_wal_receiver").fetchone() == (0,))
            write(writer, dsn, 60)
            eventually(lambda: told.judge.verdict().effects["orders"].linear == 63)
            told.more()
            lost = {writer.epoch, idle.epoch}
            server.kill()
            behind.execute("select pg_promote()")
        insist(writer, dsn, 40)
        eventually(lambda: idle.epoch not in lost)
        write(idle, dsn, 20)
    orders = told.more()
    assert [(number, why) for _, _, number, why in told.timelines] == [(2, "database")]
    with psycopg.connect(second) as connection:
        new = [id for (id,) in connection.execute("select id from orders where id > 3 order by id").fetchall()]
    assert told.ids == new
    assert not told.epochs & lost
    assert len(new) == 60
    assert new[0] < 63 < new[-1]
    is_told(orders, new)
    assert told.linear == new[-1]
