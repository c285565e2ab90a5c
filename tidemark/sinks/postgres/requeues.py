"""The table of requeues: Kafka offsets of deferred records, until the pipeline has produced the records again.

The batch that decides on a requeue writes its row. The row is deleted once all of its records are produced. If Kafka no
longer has some of them, the row stays for operators, until a later epoch or the retirement of its writer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from tidemark.common.postgres_session import Connection, PostgresSession, fetch_all
from tidemark.sinks.postgres.database import execute
from tidemark.sinks.postgres.positions import forget_settled_requeues
from tidemark.streaming.core.effects import RequeuedRange


@dataclass(frozen=True, slots=True)
class PendingRequeue:
    """Offsets `next` to `last` of a partition of the facts topic: edges of `writer` in `epoch` to produce again.

    `gone` is the number of offsets before `next` that Kafka no longer had.
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
class RequeueStatus:
    """An unfinished requeue: Kafka no longer had `gone` of its offsets, or `problem` prevents it."""

    stream: str
    writer: str
    partition: int
    gone: int
    problem: str | None
    since: datetime


def add_requeues(connection: Connection, requeues: Iterable[tuple[str, RequeuedRange]]) -> None:
    """Add requeues, each with its stream."""
    execute(
        connection,
        "insert into tidemark.recalls (stream, writer, epoch, partition, next, last)"
        " select * from unnest(%s::text[], %s::text[], %s::bigint[], %s::int[], %s::bigint[], %s::bigint[])",
        ((stream, r.writer, r.epoch, r.partition, r.first, r.last) for stream, r in requeues),
    )


def pending_requeues(connection: Connection) -> list[PendingRequeue]:
    """Requeues with records still to produce, oldest first, those with a problem last."""
    forget_settled_requeues(connection)
    return fetch_all(
        connection,
        PendingRequeue,
        "select number, stream, writer, epoch, partition, next, last, gone from tidemark.recalls"
        " where next <= last order by problem is not null, number",
    )


def note_requeue(connection: Connection, requeue: PendingRequeue, problem: str | None) -> None:
    """Store the progress of a requeue; delete it if it is complete."""
    if requeue.next > requeue.last and not requeue.gone:
        connection.execute("delete from tidemark.recalls where number = %s", (requeue.number,))
        return
    connection.execute(
        "update tidemark.recalls set next = %s, gone = %s, problem = %s where number = %s",
        (requeue.next, requeue.gone, problem, requeue.number),
    )


def give_up_requeues(connection: Connection, why: str) -> None:
    """Mark all remaining offsets as gone."""
    connection.execute(
        "update tidemark.recalls set gone = gone + last - next + 1, next = last + 1, problem = %s where next <= last",
        (why,),
    )


def unfinished_requeues(session: PostgresSession) -> list[RequeueStatus]:
    """Oldest first."""
    return session.fetch_all(
        RequeueStatus,
        "select stream, writer, partition, gone, problem, since from tidemark.recalls order by number",
    )
