"""Events in Postgres: the tables match the rules in memory, and a refused event writes nothing."""

import json
import re
import threading
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings

from tests.examples import SHARING, examples
from tests.sources.rooms.dags import ROOM, an_event, arrivals
from tests.sources.rooms.memory import MemoryRooms
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.persisting import (
    RoomStore,
    RoomStreams,
    SqlAppender,
    WriterAppender,
    choose_prevs_and_depth,
)
from tidemark.sources.rooms.reading import (
    VectorPosition,
    load_current_state,
    load_joined_rooms,
    load_members,
    load_state_at,
    messages,
)
from tidemark.sources.rooms.rules import MAX_CHAIN_LENGTH, MAX_DEPTH, MEMBER, BadEvent, EventKind, RoomEvent
from tidemark.sources.rooms.tables import PostgresStateGroups

STORE = RoomStore(WriterAppender("web"), RoomStreams())
SQL_STORE = RoomStore(SqlAppender("service"), RoomStreams())
ROOT = an_event("root")


def a_member(id: str, member: str, *prevs: RoomEvent, membership: str = "join") -> RoomEvent:
    event = an_event(id, *prevs, key=member)
    return replace(event, type=MEMBER, content={"membership": membership})


def invalidations(connection: Connection) -> list[tuple[str, list[str] | None]]:
    rows = connection.execute("select cache, keys from rooms.invalidations order by stream_id")
    return rows.fetchall()


def table_contents(connection: Connection) -> list[object]:
    """The content of all tables of the rooms and of the outbox."""
    names = ["rooms", "events", "edges", "forward_extremities", "backward_extremities", "timeline", "memberships"]
    names += ["invalidations", "state_groups", "state_deltas"]
    contents: list[object] = []
    for name in [*(f"rooms.{name}" for name in names), "tidemark.append_outbox"]:
        contents += [name, *sorted(connection.execute(f"select * from {name}".encode()).fetchall(), key=repr)]
    return contents


def move_to_room(event: RoomEvent, room: str) -> RoomEvent:
    """The same event in another room, with IDs that no other room has."""
    return replace(event, id=room + event.id, room=room, prevs=tuple(room + id for id in event.prevs))


@settings(max_examples=examples(12), suppress_health_check=SHARING)
@given(arrivals(with_wrong_depths=True))
def test_the_tables_match_the_rules(rooms: Connection, case: tuple[list[RoomEvent], list[RoomEvent]]) -> None:
    """Random rooms in any order of arrival, with wrong depths and depths near the maximum: extremities and states match
    the rules and the definitions, also after compaction."""
    everything, order = case
    room = f"!{rooms.execute('select count(*) from rooms.rooms').fetchall()[0][0]}"
    named = {event.id: move_to_room(event, room) for event in everything}
    memory, expected = MemoryRooms(), ExpectedRoom(named.values(), {})
    turns: dict[str, int] = {}
    for number, event in enumerate(named[event.id] for event in order):
        before = [entry.id for entry in expected.state_before(event).values()]
        with rooms.transaction():
            for id in (id for id in before if id not in memory.events):
                memory.persist(replace(expected.all_events[id], kind=EventKind.OUTLIER))
                STORE.persist(rooms, replace(expected.all_events[id], kind=EventKind.OUTLIER))
            store = SQL_STORE if number % 2 else STORE
            try:
                memory.persist(event, state_ids_before=before)
            except BadEvent as bad:
                with pytest.raises(BadEvent, match=re.escape(str(bad))):
                    store.persist(rooms, event, state_ids_before=before)
                continue
            assert store.persist(rooms, event, state_ids_before=before)
            turns[event.id] = number
        assert {*tables.load_forward_extremities(rooms, room)} == {*memory.rooms[room].forward_extremities}
        assert {*tables.load_backward_extremities(rooms, room)} == memory.rooms[room].backward_extremities
    for _ in range(2):
        stored = tables.load_events(rooms, [event.id for event in named.values()])
        expected = ExpectedRoom(named.values(), {id: event.kind for id, (event, _) in stored.items()}, turns)
        assert load_current_state(rooms, room)[1] == expected.current_state
        states = {id: tables.load_state(rooms, group) for id, (_, group) in stored.items() if group is not None}
        assert states == {id: expected.state_at(id) for id in expected.non_outliers}
        tables.compact_states(rooms, room)


def test_an_event_its_rows_and_its_facts_are_committed_together(rooms: Connection) -> None:
    """After a rollback the tables are empty. After a commit the outbox has the facts of the event."""
    with rooms.transaction(force_rollback=True):
        STORE.persist(rooms, a_member("ada", "@ada"))
    assert not [row for row in table_contents(rooms) if not isinstance(row, str)]
    assert STORE.persist(rooms, a_member("ada", "@ada")) == 2
    outbox = rooms.execute(
        "select stream, rows[1] from tidemark.append_outbox join tidemark.append_streams using (number)"
    )
    rows = [(stream, json.loads(row)) for stream, row in outbox.fetchall()]
    assert ("events", {"room": "!tea", "event": "ada"}) in rows
    assert [row[:2] for stream, row in rows if stream == "caches"] == [["*room", ["!tea"]], ["rooms_of", ["@ada"]]]


def test_history_has_descending_stream_ids(rooms: Connection) -> None:
    """Fetched events have the IDs -1, -2, and so on in the stream `backfill`, and remove backward extremities."""
    middle, last = an_event("middle", ROOT), an_event("last", an_event("middle", ROOT))
    STORE.persist(rooms, last, state_ids_before=[])
    assert tables.load_backward_extremities(rooms, ROOM) == ["middle"]
    assert STORE.persist(rooms, middle, "backfill", state_ids_before=[]) == -1
    assert tables.load_backward_extremities(rooms, ROOM) == ["root"]
    assert STORE.persist(rooms, ROOT, "backfill") == -2
    assert tables.load_backward_extremities(rooms, ROOM) == []
    assert [*tables.load_forward_extremities(rooms, ROOM)] == ["last"]


def test_an_id_may_be_reserved_before_the_room_is_locked(rooms: Connection, second_connection: Connection) -> None:
    """So the events of a room may be committed in another order than that of their IDs."""
    for store in (STORE, SQL_STORE):
        with second_connection.transaction():
            writer = "web" if store is STORE else ""
            ((early,),) = second_connection.execute(
                "select tidemark.reserve('events', writer => %s)", [writer]
            ).fetchall()
            root = replace(ROOT, id=f"root{early}", room=f"!{early}")
            assert store.persist(rooms, root) == early + 1
            prevs, depth = choose_prevs_and_depth(second_connection, root.room)
            late = replace(root, id=f"late{early}", prevs=prevs, depth=depth)
            assert store.persist(second_connection, late, reserved_id=early) == early


REFUSED = [
    (an_event("self", replace(ROOT, id="self")), "names itself"),
    (ROOT, "a duplicate"),
    (replace(ROOT, room="!other"), "another event has this ID"),
    (an_event("far", ROOT, room="!other"), "is of another room"),
    (replace(ROOT, id="deep", depth=2**63), "its depth 9223372036854775808"),
    (an_event("gap", replace(ROOT, id="unknown")), "Then the state before this event must be given"),
    (an_event("second", replace(ROOT, id="first", depth=5)), "a cycle: it and first name each other"),
    (replace(an_event("second", ROOT), prevs=("third",), depth=5), "its depth is 5, and an event after these"),
    (replace(ROOT, id="nul", content={"text": "\0"}), "the character NUL"),
    (replace(ROOT, id="nul", content={"text": "\\\0"}), "the character NUL"),
    (replace(ROOT, id="stray", content={"text": "\ud800"}), "cannot be stored as JSON"),
    (replace(ROOT, id="nan", content={"text": {1, object()}}), "cannot be stored as JSON"),
]


def test_a_refused_event_writes_nothing(rooms: Connection) -> None:
    """Nothing is written even if the service commits its transaction."""
    STORE.persist(rooms, ROOT)
    first = replace(an_event("first", ROOT), prevs=("root", "second"), depth=5)
    STORE.persist(rooms, first, state_ids_before=[])
    STORE.persist(rooms, an_event("third", first))
    before = table_contents(rooms)
    for event, message in REFUSED:
        with rooms.transaction(), pytest.raises(BadEvent, match=message):
            STORE.persist(rooms, event)
        assert table_contents(rooms) == before


def test_an_event_may_be_named_in_another_room_before_it_arrives(rooms: Connection) -> None:
    """An event of another room names it as a prev event. The event is stored; in the other room it stays missing."""
    shallow = replace(an_event("shallow", ROOT, room="!other"), depth=2)
    STORE.persist(rooms, shallow, state_ids_before=[])
    assert tables.load_backward_extremities(rooms, "!other") == ["root"]
    assert STORE.persist(rooms, ROOT) == 2
    assert tables.load_backward_extremities(rooms, "!other") == ["root"]
    assert [*tables.load_forward_extremities(rooms, ROOM)] == ["root"]
    again = replace(an_event("again", ROOT, room="!other"), prevs=("unknown", "root"))
    with pytest.raises(BadEvent, match="is of another room"):
        STORE.persist(rooms, again, state_ids_before=[])


def test_an_outlier_becomes_regular_whatever_types_its_content_has(rooms: Connection) -> None:
    """The content has a tuple, infinity and bytes. The stored content is JSON, and the same event is no conflict."""
    event = replace(
        an_event("late", ROOT), content={"list": (1, 2), "none": float("inf"), "bytes": b"x", "text": "\\u0000"}
    )
    STORE.persist(rooms, replace(event, kind=EventKind.OUTLIER))
    assert STORE.persist(rooms, ROOT) == 1
    assert STORE.persist(rooms, event) == 2


def test_chains_in_tables_stay_short(rooms: Connection) -> None:
    """The 101st group of a chain is based on the middle of the chain. Compaction leaves the only group that is used."""
    event = an_event("e0", key="k0")
    for number in range(1, MAX_CHAIN_LENGTH + 30):
        STORE.persist(rooms, event)
        event = an_event(f"e{number}", event, key=f"k{number % 7}")
    ((group,),) = rooms.execute("select state_group from rooms.rooms").fetchall()
    chains = PostgresStateGroups(rooms, ROOM)
    stored = [id for (id,) in rooms.execute("select id from rooms.state_groups").fetchall()]
    assert max(len(chains.chain(id)) for id in stored) == MAX_CHAIN_LENGTH
    state, length = tables.load_state(rooms, group), len(chains.chain(group))
    rooms.execute("update rooms.events set state_group = %s where state_group <> %s", [group, group])
    assert tables.compact_states(rooms, ROOM) == len(stored) - 1
    assert tables.load_state(rooms, group) == state
    assert len(chains.chain(group)) == 1 < length


def test_only_one_of_two_concurrent_events_with_one_id_is_stored(
    rooms: Connection, second_connection: Connection
) -> None:
    """The events are in two rooms, so no room lock prevents the conflict. The unique index of the table does."""
    errors: list[BaseException] = []

    def second() -> None:
        try:
            STORE.persist(second_connection, replace(ROOT, room="!other"))
        except BadEvent as error:
            errors.append(error)

    with rooms.transaction():
        STORE.persist(rooms, ROOT)
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
    thread.join()
    assert [str(error) for error in errors] == ["event 'root' is refused: another event has this ID"]
    assert rooms.execute("select room from rooms.rooms").fetchall() == [(ROOM,)]


def test_memberships_and_invalidations_follow_the_current_state(rooms: Connection) -> None:
    """A change of memberships invalidates the caches of the room, and the joined rooms of each member, or of all
    members if many change. Another change invalidates only the state."""
    ada, bob = a_member("ada", "@ada"), a_member("bob", "@bob", a_member("ada", "@ada"))
    for event in (ada, bob, an_event("topic", bob, key=""), an_event("hello", an_event("topic", bob))):
        STORE.persist(rooms, event)
    assert (load_members(rooms, ROOM), load_joined_rooms(rooms, "@bob")) == (["@ada", "@bob"], [ROOM])
    assert invalidations(rooms) == [
        ("*room", [ROOM]),
        ("rooms_of", ["@ada"]),
        ("*room", [ROOM]),
        ("rooms_of", ["@bob"]),
        ("state", [ROOM]),
    ]
    assert load_current_state(rooms, ROOM)[0] == 3
    members = [replace(a_member(f"m{number}", f"@m{number}"), kind=EventKind.OUTLIER) for number in range(11)]
    for member in members:
        STORE.persist(rooms, member)
    far = replace(an_event("far", ROOT), depth=9, prevs=("unknown",))
    STORE.persist(rooms, far, state_ids_before=[member.id for member in members])
    assert invalidations(rooms)[-2:] == [("*room", [ROOM]), ("rooms_of", None)]
    assert len(load_members(rooms, ROOM)) == 13


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_soft_failed_event_between_regular_ones_leaves_no_extremity(
    rooms: Connection, order: tuple[int, ...]
) -> None:
    """A soft-failed and a rejected event between regular events, twenty times, in any order of arrival: the only
    forward extremity is the last regular event. The state at an earlier position is the state at that time."""
    last = ROOT
    STORE.persist(rooms, last)
    for number in range(20):
        first_bad = replace(an_event(f"s{number}", last), kind=EventKind.SOFT_FAILED)
        second_bad = replace(an_event(f"t{number}", first_bad), kind=EventKind.REJECTED)
        regular = an_event(f"u{number}", second_bad, key=f"k{number % 3}")
        before = load_state_at(rooms, ROOM, VectorPosition(1000))
        state_ids = [entry.id for entry in before.values()]
        ids = [
            STORE.persist(rooms, (first_bad, second_bad, regular)[place], state_ids_before=state_ids) for place in order
        ]
        assert load_state_at(rooms, ROOM, VectorPosition((ids[order.index(2)] or 0) - 1)) == before
        last = regular
    assert [*tables.load_forward_extremities(rooms, ROOM)] == ["u19"]


def test_an_event_with_a_wrong_depth_loses_its_edge(rooms: Connection) -> None:
    """The event `shallow` arrives before the prev event that it names, whose depth is not lower. The prev event is
    stored, and `shallow` does not follow it."""
    first = an_event("first", ROOT)
    genuine = an_event("genuine", first)
    for event in (ROOT, first):
        STORE.persist(rooms, event)
    STORE.persist(rooms, replace(an_event("shallow", genuine), depth=3), state_ids_before=[])
    assert tables.load_backward_extremities(rooms, ROOM) == ["genuine"]
    assert STORE.persist(rooms, genuine)
    assert tables.load_backward_extremities(rooms, ROOM) == []
    assert {*tables.load_forward_extremities(rooms, ROOM)} == {"shallow", "genuine"}


def test_a_room_continues_at_the_maximum_depth(rooms: Connection) -> None:
    """After an event of depth 2^63 - 1, each new event still replaces the forward extremity and changes the state."""
    STORE.persist(rooms, replace(an_event("last", ROOT), prevs=("unknown",), depth=MAX_DEPTH), state_ids_before=[])
    for id in ("z", "y", "x"):
        prevs, depth = choose_prevs_and_depth(rooms, ROOM)
        assert depth == MAX_DEPTH
        STORE.persist(rooms, RoomEvent(id, ROOM, "topic", "@ada", prevs, depth, "a"))
        assert [*tables.load_forward_extremities(rooms, ROOM)] == [id]
        assert [entry.id for entry in load_current_state(rooms, ROOM)[1].values()] == [id]
    page, _ = messages(rooms, ROOM, VectorPosition(1000))
    assert [row.event for row in page] == ["x", "y", "z", "last"]
