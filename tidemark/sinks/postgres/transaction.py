"""The one transaction per batch (docs/design.md 5): token, positions, history, gaps, audit, states, offsets, batch id.

Set-based: each statement takes whole columns, whatever the number of streams, and all of them travel in two round
trips. The order of locks is that of the functions in `apply`. Rejected records stay listed here, by where they stand in
Kafka and why, until they are known to be in the dead letters (docs/design.md, rule 5).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import psycopg
from psycopg import Cursor
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from tidemark.common.errors import ChainBroken, LeaseLost
from tidemark.common.postgres_session import Connection, first_line
from tidemark.sinks.port import Batch, Committed
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.deferred import add_recalls
from tidemark.sinks.postgres.history import place
from tidemark.sinks.postgres.lease import session_name
from tidemark.streaming.core.effects import WriterAdvance
from tidemark.streaming.values.limits import Rejected

_Row = tuple[str, str, int, int | None, bool, int, int, int, int, int, int, int, int, int, int]


def write_positions(connection: Connection, batch: Batch) -> Cursor[TupleRow] | None:
    """Move the writers' positions and append their advances to the history, in one statement: both look at where the
    writers stand here. Returns, for `settled` and `standing`, those that stand elsewhere than the batch says.

    An advance does not begin where its writer stands if that one had left the state and joined again: what it settles
    now, it had settled in part before, and its advance is cut to the rest, so that the history stays chained (rule 3).
    """
    days = {datetime.fromtimestamp(shard.now / 1000, UTC).date() for shard in batch.effects}
    for day in days:
        connection.execute("select tidemark.make_history_day(%s)", (day,))
    changed = execute(
        connection,
        """
        with new as materialized (
            select b.*, n.number, p.position as stands, coalesce(p.advanced, 0) as before,
                greatest(abs(p.position) - abs(b.prev), 0) as known -- 0 for an unknown writer
            from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::boolean[], %s::bigint[], %s::bigint[],
                    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
                    %s::bigint[])
                as b (stream, writer, now_epoch, position, retired, now, epoch, prev, id, facts, empty, unseen, skipped,
                    linear, place)
            left join tidemark.writer_numbers n using (stream, writer)
            left join tidemark.stream_positions p using (stream, writer)
        ), cut as materialized (
            select stream, writer, epoch, case when known > 0 then stands else prev end as prev, id, facts,
                empty - least(empty, known - least(unseen, known)) as empty,
                unseen - least(unseen, known) as unseen,
                skipped - least(skipped, known - least(unseen, known) - least(empty, known - least(unseen, known)))
                    as skipped,
                linear, place, number, before, stands, prev as claimed, position
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
        select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, claimed, stands, position
        from cut where (claimed <> id and claimed <> stands) or abs(stands) > abs(position)
        """,
        _rows(batch),
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


def _rows(batch: Batch) -> Iterator[_Row]:
    """Each writer as it stands, and its advance: of one that made none, all is 0, of one that is not told, its position
    is None."""
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
            at = place(now, number)
            yield *row, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, at
            number += 1
        for a in advances.values():
            row_less = stream, a.writer, 0, None, False, now
            at = place(now, number)
            yield *row_less, a.epoch, a.prev, a.id, a.facts, a.empty, a.unseen, a.skipped, linear, at
            number += 1


def forget_retired(connection: Connection, before: datetime) -> None:
    """Forget the retired writers of streams that were last heard of `before`, where the line has passed them. Those of
    other streams are dropped by batches; a stream that nobody writes to has none.
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


def settled(found: Iterable[TupleRow]) -> dict[tuple[str, str], WriterAdvance | None]:
    settled: dict[tuple[str, str], WriterAdvance | None] = {}
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, claimed, stands, _ in found:
        if claimed in (id_, stands):
            continue
        if abs(stands) < abs(claimed):
            raise ChainBroken(f"{writer} of stream {stream} at {claimed}", f"{writer} at {stands}")
        cut = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, 0)
        settled[stream, writer] = cut if abs(id_) > abs(prev) else None
    return settled


def standing(found: Iterable[TupleRow]) -> dict[tuple[str, str], int]:
    return {
        (stream, writer): stands
        for stream, writer, *_, stands, position in found
        if position is not None and abs(stands) > abs(position)
    }


_decoder = msgspec.msgpack.Decoder(list[Rejected])


@dataclass(frozen=True, slots=True)
class UnsentDeadLetters:
    query: str
    batch: int
    rejected: list[Rejected]


def keep_unsent(connection: Connection, batch: Batch) -> None:
    """In the transaction of the batch."""
    if rejected := batch.rejected():
        connection.execute(
            "insert into tidemark.unsent_letters (query, batch, rejected) values (%s, %s, %s)",
            (batch.query, batch.number, msgspec.msgpack.encode(rejected)),
        )


def unsent(connection: Connection) -> list[UnsentDeadLetters]:
    """Oldest batch of each query first."""
    rows = connection.execute("select query, batch, rejected from tidemark.unsent_letters order by query, batch")
    return [UnsentDeadLetters(query, batch, _decoder.decode(data)) for query, batch, data in rows]


def forget_unsent(connection: Connection, query: str, batch: int) -> None:
    """The dead letters of that batch are in Kafka."""
    connection.execute("delete from tidemark.unsent_letters where (query, batch) = (%s, %s)", (query, batch))


NOTIFICATION = 7999  # bytes that one holds at most
BATCHES_KEPT = 1000  # of each query; one of them is looked for where the answer to its commit was lost


def apply(connection: Connection, batch: Batch) -> Committed:
    """Commit `batch`, or find that it was committed before. May be called again after any error but these two.

    Raises `LeaseLost` when another query has taken over, and `ChainBroken` when the batch before it is not the last
    that was applied, or an advance does not join what is stored; nothing is written then.
    """
    with connection.pipeline(), connection.transaction():
        if _applied_before(connection, batch):
            return Committed(repeated=True)
        _write_streams(connection, batch)
        positions = write_positions(connection, batch)
        _write_line_moves(connection, batch)
        _write_gaps(connection, batch)
        late = _write_late(connection, batch)
        _write_forced(connection, batch)
        _count_rejected(connection, batch)
        keep_unsent(connection, batch)
        _write_recalls(connection, batch)
        _write_progress(connection, batch)
        found = positions.fetchall() if positions else []
        return Committed(settled=settled(found), positions=standing(found), late=_numbers(late))


def refusal(connection: Connection, batch: Batch) -> str | None:
    """What Postgres says against the content of `batch`; None if it takes it. Nothing is kept of it in any case."""
    try:
        with connection.transaction(force_rollback=True):
            apply(connection, batch)
            connection.execute("set constraints all immediate")
    except psycopg.Error as error:
        if is_about_content(error):
            return first_line(error)
        raise
    return None


# SQLSTATE classes: wrong cardinality, data, constraints (also those of a trigger), check options, limits of a value.
_CONTENT = ("21", "22", "23", "44", "54", "P0")


def is_about_content(error: psycopg.Error) -> bool:
    """Whether the server, or its client, refused what was to be written, and would refuse it again."""
    if error.sqlstate is None:  # of what psycopg itself cannot send, such as the character NUL in a text
        return isinstance(error, psycopg.DataError)
    return error.sqlstate[:2] in _CONTENT


def _applied_before(connection: Connection, batch: Batch) -> bool:
    """Check the token and the batch before it.

    Holds the lease's row until the commit: nobody takes over in the middle of a batch.
    """
    # KEY SHARE lets a renewal pass, and makes a takeover (which changes the key) wait.
    lease = connection.execute("select token from tidemark.query_lease for key share")
    known = connection.execute(
        "select 1 from tidemark.applied_batches where query = %s and batch >= %s limit 1", (batch.query, batch.number)
    )
    newest_batch = connection.execute("select query, batch from tidemark.applied_batches order by number desc limit 1")
    # If we hang from here on, the server ends the transaction, or our successor does, who finds it by this name. What
    # is published next must be durable (rule 4), also where the server is told to be quick.
    connection.execute(
        "select set_config('application_name', %s, true),"
        " set_config('idle_in_transaction_session_timeout', '10s', true),"
        " set_config('synchronous_commit', case current_setting('synchronous_commit')"
        " when 'remote_apply' then 'remote_apply' else 'on' end, true)",
        (session_name(batch.token),),
    )
    row = lease.fetchone()
    newest = row[0] if row else 0
    if newest != batch.token:
        raise LeaseLost(batch.token, newest)
    if known.fetchone() is not None:
        return True
    last = newest_batch.fetchone()
    if batch.after is not ... and batch.after != last:
        raise ChainBroken(*("no batch" if it is None else f"batch {it[0]}/{it[1]}" for it in (batch.after, last)))
    return False


def _write_streams(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.streams as old (stream, linear, head, direction, shard, state, retired, updated_at)
        select stream, linear, allocated, direction, shard, state, retired, to_timestamp(now / 1000.0)
        from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::smallint[], %s::int[], %s::bytea[], %s::bytea[],
                %s::bigint[])
            as new (stream, linear, allocated, direction, shard, state, retired, now)
        on conflict (stream) do update set
            linear = case when abs(excluded.linear) > abs(old.linear) then excluded.linear else old.linear end,
            head = case when abs(excluded.head) > abs(old.head) then excluded.head else old.head end,
            direction = excluded.direction, shard = excluded.shard, state = excluded.state,
            retired = coalesce(excluded.retired, old.retired), updated_at = excluded.updated_at
        """,
        (
            (s.stream, s.linear, s.allocated, s.direction, shard.shard, s.state, s.retired, shard.now)
            for shard, s in batch.streams()
        ),
    )
    execute(
        connection,
        "select pg_notify('tidemark_positions', streams) from unnest(%s::text[]) as changed (streams)",
        ((told,) for told in _told(s.stream for _, s in batch.streams())),
    )


def _told(names: Iterable[str]) -> Iterator[str]:
    """With spaces between, as many together as a notification holds: each takes Postgres a lock's time, and a place in
    a queue that blocks all who notify once it is full."""
    together: list[str] = []
    size = 0
    for name in names:
        size += len(name.encode()) + 1
        if size > NOTIFICATION:
            yield " ".join(together)
            together, size = [], len(name.encode()) + 1
        together.append(name)
    if together:
        yield " ".join(together)


def _write_line_moves(connection: Connection, batch: Batch) -> None:
    """Of lines that went on while no writer of their stream did: no advance tells that."""
    execute(
        connection,
        """
        insert into tidemark.line_moves (stream, prev, linear, retired, epochs, time, batch)
        select stream, prev, linear, string_to_array(retired, ' '), string_to_array(epochs, ' ')::bigint[],
            to_timestamp(now / 1000.0), batch
        from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[], %s::text[], %s::bigint[])
            as new (stream, prev, linear, retired, epochs, now),
            (values (%s::bigint)) as b (batch)
        """,
        (
            (
                s.stream,
                s.linear_prev,
                s.linear,
                " ".join(it.writer for it in s.writers if it.retired),  # a name has no space in it
                " ".join(str(it.epoch) for it in s.writers if it.retired),
                shard.now,
            )
            for shard, s in batch.streams()
            if s.linear != s.linear_prev and not s.advances
        ),
        batch.number,
    )


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


def _count_rejected(connection: Connection, batch: Batch) -> None:
    execute(
        connection,
        """
        insert into tidemark.dead_letters as old (reason, records, newest_at)
        select reason, sum(records), to_timestamp(max(now) / 1000.0)
        from unnest(%s::text[], %s::bigint[], %s::bigint[]) as new (reason, records, now)
        group by reason order by reason
        on conflict (reason) do update set records = old.records + excluded.records,
            newest_at = greatest(old.newest_at, excluded.newest_at)
        """,
        ((rejected.reason, rejected.records, shard.now) for shard in batch.effects for rejected in shard.rejected),
    )


def _write_recalls(connection: Connection, batch: Batch) -> None:
    add_recalls(connection, ((s.stream, recall) for _, s in batch.streams() for recall in s.recalls))


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


def _numbers(late: Cursor[TupleRow] | None) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for stream, number in late or ():
        numbers.setdefault(stream, []).append(number)
    return numbers
