"""The epochs in which a database is told."""

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from tidemark.common.errors import BadSetting
from tidemark.sources.relay import epochs, queries
from tidemark.sources.relay.epochs import StreamEpoch
from tidemark.sources.relay.relay import OUTBOX
from tidemark.sources.transactions import ServerHistory, read_server_history
from tidemark.streaming.values.intervals import NO_INTERVALS

XID = "pg_current_xact_id()::xid"


@pytest.fixture
def sql(ready: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(ready, autocommit=True) as connection:
        connection.execute("select tidemark.create_stream('orders')")
        connection.execute("select tidemark.create_stream('history', 'backward', -7)")
        yield connection


def begun(sql: psycopg.Connection, database: str = "one", server: str = "1") -> list[StreamEpoch]:
    return epochs.begin(sql, ServerHistory(database, server), "shop")


def test_relays_that_follow_each_other_go_on_in_one_epoch(sql: psycopg.Connection) -> None:
    """Two at once begin the same; once Kafka has the JOIN nobody says it again."""
    first, second = begun(sql), begun(sql)
    assert first == second
    assert [len(each.join_records()) for each in first] == [1, 1]
    epochs.store_acknowledged(sql, first)
    again = begun(sql)
    assert [each.join_records() for each in again] == [[], []]
    assert [each.writers["shop"].epoch for each in again] == [each.writers["shop"].epoch for each in first]


def test_a_first_join_stands_before_the_first_id(sql: psycopg.Connection) -> None:
    """Of what was there before the stream was made it says that nobody has told it."""
    [orders], [history] = (each.join_records() for each in begun(sql))
    assert (orders.stream, orders.id, orders.unseen) == ("orders", 0, False)
    assert (history.stream, history.id, history.unseen) == ("history", -7, True)
    assert orders.timeline is not None
    assert (orders.timeline.database, orders.timeline.after) == ("one", None)


def test_another_history_begins_a_higher_epoch(sql: psycopg.Connection) -> None:
    """Its JOIN names the one before, at the floor, which says nothing of what is unseen."""
    before = begun(sql)
    epochs.store_acknowledged(sql, before)
    sql.execute("select setval('tidemark.append_ids_2', -9)")
    sql.execute("update tidemark.append_progress set floor = -9 where number = 2")
    after = begun(sql, "two")
    joins = [(old.join_records()[0], new.join_records()[0]) for old, new in zip(before, after, strict=True)]
    assert all(new.epoch > old.epoch for old, new in joins)
    assert [each.timeline.after for each in after] == [each.timeline.start for each in before]
    record = joins[1][1]
    assert (record.id, record.unseen) == (-9, False)


def test_a_join_that_may_not_have_arrived_is_not_followed(sql: psycopg.Connection) -> None:
    """The next epoch says what the broken one would have said, and what is unseen stays so."""
    before = begun(sql)
    after = begun(sql, "two")
    assert [each.timeline.after for each in after] == [None, None]
    assert [each.timeline.start for each in after] == [each.timeline.start for each in before]
    assert all(new.writers["shop"].epoch > old.writers["shop"].epoch for old, new in zip(before, after, strict=True))
    assert after[1].join_records()[0].unseen


def test_a_server_that_began_later_is_told_again_how_far_it_was(sql: psycopg.Connection) -> None:
    """Its disk may be older. At first nothing was told."""
    before = begun(sql)
    assert [each.join_records()[0].published for each in before] == [0, 0]
    epochs.store_acknowledged(sql, before)
    orders, history = (each.stream for each in before)
    sql.execute("select setval('tidemark.append_ids_1', 5), setval('tidemark.append_ids_2', -9)")
    for upto in (5, 4):
        queries.store_heads(sql, {orders: upto, history: 9})
    assert begun(sql) == [
        replace(old, published_bound=upto, writers=new.writers)
        for old, new, upto in zip(before, begun(sql), (5, 9), strict=True)
    ]
    after = begun(sql, server="2")
    assert [(each.join_records()[0].id, each.join_records()[0].published) for each in after] == [(0, 5), (-7, -9)]
    assert [each.timeline.after for each in after] == [each.timeline.start for each in before]


def test_what_was_noted_goes_with_the_rows_below_the_floor(sql: psycopg.Connection) -> None:
    """All but the last."""
    (orders, _) = begun(sql)
    for upto in (1, 3, 5, 8):
        queries.store_heads(sql, {orders.stream: upto})
    for old, new in ((0, 3), (3, 8)):
        assert queries.raise_floor(sql, orders.stream, orders.version, old, new, NO_INTERVALS)
    rows = sql.execute("select upto from tidemark.append_sent where number = %s", [orders.stream.number]).fetchall()
    assert rows == [(8,)]


def test_a_writer_joins_at_the_floor_where_it_is_found(sql: psycopg.Connection) -> None:
    """Whoever finds it first says where; in another history all join anew, the database first."""
    epochs.store_acknowledged(sql, begun(sql))
    sql.execute("select setval('tidemark.append_ids_1', 9)")
    sql.execute(f"update tidemark.append_progress set floor = 5, written_by = {XID} where number = 1".encode())
    found = epochs.begin(sql, ServerHistory("one", "1"), "shop", {1: {"web": 0}})
    sql.execute(f"update tidemark.append_progress set floor = 9, written_by = {XID} where number = 1".encode())
    again = epochs.begin(sql, ServerHistory("one", "1"), "shop", {1: {"web": 0, "till": 0}})
    assert [(each.writer, each.id, each.unseen) for each in found[0].join_records()] == [("web", 5, False)]
    assert [(each.writer, each.id) for each in again[0].join_records()] == [("till", 9), ("web", 5)]
    assert again[0].version > found[0].version
    assert found[1] == again[1]
    epochs.store_acknowledged(sql, again)
    turned = begun(sql, "two")
    assert [(each.writer, each.id) for each in turned[0].join_records()] == [("shop", 9), ("till", 9), ("web", 9)]


def test_the_database_may_be_named_as_a_writer(sql: psycopg.Connection) -> None:
    """It is the same one: its IDs are held by the locks of both names."""
    told = begun(sql)[0]
    assert told.kafka_name("shop") == told.kafka_name("") == told.kafka_name("*") == "shop"
    assert len(told.writers["shop"].lock_keys) == 2


def test_a_database_keeps_its_name(sql: psycopg.Connection) -> None:
    """Under another one its facts would come twice, from two writers."""
    begun(sql)
    with pytest.raises(BadSetting, match="stream orders of this database was published as 'shop', not as 'store'"):
        epochs.begin(sql, ServerHistory("one", "1"), "store")


def test_a_table_that_was_made_anew_is_another_history(sql: psycopg.Connection) -> None:
    """A restore into the same database shows by it; a server that was only restarted has the same."""
    before = read_server_history(sql, "here", OUTBOX)
    assert before == read_server_history(sql, "here", OUTBOX)
    sql.execute("create table copy (like tidemark.append_outbox including all)")
    sql.execute("drop table tidemark.append_outbox")
    sql.execute("alter table copy set schema tidemark")
    sql.execute("alter table tidemark.copy rename to append_outbox")
    assert before != read_server_history(sql, "here", OUTBOX)


def test_a_row_that_no_relay_wrote_begins_a_start(sql: psycopg.Connection) -> None:
    """A restore of the rows alone, or a replication, put it there. Once: then the row is a relay's."""
    before = begun(sql)
    epochs.store_acknowledged(sql, before)
    sql.execute("create temporary table kept as table tidemark.append_progress")
    sql.execute("delete from tidemark.append_progress")
    sql.execute("insert into tidemark.append_progress select * from kept")
    after = begun(sql)
    assert [each.regression for each in after] == ["the rows were written by a restore or a replication"] * 2
    assert [each.timeline.after for each in after] == [each.timeline.start for each in before]
    epochs.store_acknowledged(sql, after)
    assert [each.regression for each in begun(sql)] == ["", ""]
