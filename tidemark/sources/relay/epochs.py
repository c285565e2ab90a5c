"""The epochs in which the streams of a database are published: the first one, and a new one for each timeline.

Everything follows from the database alone, so a relay that starts needs no epoch of its own: it continues the stored
one. A new epoch begins only after the server was restarted, the database was restored, or a standby was promoted. Then
each writer joins at the current floor. Its JOIN says how far the database knows that IDs were published. Tidemark
compares that with its own positions, and so detects a restored older disk image. A new writer joins at the current
floor when its first fact is found: no fact of it lies below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemark.common.errors import BadSetting
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay import sequences
from tidemark.sources.relay.queries import BEAT, AppendStream
from tidemark.sources.relay.sequences import Regression
from tidemark.sources.transactions import ServerHistory
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.wire.records import Join, Retire, Timeline


@dataclass(frozen=True, slots=True)
class WriterEpoch:
    """A writer of a stream in its current epoch. Its chain was last cut at `last` (a magnitude), which lies beyond the
    floor only if the writer's epoch before ended there.

    `state` as stored: whether Kafka has the JOIN, and whether the epoch has ended. `numbers` are the second halves of
    the keys of its locks, which other writers may share.
    """

    name: str
    epoch: int
    last: int
    state: Literal["joining", "joined", "retiring"]
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class StreamEpoch:
    """A stream in its current epoch. Everything up to `floor` is decided, and nothing beyond `upto` was published
    before (magnitudes). `own` is the name of the database itself among `writers`.

    The epochs of `retiring` writers have ended. Up to `published` everything was published before the database went
    back: an ID without a row there may have had a fact, so it is not declared void. `regression` says why a new
    timeline begins now.
    """

    stream: AppendStream
    version: int
    floor: int
    upto: int
    timeline: Timeline
    own: str
    writers: Mapping[str, WriterEpoch]
    retiring: Sequence[WriterEpoch] = ()
    published: int = 0
    regression: str = ""

    def name_of(self, writer: str) -> str:
        """The name on Kafka of a writer in the outbox."""
        return self.own if writer in {"", BEAT} else writer

    def acts(self) -> list[Join | Retire]:
        """The JOIN and RETIRE records that Kafka does not have, the database's own JOIN first."""
        return [*self.joins(), *self._retires()]

    def joins(self) -> list[Join]:
        """The JOINs that Kafka does not have, that of the database itself first.

        Nothing is known about IDs that were given out before the stream was created.
        """
        first = self.timeline.after is None
        return [
            Join(
                stream=self.stream.name,
                writer=writer.name,
                epoch=writer.epoch,
                id=self.stream.towards.signed(writer.last),
                unseen=first and writer.last > 0 and writer.name == self.own,
                published=self.stream.towards.signed(self.upto),
                timeline=self.timeline,
            )
            for writer in sorted(
                self.writers.values(), key=lambda writer_epoch: (writer_epoch.name != self.own, writer_epoch.name)
            )
            if writer.state == "joining"
        ]

    def _retires(self) -> list[Retire]:
        signed, stream = self.stream.towards.signed, self.stream.name
        return [
            Retire(stream=stream, writer=writer.name, epoch=writer.epoch, id=signed(writer.last))
            for writer in self.retiring
        ]


UnknownWriters = Mapping[int, Mapping[str, int]]
"""By number of the stream, then by writer: writers that the relay does not know but whose rows it has read, or whose
epoch has ended at that ID.
"""


def begin(
    connection: Connection,
    history: ServerHistory,
    writer: str,
    unknown_writers: UnknownWriters | None = None,
) -> list[StreamEpoch]:
    """All streams, with the epochs of their writers in this history. A dropped stream has only the writers to retire.

    Any number of relays may call it, in any order. If a stream went back, a new timeline begins at that ID. Raises
    `BadSetting` if Tidemark knows the streams by another name."""
    with connection.transaction():
        sequences.warn_readers_of_filled_ids(connection)
        back = sequences.find_regressions(connection)
        _warn_readers(connection, back)
        _turn(connection, history, writer, back)
        for number, names in (unknown_writers or {}).items():
            _introduce(connection, number, names)
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
    stream_epochs, why = [], {regression.stream.number: regression.why for regression in back}
    for number, name, sign, version, floor, upto, start, after, own, writers, unnamed, published in rows:
        if own != writer:
            raise BadSetting("writer", f"stream {name} of this database was published as {own!r}, not as {writer!r}")
        known = [
            WriterEpoch(name, epoch, last, state, frozenset({hashed, unnamed} if name == own else {hashed}))
            for name, epoch, last, state, hashed in writers
        ]
        retiring = [writer for writer in known if writer.state == "retiring"]
        active = {writer.name: writer for writer in known if writer.state != "retiring"}
        stream = AppendStream(number, name, Direction(sign))
        timeline = Timeline(history.database, start, after)
        regression = why.get(number, "")
        stream_epochs.append(
            StreamEpoch(stream, version, floor, upto, timeline, own, active, retiring, published, regression)
        )
    return stream_epochs


def _turn(connection: Connection, history: ServerHistory, writer: str, back: Sequence[Regression]) -> None:
    """Begin new epochs if the history has changed or the stream went back, and the first epoch of a stream. If Kafka
    may lack a JOIN of a start, the start is repeated with the same tokens."""
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
            set version = version + 1, written_by = pg_current_xact_id()::xid,
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
            "now": _now(connection),
            "numbers": [regression.stream.number for regression in back],
            "versions": [regression.version for regression in back],
            "floors": [regression.stream.towards.signed(regression.floor) for regression in back],
            "uptos": [regression.upto for regression in back],
        },
    )


def _warn_readers(connection: Connection, back: Sequence[Regression]) -> None:
    """Begin a new timeline for the readers of this database, unless another relay has handled the regression."""
    if not back:
        return
    rows = connection.execute(
        """
        select kept.number from tidemark.append_progress as kept
        join unnest(%s::integer[], %s::bigint[]) as found (number, version) using (number, version) for update of kept
        """,
        [[regression.stream.number for regression in back], [regression.version for regression in back]],
    ).fetchall()
    for regression in back:
        if (regression.stream.number,) in rows:
            back_to = regression.stream.towards.signed(regression.back_to)
            connection.execute(
                "select tidemark_reader.went_back(%s, %s, %s)",
                [regression.stream.name, back_to, regression.is_restore],
            )


def _introduce(connection: Connection, number: int, writers: Mapping[str, int]) -> None:
    """Store new writers. All relays start again, because they do not know the new chains."""
    connection.execute(
        """
        with raised as (
            update tidemark.append_progress set version = version + 1, written_by = pg_current_xact_id()::xid
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
        {"number": number, "names": [*writers], "ended": [*writers.values()], "now": _now(connection)},
    )


def _now(connection: Connection) -> int:
    """The clock of the database in ms. Epochs begin above it, so they also rise after a restore."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


def note_acknowledged(connection: Connection, streams: Sequence[StreamEpoch]) -> None:
    """Note that Kafka has the JOINs and RETIREs of the streams."""
    connection.cursor().executemany(
        "update tidemark.append_writers set state = case state when 'joining' then 'joined' else 'retired' end"
        " where (number, writer, epoch, state) = (%s, %s, %s, %s)",
        [
            (stream_epoch.stream.number, writer.name, writer.epoch, writer.state)
            for stream_epoch in streams
            for writer in [*stream_epoch.writers.values(), *stream_epoch.retiring]
            if writer.state != "joined"
        ],
    )
