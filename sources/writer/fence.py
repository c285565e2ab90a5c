"""Taking over from earlier epochs (docs/design.md 4): at each start of a writer, and by an operator for a dead one.

The exclusive lock proves that every transaction of the old epoch has ended and that no other can begin; what is left
of them is in the outbox and is announced before the JOIN. So whatever is open below it is provably without a fact.
Every step may be repeated: whoever takes over next, after a crash in the middle, raises the epoch again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from secrets import token_hex

import psycopg

from tidemark.sources.producer import RecordProducer
from tidemark.sources.writer import history, sequences
from tidemark.sources.writer.records import OutboxFact, RecordBuilder
from tidemark.streaming.direction import Direction
from tidemark.streaming.errors import UnknownWriter, WriterFenced
from tidemark.streaming.postgres_session import Connection, PostgresSession
from tidemark.streaming.records import Timeline

PATIENCE = "1s"
"""How long one attempt at the lock stands in its queue, before those who hold it are named."""
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Holder:
    """A transaction of the old epoch that is still open. `pid` is None for one that was prepared (two-phase commit)."""

    pid: int | None
    since: datetime | None
    application: str
    state: str
    query: str

    def __str__(self) -> str:
        if self.pid is None:
            return "a prepared transaction (see pg_prepared_xacts)"
        since = "" if self.since is None else f" since {self.since:%Y-%m-%d %H:%M:%S%z}"
        return f"pid {self.pid}{since}, {self.state}, application {self.application or '-'}: {self.query}"


Streams = Mapping[str, tuple[int, Direction]]
"""OID of the sequence and direction, by stream."""


@dataclass(frozen=True, slots=True)
class FencePlan:
    """What a fence would do: `leftovers` are rows of the outbox, `allocated` the IDs of the JOINs, by stream."""

    epoch: int
    holders: list[Holder]
    leftovers: dict[str, int]
    allocated: dict[str, int]


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """A new epoch, which has not joined yet; `timelines` is what its JOINs say, by stream.

    `database` is the history in which it began, None where this user may not read that.
    """

    epoch: int
    database: str | None
    timelines: dict[str, Timeline]


@dataclass(frozen=True, slots=True)
class Joined:
    """`starts`: the ID of each stream's JOIN, a magnitude. `leftovers`: facts that were announced first. `server`: when
    the server began on which the history was looked at.
    """

    starts: dict[str, int]
    leftovers: dict[str, int]
    server: datetime


def plan(session: PostgresSession, instance: str) -> FencePlan:
    """The plan; changes nothing. Raises `UnknownWriter`."""
    with session.use() as connection:
        row = connection.execute("select epoch from tidemark.writers where instance = %s", [instance]).fetchone()
        if row is None:
            raise UnknownWriter(instance, known(connection))
        streams = registered(connection, instance)
        leftovers = connection.execute(
            "select stream, count(*) from tidemark.outbox where instance = %s group by stream order by stream",
            [instance],
        ).fetchall()
        allocated = sequences.allocated(connection, streams)
        return FencePlan(
            row[0],
            holders(connection, instance),
            dict(leftovers),
            {stream: streams[stream][1].signed(last) for stream, last in allocated.items()},
        )


def known(connection: Connection) -> list[str]:
    return [name for (name,) in connection.execute("select instance from tidemark.writers order by 1").fetchall()]


def registered(connection: Connection, instance: str) -> dict[str, tuple[int, Direction]]:
    """The streams that the instance wrote when it started last."""
    rows = connection.execute(
        "select stream, sequence, direction from tidemark.writer_streams where instance = %s and not retired"
        " order by stream",
        [instance],
    ).fetchall()
    return {stream: (oid, Direction(direction)) for stream, oid, direction in rows}


def holders(connection: Connection, instance: str) -> list[Holder]:
    """The holders of the writer's lock, oldest first."""
    rows = connection.execute(
        """
        select l.pid, a.xact_start, coalesce(a.application_name, ''), coalesce(a.state, ''), left(a.query, 200)
        from pg_locks l left join pg_stat_activity a on a.pid = l.pid
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
            and l.database = (select oid from pg_database where datname = current_database())
            and (l.classid::bigint << 32 | l.objid::bigint) = tidemark.writer_lock(%s)
            and l.pid is distinct from pg_backend_pid()
        order by a.xact_start nulls first
        """,
        [instance],
    ).fetchall()
    return [
        Holder(pid, since, application, state, " ".join((query or "").split()))
        for pid, since, application, state, query in rows
    ]


def raise_epoch(
    session: PostgresSession,
    instance: str,
    streams: Streams,
    now: float,
    stuck: Callable[[Connection, list[Holder]], None],
    last: int | None = None,
) -> NewEpoch:
    """End every transaction of the old epoch by waiting for it, and begin a new one, with these streams.

    The epoch is at least the milliseconds of `now` (s), so that it rises also over a restore of the database. `stuck`
    is called about once a second with the holders that are waited for, and may end them. Who only joins anew names
    the `last` epoch that it began: `WriterFenced` where another process began one since.
    """
    while True:
        with session.use() as connection:
            try:
                with connection.transaction():
                    connection.execute(f"set local lock_timeout = '{PATIENCE}'".encode())
                    connection.execute("select pg_advisory_xact_lock(tidemark.writer_lock(%s))", [instance])
                    if last is not None:
                        _require_no_successor(connection, instance, last)
                    return _raise(connection, instance, streams, int(now * 1000))
            except psycopg.errors.LockNotAvailable:
                stuck(connection, holders(connection, instance))


def _require_no_successor(connection: Connection, instance: str, last: int) -> None:
    row = connection.execute("select epoch from tidemark.writers where instance = %s", [instance]).fetchone()
    if row is not None and row[0] > last:
        raise WriterFenced(instance, last)


def _raise(connection: Connection, instance: str, streams: Streams, at_least: int) -> NewEpoch:
    row = connection.execute(
        """
        insert into tidemark.writers as old (instance, epoch, history_epoch, server, history)
        select %s, given.epoch, given.epoch, pg_postmaster_start_time(), tidemark.history()
        from greatest(%s, 1) as given (epoch)
        on conflict (instance) do update set started_at = now(), epoch = greatest(old.epoch + 1, excluded.epoch),
            history_epoch = greatest(old.epoch + 1, excluded.epoch),
            server = excluded.server, history = excluded.history
        returning epoch, history
        """,
        [instance, at_least],
    ).fetchone()
    assert row is not None
    epoch, database = row
    timelines = {}
    for stream, (oid, towards) in streams.items():
        # A start that broke off before it knew that its JOIN was there is begun again with its token.
        tokens = connection.execute(
            """
            insert into tidemark.writer_streams as old (instance, stream, sequence, direction, starting)
            values (%s, %s, %s, %s, %s)
            on conflict (instance, stream) do update set sequence = excluded.sequence, direction = excluded.direction,
                starting = coalesce(old.starting, excluded.starting), retired = false
            returning starting, start
            """,
            [instance, stream, oid, towards.value, token_hex(8)],
        ).fetchone()
        assert tokens is not None
        timelines[stream] = Timeline(database, *tokens)
    return NewEpoch(epoch, database, timelines)


def settle(
    session: PostgresSession,
    producer: RecordProducer,
    instance: str,
    begun: NewEpoch,
    streams: Streams,
    patience: float,
) -> Joined:
    """Announce what earlier epochs left, then join. `patience` is for Kafka, for each step (s).

    Raises `Unavailable` where Kafka or Postgres does not answer, `WriterFenced` and `HistoryChanged`: the whole
    take-over is to be done again.
    """
    leftovers = _send_leftovers(session, producer, instance, begun.epoch, patience)
    with session.use() as connection, connection.transaction():
        hold(connection, instance)
        allocated = sequences.allocated(connection, streams)
        server = history.require(connection, instance, begun.epoch)
        # What was given out so far must be so for good before it is announced: a crash may take back the numbers of
        # transactions that have not committed, and this commit makes them durable.
        make_durable(connection)
    for stream, last in allocated.items():
        builder = RecordBuilder(instance, begun.epoch, stream, streams[stream][1])
        producer.send(stream, builder.join(last, begun.timelines[stream]))
    producer.deliver(patience)
    with session.use() as connection:
        connection.cursor().executemany(
            "update tidemark.writer_streams set start = starting, starting = null"
            " where (instance, stream, starting) = (%s, %s, %s)",
            [(instance, stream, timeline.start) for stream, timeline in begun.timelines.items()],
        )
    return Joined(allocated, leftovers, server)


def retire(
    producer: RecordProducer, instance: str, epoch: int, streams: Streams, ids: Mapping[str, int], patience: float
) -> None:
    """Announce that nothing follows the ID of each stream; raises `Unavailable`."""
    for stream, id in ids.items():
        producer.send(stream, RecordBuilder(instance, epoch, stream, streams[stream][1]).retire(id))
    producer.deliver(patience)


def hold(connection: Connection, instance: str) -> None:
    """Make the transaction one of the writer's: a takeover waits for its end, and names it where that does not come."""
    connection.execute("select pg_advisory_xact_lock_shared(tidemark.writer_lock(%s))", [instance])


def make_durable(connection: Connection) -> None:
    """With its transaction's commit, all that the server has done so far survives a crash: it writes to the log.

    Sequences need it: `nextval` is durable only once its or a later transaction is, and what a crash takes back is
    given out again, perhaps to another writer, after it was announced to be empty.
    """
    # Behind a pooler what was set for the session may be that of another.
    connection.execute(
        "select pg_logical_emit_message(true, 'tidemark.writer', ''), set_config('synchronous_commit', 'on', true)"
    )


def _send_leftovers(
    session: PostgresSession, producer: RecordProducer, instance: str, epoch: int, patience: float
) -> dict[str, int]:
    sent: dict[str, int] = {}
    while rows := _next_leftovers(session, instance, epoch):
        for (old, stream, id), of in groupby(rows, key=itemgetter(0, 1, 2)):
            builder = RecordBuilder(instance, old, stream, Direction.of(id))
            for record in builder.leftover(OutboxFact(abs(id), tuple(body for *_, body in of))):
                producer.send(stream, record)
            sent[stream] = sent.get(stream, 0) + 1
        producer.deliver(patience)
        with session.use() as connection:
            # Gone before the JOIN, so that none of it can be sent again behind it. Nothing can be added to what was
            # read: all these epochs are over.
            connection.execute(
                "delete from tidemark.outbox where instance = %s and (epoch, stream, id) <= (%s, %s, %s)",
                [instance, *rows[-1][:3]],
            )
    return sent


def _next_leftovers(session: PostgresSession, instance: str, epoch: int) -> Sequence[tuple[int, str, int, int, str]]:
    with session.use() as connection:
        return connection.execute(
            f"""
            select epoch, stream, id, ordinal, body from (
                select epoch, stream, id, ordinal, body::text from tidemark.outbox
                where instance = %s and epoch < %s
                order by epoch, stream, id fetch first {_ROWS_AT_ONCE} rows with ties
            ) as oldest order by epoch, stream, id, ordinal
            """.encode(),
            [instance, epoch],
        ).fetchall()
