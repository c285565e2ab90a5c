"""Reads ranges of a table in portions, never dividing a fact. No sockets: see `asks`."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from tidemark.sinks.reader.asks import Answer, Ask, Row, Sql
from tidemark.sinks.reader.ledger import rows
from tidemark.sinks.reader.table import Range, Table


@dataclass(frozen=True, slots=True)
class Page:
    """The first rows of some ranges, ascending over all of them, and what of the ranges is `left` to be read."""

    rows: list[Row]
    left: list[Range]


def page(table: Table, ranges: Sequence[Range], limit: int) -> Generator[Ask, Answer, Page]:
    """At most `limit` rows, but all rows of a fact: a fact that has more of them makes a page of its own."""
    found = yield from rows(Sql("source", table.select(ranges, limit + 1)))
    if len(found) <= limit:
        return Page(found, [])
    following = found[-1][table.id]
    whole = [row for row in found if row[table.id] != following]
    if not whole:
        before = following + (1 if following < 0 else -1)
        fact = [replace(span, prev=before, id=following) for span in ranges if span.holds(following)]
        whole = yield from rows(Sql("source", table.select(fact)))
    last = whole[-1][table.id]
    return Page(whole, [left for span in ranges if (left := span.after(last))])
