"""What Postgres knows of one ID: who settled it and when, which gaps were below it, when the line passed it."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from itertools import starmap

from tidemark.sinks.postgres.acts import Acts, ListedAct
from tidemark.sinks.postgres.late import LateCompletions, LateFact
from tidemark.sinks.postgres.past import ADVANCES, GAPS, LINES, OTHER_CLOCK, BatchAdvance, PastGap, StreamPast

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
