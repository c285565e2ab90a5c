"""The loop of a service through a real PgBouncer in transaction mode, beside other clients of it."""

import pytest

from tests.services.pgbouncer import PgBouncer
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tests.waiting import eventually
from tidemark.app.stack.postgres import PostgresServer


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
