"""Faults of tables and sequences on a real database, and the operator who runs the remedies that logs name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tidemark.app.settings import load
from tidemark.app.simulation import workload
from tidemark.app.simulation.script import Fault, PlannedFault, WriterPlan
from tidemark.app.simulation.source_faults import SourceFaults
from tidemark.app.simulation.sql_readers import ReadRefused, SqlPlace, _take
from tidemark.app.simulation.streams import StreamsVerification
from tidemark.app.simulation.workload import SimulationDatabases
from tidemark.app.stack.home import Home
from tidemark.common.errors import Refused
from tidemark.sources.relay import sequences
from tidemark.sources.relay.queries import AppendStream, session_of
from tidemark.sources.relay.sequences import SequenceState
from tidemark.streaming.values.direction import Direction

STREAM = WriterPlan(stream_count=1).stream_list()[0]
EVENTS = AppendStream(1, "events", Direction.FORWARD)


class World:
    """One stream, `events`, and the faults. `log` is the relay's log."""

    def __init__(self, dsn: str, sql: psycopg.Connection, faults: SourceFaults, log: Path, relay: str) -> None:
        self.dsn = dsn
        self.sql = sql
        self.faults = faults
        self.log = log
        self.relay = relay

    def inject(self, fault: Fault, choice: float = 0.0) -> str:
        """Inject it, and end it as soon as its remedy is known."""
        self.faults.begin(PlannedFault(0.0, fault, choice, 0.0))
        return self.until(lambda: next(self.faults.take_injected(), None))[1]

    def until(self, found: Callable[[], tuple[Fault, str] | None]) -> tuple[Fault, str]:
        for _ in range(100):
            self.faults._step()
            if (it := found()) is not None:
                return it
        raise AssertionError("the fault was not injected")

    def remedied(self, message: object) -> None:
        """The relay logs the message, and the operator reads it."""
        with self.log.open("a") as file:
            file.write(f"[warning] A stream is blocked  problem={str(message)!r} stream=events\n")
        self.faults._run_remedies(float("inf"))

    def value(self, query: str) -> object:
        ((found,),) = self.sql.execute(query.encode()).fetchall()
        return found


@pytest.fixture
def world(database: str, tmp_path: Path) -> Iterator[World]:
    dsn = workload.make_database(database)
    workload.prepare_writing(dsn)
    workload.make_fact_tables(dsn, [STREAM])
    workload.make_effect_tables(dsn)
    relay, readers = workload.make_logins(dsn, [STREAM])
    home = Home(tmp_path)
    home.log("simulate-relay").parent.mkdir(parents=True, exist_ok=True)
    with psycopg.connect(dsn, autocommit=True) as sql, StreamsVerification(dsn, dsn, [STREAM]) as verification:
        databases = SimulationDatabases(home, dsn, dsn, relay, readers)
        faults = SourceFaults(load(), databases, [STREAM], "web", verification)
        yield World(dsn, sql, faults, home.log("simulate-relay"), relay)


def test_rows_are_hidden_until_a_message_names_the_table(world: World) -> None:
    """The relay's login gets an error, not an empty answer; the remedy is the one of the message."""
    assert world.inject(Fault.ROW_SECURITY) == "tidemark.append_outbox"
    with session_of(world.relay, "test") as session:
        with pytest.raises(Refused) as refused, session.use() as connection:
            connection.execute("select from tidemark.append_outbox")
        world.remedied("another problem")
        assert world.value("select relrowsecurity from pg_class where relname = 'append_outbox'")
        world.remedied(refused.value)
        with session.use() as connection:
            connection.execute("select from tidemark.append_outbox")


def test_a_cache_is_taken_away_as_the_message_says(world: World) -> None:
    assert world.inject(Fault.SEQUENCE_CACHE) == "events"
    world.sql.execute("select tidemark.append('events', '1')")
    snapshot = sequences.read_snapshots(world.sql)[EVENTS]
    world.remedied(snapshot.sequence.problem(EVENTS))
    assert sequences.read_snapshots(world.sql)[EVENTS].sequence.problem(EVENTS) is None


def test_a_sequence_behind_its_table_is_set_as_the_message_says(world: World) -> None:
    """Not any more if the stream went on without the operator."""
    state = SequenceState("tidemark.append_ids_1", "", 3)
    world.remedied(state.lag_problem(EVENTS, 40))
    assert world.value("select last_value from tidemark.append_ids_1") == 40
    with world.log.open("a") as file:
        file.write(f"[warning] A stream is blocked problem={str(state.lag_problem(EVENTS, 80))!r} stream=events\n")
        file.write("[info     ] A stream continues             stream=events\n")
    world.faults._run_remedies(float("inf"))
    assert world.value("select last_value from tidemark.append_ids_1") == 40


@pytest.mark.parametrize("choice", [0.0, 0.05])
def test_sequences_are_set_back_and_forward(world: World, choice: float) -> None:
    """Back by setval or by RESTART; the verification knows from which ID on facts may come again."""
    world.sql.execute("select tidemark.append_many('events', array_agg(to_jsonb(n))) from generate_series(1, 9) as n")
    world.inject(Fault.SEQUENCE_BACK, choice)
    assert 1 < int(str(world.value("select nextval('tidemark.append_ids_1')"))) <= 9
    world.inject(Fault.SEQUENCE_JUMP, 0.1)
    assert int(str(world.value("select nextval('tidemark.append_ids_1')"))) > 100


def test_a_restore_in_place_takes_rows_and_ids_back(world: World) -> None:
    """Facts since the backup are gone, and the IDs behind the backup are given out again."""
    insert = "insert into demo.events (stream_id, part, writer, written_at) values (%s, 1, 'web', now())"
    for id in (1, 2):
        assert world.value("select tidemark.append('events', '1')") == id
        world.sql.execute(insert, [id])
    saved = world.faults._inject(PlannedFault(0.0, Fault.RESTORE_IN_PLACE, 0.0, 0.0))
    world.sql.execute("select tidemark.append('events', '1')")
    world.sql.execute(insert, [3])
    assert not isinstance(saved, str)
    assert saved.work() == "the services' tables and sequences"
    assert world.value("select count(*) from demo.events") == 2
    assert world.value("select count(*) from tidemark.append_outbox") == 2
    assert world.value("select tidemark.append('events', '1')") == 3
    assert world.value("select to_regnamespace('simulate_backup')") is None


def test_logins_have_no_rights_of_a_superuser(world: World) -> None:
    """Row level security would not apply to such a login."""
    with psycopg.connect(world.relay) as connection:
        found = connection.execute("select rolsuper, rolbypassrls, rolname from pg_roles where rolname = current_user")
        assert found.fetchall() == [(False, False, "simulate_relay")]


def test_a_reader_in_sql_is_moved_as_its_message_says(world: World) -> None:
    """The error of `take` itself, as the reader logs it."""
    with psycopg.connect(world.dsn, autocommit=True) as sql:
        sql.execute("select tidemark_reader.publish('database', array['events'], array[9])")
        sql.execute("select tidemark_reader.take('events', 'parts', partition => 1, partitions => 3)")
        sql.execute("select tidemark_reader.went_back('events', 4)")
        with pytest.raises(ReadRefused) as waiting:
            _take(sql, "events", SqlPlace("parts", 1))
        with world.faults._log_files[-1]._path.open("a") as file:
            text = str(waiting.value)
            file.write(f"[warning  ] A reader in SQL cannot read; trying again  problem={text!r} reader=parts\n")
        world.faults._run_remedies(float("inf"))
        assert world.value("select linear from tidemark_reader.places") == 4
        assert not _take(sql, "events", SqlPlace("parts", 1))
