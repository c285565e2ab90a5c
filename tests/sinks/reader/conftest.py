from collections.abc import Iterator

import pytest

from sinks.lease import Lease
from sinks.postgres import Postgres
from sinks.reader import Positions
from sinks.redis import Redis
from tests.sinks.reader.given import Pipeline


@pytest.fixture
def pipeline(store: Postgres, shown: Redis, lease: Lease) -> Pipeline:
    return Pipeline(store, shown, lease)


@pytest.fixture
def positions(redis_url: str) -> Iterator[Positions]:
    """Without Postgres."""
    with Positions(redis_url) as positions:
        yield positions
