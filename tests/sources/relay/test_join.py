"""The epochs in which a database is told."""

from collections.abc import Iterator

import psycopg
import pytest

from tidemark.sources.relay import join
from tidemark.sources.relay.join import Told
from tidemark.streaming.errors import BadSetting


@pytest.fixture
def sql(ready: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(ready, autocommit=True) as connection:
        connection.execute("select tidemark.create_stream('orders')")
        connection.execute("select tidemark.create_stream('history', 'backward', -7)")
        yield connection


def begun(sql: psycopg.Connection, database: str = "one") -> list[Told]:
    return join.begin(sql, database, "shop")


def test_relays_that_follow_each_other_go_on_in_one_epoch(sql: psycopg.Connection) -> None:
    """Two at once begin the same; once Kafka has the JOIN nobody says it again."""
    first, second = begun(sql), begun(sql)
    assert first == second
    assert not any(each.joined for each in first)
    join.joined(sql, first)
    assert [each.joined for each in begun(sql)] == [True, True]
    assert [each.epoch for each in begun(sql)] == [each.epoch for each in first]


def test_a_first_join_stands_before_the_first_id(sql: psycopg.Connection) -> None:
    """Of what was there before the stream was made it says that nobody has told it."""
    orders, history = (each.join("shop") for each in begun(sql))
    assert (orders.stream, orders.id, orders.unseen) == ("orders", 0, False)
    assert (history.stream, history.id, history.unseen) == ("history", -7, True)
    assert orders.timeline is not None
    assert (orders.timeline.database, orders.timeline.after) == ("one", None)


def test_another_history_begins_a_higher_epoch(sql: psycopg.Connection) -> None:
    """Its JOIN names the one before, at the floor, which says nothing of what is unseen."""
    before = begun(sql)
    join.joined(sql, before)
    sql.execute("update tidemark.append_progress set floor = -9 where number = 2")
    after = begun(sql, "two")
    assert all(new.epoch > old.epoch and not new.joined for old, new in zip(before, after, strict=True))
    assert [each.timeline.after for each in after] == [each.timeline.start for each in before]
    record = after[1].join("shop")
    assert (record.id, record.unseen) == (-9, False)


def test_a_join_that_may_not_have_arrived_is_not_followed(sql: psycopg.Connection) -> None:
    """The next epoch says what the broken one would have said, and what is unseen stays so."""
    begun(sql)
    after = begun(sql, "two")
    assert [each.timeline.after for each in after] == [None, None]
    assert after[1].join("shop").unseen


def test_a_database_keeps_its_name(sql: psycopg.Connection) -> None:
    """Under another one its facts would come twice, from two writers."""
    begun(sql)
    with pytest.raises(BadSetting, match="stream orders of this database was told as 'shop', not as 'store'"):
        join.begin(sql, "one", "store")


def test_a_table_that_was_made_anew_is_another_history(sql: psycopg.Connection) -> None:
    """A restore into the same database shows by it; a server that was only restarted has the same."""
    before = join.history(sql, "here")
    assert before == join.history(sql, "here")
    sql.execute("create table copy (like tidemark.append_outbox including all)")
    sql.execute("drop table tidemark.append_outbox")
    sql.execute("alter table copy set schema tidemark")
    sql.execute("alter table tidemark.copy rename to append_outbox")
    assert before != join.history(sql, "here")
