"""A real Synapse with two writers of events, its Redis, and the bridge as a process of its own."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest

from tests.fix_redis import Node
from tests.services.synapse import NAME, Homeserver, NoSynapse, programs
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import LOOPBACK, ServerProcess, free_port, listens
from tidemark.common.environment import child_environment
from tidemark.sources.synapse import state
from tidemark.sources.synapse.tables import STREAMS

DATABASE = "synapse"
READER = "tidemark_bridge"
"""The user as whom the bridge reads, with the rights that docs/how-to/synapse.md gives it."""


class BridgeProcess(ServerProcess):
    """`tidemark synapse`; `port` is that of its metrics."""

    name: ClassVar[str] = "bridge"

    def __init__(self, home: Home, name: str, variables: Mapping[str, str], reported_positions: Sequence[str]) -> None:
        super().__init__(home, free_port())
        self.name = name  # type: ignore[misc]
        self._variables = variables
        self._words = reported_positions

    def command(self) -> Sequence[str]:
        metrics = f"{LOOPBACK}:{self.port}"
        return [sys.executable, "-m", "tidemark", "synapse", "--server-name", NAME, "--metrics", metrics, *self._words]

    def environment(self) -> Mapping[str, str]:
        return child_environment(self._variables)

    def answers(self) -> bool:
        return listens(self.port)


def begun_by_a_bridge(database: str, stream: str, *writers: str) -> None:
    """What a bridge leaves in the database in which it remembers once it has begun the stream."""
    with state.state_session(database) as session:
        state.SCHEMA.migrate(session)
        with session.use() as connection:
            server = state.SynapseServer("one", "0/100", "one.test")
            state.create_stream(connection, STREAMS["events"], stream, server, writers, 7)


@pytest.fixture(scope="session")
def synapse_python() -> Path:
    """The Python that runs Synapse."""
    try:
        return programs()
    except NoSynapse as problem:
        pytest.skip(f"no Synapse here, pip cannot bring it: {problem}")


@pytest.fixture(scope="session")
def synapse_redis(home: Home) -> Iterator[Node]:
    """Synapse's own: what replicates there is lost with it."""
    node = Node(home, "synapse-redis", free_port(), save="''")
    node.start()
    yield node
    node.stop()


@contextmanager
def started_synapse(
    home: Home, postgres: PostgresServer, python: Path, redis_port: int, writers: Mapping[str, Sequence[str]]
) -> Iterator[Homeserver]:
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"create role {READER} login password '{READER}'".encode())
        connection.execute(f"grant pg_read_all_data, pg_read_all_stats to {READER}".encode())
        connection.execute(
            f"create database {DATABASE} template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'".encode()
        )
    server = Homeserver(home, python, postgres.dsn(DATABASE), redis_port, writers)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"drop database {DATABASE} with (force)".encode())
            connection.execute(f"drop role {READER}".encode())
