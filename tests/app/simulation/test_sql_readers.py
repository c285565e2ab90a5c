"""Readers in SQL of the simulation, on real tables: copies side by side, and what operators do for them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.sources.relay.position_world import SteppedKeeper
from tidemark.app.simulation import sql_readers, workload
from tidemark.app.simulation.script import SimulatedStream
from tidemark.app.simulation.sql_readers import READERS, SqlPlace, SqlReaderRole, find_place, places_of, run_sql_reader

STREAMS = [SimulatedStream("events"), SimulatedStream("backfill", "backward")]
WRITERS = ["w1", "w2", "w3", "w4"]


class World:
    """The services' database, with what its relay knows of positions. `readers` is the DSN of the readers' login."""

    def __init__(self, dsn: str, readers: str, sql: psycopg.Connection) -> None:
        self.sql = sql
        self.readers = readers
        self.keeper = SteppedKeeper(dsn)

    def write(self, stream: str, writer: str) -> None:
        with self.sql.transaction():
            ((id,),) = self.sql.execute("select tidemark.append_as(%s, %s, '1')", [writer, stream]).fetchall()
            self.sql.execute(
                f"insert into demo.{stream} (stream_id, part, writer, written_at) values (%s, 1, %s, now())".encode(),
                [id, writer],
            )

    def read(self, copies: int = 1) -> None:
        """Until every place is at the position of its stream, by so many copies."""
        for _ in range(3):
            self.keeper.round()
        stopping = threading.Event()
        with ThreadPoolExecutor(copies) as pool:
            work = [pool.submit(run_sql_reader, SqlReaderRole(STREAMS), self.readers, stopping) for _ in range(copies)]
            try:
                deadline = time.monotonic() + 60
                while not self.is_read():
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            finally:
                stopping.set()
        for copy in work:
            copy.result()

    def is_read(self) -> bool:
        places = {(stream.name, place.name) for stream in STREAMS for reader in READERS for place in places_of(reader)}
        return places == set(
            self.sql.execute(
                "select stream, reader from tidemark_reader.places as p join tidemark_reader.positions as known"
                " using (stream) where p.linear = known.linear"
            ).fetchall()
        )

    def effects(self, reader: str, stream: str) -> list[int]:
        rows = self.sql.execute(
            "select stream_id from demo.effects where reader = %s and stream = %s order by number", [reader, stream]
        )
        return [id for (id,) in rows]


@pytest.fixture
def world(database: str) -> Iterator[World]:
    workload.prepare_writing(database)
    workload.make_fact_tables(database, STREAMS)
    workload.make_effect_tables(database)
    _, readers = workload.make_logins(database, STREAMS)
    with psycopg.connect(database, autocommit=True) as sql:
        world = World(database, readers, sql)
        yield world
        world.keeper.die()


def test_two_copies_read_every_fact_once(world: World) -> None:
    """By a login that may take and write effects, of both directions, alone and in partitions."""
    for number in range(60):
        for stream in STREAMS:
            world.write(stream.name, WRITERS[number % len(WRITERS)])
    world.read(copies=2)
    assert world.effects("sql", "events") == [*range(1, 61)]
    assert world.effects("sql", "backfill") == [*range(-1, -61, -1)]
    assert sorted(world.effects("parts", "events")) == [*range(1, 61)]
    assert sorted(world.effects("parts", "backfill"), reverse=True) == [*range(-1, -61, -1)]


def test_an_operator_moves_a_reader_back(world: World) -> None:
    """Effects beyond the ID are taken back, of one partition alone, and no place that is not beyond is moved."""
    for number in range(12):
        world.write("events", WRITERS[number % len(WRITERS)])
    world.read()
    before = world.effects("parts", "events")
    moved = next(place for place in places_of("parts") if place.has_writer("w1"))
    assert sql_readers.move_back(world.sql, "events", moved, 4)
    kept = world.effects("parts", "events")
    assert {id for id in before if id not in kept} == {
        id for id in range(5, 13) if moved.has_writer(WRITERS[(id - 1) % len(WRITERS)])
    }
    assert not sql_readers.move_back(world.sql, "events", moved, 4)
    world.read()
    assert sorted(world.effects("parts", "events")) == [*range(1, 13)]


def test_effects_of_withdrawn_ids_are_undone(world: World) -> None:
    """Of a stream with one writer, of which a restore took facts; another one has its ID now, and is read as late."""
    for _ in range(4):
        world.write("events", "w1")
    world.read()
    world.sql.execute("select tidemark_reader.share('events', 0, 9, '{}')")
    world.sql.execute("delete from demo.events where stream_id in (2, 3)")
    world.sql.execute(
        "insert into demo.events (stream_id, part, writer, written_at) values (3, 1, 'w1', now());"
        " select tidemark_reader.publish_late('events', 0, array[1, 2], array['w1', 'w1'], array[1, 1], array[1, 2],"
        " array[2, 3], array[0, 1], array['regressed', 'regressed'])"
    )
    for place in (place for reader in READERS for place in places_of(reader)):
        sql_readers._take(world.sql, "events", place)
    for reader in READERS:
        assert world.effects(reader, "events") == [1, 4, 3]


def test_an_operator_handles_late_facts_among_others_once(world: World) -> None:
    """The facts of the writer up to the place, and the next late completion is not passed with it."""
    for writer in ("w1", "w2", "w1"):
        world.write("events", writer)
    world.read()
    world.sql.execute("select tidemark_reader.share('events', 0, 9, '{}')")
    for number in (1, 2):
        world.sql.execute(
            "select tidemark_reader.publish_late('events', 0, array[%s], array['w1'], array[1], array[0], array[3],"
            " array[2], array['regressed'])",
            [number],
        )
    place = SqlPlace("sql")
    assert sql_readers.handle_late(world.sql, "events", place, "w1", 0, 3)
    assert world.effects("sql", "events") == [1, 2, 3, 1, 3]
    assert not sql_readers.handle_late(world.sql, "events", place, "w2", 0, 3)
    ((late,),) = world.sql.execute(
        "select late from tidemark_reader.places where reader = 'sql' and stream = 'events'"
    ).fetchall()
    assert late == 1


def test_places_are_named_as_the_functions_name_them(world: World) -> None:
    for place in (place for reader in READERS for place in places_of(reader)):
        row = world.sql.execute(
            "select tidemark_reader.place_name(%s, %s, %s), tidemark_reader.partition_of('w1', 3)",
            [place.reader, place.partition, place.partition_count],
        ).fetchone()
        assert row == (place.name, sql_readers.partition_of("w1", 3))
        assert find_place(place.name) == place
    assert find_place("mailer") is None
