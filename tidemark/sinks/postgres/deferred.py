"""The table of recalls: where records stand in Kafka that were put off, until they are produced again.

A row is written in the transaction of the batch that recalls. It goes when all of it was produced; where some are gone
from Kafka it stays, for people, until its writer's next epoch or retirement.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from tidemark.common.postgres_session import Connection
from tidemark.sinks.postgres.database import execute
from tidemark.streaming.core.effects import Recall


@dataclass(frozen=True, slots=True)
class KeptRecall:
    """The edges of `writer` in `epoch` from offset `next` to `last` of that partition of the facts topic are to be
    produced again; `gone` counts offsets before `next` that could not be read.
    """

    number: int
    stream: str
    writer: str
    epoch: int
    partition: int
    next: int
    last: int
    gone: int


@dataclass(frozen=True, slots=True)
class RecallStatus:
    """One that is not through, for people: `gone` offsets could not be read, or `problem` hinders it, `since` then."""

    stream: str
    writer: str
    partition: int
    gone: int
    problem: str | None
    since: datetime


def add_recalls(connection: Connection, recalls: Iterable[tuple[str, Recall]]) -> None:
    """By stream."""
    execute(
        connection,
        "insert into tidemark.recalls (stream, writer, epoch, partition, next, last)"
        " select * from unnest(%s::text[], %s::text[], %s::bigint[], %s::int[], %s::bigint[], %s::bigint[])",
        ((stream, it.writer, it.epoch, it.partition, it.first, it.last) for stream, it in recalls),
    )


def due(connection: Connection) -> list[KeptRecall]:
    # What a writer's later epoch settled, or its retirement, needs no record any more: it would be a zombie.
    connection.execute(
        "delete from tidemark.recalls r using tidemark.stream_positions p"
        " where (p.stream, p.writer) = (r.stream, r.writer) and (p.epoch > r.epoch or p.retired)"
    )
    rows = connection.execute(
        "select number, stream, writer, epoch, partition, next, last, gone from tidemark.recalls"
        " where next <= last order by problem is not null, number"
    )
    return [KeptRecall(*row) for row in rows]


def note(connection: Connection, recall: KeptRecall, problem: str | None) -> None:
    if recall.next > recall.last and not recall.gone:
        connection.execute("delete from tidemark.recalls where number = %s", (recall.number,))
        return
    connection.execute(
        "update tidemark.recalls set next = %s, gone = %s, problem = %s where number = %s",
        (recall.next, recall.gone, problem, recall.number),
    )


def give_up(connection: Connection, why: str) -> None:
    connection.execute(
        "update tidemark.recalls set gone = gone + last - next + 1, next = last + 1, problem = %s where next <= last",
        (why,),
    )


def unfinished(connection: Connection) -> list[RecallStatus]:
    rows = connection.execute(
        "select stream, writer, partition, gone, problem, since from tidemark.recalls order by number"
    )
    return [RecallStatus(*row) for row in rows]
