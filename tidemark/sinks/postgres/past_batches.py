"""The history batch by batch, and where it ends, all of one moment: what a replay is held against."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, starmap
from operator import attrgetter

from tidemark.common.postgres_session import Connection, Dsn, PostgresSession
from tidemark.sinks.postgres.audit import PACKED
from tidemark.sinks.postgres.database import SCHEMA, session_of
from tidemark.sinks.postgres.past import ADVANCES, GAPS, BatchAdvance, PastGap
from tidemark.sinks.postgres.policies import PolicyTable


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
        SCHEMA.check_from(connection, PACKED)
        with connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            connection.execute("select 1")  # the moment is that of the first question
            yield PastBatches(session, connection)
