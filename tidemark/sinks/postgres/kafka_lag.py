"""Kafka partitions whose records wait: where the pipeline notes them for `tidemark status` and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tidemark.common.postgres_session import Connection


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
    """What the pipeline noted last, by topic and partition; nothing if the schema is older than the table."""
    if not connection.execute("select 1 where to_regclass('tidemark.lagging_partitions') is not null").fetchone():
        return []
    rows = connection.execute(
        "select topic, partition, records, since, blocked_offset, blocked_since from tidemark.lagging_partitions"
        " order by topic, partition"
    )
    return [LaggingPartition(*row) for row in rows]
