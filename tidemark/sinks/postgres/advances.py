"""The part of a batch's transaction that moves positions and writes their history.

Positions are compared where they are written (rule 2), and each advance is joined to the one before it (rule 3).
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from psycopg import Cursor
from psycopg.rows import TupleRow

from tidemark.common.errors import ChainBroken
from tidemark.common.postgres_session import Connection
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.history import place
from tidemark.streaming.core.effects import WriterAdvance

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
