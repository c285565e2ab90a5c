"""Who holds a stream: the open transactions that have appended to it, by the lock that each of them has."""

from dataclasses import dataclass
from datetime import datetime

from tidemark.sources.relay.looks import LOCK
from tidemark.streaming.postgres_session import Connection


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """`pid` is None for a prepared one, which `gid` names. What this user may not see is empty.

    `writer`: in whose name it has appended, several where they share a lock; empty where no fact of that name was told.
    """

    stream: str
    writer: str
    pid: int | None
    gid: str | None
    user: str
    application: str
    state: str
    since: datetime | None
    query: str

    def __str__(self) -> str:
        return f"{self.stream}: {self.who}" + (f": {self.query or '-'}" if self.pid is not None else "")

    @property
    def who(self) -> str:
        """Without its query, whose values are the service's own."""
        since = "" if self.since is None else f" since {self.since:%Y-%m-%d %H:%M:%S%z}"
        writer = f"writer {self.writer or 'not told yet'}"
        if self.pid is None:
            return f"{writer}, prepared transaction {self.gid or '?'}{since}, user {self.user or '-'}"
        who = f"user {self.user or '-'}, application {self.application or '-'}"
        return f"{writer}, pid {self.pid}{since}, {self.state or 'state not shown'}, {who}"


def blockers(connection: Connection) -> list[OpenTransaction]:
    """The open transactions that hold a stream, the oldest first."""
    rows = connection.execute(
        """
        select streams.stream,
            coalesce((
                select string_agg(known.writer, ' or ' order by known.writer)
                from (
                    select writer, writer as called from tidemark.append_writers where number = streams.number
                    union all
                    select told.writer, '' from tidemark.append_progress as told where number = streams.number
                ) as known
                where hashtext(known.called)::oid = held.objid
            ), ''),
            held.pid, prepared.gid, coalesce(activity.usename, prepared.owner, ''),
            coalesce(activity.application_name, ''), coalesce(activity.state, ''),
            coalesce(activity.xact_start, prepared.prepared),
            coalesce(regexp_replace(left(activity.query, 300), '\\s+', ' ', 'g'), '')
        from pg_locks held
        join tidemark.append_streams streams on %s + streams.number = held.classid::bigint
        left join pg_stat_activity activity on activity.pid = held.pid
        left join pg_locks own on held.pid is null and own.virtualtransaction = held.virtualtransaction
            and own.pid is null and own.locktype = 'transactionid' and own.mode = 'ExclusiveLock'
        left join pg_prepared_xacts prepared on prepared.transaction = own.transactionid
        where held.locktype = 'advisory' and held.objsubid = 2 and held.granted
            and held.database = (select oid from pg_database where datname = current_database())
        order by 8 nulls first, 1, 2
        """,
        [LOCK],
    ).fetchall()
    return [OpenTransaction(*row) for row in rows]
