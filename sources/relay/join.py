"""The epochs in which a database is told: one from the first time on, and a new one for each timeline.

What is told follows from the database alone, so a relay that begins needs no epoch of its own: it goes on in the one
that stands there. Only where the database is another than that in which the epoch began (restored, or failed over) does
a new one begin, with a JOIN at the floor of what is there now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemark.sources.relay.looks import AppendStream
from tidemark.streaming.direction import Direction
from tidemark.streaming.errors import BadSetting, Unavailable
from tidemark.streaming.postgres_session import Connection
from tidemark.streaming.records import Join, Timeline


@dataclass(frozen=True, slots=True)
class Told:
    """A stream in its epoch; everything up to `floor` (a magnitude) is decided. `joined`: Kafka has the JOIN."""

    stream: AppendStream
    epoch: int
    floor: int
    timeline: Timeline
    joined: bool

    def join(self, writer: str) -> Join:
        """Behind the IDs that were there before the stream was made nobody has told anything."""
        return Join(
            stream=self.stream.name,
            writer=writer,
            epoch=self.epoch,
            id=self.stream.towards.signed(self.floor),
            unseen=self.timeline.after is None and self.floor > 0,
            timeline=self.timeline,
        )


def history(connection: Connection, where: str) -> str:
    """What changes where the database is another: server, timeline, database, its table (a restore makes it anew).

    The timeline is that of the log that is being written; pg_control_checkpoint() tells of a promotion only after the
    next checkpoint. Raises `Unavailable` on a standby.
    """
    row = connection.execute("select pg_is_in_recovery()").fetchone()
    if row is None or row[0]:
        raise Unavailable("Postgres", where, "it is a standby")
    row = connection.execute(
        """
        select format('%s/%s/%s/%s', system_identifier, left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
            (select oid from pg_database where datname = current_database()),
            'tidemark.append_outbox'::regclass::oid)
        from pg_control_system()
        """
    ).fetchone()
    assert row is not None
    return str(row[0])


Remembered = Mapping[int, tuple[int, int]]
"""Epoch and floor (a magnitude) by number of the stream, as a relay saw them in the database before."""


def begin(connection: Connection, database: str, writer: str, remembered: Remembered | None = None) -> list[Told]:
    """All streams, each in its epoch of this history. Any number of relays may call it, in any order.

    A floor below one that is remembered of the same epoch is another history too: a disk image was put back. Raises
    `BadSetting` where the streams are known to Tidemark by another name.
    """
    numbers = remembered or {}
    with connection.transaction():
        connection.execute(
            """
            update tidemark.append_progress as old
            set epoch = greatest(old.epoch + 1, (extract(epoch from clock_timestamp()) * 1000)::bigint),
                database = %(database)s, start = gen_random_uuid()::text, joined = false,
                after = case when old.joined then old.start else old.after end,
                writer = coalesce(old.writer, %(writer)s)
            where old.database is distinct from %(database)s or exists (
                select from unnest(%(numbers)s::integer[], %(epochs)s::bigint[], %(floors)s::bigint[])
                    as known (number, epoch, floor)
                where (known.number, known.epoch) = (old.number, old.epoch) and known.floor > abs(old.floor)
            )
            """,
            {
                "database": database,
                "writer": writer,
                "numbers": [*numbers],
                "epochs": [epoch for epoch, _ in numbers.values()],
                "floors": [floor for _, floor in numbers.values()],
            },
        )
        rows = connection.execute(
            """
            select number, stream, direction, epoch, abs(floor), start, kept.after, joined, writer
            from tidemark.append_progress kept join tidemark.append_streams using (number) order by number
            """
        ).fetchall()
    found = []
    for number, name, sign, epoch, floor, start, after, joined, known in rows:
        if known != writer:
            raise BadSetting("writer", f"stream {name} of this database was told as {known!r}, not as {writer!r}")
        stream = AppendStream(number, name, Direction(sign))
        found.append(Told(stream, epoch, floor, Timeline(database, start, after), joined))
    return found


def joined(connection: Connection, told: Sequence[Told]) -> None:
    """Kafka has acknowledged their JOINs."""
    connection.cursor().executemany(
        "update tidemark.append_progress set joined = true where number = %s and epoch = %s",
        [(each.stream.number, each.epoch) for each in told],
    )
