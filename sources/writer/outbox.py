"""The outbox table: reads the facts of ended transactions, and deletes those that Kafka has."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from tidemark.sources.writer.chain import SettledSpan
from tidemark.sources.writer.records import OutboxFact, RecordBuilder
from tidemark.streaming.direction import Direction
from tidemark.streaming.postgres_session import Connection

ROWS_AT_ONCE = 500
"""Rows that are read of one span at a time; the last fact is read to its end also beyond that."""


@dataclass(frozen=True, slots=True)
class OutboxFacts:
    """The facts of a span, in order; `whole` unless there may be more behind the last one."""

    facts: Sequence[OutboxFact]
    whole: bool


def read(connection: Connection, builder: RecordBuilder, spans: Sequence[SettledSpan]) -> list[OutboxFacts]:
    """The facts of each span. Its transactions must all have ended: then the answer is final."""
    lows, highs = _signed(builder, spans)
    order = "asc" if builder.towards is Direction.FORWARD else "desc"
    rows = connection.execute(
        f"""
        select number, abs(found.id), found.ordinal, found.body::text
        from unnest(%s::bigint[], %s::bigint[]) with ordinality as span (low, high, number)
        cross join lateral (
            select id, ordinal, body from tidemark.outbox
            where instance = %s and epoch = %s and stream = %s and id between low and high
            order by id {order} fetch first {ROWS_AT_ONCE} rows with ties
        ) as found
        order by 1, 2, 3
        """.encode(),
        [lows, highs, builder.instance, builder.epoch, builder.stream],
    ).fetchall()
    by_span = {number: [*of] for number, of in groupby(rows, key=itemgetter(0))}
    return [_found(by_span.get(number, [])) for number in range(1, len(spans) + 1)]


def delete(connection: Connection, builder: RecordBuilder, spans: Sequence[SettledSpan]) -> None:
    """Kafka has acknowledged all facts of `spans`."""
    # One statement for each: a join with all of them begins with the table where that was empty when last looked at.
    connection.cursor().executemany(
        "delete from tidemark.outbox where instance = %s and epoch = %s and stream = %s and id between %s and %s",
        [
            (builder.instance, builder.epoch, builder.stream, low, high)
            for low, high in zip(*_signed(builder, spans), strict=True)
        ],
    )


def _found(rows: Sequence[tuple[int, int, int, str]]) -> OutboxFacts:
    facts = [OutboxFact(id, tuple(body for *_, body in of)) for id, of in groupby(rows, key=itemgetter(1))]
    return OutboxFacts(facts, whole=len(rows) < ROWS_AT_ONCE)


def _signed(builder: RecordBuilder, spans: Sequence[SettledSpan]) -> tuple[list[int], list[int]]:
    """The lowest and the highest ID of each, as the table has them."""
    if builder.towards is Direction.FORWARD:
        return [span.prev + 1 for span in spans], [span.id for span in spans]
    return [-span.id for span in spans], [-span.prev - 1 for span in spans]
