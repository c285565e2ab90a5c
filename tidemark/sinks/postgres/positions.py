"""The tables `stream_positions` (the position of each writer), `writer_numbers` and `requeues`.

`write_positions` moves the positions of a batch, and appends its advances to the history, in one statement.

A row of `requeues` has the Kafka offsets of deferred records that must be produced again. The batch that decides on a
requeue writes the row. The row is deleted when all its records have been produced. If some of the records cannot be
produced, the row stays, for operators, until its writer starts a later epoch or retires.
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
_ROW_PLACES_PER_BATCH = 4096  # further rows of a batch share the row places, and IDs distinguish these rows

NEWEST_ADVANCES: LiteralString = """(
    select stream, writer, n.number, p.advanced
    from tidemark.writer_numbers n join tidemark.stream_positions p using (stream, writer)
)"""
"""The number of each writer, and the row place of its newest advance, where its chain in `packed_advances` starts."""

_Row = tuple[str, str, int, int | None, bool, int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class WriterPosition:
    """A row of `stream_positions`.

    `forgotten`: whether the writer retired long ago, and was removed from the state and from Redis.
    """

    stream: str
    writer: str
    epoch: int
    position: int
    retired: bool
    forgotten: bool


@dataclass(frozen=True, slots=True)
class EarlierWriter:
    """A writer as it was at an earlier time.

    Attributes:
        epoch: the epoch of the next advance after this time; the current epoch if there is none.
        position: the position at this time.
        next_advance: the time of the writer's next advance; None if the position has not moved since.
        is_first: whether the next advance is the first advance of the writer.
    """

    writer: str
    epoch: int
    position: int
    next_advance: datetime | None
    is_first: bool


def row_place_of(now: int, number: int) -> int:
    """The row place of an advance: a number by which its row in `packed_advances` is found.

    Row places ascend with time.

    Args:
        now: the time of the batch, milliseconds since 1970.
        number: the index of the advance in its batch.
    """
    return now * _ROW_PLACES_PER_BATCH + number // ADVANCES_PER_ROW % _ROW_PLACES_PER_BATCH


def write_positions(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    """Move the positions of the batch's writers, and append their advances to the history.

    Also creates the partition of the history for the day of the batch, and marks dropped writers as forgotten. Call
    this in the transaction of the batch. One statement writes positions and advances, because both depend on the
    stored positions.

    A writer that was dropped from the state may have joined again. If part of its advance is already in the history,
    only the rest of the advance is written, so that the history stays chained (rule 3).

    Returns:
        A cursor with the rows of the writers whose stored position differs from the batch, for `corrected_advances` and
        `higher_positions`. None if the batch has no writers.
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
        ((s.stream, writer) for _, s in batch.streams() for writer in s.dropped_writers),
    )
    return changed


def _writer_rows(batch: Batch) -> Iterator[_Row]:
    """Yield one row for each writer, with its advance.

    If a writer has no advance, the columns of the advance are 0. If the batch has only the advance of a writer, the
    position is None.
    """
    number = 0
    for shard, s in batch.streams():
        stream, linear, now = s.stream, s.linear, shard.now
        advances = {advance.writer: advance for advance in s.advances}
        for w in s.writers:
            row = stream, w.writer, w.epoch, w.position, w.is_retired, now
            a = advances.pop(w.writer, None)
            if a is None:
                yield *row, 0, 0, 0, 0, 0, 0, 0, 0, 0
                continue
            row_place = row_place_of(now, number)
            yield *row, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, row_place
            number += 1
        for a in advances.values():
            advance_only = stream, a.writer, 0, None, False, now
            row_place = row_place_of(now, number)
            yield *advance_only, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, row_place
            number += 1


def corrected_advances(changed_rows: Iterable[TupleRow]) -> dict[tuple[str, str], WriterAdvance | None]:
    """Find the advances of which only a part, or nothing, was written.

    Args:
        changed_rows: the rows that `write_positions` returned.

    Returns:
        (stream, writer) -> the written part; None if the whole advance was already stored.

    Raises:
        ChainBroken: an advance begins beyond the stored position.
    """
    corrected: dict[tuple[str, str], WriterAdvance | None] = {}
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, claimed, stored, _ in changed_rows:
        if claimed in (id_, stored):
            continue
        if abs(stored) < abs(claimed):
            raise ChainBroken(f"{writer} of stream {stream} at {claimed}", f"{writer} at {stored}")
        cut = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, 0)
        corrected[stream, writer] = cut if abs(id_) > abs(prev) else None
    return corrected


def higher_positions(changed_rows: Iterable[TupleRow]) -> dict[tuple[str, str], int]:
    """(stream, writer) -> the stored position, if this position is beyond the position of the batch.

    `changed_rows`: the rows that `write_positions` returned.
    """
    return {
        (stream, writer): stored
        for stream, writer, *_, stored, position in changed_rows
        if position is not None and abs(stored) > abs(position)
    }


def forget_retired(connection: Connection, no_batch_since: datetime) -> None:
    """Mark retired writers up to the linear position as forgotten, in streams without a batch since `no_batch_since`.

    In other streams, the batches drop such writers.
    """
    connection.execute(
        """
        update tidemark.stream_positions p set forgotten = true
        from tidemark.streams s
        where s.stream = p.stream and s.updated_at < %s and p.retired and not p.forgotten
            and abs(p.position) <= abs(s.linear)
        """,
        (no_batch_since,),
    )


def forget_writer_numbers(connection: Connection, no_advance_since: datetime) -> None:
    """Delete the numbers of forgotten writers whose newest advance is before `no_advance_since`. Call this in a
    transaction.

    Locks the row of the lease until the end of the transaction, so that no batch runs meanwhile: a forgotten writer may
    join again, and its batch would use the number.
    """
    connection.execute("select 1 from tidemark.query_lease for update")
    connection.execute(
        "delete from tidemark.writer_numbers n using tidemark.stream_positions p"
        " where (p.stream, p.writer) = (n.stream, n.writer) and p.forgotten and p.advanced < %s",
        (row_place_of(int(no_advance_since.timestamp() * 1000), 0),),
    )


def delete_obsolete_requeues(connection: Connection) -> None:
    """Delete requeues of writers that have retired or have a later epoch: the records would be rejected as zombies."""
    connection.execute(
        "delete from tidemark.requeues r using tidemark.stream_positions p"
        " where (p.stream, p.writer) = (r.stream, r.writer) and (p.epoch > r.epoch or p.retired)"
    )


def stored_positions(connection: Connection, streams: Collection[str]) -> list[TupleRow]:
    """(stream, writer, position, forgotten) for each writer of `streams`. Tuples, because there may be millions."""
    return connection.execute(
        "select stream, writer, position, forgotten from tidemark.stream_positions"
        " where stream = any(string_to_array(%s, ' '))",  # no name has a space
        (" ".join(streams),),
    ).fetchall()


def positions_since(connection: Connection, streams: Collection[str], begin_ms: int) -> list[TupleRow]:
    """(stream, writer, position) for the writers of `streams` that a batch changed at or after `begin_ms` (ms since
    1970).

    Forgotten writers are left out.
    """
    return connection.execute(
        "select stream, writer, position from tidemark.stream_positions"
        " where stream = any(%s) and updated_at >= to_timestamp(%s / 1000.0) and not forgotten",
        (list(streams), begin_ms),
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

    Includes writers that had already retired at this time. Leaves out writers that are forgotten now.
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
    """Records of a writer in one epoch that must be produced again.

    Attributes:
        partition: the partition of the facts topic.
        next: the offset of the first record that still has to be produced.
        last: the offset of the last record.
        gone: the number of offsets before `next` whose record was not produced, because Kafka no longer had the offset
            or the record was too large.
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
    """A requeue with records that still have to be produced, or that cannot be produced.

    Attributes:
        partition: the partition of the facts topic.
        gone: the number of offsets whose record cannot be produced: see `PendingRequeue`.
        problem: why the requeue does not continue; None if there is no problem.
        since: the time at which the requeue was stored.
    """

    stream: str
    writer: str
    partition: int
    gone: int
    problem: str | None
    since: datetime


def add_requeues(connection: Connection, requeues: Iterable[tuple[str, RequeuedRange]]) -> None:
    """Store requeues: (stream, range of offsets)."""
    execute(
        connection,
        "insert into tidemark.requeues (stream, writer, epoch, partition, next, last)"
        " select * from unnest(%s::text[], %s::text[], %s::bigint[], %s::int[], %s::bigint[], %s::bigint[])",
        ((stream, r.writer, r.epoch, r.partition, r.first_offset, r.last_offset) for stream, r in requeues),
    )


def pending_requeues(connection: Connection) -> list[PendingRequeue]:
    """Delete obsolete requeues, and return the requeues with records that still have to be produced.

    Oldest first, but requeues with a problem last.
    """
    delete_obsolete_requeues(connection)
    return fetch_all(
        connection,
        PendingRequeue,
        "select number, stream, writer, epoch, partition, next, last, gone from tidemark.requeues"
        " where next <= last order by problem is not null, number",
    )


def note_requeue(connection: Connection, requeue: PendingRequeue, problem: str | None) -> None:
    """Store the progress and the problem of a requeue. Delete the requeue if all its records have been produced."""
    if requeue.next > requeue.last and not requeue.gone:
        connection.execute("delete from tidemark.requeues where number = %s", (requeue.number,))
        return
    connection.execute(
        "update tidemark.requeues set next = %s, gone = %s, problem = %s where number = %s",
        (requeue.next, requeue.gone, problem, requeue.number),
    )


def give_up_requeues(connection: Connection, why: str) -> None:
    """Mark the remaining offsets of all requeues as gone, with `why` as the problem."""
    connection.execute(
        "update tidemark.requeues set gone = gone + last - next + 1, next = last + 1, problem = %s where next <= last",
        (why,),
    )


def stored_requeues(session: PostgresSession) -> list[RequeueStatus]:
    """All stored requeues, oldest first: see `RequeueStatus`."""
    return session.fetch_all(
        RequeueStatus,
        "select stream, writer, partition, gone, problem, since from tidemark.requeues order by number",
    )
