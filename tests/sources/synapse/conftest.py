"""A test's own bridge beside the session's Synapse."""

from collections.abc import Iterator

import pytest

from tests.fix_redis import Node
from tests.services.synapse import Homeserver
from tests.sinks.reader.given import Pipeline
from tests.sources.synapse.site import SynapseSite, made_site
from tidemark.app.stack.home import Home
from tidemark.app.stack.servers import KafkaServer


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
