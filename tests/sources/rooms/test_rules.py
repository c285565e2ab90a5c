"""The rules of the room DAG: random rooms in any order of arrival match the definitions, and bad events are refused."""

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
    compute_depth,
)


@settings(max_examples=examples(60))
@given(arrivals(with_wrong_depths=True))
def test_any_events_in_any_order_match_the_definitions(
    case: tuple[list[RoomEvent], list[RoomEvent]],
) -> None:
    """After each arrival the extremities, the state after the event and the current state are as defined. The rooms
    have forks, merges, missing events, outliers that become regular, soft-failed and rejected events, wrong depths, and
    depths near the maximum. Only events with a wrong depth are refused."""
    everything, order = case
    rooms, stored = MemoryRooms(), []
    for event in order:
        try:
            receive_event(rooms, event, ExpectedRoom(everything, {}))
        except BadEvent:
            assert has_wrong_depth(event, everything)
            continue
        stored.append(event)
        turns = {other.id: turn for turn, other in enumerate(stored)}
        expected = ExpectedRoom(everything, {id: other.kind for id, other in rooms.events.items()}, turns)
        room = rooms.rooms[ROOM]
        assert {*room.forward_extremities} == expected.forward_extremities
        assert room.backward_extremities == expected.backward_extremities
        assert room.groups.state(rooms.group_of[event.id]) == expected.state_at(event.id)
        assert (room.group is None) == (not expected.forward_extremities)
        assert room.group is None or room.groups.state(room.group) == expected.current_state
    assert [event for id, event in enumerate(rooms.live, 1) if id not in rooms.recipients] == [
        event.id for event in stored
    ]


@settings(max_examples=examples(60))
@given(arrivals())
def test_members_receive_the_events_of_their_stays(
    case: tuple[list[RoomEvent], list[RoomEvent]],
) -> None:
    """A member receives the events of each stay, and again the event that ended the stay, even if that event is stored
    only as an outlier. The rooms have forks, merges, late events and missing events."""
    everything, order = case
    rooms, expected = MemoryRooms(), ExpectedRoom(everything, {})
    for event in order:
        receive_event(rooms, event, expected)
    ids = [event.id for event in order]
    for member in MEMBER_NAMES:
        received = [(rooms.live[id - 1], id in rooms.recipients) for id in rooms.received_ids(member)]
        assert received == expected_deliveries(expected, ids, member)
    expected_at_end = ExpectedRoom(everything, {event.id: event.kind for event in order})
    stays = expected_at_end.compute_stays((id, turn) for turn, id in enumerate(ids))
    lasting = {(member, began) for member, began, ended, _ in stays if ended is None}
    assert lasting == {*rooms.rooms[ROOM].joined.items()}
    ended = [(member, stay) for member, stays_of_member in rooms.stays.items() for stay in stays_of_member]
    ended_stays = {
        (member, stay.begin_turn, stay.end_turn, rooms.live[stay.leave_id - 1])
        for member, stay in ended
        if stay.leave_id
    }
    assert ended_stays == {stay for stay in stays if stay[2] is not None}


def test_only_joined_members_receive_an_event() -> None:
    """A kick, an invite and a ban end a stay. A member who rejoins does not receive the events between the stays."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)

    def send(id: str, member: str | None = None, membership: str = "") -> None:
        prevs = rooms.extremities(ROOM)
        kind = "m" if member is None else MEMBER
        prev_ids = tuple(prev.id for prev in prevs)
        content = {"membership": membership}
        rooms.persist(RoomEvent(id, ROOM, kind, "@op", prev_ids, compute_depth(prevs), member, content))

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
    """The room begins with its last event. Each round fetches the missing events as history, until none is missing."""
    rooms, expected = MemoryRooms(), ExpectedRoom(events, {})
    receive_event(rooms, events[-1], expected)
    while missing := sorted(rooms.rooms[ROOM].backward_extremities):
        for id in missing:
            event = expected.all_events[id]
            before = [entry.id for entry in expected.state_before(event).values()]
            for other in before:
                if other not in rooms.events:
                    rooms.persist(replace(expected.all_events[other], kind=EventKind.OUTLIER))
            rooms.persist(event, "backfill", before)
    assert len(rooms.history) == len({*rooms.history})
    assert rooms.rooms[ROOM].backward_extremities == set()


@settings(max_examples=examples(60))
@given(dags(), st.data())
def test_a_refused_event_changes_nothing(events: list[RoomEvent], data: st.DataObject) -> None:
    """Any event of the room is changed into a bad one and persisted: the content of the rooms does not change."""
    rooms = MemoryRooms()
    for event in events:
        rooms.persist(event)
    before = repr(rooms.__dict__)
    two_events = data.draw(st.sampled_from(events)), data.draw(st.sampled_from(events))
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
        rooms.persist(data.draw(st.sampled_from(bad))(*two_events))
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
            replace(an_event("deep", ROOT), depth=7),
            "its depth is 7, and an event after these prev events has 2",
        ),
        (replace(an_event("twice", ROOT), prevs=("root", "root")), "names a prev event twice"),
        (replace(ROOT, id=""), "its ID: '' is not a legal name"),
        (replace(ROOT, id="x", state_key="a\nb"), "its state key"),
        (replace(ROOT, id="x" * 256), "its ID"),
        (replace(ROOT, id="\ud800"), "its ID"),
        (replace(ROOT, id="x", prevs=tuple(map(str, range(21))), depth=2), "and the maximum is 20"),
        (
            replace(ROOT, id="x", kind=EventKind.OUT_OF_BAND),
            "its kind is out-of-band, but it is not a membership event",
        ),
        (
            RoomEvent("x", ROOM, MEMBER, "@ada", (), 1, "@bob", {"membership": ["invite"]}, EventKind.OUT_OF_BAND),
            "its kind is out-of-band, but it is not a membership event",
        ),
        (
            an_event("gap", ROOT, replace(ROOT, id="unknown")),
            "its prev event unknown is not stored, or is stored only as an outlier. Then the state before this event"
            " must be given",
        ),
    ],
)
def test_a_bad_event_is_refused_with_one_clear_error(event: RoomEvent, message: str) -> None:
    """The error says what is wrong with the event."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    require_refused(rooms, event, message)


def test_a_cycle_is_refused_whichever_event_comes_first() -> None:
    """Of two events that name each other, the second is refused. Of three events in a cycle none is refused: the event
    with the wrong depth loses its edge."""
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
    """The event `shallow` arrives before the prev event that it names, whose depth is not lower. The prev event is
    stored, and `shallow` does not follow it."""
    rooms = MemoryRooms()
    first = an_event("first", ROOT)
    genuine = an_event("genuine", first)
    shallow = replace(an_event("shallow", genuine), depth=3)
    for event in (ROOT, first):
        rooms.persist(event)
    rooms.persist(shallow, state_ids_before=[])
    assert rooms.rooms[ROOM].backward_extremities == {"genuine"}
    rooms.persist(genuine)
    assert {*rooms.rooms[ROOM].forward_extremities} == {"shallow", "genuine"}
    assert rooms.rooms[ROOM].backward_extremities == set()
    require_refused(rooms, replace(shallow, id="again"), "its depth is 3, and an event after these prev events has 4")
    rooms.persist(an_event("both", shallow, genuine))
    assert {*rooms.rooms[ROOM].forward_extremities} == {"both"}


def test_a_room_continues_at_the_maximum_depth() -> None:
    """All events after an event of depth 2^63 - 1 have this depth. State and extremities follow the order in which
    the events arrive."""
    rooms = MemoryRooms()
    last = replace(an_event("last", ROOT), prevs=("unknown",), depth=MAX_DEPTH)
    rooms.persist(last, state_ids_before=[])
    for id in ("z", "y", "x"):
        prevs = rooms.extremities(ROOM)
        assert compute_depth(prevs) == MAX_DEPTH
        rooms.persist(an_event(id, *(rooms.events[prev.id] for prev in prevs), key="a"))
        room = rooms.rooms[ROOM]
        assert {*room.forward_extremities} == {id}
        assert room.group is not None
        assert [entry.id for entry in room.groups.state(room.group).values()] == [id]
    require_refused(rooms, replace(an_event("past", last), depth=MAX_DEPTH + 1), "is not from 1 to 9223372036854775807")


@pytest.mark.parametrize("kind", [EventKind.SOFT_FAILED, EventKind.REJECTED])
@pytest.mark.parametrize("order", list(permutations("abc")))
def test_a_soft_failed_event_between_regular_ones_leaves_no_extremity(order: tuple[str, ...], kind: EventKind) -> None:
    """Soft-failed or rejected events between regular events, a hundred times, in any order of arrival: the only forward
    extremity is the last regular event."""
    rooms = MemoryRooms()
    last = ROOT
    rooms.persist(last)
    for number in range(100):
        first_bad = replace(an_event(f"s{number}", last), kind=kind)
        second_bad = replace(an_event(f"t{number}", first_bad), kind=kind)
        regular = an_event(f"u{number}", second_bad)
        for name in order:
            rooms.persist({"a": first_bad, "b": second_bad, "c": regular}[name], state_ids_before=[])
        last = regular
    assert {*rooms.rooms[ROOM].forward_extremities} == {"u99"}


def test_a_received_state_must_consist_of_stored_state_events() -> None:
    """The events of the state must belong to the room, have different keys, and be less deep than the new event."""
    rooms = MemoryRooms()
    topic, plain = an_event("topic", key="a"), an_event("plain")
    for event in (topic, plain, an_event("far", key="a", room="!other"), an_event("again", topic, key="a")):
        rooms.persist(event)
    deeper = replace(plain, id="deeper", prevs=("unknown",), depth=3)
    for wrong in (["nowhere"], ["plain"], ["far"], ["topic", "again"]):
        with pytest.raises(BadEvent, match="the given state contains"):
            rooms.persist(deeper, state_ids_before=wrong)
    with pytest.raises(BadEvent, match="is not below the event's depth"):
        rooms.persist(replace(deeper, depth=2), state_ids_before=["again"])
    rooms.persist(deeper, state_ids_before=["again"])


def test_an_outlier_has_no_edges_and_no_state_until_it_is_regular() -> None:
    """An outlier is in no timeline either. It becomes regular once; then it is a duplicate."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    outlier = replace(an_event("late", ROOT, key="a"), kind=EventKind.OUTLIER)
    rooms.persist(outlier)
    assert ({*rooms.rooms[ROOM].forward_extremities}, rooms.live, {*rooms.group_of}) == ({"root"}, ["root"], {"root"})
    require_refused(rooms, outlier, "a duplicate: it is stored already, as outlier")
    rooms.persist(replace(outlier, kind=EventKind.REGULAR))
    assert ({*rooms.rooms[ROOM].forward_extremities}, rooms.live) == ({"late"}, ["root", "late"])
    require_refused(rooms, outlier, "a duplicate: it is stored already, as regular")


def test_an_out_of_band_membership_is_published_again_as_a_regular_event() -> None:
    """An invite to an unknown room is published for its user; later it is published for the room."""
    rooms = MemoryRooms()
    invite = RoomEvent(
        "invite", ROOM, MEMBER, "@ada", ("unknown",), 9, "@bob", {"membership": "invite"}, EventKind.OUT_OF_BAND
    )
    rooms.persist(invite, "backfill")  # published live all the same
    assert (rooms.live, rooms.rooms[ROOM].backward_extremities, rooms.rooms[ROOM].group) == (["invite"], set(), None)
    rooms.persist(replace(invite, kind=EventKind.REGULAR), state_ids_before=[])
    assert (rooms.live, rooms.rooms[ROOM].backward_extremities) == (["invite", "invite"], {"unknown"})


def test_a_new_event_follows_the_ten_deepest_extremities() -> None:
    """Of 25 forks, each new event merges at most ten. After three events one forward extremity is left."""
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
            RoomEvent(f"heal{number}", ROOM, "m", "@ada", tuple(prev.id for prev in prevs), compute_depth(prevs))
        )
    assert {*rooms.rooms[ROOM].forward_extremities} == {"heal2"}


@pytest.mark.parametrize("kind", [EventKind.SOFT_FAILED, EventKind.REJECTED])
def test_a_soft_failed_or_rejected_event_neither_is_an_extremity_nor_removes_one(kind: EventKind) -> None:
    """New events follow the event before it, until a regular event follows it. A soft-failed event sets its state key
    in that state; a rejected event does not."""
    rooms = MemoryRooms()
    rooms.persist(ROOT)
    bad = replace(an_event("bad", ROOT, key="a"), kind=kind)
    rooms.persist(bad)
    room = rooms.rooms[ROOM]
    assert {*room.forward_extremities} == {"root"}
    assert room.group is not None
    assert not room.groups.state(room.group)
    rooms.persist(an_event("after", bad))
    assert {*room.forward_extremities} == {"after"}
    state = room.groups.state(room.group)
    assert [entry.id for entry in state.values()] == ["bad"] * (kind is EventKind.SOFT_FAILED)
