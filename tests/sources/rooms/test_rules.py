"""The rules of the room DAG: random rooms in any order of arrival against their definitions, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sources.rooms.dags import (
    MEMBER_NAMES,
    ROOM,
    an_event,
    arrivals,
    dags,
    expected_deliveries,
    has_wrong_depth,
    receive_event,
)
from tests.sources.rooms.memory import MemoryRooms
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.sources.rooms.rules import (
    MAX_DEPTH,
    MAX_NEW_PREV_EVENTS,
    MEMBER,
    BadEvent,
    EventKind,
    RoomEvent,
    depth_after,
)


@settings(max_examples=examples(60))
@given(arrivals(with_wrong_depths=True))
def test_any_events_in_any_order_match_the_definitions(
    case: tuple[list[RoomEvent], list[RoomEvent]],
) -> None:
    """Forward and backward extremities, the state at each event and the room's, after each arrival: forks, merges,
    missing events, outliers that become regular, soft-failed and rejected events, false depths, the deepest depth. Only
    what lies is refused, and nothing is refused for what another event said."""
    everything, order = case
    rooms, placed = MemoryRooms(), []
    for event in order:
        try:
            receive_event(rooms, event, ExpectedRoom(everything, {}))
        except BadEvent:
            assert has_wrong_depth(event, everything)
            continue
        placed.append(event)
        turns = {other.id: turn for turn, other in enumerate(placed)}
        expected = ExpectedRoom(everything, {id: held.held_as for id, held in rooms.events.items()}, turns)
        room = rooms.rooms[ROOM]
        assert {*room.forward_extremities} == expected.forward_extremities
        assert room.backward_extremities == expected.backward_extremities
        assert room.groups.state(rooms.group_of[event.id]) == expected.state_at(event.id)
        assert (room.group is None) == (not expected.forward_extremities)
        assert room.group is None or room.groups.state(room.group) == expected.current_state
    assert [event for id, event in enumerate(rooms.live, 1) if id not in rooms.recipients] == [
        event.id for event in placed
    ]


@settings(max_examples=examples(60))
@given(arrivals())
def test_members_receive_the_events_of_their_stays(
    case: tuple[list[RoomEvent], list[RoomEvent]],
) -> None:
    """And once more that it is over, with the event that ended it, be it held as an outlier only; whatever forks,
    merges, late events and gaps make of who has joined."""
    everything, order = case
    rooms, expected = MemoryRooms(), ExpectedRoom(everything, {})
    for event in order:
        receive_event(rooms, event, expected)
    placed = [event.id for event in order]
    for member in MEMBER_NAMES:
        received = [(rooms.live[id - 1], id in rooms.recipients) for id in rooms.received_ids(member)]
        assert received == expected_deliveries(expected, placed, member)
    held = ExpectedRoom(everything, {event.id: event.held_as for event in order})
    stays = held.stays((id, turn) for turn, id in enumerate(placed))
    lasting = {(member, began) for member, began, ended, _ in stays if ended is None}
    assert lasting == {*rooms.rooms[ROOM].joined.items()}
    kept = [(member, stay) for member, of in rooms.stays.items() for stay in of]
    over = {
        (member, other.began, other.ended, rooms.live[other.left_by - 1]) for member, other in kept if other.left_by
    }
    assert over == {stay for stay in stays if stay[2] is not None}


def test_only_joined_members_receive_an_event() -> None:
    """A kick, a leave and a ban alike; who comes back is told from there on, and not what was said meanwhile."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)

    def send(id: str, member: str | None = None, membership: str = "") -> None:
        prevs = rooms.extremities(ROOM)
        kind = "m" if member is None else MEMBER
        names = tuple(other.id for other in prevs)
        content = {"membership": membership}
        rooms.persist(RoomEvent(id, ROOM, kind, "@op", names, depth_after(prevs), member, content))

    def received(member: str) -> list[str]:
        return [rooms.live[id - 1] + "!" * (id in rooms.recipients) for id in rooms.received_ids(member)]

    for member in MEMBER_NAMES:
        send(f"join{member}", member, "join")
    send("hello")
    send("kick", "@bob", "leave")
    send("not-for-bob")
    send("again", "@bob", "join")
    send("invite-again", "@eve", "invite")
    send("ban", "@bob", "ban")
    send("nobody-else")
    assert received("@bob") == [
        "join@bob",
        "join@eve",
        "hello",
        "kick",
        "kick!",
        "again",
        "invite-again",
        "ban",
        "ban!",
    ]
    assert received("@eve")[-2:] == ["invite-again", "invite-again!"]
    assert received("@ada")[-1] == "nobody-else"
    assert rooms.received_ids("@nobody") == []


@settings(max_examples=examples(60))
@given(dags(), st.randoms(use_true_random=False))
def test_backfill_from_backward_extremities_closes_them(events: list[RoomEvent], random: object) -> None:
    """From the last event alone: each round fetches what is missing, as history, until nothing is."""
    rooms, expected = MemoryRooms(), ExpectedRoom(events, {})
    receive_event(rooms, events[-1], expected)
    while missing := sorted(rooms.rooms[ROOM].backward_extremities):
        for id in missing:
            event = expected.all_events[id]
            before = [entry.id for entry in expected.state_before(event).values()]
            for other in before:
                if other not in rooms.events:
                    rooms.persist(replace(expected.all_events[other], held_as=EventKind.OUTLIER))
            rooms.persist(event, "backfill", before)
    assert len(rooms.history) == len({*rooms.history})
    assert rooms.rooms[ROOM].backward_extremities == set()


@settings(max_examples=examples(60))
@given(dags(), st.data())
def test_a_refused_event_changes_nothing(events: list[RoomEvent], data: st.DataObject) -> None:
    """Any event bent into a bad one: the room is as it was, to the last edge."""
    rooms = MemoryRooms()
    for event in events:
        rooms.persist(event)
    before = repr(rooms.__dict__)
    bent = data.draw(st.sampled_from(events)), data.draw(st.sampled_from(events))
    bad: list[Callable[[RoomEvent, RoomEvent], RoomEvent]] = [
        lambda one, _: one,
        lambda one, _: replace(one, content={"other": 1}),
        lambda one, _: replace(one, id="new", prevs=("new",)),
        lambda one, _: replace(one, id="new", prevs=(one.id, one.id), depth=one.depth + 1),
        lambda one, other: replace(one, id="new", prevs=(other.id,), depth=other.depth),
        lambda one, other: replace(one, id="new", prevs=(other.id,), depth=other.depth + 1, room="!other"),
        lambda one, other: replace(one, id="new", prevs=(other.id, "unknown"), depth=other.depth + 5),
        lambda one, _: replace(one, id="a b"),
        lambda one, _: replace(one, id="new\0"),
    ]
    with pytest.raises(BadEvent):
        rooms.persist(data.draw(st.sampled_from(bad))(*bent))
    assert repr(rooms.__dict__) == before


def require_refused(rooms: MemoryRooms, event: RoomEvent, message: str) -> None:
    with pytest.raises(BadEvent, match=message):
        rooms.persist(event)


ROOT = an_event("root")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (an_event("self", replace(ROOT, id="self")), "names itself"),
        (an_event("root"), "a duplicate: it is stored already, as regular"),
        (replace(ROOT, sender="@eve"), "another event has this ID"),
        (an_event("far", ROOT, room="!other"), "its prev event root is of another room, !tea"),
        (replace(ROOT, id="deep", depth=MAX_DEPTH + 1), "its depth 9223372036854775808 is not from 1"),
        (replace(ROOT, id="zero", depth=0), "its depth 0 is not"),
        (replace(ROOT, id="whole", depth=True), "its depth True is not"),
        (
            replace(an_event("lies", ROOT), depth=7),
            "its depth is 7, and an event after these prev events has 2",
        ),
        (replace(an_event("twice", ROOT), prevs=("root", "root")), "names a prev event twice"),
        (replace(ROOT, id=""), "its ID: '' is not 1 to 255 characters"),
        (replace(ROOT, id="x", state_key="a\nb"), "its state key"),
        (replace(ROOT, id="x" * 256), "its ID"),
        (replace(ROOT, id="\ud800"), "its ID"),
        (replace(ROOT, id="x", prevs=tuple(map(str, range(21))), depth=2), "it names 21 prev events, and 20 are"),
        (replace(ROOT, id="x", held_as=EventKind.OUT_OF_BAND), "only an invite, its rejection or a knock"),
        (
            RoomEvent("x", ROOM, MEMBER, "@ada", (), 1, "@bob", {"membership": ["invite"]}, EventKind.OUT_OF_BAND),
            "only an invite, its rejection or a knock",
        ),
        (an_event("gap", ROOT, replace(ROOT, id="unknown")), "prev event unknown is not stored, and no state"),
    ],
)
def test_a_bad_event_is_refused_with_one_clear_error(event: RoomEvent, message: str) -> None:
    """It says what is wrong, by the event's ID."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    require_refused(rooms, event, message)


def test_a_cycle_is_refused_whichever_event_comes_first() -> None:
    """Of two that name each other. Of three none is made: the one that lied of its depth gives way."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    first = replace(an_event("first", ROOT), prevs=("root", "second"), depth=5)
    rooms.persist(first, state_ids_before=[])
    require_refused(rooms, replace(an_event("second", first)), "a cycle: it and first name each other")
    third = an_event("third", first)
    rooms.persist(third)
    rooms.persist(an_event("second", third))
    assert {*rooms.rooms[ROOM].forward_extremities} == {"second"}
    assert "first" not in rooms.rooms[ROOM].successor_depths["second"]


def test_an_event_with_a_wrong_depth_loses_its_edge() -> None:
    """As with events of another room: the liar misses what it named, for good, and follows nothing of it."""
    rooms = MemoryRooms()
    first = an_event("first", ROOT)
    genuine = an_event("genuine", first)
    liar = replace(an_event("liar", genuine), depth=3)
    for event in (ROOT, first):
        rooms.persist(event)
    rooms.persist(liar, state_ids_before=[])
    assert rooms.rooms[ROOM].backward_extremities == {"genuine"}
    rooms.persist(genuine)
    assert {*rooms.rooms[ROOM].forward_extremities} == {"liar", "genuine"}
    assert rooms.rooms[ROOM].backward_extremities == set()
    require_refused(rooms, replace(liar, id="again"), "its depth is 3, and an event after these prev events has 4")
    rooms.persist(an_event("both", liar, genuine))
    assert {*rooms.rooms[ROOM].forward_extremities} == {"both"}


def test_a_room_continues_at_the_maximum_depth() -> None:
    """2^63 - 1 is the depth of all that follows an event of that depth; state and extremities go on by arrival."""
    rooms = MemoryRooms()
    last = replace(an_event("last", ROOT), prevs=("unknown",), depth=MAX_DEPTH)
    rooms.persist(last, state_ids_before=[])
    for id in ("z", "y", "x"):
        prevs = rooms.extremities(ROOM)
        assert depth_after(prevs) == MAX_DEPTH
        rooms.persist(an_event(id, *(rooms.events[other.id] for other in prevs), key="a"))
        room = rooms.rooms[ROOM]
        assert {*room.forward_extremities} == {id}
        assert room.group is not None
        assert [entry.id for entry in room.groups.state(room.group).values()] == [id]
    require_refused(rooms, replace(an_event("past", last), depth=MAX_DEPTH + 1), "is not from 1 to 9223372036854775807")


@pytest.mark.parametrize("held_as", [EventKind.SOFT_FAILED, EventKind.REJECTED])
@pytest.mark.parametrize("order", list(permutations("abc")))
def test_a_soft_failed_event_between_regular_ones_leaves_no_extremity(
    order: tuple[str, ...], held_as: EventKind
) -> None:
    """A <- soft-failed <- regular, a hundred times: one forward extremity, in whichever order the three arrive."""
    rooms = MemoryRooms()
    last = ROOT
    rooms.persist(last)
    for number in range(100):
        between = replace(an_event(f"s{number}", last), held_as=held_as)
        further = replace(an_event(f"t{number}", between), held_as=held_as)
        upon = an_event(f"u{number}", further)
        for name in order:
            rooms.persist({"a": between, "b": further, "c": upon}[name], state_ids_before=[])
        last = upon
    assert {*rooms.rooms[ROOM].forward_extremities} == {"u99"}


def test_a_received_state_must_consist_of_stored_state_events() -> None:
    """Events of the room, of different keys, less deep than the event, and not rejected."""
    rooms = MemoryRooms()
    topic, plain = an_event("topic", key="a"), an_event("plain")
    for event in (topic, plain, an_event("far", key="a", room="!other"), an_event("again", topic, key="a")):
        rooms.persist(event)
    deeper = replace(plain, id="deeper", prevs=("unknown",), depth=3)
    for wrong in (["nowhere"], ["plain"], ["far"], ["topic", "again"]):
        with pytest.raises(BadEvent, match="the state before it names"):
            rooms.persist(deeper, state_ids_before=wrong)
    with pytest.raises(BadEvent, match="is not below its own"):
        rooms.persist(replace(deeper, depth=2), state_ids_before=["again"])
    rooms.persist(deeper, state_ids_before=["again"])


def test_an_outlier_has_no_edges_and_no_state_until_it_is_regular() -> None:
    """No edges, no extremities, no state group, no timeline; then all of them, once."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    outlier = replace(an_event("late", ROOT, key="a"), held_as=EventKind.OUTLIER)
    rooms.persist(outlier)
    assert ({*rooms.rooms[ROOM].forward_extremities}, rooms.live, {*rooms.group_of}) == ({"root"}, ["root"], {"root"})
    require_refused(rooms, outlier, "a duplicate: it is stored already, as outlier")
    rooms.persist(replace(outlier, held_as=EventKind.REGULAR))
    assert ({*rooms.rooms[ROOM].forward_extremities}, rooms.live) == ({"late"}, ["root", "late"])
    require_refused(rooms, outlier, "a duplicate: it is stored already, as regular")


def test_an_out_of_band_membership_is_published_again_as_a_regular_event() -> None:
    """An invite is sent to its user although the room is not known; later it is in the room's timeline."""
    rooms = MemoryRooms()
    invite = RoomEvent(
        "invite", ROOM, MEMBER, "@ada", ("unknown",), 9, "@bob", {"membership": "invite"}, EventKind.OUT_OF_BAND
    )
    rooms.persist(invite, "backfill")  # wherever it was found: its user reads what arrives
    assert (rooms.live, rooms.rooms[ROOM].backward_extremities, rooms.rooms[ROOM].group) == (["invite"], set(), None)
    rooms.persist(replace(invite, held_as=EventKind.REGULAR), state_ids_before=[])
    assert (rooms.live, rooms.rooms[ROOM].backward_extremities) == (["invite", "invite"], {"unknown"})


def test_a_new_event_follows_the_ten_deepest_extremities() -> None:
    """A room with many forks heals: what is left is taken by the next event."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    for number in range(25):
        rooms.persist(an_event(f"fork{number}", ROOT))
    rooms.persist(an_event("more", rooms.events["fork24"]))
    assert rooms.extremities(ROOM)[0].id == "more"
    for number in range(3):
        prevs = rooms.extremities(ROOM)
        assert len(prevs) <= MAX_NEW_PREV_EVENTS
        rooms.persist(
            RoomEvent(f"heal{number}", ROOM, "m", "@ada", tuple(other.id for other in prevs), depth_after(prevs))
        )
    assert {*rooms.rooms[ROOM].forward_extremities} == {"heal2"}


@pytest.mark.parametrize("held_as", [EventKind.SOFT_FAILED, EventKind.REJECTED])
def test_a_soft_failed_or_rejected_event_neither_is_an_extremity_nor_removes_one(held_as: EventKind) -> None:
    """New events are built on what was there before it, until a regular one is built on itself. Of its state key
    they know it where it is soft-failed, and nobody where it is rejected."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    bad = replace(an_event("bad", ROOT, key="a"), held_as=held_as)
    rooms.persist(bad)
    room = rooms.rooms[ROOM]
    assert {*room.forward_extremities} == {"root"}
    assert room.group is not None
    assert not room.groups.state(room.group)
    rooms.persist(an_event("upon", bad))
    assert {*room.forward_extremities} == {"upon"}
    state = room.groups.state(room.group)
    assert [entry.id for entry in state.values()] == ["bad"] * (held_as is EventKind.SOFT_FAILED)
