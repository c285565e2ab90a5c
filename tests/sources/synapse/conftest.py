"""A Synapse for the tests of this folder, and a test's own bridge beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fix_redis import Node
from tests.fix_synapse import started_synapse
from tests.services.synapse import Homeserver
from tests.sinks.reader.given import Pipeline
from tests.sources.synapse.site import SynapseSite, made_site
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer


@pytest.fixture(scope="package")  # a Synapse does not outlive that others stop its Postgres
def homeserver(home: Home, postgres: PostgresServer, synapse_python: Path, synapse_redis: Node) -> Iterator[Homeserver]:
    """Two workers write events; the main process writes the rest."""
    writers = {"events": ["event1", "event2"]}
    with started_synapse(home, postgres, synapse_python, synapse_redis.port, writers) as server:
        yield server


@pytest.fixture
def site(
    homeserver: Homeserver,
    home: Home,
    kafka: KafkaServer,
    prefix: str,
    database: str,
    synapse_redis: Node,
    pipeline: Pipeline,
) -> Iterator[SynapseSite]:
    with made_site(homeserver, home, kafka, prefix, database, synapse_redis, pipeline) as made:
        yield made
