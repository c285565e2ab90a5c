"""What the bridge asks of Synapse's database, on a real server."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tidemark.common.errors import Refused
from tidemark.sources.synapse import tables
from tidemark.sources.synapse.tables import STREAMS

RULES = STREAMS["push_rules"]
TABLES = """
    create sequence push_rules_stream_sequence;
    create table push_rules_stream (stream_id bigint, instance_name text, user_id text);
"""


@pytest.fixture
def sql(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(TABLES)
        yield connection


def test_sequence_that_was_never_called_has_given_out_what_lies_below_its_begin(sql: psycopg.Connection) -> None:
    """As a port script leaves it; the first ID that is taken is one beyond."""
    assert tables.read_head(sql, RULES) == 0
    sql.execute("alter sequence push_rules_stream_sequence restart with 51")
    assert tables.read_head(sql, RULES) == 50
    assert tables.read_facts(sql, RULES, 0, 100) == (50, [])
    sql.execute("select nextval('push_rules_stream_sequence')")
    assert (tables.read_head(sql, RULES), tables.read_facts(sql, RULES, 0, 100)[0]) == (51, 51)
    sql.execute("select setval('push_rules_stream_sequence', 70, false)")
    assert tables.read_head(sql, RULES) == 69


def test_rows_that_are_hidden_are_an_error(sql: psycopg.Connection, database: str) -> None:
    """Row level security without a policy hides every row, by itself without an error; ours names the privilege."""
    sql.execute("insert into push_rules_stream values (1, 'misc1', '@alice:one.test')")
    sql.execute("select nextval('push_rules_stream_sequence')")
    sql.execute("create role synapse_filtered login password 'filtered'")
    try:
        sql.execute("grant pg_read_all_data, pg_read_all_stats to synapse_filtered")
        dsn = make_conninfo(database, user="synapse_filtered", password="filtered")
        with tables.synapse_session(dsn) as session:
            with session.use() as connection:
                assert [fact.id for fact in tables.read_facts(connection, RULES, 0, 10)[1]] == [1]
            sql.execute("alter table push_rules_stream enable row level security")
            for ask in (tables.read_facts, tables.read_marks):
                with pytest.raises(Refused, match=r"push_rules_stream.*BYPASSRLS"), session.use() as connection:
                    ask(connection, RULES, 0, 10)
            sql.execute("alter role synapse_filtered bypassrls")
            with session.use() as connection:
                assert [fact.id for fact in tables.read_marks(connection, RULES, 0, 10)] == [1]
    finally:
        sql.execute("drop role synapse_filtered")


def test_another_row_of_the_same_id_is_another_fact(sql: psycopg.Connection) -> None:
    """Also where the two say the same: then the transactions that wrote them differ."""
    sql.execute("insert into push_rules_stream values (1, 'misc1', '@alice:one.test')")
    (before,) = tables.read_marks(sql, RULES, 0, 10)
    assert tables.read_facts(sql, RULES, 0, 10)[1][0].marks == before.marks
    sql.execute("delete from push_rules_stream")
    sql.execute("insert into push_rules_stream values (1, 'misc1', '@alice:one.test')")
    (after,) = tables.read_marks(sql, RULES, 0, 10)
    assert (before.id, before.writer) == (after.id, after.writer)
    assert before.marks != after.marks


def test_sequence_that_does_not_give_ids_in_order_is_unfit(sql: psycopg.Connection) -> None:
    """A cache hands them to connections in portions."""
    assert tables.read_sequence_problem(sql, RULES) == ""
    sql.execute("alter sequence push_rules_stream_sequence cache 20")
    assert "alter sequence push_rules_stream_sequence increment 1 cache 1 no cycle" in tables.read_sequence_problem(
        sql, RULES
    )
