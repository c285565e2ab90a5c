"""The clock by which history is dropped, and how far the pipeline's host is from it.

Batches carry the time of the host, retention counts days: a host, or a server, whose clock is days ahead would drop
history that is not past its time.
"""

from datetime import UTC, datetime

from tidemark.common.postgres_session import PostgresSession

_NOW = """
select least(
    clock_timestamp(),
    %s,
    coalesce(
        (select time from tidemark.retention_clock),
        (select applied_at from tidemark.applied_batches order by number desc limit 1)
    ) + interval '1 day'
)
"""


class RetentionClock:
    """Any thread may call; raises `Unavailable` and `Refused`."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def now(self, host: datetime) -> datetime:
        """The time to which retention may go in this run.

        It is the server's; that of the `host`, where this one is behind (its batches carry that time); and never more
        than a day after the last run that was complete.
        """
        with self._session.use() as connection:
            row = connection.execute(_NOW, (host,)).fetchone()
        assert row is not None
        found: datetime = row[0]
        return found.astimezone(UTC)

    def complete(self, now: datetime) -> None:
        """History was dropped up to this time. It is noted backwards too: a clock that was ahead was put right."""
        with self._session.use() as connection:
            connection.execute(
                "insert into tidemark.retention_clock (time) values (%s)"
                " on conflict (singleton) do update set time = excluded.time",
                (now,),
            )

    def difference(self) -> float:
        """Seconds by which the clock of this host is ahead of the server's; exact to half the time of a question."""
        with self._session.use() as connection:
            before = datetime.now(UTC)
            row = connection.execute("select clock_timestamp()").fetchone()
            after = datetime.now(UTC)
        assert row is not None
        server: datetime = row[0]
        return (before + (after - before) / 2 - server).total_seconds()
