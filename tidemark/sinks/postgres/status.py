"""The status of the pipeline in Postgres: owner of the lease, last batch, dead letters, late completions, faults.

For display and alerts; no position depends on it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tidemark.common.postgres_session import BRIDGE_LOCK, Connection, PostgresSession, fetch_all, fetch_one, fetch_value
from tidemark.sinks.postgres.requeues import RequeueStatus, unfinished_requeues


@dataclass(frozen=True, slots=True)
class LaggingPartition:
    """A partition with `records` that have waited since `since`.

    If an open Kafka transaction blocks the partition, `blocked_offset` is its last stable offset, beyond which nothing
    can be read, and `blocked_since` is since when that offset has not moved; both are None otherwise.
    """

    topic: str
    partition: int
    records: int
    since: datetime
    blocked_offset: int | None = None
    blocked_since: datetime | None = None


def note_lagging(
    connection: Connection, partitions: Sequence[tuple[str, int, int, float, int | None, float | None]]
) -> None:
    """Replace the rows of the table.

    Args:
        connection: a session of the owner of the lease.
        partitions: for each, topic, partition, records, seconds of waiting, blocked offset, seconds of blocking.
            Ages become times by the server's clock.
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


def lagging(connection: Connection) -> list[LaggingPartition]:
    """What the pipeline noted last, by topic and partition."""
    return fetch_all(
        connection,
        LaggingPartition,
        "select topic, partition, records, since, blocked_offset, blocked_since from tidemark.lagging_partitions"
        " order by topic, partition",
    )


OVERRIDES_SHOWN = 5
LATE_COUNTED = 100  # the count of late completions of one stream stops here


@dataclass(frozen=True, slots=True)
class DeadLetterCounts:
    """The number of distinct records rejected for `reason` since the database was made, and the time of the newest."""

    reason: str
    records: int
    newest: datetime


@dataclass(frozen=True, slots=True)
class SinkFault:
    """A stream that `sink` cannot publish while it publishes the others."""

    sink: str
    stream: str
    problem: str
    since: datetime


@dataclass(frozen=True, slots=True)
class BridgeStatus:
    """The `tidemark synapse` of a stream.

    `speaks`: whether one is connected; None on a replica, which does not know. `since`: when it connected; None if none
    is connected, or if this user may not see it.
    """

    speaks: bool | None
    since: datetime | None


@dataclass(frozen=True, slots=True)
class RecentOverride:
    """A row of the table of operator overrides."""

    number: int
    kind: str
    stream: str
    writer: str
    by: str
    why: str
    seen_as: str
    time: datetime
    outcome: str | None


@dataclass(frozen=True, slots=True)
class Condition:
    """The status of the pipeline. Times are by the clock of the database.

    Attributes:
        owner: the process that acquired the lease last; None if none ever did.
        lease: seconds until the lease expires; 0 if it has expired.
        quiet: seconds since the last batch was applied; None if none ever was.
        acts: operator overrides of the last day, newest first.
        waits: what a batch of the owner waits for in this database.
        lagging: Kafka partitions whose records wait for longer than a healthy pipeline takes.
    """

    owner: str | None
    lease: float
    quiet: float | None
    dead_letters: Sequence[DeadLetterCounts]
    acts: Sequence[RecentOverride] = ()
    faults: Sequence[SinkFault] = ()
    waits: str | None = None
    lagging: Sequence[LaggingPartition] = ()


@dataclass(frozen=True, slots=True)
class LateCount:
    """`count` late completions (at most `LATE_COUNTED`), and the time of the newest."""

    count: int
    newest: datetime


def note_faults(connection: Connection, faults: Mapping[tuple[str, str], str]) -> None:
    """Replace the faults, by sink and stream. A fault that was noted before keeps its `since`."""
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


@dataclass(frozen=True, slots=True)
class _LeaseRow:
    owner: str
    seconds_left: float
    waits_for: str | None


class Conditions:
    """Needs the role tidemark_reader. Any thread may call. Raises `Unavailable` (call again) and `Refused`."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def now(self) -> Condition:
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
                "select number, kind, stream, writer, by, why, seen_as, time, outcome from tidemark.acts"
                " where time > now() - interval '1 day' order by number desc limit %s",
                (OVERRIDES_SHOWN,),
            )
            faults = self.faults()
            partitions = lagging(connection)
        waits = lease.waits_for if lease.seconds_left else None
        owner = lease.owner or None
        return Condition(owner, lease.seconds_left, quiet, rejected, overrides, faults, waits, partitions)

    def begun(self) -> set[tuple[str, str, int]]:
        """Stream, writer and epoch of each epoch that an operator began for its writer."""
        return {*self._session.fetch_tuples("select stream, writer, epoch from tidemark.skips where kind = 'JOIN'")}

    def bridges(self) -> dict[str, BridgeStatus]:
        """The streams of `tidemark synapse`; empty if it was never prepared here, or if this user may not see it."""
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
                [BRIDGE_LOCK],
            ).fetchall()
        return {stream: BridgeStatus(speaks, since) for stream, speaks, since in rows}

    def late(self, streams: Collection[str]) -> dict[str, LateCount]:
        """The streams of `streams` that have late completions."""
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
            (list(streams), LATE_COUNTED),
        )
        return {stream: LateCount(count, newest) for stream, count, newest in rows}

    def requeues(self) -> list[RequeueStatus]:
        """Deferred records that are not produced again yet, oldest first."""
        return unfinished_requeues(self._session)

    def faults(self) -> list[SinkFault]:
        return self._session.fetch_all(
            SinkFault, "select sink, stream, problem, since from tidemark.sink_faults order by 1, 2"
        )
