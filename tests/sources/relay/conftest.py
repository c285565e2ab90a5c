"""A service's database with streams and functions."""

import pytest

from tests.sources.relay.running import judge, run, sql, topic
from tests.sources.relay.world import prepared_schema

__all__ = ["judge", "run", "sql", "topic"]


@pytest.fixture
def ready(database: str) -> str:
    """A database with what `tidemark.append` needs, and the table in which services of tests keep the truth."""
    with prepared_schema(database):
        return database
