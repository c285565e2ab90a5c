"""Tidemark's tables as a report of a fault holds them: the newest rows, no states, nothing that services wrote."""

from typing import Final, LiteralString

from tidemark.common.postgres_session import PostgresSession

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
