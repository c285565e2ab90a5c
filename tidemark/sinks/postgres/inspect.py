"""Where a stream's line stood at a time that is past, who had not passed it then, and what moved it on. For people."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby, starmap
from operator import attrgetter
from typing import Any, LiteralString, Self

from tidemark.common.errors import BadRecord, StreamNotKnown
from tidemark.common.postgres_session import Connection, Dsn, PostgresSession
from tidemark.sinks.postgres.audit import STATES
from tidemark.sinks.postgres.database import READABLE, SCHEMA, session_of
from tidemark.sinks.postgres.operators import Acts, ListedAct, PolicyTable
from tidemark.streaming.core.effects import Forced
from tidemark.streaming.values.direction import farther
from tidemark.streaming.values.limits import Evidence

OTHER_CLOCK = timedelta(minutes=1)  # by which the database's may be behind the pipeline's
ADVANCES: LiteralString = "select writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time"
"""Of each a `BatchAdvance`."""
GAPS: LiteralString = "select writer, epoch, low, top, opened_at, closed_at, closed_by from tidemark.stream_gaps"
"""Of each a `PastGap`."""
_LOOKS = (timedelta(hours=1), timedelta(days=1))  # how far is looked at first; then all that is kept


@dataclass(frozen=True, slots=True)
class LineStand:
    """The line was at `linear` from `since` (or earlier, where no advance before is kept) to `until`, when it went to
    `went_to`. Without `until` it is there still."""

    linear: int
    since: datetime
    until: datetime | None
    went_to: int | None


@dataclass(frozen=True, slots=True)
class StandingWriter:
    """A writer that was at `position` at some time; `next` is the time of its advance after that, `first` whether none
    came before that one, as far as positions tell."""

    writer: str
    epoch: int
    position: int
    next: datetime | None
    first: bool


@dataclass(frozen=True, slots=True)
class PastGap:
    """`closed_by`: `completed`, `joined`, `retired` or `skipped`."""

    writer: str
    epoch: int
    low: int
    top: int
    opened: datetime
    closed: datetime | None
    closed_by: str | None


@dataclass(frozen=True, slots=True)
class BatchAdvance:
    writer: str
    epoch: int
    prev: int
    id: int
    evidence: Evidence
    linear: int
    batch: int
    time: datetime

    @classmethod
    def of(cls, writer: str, epoch: int, prev: int, id: int, *rest: Any) -> Self:
        """From the columns of `ADVANCES`."""
        *counts, linear, batch, time = rest
        return cls(writer, epoch, prev, id, Evidence(*counts), linear, batch, time)


@dataclass(frozen=True, slots=True)
class OperatorAct:
    writer: str
    epoch: int
    kind: str
    prev: int
    id: int
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """What a batch took of a partition: the offsets from `first` (None: no batch noted before tells it) to `last`."""

    topic: str
    partition: int
    first: int | None
    last: int


@dataclass(frozen=True, slots=True)
class LoneMove:
    """A batch moved the line and no position; `retired` are writers that retired in it, with their epochs."""

    batch: int
    retired: dict[str, int]


LINES: LiteralString = """(
    select time, linear, batch from tidemark.advances_of(%(stream)s, %(since)s, %(until)s)
    union all select time, linear, batch from tidemark.line_moves
    where stream = %(stream)s and time between %(since)s and %(until)s
) lines"""
"""Where the line was after each batch: an advance tells it, and where none was made a row of its own does."""


class StreamPast:
    """A context manager; needs the rights of the role tidemark_reader. Raises `Unavailable`, `Refused` and
    `SchemaMismatch`."""

    def __init__(self, dsn: Dsn, application: str = "tidemark explain") -> None:
        self._session = session_of(dsn, application)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def state(self, stream: str) -> bytes | None:
        """The encoded state as it is now; None where there is no such stream."""
        with self._session.use() as connection:
            SCHEMA.check_from(connection, READABLE)
            row = connection.execute(STATES, {"streams": [stream]}).fetchone()
        return row[1] if row else None

    def begins(self, stream: str) -> datetime | None:
        """The time of the first move of its line or of a position that is kept; None where none is."""
        with self._session.use() as connection:
            row = connection.execute(
                f"select min(time) from {LINES}", {"stream": stream, "since": "-infinity", "until": "infinity"}
            ).fetchone()
        return row[0] if row else None

    def stand(self, stream: str, at: datetime) -> LineStand | None:
        """None where nothing that is kept of the history is as old."""
        with self._session.use() as connection:
            found = _line_before(connection, stream, at)
            if found is None:
                return None
            linear, since = found
            later = next(_line_after(connection, stream, at, linear), None)
        return LineStand(linear, since, *(later or (None, None)))

    def moves(self, stream: str, since: datetime, until: datetime, least: timedelta) -> list[datetime]:
        """When the line came to where it then stood for `least` or longer, between the two times."""
        with self._session.use() as connection:
            rows = connection.execute(
                "select time from (select time, lead(time, 1, %(until)s) over (order by time) as next from ("
                f"   select min(time) as time from {LINES} group by linear"
                " ) moves) stands where next - time >= %(least)s order by time",
                {"stream": stream, "since": since, "until": until, "least": least},
            ).fetchall()
        return [time for (time,) in rows]

    def behind(self, stream: str, at: datetime, linear: int) -> list[StandingWriter]:
        """Writers that had not passed `linear` at that time, least position first; some may have retired before."""
        with self._session.use() as connection:
            rows = connection.execute(
                "select p.writer, coalesce(a.epoch, p.epoch), coalesce(a.prev, p.position), a.time,"
                "   coalesce(a.prev = 0, false)"
                " from tidemark.stream_positions p left join ("
                "   select distinct on (writer) writer, epoch, prev, time"
                "   from tidemark.advances_of(%(stream)s, %(after)s) order by writer, abs(id)"
                " ) a using (writer)"
                " where p.stream = %(stream)s and not p.forgotten"
                "   and abs(coalesce(a.prev, p.position)) <= abs(%(linear)s)"
                " order by abs(coalesce(a.prev, p.position)), writer",
                {"stream": stream, "after": _just_after(at), "linear": linear},
            ).fetchall()
        return [StandingWriter(*row) for row in rows]

    def farthest(self, stream: str, at: datetime) -> int:
        """The highest ID that was named by then, as far as positions and gaps tell."""
        with self._session.use() as connection:
            row = connection.execute(
                "select coalesce((select id from tidemark.advances_of(%(stream)s, until => %(at)s)"
                "   order by abs(id) desc limit 1), 0),"
                " coalesce((select top from tidemark.stream_gaps where stream = %(stream)s and opened_at <= %(at)s"
                "   order by abs(top) desc limit 1), 0)",
                {"stream": stream, "at": at},
            ).fetchone()
        return farther(*row) if row else 0

    def gaps(self, stream: str, at: datetime) -> list[PastGap]:
        """Those that were open at that time, or were closed by the batch of exactly that time; nearest first."""
        with self._session.use() as connection:
            rows = connection.execute(
                GAPS + " where stream = %s and opened_at <= %s and (closed_at is null or closed_at >= %s)"
                " order by abs(top)",
                (stream, at, at),
            ).fetchall()
        return [PastGap(*row) for row in rows]

    def batch(self, stream: str, at: datetime) -> list[BatchAdvance]:
        """The advances of the batch of exactly that time."""
        with self._session.use() as connection:
            rows = connection.execute(ADVANCES + " from tidemark.advances_of(%s, %s, %s)", (stream, at, at)).fetchall()
        return [*starmap(BatchAdvance.of, rows)]

    def lone_move(self, stream: str, at: datetime) -> LoneMove | None:
        """Of the line by the batch of exactly that time, where it has no advances."""
        with self._session.use() as connection:
            row = connection.execute(
                "select batch, retired, epochs from tidemark.line_moves where (stream, time) = (%s, %s)"
                " order by abs(linear) desc limit 1",
                (stream, at),
            ).fetchone()
        return LoneMove(row[0], dict(zip(row[1], row[2], strict=True))) if row else None

    def acts(self, stream: str, at: datetime) -> list[OperatorAct]:
        """Of operators, in the batch of exactly that time."""
        with self._session.use() as connection:
            rows = connection.execute(
                "select writer, epoch, kind, prev, id, by, why from tidemark.skips where stream = %s and time = %s"
                " order by number",
                (stream, at),
            ).fetchall()
        return [OperatorAct(*row) for row in rows]

    def offsets(self, batch: int, at: datetime) -> list[OffsetRange]:
        """What the batch of that number and time took of each partition; empty where it is no longer noted."""
        with self._session.use() as connection:
            rows = connection.execute(
                "with b as (select number, offsets from tidemark.applied_batches"
                "   where batch = %s and applied_at >= %s order by applied_at limit 1)"
                " select t.key, p.key::int, (select max((o.offsets -> t.key ->> p.key)::bigint)"
                "   from tidemark.applied_batches o where o.number < b.number), p.value::bigint - 1"
                " from b, jsonb_each(b.offsets) t, jsonb_each_text(t.value) p order by 1, 2",
                (batch, at - OTHER_CLOCK),
            ).fetchall()
        return [OffsetRange(*row) for row in rows if row[2] is None or row[2] <= row[3]]


def _just_after(at: datetime) -> datetime:
    return at + timedelta(microseconds=1)


def _line_before(connection: Connection, stream: str, at: datetime) -> tuple[int, datetime] | None:
    rows: list[tuple[int, datetime]] = []
    for since in [*(at - look for look in _LOOKS), "-infinity"]:
        rows = connection.execute(
            f"select linear, min(time) from {LINES} group by linear order by abs(linear) desc limit 2",
            {"stream": stream, "since": since, "until": at},
        ).fetchall()
        if len(rows) == 2:  # a lower one before it: so it is known when the line came there
            break
    return rows[0] if rows else None


def _line_after(connection: Connection, stream: str, at: datetime, linear: int) -> Iterator[tuple[datetime, int]]:
    for until in [*(at + look for look in _LOOKS), "infinity"]:
        yield from connection.execute(
            f"select time, linear from {LINES} where abs(linear) > abs(%(linear)s)"
            " order by time, abs(linear) desc limit 1",
            {"stream": stream, "since": _just_after(at), "until": until, "linear": linear},
        ).fetchall()


@dataclass(frozen=True, slots=True)
class PastBatch:
    """What a batch did to a stream: `linear` is the line after it; None where that is not to be compared."""

    batch: int
    time: datetime
    linear: int | None
    advances: list[BatchAdvance]


@dataclass(frozen=True, slots=True)
class AppliedAct:
    """An operator's record as the audit has it; `prev` of a SKIP alone has a meaning."""

    kind: str
    writer: str
    prev: int
    id: int
    by: str
    why: str
    time: datetime


@dataclass(frozen=True, slots=True)
class PastStream:
    """`whole`: from the first advance of every writer on. `positions` and `epochs` are those of writers in the end;
    `gaps` are all that are kept."""

    linear: int
    positions: dict[str, int]
    epochs: dict[str, int]
    retired: set[str]
    gaps: list[PastGap]
    batches: list[PastBatch] = field(default_factory=list)
    acts: list[AppliedAct] = field(default_factory=list)
    whole: bool = True


class PastBatches:
    """Needs the rights of the role tidemark_reader. Raises `Unavailable`, `Refused` and `SchemaMismatch`."""

    def __init__(self, session: PostgresSession, connection: Connection) -> None:
        self._session = session
        self._connection = connection

    def policies(self) -> dict[str, dict[str, int]]:
        """Those of now, as `PolicyTable` gives them."""
        return PolicyTable(self._session).given()

    def read_up_to(self) -> dict[tuple[str, int], int]:
        """Topic and partition -> the first offset that no batch has read."""
        rows = self._connection.execute("select topic, partition, next from tidemark.kafka_offsets")
        return {(topic, partition): next_ for topic, partition, next_ in rows}

    def streams(self) -> list[str]:
        return [name for (name,) in self._connection.execute("select stream from tidemark.streams order by 1")]

    def stream(self, name: str) -> PastStream | None:
        """None where there is no such stream."""
        row = self._connection.execute("select linear from tidemark.streams where stream = %s", (name,)).fetchone()
        if row is None:
            return None
        writers = self._connection.execute(
            "select writer, position, epoch, retired from tidemark.stream_positions where stream = %s", (name,)
        ).fetchall()
        positions = {writer: position for writer, position, _, _ in writers}
        batches = self._batches(name)
        firsts: dict[str, int] = {}
        for batch in batches:
            for move in batch.advances:
                firsts.setdefault(move.writer, move.prev)
        whole = not any(firsts.values()) and all(writer in firsts or not at for writer, at in positions.items())
        return PastStream(
            row[0],
            positions,
            {writer: epoch for writer, _, epoch, _ in writers},
            {writer for writer, _, _, retired in writers if retired},
            [PastGap(*gap) for gap in self._connection.execute(GAPS + " where stream = %s", (name,))],
            batches,
            self._acts(name),
            whole,
        )

    def _batches(self, stream: str) -> list[PastBatch]:
        rows = self._connection.execute(
            ADVANCES + " from tidemark.advances_of(%s) order by time, batch, abs(linear), writer, abs(id)", (stream,)
        )
        return [
            PastBatch(batch, time, linear, [*moves])
            for (time, batch, linear), moves in groupby(
                starmap(BatchAdvance.of, rows), attrgetter("time", "batch", "linear")
            )
        ]

    def _acts(self, stream: str) -> list[AppliedAct]:
        rows = self._connection.execute(
            "select kind, writer, prev, id, by, why, time from tidemark.skips where stream = %s order by number",
            (stream,),
        )
        return [AppliedAct(*row) for row in rows]


@contextmanager
def past_batches(dsn: Dsn) -> Iterator[PastBatches]:
    """Whatever is read until it ends is of the moment at which it began: what Kafka gives then has all of it."""
    with session_of(dsn, "tidemark replay") as session, session.use() as connection:
        SCHEMA.check_from(connection, READABLE)
        with connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            connection.execute("select 1")  # the moment is that of the first question
            yield PastBatches(session, connection)


_FOUND: LiteralString = (
    "select l.number, stream, writer, epoch, prev, id, facts, why, time, r.act"
    " from tidemark.late_completions l left join tidemark.late_resolved r on r.number = l.number"
)


@dataclass(frozen=True, slots=True)
class LateFact:
    """What `writer` completed of `(prev, id]` after that was settled; `act` is that which resolved it, if any did."""

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
    """Needs the role tidemark_reader; to resolve, also tidemark_operator. Raises `Unavailable` and `Refused`."""

    def __init__(self, database: PostgresSession) -> None:
        self._database = database
        self._acts = Acts(database)

    def newest(self, stream: str | None, most: int, *, resolved: bool) -> list[LateFact]:
        """Of one stream or of all; with those that are `resolved`, or without them. Raises `StreamNotKnown`."""
        with self._database.use() as connection:
            known = connection.execute("select 1 from tidemark.streams where stream = %s", (stream,)).fetchone()
            if stream is not None and known is None:
                raise StreamNotKnown(stream)
            rows = connection.execute(
                _FOUND + " where (%s::text is null or stream = %s) and (%s or r.act is null)"
                " order by l.number desc limit %s",
                (stream, stream, resolved, most),
            )
            return [LateFact(*row) for row in rows]

    def numbered(self, stream: str, numbers: Sequence[int]) -> list[LateFact]:
        """Those of them that are there, oldest first."""
        with self._database.use() as connection:
            rows = connection.execute(
                _FOUND + " where stream = %s and l.number = any(%s) order by l.number", (stream, list(numbers))
            )
            return [LateFact(*row) for row in rows]

    def about(self, stream: str, id: int, most: int) -> list[LateFact]:
        """Those that may have completed `id`, oldest first."""
        with self._database.use() as connection:
            rows = connection.execute(
                _FOUND + " where stream = %(stream)s and abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
                " order by l.number limit %(most)s",
                {"stream": stream, "id": id, "most": most},
            )
            return [LateFact(*row) for row in rows]

    def resolve(self, found: Sequence[LateFact], by: str, why: str) -> list[LateFact]:
        """Note it of all or of none: `BadRecord` where one was resolved before."""
        with self._database.use() as connection, connection.transaction():
            return [self._resolve(it, by, why) for it in found]

    def _resolve(self, it: LateFact, by: str, why: str) -> LateFact:
        with self._database.use() as connection:
            noted = self._acts.note(it.stream, Forced(it.writer, it.epoch, "RESOLVE", it.prev, it.id, by, why))
            self._acts.close(noted, "applied")
            taken = connection.execute(
                "insert into tidemark.late_resolved (number, act) values (%s, %s) on conflict do nothing",
                (it.number, noted.number),
            )
        if not taken.rowcount:
            raise BadRecord("resolved_before", f"late completion {it.number} of {it.stream} is resolved already")
        return replace(it, act=noted.number)


MOST = 100  # rows of one kind: an ID lies in an advance of every writer that passed it


@dataclass(frozen=True, slots=True)
class LinePassed:
    """The first batch after which the line had passed an ID."""

    time: datetime
    linear: int
    batch: int


class IdPast(StreamPast):
    """As `StreamPast`, of single IDs. Costs one reading of the stream's history."""

    def settled(self, stream: str, id: int) -> list[BatchAdvance]:
        """The advances that took a writer over it, oldest first."""
        with self._session.use() as connection:
            rows = connection.execute(
                ADVANCES
                + " from tidemark.advances_of(%(stream)s) where abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
                " order by time, writer limit %(most)s",
                {"stream": stream, "id": id, "most": MOST},
            ).fetchall()
        return [*starmap(BatchAdvance.of, rows)]

    def passed(self, stream: str, id: int, since: datetime) -> LinePassed | None:
        """None where nothing that is kept since then tells it."""
        with self._session.use() as connection:
            row = connection.execute(
                f"select time, linear, batch from {LINES} where abs(linear) >= abs(%(id)s) order by time limit 1",
                {"stream": stream, "since": since, "until": "infinity", "id": id},
            ).fetchone()
        return LinePassed(*row) if row else None

    def below(self, stream: str, id: int, writers: Collection[str], since: datetime | None) -> list[PastGap]:
        """The gaps of `writers` that begin below it and were not closed before `since`; oldest first."""
        with self._session.use() as connection:
            rows = connection.execute(
                GAPS + " where stream = %s and writer = any(%s) and abs(low) < abs(%s)"
                " and (closed_at is null or closed_at >= coalesce(%s::timestamptz, '-infinity'))"
                " order by opened_at, abs(top) limit %s",
                (stream, list(writers), id, since, MOST),
            ).fetchall()
        return [PastGap(*row) for row in rows]

    def read_before(self, topic: str, partition: int, time: datetime) -> int | None:
        """The offset up to which batches had come before that time; None: no batch that is noted tells."""
        with self._session.use() as connection:
            row = connection.execute(
                "select max((offsets -> %(topic)s ->> %(partition)s)::bigint) from tidemark.applied_batches"
                " where applied_at < %(time)s",
                {"topic": topic, "partition": str(partition), "time": time - OTHER_CLOCK},
            ).fetchone()
        return row[0] if row else None

    def next_offset(self, topic: str, partition: int) -> int | None:
        """The first offset that no batch has read; None where none has read any."""
        with self._session.use() as connection:
            row = connection.execute(
                "select next from tidemark.kafka_offsets where (topic, partition) = (%s, %s)", (topic, partition)
            ).fetchone()
        return row[0] if row else None

    def late(self, stream: str, id: int) -> list[LateFact]:
        return LateCompletions(self._session).about(stream, id, MOST)

    def acts_about(self, stream: str, id: int) -> list[ListedAct]:
        """What operators did to a range that holds it."""
        return Acts(self._session).about(stream, id, MOST)
