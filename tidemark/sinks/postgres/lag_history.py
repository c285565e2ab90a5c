"""The history of lag and of gaps, for readers and for the live page. Needs the role tidemark_reader.

An ID becomes known when an advance or a gap first names it. The lag of a stream at a time is the time since the oldest
known ID beyond its linear position became known.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import LiteralString

from tidemark.common.postgres_session import PostgresSession

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
