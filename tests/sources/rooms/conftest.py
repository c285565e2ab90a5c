"""A service's database with rooms and their streams."""

from collections.abc import Iterator

import psycopg
import pytest

from tidemark.common.postgres_session import Connection
from tidemark.sources.relay import queries
from tidemark.sources.rooms.tables import SCHEMA


@pytest.fixture
def rooms(database: str) -> Iterator[Connection]:
    """A connection in autocommit mode to a database with rooms and their streams."""
    with queries.session_of(database, "tests") as session:
        queries.SCHEMA.migrate(session)
        SCHEMA.migrate(session)
    with psycopg.connect(database, autocommit=True) as connection:
        for stream, direction in (("events", "forward"), ("backfill", "backward"), ("caches", "forward")):
            connection.execute("select tidemark.create_stream(%s, %s)", [stream, direction])
        yield connection


@pytest.fixture
def second_connection(database: str, rooms: Connection) -> Iterator[Connection]:
    """A second connection to the database of `rooms`."""
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection
