from collections.abc import Iterator

import pytest

from app.sidecar.service import Servers
from sinks.lease import Lease
from sinks.postgres import Postgres
from sinks.redis import Redis
from tests.app.sidecar.given import Client, sidecar
from tests.sinks.reader.given import Pipeline


@pytest.fixture
def pipeline(store: Postgres, shown: Redis, lease: Lease) -> Pipeline:
    return Pipeline(store, shown, lease)


@pytest.fixture
def servers(redis_url: str, dsn: str) -> Servers:
    return Servers(redis_url, dsn)


@pytest.fixture
def client(servers: Servers) -> Iterator[Client]:
    """Of a sidecar on both servers, without tokens."""
    with sidecar(servers) as client:
        yield client
