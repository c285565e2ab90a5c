"""Changes of all streams since a mark, for followers that must deliver everything that was published since.

A `DurableMark` is the time of the newest batch and the lease under which it was written. Batches of one lease have the
time of one clock. The clock of a later lease may be behind; if the lease has changed, reading begins one minute before
the mark. Some changes then come twice, and none is missed. The same holds after a restore: what was done again has a
later time.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import LiteralString

from tidemark.common.postgres_session import Connection, fetch_one, fetch_value
from tidemark.sinks.postgres.history import StoredAdvance, StoredLate
from tidemark.sinks.postgres.positions import positions_since
from tidemark.streaming.core.effects import LateCompletion, WriterAdvance
from tidemark.streaming.values.direction import beyond

OTHER_CLOCK = 60_000  # ms by which the clock of another pipeline may be behind


@dataclass(frozen=True, slots=True)
class DurableMark:
    """`time` in ms since 1970."""

    lease: int
    time: int


@dataclass(frozen=True, slots=True)
class StreamChange:
    """The positions of a stream, and those of its writers that moved.

    `late` is the number of its newest late completion, `allocated` the highest ID that any record has named.
    """

    linear: int
    allocated: int
    late: int
    positions: Mapping[str, int]

    def reached(self, linear: int, positions: Mapping[str, int], late: int) -> bool:
        """Whether a reader with these positions has all of this change."""
        return (
            not beyond(self.linear, linear)
            and late >= self.late
            and not any(beyond(id, positions.get(writer, linear)) for writer, id in self.positions.items())
        )


@dataclass(frozen=True, slots=True)
class ChangesSince:
    """`streams` has all changes that were published up to `mark`, and possibly later ones."""

    mark: DurableMark
    streams: dict[str, StreamChange]


@dataclass(frozen=True, slots=True)
class FullChanges:
    """Advances and late completions by stream, unordered, and the positions of every stream that changed."""

    advances: dict[str, list[StoredAdvance]]
    late: dict[str, list[StoredLate]]
    streams: dict[str, StreamChange]


def now(connection: Connection) -> DurableMark:
    mark = fetch_one(
        connection,
        DurableMark,
        "select (select token from tidemark.query_lease) as lease,"
        " coalesce((extract(epoch from max(updated_at)) * 1000)::bigint, 0) as time from tidemark.streams",
    )
    return mark or DurableMark(0, 0)


def changes(connection: Connection, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
    """The changes since a mark, read in one transaction.

    Args:
        since: None for all changes.
        streams: None for all streams.
    """
    with connection.transaction():
        mark = now(connection)
        return ChangesSince(mark, _changed(connection, 0 if since is None else _begin(since, mark), streams))


def missed(connection: Connection, since: DurableMark, most: int, seconds: float) -> FullChanges | None:
    """Everything that was published since a mark.

    Args:
        most: bound of the number of advances.
        seconds: time that one statement may take.

    Returns:
        None if there are more than `most` advances, or if the history does not reach back to the mark.
    """
    with connection.transaction():
        connection.execute("select set_config('statement_timeout', %s, true)", (f"{seconds * 1000:.0f}",))
        # Streams before advances: no position may be beyond the end of the advances that are read.
        newest = now(connection)
        begin = _begin(since, newest)
        if begin > newest.time:  # the mark is of another database, or of a time that a restore has undone
            return None
        streams = _changed(connection, begin, None)
        stored = "select 1 from tidemark.packed_advances where time <= to_timestamp(%s / 1000.0) limit 1"
        if streams and fetch_value(connection, stored, (begin,)) is None:
            return None
        rows = connection.execute(_ADVANCES, (begin, most + 1)).fetchall()
        with_late = [name for name, change in streams.items() if change.late]
        lates = connection.execute(_LATES, (with_late, begin)).fetchall()
    if len(rows) > most:
        return None
    changes = FullChanges({}, {}, streams)
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, linear, batch, time in rows:
        advance = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, time)
        changes.advances.setdefault(stream, []).append(StoredAdvance(advance, linear, batch, time))
    for stream, number, writer, epoch, prev, id_, facts, why, batch, time in lates:
        late = LateCompletion(writer, epoch, prev, id_, facts, why)
        changes.late.setdefault(stream, []).append(StoredLate(number, late, batch, time))
    return changes


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


def _changed(connection: Connection, begin: int, streams: Collection[str] | None) -> dict[str, StreamChange]:
    """The streams with a batch at or after `begin` (ms); tuples, because there may be a million."""
    names = (None if streams is None else list(streams),)
    positions: dict[str, dict[str, int]] = defaultdict(dict)
    changed = {
        stream: StreamChange(linear, allocated, late, positions[stream])
        for stream, linear, allocated, late in connection.execute(
            "select stream, linear, head,"
            " coalesce((select max(number) from tidemark.late_completions l where l.stream = s.stream), 0)"
            " from tidemark.streams s where updated_at >= to_timestamp(%s / 1000.0)"
            " and (%s::text[] is null or stream = any(%s::text[]))",
            (begin, *names, *names),
        )
    }
    for stream, writer, position in positions_since(connection, changed, begin):
        positions[stream][writer] = position
    return changed
