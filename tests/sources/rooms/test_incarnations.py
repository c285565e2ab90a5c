"""`rooms.begin_anew`: a restored database becomes another incarnation, and gives out no ID of an earlier one."""

import json
import threading

import psycopg
import pytest

from tests.sources.rooms.dags import ROOM, an_event
from tests.sources.rooms.test_persisting import ROOT, SQL_STORE, STORE
from tests.waiting import eventually
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.persisting import SqlAppender
from tidemark.sources.rooms.reading import VectorPosition, initial_sync, load_incarnation, messages, sync

MARGIN = 10_000


def begin_anew(connection: Connection, **heads_by_stream: int) -> int:
    heads = json.dumps({"events": 0, "backfill": 0, "caches": 0, **heads_by_stream})
    ((began,),) = connection.execute("select rooms.begin_anew(%s)", [heads]).fetchall()
    return int(began)


def test_no_id_is_given_out_twice_after_a_restore(rooms: Connection) -> None:
    """New IDs are beyond the head that Tidemark knows, and beyond the IDs of the backup, in each stream. So they are
    after a second restore of the same backup."""
    assert load_incarnation(rooms) == 0
    STORE.persist(rooms, ROOT)
    first = begin_anew(rooms, events=950, backfill=-7)
    assert STORE.persist(rooms, an_event("lost", ROOT)) == 950 + MARGIN + 1
    assert STORE.persist(rooms, an_event("older"), "backfill") == -7 - MARGIN - 1
    rooms.execute("delete from rooms.incarnations where began > 0")
    rooms.execute("select setval(ids, direction * 3) from tidemark.append_streams")
    second = begin_anew(rooms, events=950 + MARGIN + 1)
    assert load_incarnation(rooms) == second > first
    assert STORE.persist(rooms, an_event("found", ROOT)) == 950 + 2 * MARGIN + 2
    assert STORE.persist(rooms, an_event("other"), "backfill") == -3 - MARGIN - 1
    rooms.execute("insert into rooms.incarnations values (%s)", [2**62])
    assert begin_anew(rooms, events=5) == 2**62 + 1
    assert STORE.persist(rooms, an_event("more", ROOT)) == 950 + 3 * MARGIN + 3


def test_begin_anew_requires_the_heads_of_all_streams(rooms: Connection) -> None:
    """The error has a hint with the query for the heads. Nothing is changed."""
    before = load_incarnation(rooms)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="no ID for stream 'backfill'") as refused:
        rooms.execute('select rooms.begin_anew(\'{"events": 3, "caches": 0}\')')
    assert "select jsonb_object_agg(stream, head) from tidemark.streams" in str(refused.value)
    assert load_incarnation(rooms) == before
    assert STORE.persist(rooms, ROOT) == 1


def test_begin_anew_waits_for_transactions_that_have_reserved_an_id(
    rooms: Connection, second_connection: Connection, database: str
) -> None:
    """So no transaction is open that has reserved an ID below the IDs of the new incarnation."""
    second_connection.execute("begin")
    SqlAppender("service").reserve(second_connection, "events")
    with psycopg.connect(database, autocommit=True) as third:
        opening = threading.Thread(target=begin_anew, args=[third])
        opening.start()
        waiting = "select 1 from pg_locks where not granted and pid = %s"
        eventually(lambda: rooms.execute(waiting, [third.info.backend_pid]).fetchone())
        assert load_incarnation(rooms) == 0
        second_connection.execute("rollback")
        opening.join()
    assert load_incarnation(rooms) > 0


@pytest.mark.parametrize("published", [1, 950])
def test_positions_from_before_a_restore_stay_correct(rooms: Connection, published: int) -> None:
    """At a position that was published before the restore, readers always find only the events of the backup."""
    STORE.persist(rooms, ROOT)
    begin_anew(rooms, events=950)
    new = SQL_STORE.persist(rooms, an_event("new", ROOT))
    assert new is not None
    for _ in range(2):
        result = sync(rooms, "@ada", VectorPosition(0), VectorPosition(published), rooms=[ROOM])
        assert [row.event for row in result.events] == ["root"]
        assert [row.event for row in messages(rooms, ROOM, VectorPosition(published))[0]] == ["root"]
        assert [row.event for row in initial_sync(rooms, ROOM, VectorPosition(published)).events] == ["root"]
        STORE.persist(rooms, an_event(f"more{new}", ROOT))
        new += 1
    assert len(sync(rooms, "@ada", VectorPosition(published), VectorPosition(new), rooms=[ROOM]).events) == 3
