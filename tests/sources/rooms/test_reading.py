"""Sync, messages and initial sync. Tests of positions insert rows of the timeline without `RoomStore`."""

from dataclasses import replace
from random import Random

from tests.sources.rooms.dags import ROOM, an_event
from tests.sources.rooms.memory import MemoryRooms
from tests.sources.rooms.test_persisting import SQL_STORE, STORE, a_member
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.persisting import choose_prevs_and_depth
from tidemark.sources.rooms.reading import PageEnd, TimelineRow, VectorPosition, initial_sync, messages, sync
from tidemark.sources.rooms.rules import MEMBER, EventKind, RoomEvent

WRITERS = ("first", "second", "third")


def insert_event(
    connection: Connection, id: int, room: str = ROOM, depth: int = 1, writer: str = "first"
) -> TimelineRow:
    """Insert a row of the timeline, with an event that has no edges and no state."""
    event = f"{room}{id}"
    connection.execute("insert into rooms.rooms (room) values (%s) on conflict do nothing", [room])
    connection.execute(
        "insert into rooms.events (event, room, type, sender, prevs, depth, content, held_as)"
        " values (%s, %s, 'm', '@ada', '{}', %s, '{}', 'regular')",
        [event, room, depth],
    )
    connection.execute("insert into rooms.timeline values (%s, %s, %s, %s, %s)", [id, event, room, depth, writer])
    return TimelineRow(id, event, room, depth, writer)


def truncate_tables(connection: Connection) -> None:
    connection.execute("truncate rooms.rooms, rooms.state_groups, rooms.timeline, rooms.forward_extremities cascade")


def ids(rows: list[TimelineRow] | tuple[TimelineRow, ...]) -> list[int]:
    return [row.stream_ordering for row in rows]


def test_an_event_of_a_slow_writer_is_returned_when_the_position_covers_it(rooms: Connection) -> None:
    """The slow writer has the lower ID. The linear position waits for this ID; the vector does not."""
    insert_event(rooms, 2, writer="second")
    linear, vector = VectorPosition(0), VectorPosition(0, {"second": 2})
    assert not sync(rooms, "@ada", VectorPosition(0), linear, rooms=[ROOM]).events
    result = sync(rooms, "@ada", VectorPosition(0), vector, rooms=[ROOM])
    assert ids([*result.events]) == [2]
    insert_event(rooms, 1)
    assert ids([*sync(rooms, "@ada", result.until, VectorPosition(2), rooms=[ROOM]).events]) == [1]
    assert ids([*sync(rooms, "@ada", linear, VectorPosition(2), rooms=[ROOM]).events]) == [1, 2]


def test_each_event_is_returned_once_however_the_positions_move(rooms: Connection) -> None:
    """Random writers, positions and limits: no event is missed or repeated, and each answer is in order of arrival."""
    for seed in range(10):
        truncate_tables(rooms)
        random = Random(seed)
        everything = [
            insert_event(rooms, id, f"!{random.randrange(4)}", writer=random.choice(WRITERS)) for id in range(1, 120)
        ]
        rooms_to_read = ["!0", "!1", "!2"]
        since, now = VectorPosition(0), VectorPosition(0)
        received: list[TimelineRow] = []
        while since != VectorPosition(200) or now != VectorPosition(200):
            linear = min(now.linear + random.randrange(12), 119)
            positions = {
                writer: max(now.position_of(writer), linear) + random.randrange(8)
                for writer in random.sample(WRITERS, 2)
            }
            now = VectorPosition(linear, {**now.positions, **positions}) if linear < 119 else VectorPosition(200)
            result = sync(rooms, "@ada", since, now, limit=random.choice([1, 3, 1000]), rooms=rooms_to_read)
            assert ids([*result.events]) == sorted(ids([*result.events]))
            assert all(
                since.position_of(row.writer) < row.stream_ordering <= result.until.position_of(row.writer)
                for row in result.events
            )
            received += result.events
            since = result.until if result.until != VectorPosition(119) else now
            if now == VectorPosition(200) and not result.events:
                break
        assert sorted(received) == [row for row in everything if row.room in rooms_to_read]


def test_pages_omit_and_repeat_nothing_while_events_arrive(rooms: Connection) -> None:
    """The pages have the events that exist when the first page is read, each once, and no later live events."""
    for seed in range(5):
        truncate_tables(rooms)
        random = Random(seed)
        existing = [insert_event(rooms, id, depth=random.randrange(1, 30)) for id in range(1, 60)]
        history = [insert_event(rooms, -id, depth=random.randrange(1, 10)) for id in range(1, 20)]
        new_ids = iter([*range(60, 200)])
        result: list[TimelineRow] = []
        page_end: PageEnd | None = None
        for number in range(1000):
            page, page_end = messages(rooms, ROOM, VectorPosition(59), page_end, limit=7)
            result += page
            if page_end is None:
                break
            insert_event(rooms, next(new_ids), depth=random.randrange(1, 40))
            history.append(insert_event(rooms, -20 - number, depth=random.randrange(1, 40)))
        assert {*existing} | {*history[:19]} <= {*result} <= {*existing} | {*history}
        assert result == sorted({*result}, key=lambda row: (-row.depth, -row.stream_ordering))


def test_initial_sync_is_consistent_with_its_token(rooms: Connection, second_connection: Connection) -> None:
    """At each position, the events and the state are as the definitions say, although later events are stored."""
    for seed in range(3):
        truncate_tables(rooms)
        random = Random(seed)
        memory = MemoryRooms()
        ids: dict[str, int] = {}
        for number in range(40):
            recent = [event.summary for event in [*memory.events.values()][-4:]]
            prevs = random.sample(recent, min(len(recent), random.randrange(1, 4)))
            depth = 1 + max((prev.depth for prev in prevs), default=0)
            key = random.choice([None, "a", "b", "c"])
            kind = random.choice([*[EventKind.REGULAR] * 4, EventKind.SOFT_FAILED, EventKind.REJECTED])
            names = tuple(prev.id for prev in prevs)
            event = RoomEvent(f"e{number}", ROOM, "topic", "@ada", names, depth, key, {}, kind)
            memory.persist(event)
            ids[event.id] = (STORE if number % 3 else SQL_STORE).persist(rooms, event) or 0
        first = min(ids.values())
        for linear in range(first - 1, first + 40):
            result = initial_sync(second_connection, ROOM, VectorPosition(linear), limit=100)
            expected = ExpectedRoom(
                memory.events.values(), {id: memory.events[id].kind for id in ids if ids[id] <= linear}
            )
            assert result.state == expected.current_state
            assert {row.stream_ordering for row in result.events} == {id for id in ids.values() if id <= linear}


def test_an_out_of_band_membership_is_returned_only_to_its_user(rooms: Connection) -> None:
    """An invite to an unknown room, its rejection and a knock are returned once."""
    invite = a_member("invite", "@bob", replace(an_event("unknown"), depth=8), membership="invite")
    STORE.persist(rooms, replace(invite, kind=EventKind.OUT_OF_BAND))
    result = sync(rooms, "@bob", VectorPosition(0), VectorPosition(1))
    assert (ids([*result.out_of_band]), result.events, result.rooms) == ([1], [], [])
    assert not sync(rooms, "@ada", VectorPosition(0), VectorPosition(1)).out_of_band
    assert not sync(rooms, "@bob", result.until, VectorPosition(1)).out_of_band
    assert messages(rooms, ROOM, VectorPosition(1)) == ([], None)
    rejection = replace(invite, id="no", prevs=("invite",), depth=10, content={"membership": "leave"})
    STORE.persist(rooms, replace(rejection, kind=EventKind.OUT_OF_BAND))
    assert ids([*sync(rooms, "@bob", result.until, VectorPosition(2)).out_of_band]) == [2]
    knock = replace(invite, id="knock", prevs=("no",), depth=11, content={"membership": "knock"})
    STORE.persist(rooms, replace(knock, kind=EventKind.OUT_OF_BAND))
    assert ids([*sync(rooms, "@bob", VectorPosition(2), VectorPosition(3)).out_of_band]) == [3]


def test_sync_reads_the_rooms_that_the_member_has_joined(rooms: Connection) -> None:
    """A room that the member has left is not in `rooms`."""
    for room in ("!one", "!two"):
        STORE.persist(rooms, RoomEvent(f"join{room}", room, MEMBER, "@ada", (), 1, "@ada", {"membership": "join"}))
    prevs, depth = choose_prevs_and_depth(rooms, "!two")
    STORE.persist(rooms, RoomEvent("leave", "!two", MEMBER, "@ada", prevs, depth, "@ada", {"membership": "leave"}))
    assert sync(rooms, "@ada", VectorPosition(0), VectorPosition(3)).rooms == ["!one"]
    assert sync(rooms, "@eve", VectorPosition(0), VectorPosition(3)).rooms == []
