"""What the bridge has said, in a database of its own: it may die anywhere, and whoever comes after goes on.

What is told is written here before it is sent, with the place up to which it tells, in one transaction. So what a dead
one left is sent again letter by letter, and nobody cuts a line differently. Any number may run: one has the lock of
its session and speaks. One that lost it unaware finds that its places were moved, and begins anew.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tidemark.sources.synapse.facts import ProvenAdvance, StreamFact
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.sources.synapse.told import WriterTeller
from tidemark.streaming import records
from tidemark.streaming.errors import BadSetting, OthersFirst
from tidemark.streaming.postgres_migrations import Migrations
from tidemark.streaming.postgres_session import BRIDGE_LOCK, Connection, DatabaseUse, Dsn, PostgresSession
from tidemark.streaming.records import Record, Timeline

COMMAND = "tidemark synapse migrate"
SCHEMA = Migrations("tidemark.sources.synapse", "synapse_schema_version", COMMAND)
_USE = DatabaseUse(
    "TIDEMARK_POSTGRES_DSN",
    refusals={
        "3F": f"run `{COMMAND}`",
        "42P01": f"run `{COMMAND}`",
        "42501": "let the user read and write the tables tidemark.synapse_...",
    },
    options=(
        ("lock_timeout", "'10s'"),
        ("synchronous_commit", "on"),
        ("default_transaction_isolation", "'read committed'"),
    ),
    # Its lock belongs to a session.
    pooled="give the bridge a direct connection to the server",
)


def state_session(dsn: Dsn) -> PostgresSession:
    """The bridge's session in its own database."""
    return PostgresSession(dsn, "tidemark synapse", _USE)


@dataclass(frozen=True, slots=True)
class SynapseServer:
    """Synapse's database as it is now: which one, and the end of its server's log; and Synapse's server_name."""

    database: str
    place: str
    name: str


@dataclass(frozen=True, slots=True)
class ToldWriters:
    """A stream as it was told from `floor` on, called `name` on Kafka; `told`: by writer up to where (magnitudes), and
    `retired` those who have retired there. `owed`: whose facts from there to where it joined are still to be told."""

    stream: SynapseStream
    name: str
    timeline: Timeline
    told: Mapping[str, int]
    epochs: Mapping[str, int]
    floor: int
    retired: Mapping[str, int] = field(default_factory=dict)
    owed: Mapping[str, int] = field(default_factory=dict)

    def teller(self, writer: str) -> WriterTeller:
        return WriterTeller(self.name, writer, self.epochs[writer], self.stream.towards, self.timeline)

    @property
    def holder(self) -> WriterTeller:
        """The writer for whom the linear position waits."""
        return self.teller(min(self.told, key=lambda name: (self.told[name], name)))


@dataclass(frozen=True, slots=True)
class Unsent:
    """A record that Kafka has not acknowledged."""

    number: int
    stream: str
    value: bytes


def has_turn(connection: Connection, names: Sequence[str]) -> bool:
    """Whether this session alone speaks for these streams; it does until it ends."""
    row = connection.execute(
        "select bool_and(pg_try_advisory_lock(%s, hashtext(name))) from unnest(%s::text[]) as name",
        [BRIDGE_LOCK, [*names]],
    ).fetchone()
    if row is not None and row[0]:
        return True
    connection.execute("select pg_advisory_unlock_all()")
    return False


def unsent(connection: Connection, names: Sequence[str], after: int) -> list[Unsent]:
    """Those of these streams beyond this number, in order."""
    rows = connection.execute(
        "select number, stream, value from tidemark.synapse_outbox where number > %s and stream = any (%s)"
        " order by number",
        [after, [*names]],
    ).fetchall()
    return [Unsent(*row) for row in rows]


def acknowledged(connection: Connection, numbers: Iterable[int]) -> None:
    """Kafka has them."""
    connection.execute("delete from tidemark.synapse_outbox where number = any (%s)", [[*numbers]])


def begin(
    connection: Connection, stream: SynapseStream, name: str, seen: SynapseServer, head: int
) -> ToldWriters | None:
    """How the stream was told; None where nothing of it was. `head` was read after `seen`.

    Where the database is another one, or has gone back, a new timeline begins at the head that it has now. Raises
    `BadSetting` where it is that of another Synapse.
    """
    row = connection.execute(
        "update tidemark.synapse_streams set server = coalesce(server, %s) where stream = %s"
        " returning database, history, start, after, floor, place > %s::pg_lsn, server",
        [seen.name, name, seen.place],
    ).fetchone()
    if row is None:
        return None
    database, history, start, after, floor, back, server = row
    if server != seen.name:
        raise BadSetting("--prefix", f"stream {name} is told of {server}: those of {seen.name} need names of their own")
    rows = connection.execute(
        "select writer, epoch, told, owed, state = 'retired' from tidemark.synapse_writers where stream = %s", [name]
    ).fetchall()
    told = {writer: at for writer, _, at, _, gone in rows if not gone}
    epochs = {writer: epoch for writer, epoch, _, _, gone in rows if not gone}
    retired = {writer: at for writer, _, at, _, gone in rows if gone}
    owed = {writer: low for writer, _, _, low, gone in rows if not gone and low is not None}
    known = ToldWriters(stream, name, Timeline(history, start, after), told, epochs, floor, retired, owed)
    back = back or max(told.values(), default=0) > head
    if database == seen.database and not back:
        return known
    token = uuid.uuid4().hex
    turned = Timeline(f"{seen.database}/{token}", token, start)
    now = _now(connection)
    anew = replace(
        known,
        timeline=turned,
        told={writer: min(at, head) for writer, at in told.items()},
        epochs={writer: max(epoch + 1, now) for writer, epoch in epochs.items()},
        retired={writer: min(at, head) for writer, at in retired.items()},
    )
    with connection.transaction():
        connection.execute(
            "update tidemark.synapse_streams set database = %s, history = %s, place = %s, start = %s, after = %s"
            " where stream = %s",
            [seen.database, turned.database, seen.place, turned.start, turned.after, name],
        )
        connection.execute(
            "update tidemark.synapse_writers set told = least(told, %s) where (stream, state) = (%s, 'retired')",
            [head, name],
        )
        for writer, at in anew.told.items():
            connection.execute(
                "update tidemark.synapse_writers set epoch = %s, told = %s where (stream, writer) = (%s, %s)",
                [anew.epochs[writer], at, name, writer],
            )
        _leave(connection, name, [anew.teller(writer).join(at) for writer, at in anew.told.items()])
    return anew


def found(
    connection: Connection, stream: SynapseStream, name: str, seen: SynapseServer, writers: Iterable[str], floor: int
) -> ToldWriters:
    """The stream is told from `floor` on: what lies below was never announced, and readers find it in the table."""
    names, now = sorted(writers), _now(connection)
    timeline = Timeline(seen.database, uuid.uuid4().hex)
    made = ToldWriters(stream, name, timeline, dict.fromkeys(names, floor), dict.fromkeys(names, now), floor)
    with connection.transaction():
        connection.execute(
            "insert into tidemark.synapse_streams (stream, server, database, history, place, start, floor)"
            " values (%s, %s, %s, %s, %s, %s, %s)",
            [name, seen.name, seen.database, seen.database, seen.place, timeline.start, floor],
        )
        for writer in names:
            _add(connection, made, writer, floor)
        _leave(connection, name, [made.teller(writer).join(floor, unseen=True) for writer in names])
    return made


def introduce(connection: Connection, known: ToldWriters, writer: str, at: int) -> ToldWriters:
    """The writer joins there, or where it retired. What it has below, and nobody waited for, is owed."""
    now, ended = _now(connection), known.retired.get(writer, known.floor)
    row = connection.execute(
        "select epoch from tidemark.synapse_writers where (stream, writer) = (%s, %s)", [known.name, writer]
    ).fetchone()
    joined, epoch = max(at, ended), max(now, row[0] + 1 if row else 0)
    more = replace(
        known,
        told={**known.told, writer: joined},
        epochs={**known.epochs, writer: epoch},
        retired={name: id for name, id in known.retired.items() if name != writer},
        owed={**known.owed, writer: ended},
    )
    with connection.transaction():
        _add(connection, more, writer, joined)
        unseen = joined > ended and not known.stream.keeps
        _leave(connection, known.name, [more.teller(writer).join(joined, unseen=unseen)])
    return more


def pay(connection: Connection, known: ToldWriters, writer: str, late: Sequence[StreamFact]) -> ToldWriters:
    """What was owed of the writer is told: it is late."""
    teller = known.teller(writer)
    facts = (teller.advance(ProvenAdvance(writer, fact.id - 1, fact.id, [fact])) for fact in late)
    with connection.transaction():
        connection.execute(
            "update tidemark.synapse_writers set owed = null where (stream, writer) = (%s, %s)", [known.name, writer]
        )
        _leave(connection, known.name, chain.from_iterable(facts))
    return replace(known, owed={name: low for name, low in known.owed.items() if name != writer})


def tell(connection: Connection, known: ToldWriters, advances: Sequence[ProvenAdvance], place: str) -> ToldWriters:
    """Write down what is to be sent. Raises `OthersFirst` where another one has moved the stream meanwhile."""
    told, epochs = dict(known.told), dict(known.epochs)
    with connection.transaction():
        connection.execute("update tidemark.synapse_streams set place = %s where stream = %s", [place, known.name])
        for each in advances:
            teller = known.teller(each.writer)
            values: list[Record] = [*teller.advance(each)]
            if each.unseen:
                epochs[each.writer] = teller.epoch + 1
                values.append(replace(teller, epoch=teller.epoch + 1).join(each.id, unseen=True))
            moved = connection.execute(
                "update tidemark.synapse_writers set told = %s, epoch = %s"
                " where (stream, writer, told, epoch) = (%s, %s, %s, %s)",
                [each.id, epochs[each.writer], known.name, each.writer, each.prev, teller.epoch],
            )
            if moved.rowcount != 1:
                raise OthersFirst(f"telling stream {known.name}", "", "another bridge has told it meanwhile")
            _leave(connection, known.name, values)
            told[each.writer] = each.id
    return replace(known, told=told, epochs=epochs)


def retire(connection: Connection, known: ToldWriters, writer: str) -> ToldWriters:
    """Everything of the writer is told, and nothing follows."""
    at = known.told[writer]
    with connection.transaction():
        connection.execute(
            "update tidemark.synapse_writers set state = 'retired' where (stream, writer) = (%s, %s)",
            [known.name, writer],
        )
        _leave(connection, known.name, [known.teller(writer).retire(at)])
    told, epochs = ({each: it[each] for each in it if each != writer} for it in (known.told, known.epochs))
    return replace(known, told=told, epochs=epochs, retired={**known.retired, writer: at})


def _add(connection: Connection, known: ToldWriters, writer: str, at: int) -> None:
    connection.execute(
        """
        insert into tidemark.synapse_writers (stream, writer, epoch, told, owed) values (%s, %s, %s, %s, %s)
        on conflict (stream, writer)
        do update set epoch = excluded.epoch, told = excluded.told, owed = excluded.owed, state = 'active'
        """,
        [known.name, writer, known.epochs[writer], at, known.owed.get(writer)],
    )


def _leave(connection: Connection, stream: str, values: Iterable[Record]) -> None:
    connection.execute(
        """
        insert into tidemark.synapse_outbox (stream, value)
        select %s, value from unnest(%s::bytea[]) with ordinality as given (value, place) order by place
        """,
        [stream, [records.encode(value) for value in values]],
    )


def _now(connection: Connection) -> int:
    """The clock of the database in ms, behind which epochs begin: so they rise over a restore too."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])
