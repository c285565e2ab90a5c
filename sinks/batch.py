"""The one transaction per batch (DESIGN 5): token, positions, history, gaps, audit, states, offsets, batch id.

Set-based: each statement takes whole columns, whatever the number of streams, and all of them travel in two round
trips. Nothing is read in order to be compared here: the statements compare, so that no write can move a position
backwards (rule 2). The order of locks is that of the functions in `apply`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from psycopg import Cursor
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from sinks.columns import execute
from sinks.database import Connection
from sinks.lease import session_name
from streaming.effects import Advance, ShardEffects, StreamEffects
from streaming.errors import ChainBroken, LeaseLost

BATCHES_KEPT = 1000  # of each query: enough to recognise any batch that Spark may replay


@dataclass(frozen=True, slots=True)
class Batch:
    """What batch `number` of `query` (Spark's id of it, which lives in the checkpoint) did, under the lease `token`."""

    query: str
    number: int
    token: int
    effects: Sequence[ShardEffects]

    def streams(self) -> Iterator[tuple[ShardEffects, StreamEffects]]:
        return ((shard, stream) for shard in self.effects for stream in shard.streams)

    def offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> partition -> the next offset to read."""
        offsets: dict[str, dict[int, int]] = {}
        for shard in self.effects:
            for seen in shard.progress:
                topic = offsets.setdefault(seen.topic, {})
                topic[seen.partition] = max(seen.offset, topic.get(seen.partition, 0))
        return offsets


@dataclass(frozen=True, slots=True)
class Applied:
    """What the transaction made of a batch.

    `repeated`: it was applied before, and nothing was written now. `settled` and `positions` (by stream and writer)
    hold only what came out otherwise than the batch says, because a writer that had left the state was known here:
    its advance cut to what was open (None: nothing was), and the position that stands. `late` has the numbers that
    the late completions of a stream were given, in the batch's order.
    """

    repeated: bool = False
    settled: dict[tuple[str, str], Advance | None] = field(default_factory=dict)
    positions: dict[tuple[str, str], int] = field(default_factory=dict)
    late: dict[str, list[int]] = field(default_factory=dict)


def apply(connection: Connection, batch: Batch) -> Applied:
    """Commit `batch`, or find that it was committed before. May be called again after any error but these two.

    Raises `LeaseLost` when another query has taken over, and `ChainBroken` when the batch does not join what is
    stored; nothing is written then.
    """
    with connection.pipeline(), connection.transaction():
        if _applied_before(connection, batch):
            return Applied(repeated=True)
        _write_streams(connection, batch)
        advances = _write_advances(connection, batch)
        writers = _write_writers(connection, batch)
        _write_gaps(connection, batch)
        late = _write_late(connection, batch)
        _write_forced(connection, batch)
        _write_progress(connection, batch)
        return Applied(settled=_settled(advances), positions=_standing(writers), late=_numbers(late))


def _applied_before(connection: Connection, batch: Batch) -> bool:
    """Check the token and hold the lease's row until the commit: nobody takes over in the middle of a batch."""
    # KEY SHARE lets a renewal pass, and makes a takeover (which changes the key) wait.
    lease = connection.execute("select token from tidemark.query_lease for key share")
    known = connection.execute(
        "select 1 from tidemark.applied_batches where query = %s and batch >= %s limit 1", (batch.query, batch.number)
    )
    # If we hang from here on, the server ends the transaction, or our successor does, who finds it by this name.
    connection.execute(
        "select set_config('application_name', %s, true),"
        " set_config('idle_in_transaction_session_timeout', '10s', true)",
        (session_name(batch.token),),
    )
    row = lease.fetchone()
    newest = row[0] if row else 0
    if newest != batch.token:
        raise LeaseLost(batch.token, newest)
    return known.fetchone() is not None


def _write_streams(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.streams as old (stream, linear, direction, shard, state, updated_at)
        select stream, linear, direction, shard, state, to_timestamp(now / 1000.0)
        from unnest(%s::text[], %s::bigint[], %s::smallint[], %s::int[], %s::bytea[], %s::bigint[])
            as new (stream, linear, direction, shard, state, now)
        on conflict (stream) do update set
            linear = case when abs(excluded.linear) > abs(old.linear) then excluded.linear else old.linear end,
            direction = excluded.direction, shard = excluded.shard, state = excluded.state,
            updated_at = excluded.updated_at
        """,
        ((s.stream, s.linear, s.direction, shard.shard, s.state, shard.now) for shard, s in batch.streams()),
    )
    execute(
        connection,
        "select pg_notify('tidemark_positions', stream) from unnest(%s::text[]) as changed (stream)",
        ((s.stream,) for _, s in batch.streams()),
    )


def _write_advances(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    """Append to the history; returns the advances that do not begin where the writer stands here.

    That is so for a writer that had left the state and joined again: what it settles now, it had settled in part
    before, and its advance is cut to the rest, so that the history stays chained (rule 3).
    """
    days = {datetime.fromtimestamp(shard.now / 1000, UTC).date() for shard in batch.effects}
    for day in days:
        connection.execute("select tidemark.make_history_day(%s)", (day,))
    return execute(
        connection,
        """
        with new as materialized (
            select b.*, p.position, greatest(abs(p.position) - abs(b.prev), 0) as known -- 0 for an unknown writer
            from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
                    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
                as b (stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, now)
            left join tidemark.stream_positions p using (stream, writer)
        ), cut as materialized (
            select stream, writer, epoch, case when known > 0 then position else prev end as prev, id, facts,
                empty - least(empty, known - least(unseen, known)) as empty,
                unseen - least(unseen, known) as unseen,
                skipped - least(skipped, known - least(unseen + empty, known)) as skipped,
                linear, now, position, prev as claimed
            from new
        ), written as (
            insert into tidemark.position_advances
                (stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time)
            select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, %s,
                to_timestamp(now / 1000.0)
            from cut where abs(id) > abs(prev)
        )
        select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, position, claimed
        from cut where position <> claimed
        """,
        (
            (s.stream, a.writer, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, s.linear, shard.now)
            for shard, s in batch.streams()
            for a in s.advances
        ),
        batch.number,
    )


def _write_writers(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    """Move the writers' positions; returns those that stand beyond what the batch says."""
    changed = execute(
        connection,
        """
        with new as materialized (
            select * from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::boolean[], %s::bigint[])
                as b (stream, writer, epoch, position, retired, now)
        ), written as (
            insert into tidemark.stream_positions as old (stream, writer, epoch, position, retired, updated_at)
            select stream, writer, epoch, position, retired, to_timestamp(now / 1000.0) from new
            on conflict (stream, writer) do update set
                position = case when abs(excluded.position) > abs(old.position)
                    then excluded.position else old.position end,
                epoch = greatest(excluded.epoch, old.epoch), retired = excluded.retired, forgotten = false,
                updated_at = excluded.updated_at
            where abs(excluded.position) > abs(old.position)
                or (excluded.epoch >= old.epoch
                    and (excluded.epoch, excluded.retired, false) <> (old.epoch, old.retired, old.forgotten))
            returning stream, writer, position
        )
        select stream, writer, w.position from written w join new using (stream, writer)
        where w.position <> new.position
        """,
        (
            (s.stream, w.writer, w.epoch, w.position, w.retired, shard.now)
            for shard, s in batch.streams()
            for w in s.writers
        ),
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


def _write_gaps(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        update tidemark.stream_gaps g set closed_at = to_timestamp(now / 1000.0), closed_by = how
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[]) as c (stream, writer, top, how, now)
        where (g.stream, g.writer, g.top) = (c.stream, c.writer, c.top) and g.closed_at is null
        """,
        ((s.stream, c.writer, c.top, c.how, shard.now) for shard, s in batch.streams() for c in s.closed),
    )
    execute(
        connection,
        """
        insert into tidemark.stream_gaps as old (stream, writer, epoch, low, top, opened_at)
        select stream, writer, epoch, low, top, to_timestamp(since / 1000.0)
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
            as new (stream, writer, epoch, low, top, since)
        on conflict (stream, writer, top) where closed_at is null
            do update set low = excluded.low, epoch = excluded.epoch where abs(excluded.low) > abs(old.low)
        """,
        ((s.stream, g.writer, g.epoch, g.low, g.top, g.since) for _, s in batch.streams() for g in s.gaps),
    )


def _write_late(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    return execute(
        connection,
        """
        insert into tidemark.late_completions (stream, writer, epoch, prev, id, facts, why, time, batch)
        select stream, writer, epoch, prev, id, facts, why, to_timestamp(now / 1000.0), batch
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[],
                %s::bigint[])
            with ordinality as new (stream, writer, epoch, prev, id, facts, why, now, place),
            (values (%s::bigint)) as b (batch)
        order by place
        returning stream, number
        """,
        (
            (s.stream, late.writer, late.epoch, late.prev, late.id, late.facts, late.why, shard.now)
            for shard, s in batch.streams()
            for late in s.late
        ),
        batch.number,
    )


def _write_forced(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.skips (stream, writer, epoch, kind, prev, id, by, why, time, batch)
        select stream, writer, epoch, kind, prev, id, by, why, to_timestamp(now / 1000.0), batch
        from unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::bigint[], %s::text[],
                %s::text[], %s::bigint[])
            as new (stream, writer, epoch, kind, prev, id, by, why, now),
            (values (%s::bigint)) as b (batch)
        """,
        (
            (s.stream, f.writer, f.epoch, f.kind, f.prev, f.id, f.by, f.why, shard.now)
            for shard, s in batch.streams()
            for f in s.forced
        ),
        batch.number,
    )


def _write_progress(connection: Connection, batch: Batch) -> None:
    offsets = batch.offsets()
    execute(
        connection,
        """
        insert into tidemark.kafka_offsets as old (topic, partition, next)
        select * from unnest(%s::text[], %s::int[], %s::bigint[])
        on conflict (topic, partition) do update set next = excluded.next where excluded.next > old.next
        """,
        ((topic, partition, offset) for topic, seen in offsets.items() for partition, offset in seen.items()),
    )
    connection.execute(
        "insert into tidemark.applied_batches (query, batch, offsets) values (%s, %s, %s)",
        (batch.query, batch.number, Jsonb(offsets)),
    )
    connection.execute(
        "delete from tidemark.applied_batches where query = %s and batch <= %s",
        (batch.query, batch.number - BATCHES_KEPT),
    )


def _settled(advances: Cursor[TupleRow] | None) -> dict[tuple[str, str], Advance | None]:
    settled: dict[tuple[str, str], Advance | None] = {}
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, position, claimed in advances or ():
        if abs(position) < abs(claimed):
            raise ChainBroken(stream, writer, position, claimed)
        cut = Advance(writer, epoch, prev, id_, facts, empty, unseen, skipped, 0)
        settled[stream, writer] = cut if abs(id_) > abs(prev) else None
    return settled


def _standing(writers: Cursor[TupleRow] | None) -> dict[tuple[str, str], int]:
    return {(stream, writer): position for stream, writer, position in writers or ()}


def _numbers(late: Cursor[TupleRow] | None) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for stream, number in late or ():
        numbers.setdefault(stream, []).append(number)
    return numbers
