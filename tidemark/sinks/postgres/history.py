"""Reads the history of advances and of late completions, for the sinks and the sidecar.

Up to 200 advances of a batch share one row of `packed_advances`, with an array per column. An array is null if its
values are all 0, or if the other arrays determine them. A writer is stored as a number; `prev` and the linear position
as distances from the ID. One advance costs about 20 bytes instead of 270. An index by writer would cost more than the
rows. Instead, `stream_positions.advanced` has the place of a writer's newest advance, and each advance has the place of
the writer's advance before, so one chain is read alone. `positions.write_positions` writes the rows.

Followers read the *changes* of all streams since a mark, and must deliver everything that was published since. A
`DurableMark` is the time of the newest batch and the lease under which it was written. Batches of one lease have the
time of one clock. The clock of a later lease may be behind, so if the lease has changed, reading begins one minute
before the mark. Some changes are then returned twice, but none is missed. The same holds after a restore, because
repeated batches have a later time.

`LagHistory` reads the history of lag and of gaps, for readers and for the live page. It needs the role tidemark_reader.
An ID becomes known when an advance or a gap first names it. The lag of a stream at a time is the time since the oldest
known ID beyond its linear position became known.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal, LiteralString

from tidemark.common.postgres_session import Connection, PostgresSession, fetch_one, fetch_value
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.positions import NEWEST_ADVANCES, positions_since, stored_positions
from tidemark.streaming.core.effects import LateCompletion, WriterAdvance
from tidemark.streaming.values.direction import beyond


@dataclass(frozen=True, slots=True)
class StoredAdvance:
    """An advance of the history, the linear position after its batch, and the time of the batch (ms since 1970)."""

    advance: WriterAdvance
    linear: int
    batch: int
    time: int


@dataclass(frozen=True, slots=True)
class StoredLate:
    """A late completion of the history. `time` is the time of its batch, in milliseconds since 1970."""

    number: int
    late: LateCompletion
    batch: int
    time: int


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Bounds of one page of a stream's history.

    Attributes:
        per_writer: the largest number of advances of each writer.
        most: the largest number of advances, and of late completions.
        timeout: statement time-out, in seconds.
    """

    per_writer: int
    most: int
    timeout: float


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page of a stream's history.

    Attributes:
        chains: writer -> its position after the page, and its advances that are still stored.
        late: the late completions.
        has_more: whether advances or late completions were left out.
    """

    chains: dict[str, tuple[int, list[StoredAdvance]]]
    late: list[StoredLate]
    has_more: bool


# Each chain is read from its newest advance back, one chain after the other, so that a limit ends the reading. Streams
# share rows but not retention, so a row may contain advances that the policy of their stream no longer shows.
_CHAINS: LiteralString = f"""
select known.stream, known.writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch,
    (extract(epoch from time) * 1000)::bigint
from unnest(%s::text[], %s::text[], %s::bigint[]) as known (stream, writer, position)
cross join lateral (select * from (
    with recursive chain as (
        select n.number, n.advanced as before, 9223372036854775807 as prev, 0::bigint as epoch,
            0::bigint as id, 0::bigint as facts, 0::bigint as empty, 0::bigint as unseen, 0::bigint as skipped,
            0::bigint as linear, 0::bigint as batch, null::timestamptz as time, 0 as length
        from {NEWEST_ADVANCES} n where (stream, writer) = (known.stream, known.writer)
        union all
        select number, a.*, length + 1
        from chain cross join lateral (
            select p.before[i], p.ids[i] - p.spans[i], p.epochs[i], p.ids[i], coalesce(p.facts[i], abs(p.spans[i])),
                coalesce(p.empty[i], 0), coalesce(p.unseen[i], 0), coalesce(p.skipped[i], 0),
                p.ids[i] - coalesce(p.ahead[i], 0), p.batch, p.time
            from tidemark.packed_advances p cross join lateral array_position(p.writers, chain.number) as i
            where p.time = to_timestamp((chain.before / 4096) / 1000.0) and p.part = mod(chain.before, 4096)
                and i is not null and abs(p.ids[i]) <= abs(chain.prev)
                and (p.time >= (select coalesce(max(since), '-infinity') from tidemark.history_since)
                    or tidemark.is_shown(known.stream, p.time))
            order by abs(p.ids[i]) desc limit 1
        ) a (before, prev, epoch, id, facts, empty, unseen, skipped, linear, batch, time)
        where abs(a.id) > abs(known.position) and length < %s
    )
    select epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time from chain where length > 0
) parts order by abs(id) limit %s) a
limit %s
"""


def advances_since(
    connection: Connection, known: Iterable[tuple[str, str, int]], per_writer: int, most: int | None = None
) -> dict[tuple[str, str], list[StoredAdvance]]:
    """The advances of writers beyond given positions, oldest first.

    Args:
        known: stream, writer and position of each writer.
        per_writer: the largest number of advances of each writer; the oldest ones are left out.
        most: the largest number of all advances. If the result has that number, the last chain may be incomplete, and
            other chains may be missing.
    """
    chains: dict[tuple[str, str], list[StoredAdvance]] = {}
    rows = execute(connection, _CHAINS, known, per_writer, most, most)
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, linear, batch, time in rows or ():
        advance = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, time)
        chains.setdefault((stream, writer), []).append(StoredAdvance(advance, linear, batch, time))
    return chains


def page_after(
    connection: Connection, stream: str, position_of: Callable[[str], int], late: int, bounds: PageBounds
) -> StoredPage:
    """The history of `stream` beyond a reader's positions.

    Args:
        position_of: writer -> the reader's position.
        late: number of the newest late completion that the reader knows.
    """
    with connection.transaction():
        connection.execute("select set_config('statement_timeout', %s, true)", (f"{bounds.timeout * 1000:.0f}",))
        # Positions before advances: no position may be beyond the end of the advances that are read.
        moved = {
            writer: position
            for _, writer, position, _ in stored_positions(connection, [stream])
            if abs(position) > abs(position_of(writer))
        }
        known = [(stream, writer, position_of(writer)) for writer in moved]
        stored = advances_since(connection, known, bounds.per_writer, bounds.most)
        lates = late_since(connection, [(stream, late)], bounds.most, "oldest").get(stream, [])
    is_cut = sum(map(len, stored.values())) == bounds.most
    chains = {writer: (moved[writer], advances) for (_, writer), advances in stored.items()}
    if is_cut:
        writer, (_, advances) = chains.popitem()
        chains[writer] = (advances[-1].advance.id, advances)
    else:
        chains |= {writer: (position, []) for writer, position in moved.items() if writer not in chains}
    return StoredPage(chains, lates, is_cut or len(lates) == bounds.most)


def late_since(
    connection: Connection, known: Iterable[tuple[str, int]], most: int, keep: Literal["newest", "oldest"] = "newest"
) -> dict[str, list[StoredLate]]:
    """The late completions of streams after given numbers, oldest first.

    Args:
        known: stream, and the number of the newest late completion that the reader knows.
        most: the largest number for each stream.
        keep: `newest` or `oldest`: the ones to return if a stream has more than `most`.
    """
    lates: dict[str, list[StoredLate]] = {}
    order: LiteralString = "desc" if keep == "newest" else "asc"
    rows = execute(
        connection,
        f"""
        select stream, late.number, writer, epoch, prev, id, facts, why, batch,
            (extract(epoch from time) * 1000)::bigint
        from unnest(%s::text[], %s::bigint[]) as known (stream, number)
        cross join lateral (
            select l.number, writer, epoch, prev, id, facts, why, batch, time from tidemark.late_completions l
            where l.stream = known.stream and l.number > known.number order by l.number {order} limit %s
        ) late
        order by stream, late.number
        """,
        known,
        most,
    )
    for stream, number, writer, epoch, prev, id_, facts, why, batch, time in rows or ():
        late = LateCompletion(writer, epoch, prev, id_, facts, why)
        lates.setdefault(stream, []).append(StoredLate(number, late, batch, time))
    return lates


CLOCK_TOLERANCE = 60_000  # ms by which the clock of another pipeline may lag


@dataclass(frozen=True, slots=True)
class DurableMark:
    """A point in the changes of all streams: token of the lease, and time of the newest batch (ms since 1970)."""

    lease: int
    time: int


@dataclass(frozen=True, slots=True)
class StreamChange:
    """The current positions of a stream that changed, and of its writers that moved.

    `late`: the number of the newest late completion. `allocated`: the highest ID that any record has named.
    """

    linear: int
    allocated: int
    late: int
    positions: Mapping[str, int]

    def is_reached_by(self, linear: int, positions: Mapping[str, int], late: int) -> bool:
        """Whether a reader with these positions has the whole change."""
        return (
            not beyond(self.linear, linear)
            and late >= self.late
            and not any(beyond(id, positions.get(writer, linear)) for writer, id in self.positions.items())
        )


@dataclass(frozen=True, slots=True)
class ChangesSince:
    """`streams` has all changes that were published up to `mark`, and possibly later changes."""

    mark: DurableMark
    streams: dict[str, StreamChange]


@dataclass(frozen=True, slots=True)
class FullChanges:
    """Advances and late completions by stream, unordered, and the positions of every stream that changed."""

    advances: dict[str, list[StoredAdvance]]
    late: dict[str, list[StoredLate]]
    streams: dict[str, StreamChange]


def current_mark(connection: Connection) -> DurableMark:
    """The lease token and the time of the newest batch; the time is 0 before the first batch."""
    mark = fetch_one(
        connection,
        DurableMark,
        "select (select token from tidemark.query_lease) as lease,"
        " coalesce((extract(epoch from max(updated_at)) * 1000)::bigint, 0) as time from tidemark.streams",
    )
    return mark or DurableMark(0, 0)


def changes_since(connection: Connection, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
    """The changes since a mark, read in one transaction.

    Args:
        since: None for all changes.
        streams: None for all streams.
    """
    with connection.transaction():
        mark = current_mark(connection)
        return ChangesSince(
            mark, _changed_streams(connection, 0 if since is None else _begin_time(since, mark), streams)
        )


def full_changes_since(connection: Connection, since: DurableMark, most: int, timeout: float) -> FullChanges | None:
    """Everything that was published since a mark.

    Args:
        most: the largest number of advances.
        timeout: statement time-out, in seconds.

    Returns:
        None if there are more than `most` advances, or if the history does not reach back to the mark. None also if the
        mark is later than the newest batch: the mark is of another database, or the database was restored.
    """
    with connection.transaction():
        connection.execute("select set_config('statement_timeout', %s, true)", (f"{timeout * 1000:.0f}",))
        # Streams before advances: no position may be beyond the end of the advances that are read.
        newest = current_mark(connection)
        begin = _begin_time(since, newest)
        if begin > newest.time:  # the mark belongs to another database, or to a time after the restored backup
            return None
        streams = _changed_streams(connection, begin, None)
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


def _begin_time(since: DurableMark, now: DurableMark) -> int:
    """The time (ms since 1970) from which to read all changes since a mark."""
    return since.time if since.lease == now.lease else since.time - CLOCK_TOLERANCE


def _changed_streams(connection: Connection, begin: int, streams: Collection[str] | None) -> dict[str, StreamChange]:
    """The streams with a batch at or after the time `begin` (ms)."""
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


STEP = timedelta(seconds=5)  # resolution of the lag
MAX_GAPS = 500  # gaps of one stream in one answer; longer gaps first
_WINDOWS = (timedelta(minutes=10), timedelta(hours=1), timedelta(days=1))  # searched first; then the whole history

_LINEAR: LiteralString = """(
    select time, linear from tidemark.advances_of(%(stream)s, %(since)s, 'infinity')
    union all select time, linear from tidemark.linear_moves where stream = %(stream)s and time >= %(since)s
) positions"""

_MOVES: LiteralString = """
select extract(epoch from date_bin(%(step)s, time, %(since)s) - %(since)s)::bigint as step,
    writer, max(abs(id)) as known, max(abs(linear)) as linear, sum(abs(id) - abs(prev))::bigint as moved
from (
    select time, writer, prev, id, linear from tidemark.advances_of(%(stream)s, %(since)s, %(until)s)
    union all select time, '', 0, 0, linear from tidemark.linear_moves
    where stream = %(stream)s and time between %(since)s and %(until)s
) moves group by 1, 2 order by 1
"""

_GAPS: LiteralString = """
select writer, low, top, opened_at, closed_at, closed_by from tidemark.stream_gaps
where stream = %(stream)s and opened_at <= %(until)s and (closed_at is null or closed_at >= %(since)s)
order by coalesce(closed_at, %(until)s) - opened_at desc limit %(most)s
"""


@dataclass(frozen=True, slots=True)
class GapSpan:
    """The IDs in `(low, top]` of `writer` were open from `opened` to `closed`; None: they are open now."""

    writer: str
    low: int
    top: int
    opened: datetime
    closed: datetime | None
    closed_by: str | None


@dataclass(frozen=True, slots=True)
class StreamHistoryChart:
    """The history of a stream in steps of equal length, oldest first.

    Attributes:
        lag: the largest lag in each step, in seconds.
        moved: writer -> the number of IDs that its position passed in each step.
        gaps: gaps that were open at some time of the window, oldest first.
    """

    since: datetime
    step: timedelta
    lag: list[float]
    moved: dict[str, list[int]]
    gaps: list[GapSpan]


@dataclass(slots=True)
class _Steps:
    """The highest known ID and the linear position at the end of each step, both as magnitudes."""

    known: dict[int, int] = field(default_factory=dict)
    linear: dict[int, int] = field(default_factory=dict)

    def add_known(self, step: int, id: int) -> None:
        self.known[step] = max(self.known.get(step, 0), id)

    def lag(self, count: int) -> Iterator[int]:
        """The lag, in steps, at the end of each of `count` steps. `linear` must have step 0."""
        waiting: list[tuple[int, int]] = []  # (step, ID) of the IDs that were the highest when they became known
        highest = position = 0
        for step in range(count):
            if (id := self.known.get(step, 0)) > highest:
                highest = id
                waiting.append((step, id))
            position = self.linear.get(step, position)
            while waiting and waiting[0][1] <= position:
                waiting.pop(0)
            yield step - waiting[0][0] if waiting else 0


class LagHistory:
    """Queries of positions, late completions, lag and gaps. Raises `Unavailable` and `Refused`."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def linear_positions(self, streams: Collection[str] | None = None) -> dict[str, int]:
        """The linear positions of `streams`, or of all streams if None. Unknown streams are left out."""
        rows = self._session.fetch_tuples(
            "select stream, linear from tidemark.streams"
            " where %(streams)s::text[] is null or stream = any(%(streams)s)",
            {"streams": None if streams is None else [*streams]},
        )
        return dict(rows)

    def count_late_after(self, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """For each (stream, number), count the late completions of the stream with a higher number."""
        rows = self._session.fetch_tuples(
            "select known.stream, known.number, (select count(*) from tidemark.late_completions l"
            "   where l.stream = known.stream and l.number > known.number)"
            " from unnest(%s::text[], %s::bigint[]) as known (stream, number)",
            ([stream for stream, _ in pairs], [number for _, number in pairs]),
        )
        return {(stream, number): count for stream, number, count in rows}

    def passed_at(self, stream: str, id: int, since: datetime | None = None) -> datetime | None:
        """The time at which the linear position first was beyond `id`.

        Args:
            since: a time at which the position was not beyond `id` yet. It makes the search faster.

        Returns:
            None if the stored history has no position beyond `id`. If its first position is already beyond `id`, the
            time of that position.
        """
        now = datetime.now(UTC)
        starts: Sequence[datetime | str] = (
            [*(now - window for window in _WINDOWS), "-infinity"] if since is None else [since]
        )
        first: datetime | None = None
        for start in starts:
            ((first, is_exact),) = self._session.fetch_tuples(
                "select min(time) filter (where abs(linear) > abs(%(id)s)),"
                f" coalesce(bool_or(abs(linear) <= abs(%(id)s)), false) from {_LINEAR}",
                {"stream": stream, "since": start, "id": id},
            )
            if first is not None and is_exact:
                break
        return first

    def chart(self, stream: str, until: datetime, seconds: float, steps: int) -> StreamHistoryChart:
        """The history of the last `seconds` before `until`, in `steps` steps."""
        window = timedelta(seconds=seconds)
        since, step = until - window, window / steps
        values = {"stream": stream, "since": since, "until": until, "step": STEP, "most": MAX_GAPS}
        moves = self._session.fetch_tuples(_MOVES, values)
        gaps = [GapSpan(*row) for row in self._session.fetch_tuples(_GAPS, values)]
        fine = _Steps()
        moved: dict[str, list[int]] = {}
        for second, writer, known, linear, width in moves:
            number = int(second / STEP.total_seconds())
            fine.add_known(number, known)
            fine.linear[number] = max(fine.linear.get(number, 0), linear)
            if writer:
                moved.setdefault(writer, [0] * steps)[min(steps - 1, int(second / step.total_seconds()))] += width
        for gap in gaps:
            fine.add_known(max(0, int((gap.opened - since) / STEP)), abs(gap.top))
        # Reading the position before the first move in the window is too expensive. That position was at or below the
        # lower end of each gap that was open then.
        first = fine.linear[min(fine.linear)] if fine.linear else abs(self.linear_positions([stream]).get(stream, 0))
        fine.linear.setdefault(0, min([first, *(abs(gap.low) for gap in gaps if gap.opened < since)]))
        lags = [*fine.lag(int(window / STEP))]
        size = len(lags) / steps
        bounds = [(int(number * size), int((number + 1) * size)) for number in range(steps)]
        worst = [max(lags[low : max(high, low + 1)]) * STEP.total_seconds() for low, high in bounds]
        in_order = sorted(gaps, key=lambda gap: (gap.opened, abs(gap.low)))
        return StreamHistoryChart(since, step, worst, dict(sorted(moved.items())), in_order)
