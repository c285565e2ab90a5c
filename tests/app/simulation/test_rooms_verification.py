"""Answers that tests make up, held against rooms that they have written: each kind of fault is seen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from tests.sources.rooms.test_persisting import STORE, a_member
from tidemark.app.simulation import workload
from tidemark.app.simulation.room_services import (
    ANSWERS_TABLE,
    REMOTE_TABLE,
    ClientKind,
    make_room_streams,
    make_simulated_streams,
)
from tidemark.app.simulation.rooms import CLIENTS_BY_PROCESS, RoomCount, RoomsVerification, RoomsWorkload
from tidemark.app.simulation.script import Successor, WriterPlan
from tidemark.app.simulation.workload import SimulationDatabases, SimulationPlan
from tidemark.app.stack.home import Home
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of
from tidemark.sources.rooms.persisting import choose_prevs_and_depth
from tidemark.sources.rooms.reading import (
    VectorPosition,
    load_current_state,
    load_incarnation,
    load_joined_rooms_with_version,
    messages,
)
from tidemark.sources.rooms.rules import EventKind, RoomEvent
from tidemark.sources.rooms.tables import SCHEMA

ROOM = "!tea"


class World:
    """One room of two members: events 1 and 2, and what `say` adds."""

    def __init__(self, dsn: str, connection: Connection) -> None:
        self.dsn = dsn
        self.connection = connection
        ada = a_member("ada", "@ada")
        for event in (ada, a_member("bob", "@bob", ada)):
            STORE.persist(connection, event)

    def say(self, id: str, **more: Any) -> None:
        prevs, depth = choose_prevs_and_depth(self.connection, ROOM)
        STORE.persist(self.connection, RoomEvent(id, ROOM, "m", "@ada", prevs, depth, **more))

    def answer(self, client: str, kind: str, about: str, since: int, upto: int, answer: Mapping[str, Any]) -> None:
        texts = [msgspec.json.encode(it).decode() for it in (VectorPosition(since), VectorPosition(upto), answer)]
        self.connection.execute(
            "insert into play.answers (client, kind, about, since, upto, answer, incarnation)"
            " values (%s, %s, %s, %s, %s, %s, %s)",
            [client, kind, about, *texts, load_incarnation(self.connection)],
        )

    def compare_synced(
        self, since: int, upto: int, *events: int, member: str = "@ada", left: Sequence[int] = ()
    ) -> None:
        self.answer("line", "sync", member, since, upto, {"events": events, "sent": [], "left": left})

    def verification(self) -> RoomsVerification:
        return RoomsVerification(
            self.dsn, self.dsn, lambda: {stream.name: 0 for stream in make_simulated_streams(make_room_streams(""))}
        )

    def counts(self) -> dict[str, RoomCount]:
        with self.verification() as verification:
            return {it.reader: it for it in [*verification.counts(), verification.compare_rooms()]}


@pytest.fixture
def world(database: str) -> Iterator[World]:
    dsn = workload.make_database(database, "rooms")
    workload.prepare_writing(dsn)
    workload.make_streams(dsn, make_simulated_streams(make_room_streams("")))
    with session_of(dsn, "tests") as session:
        SCHEMA.migrate(session)
    workload.run_script(dsn, REMOTE_TABLE)
    workload.run_script(dsn, ANSWERS_TABLE)
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield World(dsn, connection)


def test_a_sync_is_right_only_with_each_event_once_and_in_order(world: World) -> None:
    """What is still to come is neither read nor missed; a client's answers join."""
    for id in ("three", "four", "five"):
        world.say(id)
    world.compare_synced(0, 2, 1, 2)
    assert world.counts()["line"] == RoomCount("line", 5, 2)
    world.compare_synced(2, 4, 4)
    assert world.counts()["line"] == RoomCount("line", 5, 3, missed=1)
    world.compare_synced(4, 4, 3)
    assert world.counts()["line"] == RoomCount("line", 5, 4)
    world.compare_synced(3, 5, 5, 4)
    assert world.counts()["line"] == RoomCount("line", 5, 5, duplicated=1, disordered=1)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([(2, 5, (3,), (4,))], RoomCount("line", 3, 3)),
        ([(2, 4, (3,), (4,))], RoomCount("line", 3, 3)),
        ([(2, 5, (3,), ())], RoomCount("line", 3, 2, missed=1)),
        ([(2, 5, (3, 5), (4,))], RoomCount("line", 3, 3, duplicated=1)),
        ([(2, 5, (3,), (4,)), (5, 5, (), (4,))], RoomCount("line", 3, 3, duplicated=1)),
        ([(2, 5, (), (4,)), (5, 5, (3,), ())], RoomCount("line", 3, 3, disordered=1)),
    ],
)
def test_the_end_of_a_stay_is_told_once_behind_all_of_it(
    world: World, answers: Sequence[tuple[int, int, Sequence[int], Sequence[int]]], found: RoomCount
) -> None:
    """Of events 3, by which @bob leaves, 4, which tells him so, and 5, which is not for him."""
    prevs, depth = choose_prevs_and_depth(world.connection, ROOM)
    STORE.persist(world.connection, replace(a_member("no", "@bob", membership="leave"), prevs=prevs, depth=depth))
    world.say("five")
    world.compare_synced(0, 2, 2, member="@bob")
    for since, upto, events, left in answers:
        world.compare_synced(since, upto, *events, member="@bob", left=left)
    assert world.counts()["line"] == found


def test_a_walk_through_history_is_right_only_with_all_that_was_there(world: World) -> None:
    """Of live events those up to its position; in the order of history; with the state of its beginning."""
    world.say("three")
    found, _ = messages(world.connection, ROOM, VectorPosition(3))
    keys = [(it.depth, it.stream_ordering) for it in found]
    state = [(*key, *entry) for key, entry in load_current_state(world.connection, ROOM)[1].items()]
    for events in (keys, keys[1:], keys[::-1], [*keys, keys[-1]]):
        world.answer("history", "history", ROOM, 0, 3, {"events": events, "history": 0, "state": state})
    world.answer("history", "history", ROOM, 0, 2, {"events": keys, "history": 0, "state": state})
    found_count = world.counts()["history"]
    assert found_count == RoomCount("history", 14, 13, missed=1, duplicated=2, disordered=1)


def test_the_state_of_a_first_sync_is_that_of_its_position(world: World) -> None:
    """One that lacks a member is not, however many there are."""
    state = [(*key, *entry) for key, entry in load_current_state(world.connection, ROOM)[1].items()]
    events = [(2, 2), (1, 1)]
    for given in (*[state] * 5, state[1:]):
        world.answer("history", "history", ROOM, 0, 2, {"events": events, "history": 0, "state": given})
    assert world.counts()["history"] == RoomCount("history", 12, 12, different=1)


def test_an_invite_is_in_no_state_before_it_is_placed(world: World) -> None:
    """It was told to its user with an ID that the position has passed, and is in the room with a later one."""
    prevs, depth = choose_prevs_and_depth(world.connection, ROOM)
    content = {"membership": "invite"}
    invite = RoomEvent("invite", ROOM, "m.room.member", "@ada", prevs, depth, "@eve", content, EventKind.OUT_OF_BAND)
    STORE.persist(world.connection, invite)
    state = [(*key, *entry) for key, entry in load_current_state(world.connection, ROOM)[1].items()]
    STORE.persist(world.connection, replace(invite, kind=EventKind.REGULAR))
    world.answer("history", "history", ROOM, 0, 3, {"events": [(2, 2), (1, 1)], "history": 0, "state": state})
    assert world.counts()["history"] == RoomCount("history", 2, 2)


def test_a_cache_is_stale_behind_an_invalidation_that_its_position_has_passed(world: World) -> None:
    """Not one that is newer than it need be, nor one whose invalidation it has not come to."""
    ((first, last),) = world.connection.execute(
        "select min(stream_id), max(stream_id) from rooms.invalidations"
    ).fetchall()
    served = [["state", ROOM, 1], ["members", ROOM, 2], ["members", ROOM, 1]]
    world.answer("caches", "served", "", 0, last, {"served": served})
    world.answer("caches", "served", "", 0, first, {"served": served})
    assert world.counts()["caches"] == RoomCount("caches", 6, 6, stale=2)


def test_the_cached_rooms_of_a_member_are_stale_in_the_same_way(world: World) -> None:
    """Behind an invalidation of the member's own, or of all; another member's is none of it."""
    world.connection.execute("insert into rooms.invalidations values (100, 'rooms_of', null, 0, 'web')")
    for upto, versions in ((99, (0, 1)), (100, (1, 2))):
        served = [["rooms_of", "@ada", version] for version in versions] + [["rooms_of", "@eve", versions[0]]]
        world.answer("caches", "served", "", 0, upto, {"served": served})
    assert world.counts()["caches"] == RoomCount("caches", 6, 6, stale=2)
    assert load_joined_rooms_with_version(world.connection, "@ada") == (2, [ROOM])
    assert load_joined_rooms_with_version(world.connection, "@eve") == (1, [])


def test_a_client_that_does_not_find_its_own_event_has_missed_it(world: World) -> None:
    """It waited for the position."""
    for found in (True, False):
        world.answer("own", "own", ROOM, 0, 2, {"id": 2, "found": found})
    assert world.counts()["own"] == RoomCount("own", 2, 1, missed=1)


@pytest.mark.parametrize("how", [Successor.BASE_BACKUP, Successor.LAGGING_STANDBY])
def test_answers_of_a_database_that_went_back_are_counted_as_they_were_found(world: World, how: Successor) -> None:
    """Its clients begin anew, and what they are answered is held against what is there now. What was wrong, stays
    so, and nothing that is lost is owed to anybody."""
    world.say("lost")
    with world.verification() as verification:
        world.compare_synced(0, 2, 1, 2)
        world.answer("own", "own", ROOM, 0, 2, {"id": 2, "found": False})
        with verification.paused():  # this is when it is looked at
            verification.prepare_services_server(world.dsn, how)
        world.connection.execute("delete from rooms.timeline where event = 'lost'")
        assert load_incarnation(world.connection) > 0
        before = {it.reader: it for it in verification.counts()}
        assert before["own"] == RoomCount("own", 0, 0, missed=1)
        assert before["line"] == RoomCount("line", 2, 2)
        assert ("line", "@ada") in verification.unanswered_clients
        world.compare_synced(0, 2, 1, 2)
        assert verification.counts()[0] == RoomCount("line", 4, 4)
        assert ("line", "@ada") not in verification.unanswered_clients
        world.say("new")
        assert verification.counts()[0] == RoomCount("line", 5, 4)
        world.compare_synced(2, 2, 2)
        assert verification.counts()[0] == RoomCount("line", 5, 4, duplicated=1)


def test_a_standby_in_step_begins_nothing_anew(world: World) -> None:
    """What clients were told is all there: their answers go on."""
    with world.verification() as verification:
        world.compare_synced(0, 1, 1)
        with verification.paused():
            verification.prepare_services_server(world.dsn, Successor.SYNCHRONOUS_STANDBY)
        world.compare_synced(1, 2, 2)
        assert verification.counts() == [RoomCount("line", 2, 2)]


def test_answers_behind_those_that_a_readers_database_has_kept_are_looked_at_anew(world: World) -> None:
    """It went back, and gives their numbers out again."""
    with world.verification() as verification:
        for _ in range(2):
            world.answer("own", "own", ROOM, 0, 2, {"id": 2, "found": True})
        assert verification.counts() == [RoomCount("own", 2, 2)]
        world.connection.execute("delete from play.answers where number = 2")
        world.connection.execute("alter sequence play.answers_number_seq restart with 2")
        with verification.paused():
            verification.prepare_readers_server(world.dsn)
        world.answer("own", "own", ROOM, 0, 2, {"id": 2, "found": False})
        assert verification.counts() == [RoomCount("own", 3, 2, missed=1)]


@pytest.mark.parametrize(
    "harm",
    [
        "delete from rooms.forward_extremities",
        "insert into rooms.backward_extremities values ('!tea', 'nowhere')",
        "update rooms.rooms set state_group = 1",
        "update rooms.events set state_group = 1",
        "update rooms.memberships set event = 'ada'",
        "delete from rooms.timeline where stream_ordering = 1",
        "update rooms.stays set began = 2 where member = '@ada'",
    ],
)
def test_tables_are_right_only_as_the_definitions_say(world: World, harm: str) -> None:
    """Extremities, states, members, timelines."""
    assert world.counts()["tables"] == RoomCount("tables", 1, 1)
    world.connection.execute(harm.encode())
    assert world.counts()["tables"] == RoomCount("tables", 1, 0, different=1)


def test_no_client_writes_when_the_services_have_ended(tmp_path: Path) -> None:
    """An event a second of its own would always be one that other clients have yet to read."""
    workload = RoomsWorkload(SimulationPlan(WriterPlan(), frozenset(), 1, 1.0), verify=True)
    databases = SimulationDatabases(Home(tmp_path), "", "", "", "")
    assert {*workload.writing_readers} == {
        name for name, kinds in CLIENTS_BY_PROCESS.items() if ClientKind.OWN_EVENT in kinds
    }

    def kinds() -> set[ClientKind]:
        roles = [workload.make_reader_role(databases, name, 1).room_client for name in workload.readers]
        return {kind for role in roles if role is not None for kind in role.kinds}

    assert kinds() == {*ClientKind}
    workload.have_services_ended = True
    assert kinds() == {*ClientKind} - {ClientKind.OWN_EVENT}
