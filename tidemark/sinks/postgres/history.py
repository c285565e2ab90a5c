"""Reads the history of advances and of late completions, for the sinks and the sidecar.

`positions.write_positions` writes the history. Up to 200 advances of a batch share one row of `packed_advances`, which
has an array for each column. An array is null if all its values are 0, or if the other arrays determine its values. A
writer is stored as a number; `prev` and the linear position are stored as distances from the ID. One advance takes
about 20 bytes instead of 270.

There is no index by writer, because such an index would be larger than the rows. Instead, `stream_positions.advanced`
has the row place (`positions.row_place_of`) of a writer's newest advance. Each advance has the row place of its
writer's previous advance. So the chain of one writer is read without the rows of other writers.

Followers read the *changes* of all streams since a mark, and must deliver everything that was published after the mark.
A `DurableMark` is the time of the newest batch, and the token of the lease. All batches of one lease have their time
from one clock. The clock of a later lease may be behind. So if the lease has changed, reading begins one minute before
the mark: some changes are then returned twice, but no change is missed. No change is missed after a restore either,
because repeated batches have a later time.

`LagHistory` reads the history of lag and of gaps, for readers and for the live page. An ID becomes known when an
advance or a gap first names the ID. The lag of a stream at a time is the age of its oldest known ID beyond the linear
position.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, LiteralString

import msgspec

from tidemark.common.postgres_session import Connection, PostgresSession, fetch_one, fetch_value
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.positions import NEWEST_ADVANCES, positions_since, stored_positions
from tidemark.streaming.core.effects import LateCompletion, WriterAdvance
from tidemark.streaming.values.direction import is_beyond


class StoredAdvance(msgspec.Struct, frozen=True):
    """An advance of the history.

    Attributes:
        linear: the linear position of the stream after the batch.
        batch: the number of the batch.
        time: the time of the batch, milliseconds since 1970.
    """

    advance: WriterAdvance
    linear: int
    batch: int
    time: int


class StoredLate(msgspec.Struct, frozen=True):
    """A late completion of the history.

    Attributes:
        number: the number of the late completion; numbers ascend.
        batch: the number of the batch.
        time: the time of the batch, milliseconds since 1970.
    """

    number: int
    late: LateCompletion
    batch: int
    time: int


class PageBounds(msgspec.Struct, frozen=True):
    """Bounds of one page of a stream's history.

    Attributes:
        per_writer: the largest number of advances of each writer; the oldest ones are left out.
        limit: the largest number of advances of all writers, and also the largest number of late completions.
        timeout: the time limit of each statement, in seconds.
    """

    per_writer: int
    limit: int
    timeout: float


class StoredPage(msgspec.Struct, frozen=True):
    """A page of a stream's history: what happened beyond the positions of a reader.

    Attributes:
        chains: writer -> (the writer's position after the page, its stored advances in the page, oldest first). The
            list is empty if the advances are no longer stored.
        late: the late completions, oldest first.
        has_more: whether the page reached `PageBounds.limit`. The next page may then have more advances or late
            completions.
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
    connection: Connection, known_positions: Iterable[tuple[str, str, int]], per_writer: int, limit: int | None = None
) -> dict[tuple[str, str], list[StoredAdvance]]:
    """Read the advances of writers that end beyond given positions.

    Args:
        known_positions: (stream, writer, position) for each writer.
        per_writer: the largest number of advances of each writer; the oldest ones are left out.
        limit: the largest number of all advances; None for no limit. If the result has this number, the last chain may
            be incomplete, and other chains may be missing.

    Returns:
        (stream, writer) -> advances, oldest first. Writers without advances beyond their position are left out.
    """
    chains: dict[tuple[str, str], list[StoredAdvance]] = {}
    rows = execute(connection, _CHAINS, known_positions, per_writer, limit, limit)
    for stream, writer, epoch, prev, id_, facts, empty, unseen, skipped, linear, batch, time in rows or ():
        advance = WriterAdvance(writer, epoch, prev, id_, facts, empty, unseen, skipped, time)
        chains.setdefault((stream, writer), []).append(StoredAdvance(advance, linear, batch, time))
    return chains


def page_after(
    connection: Connection, stream: str, position_of: Callable[[str], int], last_late_number: int, bounds: PageBounds
) -> StoredPage:
    """Read the next page of the history of `stream` for a reader, in one transaction.

    Args:
        position_of: takes the name of a writer, and returns the reader's position for the writer.
        last_late_number: the number of the newest late completion that the reader has; 0 for none.
        bounds: the limits of the page. A statement that takes longer than `bounds.timeout` raises an error of psycopg.
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
        stored = advances_since(connection, known, bounds.per_writer, bounds.limit)
        lates = late_since(connection, [(stream, last_late_number)], bounds.limit, "oldest").get(stream, [])
    is_cut = sum(map(len, stored.values())) == bounds.limit
    chains = {writer: (moved[writer], advances) for (_, writer), advances in stored.items()}
    if is_cut:
        writer, (_, advances) = chains.popitem()
        chains[writer] = (advances[-1].advance.id, advances)
    else:
        chains |= {writer: (position, []) for writer, position in moved.items() if writer not in chains}
    return StoredPage(chains, lates, is_cut or len(lates) == bounds.limit)


def late_since(
    connection: Connection,
    known_numbers: Iterable[tuple[str, int]],
    limit: int,
    keep: Literal["newest", "oldest"] = "newest",
) -> dict[str, list[StoredLate]]:
    """Read the late completions of streams after given numbers.

    Args:
        known_numbers: (stream, number). Late completions with higher numbers are read.
        limit: the largest number of late completions for each stream.
        keep: whether to return the `newest` or the `oldest` ones, if a stream has more than `limit`.

    Returns:
        Stream -> late completions, oldest first. Streams without later late completions are left out.
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
        known_numbers,
        limit,
    )
    for stream, number, writer, epoch, prev, id_, facts, why, batch, time in rows or ():
        late = LateCompletion(writer, epoch, prev, id_, facts, why)
        lates.setdefault(stream, []).append(StoredLate(number, late, batch, time))
    return lates


CLOCK_TOLERANCE_MS = 60_000  # how far the clock of a later pipeline may be behind


class DurableMark(msgspec.Struct, frozen=True):
    """A point from which the changes of all streams can be read later (`changes_since`). Times are comparable only
    within one lease, because each pipeline has its own clock.

    Attributes:
        lease_token: the token of the lease.
        time: the time of the newest batch, milliseconds since 1970; 0 before the first batch.
    """

    lease_token: int
    time: int


class StreamChange(msgspec.Struct, frozen=True):
    """The current positions of a stream that changed.

    Attributes:
        linear: the linear position.
        allocated: the highest ID that any record has named.
        last_late_number: the number of the newest late completion; 0 if there is none.
        positions: writer -> position, for the writers that changed.
    """

    linear: int
    allocated: int
    last_late_number: int
    positions: Mapping[str, int]

    def is_reached_by(self, linear: int, positions: Mapping[str, int], late: int) -> bool:
        """Whether a reader has reached or passed this change.

        Args:
            linear: the reader's linear position.
            positions: writer -> the reader's position. A missing writer is at `linear`.
            late: the number of the newest late completion that the reader has.
        """
        return (
            not is_beyond(self.linear, linear)
            and late >= self.last_late_number
            and not any(is_beyond(id, positions.get(writer, linear)) for writer, id in self.positions.items())
        )


class ChangesSince(msgspec.Struct, frozen=True):
    """The changes that `changes_since` has read.

    Attributes:
        mark: the current mark, from which to read the next changes.
        streams: stream -> its change. Has all changes that were published up to `mark`, and possibly later changes.
    """

    mark: DurableMark
    streams: dict[str, StreamChange]


class FullChanges(msgspec.Struct, frozen=True):
    """The changes that `full_changes_since` has read.

    Attributes:
        advances: stream -> its advances, in no order.
        late: stream -> its late completions, oldest first.
        streams: stream -> its change, for every stream that changed.
    """

    advances: dict[str, list[StoredAdvance]]
    late: dict[str, list[StoredLate]]
    streams: dict[str, StreamChange]


def current_mark(connection: Connection) -> DurableMark:
    """Read the mark of this moment: the token of the lease, and the time of the newest batch."""
    mark = fetch_one(
        connection,
        DurableMark,
        "select (select token from tidemark.query_lease) as lease_token,"
        " coalesce((extract(epoch from max(updated_at)) * 1000)::bigint, 0) as time from tidemark.streams",
    )
    return mark or DurableMark(0, 0)


def changes_since(connection: Connection, since: DurableMark | None, streams: Collection[str] | None) -> ChangesSince:
    """Read the streams that changed since a mark, and the current mark, in one transaction.

    Args:
        since: the mark; None for all changes.
        streams: the streams to read; None for all streams.
    """
    with connection.transaction():
        mark = current_mark(connection)
        return ChangesSince(
            mark, _changed_streams(connection, 0 if since is None else _begin_time(since, mark), streams)
        )


def full_changes_since(connection: Connection, since: DurableMark, limit: int, timeout: float) -> FullChanges | None:
    """Read all advances, late completions and positions that were published since a mark, in one transaction.

    If the lease has changed since the mark, the result may contain some from before the mark.

    Args:
        limit: the largest number of advances.
        timeout: the time limit of each statement, in seconds.

    Returns:
        None in three cases: there are more than `limit` advances; streams changed, and the stored history begins after
        the mark; or the mark is later than the newest batch, because the mark is of another database or the database
        was restored.
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
        rows = connection.execute(_ADVANCES, (begin, limit + 1)).fetchall()
        with_late = [name for name, change in streams.items() if change.last_late_number]
        lates = connection.execute(_LATES, (with_late, begin)).fetchall()
    if len(rows) > limit:
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
    """The time from which to read the changes since the mark `since`, if the current mark is `now`. ms since 1970."""
    return since.time if since.lease_token == now.lease_token else since.time - CLOCK_TOLERANCE_MS


def _changed_streams(connection: Connection, begin_ms: int, streams: Collection[str] | None) -> dict[str, StreamChange]:
    """Stream -> its change, for streams with a batch at or after `begin_ms` (ms since 1970). `streams`: None for
    all."""
    names = (None if streams is None else list(streams),)
    positions: dict[str, dict[str, int]] = defaultdict(dict)
    changed = {
        stream: StreamChange(linear, allocated, late, positions[stream])
        for stream, linear, allocated, late in connection.execute(
            "select stream, linear, head,"
            " coalesce((select max(number) from tidemark.late_completions l where l.stream = s.stream), 0)"
            " from tidemark.streams s where updated_at >= to_timestamp(%s / 1000.0)"
            " and (%s::text[] is null or stream = any(%s::text[]))",
            (begin_ms, *names, *names),
        )
    }
    for stream, writer, position in positions_since(connection, changed, begin_ms):
        positions[stream][writer] = position
    return changed


LAG_STEP = timedelta(seconds=5)  # the resolution of the lag
MAX_CHART_GAPS = 500  # of one stream in one chart: the gaps that were open longest
_SEARCH_WINDOWS = (timedelta(minutes=10), timedelta(hours=1), timedelta(days=1))  # searched before the whole history

_POSITIONS: LiteralString = """(
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
order by coalesce(closed_at, %(until)s) - opened_at desc limit %(limit)s
"""


class GapSpan(msgspec.Struct, frozen=True):
    """A gap: the IDs `(low, top]` of one writer, which were open from `opened` to `closed`.

    `closed` is None if the gap is open now. `closed_by`: as for `inspect.StoredGap`.
    """

    writer: str
    low: int
    top: int
    opened: datetime
    closed: datetime | None
    closed_by: str | None


class StreamHistoryChart(msgspec.Struct, frozen=True):
    """The history of a stream in steps of equal length, oldest first.

    Attributes:
        since: the start of the first step.
        step: the length of a step.
        lag_seconds: the largest lag in each step, in seconds.
        moved_ids_by_writer: writer -> the number of IDs that its position passed in each step.
        gaps: gaps that were open at some time of the chart, oldest first; at most `MAX_CHART_GAPS`.
    """

    since: datetime
    step: timedelta
    lag_seconds: list[float]
    moved_ids_by_writer: dict[str, list[int]]
    gaps: list[GapSpan]


class _LagSteps(msgspec.Struct):
    """Known IDs and linear positions of a chart, by step. Each step has the length `LAG_STEP`. All IDs are magnitudes.

    Attributes:
        known_id_by_step: step -> the highest ID that became known in the step. Steps without a new ID are left out.
        linear_by_step: step -> the linear position at the end of the step. Steps without a move are left out.
    """

    known_id_by_step: dict[int, int] = msgspec.field(default_factory=dict)
    linear_by_step: dict[int, int] = msgspec.field(default_factory=dict)

    def add_known(self, step: int, id: int) -> None:
        self.known_id_by_step[step] = max(self.known_id_by_step.get(step, 0), id)

    def lag(self, count: int) -> Iterator[int]:
        """Yield the lag at the end of each of `count` steps, in steps. `linear_by_step` must have step 0."""
        waiting: list[tuple[int, int]] = []  # (step, ID): each ID was the highest when it became known
        highest = position = 0
        for step in range(count):
            if (id := self.known_id_by_step.get(step, 0)) > highest:
                highest = id
                waiting.append((step, id))
            position = self.linear_by_step.get(step, position)
            while waiting and waiting[0][1] <= position:
                waiting.pop(0)
            yield step - waiting[0][0] if waiting else 0


class LagHistory:
    """Queries of positions, late completions, lag and gaps. Needs the role tidemark_reader.

    Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def linear_positions(self, streams: Collection[str] | None = None) -> dict[str, int]:
        """Stream -> linear position, for `streams` (None for all streams). Unknown streams are left out."""
        rows = self._session.fetch_tuples(
            "select stream, linear from tidemark.streams"
            " where %(streams)s::text[] is null or stream = any(%(streams)s)",
            {"streams": None if streams is None else [*streams]},
        )
        return dict(rows)

    def count_late_after(self, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Count late completions: (stream, number) -> number of the stream's late completions with a higher number."""
        rows = self._session.fetch_tuples(
            "select known.stream, known.number, (select count(*) from tidemark.late_completions l"
            "   where l.stream = known.stream and l.number > known.number)"
            " from unnest(%s::text[], %s::bigint[]) as known (stream, number)",
            ([stream for stream, _ in pairs], [number for _, number in pairs]),
        )
        return {(stream, number): count for stream, number, count in rows}

    def passed_at(self, stream: str, id: int, since: datetime | None = None) -> datetime | None:
        """The time at which the linear position of `stream` first was beyond `id`.

        Args:
            since: a time at which the position was not beyond `id` yet, to make the search faster; None if not known.

        Returns:
            None if the stored history has no position beyond `id`. If the oldest stored position is already beyond
            `id`, the time of the oldest stored position.
        """
        now = datetime.now(UTC)
        starts: Sequence[datetime | str] = (
            [*(now - window for window in _SEARCH_WINDOWS), "-infinity"] if since is None else [since]
        )
        first: datetime | None = None
        for start in starts:
            ((first, is_exact),) = self._session.fetch_tuples(
                "select min(time) filter (where abs(linear) > abs(%(id)s)),"
                f" coalesce(bool_or(abs(linear) <= abs(%(id)s)), false) from {_POSITIONS}",
                {"stream": stream, "since": start, "id": id},
            )
            if first is not None and is_exact:
                break
        return first

    def chart(self, stream: str, until: datetime, seconds: float, steps: int) -> StreamHistoryChart:
        """Read the history of a stream from `seconds` before `until` to `until`, as a chart with `steps` steps."""
        window = timedelta(seconds=seconds)
        since, step = until - window, window / steps
        values = {"stream": stream, "since": since, "until": until, "step": LAG_STEP, "limit": MAX_CHART_GAPS}
        moves = self._session.fetch_tuples(_MOVES, values)
        gaps = [GapSpan(*row) for row in self._session.fetch_tuples(_GAPS, values)]
        fine = _LagSteps()
        moved: dict[str, list[int]] = {}
        for second, writer, known, linear, width in moves:
            number = int(second / LAG_STEP.total_seconds())
            fine.add_known(number, known)
            fine.linear_by_step[number] = max(fine.linear_by_step.get(number, 0), linear)
            if writer:
                moved.setdefault(writer, [0] * steps)[min(steps - 1, int(second / step.total_seconds()))] += width
        for gap in gaps:
            fine.add_known(max(0, int((gap.opened - since) / LAG_STEP)), abs(gap.top))
        # Reading the position before the first move in the window is too expensive. That position was at or below the
        # lower end of each gap that was open then.
        first = (
            fine.linear_by_step[min(fine.linear_by_step)]
            if fine.linear_by_step
            else abs(self.linear_positions([stream]).get(stream, 0))
        )
        fine.linear_by_step.setdefault(0, min([first, *(abs(gap.low) for gap in gaps if gap.opened < since)]))
        lags = [*fine.lag(int(window / LAG_STEP))]
        size = len(lags) / steps
        bounds = [(int(number * size), int((number + 1) * size)) for number in range(steps)]
        worst = [max(lags[low : max(high, low + 1)]) * LAG_STEP.total_seconds() for low, high in bounds]
        in_order = sorted(gaps, key=lambda gap: (gap.opened, abs(gap.low)))
        return StreamHistoryChart(since, step, worst, dict(sorted(moved.items())), in_order)
