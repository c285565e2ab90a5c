"""A database of rooms that went back is opened as another incarnation, with IDs that none before it has given out."""

import json
import threading

import psycopg
import pytest

from tests.sources.rooms.dags import ROOM, an_event
from tests.sources.rooms.test_persisting import ROOT, SQL_STORE, STORE
from tests.waiting import eventually
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.persisting import SqlAppender
from tidemark.sources.rooms.reading import VectorPosition, incarnation, initial_sync, messages, sync

MARGIN = 10_000


def begin_anew(connection: Connection, **known: int) -> int:
    heads = json.dumps({"events": 0, "backfill": 0, "caches": 0, **known})
    ((began,),) = connection.execute("select rooms.begin_anew(%s)", [heads]).fetchall()
    return int(began)


def test_no_id_is_given_out_twice_after_a_restore(rooms: Connection) -> None:
    """Beyond what Tidemark knows of each stream, history too, and what the backup has; also where the same backup is
    put back a second time."""
    assert incarnation(rooms) == 0
    STORE.persist(rooms, ROOT)
    first = begin_anew(rooms, events=950, backfill=-7)
    assert STORE.persist(rooms, an_event("lost", ROOT)) == 950 + MARGIN + 1
    assert STORE.persist(rooms, an_event("older"), "backfill") == -7 - MARGIN - 1
    rooms.execute("delete from rooms.incarnations where began > 0")
    rooms.execute("select setval(ids, direction * 3) from tidemark.append_streams")
    second = begin_anew(rooms, events=950 + MARGIN + 1)
    assert incarnation(rooms) == second > first
    assert STORE.persist(rooms, an_event("found", ROOT)) == 950 + 2 * MARGIN + 2
    assert STORE.persist(rooms, an_event("other"), "backfill") == -3 - MARGIN - 1
    rooms.execute("insert into rooms.incarnations values (%s)", [2**62])
    assert begin_anew(rooms, events=5) == 2**62 + 1
    assert STORE.persist(rooms, an_event("more", ROOT)) == 950 + 3 * MARGIN + 3


def test_begin_anew_requires_the_heads_of_all_streams(rooms: Connection) -> None:
    """With the statement that asks; nothing is changed."""
    before = incarnation(rooms)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="the stream 'backfill' is not given") as refused:
        rooms.execute('select rooms.begin_anew(\'{"events": 3, "caches": 0}\')')
    assert "select jsonb_object_agg(stream, head) from tidemark.streams" in str(refused.value)
    assert incarnation(rooms) == before
    assert STORE.persist(rooms, ROOT) == 1


def test_begin_anew_waits_for_transactions_that_have_reserved_an_id(
    rooms: Connection, second_connection: Connection, database: str
) -> None:
    """So of what lies below the IDs of the incarnation nothing is in flight."""
    second_connection.execute("begin")
    SqlAppender("service").reserve(second_connection, "events")
    with psycopg.connect(database, autocommit=True) as third:
        opening = threading.Thread(target=begin_anew, args=[third])
        opening.start()
        waiting = "select 1 from pg_locks where not granted and pid = %s"
        eventually(lambda: rooms.execute(waiting, [third.info.backend_pid]).fetchone())
        assert incarnation(rooms) == 0
        second_connection.execute("rollback")
        opening.join()
    assert incarnation(rooms) > 0


@pytest.mark.parametrize("published", [1, 950])
def test_positions_from_before_a_restore_stay_correct(rooms: Connection, published: int) -> None:
    """Tidemark's positions never go back. Below them is nothing but what the backup holds, for good."""
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
