"""The sinks on real servers, driven by a test as the publisher drives them."""

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis

from tests.sinks.reader.given import Pipeline
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.retention import Retention
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.redis.publish import Redis, RedisConfig

LEASE = LeaseConfig("test", ttl_seconds=2.0, grace_seconds=0.3, poll_seconds=0.05)


@pytest.fixture
def dsn(migrated: str) -> str:
    """A migrated database."""
    return migrated


@pytest.fixture
def sql(dsn: str) -> Iterator[psycopg.Connection]:
    """A session of the test's own, to look with."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def lease(dsn: str) -> Iterator[Lease]:
    with Lease.acquire(dsn, LEASE, threading.Event()) as lease:
        yield lease


@pytest.fixture
def store(dsn: str) -> Iterator[Postgres]:
    # The batches of tests are of some day in the past.
    with Postgres(PostgresConfig(dsn, Retention(history_days=36_500))) as postgres:
        yield postgres


@pytest.fixture
def shown(redis_url: str) -> Iterator[Redis]:
    with Redis(RedisConfig(redis_url)) as sink:
        yield sink


@pytest.fixture
def pipeline(store: Postgres, shown: Redis, lease: Lease) -> Pipeline:
    """What the pipeline does to the sinks, without Spark."""
    return Pipeline(store, shown, lease)


@pytest.fixture
def keys(redis_url: str) -> Iterator[Any]:
    """A client of the test's own, to look with; Any, because its types say that every answer may be awaitable."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
