"""Random rooms as strategies of Hypothesis: DAGs, and what arrives of them in which order."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.sources.rooms.memory import MemoryRooms
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.sources.rooms.rules import MAX_DEPTH, MEMBER, EventKind, RoomEvent, depth_after

ROOM = "!tea"
_KEPT = [EventKind.REGULAR] * 6 + [EventKind.SOFT_FAILED, EventKind.REJECTED]
_KEYS = ["a", "b", "c"]
MEMBER_NAMES = ("@ada", "@bob", "@eve")
_MEMBERSHIPS = ("join", "join", "leave", "ban")


def an_event(
    id: str, *prevs: RoomEvent, key: str | None = None, held_as: EventKind = EventKind.REGULAR, room: str = ROOM
) -> RoomEvent:
    """One that follows `prevs`."""
    depth = depth_after(prev.summary for prev in prevs)
    return RoomEvent(id, room, "topic", "@ada", tuple(prev.id for prev in prevs), depth, key, held_as=held_as)


@st.composite
def dags(draw: st.DrawFn, most: int = 25, *, odd: bool = False) -> list[RoomEvent]:
    """Events in an order in which each comes after those that it names: forks, merges, state, members, bad ones.

    `odd`: some say a false depth (`lies`), and the room may begin right below the deepest depth there is, upon an event
    that nobody has.
    """
    events: list[RoomEvent] = [an_event("e00", key="a")]
    if odd and draw(st.booleans()):
        events = [replace(events[0], prevs=("gone",), depth=MAX_DEPTH - draw(st.integers(0, 4)))]
    for number in range(1, draw(st.integers(1, most))):
        prevs = draw(st.lists(st.sampled_from(events[-6:]), min_size=1, max_size=3, unique_by=lambda event: event.id))
        key = draw(st.sampled_from([None, None, *_KEYS, *MEMBER_NAMES]))
        event = an_event(f"e{number:02}", *prevs, key=key, held_as=draw(st.sampled_from(_KEPT)))
        if key in MEMBER_NAMES:
            event = replace(event, type=MEMBER, content={"membership": draw(st.sampled_from(_MEMBERSHIPS))})
        if odd and draw(st.integers(0, 5)) == 0:
            event = replace(event, depth=max(1, event.depth - draw(st.integers(1, 3))))
        events.append(event)
    return events


def lies(event: RoomEvent, everything: list[RoomEvent]) -> bool:
    """Whether its depth is not the one after that of its deepest prev event."""
    known = {it.id: it.summary for it in everything}
    return "gone" not in event.prevs and event.depth != depth_after(known[id] for id in event.prevs)


@st.composite
def arrivals(draw: st.DrawFn, *, odd: bool = False) -> tuple[list[RoomEvent], list[RoomEvent]]:
    """All events of a room, and some of them in any order."""
    everything = draw(dags(odd=odd))
    order = draw(st.permutations(everything))
    return everything, order[: draw(st.integers(1, len(order)))]


def arrive(rooms: MemoryRooms, event: RoomEvent, expected: ExpectedRoom) -> None:
    """Persist `event` as a server does that hears of it: with the state before it, fetched as outliers."""
    before = [entry.id for entry in expected.state_before(event).values()]
    for id in before:
        if id not in rooms.events:
            rooms.persist(replace(expected.all_events[id], held_as=EventKind.OUTLIER))
    rooms.persist(event, given=before)


def told_by_definition(expected: ExpectedRoom, order: list[str], member: str) -> list[tuple[str, bool]]:
    """What a member is told of events placed in this order: those before or after which it had joined, and (True) the
    one that holds its membership, each time that it has joined no more."""
    found, before = [], False
    held: dict[str, EventKind] = {}
    for id in order:
        held[id] = expected.all_events[id].held_as
        current = ExpectedRoom(expected.all_events.values(), held).current_state.get((MEMBER, member))
        after = current is not None and expected.all_events[current.id].content["membership"] == "join"
        if before or after:
            found.append((id, False))
        if current is not None and before and not after:
            found.append((current.id, True))
        before = after
    return found
