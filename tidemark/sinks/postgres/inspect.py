"""Queries of the history for `explain`, `trace`, `replay` and `late`. Only `LateCompletions.resolve` writes."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, LiteralString, Self

from tidemark.common.errors import BadRecord, StreamNotKnown
from tidemark.common.postgres_session import Connection, Dsn, PostgresSession, fetch_all, fetch_one, fetch_value
from tidemark.sinks.postgres.database import OLDEST_READABLE_VERSION, SCHEMA, session_of
from tidemark.sinks.postgres.operators import OverrideEntry, OverrideLog, PolicyTable
from tidemark.sinks.postgres.positions import EarlierWriter, stored_writers, writers_not_beyond
from tidemark.sinks.postgres.status import SELECT_STATES
from tidemark.streaming.core.effects import OperatorOverride
from tidemark.streaming.values.limits import Evidence

CLOCK_TOLERANCE = timedelta(minutes=1)  # how far the database's clock may lag behind the pipeline's clock
MAX_ROWS = 100  # of one kind for one ID: each writer whose position has passed the ID has an advance over it

_ADVANCES: LiteralString = "select writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time"
_GAPS: LiteralString = (
    "select writer, epoch, low, top, opened_at as opened, closed_at as closed, closed_by from tidemark.stream_gaps"
)
_POSITIONS: LiteralString = """(
    select time, linear, batch from tidemark.advances_of(%(stream)s, %(since)s, %(until)s)
    union all select time, linear, batch from tidemark.linear_moves
    where stream = %(stream)s and time between %(since)s and %(until)s
) positions"""
"""The linear position after each batch: `linear_moves` has the moves of batches without an advance."""
_SEARCH_WINDOWS = (timedelta(hours=1), timedelta(days=1))  # searched before the whole history


@dataclass(frozen=True, slots=True)
class LinearStay:
    """The linear position was at `linear` from `since` to `until`, and then moved to `went_to`.

    Attributes:
        linear: the linear position.
        since: the time of the move to `linear`.
        until: the time of the next move; None if the position has not moved since.
        went_to: the next linear position.
        blocked_since: the time from which a higher ID was known, so that the stream was blocked. Before, it was idle.
            None if no higher ID was known until the next move.
        is_since_known: False if the stored history begins during the stay. Then `since` is the first stored time.
    """

    linear: int
    since: datetime
    until: datetime | None
    went_to: int | None
    blocked_since: datetime | None
    is_since_known: bool


@dataclass(frozen=True, slots=True)
class StoredGap:
    """A gap: the IDs `(low, top]` of one writer, which were open from `opened` to `closed`.

    `closed_by`: `completed`, `joined`, `retired` or `skipped`. `closed` and `closed_by` are None for an open gap.
    """

    writer: str
    epoch: int
    low: int
    top: int
    opened: datetime
    closed: datetime | None
    closed_by: str | None


@dataclass(frozen=True, slots=True)
class BatchAdvance:
    """An advance, with the number and time of its batch, and the linear position after the batch."""

    writer: str
    epoch: int
    prev: int
    id: int
    evidence: Evidence
    linear: int
    batch: int
    time: datetime

    @classmethod
    def of_row(cls, facts: int, empty: int, unseen: int, skipped: int, **columns: Any) -> Self:
        """Create an advance from the columns of `_ADVANCES`."""
        return cls(**columns, evidence=Evidence(facts, empty, unseen, skipped))


@dataclass(frozen=True, slots=True)
class AppliedOverride:
    """An override that a batch applied: a row of the table `skips`. `prev` has a meaning only for a SKIP."""

    writer: str
    epoch: int
    kind: str
    prev: int
    id: int
    by: str
    why: str
    time: datetime


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets that a batch read from a partition: `first` to `last`, both included.

    `first` is None if no earlier batch with offsets of the partition is stored.
    """

    topic: str
    partition: int
    first: int | None
    last: int


@dataclass(frozen=True, slots=True)
class MoveWithoutAdvance:
    """A batch that moved the linear position of a stream, but no writer position.

    `batch`: the number of the batch. `retired_epochs`: writer -> epoch, for the writers that retired in the batch.
    """

    batch: int
    retired_epochs: dict[str, int]

    @classmethod
    def of_row(cls, batch: int, retired: Sequence[str], epochs: Sequence[int]) -> Self:
        return cls(batch, dict(zip(retired, epochs, strict=True)))


@dataclass(frozen=True, slots=True)
class _LinearRow:
    """A linear position, and the first stored time at which the stream had this position. `is_first_known`: whether
    `time` is the time of the move to `linear`, because an earlier position is stored."""

    time: datetime
    linear: int
    is_first_known: bool = True


class StreamInspection:
    """Queries of the history of single streams. A context manager that closes its session.

    Needs the role tidemark_reader. Methods raise `Unavailable` and `Refused`. Only `state` checks the schema.
    """

    def __init__(self, dsn: Dsn, application: str = "tidemark explain") -> None:
        self._session = session_of(dsn, application)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def state(self, stream: str) -> bytes | None:
        """Check the schema, and return the encoded current state; None if the stream does not exist.

        Raises:
            SchemaMismatch: this Tidemark cannot read the schema.
            PrerequisitePending: pg_restore is filling the database.
        """
        with self._session.use() as connection:
            SCHEMA.check_readable(connection, OLDEST_READABLE_VERSION)
            row = connection.execute(SELECT_STATES, {"streams": [stream]}).fetchone()
        return row[1] if row else None

    def stream_names(self) -> list[str]:
        return [name for (name,) in self._session.fetch_tuples("select stream from tidemark.streams")]

    def history_start(self, stream: str) -> datetime | None:
        """The time of the first stored move of a position; None if no move is stored."""
        time: datetime | None = self._session.fetch_value(
            f"select min(time) from {_POSITIONS}", {"stream": stream, "since": "-infinity", "until": "infinity"}
        )
        return time

    def linear_at(self, stream: str, at: datetime) -> LinearStay | None:
        """The linear position at the time `at`, with the moves before and after; None if the history begins later."""
        with self._session.use() as connection:
            before = _linear_before(connection, stream, at)
            if before is None:
                return None
            after = _linear_after(connection, stream, at, before.linear)
            until, went_to = (after.time, after.linear) if after else (None, None)
            blocked_since = _blocked_since(connection, stream, before, until)
            is_since_known = before.is_first_known or _has_beginning(connection, stream)
        return LinearStay(before.linear, before.time, until, went_to, blocked_since, is_since_known)

    def linear_moves(self, stream: str, since: datetime, until: datetime, min_stay: timedelta) -> list[datetime]:
        """The times from `since` to `until` at which the linear position moved, and then did not move for `min_stay`.

        After the last move, the time up to `until` counts. The first time may be of a batch that advanced only writers.
        """
        rows = self._session.fetch_tuples(
            "select time from (select time, lead(time, 1, %(until)s) over (order by time) as next from ("
            f"   select min(time) as time from {_POSITIONS} group by linear"
            " ) moves) stays where next - time >= %(min_stay)s order by time",
            {"stream": stream, "since": since, "until": until, "min_stay": min_stay},
        )
        return [time for (time,) in rows]

    def writers_not_beyond(self, stream: str, at: datetime, linear: int) -> list[EarlierWriter]:
        """See `positions.writers_not_beyond`."""
        return writers_not_beyond(self._session, stream, at, linear)

    def gaps_at(self, stream: str, at: datetime) -> list[StoredGap]:
        """The gaps that were open at the time `at`, or that the batch of that time closed; lowest first."""
        return self._session.fetch_all(
            StoredGap,
            _GAPS + " where stream = %s and opened_at <= %s and (closed_at is null or closed_at >= %s)"
            " order by abs(top)",
            (stream, at, at),
        )

    def advances_at(self, stream: str, at: datetime) -> list[BatchAdvance]:
        """The advances in the stream by the batch with exactly the time `at`."""
        return self._session.fetch_all(
            BatchAdvance.of_row, _ADVANCES + " from tidemark.advances_of(%s, %s, %s)", (stream, at, at)
        )

    def move_without_advance(self, stream: str, at: datetime) -> MoveWithoutAdvance | None:
        """The batch with exactly the time `at`, if it moved the linear position without an advance; otherwise None."""
        return self._session.fetch_one(
            MoveWithoutAdvance.of_row,
            "select batch, retired, epochs from tidemark.linear_moves where (stream, time) = (%s, %s)"
            " order by abs(linear) desc limit 1",
            (stream, at),
        )

    def overrides_at(self, stream: str, at: datetime) -> list[AppliedOverride]:
        """The overrides that the batch with exactly the time `at` applied."""
        return self._session.fetch_all(
            AppliedOverride, _OVERRIDES + " where stream = %s and time = %s order by number", (stream, at)
        )

    def offsets(self, batch: int, at: datetime) -> list[OffsetRange]:
        """The offsets that a batch read, without partitions of which it read nothing.

        Empty if the batch is no longer stored.

        Args:
            batch: the number of the batch.
            at: the time of the batch, which distinguishes batches of different queries with the same number.
        """
        ranges = self._session.fetch_all(
            OffsetRange,
            "with b as (select number, offsets from tidemark.applied_batches"
            "   where batch = %s and applied_at >= %s order by applied_at limit 1)"
            " select t.key as topic, p.key::int as partition, (select max((o.offsets -> t.key ->> p.key)::bigint)"
            "   from tidemark.applied_batches o where o.number < b.number) as first, p.value::bigint - 1 as last"
            " from b, jsonb_each(b.offsets) t, jsonb_each_text(t.value) p order by 1, 2",
            (batch, at - CLOCK_TOLERANCE),
        )
        return [offsets for offsets in ranges if offsets.first is None or offsets.first <= offsets.last]


_OVERRIDES: LiteralString = "select writer, epoch, kind, prev, id, by, why, time from tidemark.skips"


def _linear_before(connection: Connection, stream: str, at: datetime) -> _LinearRow | None:
    """The linear position at the time `at`, and the time of the move to it; None if the history begins later."""
    rows: list[_LinearRow] = []
    for since in [*(at - window for window in _SEARCH_WINDOWS), "-infinity"]:
        rows = fetch_all(
            connection,
            _LinearRow,
            f"select linear, min(time) as time from {_POSITIONS} group by linear order by abs(linear) desc limit 2",
            {"stream": stream, "since": since, "until": at},
        )
        if len(rows) == 2:  # the previous position is stored, so the time of the move is known
            break
    return replace(rows[0], is_first_known=len(rows) == 2) if rows else None


def _blocked_since(connection: Connection, stream: str, before: _LinearRow, until: datetime | None) -> datetime | None:
    """The first time from `before.time` to `until` at which an ID beyond `before.linear` was known, or None."""
    since: datetime | None = fetch_value(
        connection,
        "select greatest(min(time), %(since)s) from ("
        "   select min(time) as time from tidemark.advances_of(%(stream)s, until => %(until)s)"
        "   where abs(id) > abs(%(linear)s) and time < %(until)s"
        "   union all select min(opened_at) from tidemark.stream_gaps"
        "   where stream = %(stream)s and abs(top) > abs(%(linear)s) and opened_at < %(until)s"
        " ) known having min(time) is not null",
        {"stream": stream, "linear": before.linear, "since": before.time, "until": until or "infinity"},
    )
    return since


def _has_beginning(connection: Connection, stream: str) -> bool:
    """Whether the history has the first advance of each writer of the stream."""
    has_beginning: bool = fetch_value(
        connection,
        "select coalesce(bool_and(coalesce(first.prev = 0, false)), true) from tidemark.stream_positions p left join ("
        "   select distinct on (writer) writer, prev from tidemark.advances_of(%(stream)s) order by writer, abs(id)"
        " ) first using (writer) where p.stream = %(stream)s and p.position <> 0",
        {"stream": stream},
    )
    return has_beginning


def _linear_after(connection: Connection, stream: str, at: datetime, linear: int) -> _LinearRow | None:
    """The first linear position beyond `linear` after the time `at`; None if there is none."""
    for until in [*(at + window for window in _SEARCH_WINDOWS), "infinity"]:
        row = fetch_one(
            connection,
            _LinearRow,
            f"select time, linear from {_POSITIONS} where abs(linear) > abs(%(linear)s)"
            " order by time, abs(linear) desc limit 1",
            {"stream": stream, "since": at + timedelta(microseconds=1), "until": until, "linear": linear},
        )
        if row is not None:
            return row
    return None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The effect of a batch on a stream.

    `linear`: the linear position after the batch; None if this position is not to be compared.
    """

    batch: int
    time: datetime
    linear: int | None
    advances: list[BatchAdvance]


@dataclass(frozen=True, slots=True)
class StreamBatches:
    """The positions, gaps, batches and overrides that Postgres stores for a stream.

    Attributes:
        linear: the current linear position.
        positions: writer -> current position.
        epochs: writer -> current epoch.
        retired_writers: the writers that are retired now.
        gaps: all stored gaps.
        batches: the stored batches with an advance in the stream, oldest first.
        overrides: the stored overrides that batches applied, in the order of their application.
        is_complete: whether the history has all advances of every writer.
    """

    linear: int
    positions: dict[str, int]
    epochs: dict[str, int]
    retired_writers: set[str]
    gaps: list[StoredGap]
    batches: list[StoredBatch] = field(default_factory=list)
    overrides: list[AppliedOverride] = field(default_factory=list)
    is_complete: bool = True


class BatchHistory:
    """Queries of the history by batch, in one snapshot of the database. Needs the role tidemark_reader."""

    def __init__(self, session: PostgresSession, connection: Connection) -> None:
        self._session = session
        self._connection = connection

    @classmethod
    @contextmanager
    def open(cls, dsn: Dsn) -> Iterator[Self]:
        """Open a session, and take the snapshot that all reads inside the block use.

        Every record whose effects are in the snapshot was in Kafka before the snapshot was taken.

        Raises:
            Unavailable, Refused: also raised inside the block.
            SchemaMismatch: this Tidemark cannot read the schema.
        """
        with session_of(dsn, "tidemark replay") as session, session.use() as connection:
            SCHEMA.check_readable(connection, OLDEST_READABLE_VERSION)
            with connection.transaction():
                connection.execute("set transaction isolation level repeatable read, read only")
                connection.execute("select 1")  # the first query takes the snapshot
                yield cls(session, connection)

    def policies(self) -> dict[str, dict[str, int]]:
        """See `PolicyTable.read`."""
        return PolicyTable(self._session).read()

    def next_offsets(self) -> dict[tuple[str, int], int]:
        """(topic, partition) -> the first offset that no batch has read."""
        rows = self._connection.execute("select topic, partition, next from tidemark.kafka_offsets")
        return {(topic, partition): next_ for topic, partition, next_ in rows}

    def streams(self) -> list[str]:
        return [name for (name,) in self._connection.execute("select stream from tidemark.streams order by 1")]

    def stream(self, name: str) -> StreamBatches | None:
        """The positions, gaps, batches and overrides of a stream; None if the stream does not exist."""
        linear = fetch_value(self._connection, "select linear from tidemark.streams where stream = %s", (name,))
        if linear is None:
            return None
        writers = stored_writers(self._connection, [name])
        positions = {row.writer: row.position for row in writers}
        batches = self._batches(name)
        firsts: dict[str, int] = {}
        for batch in batches:
            for move in batch.advances:
                firsts.setdefault(move.writer, move.prev)
        is_complete = not any(firsts.values()) and all(
            writer in firsts or not position for writer, position in positions.items()
        )
        return StreamBatches(
            linear,
            positions,
            {row.writer: row.epoch for row in writers},
            {row.writer for row in writers if row.retired},
            fetch_all(self._connection, StoredGap, _GAPS + " where stream = %s", (name,)),
            batches,
            fetch_all(self._connection, AppliedOverride, _OVERRIDES + " where stream = %s order by number", (name,)),
            is_complete,
        )

    def _batches(self, stream: str) -> list[StoredBatch]:
        rows = fetch_all(
            self._connection,
            BatchAdvance.of_row,
            _ADVANCES + " from tidemark.advances_of(%s) order by time, batch, abs(linear), writer, abs(id)",
            (stream,),
        )
        return [
            StoredBatch(batch, time, linear, [*moves])
            for (time, batch, linear), moves in groupby(rows, attrgetter("time", "batch", "linear"))
        ]


_LATE: LiteralString = (
    "select l.number, stream, writer, epoch, prev, id, facts, why, time, r.act"
    " from tidemark.late_completions l left join tidemark.late_resolved r on r.number = l.number"
)


@dataclass(frozen=True, slots=True)
class StoredLateCompletion:
    """A late completion of a writer, with the IDs in `(prev, id]`.

    Attributes:
        number: the number of the late completion; numbers ascend.
        facts: the number of facts.
        why: why the IDs had been settled before.
        time: the time of the batch that read the late completion.
        act: the number of the override with which an operator resolved the late completion; None if unresolved.
    """

    number: int
    stream: str
    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: str
    time: datetime
    act: int | None


class LateCompletions:
    """The late completions in Postgres. Needs the role tidemark_reader; `resolve` also needs tidemark_operator.

    Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._override_log = OverrideLog(session)

    def newest(self, stream: str | None, limit: int, *, with_resolved: bool) -> list[StoredLateCompletion]:
        """The newest late completions, newest first.

        Args:
            stream: the stream; None for all streams.
            limit: the largest number of late completions.
            with_resolved: whether to include resolved late completions.

        Raises:
            StreamNotKnown: there is no such stream.
        """
        if stream is not None and not self._override_log.has_stream(stream):
            raise StreamNotKnown(stream)
        return self._session.fetch_all(
            StoredLateCompletion,
            _LATE + " where (%s::text is null or stream = %s) and (%s or r.act is null)"
            " order by l.number desc limit %s",
            (stream, stream, with_resolved, limit),
        )

    def with_numbers(self, stream: str, numbers: Sequence[int]) -> list[StoredLateCompletion]:
        """The late completions of `stream` with these numbers, oldest first. Unknown numbers are left out."""
        query = _LATE + " where stream = %s and l.number = any(%s) order by l.number"
        return self._session.fetch_all(StoredLateCompletion, query, (stream, list(numbers)))

    def containing(self, stream: str, id: int, limit: int) -> list[StoredLateCompletion]:
        """The late completions whose range contains `id`, oldest first; at most `limit`."""
        return self._session.fetch_all(
            StoredLateCompletion,
            _LATE + " where stream = %(stream)s and abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
            " order by l.number limit %(limit)s",
            {"stream": stream, "id": id, "limit": limit},
        )

    def resolve(self, completions: Sequence[StoredLateCompletion], by: str, why: str) -> list[StoredLateCompletion]:
        """Log an override for each late completion, and mark all of them as resolved, in one transaction.

        Args:
            completions: the late completions.
            by: the name of the operator.
            why: the reason.

        Returns:
            The late completions, with the numbers of their overrides.

        Raises:
            BadRecord: one of the late completions was already resolved. None of them is changed.
        """
        with self._session.use() as connection, connection.transaction():
            return [self._resolve(completion, by, why) for completion in completions]

    def _resolve(self, late: StoredLateCompletion, by: str, why: str) -> StoredLateCompletion:
        override = OperatorOverride(late.writer, late.epoch, "RESOLVE", late.prev, late.id, by, why)
        logged = self._override_log.log(late.stream, override)
        self._override_log.note_outcome(logged, "applied")
        if not self._session.fetch_value("select tidemark.note_resolved(%s, %s)", (logged.number, late.number)):
            raise BadRecord("resolved_before", f"late completion {late.number} of {late.stream} is resolved already")
        return replace(late, act=logged.number)


@dataclass(frozen=True, slots=True)
class LinearPassed:
    """The first batch after which the linear position was at or beyond an ID, and this linear position."""

    time: datetime
    linear: int
    batch: int


class IdInspection(StreamInspection):
    """Queries of the history of single IDs. Each of their lists has at most `MAX_ROWS` rows."""

    def advances_containing(self, stream: str, id: int) -> list[BatchAdvance]:
        """The advances whose range contains `id`, oldest first. Reads the whole history of the stream."""
        return self._session.fetch_all(
            BatchAdvance.of_row,
            _ADVANCES
            + " from tidemark.advances_of(%(stream)s) where abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
            " order by time, writer limit %(limit)s",
            {"stream": stream, "id": id, "limit": MAX_ROWS},
        )

    def first_batch_reaching(self, stream: str, id: int, since: datetime) -> LinearPassed | None:
        """The first batch at or after `since` after which the linear position was at or beyond `id`; None if none."""
        return self._session.fetch_one(
            LinearPassed,
            f"select time, linear, batch from {_POSITIONS} where abs(linear) >= abs(%(id)s) order by time limit 1",
            {"stream": stream, "since": since, "until": "infinity", "id": id},
        )

    def gaps_below(self, stream: str, id: int, writers: Collection[str], since: datetime | None) -> list[StoredGap]:
        """The gaps of `writers` that begin below `id` and were not closed before `since` (None: all), oldest first."""
        return self._session.fetch_all(
            StoredGap,
            _GAPS + " where stream = %s and writer = any(%s) and abs(low) < abs(%s)"
            " and (closed_at is null or closed_at >= coalesce(%s::timestamptz, '-infinity'))"
            " order by opened_at, abs(top) limit %s",
            (stream, list(writers), id, since, MAX_ROWS),
        )

    def offset_before(self, topic: str, partition: int, time: datetime) -> int | None:
        """The next offset of a partition after the batches that were applied before `time` minus `CLOCK_TOLERANCE`.

        None if no such batch with an offset of the partition is stored.
        """
        offset: int | None = self._session.fetch_value(
            "select max((offsets -> %(topic)s ->> %(partition)s)::bigint) from tidemark.applied_batches"
            " where applied_at < %(time)s",
            {"topic": topic, "partition": str(partition), "time": time - CLOCK_TOLERANCE},
        )
        return offset

    def next_offset(self, topic: str, partition: int) -> int | None:
        """The first offset of a partition that no batch has read; None if no batch has read the partition."""
        offset: int | None = self._session.fetch_value(
            "select next from tidemark.kafka_offsets where (topic, partition) = (%s, %s)", (topic, partition)
        )
        return offset

    def late_containing(self, stream: str, id: int) -> list[StoredLateCompletion]:
        return LateCompletions(self._session).containing(stream, id, MAX_ROWS)

    def overrides_containing(self, stream: str, id: int) -> list[OverrideEntry]:
        """The overrides whose range contains `id`, oldest first: see `OverrideLog.containing`."""
        return OverrideLog(self._session).containing(stream, id, MAX_ROWS)
