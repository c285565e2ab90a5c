"""The epochs of the writers of a database: a first epoch, and a new epoch for each timeline and after a retirement.

Epochs are stored in the database, so a relay that starts continues the stored epochs. New epochs of all writers begin
only after the server was restarted, the database was restored, a standby was promoted, or the stream went back. Then
each writer joins at the floor. The JOIN contains an upper bound of the published IDs, from the table
`tidemark.append_sent`. Tidemark compares this bound with its own positions, and so detects an older disk image that was
restored. A new writer joins at the current floor when the relay reads the writer's first fact. The writer has no fact
up to the floor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemark.common.errors import BadSetting
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay import sequences
from tidemark.sources.relay.queries import COMMON_CUT, AppendStream
from tidemark.sources.relay.sequences import Regression
from tidemark.sources.transactions import ServerHistory
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.wire.records import DatabaseStart, Join, Retire


@dataclass(frozen=True, slots=True)
class WriterEpoch:
    """A writer of a stream in its current epoch.

    Attributes:
        name: the writer's name on Kafka.
        epoch: the number of the epoch.
        sent_upto: the last cut of the writer's chain (a magnitude). Kafka has everything of the writer up to this ID.
            The ID is beyond the floor only if the writer's previous epoch ended at this ID.
        state: `joining` until Kafka has acknowledged the JOIN, then `joined`. `retiring` until Kafka has acknowledged
            the RETIRE.
        lock_keys: the second halves of the keys of the writer's advisory locks. A key is a hash, so another writer may
            have the same key.
    """

    name: str
    epoch: int
    sent_upto: int
    state: Literal["joining", "joined", "retiring"]
    lock_keys: frozenset[int]


@dataclass(frozen=True, slots=True)
class StreamEpoch:
    """A stream with the current epochs of its writers. IDs are magnitudes.

    Attributes:
        stream: the stream.
        version: a number that rises when a relay must read the epochs again.
        floor: every ID up to the floor is decided, and Kafka has the records.
        published_bound: the upper bound of the published IDs that is stored in the database; 0 if none is stored.
        timeline: the timeline of the JOINs.
        database_writer: the name of the database's own writer in `writers`.
        writers: name on Kafka -> writer, of the writers whose epochs have not ended.
        retiring_writers: the writers whose epochs have ended, and whose RETIREs Kafka has not acknowledged.
        regressed_from_id: every ID up to this one was published before the database went back. If such an ID has no
            row, it may have had a fact, so it is not declared void. 0 if the database never went back.
        regression: why a new timeline begins now; empty if none begins.
    """

    stream: AppendStream
    version: int
    floor: int
    published_bound: int
    timeline: DatabaseStart
    database_writer: str
    writers: Mapping[str, WriterEpoch]
    retiring_writers: Sequence[WriterEpoch] = ()
    regressed_from_id: int = 0
    regression: str = ""

    def kafka_name(self, writer: str) -> str:
        """The name on Kafka of a writer, from the writer's name in the outbox."""
        return self.database_writer if writer in {"", COMMON_CUT} else writer

    def join_and_retire_records(self) -> list[Join | Retire]:
        """The JOINs and RETIREs that Kafka has not acknowledged. The JOIN of the database's own writer is first."""
        return [*self.join_records(), *self._retire_records()]

    def join_records(self) -> list[Join]:
        """The JOIN records that Kafka has not acknowledged. The JOIN of the database's own writer is first.

        In the first timeline of a stream, the JOIN of the database's own writer has `unseen` set if IDs were given out
        before the stream was created. These IDs may have facts.
        """
        first = self.timeline.after is None
        return [
            Join(
                stream=self.stream.name,
                writer=writer.name,
                epoch=writer.epoch,
                id=self.stream.direction.signed(writer.sent_upto),
                unseen=first and writer.sent_upto > 0 and writer.name == self.database_writer,
                published=self.stream.direction.signed(self.published_bound),
                timeline=self.timeline,
            )
            for writer in sorted(
                self.writers.values(),
                key=lambda writer_epoch: (writer_epoch.name != self.database_writer, writer_epoch.name),
            )
            if writer.state == "joining"
        ]

    def _retire_records(self) -> list[Retire]:
        signed, stream = self.stream.direction.signed, self.stream.name
        return [
            Retire(stream=stream, writer=writer.name, epoch=writer.epoch, id=signed(writer.sent_upto))
            for writer in self.retiring_writers
        ]


UnknownWriters = Mapping[int, Mapping[str, int]]
"""Number of the stream -> writer -> ID. The ID is 0 if the writer has not joined. Otherwise the writer's epoch ended at
that ID (a magnitude)."""


def begin(
    connection: Connection,
    history: ServerHistory,
    writer: str,
    unknown_writers: UnknownWriters | None = None,
) -> list[StreamEpoch]:
    """Begin and store new epochs if necessary, and return all streams with the epochs of their writers.

    Runs in one transaction. Any number of relays may call this function, in any order. If a stream went back, a new
    timeline begins, also for readers in this database.

    Args:
        connection: a session of the database.
        history: identifies the server's history now.
        writer: the name of the database's own writer.
        unknown_writers: writers without a current epoch. Each gets a new epoch.

    Returns:
        The streams. A dropped stream has only writers in `retiring_writers`.

    Raises:
        BadSetting: the streams were published with another name of the database's own writer.
    """
    with connection.transaction():
        sequences.begin_timelines_for_filled_ids(connection)
        regressions = sequences.find_regressions(connection)
        _begin_reader_timelines(connection, regressions)
        _begin_new_epochs(connection, history, writer, regressions)
        for number, names in (unknown_writers or {}).items():
            _store_new_writers(connection, number, names)
        rows = connection.execute(
            """
            select number, stream, direction, version, abs(floor),
                coalesce((select max(upto) from tidemark.append_sent sent where sent.number = kept.number), 0),
                start, kept.after, kept.writer,
                jsonb_agg(
                    jsonb_build_array(known.writer, epoch, abs(last), state, hashtext(known.writer) & 4294967295)
                ),
                hashtext('') & 4294967295, published
            from tidemark.append_progress kept
            join tidemark.append_streams using (number) join tidemark.append_writers known using (number)
            where known.state = 'retiring' or (ids is not null and known.state <> 'retired')
            group by number, stream, direction order by number
            """
        ).fetchall()
    stream_epochs, reasons = [], {regression.stream.number: regression.why for regression in regressions}
    for number, name, sign, version, floor, upto, start, after, own, writers, unnamed, published in rows:
        if own != writer:
            raise BadSetting(
                "writer",
                f"stream {name} of this database was published as {own!r}, not as {writer!r}: use the name {own!r}",
            )
        known = [
            WriterEpoch(name, epoch, sent_upto, state, frozenset({hashed, unnamed} if name == own else {hashed}))
            for name, epoch, sent_upto, state, hashed in writers
        ]
        retiring = [writer for writer in known if writer.state == "retiring"]
        active = {writer.name: writer for writer in known if writer.state != "retiring"}
        stream = AppendStream(number, name, Direction(sign))
        timeline = DatabaseStart(history.database, start, after)
        regression = reasons.get(number, "")
        stream_epochs.append(
            StreamEpoch(stream, version, floor, upto, timeline, own, active, retiring, published, regression)
        )
    return stream_epochs


def _begin_new_epochs(
    connection: Connection, history: ServerHistory, writer: str, regressions: Sequence[Regression]
) -> None:
    """Store the first epochs of new streams, and new epochs if the server's history has changed or a stream went back.

    A stream keeps its timeline if Kafka has not acknowledged all JOINs of that timeline.

    If a restore or a replication wrote a stream's row, the row keeps its `written_by` as evidence, until the stream is
    in `regressions`. `sequences.find_regressions` leaves out a stream with an unfit sequence until the repair.
    """
    connection.execute(
        """
        with broken as (
            select number from tidemark.append_writers where state = 'joining'
        ), back as (
            select * from unnest(
                %(numbers)s::integer[], %(versions)s::bigint[], %(floors)s::bigint[], %(uptos)s::bigint[]
            ) as found (number, version, floor, upto)
        ), turned as (
            update tidemark.append_progress as old
            set version = version + 1,
                written_by = case when written_by <> xmin and number not in (select back.number from back)
                    then written_by else pg_current_xact_id()::xid end,
                database = %(database)s, server = %(server)s,
                start = case when number in (table broken) then old.start else gen_random_uuid()::text end,
                after = case when number in (table broken) then old.after else old.start end,
                writer = coalesce(old.writer, %(writer)s),
                published = case when (number, version) in (select back.number, back.version from back)
                    then greatest(old.published, abs(old.floor)) else old.published end,
                floor = coalesce(
                    (select back.floor from back where (back.number, back.version) = (old.number, old.version)),
                    old.floor
                )
            where (old.database, old.server) is distinct from (%(database)s, %(server)s)
                or (number, version) in (select back.number, back.version from back)
            returning number, writer, floor, version - 1 as version
        ), taken_back as (
            select number, back.upto from back join turned using (number, version)
        ), forgotten as (
            delete from tidemark.append_sent as noted using taken_back
            where noted.number = taken_back.number and noted.upto > taken_back.upto
        ), noted as (
            insert into tidemark.append_sent (number, upto) select number, upto from taken_back
            on conflict do nothing
        ), again as (
            update tidemark.append_writers as old
            set epoch = greatest(old.epoch + 1, %(now)s), last = turned.floor, state = 'joining'
            from turned where turned.number = old.number and old.state in ('joining', 'joined')
        )
        insert into tidemark.append_writers (number, writer, epoch, last)
        select number, writer, %(now)s, floor from turned
        where (number, writer) not in (select number, writer from tidemark.append_writers)
        """,
        {
            "database": history.database,
            "server": history.server,
            "writer": writer,
            "now": _read_clock_ms(connection),
            "numbers": [regression.stream.number for regression in regressions],
            "versions": [regression.version for regression in regressions],
            "floors": [regression.stream.direction.signed(regression.floor) for regression in regressions],
            "uptos": [regression.published_bound for regression in regressions],
        },
    )


def _begin_reader_timelines(connection: Connection, regressions: Sequence[Regression]) -> None:
    """Begin a new timeline for the readers of this database, for each regression that no other relay has handled."""
    if not regressions:
        return
    rows = connection.execute(
        """
        select kept.number from tidemark.append_progress as kept
        join unnest(%s::integer[], %s::bigint[]) as found (number, version) using (number, version) for update of kept
        """,
        [[regression.stream.number for regression in regressions], [regression.version for regression in regressions]],
    ).fetchall()
    for regression in regressions:
        if (regression.stream.number,) in rows:
            reader_floor = regression.stream.direction.signed(regression.reader_floor)
            connection.execute(
                "select tidemark_reader.went_back(%s, %s, %s)",
                [regression.stream.name, reader_floor, regression.is_restore],
            )


def _store_new_writers(connection: Connection, number: int, writers: Mapping[str, int]) -> None:
    """Store new epochs of one stream's writers that have not joined, or whose epoch has ended.

    Raises the stream's version, so that all relays start again with the new chains.

    Args:
        connection: a session of the database, in a transaction.
        number: the number of the stream.
        writers: the value of `UnknownWriters` for the stream.
    """
    connection.execute(
        """
        with raised as (
            update tidemark.append_progress set version = version + 1,
                written_by = case when written_by <> xmin then written_by else pg_current_xact_id()::xid end
            where number = %(number)s returning number, floor
        ), given as (
            select number, name, ended, direction * greatest(abs(floor), ended) as last
            from raised join tidemark.append_streams using (number),
                unnest(%(names)s::text[], %(ended)s::bigint[]) as found (name, ended)
        ), again as (
            update tidemark.append_writers as old
            set epoch = greatest(old.epoch + 1, %(now)s), last = given.last, state = 'joining'
            from given where (old.number, old.writer) = (given.number, given.name)
                and (old.state in ('retiring', 'retired') or abs(old.last) < given.ended)
        )
        insert into tidemark.append_writers (number, writer, epoch, last)
        select number, name, %(now)s, last from given
        on conflict do nothing
        """,
        {"number": number, "names": [*writers], "ended": [*writers.values()], "now": _read_clock_ms(connection)},
    )


def _read_clock_ms(connection: Connection) -> int:
    """Read the clock of the database, in ms since 1970. New epochs have at least this number, so that they are higher
    than the epochs before a restore."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


def store_acknowledged(connection: Connection, streams: Sequence[StreamEpoch]) -> None:
    """Store that Kafka has acknowledged the JOINs and RETIREs of these streams."""
    connection.cursor().executemany(
        "update tidemark.append_writers set state = case state when 'joining' then 'joined' else 'retired' end"
        " where (number, writer, epoch, state) = (%s, %s, %s, %s)",
        [
            (stream_epoch.stream.number, writer.name, writer.epoch, writer.state)
            for stream_epoch in streams
            for writer in [*stream_epoch.writers.values(), *stream_epoch.retiring_writers]
            if writer.state != "joined"
        ],
    )
