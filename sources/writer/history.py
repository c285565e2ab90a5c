"""Whether the database is still the one in which a writer's epoch began (docs/design.md 4).

The server compares it with each transaction (`tidemark.check_epoch`). A failover, a restore into another server and an
image from before the epoch are seen so. An image from after its beginning is not: there a sequence stands below what
was announced, which no crash of a server explains, because that was durable.
"""

from collections.abc import Mapping
from datetime import datetime

import psycopg

from tidemark.sources.writer.records import RecordBuilder
from tidemark.streaming.errors import HistoryChanged, WriterFenced
from tidemark.streaming.postgres_session import Connection, first_line

Over = WriterFenced | HistoryChanged
"""Why a writer can write no more."""

_FENCED, _ANOTHER = "TM001", "TM002"


def over(error: BaseException, instance: str, epoch: int) -> Over | None:
    """What the server says of the epoch by this error; None where it is about something else."""
    if isinstance(error, psycopg.Error):
        if error.sqlstate == _FENCED:
            return WriterFenced(instance, epoch)
        if error.sqlstate == _ANOTHER:
            return HistoryChanged(instance, first_line(error))
    return None


def require(connection: Connection, instance: str, epoch: int) -> datetime:
    """Raise `WriterFenced` or `HistoryChanged` unless the epoch goes on here; gives when this server began.

    Whatever was read of the database before, on this connection, is of the history in which the epoch began.
    """
    try:
        row = connection.execute(
            "select tidemark.check_epoch(%s, %s), pg_postmaster_start_time()", [instance, epoch]
        ).fetchone()
    except psycopg.Error as error:
        if (why := over(error, instance, epoch)) is None:
            raise
        raise why from error
    assert row is not None
    began: datetime = row[1]
    return began


def require_kept(
    builders: Mapping[str, RecordBuilder], announced: Mapping[str, int], allocated: Mapping[str, int]
) -> None:
    """Raise `HistoryChanged` where a sequence stands below what was announced of it (magnitudes, by stream)."""
    for stream, builder in builders.items():
        if allocated[stream] < announced[stream]:
            stands, told = map(builder.towards.signed, (allocated[stream], announced[stream]))
            raise HistoryChanged(
                builder.instance, f"the sequence of stream {stream} stands at {stands}, and {told} was announced"
            )
