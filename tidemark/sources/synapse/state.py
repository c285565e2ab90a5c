"""The state of the bridge, in Tidemark's database. If the bridge is killed at any point, the next bridge continues.

The bridge stores records in the outbox before it sends them. One transaction stores the records and the new positions.
So the next bridge sends the same records again. Any number of bridges may run; the bridge that holds the locks is
active. A bridge may lose its session, and the locks with it, without noticing. Then its next write finds that another
bridge has moved the positions, and the bridge starts again.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidemark.common.errors import BadSetting, PrerequisitePending
from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession
from tidemark.sources.synapse import evidence
from tidemark.sources.synapse.decider import ProvenAdvance, StreamFact, WriterEncoder
from tidemark.sources.synapse.evidence import PublishedFacts
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.streaming.wire import records
from tidemark.streaming.wire.records import DatabaseStart, Record


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """A record of the outbox, which Kafka has not acknowledged.

    Attributes:
        number: the number of the record in the outbox. Numbers rise in the order of sending.
        stream: the stream's name in Kafka, which is the record's key.
        value: the encoded record.
    """

    number: int
    stream: str
    value: bytes


def read_outbox(connection: Connection, after_numbers: Mapping[str, int]) -> list[OutboxRecord]:
    """Read the records of the outbox in the order of sending.

    Args:
        connection: to the bridge's database.
        after_numbers: stream -> the outbox number above which records are read. Other streams are left out.
    """
    rows = connection.execute(
        "select number, stream, value from tidemark.synapse_outbox"
        " join unnest(%s::text[], %s::bigint[]) as sent (stream, after) using (stream) where number > after"
        " order by number",
        [[*after_numbers], [*after_numbers.values()]],
    ).fetchall()
    return [OutboxRecord(*row) for row in rows]


def delete_acknowledged(connection: Connection, numbers: Iterable[int]) -> None:
    """Delete records from the outbox by their numbers, because Kafka has acknowledged the records."""
    connection.execute("delete from tidemark.synapse_outbox where number = any (%s)", [[*numbers]])


def append_outbox(connection: Connection, stream: str, values: Iterable[Record]) -> None:
    """Append records of a stream to the outbox, in this order."""
    connection.execute(
        """
        insert into tidemark.synapse_outbox (stream, value)
        select %s, value from unnest(%s::bytea[]) with ordinality as given (value, position) order by position
        """,
        [stream, [records.encode(value) for value in values]],
    )


MIGRATE_COMMAND = "tidemark synapse migrate"
SCHEMA = Migrations("tidemark.sources.synapse", "synapse_schema_version", MIGRATE_COMMAND)
_DATABASE_USE = DatabaseUse(
    "TIDEMARK_POSTGRES_DSN",
    remedies={
        "3F": f"run `{MIGRATE_COMMAND}`",
        "42P01": f"run `{MIGRATE_COMMAND}`",
        "42501": "grant the user select, insert, update and delete on the tables tidemark.synapse_..., and BYPASSRLS if"
        " they have row level security",
    },
    options=(("synchronous_commit", "on"),),
    # The bridge's advisory locks must last as long as its session.
    pooler_remedy="give the bridge a direct connection to the server",
)


def state_session(dsn: Dsn) -> PostgresSession:
    """Make the bridge's session in its own database. The session connects at its first use."""
    return PostgresSession(dsn, "tidemark synapse", _DATABASE_USE)


@dataclass(frozen=True, slots=True)
class SynapseServer:
    """Synapse's database as it is when the bridge connects.

    Attributes:
        database: the identity of the database (`ServerHistory.database`).
        lsn: the end of the server's write-ahead log, as text.
        name: Synapse's server_name.
    """

    database: str
    lsn: str
    name: str


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far a stream is published. IDs are magnitudes.

    Attributes:
        stream: the stream.
        name: the stream's name in Kafka.
        timeline: the stream's timeline.
        sent_upto: active writer -> its published position.
        epochs: active writer -> its epoch.
        floor: the ID at which the stream began. Facts up to this ID are not published.
        retired_at_ids: retired writer -> the ID at which the writer retired.
        backlog_starts: active writer with a backlog -> the ID above which its facts are not published yet, up to the ID
            at which the writer joined.
    """

    stream: SynapseStream
    name: str
    timeline: DatabaseStart
    sent_upto: Mapping[str, int]
    epochs: Mapping[str, int]
    floor: int
    retired_at_ids: Mapping[str, int] = field(default_factory=dict)
    backlog_starts: Mapping[str, int] = field(default_factory=dict)

    def encoder(self, writer: str) -> WriterEncoder:
        """The encoder of a writer of `epochs`, in its epoch."""
        return WriterEncoder(self.name, writer, self.epochs[writer], self.stream.direction, self.timeline)

    @property
    def all_sent_upto(self) -> Mapping[str, int]:
        """Writer -> its published position, of active and retired writers."""
        return {**self.retired_at_ids, **self.sent_upto}

    @property
    def max_sent_upto(self) -> int:
        """The highest published position of all writers; 0 without writers."""
        return max(self.all_sent_upto.values(), default=0)

    @property
    def slowest_encoder(self) -> WriterEncoder:
        """The encoder of the writer with the lowest position. This position is the linear position."""
        return self.encoder(min(self.sent_upto, key=lambda name: (self.sent_upto[name], name)))


def read_lock_keys(connection: Connection, names: Sequence[str]) -> list[int]:
    """The second halves of the keys of the advisory locks for publishing these streams (names in Kafka)."""
    rows = connection.execute("select hashtext(name) from unnest(%s::text[]) as name", [[*names]]).fetchall()
    return [key for (key,) in rows]


def create_stream(
    connection: Connection,
    stream: SynapseStream,
    name: str,
    server: SynapseServer,
    writers: Iterable[str],
    floor: int,
    head: int | None = None,
) -> tuple[StreamProgress, PublishedFacts]:
    """Begin to publish a stream: store the stream, and write the JOINs of all writers to the outbox.

    Facts up to `floor` are not published. Readers find these facts in the table.

    Args:
        connection: to the bridge's database.
        stream: the stream.
        name: the stream's name in Kafka.
        server: Synapse's database.
        writers: all writers.
        floor: the ID at which the writers join.
        head: the highest ID that was given out; None if this is `floor`.

    Returns:
        The progress of the stream, and its published facts, which are none.
    """
    names, now = sorted(writers), read_clock(connection)
    timeline = DatabaseStart(server.database, uuid.uuid4().hex)
    progress = StreamProgress(stream, name, timeline, dict.fromkeys(names, floor), dict.fromkeys(names, now), floor)
    with connection.transaction():
        connection.execute(
            "insert into tidemark.synapse_streams (stream, server, database, history, lsn, start, floor, head)"
            " values (%s, %s, %s, %s, %s, %s, %s, %s)",
            [
                name,
                server.name,
                server.database,
                server.database,
                server.lsn,
                timeline.start,
                floor,
                floor if head is None else head,
            ],
        )
        for writer in names:
            _upsert_writer(connection, progress, writer, floor)
        append_outbox(connection, name, [progress.encoder(writer).join(floor, unseen=True) for writer in names])
        published = evidence.begin(connection, name, floor)
    return progress, published


def add_writer(
    connection: Connection, progress: StreamProgress, writer: str, at: int, *, kept_above: int = 0
) -> StreamProgress:
    """Store that a writer joins, and write its JOIN to the outbox. Returns the new progress.

    The writer joins at the ID `at`, or at the ID at which it retired if this ID is higher. The writer's facts up to
    this ID that are not published are its backlog. The backlog begins at the ID at which the writer retired, or for a
    new writer, at the floor of the stream. The backlog is later published as late.

    Args:
        connection: to the bridge's database.
        progress: the progress of the stream.
        writer: the writer.
        at: the linear position.
        kept_above: rows with IDs up to this one may have been deleted.
    """
    now, ended = read_clock(connection), progress.retired_at_ids.get(writer, progress.floor)
    row = connection.execute(
        "select epoch from tidemark.synapse_writers where (stream, writer) = (%s, %s)", [progress.name, writer]
    ).fetchone()
    joined, epoch = max(at, ended), max(now, row[0] + 1 if row else 0)
    new_progress = replace(
        progress,
        sent_upto={**progress.sent_upto, writer: joined},
        epochs={**progress.epochs, writer: epoch},
        retired_at_ids={name: id for name, id in progress.retired_at_ids.items() if name != writer},
        backlog_starts={**progress.backlog_starts, writer: ended},
    )
    with connection.transaction():
        _upsert_writer(connection, new_progress, writer, joined)
        unseen = joined > ended and (not progress.stream.keeps_rows or ended < kept_above)
        append_outbox(connection, progress.name, [new_progress.encoder(writer).join(joined, unseen=unseen)])
    return new_progress


def send_backlog(
    connection: Connection, progress: StreamProgress, published: PublishedFacts, writer: str, late: Sequence[StreamFact]
) -> StreamProgress:
    """Publish the backlog of a writer as late. Returns the new progress. `late`: the facts of the backlog."""
    with connection.transaction():
        connection.execute(
            "update tidemark.synapse_writers set backlog_from = null where (stream, writer) = (%s, %s)",
            [progress.name, writer],
        )
        publish_late(connection, progress, published, late)
    return replace(
        progress, backlog_starts={name: low for name, low in progress.backlog_starts.items() if name != writer}
    )


def publish_late(
    connection: Connection, progress: StreamProgress, published: PublishedFacts, late: Sequence[StreamFact]
) -> None:
    """Write facts at or below the positions of their writers to the outbox, and add them to `published`.

    Args:
        connection: to the bridge's database.
        progress: the progress of the stream.
        published: the published facts of the stream.
        late: the facts. Their writers may have retired.
    """
    with connection.transaction():
        rows = connection.execute(
            "select writer, epoch from tidemark.synapse_writers where stream = %s", [progress.name]
        ).fetchall()
        encoders = replace(progress, epochs=dict(rows))
        for fact in late:
            advance = ProvenAdvance(fact.writer, fact.id - 1, fact.id, [fact])
            append_outbox(connection, progress.name, encoders.encoder(fact.writer).advance(advance))
        evidence.remember(connection, progress.name, published, late)


def advance_stream(
    connection: Connection,
    progress: StreamProgress,
    published: PublishedFacts,
    advances: Sequence[ProvenAdvance],
    lsn: str,
    head: int,
) -> StreamProgress:
    """Write the records of advances to the outbox, and store the new positions. Returns the new progress.

    Args:
        connection: to the bridge's database.
        progress: the progress of the stream.
        published: the published facts of the stream, to which the new facts are added.
        advances: the advances.
        lsn: the end of the write-ahead log of Synapse's database, as text.
        head: the highest ID that was given out.

    Raises:
        PrerequisitePending: another bridge has moved the stream since `progress` was loaded.
    """
    sent_upto, epochs = dict(progress.sent_upto), dict(progress.epochs)
    with connection.transaction():
        connection.execute(
            "update tidemark.synapse_streams set lsn = %s, head = %s where stream = %s", [lsn, head, progress.name]
        )
        for advance in advances:
            encoder = progress.encoder(advance.writer)
            values: list[Record] = [*encoder.advance(advance)]
            if advance.is_unseen:
                epochs[advance.writer] = encoder.epoch + 1
                values.append(replace(encoder, epoch=encoder.epoch + 1).join(advance.id, unseen=True))
            moved = connection.execute(
                "update tidemark.synapse_writers set sent_upto = %s, epoch = %s"
                " where (stream, writer, sent_upto, epoch) = (%s, %s, %s, %s)",
                [advance.id, epochs[advance.writer], progress.name, advance.writer, advance.prev, encoder.epoch],
            )
            if moved.rowcount != 1:
                raise PrerequisitePending(
                    f"publishing stream {progress.name}",
                    "",
                    f"another bridge has moved the position of {advance.writer}",
                )
            append_outbox(connection, progress.name, values)
            sent_upto[advance.writer] = advance.id
        evidence.remember(
            connection, progress.name, published, [fact for advance in advances for fact in advance.facts]
        )
    return replace(progress, sent_upto=sent_upto, epochs=epochs)


def retire(connection: Connection, progress: StreamProgress, writer: str) -> StreamProgress:
    """Store that a writer retires, and write its RETIRE to the outbox. Returns the new progress.

    All facts of the writer must be published.
    """
    at = progress.sent_upto[writer]
    with connection.transaction():
        connection.execute(
            "update tidemark.synapse_writers set state = 'retired' where (stream, writer) = (%s, %s)",
            [progress.name, writer],
        )
        append_outbox(connection, progress.name, [progress.encoder(writer).retire(at)])
    sent_upto, epochs = (
        {name: by_name[name] for name in by_name if name != writer} for by_name in (progress.sent_upto, progress.epochs)
    )
    return replace(progress, sent_upto=sent_upto, epochs=epochs, retired_at_ids={**progress.retired_at_ids, writer: at})


def _upsert_writer(connection: Connection, progress: StreamProgress, writer: str, at: int) -> None:
    connection.execute(
        """
        insert into tidemark.synapse_writers (stream, writer, epoch, sent_upto, backlog_from)
        values (%s, %s, %s, %s, %s)
        on conflict (stream, writer)
        do update set epoch = excluded.epoch, sent_upto = excluded.sent_upto, backlog_from = excluded.backlog_from,
            state = 'active'
        """,
        [progress.name, writer, progress.epochs[writer], at, progress.backlog_starts.get(writer)],
    )


def read_clock(connection: Connection) -> int:
    """Read the clock of the bridge's database, in ms since 1970. New epochs have at least this number, so that they are
    higher than the epochs before a restore."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


def read_requested_retirements(connection: Connection, name: str) -> list[str]:
    """Read the writers of the stream whose retirement was requested and is not finished."""
    rows = connection.execute(
        "select writer from tidemark.synapse_writers where (stream, state) = (%s, 'retiring')", [name]
    ).fetchall()
    return [writer for (writer,) in rows]


def request_retirement(connection: Connection, writer: str, stream: str | None) -> list[str]:
    """Store a request that the bridge retires a writer. Leaves out streams that have no other active writer.

    Args:
        connection: to the bridge's database.
        writer: the writer.
        stream: the stream's name in Kafka; None for all streams.

    Returns:
        The streams in which the writer retires, sorted. Includes earlier requests that are not finished.
    """
    rows = connection.execute(
        """
        update tidemark.synapse_writers ending set state = 'retiring'
        where writer = %(writer)s and state <> 'retired' and (%(stream)s::text is null or stream = %(stream)s)
            and exists (
                select from tidemark.synapse_writers other
                where other.stream = ending.stream and other.writer <> ending.writer and other.state = 'active'
            )
        returning stream
        """,
        {"writer": writer, "stream": stream},
    ).fetchall()
    return sorted(stream for (stream,) in rows)


def read_active_writers(connection: Connection, stream: str | None) -> list[str]:
    """Read the names of the writers that neither retire nor have retired, sorted.

    `stream`: the stream's name in Kafka; None for all streams.
    """
    rows = connection.execute(
        "select distinct writer from tidemark.synapse_writers"
        " where state = 'active' and (%(stream)s::text is null or stream = %(stream)s) order by writer",
        {"stream": stream},
    ).fetchall()
    return [writer for (writer,) in rows]


def read_retired_id(connection: Connection, writer: str, stream: str) -> int | None:
    """Read the ID at which a writer retired; None if the retirement is not finished.

    Raises:
        BadSetting: the retirement was cancelled, because the writer is alive; or the stream has no such writer.
    """
    row = connection.execute(
        "select state, sent_upto from tidemark.synapse_writers where (stream, writer) = (%s, %s)", [stream, writer]
    ).fetchone()
    if row is None:
        problem = f"the stream {stream} has no writer {writer}; for its writers, run: tidemark status {stream}"
        raise BadSetting("WRITER", problem)
    if row[0] == "active":
        problem = f"{writer} is alive: it announced a position after the request to retire, and stays in {stream}"
        raise BadSetting("WRITER", f"{problem}; first stop the worker and remove it from Synapse's stream_writers")
    return int(row[1]) if row[0] == "retired" else None


def cancel_retirement(connection: Connection, name: str, writer: str) -> None:
    """Cancel the requested retirement of a writer that is alive. `name`: the stream's name in Kafka."""
    connection.execute(
        "update tidemark.synapse_writers set state = 'active' where (stream, writer, state) = (%s, %s, 'retiring')",
        [name, writer],
    )
