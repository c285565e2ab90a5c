"""Reading from a streaming replica: nothing is read before the replica shows what the position promises."""

import time
from collections.abc import Iterator

import psycopg
import pytest

from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresReplica, PostgresServer
from tidemark.sinks.reader.databases import end_of_records

SEGMENT = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def replica(postgres: PostgresServer) -> Iterator[PostgresReplica]:
    server = PostgresReplica(postgres)
    server.copy(as_standby=True)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _await_database(replica: PostgresReplica, name: str) -> None:
    """The replica replays `create database` later than the primary."""
    with psycopg.connect(replica.dsn("postgres"), autocommit=True) as standby:
        eventually(lambda: standby.execute("select 1 from pg_database where datname = %s", [name]).fetchone())


@pytest.mark.parametrize("form", ["threads", "asyncio"])
def test_replica_is_waited_for(
    service: ReadingService, pipeline: Pipeline, replica: PostgresReplica, form: str
) -> None:
    """A replica that stands still holds the reader back; what it misses is read when it has replayed it."""
    service.form = form
    name = service.sql.info.dbname
    given = {"source": replica.dsn(name), "primary": service.dsn}
    _await_database(replica, name)
    service.write(1)
    pipeline.move("w", 0, 1)
    service.until(lambda: service.ids() == [1], **given)
    with psycopg.connect(replica.dsn(name), autocommit=True) as standby:
        standby.execute("select pg_wal_replay_pause()")
        service.write(2)
        pipeline.move("w", 1, 2)
        with service.running(**given) as alive:
            time.sleep(0.7)
            assert service.place().linear == 1
            standby.execute("select pg_wal_replay_resume()")
            eventually(lambda: service.ids() == [1, 2] or not alive())
            # A primary that has just begun a segment and stands still does not hold the reader back.
            service.write(3)
            service.sql.execute("select pg_switch_wal()")
            pipeline.move("w", 2, 3)
            eventually(lambda: service.ids() == [1, 2, 3] or not alive())


def test_primary_may_be_named_as_its_own_replica(service: ReadingService, pipeline: Pipeline) -> None:
    """After a failover both addresses may lead to the same server: nothing is waited for."""
    service.write(1)
    pipeline.move("w", 0, 1)
    service.until(lambda: service.ids() == [1], primary=service.dsn)


@pytest.mark.parametrize(
    ("insert", "end"),
    [
        (5 * SEGMENT + 40, 5 * SEGMENT),
        (5 * SEGMENT + 3 * 8192 + 24, 5 * SEGMENT + 3 * 8192),
        (5 * SEGMENT + 3 * 8192 + 40, 5 * SEGMENT + 3 * 8192 + 40),
        (5 * SEGMENT + 3 * 8192 + 480, 5 * SEGMENT + 3 * 8192 + 480),
    ],
)
def test_page_headers_are_no_records(insert: int, end: int) -> None:
    """The first byte behind a page's header is reached by a replica only with the next record."""
    assert end_of_records(insert, SEGMENT) == end
