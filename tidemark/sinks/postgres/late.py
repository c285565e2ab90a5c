"""Late completions for people: which there are, and which somebody has said to be repaired."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import LiteralString

from tidemark.common.errors import BadRecord, StreamNotKnown
from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.postgres.acts import Acts
from tidemark.streaming.core.effects import Forced

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
