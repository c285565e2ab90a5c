"""Sync, messages and initial sync, on tables that these tests fill by hand where positions are what matters."""

from dataclasses import replace
from random import Random

from tests.sources.rooms.dags import ROOM, an_event
from tests.sources.rooms.memory import MemoryRooms
from tests.sources.rooms.test_persisting import OWN, STORE, a_member
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.persisting import next_prevs_and_depth
from tidemark.sources.rooms.reading import PageEnd, TimelineRow, VectorPosition, messages, initial_sync, sync
from tidemark.sources.rooms.rules import MEMBER, EventKind, RoomEvent

WRITERS = ("first", "second", "third")


def tell(connection: Connection, id: int, room: str = ROOM, depth: int = 1, writer: str = "first") -> TimelineRow:
    """A row of a timeline, of an event that is in nothing else."""
    event = f"{room}{id}"
    connection.execute("insert into rooms.rooms (room) values (%s) on conflict do nothing", [room])
    connection.execute(
        "insert into rooms.events (event, room, type, sender, prevs, depth, content, held_as)"
        " values (%s, %s, 'm', '@ada', '{}', %s, '{}', 'regular')",
        [event, room, depth],
    )
    connection.execute("insert into rooms.timeline values (%s, %s, %s, %s, %s)", [id, event, room, depth, writer])
    return TimelineRow(id, event, room, depth, writer)


def emptied(connection: Connection) -> None:
    connection.execute("truncate rooms.rooms, rooms.state_groups, rooms.timeline, rooms.forward_extremities cascade")


def ids(told: list[TimelineRow] | tuple[TimelineRow, ...]) -> list[int]:
    return [it.stream_ordering for it in told]


def test_a_late_event_is_handed_over_when_its_writer_has_come_to_it(rooms: Connection) -> None:
    """The slow writer's ID is below what was read of the others: the line waits for it, the vector goes on without."""
    tell(rooms, 2, writer="second")
    line, vector = VectorPosition(0), VectorPosition(0, {"second": 2})
    assert not sync(rooms, "@ada", VectorPosition(0), line, rooms=[ROOM]).events
    found = sync(rooms, "@ada", VectorPosition(0), vector, rooms=[ROOM])
    assert ids([*found.events]) == [2]
    tell(rooms, 1)
    assert ids([*sync(rooms, "@ada", found.until, VectorPosition(2), rooms=[ROOM]).events]) == [1]
    assert ids([*sync(rooms, "@ada", line, VectorPosition(2), rooms=[ROOM]).events]) == [1, 2]


def test_each_event_is_handed_over_once_however_the_positions_move(rooms: Connection) -> None:
    """Random writers, positions and limits: nothing is missed or repeated, each answer is in order of arrival."""
    for seed in range(10):
        emptied(rooms)
        dice = Random(seed)
        everything = [tell(rooms, id, f"!{dice.randrange(4)}", writer=dice.choice(WRITERS)) for id in range(1, 120)]
        wanted = ["!0", "!1", "!2"]
        since, now = VectorPosition(0), VectorPosition(0)
        got: list[TimelineRow] = []
        while since != VectorPosition(200) or now != VectorPosition(200):
            linear = min(now.linear + dice.randrange(12), 119)
            positions = {writer: max(now.position_of(writer), linear) + dice.randrange(8) for writer in dice.sample(WRITERS, 2)}
            now = VectorPosition(linear, {**now.positions, **positions}) if linear < 119 else VectorPosition(200)
            found = sync(rooms, "@ada", since, now, limit=dice.choice([1, 3, 1000]), rooms=wanted)
            assert ids([*found.events]) == sorted(ids([*found.events]))
            assert all(since.position_of(it.writer) < it.stream_ordering <= found.until.position_of(it.writer) for it in found.events)
            got += found.events
            since = found.until if found.until != VectorPosition(119) else now
            if now == VectorPosition(200) and not found.events:
                break
        assert sorted(got) == [it for it in everything if it.room in wanted]


def test_pages_have_no_hole_and_no_repetition_while_events_come(rooms: Connection) -> None:
    """By depth and arrival: all that was there at the first page, once; live events of later are left to sync."""
    for seed in range(5):
        emptied(rooms)
        dice = Random(seed)
        there = [tell(rooms, id, depth=dice.randrange(1, 30)) for id in range(1, 60)]
        history = [tell(rooms, -id, depth=dice.randrange(1, 10)) for id in range(1, 20)]
        coming = iter([*range(60, 200)])
        found: list[TimelineRow] = []
        place: PageEnd | None = None
        for number in range(1000):
            page, place = messages(rooms, ROOM, VectorPosition(59), place, limit=7)
            found += page
            if place is None:
                break
            tell(rooms, next(coming), depth=dice.randrange(1, 40))
            history.append(tell(rooms, -20 - number, depth=dice.randrange(1, 40)))
        assert {*there} | {*history[:19]} <= {*found} <= {*there} | {*history}
        assert found == sorted({*found}, key=lambda it: (-it.depth, -it.stream_ordering))


def test_initial_sync_is_consistent_with_its_token(rooms: Connection, another: Connection) -> None:
    """Timeline and state are those of the position, whatever came after it: held against the definitions."""
    for seed in range(3):
        emptied(rooms)
        dice = Random(seed)
        memory = MemoryRooms()
        ids: dict[str, int] = {}
        for number in range(40):
            recent = [event.summary for event in [*memory.events.values()][-4:]]
            prevs = dice.sample(recent, min(len(recent), dice.randrange(1, 4)))
            depth = 1 + max((prev.depth for prev in prevs), default=0)
            key = dice.choice([None, "a", "b", "c"])
            held_as = dice.choice([*[EventKind.REGULAR] * 4, EventKind.SOFT_FAILED, EventKind.REJECTED])
            names = tuple(prev.id for prev in prevs)
            event = RoomEvent(f"e{number}", ROOM, "topic", "@ada", names, depth, key, {}, held_as)
            memory.persist(event)
            ids[event.id] = (STORE if number % 3 else OWN).persist(rooms, event) or 0
        first = min(ids.values())
        for linear in range(first - 1, first + 40):
            found = initial_sync(another, ROOM, VectorPosition(linear), limit=100)
            expected = ExpectedRoom(memory.events.values(), {id: memory.events[id].held_as for id in ids if ids[id] <= linear})
            assert found.state == expected.current_state
            assert {it.stream_ordering for it in found.events} == {id for id in ids.values() if id <= linear}


def test_an_out_of_band_membership_is_sent_to_its_user_alone(rooms: Connection) -> None:
    """An invite to a room that the server does not know, its rejection, a knock; and to nobody a second time."""
    invite = a_member("invite", "@bob", replace(an_event("unknown"), depth=8), membership="invite")
    STORE.persist(rooms, replace(invite, held_as=EventKind.OUT_OF_BAND))
    found = sync(rooms, "@bob", VectorPosition(0), VectorPosition(1))
    assert (ids([*found.out_of_band]), found.events, found.rooms) == ([1], [], [])
    assert not sync(rooms, "@ada", VectorPosition(0), VectorPosition(1)).out_of_band
    assert not sync(rooms, "@bob", found.until, VectorPosition(1)).out_of_band
    assert messages(rooms, ROOM, VectorPosition(1)) == ([], None)
    rejection = replace(invite, id="no", prevs=("invite",), depth=10, content={"membership": "leave"})
    STORE.persist(rooms, replace(rejection, held_as=EventKind.OUT_OF_BAND))
    assert ids([*sync(rooms, "@bob", found.until, VectorPosition(2)).out_of_band]) == [2]
    knock = replace(invite, id="knock", prevs=("no",), depth=11, content={"membership": "knock"})
    STORE.persist(rooms, replace(knock, held_as=EventKind.OUT_OF_BAND))
    assert ids([*sync(rooms, "@bob", VectorPosition(2), VectorPosition(3)).out_of_band]) == [3]


def test_sync_reads_the_rooms_that_the_member_has_joined(rooms: Connection) -> None:
    """And no longer those that it has left."""
    for room in ("!one", "!two"):
        STORE.persist(rooms, RoomEvent(f"join{room}", room, MEMBER, "@ada", (), 1, "@ada", {"membership": "join"}))
    prevs, depth = next_prevs_and_depth(rooms, "!two")
    STORE.persist(rooms, RoomEvent("leave", "!two", MEMBER, "@ada", prevs, depth, "@ada", {"membership": "leave"}))
    assert sync(rooms, "@ada", VectorPosition(0), VectorPosition(3)).rooms == ["!one"]
    assert sync(rooms, "@eve", VectorPosition(0), VectorPosition(3)).rooms == []
