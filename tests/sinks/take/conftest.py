"""A database of readers with positions."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_servers import made_database
from tests.sinks.take.given import Positioned
from tidemark.app.stack.postgres import PostgresServer
from tidemark.sinks.reader_database import install, reader_session


@pytest.fixture(scope="module")
def readers_database(postgres: PostgresServer) -> Iterator[str]:
    """A database with the functions, for all tests of a module."""
    with made_database(postgres, "template1") as dsn, reader_session(dsn, "test") as session:
        install(session)
        yield dsn


@pytest.fixture
def readers(readers_database: str) -> Iterator[Positioned]:
    """The same database, empty."""
    with (
        reader_session(readers_database, "test") as session,
        psycopg.connect(readers_database, autocommit=True) as connection,
    ):
        tables = connection.execute(
            "select string_agg(oid::regclass::text, ', ') from pg_class"
            " where relnamespace = 'tidemark_reader'::regnamespace and relkind = 'r'"
        ).fetchone()
        assert tables is not None
        connection.execute(f"truncate {tables[0]}; drop table if exists facts".encode())
        yield Positioned(readers_database, session, connection)
