"""Waits for tokens beyond every ID that the writers' database has given out: only these are refused."""

import time
from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.app.sidecar.given import At, SidecarClient, moved, sidecar
from tests.sinks.reader.given import Pipeline, later
from tests.sources.relay.position_world import SteppedKeeper
from tests.sources.relay.world import prepared_schema
from tests.waiting import eventually
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.stack.postgres import PostgresReplica, PostgresServer

WAIT = "/v1/streams/s/wait"


@pytest.fixture
def shop(database: str) -> Iterator[psycopg.Connection]:
    """The database of the readers and of all writers of stream `s`. Three IDs are given out and complete."""
    with prepared_schema(database), psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select tidemark.create_stream('s')")
        append(connection, 3)
        keeper = SteppedKeeper(database)
        for _ in range(4):
            keeper.round()
        keeper.die()
        yield connection


@pytest.fixture
def client(
    servers: ReadSideConfig, pipeline: Pipeline, database: str, shop: psycopg.Connection
) -> Iterator[SidecarClient]:
    """Of a sidecar; Tidemark has read all three IDs."""
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    with sidecar(replace(servers, readers=database)) as client:
        yield client


def append(connection: psycopg.Connection, count: int) -> None:
    for _ in range(count):
        connection.execute("select tidemark.append('s', '{}')")


def test_a_token_that_the_database_has_not_given_out_is_refused(client: SidecarClient) -> None:
    """409 long before the time-out: how far the stream is, and how far its database."""
    began = time.monotonic()
    found = client.json(WAIT, 409, params={"token": "m4", "timeout": 50})
    assert time.monotonic() - began < 20
    assert (found["type"], found["stream"]["token"]) == ("urn:tidemark:problem:unreachable-token", "m3")
    assert found["detail"].startswith("s is at m3, and its database has given out no ID beyond 3: ")


@pytest.mark.parametrize("token", ["m4", "m3~w.4"])
def test_a_token_of_an_id_that_was_given_out_is_waited_for(
    client: SidecarClient, pipeline: Pipeline, shop: psycopg.Connection, token: str
) -> None:
    """Also if the ID is given out after the wait began, and its record arrives much later."""
    with (
        later(0.3, lambda: append(shop, 1)),
        later(3.0, lambda: pipeline.publish(moved("s", 4, w=At(3, 4)))),
    ):
        assert client.json(WAIT, params={"token": token, "timeout": 50})["token"] == "m4"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            "update tidemark_reader.positions set source = 'published', written_by = pg_current_xact_id()::xid",
            id="writers elsewhere",
        ),
        pytest.param("update tidemark_reader.positions set linear = 3", id="restored"),
        pytest.param("delete from tidemark_reader.positions", id="no relay"),
        pytest.param("select setval('tidemark.append_ids_1', 2)", id="less than Tidemark has read"),
        pytest.param("update tidemark.append_streams set ids = null", id="dropped"),
        pytest.param("drop function tidemark_reader.last_id", id="older functions"),
        pytest.param("drop schema tidemark_reader cascade", id="no readers"),
    ],
)
def test_a_database_that_may_not_know_all_ids_refuses_no_token(
    client: SidecarClient, shop: psycopg.Connection, change: str
) -> None:
    shop.execute(change.encode())
    assert client.json(WAIT, 412, params={"token": "m9", "timeout": 2.5})["type"] == "urn:tidemark:problem:not-yet"


def test_a_login_without_the_role_refuses_no_token(
    servers: ReadSideConfig, pipeline: Pipeline, database: str, shop: psycopg.Connection
) -> None:
    """With `tidemark_take` it does. The status of readers is not affected."""
    pipeline.publish(moved("s", 3, w=At(0, 3)))
    shop.execute(
        "create role watcher login password 'secret'; grant usage on schema tidemark_reader to watcher;"
        "grant select on all tables in schema tidemark_reader to watcher"
    )
    dsn = make_conninfo(database, user="watcher", password="secret")
    try:
        with sidecar(replace(servers, readers=dsn)) as client:
            client.json(WAIT, 412, params={"token": "m9", "timeout": 2.5})
            assert client.json("/v1/streams/s/readers")["readers"] == []
            shop.execute("grant tidemark_take to watcher")
            client.json(WAIT, 409, params={"token": "m9", "timeout": 50})
    finally:
        shop.execute("drop owned by watcher; drop role watcher")


def test_a_standby_does_not_know_the_last_id(postgres: PostgresServer, shop: psycopg.Connection) -> None:
    """It may lag behind its primary."""
    replica = PostgresReplica(postgres)
    replica.copy(as_standby=True)
    replica.start()
    try:
        with psycopg.connect(replica.dsn(shop.info.dbname), autocommit=True) as standby:
            eventually(lambda: standby.execute("select from tidemark_reader.positions").fetchone() is not None)
            assert standby.execute("select tidemark_reader.last_id('s')").fetchone() == (None,)
        assert shop.execute("select tidemark_reader.last_id('s')").fetchone() == (3,)
    finally:
        replica.stop()
