"""Retention where clocks are wrong: the host's, and the server's."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

import psycopg
import pytest
from structlog.testing import capture_logs

from tests.sinks.given import advance, batch, stream
from tests.waiting import eventually
from tidemark.sinks.background import Maintenance, MaintenanceConfig
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.retention import Retention
from tidemark.sinks.postgres.store import Postgres, PostgresConfig

DAY = timedelta(days=1)


@pytest.fixture
def kept(dsn: str, lease: Lease) -> Iterator[Postgres]:
    """Seven days are kept; there is an advance of each of the last ten."""
    with Postgres(PostgresConfig(dsn, Retention(history_days=7))) as store:
        today = datetime.now(UTC)
        for number, days in enumerate(range(9, -1, -1)):
            now = int((today - days * DAY).timestamp() * 1000)
            store.apply(batch(number, stream("s", advance("w", number, number + 1)), token=lease.token, now=now))
        yield store


def days(sql: psycopg.Connection) -> list[int]:
    """The days before today of which there are advances, oldest first."""
    query = "select distinct (now() at time zone 'UTC')::date - (time at time zone 'UTC')::date"
    rows = sql.execute(f"{query} from tidemark.packed_advances order by 1 desc".encode())
    return [int(day) for (day,) in rows]


def host_is_ahead(monkeypatch: pytest.MonkeyPatch, ahead: timedelta) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    for module in ("background", "postgres.retention"):
        monkeypatch.setattr(f"tidemark.sinks.{module}.datetime", Wrong)


@pytest.mark.parametrize("ahead", [9, -9, 0])
def test_clock_of_the_host_drops_no_history(
    kept: Postgres, lease: Lease, sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Nine days ahead: only what is past its time by the server's clock goes. Behind: nothing. Both are told of."""
    host_is_ahead(monkeypatch, ahead * DAY)
    told: list[float] = []
    done = "select from tidemark.retention_clock"
    with (
        capture_logs() as logs,
        Maintenance([], kept, lease, MaintenanceConfig(poll_seconds=0.05), told.append),
    ):
        eventually(lambda: sql.execute(done.encode()).fetchone() is not None and told)
    assert days(sql) == [*range(7 if ahead >= 0 else 9, -1, -1)]
    assert abs(told[0] - ahead * 86_400) < 30
    assert any("The clocks of this host" in it["event"] for it in logs) == bool(ahead)


def test_clock_of_the_server_drops_a_day_at_a_run(kept: Postgres, sql: psycopg.Connection) -> None:
    """One that was nine days behind at the last run, or is nine days ahead now, deletes one day more each time."""
    host = datetime.now(UTC)
    kept.clock.note_complete_run(host - 4 * DAY)
    for run in range(5):
        now = kept.clock.retention_limit(host)
        assert abs(now - (host - max(3 - run, 0) * DAY)) < timedelta(minutes=5)
        kept.apply_retention(now)
        kept.clock.note_complete_run(now)
        assert days(sql)[0] == min(9, 7 + max(3 - run, 0))
    kept.clock.note_complete_run(host - 20 * DAY)
    assert kept.clock.retention_limit(host) < host - 18 * DAY


def test_first_run_goes_by_the_last_batch(dsn: str, sql: psycopg.Connection, lease: Lease) -> None:
    """A server whose clock jumped before there was any run drops no more than a day either."""
    with Postgres(PostgresConfig(dsn)) as store:
        store.apply(batch(1, stream("s", advance("w", 0, 1)), token=lease.token))
        sql.execute("update tidemark.applied_batches set applied_at = now() - interval '9 days'")
        now = store.clock.retention_limit(datetime.now(UTC))
    assert abs(datetime.now(UTC) - 8 * DAY - now) < timedelta(minutes=5)
