"""One scene for all incidents of this folder: its threads and servers are gone before tests of others go on."""

from collections.abc import Iterator

import pytest

from tests.fix_pipeline import made_site
from tests.incidents.scene import Scene, made_scene
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer


@pytest.fixture(scope="package")
def scene(
    kafka: KafkaServer,
    postgres: PostgresServer,
    redis_server: RedisServer,
    warm_jvm: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    home = tmp_path_factory.mktemp("incidents")
    with made_site(kafka, postgres, redis_server, home) as site, made_scene(site, home) as made:
        yield made
