"""What a session of Tidemark's relies on is set by the session, whatever server, database and role default to."""

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import LockNotAvailable

from tests.odd_settings import ODD, make_odd
from tests.services.pgbouncer import PgBouncer
from tidemark.common.errors import Refused
from tidemark.common.postgres_session import (
    SESSION_SETTINGS,
    AsyncSessionConnection,
    PostgresSession,
    SessionConnection,
)
from tidemark.sinks.postgres.database import session_of
from tidemark.sources.relay.queries import session_of as relay_session

SHOWN = "select " + ", ".join(f"current_setting('{name}')" for name in SESSION_SETTINGS)
DATED = "select timestamptz '2026-03-04 05:06:07+00', interval '1 day 2 hours'"


@pytest.fixture
def odd(database: str) -> str:
    """An address of a database whose defaults and whose role's are other than Postgres's."""
    make_odd(database)
    return database


def test_every_session_has_the_settings_it_relies_on(odd: str) -> None:
    """Dates and intervals are read, and the settings of a use come after those of all."""
    with psycopg.connect(odd) as plain:
        assert plain.execute(SHOWN).fetchone() == tuple(ODD[name] for name in SESSION_SETTINGS)
        with pytest.raises(NotImplementedError):
            plain.execute(DATED).fetchone()
    for session in (session_of(odd, "test"), relay_session(odd, "test")):
        with session, session.use() as connection:
            assert connection.execute(SHOWN).fetchone() == tuple(SESSION_SETTINGS.values())
            row = connection.execute(DATED).fetchone()
            assert row is not None
            assert (row[0].isoformat(), row[1]) == ("2026-03-04T05:06:07+00:00", timedelta(1, 7200))
            assert connection.execute("select '\\'").fetchone() == ("\\",)
    with relay_session(odd, "test") as session, session.use() as connection:
        assert connection.execute("show enable_seqscan").fetchone() == ("off",)


def test_asyncio_has_the_same(odd: str) -> None:
    async def shown() -> tuple[object, ...] | None:
        async with await AsyncSessionConnection.open(odd) as connection:
            return await (await connection.execute(SHOWN)).fetchone()

    assert asyncio.run(shown()) == tuple(SESSION_SETTINGS.values())


def test_settings_take_one_round_trip(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One statement, which also says whether there is a pooler."""
    asked: list[object] = []
    execute = SessionConnection.execute

    def counted(self: SessionConnection, *args: Any, **options: Any) -> object:
        asked.append(args[0])
        return execute(self, *args, **options)

    monkeypatch.setattr(SessionConnection, "execute", counted)
    with session_of(odd, "test") as session, session.use():
        assert len(asked) == 1


def test_time_outs_of_the_address_count_more(odd: str) -> None:
    """A person who gives one in the address has a reason; one of the database is for services."""
    given = make_conninfo(odd, options="-c lock_timeout=123ms -c datestyle=German")
    with session_of(given, "test") as session, session.use() as connection:
        row = connection.execute("select current_setting('lock_timeout'), current_setting('DateStyle')").fetchone()
        assert row == ("123ms", "ISO, MDY")


def test_behind_a_pooler_each_transaction_has_them_and_nothing_stays(odd: str, pooler: PgBouncer) -> None:
    """Sessions that PgBouncer lends by transaction: with and without a transaction, in a pipeline and by asyncio."""
    wanted = tuple(SESSION_SETTINGS.values())
    with session_of(pooler.dsn(odd), "test") as session, session.use() as connection:
        assert isinstance(connection, SessionConnection)
        assert connection.is_pooled
        assert connection.execute(SHOWN).fetchone() == wanted
        with connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            with connection.transaction():
                assert connection.execute(SHOWN).fetchone() == wanted
        with connection.pipeline(), connection.transaction():
            shown = connection.execute(SHOWN)
        assert shown.fetchone() == wanted

    async def by_asyncio() -> None:
        async with await AsyncSessionConnection.open(pooler.dsn(odd)) as connection:
            assert await (await connection.execute(SHOWN)).fetchone() == wanted
            async with connection.transaction():
                assert await (await connection.execute(SHOWN)).fetchone() == wanted

    asyncio.run(by_asyncio())
    with psycopg.connect(pooler.dsn(odd), autocommit=True, prepare_threshold=None) as other:
        assert other.execute("show row_security").fetchone() == ("on",)
        assert other.execute("show lock_timeout").fetchone() == (ODD["lock_timeout"],)


def test_nobody_waits_for_a_lock_in_silence(database: str) -> None:
    """The limit of the address, so that the test need not wait for ours."""
    with psycopg.connect(database) as holder:
        holder.execute("create table held ()")
        holder.commit()
        holder.execute("lock table held")
        hurried = make_conninfo(database, options="-c lock_timeout=100ms")
        with SessionConnection.open(hurried) as connection, pytest.raises(LockNotAvailable):
            connection.execute("select from held")


def test_rows_hidden_by_a_policy_are_refused_with_what_to_do(database: str) -> None:
    """Who is neither owner nor BYPASSRLS, whatever a policy shows; the owner under FORCE; and nobody else."""
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute("drop role if exists looker")
        admin.execute("create role looker login password 'looker'")
        admin.execute("create table kept (id int)")
        admin.execute("insert into kept values (1)")
        admin.execute("grant select on kept to looker")
        admin.execute("alter table kept enable row level security")
        admin.execute("create policy everything on kept using (true)")
        looking = session_of(make_conninfo(database, user="looker", password="looker"), "test")
        with looking:
            problem, remedy = _refusal(looking)
            assert 'hides rows of table "kept" from role "looker"' in problem
            assert 'ALTER ROLE "looker" BYPASSRLS' in remedy
            assert 'ALTER TABLE "kept" DISABLE ROW LEVEL SECURITY' in remedy
            assert "a policy is not enough" in remedy
            admin.execute("alter role looker bypassrls")
            assert _rows(looking) == [(1,)]
            admin.execute("alter role looker nobypassrls")
            admin.execute("grant create on schema public to looker")
            admin.execute("alter table kept owner to looker")
            assert _rows(looking) == [(1,)]
            admin.execute("alter table kept force row level security")
            assert 'ALTER TABLE "kept" NO FORCE ROW LEVEL SECURITY' in _refusal(looking)[1]
            admin.execute("alter table kept no force row level security")
            assert _rows(looking) == [(1,)]
        admin.execute("drop table kept")
        admin.execute("drop owned by looker")
        admin.execute("drop role looker")


def _rows(session: PostgresSession) -> list[tuple[int]]:
    with session.use() as connection:
        return connection.execute("select id from kept").fetchall()


def _refusal(session: PostgresSession) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        _rows(session)
    assert "\n" not in str(caught.value)
    return caught.value.problem, caught.value.do
