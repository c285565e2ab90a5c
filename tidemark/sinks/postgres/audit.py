"""What Postgres holds of streams, all of one moment, and whether its history joins. For people; changes nothing."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal, LiteralString, Self

from tidemark.common.postgres_session import Connection, Dsn, PostgresSession
from tidemark.sinks.postgres.database import READABLE, SCHEMA, session_of
from tidemark.sinks.postgres.history import advances_since

STATES: LiteralString = """
    select stream, case when retired is null then state else substr(state, 1, length(state) - 1) || retired end as state
    from tidemark.streams
    where %(streams)s::text[] is null or stream = any(%(streams)s::text[])
"""
"""Name and encoded state of each stream."""

HistoryFaultKind = Literal["hole", "overlap", "regress", "no writer"]


@dataclass(frozen=True, slots=True)
class AuditedWriter:
    epoch: int
    position: int
    retired: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class AuditedStream:
    """A stream's rows. `late` is the number of its newest late completion; `gaps` are writer and top of the open ones;
    `state` is what the next query would be seeded with."""

    linear: int
    allocated: int
    late: int
    state: bytes
    writers: dict[str, AuditedWriter] = field(default_factory=dict)
    gaps: set[tuple[str, int]] = field(default_factory=set)

    @property
    def positions(self) -> dict[str, int]:
        """Without those of writers that retired long ago."""
        return {name: it.position for name, it in self.writers.items() if not it.forgotten}


@dataclass(frozen=True, slots=True)
class HistoryFault:
    """The advances of `writer` do not join: after `expected` comes `found`. `regress` is of the line, or of a position
    that is below what the history leads to; `no writer`: an advance of one that stands nowhere."""

    stream: str
    writer: str
    fault: HistoryFaultKind
    expected: int
    found: int


class Audit:
    """A context manager; needs the rights of the role tidemark_reader. Raises `Unavailable`, `Refused` and
    `SchemaMismatch`."""

    def __init__(self, dsn: Dsn) -> None:
        self._session = session_of(dsn, "tidemark verify")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def check(self) -> None:
        with self._session.use() as connection:
            SCHEMA.check_from(connection, READABLE)

    def names(self) -> list[str]:
        with self._session.use() as connection:
            return [name for (name,) in connection.execute("select stream from tidemark.streams order by 1")]

    def streams(self, names: Collection[str]) -> dict[str, AuditedStream]:
        """Without those that are not there."""
        named = {"streams": list(names)}
        with self._session.use() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            states = dict(connection.execute(STATES, named).fetchall())
            found = {
                stream: AuditedStream(linear, allocated, late, states[stream])
                for stream, linear, allocated, late in connection.execute(
                    "select stream, linear, head,"
                    " coalesce((select max(number) from tidemark.late_completions l where l.stream = s.stream), 0)"
                    " from tidemark.streams s where stream = any(%(streams)s)",
                    named,
                )
            }
            for stream, writer, *row in connection.execute(
                "select stream, writer, epoch, position, retired, forgotten from tidemark.stream_positions"
                " where stream = any(%(streams)s)",
                named,
            ):
                found[stream].writers[writer] = AuditedWriter(*row)
            for stream, writer, top in connection.execute(
                "select stream, writer, top from tidemark.stream_gaps"
                " where stream = any(%(streams)s) and closed_at is null",
                named,
            ):
                found[stream].gaps.add((writer, top))
        return found

    def led_to(self, stream: str, writer: str, position: int) -> int | None:
        """Where the newest advance of the writer beyond `position` leads; None where there is none."""
        with self._session.use() as connection:
            found = advances_since(connection, [(stream, writer, position)], 1)
        chain = found.get((stream, writer))
        return chain[-1].advance.id if chain else None

    def history_faults(self, stream: str | None, most: int) -> list[HistoryFault]:
        """From the first advance that is kept to the position of each writer of `stream` (None: of all), at most so
        many. One reading of the whole history, sorted by the server."""
        with self._session.use() as connection:
            return _history_faults(connection, stream, most)

    def advances(self) -> int:
        """How many are kept."""
        with self._session.use() as connection:
            row = connection.execute(
                "select coalesce(sum(cardinality(ids)), 0) from tidemark.packed_advances"
            ).fetchone()
        return int(row[0]) if row else 0


def _history_faults(connection: Connection, stream: str | None, most: int) -> list[HistoryFault]:
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        rows = connection.execute(_FAULTS, {"stream": stream, "most": most}).fetchall()
    return [HistoryFault(*row) for row in rows]


# What came before the first advance of a writer may be past its time. It is not where its place (`before`) names a day
# that is kept: days are dropped whole.
_FAULTS: LiteralString = """
with single as (
    select n.stream, n.writer, a.id - a.span as prev, a.id, a.id - coalesce(a.ahead, 0) as linear, a.before, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(p.writers, p.ids, p.spans, p.ahead, p.before) as a (number, id, span, ahead, before)
    join tidemark.writer_numbers n using (number)
    where %(stream)s::text is null or n.stream = %(stream)s
), chained as materialized (
    select *, lag(id) over chain as known, lag(linear) over chain as line, lead(id) over chain is null as newest
    from single window chain as (partition by stream, writer order by abs(id), abs(prev), time)
), kept as (
    select floor(extract(epoch from date_trunc('day', min(time) at time zone 'UTC') at time zone 'UTC') * 1000) as since
    from tidemark.packed_advances
), ends as (
    select p.stream, p.writer, p.position, p.advanced, c.id from tidemark.stream_positions p
    left join (select stream, writer, id from chained where newest) c using (stream, writer)
    where %(stream)s::text is null or p.stream = %(stream)s
)
select stream, writer, fault, expected, found from (
    select stream, writer, case when abs(prev) > abs(known) then 'hole' else 'overlap' end, known, prev, abs(id)
        from chained where prev <> known
    union all
    select stream, writer, 'hole', 0, prev, abs(id) from chained, kept
        where known is null and prev <> 0 and before / 4096 >= kept.since
    union all
    select stream, writer, 'regress', line, linear, abs(id) from chained where abs(linear) < abs(line)
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
order by stream, writer, place limit %(most)s
"""


MOST: Final = 1000
"""Rows of a table."""
# The history is asked by time, as its view wants it.
_TABLES: Final[dict[str, LiteralString]] = {
    "streams": "select stream, linear, head, direction, shard, length(state) as state_bytes, updated_at"
    " from tidemark.streams order by updated_at desc",
    "stream_positions": "select * from tidemark.stream_positions order by updated_at desc",
    "position_advances": "select * from tidemark.position_advances where time >"
    " (select max(updated_at) from tidemark.streams) - interval '10 minutes' order by time desc",
    "line_moves": "select * from tidemark.line_moves order by time desc",
    "stream_gaps": "select * from tidemark.stream_gaps order by closed_at desc nulls first, opened_at desc",
    "acts": "select * from tidemark.acts order by number desc",
    "skips": "select * from tidemark.skips order by number desc",
    "late_completions": "select * from tidemark.late_completions order by number desc",
    "dead_letters": "select * from tidemark.dead_letters order by records desc",
    "recalls": "select * from tidemark.recalls order by number desc",
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


def dump(database: PostgresSession, table: str) -> str:
    """The newest rows of one of `TABLES` as JSON, an array of objects. Raises `Unavailable`, `Refused`, and
    `psycopg.Error` where the schema of another version lacks it."""
    with database.use() as connection:
        row = connection.execute(
            "select coalesce(jsonb_agg(to_jsonb(found)), '[]')::text from (" + _TABLES[table] + " limit %s) found",
            (MOST,),
        ).fetchone()
    assert row is not None
    return str(row[0])
