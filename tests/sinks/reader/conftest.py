from collections.abc import Iterator

import psycopg
import pytest

from tests.sinks.reader.service import ReadingService
from tidemark.sinks.reader import Positions


@pytest.fixture
def positions(redis_url: str) -> Iterator[Positions]:
    """Without Postgres."""
    with Positions(redis_url) as positions:
        yield positions


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers look ten times a second where nothing rings, so that no test waits for them to end."""
    for module in ("follow", "wait"):
        monkeypatch.setattr(f"tidemark.sinks.reader.{module}.LONGEST_WAIT_SECONDS", 0.1)


@pytest.fixture
def service(redis_url: str, dsn: str, sql: psycopg.Connection) -> ReadingService:
    sql.execute("create table facts (stream_id bigint, instance text, ordinal int)")
    sql.execute(
        "create table effects (n bigint generated always as identity, reader text, stream_id bigint, instance text,"
        " ordinal int, late boolean)"
    )
    return ReadingService(redis_url, dsn, sql)
