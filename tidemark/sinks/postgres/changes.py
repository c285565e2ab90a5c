"""What Postgres took in since a moment, over all streams: for who has to tell everything that was published since.

A moment is a `DurableMark`: the time of the newest batch, and the lease under which it was written. Batches of one
lease are of one clock. That of a later lease may be behind, so what is read after a mark of another lease begins
earlier: what was known comes again then, and nothing is passed over. So it is after a database was restored: what was
done again, was done later.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import LiteralString

from tidemark.common.postgres_session import Connection
from tidemark.sinks.postgres.history import PastAdvance, PastLate
from tidemark.streaming.core.effects import LateCompletion, WriterAdvance
from tidemark.streaming.values.direction import beyond

OTHER_CLOCK = 60_000  # ms by which the clock of another pipeline may be behind


@dataclass(frozen=True, slots=True)
class DurableMark:
    """`time` in ms since 1970."""

    lease: int
    time: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Of one stream: where it stands, and those of its writers that moved. `late` is the number of its newest late
    completion, `allocated` the highest ID that any record named."""

    linear: int
    allocated: int
    late: int
    positions: Mapping[str, int]

    def reached(self, linear: int, positions: Mapping[str, int], late: int) -> bool:
        """Whether somebody who stands there stands here, or beyond."""
        return (
            not beyond(self.linear, linear)
            and late >= self.late
            and not any(beyond(id, positions.get(writer, linear)) for writer, id in self.positions.items())
        )


@dataclass(frozen=True, slots=True)
class ChangesSince:
    """All that was published up to `mark` is in `streams`, and perhaps more."""

    mark: DurableMark
    streams: dict[str, Moved]


@dataclass(frozen=True, slots=True)
class PastMoves:
    """By stream, in no order; and where the streams stand to which anything was done."""

    advances: dict[str, list[PastAdvance]]
    late: dict[str, list[PastLate]]
    streams: dict[str, Moved]


def now(connection: Connection) -> DurableMark:
    row = connection.execute(
        "select (select token from tidemark.query_lease),"
        " coalesce((extract(epoch from max(updated_at)) * 1000)::bigint, 0) from tidemark.streams"
    ).fetchone()
    return DurableMark(*row) if row else DurableMark(0, 0)


def changes(connection: Connection, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
    """Since a mark (None: ever), of `streams` (None: of all). In one transaction, the mark first."""
    with connection.transaction():
        mark = now(connection)
        return ChangesSince(mark, _moved(connection, 0 if since is None else _begin(since, mark), streams))


def missed(connection: Connection, since: DurableMark, most: int, seconds: float) -> PastMoves | None:
    """Everything that was published since a mark; None where that is more than `most` advances, or not kept. `seconds`
    is what one statement may take."""
    with connection.transaction():
        connection.execute("select set_config('statement_timeout', %s, true)", (f"{seconds * 1000:.0f}",))
        # Streams before their moves: a writer may not seem to stand where its advances do not lead yet.
        newest = now(connection)
        begin = _begin(since, newest)
        if begin > newest.time:  # of another database, or of what a restore has taken back
            return None
        streams = _moved(connection, begin, None)
        kept = "select 1 from tidemark.packed_advances where time <= to_timestamp(%s / 1000.0) limit 1"
        if streams and not connection.execute(kept, (begin,)).fetchone():
            return None
        rows = connection.execute(_ADVANCES, (begin, most + 1)).fetchall()
        lates = connection.execute(_LATES, ([it for it, moved in streams.items() if moved.late], begin)).fetchall()
    if len(rows) > most:
        return None
    found = PastMoves({}, {}, streams)
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, linear, batch, at in rows:
        advance = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, at)
        found.advances.setdefault(stream, []).append(PastAdvance(advance, linear, batch, at))
    for stream, number, writer, epoch, prev, id_, facts, why, batch, at in lates:
        late = LateCompletion(writer, epoch, prev, id_, facts, why)
        found.late.setdefault(stream, []).append(PastLate(number, late, batch, at))
    return found


_ADVANCES: LiteralString = """
select n.stream, n.writer, a.epoch, a.id - a.span, a.id, coalesce(a.facts, abs(a.span)), coalesce(a.empty, 0),
    coalesce(a.unseen, 0), coalesce(a.skipped, 0), a.id - coalesce(a.ahead, 0), p.batch,
    (extract(epoch from p.time) * 1000)::bigint
from tidemark.packed_advances p
cross join lateral unnest(
    p.writers, p.epochs, p.ids, p.spans, p.ahead, p.facts, p.empty, p.unseen, p.skipped
) as a (number, epoch, id, span, ahead, facts, empty, unseen, skipped)
join tidemark.writer_numbers n using (number)
where p.time >= to_timestamp(%s / 1000.0)
limit %s
"""
_LATES: LiteralString = """
select stream, number, writer, epoch, prev, id, facts, why, batch, (extract(epoch from time) * 1000)::bigint
from tidemark.late_completions where stream = any(%s) and time >= to_timestamp(%s / 1000.0) order by number
"""


def _begin(since: DurableMark, now: DurableMark) -> int:
    return since.time if since.lease == now.lease else since.time - OTHER_CLOCK


def _moved(connection: Connection, begin: int, streams: Collection[str] | None) -> dict[str, Moved]:
    named = (None if streams is None else list(streams),)
    positions: dict[str, dict[str, int]] = defaultdict(dict)
    found = {
        stream: Moved(linear, allocated, late, positions[stream])
        for stream, linear, allocated, late in connection.execute(
            "select stream, linear, head,"
            " coalesce((select max(number) from tidemark.late_completions l where l.stream = s.stream), 0)"
            " from tidemark.streams s where updated_at >= to_timestamp(%s / 1000.0)"
            " and (%s::text[] is null or stream = any(%s::text[]))",
            (begin, *named, *named),
        )
    }
    for stream, writer, position in connection.execute(
        "select stream, writer, position from tidemark.stream_positions"
        " where stream = any(%s) and updated_at >= to_timestamp(%s / 1000.0) and not forgotten",
        (list(found), begin),
    ):
        positions[stream][writer] = position
    return found
