"""Waits until a replica shows what its primary had committed. No sockets: see `asks`.

A position is published after the commits that it stands for, so all of them lie below the place in the write-ahead log
where the primary is once the position is known.
"""

from collections.abc import Generator

import structlog
from psycopg import sql

from tidemark.sinks.reader.asks import Answer, Ask, Pause, Sql
from tidemark.sinks.reader.ledger import rows

log = structlog.get_logger(__name__)

POLL = 0.01  # seconds
SAY_AFTER = 1000  # polls

_WRITTEN = sql.SQL(
    "select (pg_current_wal_insert_lsn() - '0/0')::bigint as lsn,"
    " (select setting::bigint from pg_settings where name = 'wal_segment_size') as segment"
).format()
_REPLAYED = sql.SQL(
    "select (coalesce(case when pg_is_in_recovery() then pg_last_wal_replay_lsn()"
    " else pg_current_wal_insert_lsn() end, '0/0') - '0/0')::bigint as lsn"
).format()

PAGE = 8192
SHORT_HEADER, LONG_HEADER = 24, 40  # of a page, and of the first page of a segment


def caught_up() -> Generator[Ask, Answer, None]:
    """Return once `source` has replayed what `primary` has written by now."""
    (written,) = yield from rows(Sql("primary", _WRITTEN))
    wanted = end_of_records(written["lsn"], written["segment"])
    polls = 0
    while True:
        (replayed,) = yield from rows(Sql("source", _REPLAYED))
        if replayed["lsn"] >= wanted:
            return
        polls += 1
        if polls % SAY_AFTER == 0:
            log.warning("Waiting for the replica to replay", bytes=wanted - replayed["lsn"])
        yield Pause(POLL)


def end_of_records(insert: int, segment: int) -> int:
    """Where the last record ends, of a primary that would insert the next one at `insert`.

    Where that is the first byte behind a page's header, no record reaches into the page: a replica that has replayed
    everything stands before the header, and would not move until the next record is written.
    """
    if insert % segment == LONG_HEADER:
        return insert - LONG_HEADER
    if insert % PAGE == SHORT_HEADER:
        return insert - SHORT_HEADER
    return insert
