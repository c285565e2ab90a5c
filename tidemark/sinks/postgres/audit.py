"""Checks of what Postgres stores, for `tidemark verify` and `tidemark bundle`. Everything here only reads."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal, LiteralString, Self

from tidemark.common.postgres_session import Dsn, PostgresSession, fetch_all
from tidemark.sinks.postgres.database import READABLE, SCHEMA, session_of
from tidemark.sinks.postgres.history import advances_since
from tidemark.sinks.postgres.positions import WriterPosition, stored_writers

STATES: LiteralString = """
    select stream, case when retired is null then state else substr(state, 1, length(state) - 1) || retired end as state
    from tidemark.streams
    where %(streams)s::text[] is null or stream = any(%(streams)s::text[])
"""
"""Name and encoded state of each stream."""

HistoryFaultKind = Literal["hole", "overlap", "regress", "no writer"]


@dataclass(frozen=True, slots=True)
class AuditedStream:
    """The rows of a stream at one moment.

    `late` is the number of its newest late completion; `gaps` has writer and top of the open gaps; `state` is the seed
    of the next query.
    """

    linear: int
    allocated: int
    late: int
    state: bytes
    writers: dict[str, WriterPosition] = field(default_factory=dict)
    gaps: set[tuple[str, int]] = field(default_factory=set)

    @property
    def positions(self) -> dict[str, int]:
        """Positions by writer, without forgotten writers."""
        return {name: writer.position for name, writer in self.writers.items() if not writer.forgotten}


@dataclass(frozen=True, slots=True)
class HistoryFault:
    """The history of `writer` is not a chain: after `expected` comes `found`.

    `hole` and `overlap`: an advance does not begin where the one before ended. `regress`: the linear position went
    back, or a position is below the end of the history. `no writer`: advances of a writer without a position.
    """

    stream: str
    writer: str
    fault: HistoryFaultKind
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class _StreamRow:
    stream: str
    linear: int
    head: int
    late: int


class Audit:
    """A context manager; needs the rights of the role tidemark_reader.

    Raises `Unavailable`, `Refused` and `SchemaMismatch`.
    """

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
        return [name for (name,) in self._session.fetch_tuples("select stream from tidemark.streams order by 1")]

    def streams(self, names: Collection[str]) -> dict[str, AuditedStream]:
        """The streams with these names, all at one moment. Unknown names are left out."""
        named = {"streams": list(names)}
        with self._session.use() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            states = dict(connection.execute(STATES, named).fetchall())
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
        """The ID of the newest advance of `writer` beyond `position`; None if there is none."""
        with self._session.use() as connection:
            chains = advances_since(connection, [(stream, writer, position)], 1)
        chain = chains.get((stream, writer))
        return chain[-1].advance.id if chain else None

    def history_faults(self, stream: str | None, most: int) -> list[HistoryFault]:
        """Up to `most` faults of the stored history of `stream` (None: of all streams).

        The server reads and sorts the whole history once.
        """
        with self._session.use() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            return fetch_all(connection, HistoryFault, _FAULTS, {"stream": stream, "most": most})

    def advances(self) -> int:
        """The number of stored advances."""
        count = "select coalesce(sum(cardinality(ids)), 0) from tidemark.packed_advances"
        return int(self._session.fetch_value(count))


# Advances before the first stored one of a writer may have been dropped. Days are dropped whole: a place
# (`before`) in a stored day must lead to a row.
_FAULTS: LiteralString = """
with single as (
    select n.stream, n.writer, a.id - a.span as prev, a.id, a.id - coalesce(a.ahead, 0) as linear, a.before, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(p.writers, p.ids, p.spans, p.ahead, p.before) as a (number, id, span, ahead, before)
    join tidemark.writer_numbers n using (number)
    where %(stream)s::text is null or n.stream = %(stream)s
), chained as materialized (
    select *, lag(id) over chain as known, lag(linear) over chain as previous_linear,
        lead(id) over chain is null as newest
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
order by stream, writer, place limit %(most)s
"""


MOST: Final = 1000
"""Rows of a table."""
# The view of the history reads only the days of the given range of time.
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


def dump(session: PostgresSession, table: str) -> str:
    """The newest rows of one of `TABLES` as a JSON array of objects.

    Raises `Unavailable`, `Refused`, and `psycopg.Error` if the schema of another version has no such table.
    """
    rows: LiteralString = "select coalesce(jsonb_agg(to_jsonb(newest)), '[]')::text from (" + _TABLES[table]
    return str(session.fetch_value(rows + " limit %s) newest", (MOST,)))
