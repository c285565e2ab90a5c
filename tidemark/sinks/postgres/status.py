"""The condition of the pipeline in Postgres: the lease's owner, the last batch, what was rejected, what came late.

For people on call; nothing is decided by it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tidemark.common.postgres_session import BRIDGE_LOCK, Connection, PostgresSession
from tidemark.sinks.postgres.deferred import RecallStatus, unfinished


@dataclass(frozen=True, slots=True)
class LaggingPartition:
    """`records` of a partition have waited since `since` to be read.

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
    connection: Connection, found: Sequence[tuple[str, int, int, float, int | None, float | None]]
) -> None:
    """Replace what the table holds.

    Args:
        connection: a session of the owner of the lease.
        found: topic, partition, records, seconds of waiting, blocked offset and seconds of blocking of each partition.
            Ages become times by the server's clock.
    """
    columns = [list(column) for column in zip(*found, strict=True)] or [[], [], [], [], [], []]
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
    rows = connection.execute(
        "select topic, partition, records, since, blocked_offset, blocked_since from tidemark.lagging_partitions"
        " order by topic, partition"
    )
    return [LaggingPartition(*row) for row in rows]


ACTS_SHOWN = 5
LATE_COUNTED = 100  # late completions of one stream are counted up to here: nobody waits for more


@dataclass(frozen=True, slots=True)
class DeadLetterCounts:
    """Records rejected for `reason` since the database was made, each once; the newest of them at `newest`."""

    reason: str
    records: int
    newest: datetime


@dataclass(frozen=True, slots=True)
class SinkFault:
    """A stream that `sink` cannot show by a fault of its own, while it shows the others."""

    sink: str
    stream: str
    problem: str
    since: datetime


@dataclass(frozen=True, slots=True)
class BridgeStatus:
    """Whether a `tidemark synapse` tells a stream (None: a replica does not know), and since when it is connected (None
    where none is, or this user may not know)."""

    speaks: bool | None
    since: datetime | None


@dataclass(frozen=True, slots=True)
class RecentAct:
    """As `tidemark.acts` has it."""

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
    """`owner` held the lease last (None: nobody ever did), which lives for `lease` seconds more; 0: it is over.
    `quiet` is how long ago a batch was last applied (s), None where none ever was. By the database's clock. `acts` are
    those of the last day, the newest first. `waits`: what a batch of the owner waits for in this database. `lagging`:
    Kafka partitions whose records wait for longer than a healthy pipeline takes."""

    owner: str | None
    lease: float
    quiet: float | None
    dead_letters: Sequence[DeadLetterCounts]
    acts: Sequence[RecentAct] = ()
    faults: Sequence[SinkFault] = ()
    waits: str | None = None
    lagging: Sequence[LaggingPartition] = ()


@dataclass(frozen=True, slots=True)
class LateCount:
    """`count` late completions, `LATE_COUNTED` for that many or more; the newest of them at `newest`."""

    count: int
    newest: datetime


def note_faults(connection: Connection, faults: Mapping[tuple[str, str], str]) -> None:
    """Replace what is known, by sink and stream; what was known before keeps its `since`."""
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


class Conditions:
    """Needs the rights of the role tidemark_reader. Any thread may call; raises `Unavailable` (call again) and
    `Refused`."""

    def __init__(self, database: PostgresSession) -> None:
        self._database = database

    def now(self) -> Condition:
        with self._database.use() as connection:
            lease = connection.execute(
                "select owner,"
                " case when expires_at > now() then extract(epoch from expires_at - now())::float8 else 0 end,"
                " waits_for from tidemark.query_lease where owner <> ''"
            ).fetchone()
            batch = connection.execute(
                "select greatest(extract(epoch from now() - applied_at), 0)::float8"
                " from tidemark.applied_batches order by number desc limit 1"
            ).fetchone()
            rejected = connection.execute(
                "select reason, records, newest_at from tidemark.dead_letters order by records desc, reason"
            ).fetchall()
            acts = self._acts(connection)
            faults = self.faults()
            partitions = lagging(connection)
        owner, left, waits = lease or (None, 0.0, None)
        counts = [DeadLetterCounts(*row) for row in rejected]
        quiet = batch[0] if batch else None
        return Condition(owner, left, quiet, counts, acts, faults, waits if left else None, partitions)

    def _acts(self, connection: Connection) -> list[RecentAct]:
        rows = connection.execute(
            "select number, kind, stream, writer, by, why, seen_as, time, outcome from tidemark.acts"
            " where time > now() - interval '1 day' order by number desc limit %s",
            (ACTS_SHOWN,),
        )
        return [RecentAct(*row) for row in rows]

    def begun(self) -> set[tuple[str, str, int]]:
        """Stream, writer and epoch of each epoch that an operator began in its writer's name."""
        with self._database.use() as connection:
            rows = connection.execute("select stream, writer, epoch from tidemark.skips where kind = 'JOIN'")
            return {(stream, writer, epoch) for stream, writer, epoch in rows}

    def bridges(self) -> dict[str, BridgeStatus]:
        """By stream, of those that `tidemark synapse` began to tell; none where it was never prepared here, or this
        user may not know."""
        with self._database.use() as connection:
            table = "to_regclass('tidemark.synapse_streams')::oid"
            if not connection.execute(f"select 1 where has_table_privilege({table}, 'select')".encode()).fetchone():
                return {}
            rows = connection.execute(
                """
                select stream, case when not pg_is_in_recovery() then held.pid is not null end, backend_start
                from tidemark.synapse_streams
                left join pg_locks held on locktype = 'advisory' and objsubid = 2 and granted
                    and classid = %s::oid and objid = hashtext(stream)::oid
                    and held.database = (select oid from pg_database where datname = current_database())
                left join pg_stat_activity using (pid)
                """,
                [BRIDGE_LOCK],
            ).fetchall()
        return {stream: BridgeStatus(speaks, since) for stream, speaks, since in rows}

    def late(self, streams: Collection[str]) -> dict[str, LateCount]:
        """Of each of `streams`, without those that have none."""
        with self._database.use() as connection:
            rows = connection.execute(
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
            ).fetchall()
        return {stream: LateCount(count, newest) for stream, count, newest in rows}

    def recalls(self) -> list[RecallStatus]:
        """Records that were put off and are not produced again, oldest first."""
        with self._database.use() as connection:
            return unfinished(connection)

    def faults(self) -> list[SinkFault]:
        with self._database.use() as connection:
            rows = connection.execute("select sink, stream, problem, since from tidemark.sink_faults order by 1, 2")
            return [SinkFault(*row) for row in rows]
