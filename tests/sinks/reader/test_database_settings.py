"""Readers on databases with other defaults, and on databases that hide rows; both forms."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from structlog.testing import capture_logs

from tests.hidden import login, switch_rls
from tests.odd_settings import ODD, make_odd
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tests.waiting import eventually
from tidemark.common.errors import Refused
from tidemark.common.postgres_session import SESSION_SETTINGS
from tidemark.sinks.reader import Positions, Reader
from tidemark.sinks.reader.history import History

pytestmark = pytest.mark.parametrize("form", ["threads", "asyncio"])


@pytest.fixture
def three(service: ReadingService, pipeline: Pipeline, form: str) -> ReadingService:
    service.form = form
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3)
    return service


@pytest.fixture
def limited(three: ReadingService, dsn: str, sql: psycopg.Connection) -> Iterator[ReadingService]:
    """Its user owns neither the table nor the schema tidemark_reader, which an administrator made."""
    with login(sql, dsn, "reading", "tidemark_reader") as address:
        three.until(lambda: three.ids() == [1, 2, 3])
        sql.execute("grant usage on schema tidemark_reader to reading")
        sql.execute("grant select, insert, update, delete on all tables in schema tidemark_reader to reading")
        sql.execute("grant select on facts to reading")
        sql.execute("grant insert on effects to reading")
        three.dsn = address
        yield three


def test_reader_reads_whatever_the_database_defaults_to(three: ReadingService, pipeline: Pipeline, dsn: str) -> None:
    """Dates of the table come in UTC; the connection of the batch stays as the service's database has it."""
    three.sql.execute(
        "alter table facts add at timestamptz default '2026-03-04 05:06:07+00', add took interval default '2h'"
    )
    make_odd(dsn)
    three.until(lambda: three.ids() == [1, 2, 3])
    three.write(4)
    pipeline.move("w", 3, 4)
    with Positions(three.redis, dsn) as positions, Reader(positions, "s", **three.arguments(name="looker")) as reader:
        batch = next(reader)
        assert {(row["at"].isoformat(), row["took"]) for row in batch.rows} == {
            ("2026-03-04T05:06:07+00:00", timedelta(hours=2))
        }
        for name in ("DateStyle", "TimeZone", "IntervalStyle", "row_security", "lock_timeout"):
            assert batch.connection.execute(f"show {name}".encode()).fetchone() == (ODD[name],)


@pytest.mark.parametrize("table", ["facts", "tidemark_reader.places"])
def test_lock_that_a_reader_waits_for_is_named(
    three: ReadingService, pipeline: Pipeline, dsn: str, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """A statement on the source, or on the place, times out behind a lock. The log names the session that has the
    lock, and the reader continues when the lock is free."""
    three.until(lambda: three.ids() == [1, 2, 3])
    for module in ("reader", "async_reader"):
        monkeypatch.setattr(f"tidemark.sinks.reader.{module}.SET_LOCK_TIMEOUT", "set local lock_timeout = '200ms'")
    monkeypatch.setitem(cast("dict[str, str]", SESSION_SETTINGS), "lock_timeout", "200ms")
    with three.running() as alive:
        with capture_logs() as logs, psycopg.connect(dsn, application_name="nightly-job") as other:
            other.execute(f"lock table {table}".encode())
            other.execute("insert into facts values (4, 'w', 0)")
            pipeline.move("w", 3, 4)
            named = f"locked by pid {other.info.backend_pid} (user postgres, session named nightly-job"
            eventually(lambda: any(named in str(it) for it in logs) or not alive())
            assert three.ids() == [1, 2, 3]
        eventually(lambda: three.ids() == [1, 2, 3, 4] or not alive())
    assert three.ids() == [1, 2, 3, 4]


def test_query_for_operators_changes_has_a_lock_timeout(
    three: ReadingService, pipeline: Pipeline, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader without new facts waits for a lock on its place: the log names the session that has it."""
    monkeypatch.setattr("tidemark.sinks.reader.read_loop.OPERATOR_QUERY_SECONDS", 0.0)
    for module in ("reader", "async_reader"):
        monkeypatch.setattr(f"tidemark.sinks.reader.{module}.SET_LOCK_TIMEOUT", "set local lock_timeout = '200ms'")
    three.until(lambda: three.ids() == [1, 2, 3])
    with three.running() as alive:
        with capture_logs() as logs, psycopg.connect(dsn, application_name="nightly-job") as other:
            other.execute("lock table tidemark_reader.places")
            named = f"locked by pid {other.info.backend_pid} (user postgres, session named nightly-job"
            eventually(lambda: any(named in str(it) for it in logs) or not alive())
        three.write(4)
        pipeline.move("w", 3, 4)
        eventually(lambda: three.ids() == [1, 2, 3, 4] or not alive())
    assert three.ids() == [1, 2, 3, 4]


def test_transaction_of_a_batch_has_a_lock_timeout(three: ReadingService, dsn: str) -> None:
    """Ten seconds, only in the transaction of the batch, and only if the session has no limit of its own."""
    with Positions(three.redis, dsn) as positions, Reader(positions, "s", **three.arguments(rows=1)) as reader:
        batch = next(reader)
        assert batch.connection.execute("show lock_timeout").fetchone() == ("10s",)
    given = make_conninfo(dsn, options="-c lock_timeout=123ms")
    with Positions(three.redis, dsn) as positions, Reader(positions, "s", **three.arguments(effects=given)) as reader:
        assert next(reader).connection.execute("show lock_timeout").fetchone() == ("123ms",)


def refused(service: ReadingService, **more: Any) -> str:
    """What the reader ends with."""
    with pytest.raises(Refused) as caught:
        service.until(lambda: False, **more)
    assert "\n" not in str(caught.value)
    return caught.value.problem


def test_reader_refuses_a_table_whose_rows_are_hidden(limited: ReadingService, pipeline: Pipeline) -> None:
    """Not even a policy that shows every row will do. Nothing is passed: once it is off, all rows are read."""
    limited.sql.execute("alter table facts enable row level security")
    limited.sql.execute("create policy everything on facts using (true)")
    limited.write(4)
    pipeline.move("w", 3, 4)
    assert 'hides rows of table "facts" from role "reading"' in refused(limited)
    limited.sql.execute("alter table facts disable row level security")
    limited.until(lambda: limited.ids() == [1, 2, 3, 4])


@pytest.mark.parametrize("table", ["places", "delivered", "parked"])
def test_reader_refuses_a_place_that_is_hidden(limited: ReadingService, pipeline: Pipeline, table: str) -> None:
    """It would begin anew, or forget what it handed over. The handler's connection keeps its own setting."""
    switch_rls(limited.sql, "tidemark_reader", "enable", f"^{table}$")
    limited.write(4)
    pipeline.move("w", 3, 4)
    assert f'hides rows of table "tidemark_reader"."{table}" from role "reading"' in refused(limited)
    switch_rls(limited.sql, "tidemark_reader", "disable")
    limited.until(lambda: limited.ids() == [1, 2, 3, 4])


def test_place_that_is_hidden_while_the_reader_runs_is_noticed(limited: ReadingService, pipeline: Pipeline) -> None:
    """It looks like a place that another copy has in hand."""

    def run_and_hide() -> None:
        with limited.running() as alive:
            limited.write(4)
            pipeline.move("w", 3, 4)
            eventually(lambda: limited.ids() == [1, 2, 3, 4] or not alive())
            switch_rls(limited.sql, "tidemark_reader", "enable", "^places$")
            limited.write(5)
            pipeline.move("w", 4, 5)
            eventually(lambda: not alive())

    with pytest.raises(Refused, match="hides rows"):
        run_and_hide()
    assert limited.ids() == [1, 2, 3, 4]
    switch_rls(limited.sql, "tidemark_reader", "disable")
    limited.until(lambda: limited.ids() == [1, 2, 3, 4, 5])


def test_reader_refuses_positions_that_are_hidden(limited: ReadingService) -> None:
    """Of Tidemark's Postgres, which it asks where Redis does not know."""
    switch_rls(limited.sql, "tidemark", "enable")
    history = History(limited.dsn)
    with pytest.raises(Refused, match="hides rows of table"):
        history.read_keys("s")
    switch_rls(limited.sql, "tidemark", "disable")
    assert history.read_keys("s").linear == 3
    history.close()
