"""Disk images that are put back under a relay, standbys that are promoted, and what Tidemark's own core makes of it."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_servers import own_postgres
from tests.sources.relay.position_world import SqlReader, SteppedKeeper
from tests.sources.relay.world import Core, Service, SteppedRelay, prepared_schema
from tidemark.app.stack.postgres import PostgresReplica, PostgresServer
from tidemark.sources.relay.decider import Decider

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with own_postgres(tmp_path_factory.mktemp("relayed")) as server:
        yield server


@pytest.fixture
def shop(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"shop_{abs(hash(request.node.name))}"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
    with prepared_schema(server.dsn(name)):
        with psycopg.connect(server.dsn(name), autocommit=True) as connection:
            connection.execute("select tidemark.create_stream('orders')")
        yield server.dsn(name)


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


class Read:
    """A keeper of positions and a reader in the database itself."""

    def __init__(self, dsn: str) -> None:
        self._keeper = SteppedKeeper(dsn)
        self.reader = SqlReader(dsn)

    def drain(self) -> None:
        for _ in range(4):
            self._keeper.round()
        self.reader.drain()
        self.reader.check()

    def restart(self) -> None:
        self._keeper.die()


class Relayed:
    """The stream `orders`, told by one relay after the other."""

    def __init__(self, dsn: str) -> None:
        self.core = Core("orders")
        self._dsn = dsn
        self.service = Service(dsn)
        self.restart()

    def append(self, count: int, writer: str = "") -> list[int | None]:
        return [self.service.append("orders", 1, writer) for _ in range(count)]

    def close(self) -> None:
        self.relay.die()
        self.service.close()

    def outlive(self, server: PostgresServer) -> None:
        """The server begins anew, on the disk that it has."""
        self.relay.die()
        server.stop()
        server.start()
        self.restart()

    @property
    def floor(self) -> int:
        """Up to here the database has no rows to send."""
        with psycopg.connect(self._dsn) as connection:
            [(floor,)] = connection.execute("select abs(floor) from tidemark.append_progress").fetchall()
        return int(floor)

    def restart(self) -> None:
        """Services and relay, which knows nothing."""
        self.service.close()
        self.service = Service(self._dsn)
        self.relay = SteppedRelay(self._dsn, Decider, self.core.take, most_facts=1)


@pytest.mark.parametrize("writer", ["", "till"])
@pytest.mark.parametrize("settled", [True, False])
def test_an_image_that_is_put_back_while_no_relay_runs_begins_a_timeline(
    server: PostgresServer, shop: str, tmp_path: Path, writer: str, *, settled: bool
) -> None:
    """What comes again beyond the relay's floor is late, also where the services were quicker: the image does not know
    the timeline that it ends, which may have given out again what the image calls published."""
    relayed = Relayed(shop)
    relayed.append(3, writer)
    relayed.relay.finish()
    if not settled:
        relayed.append(2, writer)
        relayed.relay.round()
        relayed.relay.round()
    relayed.relay.die()
    floor = relayed.floor
    assert floor == relayed.core.told if settled else floor < relayed.core.told
    image = copied(server, tmp_path / "image")
    relayed.restart()
    lost = relayed.append(4, writer)
    relayed.relay.finish()
    assert relayed.core.line >= 7
    reached = relayed.core.line
    relayed.relay.die()
    put_back(server, image)
    relayed.restart()
    again = relayed.append(6, writer)
    assert set(lost) & set(again)
    relayed.relay.finish()
    assert relayed.core.timelines == [(floor, "position")]
    assert {id for id in again if id and id <= reached} <= relayed.core.late_ids
    assert min(relayed.core.late_ids) > floor
    assert relayed.core.line >= max(id for id in again if id)
    assert relayed.core.rejected == {}
    relayed.close()


def test_a_standby_that_lacks_commits_begins_a_timeline(server: PostgresServer, shop: str) -> None:
    """What was told of the commits that it lacks is given out again, and late."""
    relayed = Relayed(shop)
    relayed.append(3)
    relayed.relay.finish()
    known = relayed.core.told
    standby = PostgresReplica(server)
    standby.copy(as_standby=True)
    standby.start()
    standby.wait_until_streaming(is_synchronous=False)
    standby.disconnect()
    lost = relayed.append(4)
    relayed.relay.finish()
    reached = relayed.core.line
    relayed.close()
    standby.promote()
    standby.replace_origin()
    server.start()
    relayed.restart()
    again = relayed.append(6)
    relayed.relay.finish()
    assert set(lost) <= set(again)
    assert relayed.core.timelines == [(known, "database")]
    assert relayed.core.late_ids == {id for id in again if id and id <= reached}
    assert relayed.core.line == max(id for id in again if id)
    assert relayed.core.rejected == {}
    relayed.close()


def test_readers_in_the_database_go_back_with_its_image(server: PostgresServer, shop: str, tmp_path: Path) -> None:
    """Facts, positions, places and effects are of one moment, so each fact has its effects once."""
    relayed, read = Relayed(shop), Read(shop)
    relayed.append(3)
    read.drain()
    relayed.append(2)
    relayed.relay.die()
    read.restart()
    image = copied(server, tmp_path / "image")
    relayed.restart()
    relayed.append(4)
    read.drain()
    relayed.relay.die()
    read.restart()
    put_back(server, image)
    relayed.restart()
    relayed.append(3)
    read.drain()
    relayed.relay.finish()
    relayed.append(3)
    read.drain()
    read.restart()
    relayed.close()


def test_readers_in_the_database_of_a_promoted_standby(server: PostgresServer, shop: str) -> None:
    """It lacks commits: the facts, and what the reader has made of them."""
    relayed, read = Relayed(shop), Read(shop)
    relayed.append(3)
    read.drain()
    standby = PostgresReplica(server)
    standby.copy(as_standby=True)
    standby.start()
    standby.wait_until_streaming(is_synchronous=False)
    standby.disconnect()
    relayed.append(4)
    read.drain()
    relayed.close()
    read.restart()
    standby.promote()
    standby.replace_origin()
    server.start()
    relayed.restart()
    relayed.append(6)
    read.drain()
    relayed.relay.finish()
    read.drain()
    read.restart()
    relayed.close()


def test_a_server_that_only_began_again_begins_no_timeline(server: PostgresServer, shop: str) -> None:
    """The relay tells again what lies beyond its floor, and nothing of it is late."""
    relayed = Relayed(shop)
    for settled in (True, False, False, True):
        relayed.append(2, "till")
        relayed.append(1)
        if settled:
            relayed.relay.finish()
        else:
            relayed.service.begin("read committed", "on")
            relayed.append(1)
            relayed.service.run("rollback")
            relayed.relay.round()
        relayed.outlive(server)
    relayed.relay.finish()
    assert (relayed.core.timelines, relayed.core.late, relayed.core.rejected) == ([], 0, {})
    assert relayed.core.line >= 14
    relayed.close()


def test_a_server_that_dies_while_its_first_writers_join_begins_no_timeline(server: PostgresServer, shop: str) -> None:
    """Their JOINs are in Kafka and the server does not know it, so that they come again: with how far it was told."""
    relayed = Relayed(shop)
    relayed.append(5)
    relayed.relay.round()
    relayed.append(1, "till")
    relayed.relay.round()  # it finds the stranger
    relayed.relay.break_off()
    relayed.outlive(server)
    relayed.relay.finish()
    assert (relayed.core.timelines, relayed.core.late, relayed.core.rejected) == ([], 0, {})
    assert relayed.core.line >= 6
    relayed.close()
