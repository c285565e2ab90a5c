"""The table `stream_positions`: the position of each writer of a stream, and the numbers of writers.

A batch moves positions and appends their advances to the history in one statement (`write_positions`).

The table of requeues has the Kafka offsets of deferred records that must be produced again. The batch that decides on a
requeue writes its row. The row is deleted when all its records are produced. If Kafka no longer has some of the
records, the row stays for operators until a later epoch or the retirement of its writer.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import LiteralString

from psycopg import Cursor
from psycopg.rows import TupleRow

from tidemark.common.errors import ChainBroken
from tidemark.common.postgres_session import Connection, PostgresSession, fetch_all
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.database import execute
from tidemark.streaming.core.effects import RequeuedRange, WriterAdvance

ADVANCES_PER_ROW = 200  # longer rows take no less space per advance, and cost more to read
_PARTS = 4096  # rows of one batch with distinct places; later rows share places, and IDs distinguish them

NEWEST_ADVANCES: LiteralString = """(
    select stream, writer, n.number, p.advanced
    from tidemark.writer_numbers n join tidemark.stream_positions p using (stream, writer)
)"""
"""The number of each writer, and the place of its newest advance, where its chain in `packed_advances` starts."""

_Row = tuple[str, str, int, int | None, bool, int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class WriterPosition:
    """A row of `stream_positions`. `forgotten`: retired long ago and removed from the state and from Redis."""

    stream: str
    writer: str
    epoch: int
    position: int
    retired: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class EarlierWriter:
    """A writer and its `position` at an earlier time.

    `next_advance`: the time of its next advance, or None. `is_first`: whether that advance was the writer's first one.
    """

    writer: str
    epoch: int
    position: int
    next_advance: datetime | None
    is_first: bool


def place_of(now: int, number: int) -> int:
    """The place of a row of `packed_advances`.

    Args:
        now: time of the batch, milliseconds since 1970.
        number: index of the advance in its batch.
    """
    return now * _PARTS + number // ADVANCES_PER_ROW % _PARTS


def write_positions(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    """Move the positions of writers and append their advances to the history.

    Both happen in one statement, because both depend on the stored positions. A writer that was dropped from the state
    may have joined again. If part of its advance is already in the history, the advance is cut to the rest, so that the
    history stays chained (rule 3).

    Returns:
        The writers whose stored position differs from the batch, for `corrected_advances` and `higher_positions`. None
        if the batch has no writers.
    """
    days = {datetime.fromtimestamp(shard.now / 1000, UTC).date() for shard in batch.effects}
    for day in days:
        connection.execute("select tidemark.make_history_day(%s)", (day,))
    changed = execute(
        connection,
        """
        with new as materialized (
            select b.*, n.number, p.position as stored, coalesce(p.advanced, 0) as before,
                greatest(abs(p.position) - abs(b.prev), 0) as known -- 0 for an unknown writer
            from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::boolean[], %s::bigint[], %s::bigint[],
                    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
                    %s::bigint[])
                as b (stream, writer, now_epoch, position, retired, now, epoch, prev, id, facts, empty, unseen, skipped,
                    linear, place)
            left join tidemark.writer_numbers n using (stream, writer)
            left join tidemark.stream_positions p using (stream, writer)
        ), cut as materialized (
            select stream, writer, epoch, case when known > 0 then stored else prev end as prev, id, facts,
                empty - least(empty, known - least(unseen, known)) as empty,
                unseen - least(unseen, known) as unseen,
                skipped - least(skipped, known - least(unseen, known) - least(empty, known - least(unseen, known)))
                    as skipped,
                linear, place, number, before, stored, prev as claimed, position
            from new
        ), named as (
            insert into tidemark.writer_numbers (stream, writer)
            select stream, writer from cut where number is null and abs(id) > abs(prev)
            returning stream, writer, number
        ), written as (
            insert into tidemark.packed_advances
                (time, part, batch, writers, epochs, ids, spans, before, ahead, facts, empty, unseen, skipped)
            select to_timestamp((place / 4096) / 1000.0), mod(place, 4096), %s,
                array_agg(number), array_agg(epoch), array_agg(id), array_agg(id - prev), array_agg(before),
                case when bool_or(linear <> id) then array_agg(id - linear) end,
                case when bool_or(facts <> abs(id - prev)) then array_agg(facts) end,
                case when bool_or(empty <> 0) then array_agg(empty) end,
                case when bool_or(unseen <> 0) then array_agg(unseen) end,
                case when bool_or(skipped <> 0) then array_agg(skipped) end
            from (
                select place, coalesce(cut.number, named.number) as number, epoch, prev, id, facts, empty, unseen,
                    skipped, linear, before
                from cut left join named using (stream, writer)
                where abs(id) > abs(prev) order by 1, 2
            ) moved
            group by place
        ), moved as (
            insert into tidemark.stream_positions as old
                (stream, writer, epoch, position, retired, advanced, updated_at)
            select stream, writer, now_epoch, position, retired, place, to_timestamp(now / 1000.0)
            from new where position is not null
            on conflict (stream, writer) do update set
                position = case when abs(excluded.position) > abs(old.position)
                    then excluded.position else old.position end,
                advanced = case when abs(excluded.position) > abs(old.position) and excluded.advanced <> 0
                    then excluded.advanced else old.advanced end,
                epoch = greatest(excluded.epoch, old.epoch), retired = excluded.retired, forgotten = false,
                updated_at = excluded.updated_at
            where abs(excluded.position) > abs(old.position)
                or (excluded.epoch >= old.epoch
                    and (excluded.epoch, excluded.retired, false) <> (old.epoch, old.retired, old.forgotten))
        )
        select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, claimed, stored, position
        from cut where (claimed <> id and claimed <> stored) or abs(stored) > abs(position)
        """,
        _writer_rows(batch),
        batch.number,
    )
    execute(
        connection,
        """
        update tidemark.stream_positions p set forgotten = true
        from unnest(%s::text[], %s::text[]) as gone (stream, writer)
        where (p.stream, p.writer) = (gone.stream, gone.writer)
        """,
        ((s.stream, writer) for _, s in batch.streams() for writer in s.dropped),
    )
    return changed


def _writer_rows(batch: Batch) -> Iterator[_Row]:
    """One row per writer with its advance; all 0 without an advance. The position is None if only the advance is
    known.
    """
    number = 0
    for shard, s in batch.streams():
        stream, linear, now = s.stream, s.linear, shard.now
        advances = {advance.writer: advance for advance in s.advances}
        for w in s.writers:
            row = stream, w.writer, w.epoch, w.position, w.retired, now
            a = advances.pop(w.writer, None)
            if a is None:
                yield *row, 0, 0, 0, 0, 0, 0, 0, 0, 0
                continue
            row_place = place_of(now, number)
            yield *row, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, row_place
            number += 1
        for a in advances.values():
            advance_only = stream, a.writer, 0, None, False, now
            row_place = place_of(now, number)
            yield *advance_only, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, row_place
            number += 1


def corrected_advances(changed: Iterable[TupleRow]) -> dict[tuple[str, str], WriterAdvance | None]:
    """(stream, writer) -> the rest of an advance that was cut; None if the whole advance was already stored.

    Raises:
        ChainBroken: an advance begins beyond the stored position.
    """
    corrected: dict[tuple[str, str], WriterAdvance | None] = {}
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, claimed, stored, _ in changed:
        if claimed in (id_, stored):
            continue
        if abs(stored) < abs(claimed):
            raise ChainBroken(f"{writer} of stream {stream} at {claimed}", f"{writer} at {stored}")
        cut = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, 0)
        corrected[stream, writer] = cut if abs(id_) > abs(prev) else None
    return corrected


def higher_positions(changed: Iterable[TupleRow]) -> dict[tuple[str, str], int]:
    """(stream, writer) -> the stored position, if it is beyond the position of the batch."""
    return {
        (stream, writer): stored
        for stream, writer, *_, stored, position in changed
        if position is not None and abs(stored) > abs(position)
    }


def forget_retired(connection: Connection, before: datetime) -> None:
    """Forget retired writers that the linear position has passed, in streams without a batch since `before`.

    In other streams the batches drop such writers.
    """
    connection.execute(
        """
        update tidemark.stream_positions p set forgotten = true
        from tidemark.streams s
        where s.stream = p.stream and s.updated_at < %s and p.retired and not p.forgotten
            and abs(p.position) <= abs(s.linear)
        """,
        (before,),
    )


def forget_writer_numbers(connection: Connection, oldest: datetime) -> None:
    """Delete the numbers of forgotten writers whose newest advance is before `oldest`.

    Locks the row of the lease until the end of the transaction, so that no batch runs: a batch may use the number of a
    writer that has returned.
    """
    connection.execute("select 1 from tidemark.query_lease for update")
    connection.execute(
        "delete from tidemark.writer_numbers n using tidemark.stream_positions p"
        " where (p.stream, p.writer) = (n.stream, n.writer) and p.forgotten and p.advanced < %s",
        (place_of(int(oldest.timestamp() * 1000), 0),),
    )


def forget_settled_requeues(connection: Connection) -> None:
    """Delete requeues of epochs that ended with a later epoch or a retirement. Their records would be rejected as
    zombies.
    """
    connection.execute(
        "delete from tidemark.requeues r using tidemark.stream_positions p"
        " where (p.stream, p.writer) = (r.stream, r.writer) and (p.epoch > r.epoch or p.retired)"
    )


def stored_positions(connection: Connection, streams: Collection[str]) -> list[TupleRow]:
    """Stream, writer, position and `forgotten` of each writer of `streams`. Tuples, because there may be millions."""
    return connection.execute(
        "select stream, writer, position, forgotten from tidemark.stream_positions"
        " where stream = any(string_to_array(%s, ' '))",  # no name has a space
        (" ".join(streams),),
    ).fetchall()


def positions_since(connection: Connection, streams: Collection[str], begin: int) -> list[TupleRow]:
    """Stream, writer and position of each writer of `streams` that a batch changed since `begin` (ms)."""
    return connection.execute(
        "select stream, writer, position from tidemark.stream_positions"
        " where stream = any(%s) and updated_at >= to_timestamp(%s / 1000.0) and not forgotten",
        (list(streams), begin),
    ).fetchall()


def stored_writers(connection: Connection, streams: Collection[str]) -> list[WriterPosition]:
    """All writers of `streams`, including forgotten ones."""
    return fetch_all(
        connection,
        WriterPosition,
        "select stream, writer, epoch, position, retired, forgotten from tidemark.stream_positions"
        " where stream = any(%s)",
        (list(streams),),
    )


def writers_not_beyond(session: PostgresSession, stream: str, at: datetime, linear: int) -> list[EarlierWriter]:
    """The writers whose position at the time `at` was not beyond `linear`, lowest position first.

    Includes writers that had retired before.
    """
    return session.fetch_all(
        EarlierWriter,
        """
        select p.writer, coalesce(a.epoch, p.epoch) as epoch, coalesce(a.prev, p.position) as position,
            a.time as next_advance, coalesce(a.prev = 0, false) as is_first
        from tidemark.stream_positions p left join (
            select distinct on (writer) writer, epoch, prev, time
            from tidemark.advances_of(%(stream)s, %(after)s) order by writer, abs(id)
        ) a using (writer)
        where p.stream = %(stream)s and not p.forgotten and abs(coalesce(a.prev, p.position)) <= abs(%(linear)s)
        order by abs(coalesce(a.prev, p.position)), writer
        """,
        {"stream": stream, "after": at + timedelta(microseconds=1), "linear": linear},
    )


@dataclass(frozen=True, slots=True)
class PendingRequeue:
    """Records to produce again: edges of `writer` in `epoch` at the offsets `next` to `last` of a partition of the
    facts topic.

    `gone` is the number of offsets before `next` that Kafka no longer had.
    """

    number: int
    stream: str
    writer: str
    epoch: int
    partition: int
    next: int
    last: int
    gone: int


@dataclass(frozen=True, slots=True)
class RequeueStatus:
    """A requeue that is not complete, or that is complete except for records that Kafka no longer had.

    `gone`: the number of offsets that Kafka no longer had. `problem`: why the requeue does not continue.
    """

    stream: str
    writer: str
    partition: int
    gone: int
    problem: str | None
    since: datetime


def add_requeues(connection: Connection, requeues: Iterable[tuple[str, RequeuedRange]]) -> None:
    """Store requeues, each with its stream."""
    execute(
        connection,
        "insert into tidemark.requeues (stream, writer, epoch, partition, next, last)"
        " select * from unnest(%s::text[], %s::text[], %s::bigint[], %s::int[], %s::bigint[], %s::bigint[])",
        ((stream, r.writer, r.epoch, r.partition, r.first, r.last) for stream, r in requeues),
    )


def pending_requeues(connection: Connection) -> list[PendingRequeue]:
    """Requeues with records still to produce: oldest first, requeues with a problem last."""
    forget_settled_requeues(connection)
    return fetch_all(
        connection,
        PendingRequeue,
        "select number, stream, writer, epoch, partition, next, last, gone from tidemark.requeues"
        " where next <= last order by problem is not null, number",
    )


def note_requeue(connection: Connection, requeue: PendingRequeue, problem: str | None) -> None:
    """Store the progress of a requeue; delete it if it is complete."""
    if requeue.next > requeue.last and not requeue.gone:
        connection.execute("delete from tidemark.requeues where number = %s", (requeue.number,))
        return
    connection.execute(
        "update tidemark.requeues set next = %s, gone = %s, problem = %s where number = %s",
        (requeue.next, requeue.gone, problem, requeue.number),
    )


def give_up_requeues(connection: Connection, why: str) -> None:
    """Mark all remaining offsets as gone."""
    connection.execute(
        "update tidemark.requeues set gone = gone + last - next + 1, next = last + 1, problem = %s where next <= last",
        (why,),
    )


def unfinished_requeues(session: PostgresSession) -> list[RequeueStatus]:
    """All stored requeues, oldest first: see `RequeueStatus`."""
    return session.fetch_all(
        RequeueStatus,
        "select stream, writer, partition, gone, problem, since from tidemark.requeues order by number",
    )
