"""Reads the status of the pipeline in Postgres, and checks the stored data.

The status has the owner of the lease, the last batch, dead letters, late completions and faults. The status is for
display and alerts; no position depends on it. `Audit` is for `tidemark verify`, and `dump` for `tidemark bundle`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal, LiteralString, Self

import msgspec

from tidemark.common.postgres_session import (
    BRIDGE_LOCK_SPACE,
    Connection,
    Dsn,
    PostgresSession,
    fetch_all,
    fetch_one,
    fetch_value,
)
from tidemark.sinks.postgres.database import OLDEST_READABLE_VERSION, SCHEMA, session_of
from tidemark.sinks.postgres.history import advances_since
from tidemark.sinks.postgres.positions import RequeueStatus, WriterPosition, stored_requeues, stored_writers


class LaggingPartition(msgspec.Struct, frozen=True):
    """A Kafka partition that has had unread records for ten seconds or longer.

    If Kafka has not answered for ten seconds or longer, every partition counts as lagging, because its lag is unknown.

    Attributes:
        records: the number of unread records; 0 if Kafka does not answer.
        since: the time since which the oldest record has been unread, or since which Kafka has not answered.
        blocked_offset: the last stable offset, if an open Kafka transaction blocks the partition: records from this
            offset on cannot be read. Otherwise None.
        blocked_since: the time at which the last stable offset last moved; None if `blocked_offset` is None.
    """

    topic: str
    partition: int
    records: int
    since: datetime
    blocked_offset: int | None = None
    blocked_since: datetime | None = None


def note_lagging_partitions(
    connection: Connection, partitions: Sequence[tuple[str, int, int, float, int | None, float | None]]
) -> None:
    """Replace all rows of `tidemark.lagging_partitions`, in one transaction.

    Args:
        connection: a session of the owner of the lease.
        partitions: (topic, partition, unread records, seconds of lag, last stable offset, seconds for which an open
            transaction has blocked the partition). The last two are None if nothing blocks the partition.
    """
    columns = [list(column) for column in zip(*partitions, strict=True)] or [[], [], [], [], [], []]
    with connection.transaction():
        connection.execute("delete from tidemark.lagging_partitions")
        connection.execute(
            """
            insert into tidemark.lagging_partitions (topic, partition, records, since, blocked_offset, blocked_since)
            select topic, partition, records, now() - make_interval(secs => waited), blocked_offset,
                now() - make_interval(secs => blocked)
            from unnest(%s::text[], %s::int[], %s::bigint[], %s::float8[], %s::bigint[], %s::float8[])
                as noted (topic, partition, records, waited, blocked_offset, blocked)
            """,
            columns,
        )


def lagging_partitions(connection: Connection) -> list[LaggingPartition]:
    """The lagging partitions that the pipeline stored last, ordered by topic and partition."""
    return fetch_all(
        connection,
        LaggingPartition,
        "select topic, partition, records, since, blocked_offset, blocked_since from tidemark.lagging_partitions"
        " order by topic, partition",
    )


class ReadStatus(msgspec.Struct, frozen=True):
    """Which Kafka partitions the active pipeline reads with lag.

    Attributes:
        since: the time since which the pipeline has had the lease, in seconds since 1970.
        lagging_partitions: the numbers of the lagging partitions of all topics: see `LaggingPartition`. If a partition
            lags, a missing record does not show that a writer of the facts partition with this number is silent.
    """

    since: float
    lagging_partitions: frozenset[int]


MAX_OVERRIDES = 5  # the largest number of overrides in the status
MAX_LATE_COUNT = 100  # the largest count of late completions of one stream


class DeadLetterCounts(msgspec.Struct, frozen=True):
    """The number of distinct records that were rejected for `reason`, since the database was created.

    `newest`: the time of the batch with the newest rejected record.
    """

    reason: str
    records: int
    newest: datetime


class SinkFault(msgspec.Struct, frozen=True):
    """A stream that `sink` cannot publish, although `sink` publishes other streams. `problem` is the reason."""

    sink: str
    stream: str
    problem: str
    since: datetime


class BridgeStatus(msgspec.Struct, frozen=True):
    """The state of the `tidemark synapse` process that sends a stream.

    Attributes:
        is_connected: whether the process has a session in the primary; None if this database is a replica.
        since: the time at which the session began; None if there is no session, or if this user may not see it.
    """

    is_connected: bool | None
    since: datetime | None


class RecentOverride(msgspec.Struct, frozen=True):
    """A row of the table of operator overrides: see `operators.OverrideEntry`."""

    number: int
    kind: str
    stream: str
    writer: str
    by: str
    why: str
    seen_as: str
    time: datetime
    outcome: str | None


class Condition(msgspec.Struct, frozen=True):
    """The status of the pipeline. Times are by the clock of the database.

    Attributes:
        owner: the last process that acquired the lease; None if there was none.
        lease_seconds: seconds until the lease expires; 0 if it has expired.
        seconds_since_batch: seconds since the last batch was applied; None if there was none.
        dead_letters: the counts of each reason, the largest first.
        overrides: the newest operator overrides of the last day, newest first; at most `MAX_OVERRIDES`.
        faults: the streams that a sink cannot publish.
        waits_for: what a batch of the owner waits for in this database; None if no batch waits.
        lagging: the Kafka partitions with lag: see `LaggingPartition`.
    """

    owner: str | None
    lease_seconds: float
    seconds_since_batch: float | None
    dead_letters: Sequence[DeadLetterCounts]
    overrides: Sequence[RecentOverride] = ()
    faults: Sequence[SinkFault] = ()
    waits_for: str | None = None
    lagging: Sequence[LaggingPartition] = ()


class LateCount(msgspec.Struct, frozen=True):
    """The number of late completions of a stream (at most `MAX_LATE_COUNT`), and the time of the newest one."""

    count: int
    newest: datetime


def note_faults(connection: Connection, faults: Mapping[tuple[str, str], str]) -> None:
    """Replace the stored faults by `faults`: (sink, stream) -> problem. A fault that stays keeps its `since`."""
    columns = [sink for sink, _ in faults], [stream for _, stream in faults], list(faults.values())
    with connection.transaction():
        connection.execute(
            "delete from tidemark.sink_faults"
            " where (sink, stream) not in (select * from unnest(%s::text[], %s::text[]))",
            columns[:2],
        )
        connection.execute(
            "insert into tidemark.sink_faults (sink, stream, problem)"
            " select * from unnest(%s::text[], %s::text[], %s::text[])"
            " on conflict (sink, stream) do update set problem = excluded.problem",
            columns,
        )


class _LeaseRow(msgspec.Struct, frozen=True):
    owner: str
    seconds_left: float
    waits_for: str | None


class ConditionReader:
    """Reads the status of the pipeline. Needs the role tidemark_reader. Thread-safe.

    Methods raise `Unavailable` (call again) and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def current(self) -> Condition:
        """Read the current status."""
        with self._session.use() as connection:
            lease = fetch_one(
                connection,
                _LeaseRow,
                "select owner,"
                " case when expires_at > now() then extract(epoch from expires_at - now())::float8 else 0 end"
                " as seconds_left, waits_for from tidemark.query_lease where owner <> ''",
            ) or _LeaseRow("", 0.0, None)
            quiet = fetch_value(
                connection,
                "select greatest(extract(epoch from now() - applied_at), 0)::float8"
                " from tidemark.applied_batches order by number desc limit 1",
            )
            rejected = fetch_all(
                connection,
                DeadLetterCounts,
                "select reason, records, newest_at as newest from tidemark.dead_letters order by records desc, reason",
            )
            overrides = fetch_all(
                connection,
                RecentOverride,
                "select number, kind, stream, writer, by, why, seen_as, time, outcome from tidemark.overrides"
                " where time > now() - interval '1 day' order by number desc limit %s",
                (MAX_OVERRIDES,),
            )
            faults = self.faults()
            partitions = lagging_partitions(connection)
        waits = lease.waits_for if lease.seconds_left else None
        owner = lease.owner or None
        return Condition(owner, lease.seconds_left, quiet, rejected, overrides, faults, waits, partitions)

    def reading_status(self) -> ReadStatus | None:
        """Read which partitions the active pipeline reads with lag.

        Returns:
            None if no pipeline is active, or if a batch of the active pipeline waits for a lock or a standby. Then it
            is unknown whether a writer is silent.
        """
        rows = self._session.fetch_tuples(
            """
            select extract(epoch from since)::float8, array(select distinct partition from tidemark.lagging_partitions)
            from tidemark.query_lease where owner <> '' and expires_at > now() and waits_for is null
            """
        )
        return ReadStatus(rows[0][0], frozenset(rows[0][1])) if rows else None

    def epochs_begun_by_operators(self) -> set[tuple[str, str, int]]:
        """(stream, writer, epoch) of each epoch that an operator override began."""
        return {*self._session.fetch_tuples("select stream, writer, epoch from tidemark.skips where kind = 'JOIN'")}

    def bridges(self) -> dict[str, BridgeStatus]:
        """Stream -> status of the `tidemark synapse` process that sends the stream.

        Empty if the table `tidemark.synapse_streams` does not exist, or if this user may not read the table.
        """
        with self._session.use() as connection:
            table = "to_regclass('tidemark.synapse_streams')::oid"
            if fetch_value(connection, f"select 1 where has_table_privilege({table}, 'select')") is None:
                return {}
            rows = connection.execute(
                """
                select stream, case when not pg_is_in_recovery() then lock.pid is not null end, backend_start
                from tidemark.synapse_streams
                left join pg_locks lock on locktype = 'advisory' and objsubid = 2 and granted
                    and classid = %s::oid and objid = hashtext(stream)::oid
                    and lock.database = (select oid from pg_database where datname = current_database())
                left join pg_stat_activity using (pid)
                """,
                [BRIDGE_LOCK_SPACE],
            ).fetchall()
        return {stream: BridgeStatus(is_connected, since) for stream, is_connected, since in rows}

    def late(self, streams: Collection[str]) -> dict[str, LateCount]:
        """Count late completions: stream -> count. Streams without late completions are left out."""
        rows = self._session.fetch_tuples(
            """
            select named.stream, late.count, late.newest from unnest(%s::text[]) as named (stream)
            cross join lateral (
                select count(*), max(time) from (
                    select time from tidemark.late_completions l
                    where l.stream = named.stream order by number desc limit %s
                ) newest
            ) late (count, newest)
            where late.count > 0
            """,
            (list(streams), MAX_LATE_COUNT),
        )
        return {stream: LateCount(count, newest) for stream, count, newest in rows}

    def requeues(self) -> list[RequeueStatus]:
        """All stored requeues, oldest first."""
        return stored_requeues(self._session)

    def faults(self) -> list[SinkFault]:
        """The stored faults of all sinks, ordered by sink and stream."""
        return self._session.fetch_all(
            SinkFault, "select sink, stream, problem, since from tidemark.sink_faults order by 1, 2"
        )


SELECT_STATES: LiteralString = """
    select stream, case when retired is null then state else substr(state, 1, length(state) - 1) || retired end as state
    from tidemark.streams
    where %(streams)s::text[] is null or stream = any(%(streams)s::text[])
"""
"""Selects name and encoded state of the streams in the parameter `streams` (null for all streams)."""

HistoryFaultKind = Literal["hole", "overlap", "regress", "no writer"]


class AuditedStream(msgspec.Struct, frozen=True):
    """The stored data of a stream, read in one snapshot.

    Attributes:
        linear: the linear position.
        allocated: the highest ID that any record has named.
        late: the number of the newest late completion; 0 if there is none.
        state: the encoded state, with which the next query starts.
        writers: name of the writer -> its row.
        gaps: (writer, top) of each open gap.
    """

    linear: int
    allocated: int
    late: int
    state: bytes
    writers: dict[str, WriterPosition] = msgspec.field(default_factory=dict)
    gaps: set[tuple[str, int]] = msgspec.field(default_factory=set)

    @property
    def positions(self) -> dict[str, int]:
        """Writer -> position. Forgotten writers are left out."""
        return {name: writer.position for name, writer in self.writers.items() if not writer.forgotten}


class HistoryFault(msgspec.Struct, frozen=True):
    """A fault in the history of a writer.

    Attributes:
        fault: `hole`: an advance is missing, so an advance or the position is beyond the end of the previous advance.
            `overlap`: an advance begins below the end of the previous advance. `regress`: the linear position went
            back, or a position is below the end of the history. `no writer`: the writer has advances but no position.
        expected: the ID at which the advance or the position should be; 0 for `no writer`.
        found: the ID at which the advance or the position is.
    """

    stream: str
    writer: str
    fault: HistoryFaultKind
    expected: int
    found: int


class _StreamRow(msgspec.Struct, frozen=True):
    stream: str
    linear: int
    head: int
    late: int


class Audit:
    """Reads and checks the stored data of streams, for `tidemark verify`. A context manager that closes its session.

    Needs the role tidemark_reader. Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._session = session_of(dsn, "tidemark verify")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def check_readable(self) -> None:
        """Raise an error unless this Tidemark can read the schema: see `Migrations.check_readable`."""
        with self._session.use() as connection:
            SCHEMA.check_readable(connection, OLDEST_READABLE_VERSION)

    def names(self) -> list[str]:
        """The names of all streams, sorted."""
        return [name for (name,) in self._session.fetch_tuples("select stream from tidemark.streams order by 1")]

    def streams(self, names: Collection[str]) -> dict[str, AuditedStream]:
        """Read streams in one snapshot: name -> stored data. Unknown names are left out."""
        named = {"streams": list(names)}
        with self._session.use() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            states = dict(connection.execute(SELECT_STATES, named).fetchall())
            rows = fetch_all(
                connection,
                _StreamRow,
                "select stream, linear, head,"
                " coalesce((select max(number) from tidemark.late_completions l where l.stream = s.stream), 0) as late"
                " from tidemark.streams s where stream = any(%(streams)s)",
                named,
            )
            streams = {row.stream: AuditedStream(row.linear, row.head, row.late, states[row.stream]) for row in rows}
            for writer in stored_writers(connection, names):
                streams[writer.stream].writers[writer.writer] = writer
            gaps = "select stream, writer, top from tidemark.stream_gaps where stream = any(%(streams)s)"
            for stream, name, top in connection.execute(gaps + " and closed_at is null", named):
                streams[stream].gaps.add((name, top))
        return streams

    def end_of_history(self, stream: str, writer: str, position: int) -> int | None:
        """The ID at which the newest advance of `writer` ends; None if no stored advance is beyond `position`."""
        with self._session.use() as connection:
            chains = advances_since(connection, [(stream, writer, position)], 1)
        chain = chains.get((stream, writer))
        return chain[-1].advance.id if chain else None

    def history_faults(
        self, stream: str | None, limit: int, parts: int = 1, on_part: Callable[[], object] = lambda: None
    ) -> list[HistoryFault]:
        """Check the stored history, in one snapshot, and return the faults ordered by stream and writer.

        The writers are checked in parts. For each part, the server reads the whole history once, and sorts the
        advances of the part.

        Args:
            stream: the stream to check; None for all streams.
            limit: the largest number of faults to return.
            parts: the number of parts.
            on_part: called after each checked part.
        """
        faults = list[HistoryFault]()
        with self._session.use() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            for part in range(parts):
                query = {"stream": stream, "limit": limit, "parts": parts, "part": part}
                faults += fetch_all(connection, HistoryFault, _FAULTS, query)
                on_part()
        faults.sort(key=lambda fault: (fault.stream, fault.writer))  # stable: by place within a writer
        return faults[:limit]

    def count_advances(self) -> int:
        """The number of stored advances."""
        count = "select coalesce(sum(cardinality(ids)), 0) from tidemark.packed_advances"
        return int(self._session.fetch_value(count))


# Advances before the first stored one of a writer may have been dropped. Only whole days are dropped, so a place
# (`before`) in a stored day must have a row.
_FAULTS: LiteralString = """
with single as (
    select n.stream, n.writer, a.id - a.span as prev, a.id, a.id - coalesce(a.ahead, 0) as linear, a.before, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(p.writers, p.ids, p.spans, p.ahead, p.before) as a (number, id, span, ahead, before)
    join tidemark.writer_numbers n using (number)
    where (%(stream)s::text is null or n.stream = %(stream)s) and number %% %(parts)s = %(part)s
), chained as materialized (
    select *, lag(id) over chain as known, lag(linear) over chain as previous_linear,
        lead(id) over chain is null as newest
    from single window chain as (partition by stream, writer order by abs(id), abs(prev), time)
), kept as (
    select floor(extract(epoch from date_trunc('day', min(time) at time zone 'UTC') at time zone 'UTC') * 1000) as since
    from tidemark.packed_advances
), ends as (
    select p.stream, p.writer, p.position, p.advanced, c.id from tidemark.stream_positions p
    left join tidemark.writer_numbers n using (stream, writer)
    left join (select stream, writer, id from chained where newest) c using (stream, writer)
    where (%(stream)s::text is null or p.stream = %(stream)s) and coalesce(n.number, 0) %% %(parts)s = %(part)s
)
select stream, writer, fault, expected, found from (
    select stream, writer, case when abs(prev) > abs(known) then 'hole' else 'overlap' end, known, prev, abs(id)
        from chained where prev <> known
    union all
    select stream, writer, 'hole', 0, prev, abs(id) from chained, kept
        where known is null and prev <> 0 and before / 4096 >= kept.since
    union all
    select stream, writer, 'regress', previous_linear, linear, abs(id) from chained
        where abs(linear) < abs(previous_linear)
    union all
    select stream, writer, case when abs(position) > abs(id) then 'hole' else 'regress' end, id, position, abs(id)
        from ends where position <> id
    union all
    select stream, writer, 'hole', 0, position, abs(position) from ends, kept
        where id is null and position <> 0 and advanced / 4096 >= kept.since
    union all
    select c.stream, c.writer, 'no writer', 0, c.id, abs(c.id) from chained c
        left join tidemark.stream_positions p using (stream, writer) where newest and p.stream is null
    union all
    select c.stream, c.writer, 'regress', c.linear, s.linear, abs(c.id) from chained c
        join tidemark.streams s using (stream) where newest and abs(c.linear) > abs(s.linear)
) faults (stream, writer, fault, expected, found, place)
order by stream, writer, place limit %(limit)s
"""


MAX_ROWS: Final = 1000
"""The largest number of rows that `dump` returns."""
# position_advances has a condition on time, so that the view reads only the newest days.
_TABLES: Final[dict[str, LiteralString]] = {
    "streams": "select stream, linear, head, direction, shard, length(state) as state_bytes, updated_at"
    " from tidemark.streams order by updated_at desc",
    "stream_positions": "select * from tidemark.stream_positions order by updated_at desc",
    "position_advances": "select * from tidemark.position_advances where time >"
    " (select max(updated_at) from tidemark.streams) - interval '10 minutes' order by time desc",
    "linear_moves": "select * from tidemark.linear_moves order by time desc",
    "stream_gaps": "select * from tidemark.stream_gaps order by closed_at desc nulls first, opened_at desc",
    "overrides": "select * from tidemark.overrides order by number desc",
    "skips": "select * from tidemark.skips order by number desc",
    "late_completions": "select * from tidemark.late_completions order by number desc",
    "dead_letters": "select * from tidemark.dead_letters order by records desc",
    "requeues": "select * from tidemark.requeues order by number desc",
    "sink_faults": "select * from tidemark.sink_faults order by since desc",
    "applied_batches": "select * from tidemark.applied_batches order by number desc",
    "kafka_offsets": "select * from tidemark.kafka_offsets order by topic, partition",
    "topics": "select * from tidemark.topics order by topic",
    "pipeline": "select * from tidemark.pipeline",
    "query_lease": "select * from tidemark.query_lease",
    "schema_version": "select * from tidemark.schema_version",
    "server": "select version(), now(), pg_is_in_recovery() as standby, pg_database_size(current_database()) as bytes",
}
TABLES: Final = tuple(_TABLES)


def dump(session: PostgresSession, table: str) -> str:
    """Read up to `MAX_ROWS` rows of a table, as the text of a JSON array with one object for each row.

    If a table has more rows, reads the newest ones; of `kafka_offsets` and `topics`, the first ones by name. `table` is
    one of `TABLES`.

    Raises:
        Unavailable, Refused: as for every use of the session.
        psycopg.Error: the database has a schema of another version, without the table or column of the query.
    """
    rows: LiteralString = "select coalesce(jsonb_agg(to_jsonb(newest)), '[]')::text from (" + _TABLES[table]
    return str(session.fetch_value(rows + " limit %s) newest", (MAX_ROWS,)))
