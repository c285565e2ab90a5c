"""The epochs in which a database is told: one from the first time on, and a new one for each timeline.

What is told follows from the database alone, so a relay that begins needs no epoch of its own: it goes on in the one
that stands there. Only where the database is another than that in which the epoch began (restored, or failed over) does
a new one begin, with a JOIN of each writer at the floor of what is there now. A writer joins when its first fact is
found, at the floor of then: nothing of it lies below.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidemark.sources.relay.looks import BEAT, AppendStream
from tidemark.streaming.direction import Direction
from tidemark.streaming.errors import BadSetting, Unavailable
from tidemark.streaming.postgres_session import Connection
from tidemark.streaming.records import Join, Timeline


@dataclass(frozen=True, slots=True)
class ToldWriter:
    """Its line was last cut at `last` (a magnitude), at or below the floor. `joined`: Kafka has the JOIN.

    `numbers` are those by which its locks are known, which others may have too.
    """

    name: str
    epoch: int
    last: int
    joined: bool
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Told:
    """A stream; everything up to `floor` (a magnitude) is decided. `own` is the database's own name among `writers`."""

    stream: AppendStream
    version: int
    floor: int
    timeline: Timeline
    own: str
    writers: Mapping[str, ToldWriter]

    def name_of(self, writer: str) -> str:
        """As Kafka knows it who is called so in the outbox."""
        return self.own if writer in {"", BEAT} else writer

    def joins(self) -> list[Join]:
        """Those that Kafka does not have, the database's own first.

        Behind the IDs that were there before the stream was made nobody has told anything.
        """
        first = self.timeline.after is None
        return [
            Join(
                stream=self.stream.name,
                writer=each.name,
                epoch=each.epoch,
                id=self.stream.towards.signed(each.last),
                unseen=first and each.last > 0 and each.name == self.own,
                timeline=self.timeline,
            )
            for each in sorted(self.writers.values(), key=lambda it: (it.name != self.own, it.name))
            if not each.joined
        ]


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


Remembered = Mapping[int, tuple[str | None, int]]
"""Token and floor (a magnitude) by number of the stream, as a relay saw them in the database before."""
Strangers = Mapping[int, Collection[str]]
"""By number of the stream: writers that a relay has found and does not know."""


def begin(
    connection: Connection,
    database: str,
    writer: str,
    remembered: Remembered | None = None,
    strangers: Strangers | None = None,
) -> list[Told]:
    """All streams, with their writers in their epochs of this history. Any number of relays may call it, in any order.

    A floor below one that is remembered with the same token is another history too: a disk image was put back. Raises
    `BadSetting` where the streams are known to Tidemark by another name.
    """
    with connection.transaction():
        _turn(connection, database, writer, remembered or {})
        for number, names in (strangers or {}).items():
            _introduce(connection, number, names)
        rows = connection.execute(
            """
            select number, stream, direction, version, abs(floor), start, kept.after, kept.writer,
                jsonb_agg(
                    jsonb_build_array(known.writer, epoch, abs(last), joined, hashtext(known.writer) & 4294967295)
                ),
                hashtext('') & 4294967295
            from tidemark.append_progress kept
            join tidemark.append_streams using (number) join tidemark.append_writers known using (number)
            group by number, stream, direction order by number
            """
        ).fetchall()
    found = []
    for number, name, sign, version, floor, start, after, own, writers, unnamed in rows:
        if own != writer:
            raise BadSetting("writer", f"stream {name} of this database was told as {own!r}, not as {writer!r}")
        known = [
            ToldWriter(each, epoch, last, is_joined, frozenset({hashed, unnamed} if each == own else {hashed}))
            for each, epoch, last, is_joined, hashed in writers
        ]
        stream = AppendStream(number, name, Direction(sign))
        timeline = Timeline(database, start, after)
        found.append(Told(stream, version, floor, timeline, own, {each.name: each for each in known}))
    return found


def _turn(connection: Connection, database: str, writer: str, remembered: Remembered) -> None:
    """Begin new epochs where the history is another one, and the first of a stream."""
    connection.execute(
        """
        with turned as (
            update tidemark.append_progress as old
            set version = version + 1, database = %(database)s, start = gen_random_uuid()::text,
                after = case when exists (
                    select from tidemark.append_writers known
                    where (known.number, known.writer) = (old.number, old.writer) and known.joined
                ) then old.start else old.after end,
                writer = coalesce(old.writer, %(writer)s)
            where old.database is distinct from %(database)s or exists (
                select from unnest(%(numbers)s::integer[], %(starts)s::text[], %(floors)s::bigint[])
                    as known (number, start, floor)
                where (known.number, known.start) = (old.number, old.start) and known.floor > abs(old.floor)
            )
            returning number, writer, floor
        ), again as (
            update tidemark.append_writers as old
            set epoch = greatest(old.epoch + 1, %(now)s), last = turned.floor, joined = false
            from turned where turned.number = old.number
        )
        insert into tidemark.append_writers (number, writer, epoch, last)
        select number, writer, %(now)s, floor from turned
        where (number, writer) not in (select number, writer from tidemark.append_writers)
        """,
        {
            "database": database,
            "writer": writer,
            "now": _now(connection),
            "numbers": [*remembered],
            "starts": [start for start, _ in remembered.values()],
            "floors": [floor for _, floor in remembered.values()],
        },
    )


def _introduce(connection: Connection, number: int, names: Collection[str]) -> None:
    """Note who has appended, in the transaction that makes other relays begin anew: they do not know its line."""
    connection.execute(
        """
        with raised as (
            update tidemark.append_progress set version = version + 1 where number = %(number)s returning number, floor
        )
        insert into tidemark.append_writers (number, writer, epoch, last)
        select number, name, %(now)s, floor from raised, unnest(%(names)s::text[]) as name
        on conflict do nothing
        """,
        {"number": number, "names": [*names], "now": _now(connection)},
    )


def _now(connection: Connection) -> int:
    """The clock of the database in ms, behind which its epochs begin: so they rise over a restore too."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


def joined(connection: Connection, told: Sequence[Told]) -> None:
    """Kafka has acknowledged their JOINs."""
    connection.cursor().executemany(
        "update tidemark.append_writers set joined = true where number = %s and writer = %s and epoch = %s",
        [
            (each.stream.number, writer.name, writer.epoch)
            for each in told
            for writer in each.writers.values()
            if not writer.joined
        ],
    )
