"""The loop of a service through a real PgBouncer in transaction mode, beside other clients of it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from tests.fix_servers import away, own_postgres
from tests.services.pgbouncer import PgBouncer, pgbouncer
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tests.waiting import eventually
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import free_port

EFFECTS = (
    "create table effects (n bigint generated always as identity, reader text, stream_id bigint, instance text,"
    " ordinal int, late boolean)"
)
SEEN = "select count(*) from effects"


@pytest.fixture
def own_pooler(tmp_path: Path) -> Iterator[tuple[PostgresServer, PgBouncer]]:
    """A Postgres of its own with a table for effects, behind a PgBouncer of its own."""
    with own_postgres(tmp_path / "postgres") as server:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as sql:
            sql.execute(EFFECTS)
        pooler = PgBouncer(Home(tmp_path / "pooler"), free_port(), server, pgbouncer() or "pgbouncer")
        pooler.start()
        try:
            yield server, pooler
        finally:
            pooler.kill()


@pytest.mark.parametrize("form", ["threads", "asyncio"])
def test_reader_behind_a_pooler_needs_no_session(
    service: ReadingService, pipeline: Pipeline, pooler: PgBouncer, postgres: PostgresServer, form: str
) -> None:
    """Source, effects and Tidemark's Postgres are reached through it, thirty batches in a row by three copies; every
    fact is once in effect, and no statement stays prepared."""
    service.form = form
    direct, service.dsn = service.dsn, pooler.dsn(service.dsn)
    for id in range(1, 31):
        service.write(id)
    pipeline.move("w", 0, 30)
    with service.running(rows=1) as alive, service.running(rows=1), service.running(rows=1):
        eventually(lambda: len(service.ids()) == 30 or not alive(), seconds=60)
        assert service.ids() == [*range(1, 31)]
        assert service.ids(late=True) == []
        leaked = service.sql.execute(
            "select count(*) from pg_locks where locktype = 'advisory'"
            " and database = (select oid from pg_database where datname = current_database())"
            " and pid in (select pid from pg_stat_activity where application_name like 'tidemark reader%')"
        )
        assert leaked.fetchone() == (0,)
    service.dsn = direct


@pytest.mark.parametrize("form", ["threads", "asyncio"])
def test_reader_that_starts_while_the_server_behind_the_pooler_is_away_waits(
    service: ReadingService, pipeline: Pipeline, own_pooler: tuple[PostgresServer, PgBouncer], form: str
) -> None:
    """PgBouncer answers the login itself, and says that its server is away. That is an outage, and no refusal."""
    server, pooler = own_pooler
    service.form = form
    service.write(1)
    pipeline.move("w", 0, 1)
    with away(server), capture_logs() as logs, service.running(effects=pooler.dsn(server.dsn("postgres"))) as alive:
        eventually(lambda: not alive() or any("Waiting for Postgres" in line["event"] for line in logs))
        assert alive()
        server.start()
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as sql:
            eventually(lambda: not alive() or sql.execute(SEEN).fetchone() == (1,), seconds=60)
        assert alive()
