"""Retention: deletes old history by dropping the partition of a day, without blocking a batch.

Dropping an attached partition takes an exclusive lock on the whole history. The lock waits for every reader (for hours
during a dump), and would block all batches meanwhile. Therefore the partition is first detached concurrently, which
blocks no batch. Dropping the detached partition then waits only for readers of this partition. Only the owner of the
tables may detach, and not behind a pooler. Other members of the role `tidemark_owner`, and sessions behind a pooler,
call a function that drops attached partitions, with a short lock time-out.

Every step may be interrupted; the next call continues.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import LiteralString

from psycopg import sql
from psycopg.errors import LockNotAvailable

from tidemark.common.postgres_session import Connection, PostgresSession, SessionConnection, fetch_all, fetch_value
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.positions import forget_writer_numbers


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention periods.

    Attributes:
        history_days: for advances, moves of linear positions, closed gaps and applied batches.
        audit_days: for the table `skips`, operator overrides and late completions.
    """

    history_days: int = 7
    audit_days: int = 400


@dataclass(frozen=True, slots=True)
class HistoryPartition:
    """A partition of the history. The partition has the advances of one day.

    Attributes:
        name: the name of the partition.
        parent: the partitioned table; None if the partition is detached.
        is_pending: whether a detach has begun and has not been completed.
        is_owned: whether this user has the rights of the partition's owner.
    """

    name: str
    parent: str | None
    is_pending: bool
    is_owned: bool


@dataclass(frozen=True, slots=True)
class DropResult:
    """The outcome of `drop_before`.

    Attributes:
        dropped_partitions: names of the dropped partitions.
        sessions_by_partition: name of a partition that could not be dropped -> the sessions with a lock on it or its
            table, as text.
    """

    dropped_partitions: Sequence[str]
    sessions_by_partition: dict[str, str]


def drop_before(connection: Connection, day: date) -> DropResult:
    """Drop the partitions of days before `day`. Call this outside a transaction.

    A partition with active readers is left to a later call. If such a partition is attached, the later partitions of
    its table are left too.
    """
    with _with_lock_timeout(connection, "2s"):
        return _drop_before(connection, day)


@contextmanager
def _with_lock_timeout(connection: Connection, timeout: str) -> Iterator[None]:
    """Set the lock timeout of the session during the block. Does nothing behind a pooler."""
    if _is_pooled(connection):
        yield
        return
    row = connection.execute("show lock_timeout").fetchone()
    connection.execute("select set_config('lock_timeout', %s, false)", (timeout,))
    try:
        yield
    finally:
        if row is not None and not connection.closed:
            connection.execute("select set_config('lock_timeout', %s, false)", row)


def _drop_before(connection: Connection, day: date) -> DropResult:
    dropped: list[str] = []
    in_use: dict[str, str] = {}
    blocked: set[str | None] = set()  # partitioned tables with a failed detach: later partitions would fail too
    for old in _partitions_before(connection, day):
        if old.parent is not None and old.parent in blocked:
            continue
        try:
            dropped += _drop(connection, old, day)
        except LockNotAvailable:
            in_use[old.name] = _readers(connection, old)
            blocked.add(old.parent)
    return DropResult(dropped, in_use)


def _partitions_before(connection: Connection, day: date) -> list[HistoryPartition]:
    return fetch_all(
        connection,
        HistoryPartition,
        """
        select c.relname as name, p.relname as parent, coalesce(i.inhdetachpending, false) as is_pending,
            pg_has_role(c.relowner, 'usage') as is_owned
        from pg_class c
        left join pg_inherits i on i.inhrelid = c.oid
        left join pg_class p on p.oid = i.inhparent
        where c.relnamespace = 'tidemark'::regnamespace and c.relkind = 'r'
            and c.relname ~ '_advances_[0-9]{8}$' and right(c.relname, 8) < to_char(%s, 'YYYYMMDD')
        order by not coalesce(i.inhdetachpending, false), 1
        """,
        (day,),
    )


def _drop(connection: Connection, old_partition: HistoryPartition, day: date) -> list[str]:
    name = sql.Identifier("tidemark", old_partition.name)
    # CONCURRENTLY is refused in a transaction.
    needs_session = old_partition.parent is not None and not old_partition.is_pending
    if not old_partition.is_owned or (needs_session and _is_pooled(connection)):
        return [gone for (gone,) in connection.execute("select tidemark.drop_history_before(%s)", (day,))]
    if old_partition.parent is not None:
        how = sql.SQL("finalize" if old_partition.is_pending else "concurrently")
        parent = sql.Identifier("tidemark", old_partition.parent)
        connection.execute(sql.SQL("alter table {} detach partition {} {}").format(parent, name, how))
    connection.execute(sql.SQL("drop table {}").format(name))
    return [old_partition.name]


def _is_pooled(connection: Connection) -> bool:
    return isinstance(connection, SessionConnection) and connection.is_pooled


def _readers(connection: Connection, old_partition: HistoryPartition) -> str:
    rows = connection.execute(
        """
        select distinct format('%%s (pid %%s)', coalesce(nullif(application_name, ''), usename), pid)
        from pg_locks join pg_stat_activity using (pid)
        where relation = any(array(select oid from pg_class where relnamespace = 'tidemark'::regnamespace
                and relname = any(%s)))
            and granted and pid <> pg_backend_pid() and datname = current_database() order by 1
        """,
        ([old_partition.name, old_partition.parent or old_partition.name],),
    )
    return ", ".join(text for (text,) in rows) or "sessions that have ended"


def _first_days(connection: Connection, today: date, retention: Retention) -> dict[str, date]:
    """Name of the policy -> the first day that must be stored. `*` is every stream without a policy of its own."""
    rows = connection.execute("select stream, value from tidemark.policies where setting = 'history_days'")
    days = {"*": retention.history_days, **dict(rows.fetchall())}
    return {name: today - timedelta(days=count) for name, count in days.items()}


def oldest_stored_day(connection: Connection, today: date, retention: Retention) -> date:
    """The first day whose advances must be stored. Streams share rows, so the policy with the most days decides."""
    return min(_first_days(connection, today, retention).values())


def hide_expired(connection: Connection, today: date, retention: Retention) -> None:
    """Hide advances that are past the retention of their stream, by updating the table `history_since`."""
    firsts = _first_days(connection, today, retention)
    since = {name: datetime.combine(day, time(), UTC) for name, day in firsts.items()}
    with connection.transaction():
        if dict(connection.execute("select stream, since from tidemark.history_since").fetchall()) == since:
            return
        connection.execute("delete from tidemark.history_since where stream <> all(%s)", ([*since],))
        execute(
            connection,
            "insert into tidemark.history_since select * from unnest(%s::text[], %s::timestamptz[])"
            " on conflict (stream) do update set since = excluded.since",
            since.items(),
        )


def delete_expired(connection: Connection, today: date, retention: Retention) -> None:
    """Hide expired advances, and delete other expired rows. Call this outside a transaction.

    `drop_before` deletes the advances.
    """
    hide_expired(connection, today, retention)
    oldest, audited = oldest_stored_day(connection, today, retention), today - timedelta(days=retention.audit_days)
    # The most specific policy counts, as in `streaming.values.limits`.
    expired: LiteralString = """ < %s - coalesce((
        select value from tidemark.policies p where setting = 'history_days'
            and (p.stream = g.stream or p.stream like '%%*' and starts_with(g.stream, left(p.stream, -1)))
        order by p.stream = g.stream desc, length(p.stream) desc limit 1
    ), %s)::integer"""
    for rows in ("tidemark.stream_gaps g where closed_at", "tidemark.linear_moves g where time"):
        connection.execute(f"delete from {rows}{expired}", (today, retention.history_days))
    connection.execute(
        "delete from tidemark.applied_batches where applied_at < %s"
        " and number < (select max(number) from tidemark.applied_batches)",
        (oldest,),
    )
    connection.execute("delete from tidemark.skips where time < %s", (audited,))
    connection.execute("delete from tidemark.overrides where time < %s", (audited,))
    # Keep the newest late completion of each stream: readers and sinks compare its number with theirs.
    connection.execute(
        "delete from tidemark.late_completions l where time < %s and number <"
        " (select max(number) from tidemark.late_completions newer where newer.stream = l.stream)",
        (audited,),
    )
    with connection.transaction():
        forget_writer_numbers(connection, datetime.combine(oldest, time(), UTC))


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
    """The clock for retention, and the difference between the clocks of the pipeline's host and of the server.

    Batches have the time of the host. If the clock of the host or of the server is days ahead, history must not be
    dropped too early. Thread-safe. Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def retention_limit(self, host: datetime) -> datetime:
        """The time that a run of retention must use as the current time.

        The earliest of: the server's time, `host` (the host's time), and one day after the last complete run. Before
        the first complete run, the time of the newest batch replaces the time of the last run.
        """
        now: datetime = self._session.fetch_value(_NOW, (host,))
        return now.astimezone(UTC)

    def note_complete_run(self, now: datetime) -> None:
        """Store `now` as the time of the last complete run.

        `now` may be earlier than the stored time, because a clock may have been corrected.
        """
        self._session.execute(
            "insert into tidemark.retention_clock (time) values (%s)"
            " on conflict (singleton) do update set time = excluded.time",
            (now,),
        )

    def difference(self) -> float:
        """Measure by how many seconds the clock of this machine is ahead of the clock of Postgres.

        Negative: this machine is behind.

        The error is at most half a round trip.
        """
        with self._session.use() as connection:
            before = datetime.now(UTC)
            server: datetime = fetch_value(connection, "select clock_timestamp()")
            after = datetime.now(UTC)
        return (before + (after - before) / 2 - server).total_seconds()
