"""Records that wait for Kafka, in the bridge's own database: written with what they move, and sent letter by letter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidemark.common.postgres_session import Connection
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import Record


@dataclass(frozen=True, slots=True)
class Unsent:
    """A record that Kafka has not acknowledged."""

    number: int
    stream: str
    value: bytes


def unsent(connection: Connection, after: Mapping[str, int]) -> list[Unsent]:
    """Those of each of these streams beyond its number, in order."""
    rows = connection.execute(
        "select number, stream, value from tidemark.synapse_outbox"
        " join unnest(%s::text[], %s::bigint[]) as sent (stream, after) using (stream) where number > after"
        " order by number",
        [[*after], [*after.values()]],
    ).fetchall()
    return [Unsent(*row) for row in rows]


def acknowledged(connection: Connection, numbers: Iterable[int]) -> None:
    """Kafka has them."""
    connection.execute("delete from tidemark.synapse_outbox where number = any (%s)", [[*numbers]])


def leave(connection: Connection, stream: str, values: Iterable[Record]) -> None:
    """Write them down, behind all that the stream has there."""
    connection.execute(
        """
        insert into tidemark.synapse_outbox (stream, value)
        select %s, value from unnest(%s::bytea[]) with ordinality as given (value, place) order by place
        """,
        [stream, [records.encode(value) for value in values]],
    )
