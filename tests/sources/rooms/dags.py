"""Hypothesis strategies for random rooms: DAGs of events, and orders of arrival."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.sources.rooms.memory import MemoryRooms
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.sources.rooms.rules import MAX_DEPTH, MEMBER, EventKind, RoomEvent, compute_depth

ROOM = "!tea"
_KINDS = [EventKind.REGULAR] * 6 + [EventKind.SOFT_FAILED, EventKind.REJECTED]
_KEYS = ["a", "b", "c"]
MEMBER_NAMES = ("@ada", "@bob", "@eve")
_MEMBERSHIPS = ("join", "join", "leave", "ban")


def an_event(
    id: str, *prevs: RoomEvent, key: str | None = None, kind: EventKind = EventKind.REGULAR, room: str = ROOM
) -> RoomEvent:
    """A regular or other event that follows `prevs`. `key`: its state key; None if it is not a state event."""
    depth = compute_depth(prev.summary for prev in prevs)
    return RoomEvent(id, room, "topic", "@ada", tuple(prev.id for prev in prevs), depth, key, kind=kind)


@st.composite
def dags(draw: st.DrawFn, max_events: int = 25, *, with_wrong_depths: bool = False) -> list[RoomEvent]:
    """The events of a room, each after its prev events: forks, merges, state events, memberships, rejected events.

    Args:
        draw: of Hypothesis.
        max_events: the maximum number of events.
        with_wrong_depths: some events state a wrong depth (`has_wrong_depth`), and the room may begin just below
            `MAX_DEPTH`, after an event that no server has.
    """
    events: list[RoomEvent] = [an_event("e00", key="a")]
    if with_wrong_depths and draw(st.booleans()):
        events = [replace(events[0], prevs=("gone",), depth=MAX_DEPTH - draw(st.integers(0, 4)))]
    for number in range(1, draw(st.integers(1, max_events))):
        prevs = draw(st.lists(st.sampled_from(events[-6:]), min_size=1, max_size=3, unique_by=lambda event: event.id))
        key = draw(st.sampled_from([None, None, *_KEYS, *MEMBER_NAMES]))
        event = an_event(f"e{number:02}", *prevs, key=key, kind=draw(st.sampled_from(_KINDS)))
        if key in MEMBER_NAMES:
            event = replace(event, type=MEMBER, content={"membership": draw(st.sampled_from(_MEMBERSHIPS))})
        if with_wrong_depths and draw(st.integers(0, 5)) == 0:
            event = replace(event, depth=max(1, event.depth - draw(st.integers(1, 3))))
        events.append(event)
    return events


def has_wrong_depth(event: RoomEvent, everything: list[RoomEvent]) -> bool:
    """Whether the depth is not one more than the depth of the deepest prev event."""
    summaries = {other.id: other.summary for other in everything}
    return "gone" not in event.prevs and event.depth != compute_depth(summaries[id] for id in event.prevs)


@st.composite
def arrivals(draw: st.DrawFn, *, with_wrong_depths: bool = False) -> tuple[list[RoomEvent], list[RoomEvent]]:
    """All events of a room, and the events that arrive, in the order of arrival."""
    everything = draw(dags(with_wrong_depths=with_wrong_depths))
    order = draw(st.permutations(everything))
    return everything, order[: draw(st.integers(1, len(order)))]


def receive_event(rooms: MemoryRooms, event: RoomEvent, expected: ExpectedRoom) -> None:
    """Persist an event that another server sends: first the events of the state before it, as outliers."""
    before = [entry.id for entry in expected.state_before(event).values()]
    for id in before:
        if id not in rooms.events:
            rooms.persist(replace(expected.all_events[id], kind=EventKind.OUTLIER))
    rooms.persist(event, state_ids_before=before)


def expected_deliveries(expected: ExpectedRoom, order: list[str], member: str) -> list[tuple[str, bool]]:
    """The events that a member receives if the events are stored in this order, each as (ID, whether it is the end of a
    stay). These are the events before or after which the member is joined. At the end of each stay, the event that sets
    its membership is received again."""
    deliveries, before = [], False
    kinds: dict[str, EventKind] = {}
    for id in order:
        kinds[id] = expected.all_events[id].kind
        current = ExpectedRoom(expected.all_events.values(), kinds).current_state.get((MEMBER, member))
        after = current is not None and expected.all_events[current.id].content["membership"] == "join"
        if before or after:
            deliveries.append((id, False))
        if current is not None and before and not after:
            deliveries.append((current.id, True))
        before = after
    return deliveries
