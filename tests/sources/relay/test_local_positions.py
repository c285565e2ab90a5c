"""Positions for the readers of the database itself: no position passes an ID whose fact may still come."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from tests.examples import examples
from tests.sources.relay.position_world import ReadingWorld, SteppedKeeper
from tests.sources.relay.test_decider import Appending
from tests.waiting import eventually
from tidemark.sources.relay.local_positions import LocalPositions
from tidemark.sources.relay.queries import session_of

PATIENCE = 30.0  # seconds


class Reading(Appending):
    """All that services and relays do elsewhere, two keepers of positions, and a reader."""

    @initialize(direction=st.sampled_from(["forward", "backward"]))
    def made(self, direction: str) -> None:
        self.world: ReadingWorld = ReadingWorld(self.dsn, type(self).make, direction=direction)

    def drop(self, relay: int, *, step: bool) -> None:
        """No rule here: positions of a dropped stream stay where they are."""

    @rule(keeper=st.integers(0, 1), steps=st.integers(1, 8))
    def keep(self, keeper: int, steps: int) -> None:
        for _ in range(steps):
            self.world.keepers[keeper].look()

    @rule(keeper=st.integers(0, 1))
    def kill(self, keeper: int) -> None:
        self.world.keepers[keeper].die()

    @rule(most=st.integers(1, 5), commit=st.booleans())
    def read(self, most: int, *, commit: bool) -> None:
        self.world.read(most, commit=commit)

    @invariant()
    def complete(self) -> None:
        if hasattr(self, "world"):
            self.world.check_positions()


class Crashing(Reading):
    """The same, and the server dies now and then."""

    @rule()
    def crash(self) -> None:
        self.world.crash()


def test_no_position_passes_an_id_whose_fact_may_still_come(ready: str) -> None:
    """Savepoints, prepared transactions, killed sessions, two keepers, relays that delete rows: a reader has each fact
    once, in order."""
    Reading.dsn = ready
    run_state_machine_as_test(
        Reading, settings=settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
    )


def test_a_crash_of_the_server_takes_no_position_back(ready: str) -> None:
    Crashing.dsn = ready
    run_state_machine_as_test(
        Crashing, settings=settings(max_examples=examples(12), stateful_step_count=40, deadline=None)
    )


@pytest.fixture
def world(ready: str) -> Iterator[ReadingWorld]:
    world = ReadingWorld(ready)
    yield world
    world.close()


def test_committed_facts_below_an_open_transaction_are_complete(world: ReadingWorld) -> None:
    world.services[0].append(world.stream, 1)
    world.keep()
    world.services[0].append(world.stream, 1)
    world.services[1].begin("read committed", "on")
    world.services[1].append(world.stream, 1)
    world.services[0].append(world.stream, 1)
    world.keep()
    assert world.position == 2
    world.services[1].run("rollback")
    world.keep()
    assert world.position == 4


def test_a_writer_does_not_wait_for_another(world: ReadingWorld) -> None:
    world.services[0].append(world.stream, 1, "web")
    world.services[0].append(world.stream, 1, "till")
    world.relays[0].finish()
    world.keep()
    start = world.position
    world.services[1].begin("read committed", "on")
    world.services[1].append(world.stream, 1, "till")
    id = world.services[0].append(world.stream, 1, "web")
    world.keep()
    row = world.sql.execute("select linear, vector from tidemark_reader.positions").fetchone()
    assert row == (start, {"web": id})
    named = world.sql.execute("select writer, high from tidemark_reader.take_vector(%s, 'vector')", [world.stream])
    assert named.fetchall() == [("web", id), (None, start)]
    world.services[1].run("commit")
    world.keep()
    assert world.sql.execute("select token from tidemark_reader.positions").fetchone() == (f"m{id}",)


def test_the_sequence_that_went_back_begins_a_new_timeline(world: ReadingWorld) -> None:
    for _ in range(4):
        world.services[0].append(world.stream, 1)
    world.keep()
    timeline = world.timeline
    world.sql.execute("select setval(ids, 2) from tidemark.append_streams")
    world.sql.execute("delete from tidemark.append_outbox where id > 2")
    world.keep()
    assert world.timeline > timeline
    assert world.position == 2
    world.services[0].append(world.stream, 1)
    world.keep()
    assert world.position == 3


def test_a_relay_that_finds_a_regression_tells_the_readers(world: ReadingWorld) -> None:
    for _ in range(4):
        world.services[0].append(world.stream, 1)
    world.keep()
    world.relays[0].finish()
    timeline = world.timeline
    world.sql.execute("select setval(ids, 2) from tidemark.append_streams")
    world.keepers[0].die()
    world.relays[0].die()
    world.relays[0].finish()
    assert (world.timeline > timeline, world.position) == (True, 2)


def test_a_restore_of_the_whole_database_stops_no_reader(world: ReadingWorld) -> None:
    """The position waits for the relay, which sees that another process has written its rows."""
    for _ in range(4):
        world.services[0].append(world.stream, 1)
    world.keep()
    world.read(9, commit=True)
    timeline = world.timeline
    world.relays[0].finish()  # what lies beyond the floor that a restore has put there is late
    world.sql.execute("update tidemark.append_progress set floor = floor")
    world.sql.execute("update tidemark_reader.positions set linear = linear")
    world.services[0].append(world.stream, 1)
    world.keep()
    assert world.position == 4
    world.relays[0].die()
    world.relays[0].finish()
    world.keep()
    assert world.position == 5
    assert world.timeline > timeline
    world.read(9, commit=True)
    assert world.delivered == [1, 2, 3, 4, 5]


def test_a_stream_with_writers_elsewhere_is_not_decided_here(world: ReadingWorld) -> None:
    world.services[0].append(world.stream, 1)
    keeper = SteppedKeeper(world.dsn, is_local=lambda _: False)
    keeper.round()
    keeper.round()
    assert world.sql.execute("select count(*) from tidemark_reader.positions").fetchone() == (0,)
    world.sql.execute("select tidemark_reader.publish('published', array[%s], array[9])", [world.stream])
    world.keep()
    assert world.position == 9
    keeper.die()


def test_a_position_follows_a_commit_at_once_and_without_kafka(world: ReadingWorld) -> None:
    """Two processes; the one that works is ended, and the other goes on."""
    halts, threads = [threading.Event(), threading.Event()], list[threading.Thread]()
    for halt in halts:
        session = session_of(world.dsn, "tidemark relay positions")
        threads.append(threading.Thread(target=LocalPositions(session, halt).run))
        threads[-1].start()
        time.sleep(0.2)
    try:
        for number in range(1, 11):
            world.services[0].append(world.stream, 1)
            eventually(partial(world.reached, number))
        halts[0].set()
        threads[0].join(10)
        world.services[0].append(world.stream, 1)
        eventually(partial(world.reached, 11))
    finally:
        for halt, thread in zip(halts, threads, strict=True):
            halt.set()
            thread.join(10)


@pytest.mark.parametrize(
    "statement",
    [
        "select tidemark.append(%(stream)s, '1')",
        "select setval(ids, 1) from tidemark.append_streams where stream = %(stream)s",
        "select tidemark.create_stream('new')",
    ],
)
def test_an_idle_keeper_wakes_when_something_changes(world: ReadingWorld, statement: str) -> None:
    world.services[0].append(world.stream, 1)
    world.services[0].append(world.stream, 1)
    world.keep()
    began = time.monotonic()
    assert world.keepers[0].wait(0.02, 0.1)
    assert 0.1 < time.monotonic() - began < PATIENCE
    with waiting(world) as thread:
        world.sql.execute(statement.encode(), {"stream": world.stream})
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_an_idle_keeper_holds_no_sequence(world: ReadingWorld) -> None:
    """Otherwise no stream could be dropped."""
    world.services[0].append(world.stream, 1)
    world.relays[0].finish()
    world.keep()
    with waiting(world):
        world.sql.execute("select tidemark.drop_stream(%s)", [world.stream])


@contextmanager
def waiting(world: ReadingWorld) -> Iterator[threading.Thread]:
    """The first keeper waits in a thread."""
    thread = threading.Thread(target=world.keepers[0].wait, args=(0.02, 2 * PATIENCE))
    thread.start()
    asleep = "select from pg_stat_activity where application_name = 'keeper' and wait_event = 'PgSleep'"
    eventually(lambda: world.sql.execute(asleep).fetchone() is not None)
    yield thread
    world.sql.execute("select tidemark.create_stream('last')")
    thread.join()


def test_a_keeper_with_something_open_does_not_wait_in_the_database(world: ReadingWorld) -> None:
    """The end of a transaction gives out no ID, and neither does the repair of a sequence."""
    world.services[0].begin("read committed", "on")
    world.services[0].append(world.stream, 1)
    world.keep()
    assert not world.keepers[0].wait(0.02, PATIENCE)
    world.services[0].run("commit")
    world.keep()
    assert world.keepers[0].wait(0.02, 0.1)
    ((ids,),) = world.sql.execute("select ids::text from tidemark.append_streams").fetchall()
    world.sql.execute(f"alter sequence {ids} cycle".encode())
    world.keep()
    assert not world.keepers[0].wait(0.02, PATIENCE)


def test_a_database_that_is_created_again_is_waited_for(world: ReadingWorld) -> None:
    """Before pg_restore connects, the schema is missing: the process goes on when it is there."""
    halt, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            LocalPositions(session_of(world.dsn, "tidemark relay positions"), halt).run()
        except BaseException as error:  # noqa: BLE001 - asserted below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        world.services[0].append(world.stream, 1)
        eventually(partial(world.reached, 1))
        with psycopg.connect(world.dsn, autocommit=True) as owner:
            owner.execute("alter schema tidemark rename to restored")
            time.sleep(2)  # longer than the first pauses
            owner.execute("alter schema restored rename to tidemark")
        world.services[0].append(world.stream, 1)
        eventually(lambda: failures or world.reached(2))
    finally:
        halt.set()
        thread.join(10)
    assert failures == []


def test_rights_of_the_relay_are_enough(world: ReadingWorld) -> None:
    with psycopg.connect(world.dsn, autocommit=True) as owner:
        owner.execute("drop role if exists keeping")
        owner.execute("create role keeping in role tidemark_relay")
        keeper = SteppedKeeper(psycopg.conninfo.make_conninfo(world.dsn, options="-c role=keeping"))
        world.services[0].append(world.stream, 1)
        keeper.round()
        keeper.round()
        keeper.round()
        assert world.position == 1
        assert keeper.wait(0.01, 0.02)
        keeper.die()
        owner.execute("drop role keeping")
