"""Who holds a stream: the open transactions that have appended to it, by the lock that each of them has."""

from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import LOCK
from tidemark.sources.transactions import OpenTransaction


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
            coalesce(regexp_replace(left(activity.query, 300), '\\s+', ' ', 'g'), ''), current_database()
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
