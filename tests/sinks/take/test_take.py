"""`tidemark_reader.take`: ranges of IDs in the reader's own transaction."""

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.sinks.take.given import Positioned
from tidemark.sinks.reader_database import StreamUpdate, install, publish


def test_a_reader_gets_each_id_once(readers: Positioned) -> None:
    readers.publish(5)
    assert readers.take() == (0, 5, [])
    assert readers.take() is None
    readers.publish(7)
    assert readers.take() == (5, 7, [])


def test_a_range_has_at_most_so_many_ids(readers: Positioned) -> None:
    readers.publish(5)
    assert readers.take(most=2) == (0, 2, [])
    assert readers.take(most=2) == (2, 4, [])
    assert readers.take(most=2) == (4, 5, [])


def test_a_rollback_gives_the_range_back(readers: Positioned) -> None:
    readers.publish(5)
    with readers.sql.transaction(force_rollback=True):
        assert readers.take() == (0, 5, [])
    assert readers.take() == (0, 5, [])


def test_two_calls_in_one_transaction_get_two_ranges(readers: Positioned) -> None:
    readers.publish(5)
    with readers.sql.transaction():
        assert readers.take(most=3) == (0, 3, [])
        assert readers.take(most=3) == (3, 5, [])
    assert readers.take() is None


@pytest.mark.parametrize("wait", [True, False])
def test_several_streams_are_read_in_one_transaction(readers: Positioned, wait: bool) -> None:
    """Two copies take both streams, and a third of their transactions is rolled back: each ID has its effect once, with
    the IDs of the other stream that were taken with it. Copies that do not wait may take them in any order."""
    readers.sql.execute("create table facts (stream text, id bigint, of bigint)")
    streams = ["orders", "payments"]
    for stream in streams:
        readers.publish(1, stream)

    def copy(seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(readers.dsn, autocommit=True) as sql:
            while sql.execute("select count(*) from facts").fetchone() != (200,):
                with suppress(ZeroDivisionError), sql.transaction():
                    for stream in streams if wait else chance.sample(streams, 2):
                        taken = readers.take(stream, "ledger", sql=sql, most=7, wait=wait)
                        if taken is not None:
                            sql.execute(
                                "insert into facts select %s, id, txid_current() from generate_series(%s+1, %s) as id",
                                [stream, *taken[:2]],
                            )
                    if chance.random() < 1 / 3:
                        raise ZeroDivisionError

    with ThreadPoolExecutor(2) as pool:
        copies = [pool.submit(copy, seed) for seed in (1, 2)]
        for linear in range(10, 101, 10):
            for stream in streams:
                readers.publish(linear, stream)
        for done in copies:
            done.result(120)
    for stream in streams:
        ids = readers.sql.execute("select id from facts where stream = %s order by id", [stream]).fetchall()
        assert ids == [(id,) for id in range(1, 101)]
    both = readers.sql.execute(
        "select count(*) from (select from facts group by of having count(distinct stream) = 2) as both_streams"
    ).fetchone()
    assert both is not None
    assert both[0] > 0


def test_a_second_copy_gets_no_row_while_the_place_is_busy(readers: Positioned) -> None:
    readers.publish(5)
    readers.take(most=1)
    with psycopg.connect(readers.dsn) as other:
        readers.take(sql=other, most=1)
        assert readers.take(wait=False) is None
    assert readers.take(wait=False) == (2, 5, [])


def test_a_second_copy_gets_no_row_while_a_new_reader_begins(readers: Positioned) -> None:
    readers.publish(5)
    with psycopg.connect(readers.dsn) as other:
        readers.take(sql=other, most=1)
        assert readers.take(wait=False) is None
        other.rollback()
    assert readers.take(wait=False) == (0, 5, [])
    assert readers.sql.execute("show lock_timeout").fetchone() == ("0",)


def test_a_second_copy_waits_and_goes_on_behind_the_first(readers: Positioned) -> None:
    readers.publish(5)
    got = []
    with psycopg.connect(readers.dsn, autocommit=True) as second:
        with psycopg.connect(readers.dsn) as first:
            readers.take(sql=first, most=3)
            thread = threading.Thread(target=lambda: got.append(readers.take(sql=second)))
            thread.start()
            thread.join(0.3)
            assert got == []
        thread.join(10)
    assert got == [(3, 5, [])]


def test_readers_have_places_of_their_own(readers: Positioned) -> None:
    readers.publish(5)
    readers.publish(9, "bills")
    assert readers.take("orders", "mailer") == (0, 5, [])
    assert readers.take("orders", "search") == (0, 5, [])
    assert readers.take("bills", "mailer") == (0, 9, [])


def test_a_stream_that_runs_backward(readers: Positioned) -> None:
    readers.publish(-5)
    assert readers.take(most=3) == (0, -3, [])
    assert readers.take() == (-3, -5, [])
    readers.publish(-3)
    assert readers.take() is None


@pytest.mark.parametrize(
    ("since", "first"),
    [
        (None, (0, 5, [])),
        ("beginning", (0, 5, [])),
        ("now", None),
        ("m3", (3, 5, [])),
        ("3", (3, 5, [])),
        ("m3~web.9", (3, 5, [])),
        ("m8", None),
    ],
)
def test_a_new_reader_begins_where_it_says(readers: Positioned, since: str, first: object) -> None:
    readers.publish(5, web=9)
    assert readers.take(since=since) == first
    readers.publish(10)
    assert readers.take(since="beginning") == (5 if since != "m8" else 8, 10, [])


@pytest.mark.parametrize("since", ["yesterday", "m", "m3~web", "m03", "mx", ""])
def test_a_start_that_is_no_token_is_refused(readers: Positioned, since: str) -> None:
    readers.publish(5)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="is not a token"):
        readers.take(since=since)


def test_a_start_in_the_other_direction_is_refused(readers: Positioned) -> None:
    readers.publish(5)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="runs in the other direction"):
        readers.take(since="m-3")


def test_a_stream_that_nobody_keeps_is_an_error(readers: Positioned) -> None:
    with pytest.raises(psycopg.errors.UndefinedObject, match="no positions of stream 'orders'"):
        readers.take()


@pytest.mark.parametrize("most", [0, -1, None])
def test_no_ids_cannot_be_taken(readers: Positioned, most: int) -> None:
    readers.publish(5)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="most must be 1 or more"):
        readers.take(most=most)


def test_a_position_never_goes_back(readers: Positioned) -> None:
    readers.publish(5, web=9)
    readers.publish(3, web=7)
    assert readers.sql.execute("select linear, vector, token from tidemark_reader.positions").fetchone() == (
        5,
        {"web": 9},
        "m5~web.9",
    )
    readers.publish(6, till=8)
    row = readers.sql.execute("select token from tidemark_reader.positions").fetchone()
    assert row == ("m6~till.8~web.9",)
    readers.publish(9)
    assert readers.sql.execute("select token from tidemark_reader.positions").fetchone() == ("m9",)


def test_a_token_escapes_names_as_tokens_do(readers: Positioned) -> None:
    publish(readers.session, {"orders": StreamUpdate(5, {"a~b%": 9, "B": 6})})
    assert readers.sql.execute("select token from tidemark_reader.positions").fetchone() == ("m5~B.6~a%7Eb%25.9",)


def test_a_move_is_notified(readers: Positioned) -> None:
    readers.sql.execute("listen tidemark_orders")
    readers.publish(5)
    readers.publish(5)
    readers.publish(4)
    heard = [*readers.sql.notifies(timeout=1, stop_after=2)]
    assert [it.channel for it in heard] == ["tidemark_orders"]


def test_a_login_that_fills_the_queue_of_notify_stops_no_position(readers: Positioned) -> None:
    """A session that listens in a transaction keeps what others notify in the queue. From 1 % on, positions move
    without a notification. Readers are notified again once that session has ended."""
    readers.sql.execute("drop role if exists connect_only")
    readers.sql.execute("create role connect_only login password 'connect_only'")
    stranger = make_conninfo(readers.dsn, user="connect_only", password="connect_only")
    readers.sql.execute("listen tidemark_orders")
    with psycopg.connect(stranger, autocommit=True) as listening, psycopg.connect(stranger, autocommit=True) as filling:
        listening.execute("listen x")
        listening.execute("begin")
        listening.execute("select 1")
        filling.execute("select count(pg_notify('x', n || repeat('x', 7990))) from generate_series(1, 11000) as n")
        readers.publish(5)
        readers.late(1, 2, 3)
        assert readers.take() == (0, 5, [])
        assert [*readers.sql.notifies(timeout=1)] == []
    readers.sql.execute("drop role connect_only")
    readers.publish(6)
    assert [it.channel for it in readers.sql.notifies(timeout=10, stop_after=1)] == ["tidemark_orders"]


def test_a_long_name_has_a_channel(readers: Positioned) -> None:
    readers.publish(5, "x" * 200)
    row = readers.sql.execute("select tidemark_reader.channel(%s)", ["x" * 200]).fetchone()
    assert row is not None
    assert len(row[0]) == 41


def test_one_statement_that_takes_and_selects_misses_nothing(readers: Positioned) -> None:
    """A fact is committed, and its position published, after the statement has begun: the next statement has both."""
    readers.sql.execute("create table facts (stream_id bigint)")
    readers.sql.execute("insert into facts values (1)")
    readers.publish(1)
    reading = (
        "with late_start as materialized (select pg_sleep(1)),"
        " taken as materialized (select t.* from late_start, tidemark_reader.take('orders', 'mailer') t)"
        " select stream_id from facts, taken where stream_id > low and stream_id <= high"
    )
    got: list[int] = []

    def read() -> None:
        with psycopg.connect(readers.dsn, autocommit=True) as connection:
            got.extend(id for (id,) in connection.execute(reading).fetchall())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.4)
    with readers.sql.transaction():
        readers.sql.execute("insert into facts values (2)")
    readers.publish(2)
    thread.join(10)
    read()
    assert got == [1, 2]


def test_late_facts_are_handed_out_once(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    readers.late(77, 3, 4)
    readers.publish(12)
    assert readers.take() == (10, 12, [4])
    assert readers.take() is None


def test_a_late_fact_alone_makes_a_row(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    readers.late(77, 3, 5, facts=2)
    assert readers.take() == (10, 10, [4, 5])


def test_a_late_fact_beyond_the_place_comes_in_its_range(readers: Positioned) -> None:
    readers.publish(10)
    readers.take(most=5)
    readers.late(77, 3, 8, facts=5)
    assert readers.take(most=2) == (5, 7, [4, 5])
    assert readers.take() == (7, 10, [])


def test_a_wide_late_range_comes_in_parts(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    readers.late(77, 2, 7, facts=5)
    readers.late(78, 8, 9)
    assert readers.take(most=3) == (10, 10, [3, 4, 5])
    assert readers.take(most=3) == (10, 10, [6, 7, 9])
    assert readers.take(most=3) is None


@pytest.mark.parametrize("function", ["take", "take_vector"])
def test_a_late_fact_beyond_the_place_is_read_in_its_range_alone(readers: Positioned, function: str) -> None:
    """Also if earlier late facts fill the answers."""
    readers.publish(4)
    readers.rows(function)
    readers.publish(6)
    readers.late(77, 1, 4, facts=3)
    readers.late(78, 4, 5)
    # The first row of an answer has the range of the writer, or of all writers.
    answers = [row[-3:] for _ in range(4) for row in readers.rows(function, "orders", "mailer", most=2)[:1]]
    assert sorted(id for low, high, late in answers for id in (*range(low + 1, high + 1), *late)) == [2, 3, 4, 5, 6]


def test_a_reader_that_begins_now_has_no_old_late_facts(readers: Positioned) -> None:
    readers.publish(10)
    readers.late(77, 3, 4)
    assert readers.take(since="now") is None
    readers.late(78, 4, 5)
    assert readers.take() == (10, 10, [5])


def test_a_void_that_is_late_is_not_handed_out(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    readers.late(77, 3, 4, facts=0, why="skipped")
    assert readers.take() is None


@pytest.mark.parametrize("sign", [1, -1])
def test_ids_whose_facts_a_restore_took_are_withdrawn(readers: Positioned, sign: int) -> None:
    """Up to the place, with late facts of the same IDs or alone, once; not if facts were late for another reason."""
    readers.publish(sign * 10)
    assert readers.columns("withdrawn::text", "take", "orders", "mailer", most=8) == [("{}",)]
    readers.late(77, sign * 3, sign * 5, facts=0)
    readers.late(78, sign * 6, sign * 10, facts=4)
    readers.late(79, sign * 1, sign * 2, why="skipped")
    query = "low, high, late, withdrawn = int8multirange(int8range(%s, %s, '[]'), int8range(%s, %s, '[]'))"
    first, second = sorted((sign * 4, sign * 5)), sorted((sign * 7, sign * 8))
    query = query % (*first, *second)
    assert readers.columns(query, "take") == [(sign * 8, sign * 10, sorted([sign * 2, sign * 7, sign * 8]), True)]
    assert readers.take() is None


def test_a_wide_withdrawn_range_comes_with_the_parts_of_its_facts(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    readers.late(77, 2, 7, facts=5)
    query = "late, withdrawn::text"
    assert readers.columns(query, "take", "orders", "mailer", most=3) == [([3, 4, 5], "{[3,6)}")]
    assert readers.columns(query, "take", "orders", "mailer", most=3) == [([6, 7], "{[6,8)}")]


def test_withdrawn_ids_by_writer(readers: Positioned) -> None:
    """A writer that has no position of its own gets a row for them."""
    readers.publish(10)
    assert readers.rows("take_vector") == [(None, 0, 10, [])]
    readers.late(77, 3, 5, facts=0, writer="till")
    readers.late(78, 5, 6, writer="web")
    assert readers.columns("writer, low, high, late, withdrawn::text", "take_vector") == [
        ("till", 10, 10, [], "{[4,6)}"),
        ("web", 10, 10, [6], "{[6,7)}"),
        (None, 10, 10, [], "{}"),
    ]
    assert readers.rows("take_vector") == []


def test_a_multirange_is_a_parameter_of_the_next_statement(readers: Positioned) -> None:
    """As the page for readers in any language undoes effects."""
    readers.publish(10)
    readers.take()
    readers.sql.execute("create table facts as select id from generate_series(1::bigint, 10) as id")
    readers.late(77, 3, 5, facts=0)
    ((withdrawn,),) = readers.columns("withdrawn", "take")
    readers.sql.execute("delete from facts where id <@ %s::int8multirange", [withdrawn])
    assert readers.sql.execute("select array_agg(id order by id) from facts").fetchall() == [
        ([1, 2, 3, 6, 7, 8, 9, 10],)
    ]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_parked_fact_comes_once_more_when_it_is_retried(readers: Positioned, sign: int) -> None:
    readers.publish(10 * sign)
    readers.take()
    for id in (3, 4):
        readers.sql.execute("select tidemark_reader.park('orders', 'mailer', %s, 'no such address')", [sign * id])
    assert readers.take() is None
    readers.sql.execute("update tidemark_reader.parked set retry_at = now() where id = %s", [sign * 4])
    assert readers.take("orders", "search") == (0, 10 * sign, [])
    with readers.sql.transaction(force_rollback=True):
        assert readers.take() == (10 * sign, 10 * sign, [sign * 4])
    assert readers.take() == (10 * sign, 10 * sign, [sign * 4])
    assert readers.take() is None
    assert readers.sql.execute("select id, reason from tidemark_reader.parked").fetchall() == [
        (sign * 3, "no such address")
    ]


def test_a_parked_fact_of_a_partition_or_of_a_writer_comes_once_more(readers: Positioned) -> None:
    readers.publish(10)
    readers.take(partition=1, partitions=2)
    readers.sql.execute("select tidemark_reader.park('orders', 'mailer', 3, 'x', partition => 1, partitions => 2)")
    publish(readers.session, {"bills": StreamUpdate(4, {"till": 9})})
    readers.rows("take_vector", "bills", "search")
    readers.sql.execute("select tidemark_reader.park('bills', 'search', 9, 'x')")
    readers.sql.execute("update tidemark_reader.parked set retry_at = now()")
    assert readers.take(partition=0, partitions=2) == (0, 10, [])
    assert readers.take(partition=1, partitions=2) == (10, 10, [3])
    assert readers.rows("take_vector", "bills", "search") == [("till", 9, 9, [9]), (None, 4, 4, [9])]
    assert readers.rows("take_vector", "bills", "search") == []


def test_a_fact_that_was_not_taken_cannot_be_parked(readers: Positioned) -> None:
    readers.publish(10)
    readers.take(most=5)
    for reader, id in (("mailer", 6), ("search", 1)):
        with pytest.raises(psycopg.errors.UndefinedObject, match=f"no reader '{reader}' that has taken ID {id}"):
            readers.sql.execute("select tidemark_reader.park('orders', %s, %s, 'x')", [reader, id])


def test_late_completions_that_are_not_listed_any_more_are_an_error(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    publish(readers.session, {"orders": StreamUpdate(0, {}, late_after=90)})
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="not listed any more") as caught:
        readers.take()
    assert "pass_late" in (caught.value.diag.message_hint or "")
    readers.sql.execute("select tidemark_reader.pass_late('orders', 'mailer')")
    assert readers.take() is None
    readers.publish(11)
    assert readers.take() == (10, 11, [])


def test_late_facts_among_those_of_other_writers_are_an_error(readers: Positioned) -> None:
    readers.publish(10, till=12)
    readers.take()
    readers.late(77, 3, 8, facts=2)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="other writers may have IDs there") as caught:
        readers.take()
    assert (caught.value.diag.message_hint or "").startswith("Undo what its earlier facts did. Handle the rows of")
    assert readers.sql.execute("select tidemark_reader.pass_late('orders', 'mailer')").fetchone() == (77,)
    assert readers.take() is None


def test_late_facts_before_one_that_is_an_error_are_read_first(readers: Positioned) -> None:
    """`pass_late` then skips only what the error named, however often it is called."""
    readers.publish(10, till=12)
    readers.take()
    readers.late(76, 1, 2)
    readers.late(77, 3, 8, facts=2)
    readers.late(78, 8, 9)
    assert readers.take() == (10, 10, [2])
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="other writers may have IDs there"):
        readers.take()
    assert readers.sql.execute("select tidemark_reader.pass_late('orders', 'mailer')").fetchone() == (77,)
    assert readers.take() == (10, 10, [9])
    assert readers.sql.execute("select tidemark_reader.pass_late('orders', 'mailer')").fetchone() == (78,)
    assert readers.take() is None


def test_listed_late_facts_after_those_that_are_not_listed_any_more_are_read(readers: Positioned) -> None:
    readers.publish(10)
    readers.take()
    publish(readers.session, {"orders": StreamUpdate(0, {}, late_after=90)})
    readers.late(91, 1, 2)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="not listed any more"):
        readers.take()
    assert readers.sql.execute("select tidemark_reader.pass_late('orders', 'mailer')").fetchone() == (90,)
    assert readers.take() == (10, 10, [2])


def test_a_stream_that_went_back_is_an_error_for_readers_beyond(readers: Positioned) -> None:
    readers.decide(10)
    readers.take("orders", "far")
    readers.take("orders", "near", most=4)
    assert readers.sql.execute("select tidemark_reader.went_back('orders', 6)").fetchone() == (True,)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="went back to ID 6") as caught:
        readers.take("orders", "far")
    assert "seek" in (caught.value.diag.message_hint or "")
    assert readers.take("orders", "near") == (4, 6, [])
    readers.decide(20)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="went back to ID 6"):
        readers.take("orders", "far")
    readers.sql.execute("select tidemark_reader.seek('orders', 'far', 'm6')")
    assert readers.take("orders", "far") == (6, 20, [])
    assert readers.take("orders", "near") == (6, 20, [])


def test_a_parked_fact_that_is_read_again_after_a_seek_is_not_parked(readers: Positioned) -> None:
    readers.decide(10)
    readers.take()
    for id in (3, 8):
        readers.sql.execute("select tidemark_reader.park('orders', 'mailer', %s, 'x')", [id])
    readers.sql.execute("select tidemark_reader.seek('orders', 'mailer', 'm4')")
    assert readers.sql.execute("select id from tidemark_reader.parked").fetchall() == [(3,)]
    assert readers.take() == (4, 10, [])


def test_a_seek_between_positions_with_a_parked_fact_is_refused(readers: Positioned) -> None:
    """Nobody knows its writer, so nobody knows whether it would be read again."""
    readers.decide(10)
    readers.take()
    readers.sql.execute("select tidemark_reader.park('orders', 'mailer', 7, 'x')")
    readers.sql.execute("update tidemark_reader.places set mode = 'vector'")
    with pytest.raises(
        psycopg.errors.ObjectNotInPrerequisiteState,
        match=r"beyond the linear .* m4~w\.9, .*: 7",
    ):
        readers.sql.execute("select tidemark_reader.seek('orders', 'mailer', 'm4~w.9')")
    readers.sql.execute("select tidemark_reader.seek('orders', 'mailer', 'm4')")
    assert readers.sql.execute("select id from tidemark_reader.parked").fetchall() == []


def test_of_two_timelines_the_lower_counts(readers: Positioned) -> None:
    readers.decide(10)
    readers.take()
    readers.sql.execute("select tidemark_reader.went_back('orders', 6)")
    readers.decide(20)
    readers.sql.execute("select tidemark_reader.went_back('orders', 15)")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="went back to ID 6"):
        readers.take()


def test_a_place_beyond_a_restored_position_is_an_error(readers: Positioned) -> None:
    readers.decide(10)
    readers.take()
    readers.sql.execute("update tidemark_reader.positions set linear = 6")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="went back to ID 6"):
        readers.take()


def test_what_is_published_moves_no_stream_that_the_database_decides(readers: Positioned) -> None:
    readers.decide(5)
    readers.publish(9)
    assert readers.take() == (0, 5, [])
    readers.publish(5, "bills")
    readers.decide(9, "bills")
    assert readers.take("bills", "mailer") == (0, 5, [])


def test_partitions_have_places(readers: Positioned) -> None:
    readers.publish(10)
    assert readers.take(partition=0, partitions=2) == (0, 10, [])
    assert readers.take(partition=1, partitions=2, most=4) == (0, 4, [])
    assert readers.take(partition=1, partitions=2) == (4, 10, [])
    assert readers.take(partition=0, partitions=2) is None


@pytest.mark.parametrize(("partition", "partitions"), [(2, 2), (-1, 2), (0, 0), (None, 2), (1, None)])
def test_a_partition_that_does_not_exist(readers: Positioned, partition: int, partitions: int) -> None:
    readers.publish(10)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="there is no partition"):
        readers.take(partition=partition, partitions=partitions)


def test_the_number_of_partitions_changes_at_one_place(readers: Positioned) -> None:
    readers.publish(10)
    for partition in range(2):
        readers.take(partition=partition, partitions=2, most=4 + partition)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="another number of partitions"):
        readers.take(partition=0, partitions=3)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="another number of partitions"):
        readers.take()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="2 different places"):
        readers.sql.execute("select tidemark_reader.repartition('orders', 'mailer', 3)")
    readers.take(partition=0, partitions=2, most=1)
    readers.sql.execute("select tidemark_reader.repartition('orders', 'mailer', 3)")
    assert [readers.take(partition=it, partitions=3) for it in range(3)] == [(5, 10, [])] * 3


def test_partitions_of_keys_do_not_depend_on_the_database(readers: Positioned) -> None:
    keys = ["", "a", "müller", "42"]
    query = "select tidemark_reader.partition_of(key, 8) from unnest(%s::text[]) as key"
    expected = [int(hashlib.md5(key.encode()).hexdigest()[:8], 16) % 8 for key in keys]
    assert [partition for (partition,) in readers.sql.execute(query, [keys]).fetchall()] == expected


def test_ranges_by_writer(readers: Positioned) -> None:
    readers.publish(5, web=9, till=7)
    assert readers.rows("take_vector") == [("till", 0, 7, []), ("web", 0, 9, []), (None, 0, 5, [])]
    assert readers.rows("take_vector") == []
    readers.publish(8, web=9)
    assert readers.rows("take_vector") == [("till", 7, 8, []), ("web", 9, 9, []), (None, 5, 8, [])]
    readers.late(77, 2, 4, writer="web", facts=2)
    assert readers.rows("take_vector", most=1) == [("web", 9, 9, [3]), (None, 8, 8, [])]
    assert readers.rows("take_vector", most=1) == [("web", 9, 9, [4]), (None, 8, 8, [])]
    readers.publish(20)
    assert readers.rows("take_vector") == [("web", 9, 20, []), (None, 8, 20, [])]
    assert readers.rows("take_vector") == []


def test_a_reader_by_writer_begins_at_a_token(readers: Positioned) -> None:
    readers.publish(5, web=9)
    assert readers.rows("take_vector", since="m4~web.8") == [("web", 8, 9, []), (None, 4, 5, [])]


def test_a_reader_keeps_its_mode(readers: Positioned) -> None:
    readers.publish(5)
    readers.take()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="reads in linear mode"):
        readers.rows("take_vector")


def test_a_service_may_call_and_no_more(readers: Positioned) -> None:
    """A member of tidemark_take takes; tables, positions and the places of others by hand are not for it."""
    readers.publish(5)
    readers.sql.execute("drop role if exists taker")
    readers.sql.execute("create role taker in role tidemark_take")
    readers.sql.execute("set role taker")
    assert readers.take() == (0, 5, [])
    assert readers.rows("take_vector", "orders", "other") == [(None, 0, 5, [])]
    readers.sql.execute("select tidemark_reader.park('orders', 'mailer', 5, 'no such address')")
    for refused in (
        "select * from tidemark_reader.places",
        "select * from tidemark_reader.positions",
        "update tidemark_reader.places set linear = 0",
        "select tidemark_reader.publish('published', array['orders'], array[9])",
        "select tidemark_reader.went_back('orders', 1)",
        "select tidemark_reader.seek('orders', 'mailer', 'm1')",
        "select tidemark_reader.pass_late('orders', 'mailer')",
        "select tidemark_reader.repartition('orders', 'mailer', 1)",
        "create table tidemark_reader.mine ()",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            readers.sql.execute(refused.encode())
    readers.sql.execute("reset role")
    readers.sql.execute("drop role taker")


def test_the_schema_is_installed_once(readers: Positioned) -> None:
    assert not install(readers.session)
    readers.publish(5)
    readers.take()
    readers.sql.execute("comment on schema tidemark_reader is 'old'")
    assert install(readers.session)
    assert readers.take() is None
