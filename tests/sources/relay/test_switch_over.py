"""A switch-over to another server by logical replication, which copies rows and no sequences."""

from collections.abc import Iterator, Sequence

import psycopg
import pytest

from tests.fix_servers import Unsynced
from tests.sources.relay.disorder import TokenCore
from tests.sources.relay.world import Service, SteppedRelay, prepared_schema
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import free_port
from tidemark.sources.relay.decider import Decider

pytestmark = pytest.mark.postgres

REPLICATED = "tidemark.append_outbox, tidemark.append_progress, tidemark.append_writers, tidemark.append_sent, truth"


class Logical(Unsynced):
    def command(self) -> Sequence[str]:
        return [*super().command(), "-c", "wal_level=logical"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    server = Logical(Home(tmp_path_factory.mktemp("switched")), free_port())
    server.start()
    yield server
    server.stop()


class SwitchOver:
    """From the database `blue` to `green`, with the stream `orders`; `core` reads the topic of both."""

    def __init__(self, server: PostgresServer) -> None:
        self.core = TokenCore("orders")
        self.blue, self.green = server.dsn("blue"), server.dsn("green")
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
            for name in ("blue", "green"):
                admin.execute(f"drop database if exists {name} with (force)".encode())
                admin.execute(f"create database {name}".encode())
        for dsn in (self.blue, self.green):
            with prepared_schema(dsn), psycopg.connect(dsn, autocommit=True) as admin:
                admin.execute("select tidemark.create_stream('orders')")
        self.relay, self.service = self._relay(self.blue), Service(self.blue)

    def replicate(self) -> None:
        """All rows of blue get to green."""
        with psycopg.connect(self.green, autocommit=True) as green, psycopg.connect(self.blue, autocommit=True) as blue:
            for table in REPLICATED.split(", "):
                green.execute(f"delete from {table}".encode())
            blue.execute("alter table truth replica identity full")
            blue.execute(f"create publication rows for table {REPLICATED}".encode())
            blue.execute("select pg_create_logical_replication_slot('green', 'pgoutput')")
            # Both are of one server, which would wait for itself if it made the slot.
            green.execute(
                f"create subscription green connection '{self.blue}' publication rows"
                " with (create_slot = false, slot_name = 'green')".encode()
            )
            self.append(1)
            self.tell()
            eventually(lambda: _rows(blue) == _rows(green))

    def switch(self) -> None:
        """Blue is given up, and services begin to write to green."""
        with psycopg.connect(self.green, autocommit=True) as green, psycopg.connect(self.blue, autocommit=True) as blue:
            self.relay.die()
            self.service.close()
            eventually(lambda: _rows(blue) == _rows(green))
            green.execute("alter subscription green disable")
            green.execute("alter subscription green set (slot_name = none)")
            green.execute("drop subscription green")
            eventually(lambda: blue.execute("select from pg_replication_slots where active").fetchone() is None)
            blue.execute("select pg_drop_replication_slot('green')")
        self.relay, self.service = self._relay(self.green), Service(self.green)

    def append(self, count: int) -> None:
        for _ in range(count):
            self.service.append("orders", 1)

    def tell(self) -> None:
        self.relay.finish()

    def missing(self) -> set[int]:
        """Tokens of facts that are neither published nor late."""
        with psycopg.connect(self.green) as green:
            found = {token for (token,) in green.execute("select token from truth")}
        return found - self.core.published - self.core.named

    def close(self) -> None:
        self.relay.die()
        self.service.close()

    def _relay(self, dsn: str) -> SteppedRelay:
        return SteppedRelay(dsn, Decider, self.core.take, most_facts=1)


def _rows(connection: psycopg.Connection) -> list[tuple[object, ...]]:
    return [
        *connection.execute("select number, floor, version, null from tidemark.append_progress"),
        *connection.execute("select number, id, null, null from tidemark.append_outbox order by id"),
        *connection.execute("select stream, id, rows, token from truth order by token"),
    ]


@pytest.fixture
def site(server: PostgresServer) -> Iterator[SwitchOver]:
    site = SwitchOver(server)
    yield site
    site.close()


@pytest.mark.parametrize("appended", [0, 2, 9])
def test_facts_that_are_appended_before_the_relay_starts_are_late(site: SwitchOver, appended: int) -> None:
    """Below the floor, up to it and beyond it; and those that come after the sequence is set as the message says."""
    site.append(5)
    site.tell()
    site.replicate()
    site.switch()
    site.append(appended)
    site.tell()
    assert not site.missing()
    assert len(site.core.named) == min(appended, 6)
    with psycopg.connect(site.green, autocommit=True) as green:
        green.execute("select setval('tidemark.append_ids_1', 20)")
    site.append(2)
    site.tell()
    assert not site.missing()
    assert site.core.line == 22


def test_facts_that_were_not_published_hold_the_stream_until_the_sequence_is_set(site: SwitchOver) -> None:
    """They lie beyond the head of the new sequence, and the facts that were appended there lie below the floor."""
    site.append(5)
    site.tell()
    site.replicate()
    site.append(2)
    site.switch()
    site.append(2)
    for _ in range(5):
        site.relay.round()
    decider = site.relay._decider
    assert decider is not None
    assert str(decider.blocked["orders"]).endswith("run: SELECT setval('tidemark.append_ids_1', 8)")
    with psycopg.connect(site.green, autocommit=True) as green:
        green.execute("select setval('tidemark.append_ids_1', 8)")
    site.append(1)
    site.tell()
    assert not site.missing()
    assert len(site.core.named) >= 2
