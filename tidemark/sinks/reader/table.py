"""The queries of the backing table of a stream, and pages of rows that never divide a fact. No sockets.

SQL is built with `psycopg.sql`, so names are always quoted.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import LiteralString

from psycopg import sql

from tidemark.sinks.reader.requests import Answer, Request, Row, RunSql, fetch_rows
from tidemark.streaming.values.direction import farther, is_beyond, nearer


@dataclass(frozen=True, slots=True)
class Table:
    """Describes the table that contains the facts of a stream.

    The table needs an index on `id`, or on `writer` and `id` for the vector mode. Without an index, each query reads
    the whole table.

    Attributes:
        name: the name of the table, with or without a schema (`app.events`).
        id: the name of the column with the stream ID.
        writer: the name of the column with the writer's name; None if there is no such column. Needed in vector mode.
        columns: the names of the columns to read; empty: all columns. `id` and `writer` are always read.
        then: the names of the columns that order the rows of one ID; empty: no order.
        where: an SQL condition for the rows that the reader gets, such as `"kind = 'sale'"`; None: all rows. The
            condition is not quoted: it must not contain users' input.
    """

    name: str
    id: str = "stream_id"
    writer: str | None = None
    columns: Sequence[str] = ()
    then: Sequence[str] = ()
    where: LiteralString | None = None

    def select(self, ranges: "Sequence[Range]", limit: int | None = None) -> sql.Composed:
        """Return the query of the rows of some ranges, ordered by ID away from 0. Each row is returned once.

        Each range is a branch of a union. An index returns each branch in order, so Postgres merges the branches and
        stops at the limit. With one condition for all ranges, each page would read and sort all rows.

        Args:
            ranges: at least one range; all in the same direction. The ranges may overlap.
            limit: the largest number of rows; None: no limit.
        """
        by_id = sql.Identifier(self.id) + sql.SQL(" desc" if ranges[0].id < 0 else "")
        limit_clause = sql.SQL("" if limit is None else " limit {}").format(limit)
        branches = sql.SQL(" union all ").join(
            sql.SQL("(select {} from {} where {} order by {}{})").format(
                self._columns(*self.then),
                self._identifier(),
                self._row_condition(span, ranges[:number]),
                by_id,
                limit_clause,
            )
            for number, span in enumerate(ranges)
        )
        order = sql.SQL(", ").join([by_id, *map(sql.Identifier, self.then)])
        page = sql.SQL("select * from ({}) spans order by {}{}").format(branches, by_id, limit_clause)
        return sql.SQL("select {} from ({}) page order by {}").format(self._columns(), page, order)

    def ids(self, span: "Range", limit: int) -> sql.Composed:
        """Return the query of at most `limit` IDs in `span` that have rows, nearest to 0 first. Ignores `where`."""
        return sql.SQL("select distinct {id} from {table} where {range} order by {id}{direction} limit {limit}").format(
            id=sql.Identifier(self.id),
            table=self._identifier(),
            range=self._range_condition(span),
            direction=sql.SQL(" desc" if span.id < 0 else ""),
            limit=limit,
        )

    def count_of_writer(self, span: "Range") -> sql.Composed:
        """Return the query that counts the facts in `span`. Ignores `where`. Needs the column `writer`.

        The query returns one row: `have_writer` counts the facts of the writer of `span`, and `have_none` the facts
        whose writer is NULL.
        """
        null = Range(None, span.prev, span.id, has_null=True)
        count = "(select count(distinct {}) from {} where {})"
        of_writer, of_null = (
            sql.SQL(count).format(sql.Identifier(self.id), self._identifier(), self._range_condition(part))
            for part in (span, null)
        )
        return sql.SQL("select {} as have_writer, {} as have_none").format(of_writer, of_null)

    def _row_condition(self, span: "Range", others: "Sequence[Range]") -> sql.Composed:
        """The condition for rows of `span` that are not rows of `others`, combined with the table's `where` (AND)."""
        conditions = self._range_condition(span, others)
        return conditions if self.where is None else sql.SQL("{} and ({})").format(conditions, sql.SQL(self.where))

    def _range_condition(self, span: "Range", others: "Sequence[Range]" = ()) -> sql.Composed:
        """The condition for rows of `span` that are not rows of `others`."""
        bounds = sql.SQL("{id} < {prev} and {id} >= {last}" if span.id < 0 else "{id} > {prev} and {id} <= {last}")
        conditions = [bounds.format(id=sql.Identifier(self.id), prev=span.prev, last=span.id)]
        if self.writer is not None and span.writer is not None:
            of_writer = "({} = {} or {} is null)" if span.has_null else "{} = {}"
            column = sql.Identifier(self.writer)
            conditions.append(sql.SQL(of_writer).format(column, span.writer, *([column] if span.has_null else [])))
        elif self.writer is not None and span.has_null:
            conditions.append(sql.SQL("{} is null").format(sql.Identifier(self.writer)))
        elif self.writer is not None and span.besides:
            others_only = sql.SQL("({0} is null or {0} <> all({1}))")
            conditions.append(others_only.format(sql.Identifier(self.writer), sorted(span.besides)))
        # The condition of another range is null for a row without a writer.
        conditions += [
            sql.SQL("({}) is not true").format(self._range_condition(other)) for other in others if span.overlaps(other)
        ]
        return sql.SQL(" and ").join(conditions)

    def _columns(self, *more: str) -> sql.Composable:
        if not self.columns:
            return sql.SQL("*")
        needed = [self.id, *([self.writer] if self.writer else []), *self.columns, *more]
        return sql.SQL(", ").join(map(sql.Identifier, dict.fromkeys(needed)))

    def _identifier(self) -> sql.Identifier:
        return sql.Identifier(*self.name.split("."))


@dataclass(frozen=True, slots=True)
class Range:
    """A set of rows: IDs in `(prev, id]`, of one writer or of many.

    Attributes:
        writer: the writer of the rows. None: the rows of all writers except `besides`, and the rows whose writer is
            NULL; if `has_null`, only the rows whose writer is NULL.
        prev: the range begins after this ID.
        id: the last ID of the range.
        besides: the names of writers whose rows are not part of the range, if `writer` is None.
        has_null: with a `writer`: the rows whose writer is NULL are part of the range too.
    """

    writer: str | None
    prev: int
    id: int
    besides: frozenset[str] = frozenset()
    has_null: bool = False

    def contains(self, id: int) -> bool:
        """Whether the ID is beyond `prev` and not beyond the end of the range. Ignores the writer."""
        return is_beyond(id, self.prev) and not is_beyond(id, self.id)

    def overlaps(self, other: "Range") -> bool:
        """Whether a row may belong to both ranges."""
        if not (is_beyond(self.id, other.prev) and is_beyond(other.id, self.prev)):
            return False
        if self._includes_null and other._includes_null:
            return True
        if self.writer is None or other.writer is None:
            if self._is_null_only or other._is_null_only:
                return False
            return self.writer not in other.besides and other.writer not in self.besides
        return self.writer == other.writer

    @property
    def _includes_null(self) -> bool:
        return self.writer is None or self.has_null

    @property
    def _is_null_only(self) -> bool:
        return self.writer is None and self.has_null

    def after(self, id: int) -> "Range | None":
        """Return the part of the range beyond `id`; None if this part is empty."""
        return replace(self, prev=farther(self.prev, id)) if is_beyond(self.id, id) else None

    def upto(self, id: int) -> "Range | None":
        """Return the part of the range up to `id`; None if this part is empty."""
        return replace(self, id=nearer(self.id, id)) if is_beyond(id, self.prev) else None


@dataclass(frozen=True, slots=True)
class TablePage:
    """The first rows of some ranges, sorted across all ranges by the magnitude of the ID, ascending.

    `unread` has the parts of the ranges that are still to be read; empty after the last page.
    """

    rows: list[Row]
    unread: list[Range]


def read_table_page(table: Table, ranges: Sequence[Range], limit: int) -> Generator[Request, Answer, TablePage]:
    """Read the first page of some ranges: at most `limit` rows, but a fact with more rows is a page by itself.

    `ranges` has at least one range; all ranges have the same direction.
    """
    page = yield from fetch_rows(RunSql("source", table.select(ranges, limit + 1), table.id))
    if len(page) <= limit:
        return TablePage(page, [])
    next_id = page[-1][table.id]
    rows_of_facts = [row for row in page if row[table.id] != next_id]
    if not rows_of_facts:
        before = next_id + (1 if next_id < 0 else -1)
        fact = [replace(span, prev=before, id=next_id) for span in ranges if span.contains(next_id)]
        rows_of_facts = yield from fetch_rows(RunSql("source", table.select(fact), table.id))
    last = rows_of_facts[-1][table.id]
    return TablePage(rows_of_facts, [rest for span in ranges if (rest := span.after(last))])


def absent_ranges(prev: int, id: int, present_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The IDs of `(prev, id]` that are not in `present_ids` (sorted away from 0), as inclusive pairs (lower,
    higher)."""
    sign, absent, low = -1 if id < 0 else 1, list[tuple[int, int]](), abs(prev)
    for high in (*map(abs, present_ids), abs(id) + 1):
        if high - low > 1:
            first, last = sorted((sign * (low + 1), sign * (high - 1)))
            absent.append((first, last))
        low = high
    return absent


def count_ids(ranges: Sequence[Range]) -> int:
    """The total number of IDs of the ranges."""
    return sum(abs(span.id) - abs(span.prev) for span in ranges)
