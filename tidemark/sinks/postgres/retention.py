"""The end of a day of history: its partition is dropped without a lock that a batch would have to wait for.

To drop a partition takes an exclusive lock of the whole history, which waits for whoever reads it (a dump, for hours),
and all batches wait behind it. So the partition is detached first, concurrently, which no writer notices; nobody but
its own readers is concerned by what follows. Only the owner of the tables may do so. For other members of the role
`tidemark_owner` there is a function that drops, and gives up before a batch has waited long.

Each step may be interrupted, and is found by the next call where it was left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime

from psycopg import sql
from psycopg.errors import LockNotAvailable

from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.common.session_settings import SessionConnection


@dataclass(frozen=True, slots=True)
class Day:
    """A partition. `parent` is None once it is detached, `pending` where that was begun."""

    name: str
    parent: str | None
    pending: bool
    ours: bool


@dataclass(frozen=True, slots=True)
class Tidied:
    """Partitions that were dropped, and those that stay for now, each with who reads it."""

    dropped: Sequence[str]
    in_use: dict[str, str]


def drop_before(connection: Connection, day: date) -> Tidied:
    """Drop what is older than `day`, but for what somebody reads: that waits for another call."""
    with _patience(connection, "2s"):
        return _drop_before(connection, day)


@contextmanager
def _patience(connection: Connection, lock_timeout: str) -> Iterator[None]:
    """Wait for no lock any longer, and put the session's own limit back. Of a pooler's session it stays as it is."""
    if _is_pooled(connection):
        yield
        return
    row = connection.execute("show lock_timeout").fetchone()
    connection.execute("select set_config('lock_timeout', %s, false)", (lock_timeout,))
    try:
        yield
    finally:
        if row is not None and not connection.closed:
            connection.execute("select set_config('lock_timeout', %s, false)", row)


def _drop_before(connection: Connection, day: date) -> Tidied:
    dropped: list[str] = []
    in_use: dict[str, str] = {}
    held_up: set[str | None] = set()  # tables of which one partition has to wait: then all others have to
    for old in _before(connection, day):
        if old.parent is not None and old.parent in held_up:
            continue
        try:
            dropped += _dropped(connection, old, day)
        except LockNotAvailable:
            in_use[old.name] = _readers(connection, old)
            held_up.add(old.parent)
    return Tidied(dropped, in_use)


def _before(connection: Connection, day: date) -> list[Day]:
    rows = connection.execute(
        """
        select c.relname, p.relname, coalesce(i.inhdetachpending, false), pg_has_role(c.relowner, 'usage')
        from pg_class c
        left join pg_inherits i on i.inhrelid = c.oid
        left join pg_class p on p.oid = i.inhparent
        where c.relnamespace = 'tidemark'::regnamespace and c.relkind = 'r'
            and c.relname ~ '_advances_[0-9]{8}$' and right(c.relname, 8) < to_char(%s, 'YYYYMMDD')
        order by not coalesce(i.inhdetachpending, false), 1
        """,
        (day,),
    )
    return [Day(*row) for row in rows]


def _dropped(connection: Connection, old: Day, day: date) -> list[str]:
    name = sql.Identifier("tidemark", old.name)
    needs_session = old.parent is not None and not old.pending  # CONCURRENTLY is refused in a transaction
    if not old.ours or (needs_session and _is_pooled(connection)):
        return [gone for (gone,) in connection.execute("select tidemark.drop_history_before(%s)", (day,))]
    if old.parent is not None:
        how = sql.SQL("finalize" if old.pending else "concurrently")
        parent = sql.Identifier("tidemark", old.parent)
        connection.execute(sql.SQL("alter table {} detach partition {} {}").format(parent, name, how))
    connection.execute(sql.SQL("drop table {}").format(name))
    return [old.name]


def _is_pooled(connection: Connection) -> bool:
    return isinstance(connection, SessionConnection) and connection.is_pooled


def _readers(connection: Connection, old: Day) -> str:
    rows = connection.execute(
        """
        select distinct format('%%s (pid %%s)', coalesce(nullif(application_name, ''), usename), pid)
        from pg_locks join pg_stat_activity using (pid)
        where relation = any(array(select oid from pg_class where relnamespace = 'tidemark'::regnamespace
                and relname = any(%s)))
            and granted and pid <> pg_backend_pid() and datname = current_database() order by 1
        """,
        ([old.name, old.parent or old.name],),
    )
    return ", ".join(text for (text,) in rows) or "nobody any more"


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
