"""The comparison of readers' effects with the committed facts, on tables that these tests fill by hand. The readers in
SQL have the same database."""

from collections.abc import Iterator
from importlib.resources import files

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tidemark.app.simulation import workload
from tidemark.app.simulation.script import WriterPlan
from tidemark.app.simulation.sql_readers import places_of
from tidemark.app.simulation.streams import READERS, StreamsCount, StreamsVerification

STREAM = WriterPlan(stream_count=1).stream_list()[0]


class World:
    """One stream, `events`, and all readers."""

    def __init__(self, connection: psycopg.Connection, verification: StreamsVerification) -> None:
        self._connection = connection
        self._verification = verification

    def write(self, *ids: int, writer: str = "first", rows: int = 1) -> None:
        for id in ids:
            for part in range(1, rows + 1):
                self._connection.execute(
                    "insert into demo.events (stream_id, part, writer, written_at) values (%s, %s, %s, now())",
                    [id, part, writer],
                )

    def read(self, *ids: int, reader: str, writer: str = "first") -> None:
        """The first row of each, or one that nobody wrote."""
        for id in ids:
            self._connection.execute(
                """
                insert into demo.effects (reader, stream, stream_id, writer, mark) values (%(reader)s, 'events', %(id)s,
                    %(writer)s, coalesce((select mark from demo.events where stream_id = %(id)s and part = 1),
                        gen_random_uuid()))
                """,
                {"reader": reader, "id": id, "writer": writer},
            )

    def stand(self, reader: str, linear: int, **positions: int) -> None:
        self._connection.execute(
            """
            insert into tidemark_reader.places (reader, stream, mode, linear, positions, late, must_read, version)
            values (%s, 'events', %s, %s, %s, 0, '[]', 1)
            on conflict (reader, stream) do update set linear = excluded.linear, positions = excluded.positions
            """,
            [reader, reader, linear, Jsonb(positions)],
        )

    def counts(self) -> dict[str, StreamsCount]:
        return {count.reader: count for count in self._verification.counts()}


@pytest.fixture
def world(database: str) -> Iterator[World]:
    dsn = workload.make_database(database)
    workload.prepare_writing(dsn)
    workload.make_fact_tables(dsn, [STREAM])
    workload.make_effect_tables(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection, StreamsVerification(dsn, dsn, [STREAM]) as verification:
        connection.execute(files("tidemark.sinks.reader").joinpath("schema.sql").read_bytes())
        yield World(connection, verification)


def test_what_was_read_once_and_in_order_is_right(world: World) -> None:
    """Facts that a reader has not come to yet are neither read nor missed."""
    world.write(1, 2, 4)
    world.read(1, 2, reader="linear")
    world.stand("linear", 3)
    found = world.counts()["linear"]
    assert found == StreamsCount("linear", 3, 2, 0, 0, 0)
    assert found.is_correct
    assert not found.is_complete


def test_a_fact_that_was_passed_and_not_read_is_missed(world: World) -> None:
    """By the line for one reader, by the writer's own position for the other; a row too few is a fact missed."""
    world.write(1, 3)
    world.write(2, writer="second", rows=2)
    world.read(1, reader="linear")
    world.read(2, reader="linear", writer="second")
    world.read(3, reader="linear")
    world.stand("linear", 3)
    world.read(3, reader="vector")
    world.stand("vector", 0, first=3)
    found = world.counts()
    assert found["linear"] == StreamsCount("linear", 3, 2, 1, 0, 0)
    assert found["vector"] == StreamsCount("vector", 3, 1, 1, 0, 0)


def test_what_was_handed_over_twice_or_never_written_is_duplicated(world: World) -> None:
    """One fact twice, and one that is not there at all."""
    world.write(1)
    world.read(1, 1, 7, reader="linear")
    assert world.counts()["linear"].duplicated == 2


def test_order_is_that_of_all_or_of_one_writer(world: World) -> None:
    """2 of another writer after 3 is wrong for the line only; 1 after 3 of the same writer is wrong for both."""
    world.write(1, 3)
    world.write(2, writer="second")
    for reader in ("vector", "linear"):
        world.read(3, reader=reader)
        world.read(2, reader=reader, writer="second")
        world.read(1, reader=reader)
    found = world.counts()
    assert (found["linear"].disordered, found["vector"].disordered) == (2, 1)


def test_what_all_have_read_is_forgotten_and_still_counted(world: World) -> None:
    """The counts stay; to be handed a forgotten fact again counts as duplicated, to commit one late as missed."""
    world.write(1, 2, 3)
    for reader in ("vector", "linear"):
        world.read(1, 2, 3, reader=reader)
        world.stand(reader, 2)
    for place in (place for reader in ("sql", "parts") for place in places_of(reader)):
        world.stand(place.name, 3)
    for reader in ("sql", "parts"):
        world.read(1, 2, 3, reader=reader)
    before = world.counts()
    assert {reader: before[reader].is_complete for reader in READERS} == dict.fromkeys(READERS, True)
    assert world.counts() == before
    assert before["linear"] == StreamsCount("linear", 3, 3, 0, 0, 0)
    world.read(2, reader="vector")
    world.write(1)
    after = world.counts()
    assert (after["vector"].duplicated, after["vector"].missed, after["linear"].missed) == (1, 1, 1)


def test_a_partition_is_compared_with_its_own_place(world: World) -> None:
    """A fact that its partition has passed and not read is missed; the places of other partitions do not count."""
    writers = {place: next(w for w in map(str, range(99)) if place.has_writer(w)) for place in places_of("parts")}
    for id, (place, writer) in enumerate(writers.items(), 1):
        world.write(id, writer=writer)
        world.stand(place.name, 0)
    first, second, third = writers
    world.stand(first.name, 3)
    found = world.counts()["parts"]
    assert (found.written, found.read, found.missed) == (3, 0, 1)
    world.read(1, reader="parts", writer=writers[first])
    world.read(3, reader="parts", writer=writers[third])
    world.read(2, reader="parts", writer=writers[second])
    world.stand(second.name, 3)
    world.stand(third.name, 2)
    found = world.counts()["parts"]
    assert (found.read, found.missed, found.duplicated, found.disordered) == (3, 0, 0, 0)
    world.write(5, writer=writers[second])
    world.write(4, writer=writers[second])
    world.read(5, 4, reader="parts", writer=writers[second])
    assert world.counts()["parts"].disordered == 1
