"""The queries of the backing table, on a real Postgres."""

from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from tests.examples import SHARING
from tidemark.sinks.reader.table import Range, Table
from tidemark.streaming.values.direction import is_beyond

NAMES = ("a", "b", "c")
WRITERS = (*NAMES, None)
NULL = ""  # in the place of a writer: rows without one
TABLE = Table("facts", writer="instance", then=("ordinal",))

spans = st.builds(
    lambda whose, prev, width: (whose, prev, prev + width),
    st.one_of(
        st.sampled_from((*NAMES, NULL)),
        st.tuples(st.sampled_from(NAMES)),
        st.frozensets(st.sampled_from(NAMES), max_size=2),
    ),
    st.integers(0, 12),
    st.integers(1, 12),
)


def of(whose: "str | tuple[str] | frozenset[str]", prev: int, id: int) -> Range:
    """A tuple: of that writer and of rows without one."""
    match whose:
        case "":
            return Range(None, prev, id, has_null=True)
        case str():
            return Range(whose, prev, id)
        case (writer,):
            return Range(writer, prev, id, has_null=True)
        case _:
            return Range(None, prev, id, whose)


def is_of(who: str | None, span: Range) -> bool:
    if who is None:
        return span.has_null or span.writer is None
    return who == span.writer if span.writer or span.has_null else who not in span.besides


@settings(max_examples=60, suppress_health_check=SHARING)
@given(
    facts=st.dictionaries(st.integers(1, 24), st.tuples(st.sampled_from(WRITERS), st.integers(1, 3)), max_size=24),
    wanted=st.lists(spans, min_size=1, max_size=5),
    limit=st.one_of(st.none(), st.integers(1, 9)),
    sign=st.sampled_from((1, -1)),
)
def test_rows_of_all_ranges_come_in_order_and_once(
    sql_of_facts: psycopg.Connection, facts: Any, wanted: Any, limit: int | None, sign: int
) -> None:
    """Whatever the ranges, also where they overlap, and rows without a writer; a limit keeps the first rows by ID."""
    rows = [(sign * id, who, n) for id, (who, count) in facts.items() for n in range(count)]
    sql_of_facts.execute("truncate facts")
    sql_of_facts.cursor().executemany("insert into facts values (%s, %s, %s)", rows)
    ranges = [of(whose, sign * prev, sign * id) for whose, prev, id in wanted]
    found = sql_of_facts.execute(TABLE.select(ranges, limit)).fetchall()
    truth = sorted(
        (
            row
            for row in rows
            if any(
                is_of(row[1], span) and is_beyond(row[0], span.prev) and not is_beyond(row[0], span.id)
                for span in ranges
            )
        ),
        key=lambda row: (abs(row[0]), row[2]),
    )
    assert [id for id, _, _ in found] == [id for id, _, _ in truth][:limit]
    whole = {id for id, _, _ in found[: None if limit is None else -1]} - ({found[-1][0]} if limit and found else set())
    assert [row for row in found if row[0] in whole] == [row for row in truth if row[0] in whole]
    if limit is None:
        assert found == truth


@pytest.fixture
def sql_of_facts(database: str) -> Any:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create table facts (stream_id bigint, instance text, ordinal int)")
        connection.execute("create index on facts (instance, stream_id)")
        yield connection


@pytest.mark.parametrize("then", [(), ("ordinal",)])
def test_page_costs_its_rows_however_much_is_left(sql_of_facts: psycopg.Connection, then: tuple[str, ...]) -> None:
    """Of forty writers that are all far behind, each at another place, a page reads its rows and one more of each."""
    sql_of_facts.execute("insert into facts select n, 'w' || n % 40, 0 from generate_series(1, 40000) n")
    sql_of_facts.execute("analyze facts")
    ranges = [Range(f"w{n}", 100 * n, 40_000) for n in range(40)]
    select = Table("facts", writer="instance", then=then).select(ranges, 100)
    explained = sql_of_facts.execute(sql.SQL("explain (analyze, format json) ") + select).fetchone()
    assert explained is not None
    assert scanned(explained[0][0]["Plan"]) <= 100 + len(ranges)


def scanned(plan: Any) -> float:
    """Rows that were read out of the table, and not out of another step."""
    below = plan.get("Plans", [])
    own = 0 if below else plan["Actual Rows"] * plan["Actual Loops"]
    return float(own + sum(map(scanned, below)))
