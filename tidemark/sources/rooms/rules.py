"""The rules of a room's DAG: how one persisted event changes edges, extremities and states. Pure.

An event names its prev events, so the edges point back in time. `compute_change` needs only the neighbours of an event.
So a store reads only a few rows, even for a large room.

A state maps each key (type, state key) to an event. The state resolution is simpler than Matrix's: for each key, the
deepest event wins; among equally deep events, the event with the greatest ID wins. So the order and the number of
resolutions do not matter. The state after an event is the resolved state of its prev events, updated by the event
itself. A state group is a stored state. It has the entries that differ from another group, its *base*. The chain of
bases has a bounded length.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from tidemark.common.errors import Reject, message
from tidemark.streaming.wire.records import explain_bad_name, is_name

MAX_NEW_PREV_EVENTS = 10
"""The maximum number of prev events of an event that this server creates."""
MAX_PREV_EVENTS = 20
"""The maximum number of prev events of any event."""
MAX_DEPTH = 2**63 - 1
"""The largest depth of an event."""
MEMBER = "m.room.member"
_OUT_OF_BAND_MEMBERSHIPS = ("invite", "leave", "knock")

EventStream = Literal["events", "backfill"]
"""`events`: live events. `backfill`: history, which another server sent on request."""


@message("event {event!r} is refused: {problem}")
class BadEvent(Reject):
    """An event that is refused. `event`: its ID. `problem`: why."""

    event: str
    problem: str


class EventKind(StrEnum):
    """The kind as which an event is stored."""

    REGULAR = "regular"
    SOFT_FAILED = "soft-failed"
    """The event has edges and a state, but does not become a forward extremity."""
    REJECTED = "rejected"
    """The same as soft-failed, but the event changes no state."""
    OUTLIER = "outlier"
    """The room's state at the event is unknown. The event has no edges, sets no state, and is on no stream."""
    OUT_OF_BAND = "out-of-band"
    """An outlier that is sent to the user of its state key: an invite, the rejection of an invite, or a knock."""

    @property
    def is_outlier(self) -> bool:
        """Whether the event is an outlier, out-of-band or not."""
        return self in {EventKind.OUTLIER, EventKind.OUT_OF_BAND}

    @property
    def is_regular(self) -> bool:
        """Whether the event is regular. Only a regular event can become a forward extremity. Other events end forward
        extremities only if a regular event follows them."""
        return self is EventKind.REGULAR


class EventSummary(NamedTuple):
    """The fields of an event that the rules need from an event's neighbours. See `RoomEvent`."""

    id: str
    room: str
    depth: int
    kind: EventKind


@dataclass(frozen=True, slots=True)
class RoomEvent:
    """An event of a room.

    Attributes:
        id: the ID of the event.
        room: the ID of the room.
        type: the type of the event, such as `m.room.member`.
        sender: the ID of the user who sent the event.
        prevs: the IDs of the prev events.
        depth: one more than the depth of the deepest prev event, at most `MAX_DEPTH`; 1 without prev events.
        state_key: with `type`, the key of the state that the event sets; None if the event is not a state event.
        content: the JSON content.
        kind: the kind as which the event is stored.
    """

    id: str
    room: str
    type: str
    sender: str
    prevs: tuple[str, ...]
    depth: int
    state_key: str | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    kind: EventKind = EventKind.REGULAR

    @property
    def key(self) -> tuple[str, str] | None:
        """The key of the state that the event sets, unless the event is rejected; None if the event is not a state
        event."""
        return None if self.state_key is None else (self.type, self.state_key)

    @property
    def summary(self) -> EventSummary:
        """The fields that the rules need from a neighbour."""
        return EventSummary(self.id, self.room, self.depth, self.kind)

    def is_same(self, other: "RoomEvent") -> bool:
        """Whether both events have the same fields, except the ID and `kind`."""
        return _compared_fields(self) == _compared_fields(other)


@dataclass(frozen=True, slots=True)
class RelatedEvents:
    """The stored neighbours of an event.

    Attributes:
        stored: the stored event with the same ID; None if there is none.
        prevs: ID -> stored prev event, of any room and kind.
        successors: the events of the same room that have an edge to the event. A successor has the kind `REGULAR` if
            its edge ends forward extremities.
    """

    stored: RoomEvent | None = None
    prevs: Mapping[str, EventSummary] = field(default_factory=dict)
    successors: Collection[EventSummary] = ()


@dataclass(frozen=True, slots=True)
class RoomChange:
    """The effects of persisting an event. If the event is no outlier, it is not a backward extremity any more.

    Attributes:
        edges: the IDs of the prev events to which the event has an edge; empty for an outlier.
        ends_extremities: whether the prev events stop being forward extremities. Then the edges of soft-failed and
            rejected prev events also end forward extremities, recursively.
        becomes_extremity: whether the event becomes a forward extremity.
        missing_prevs: the IDs of the prev events that are not stored, or are outliers. They become backward
            extremities.
        stream: the stream on which the event is published; None for an outlier that is not out-of-band.
        wrong_depth_events: the IDs of the successors that are not deeper than the event, so their depth is wrong. Their
            edges to the event are removed.
    """

    edges: tuple[str, ...]
    ends_extremities: bool
    becomes_extremity: bool
    missing_prevs: tuple[str, ...]
    stream: EventStream | None
    wrong_depth_events: tuple[str, ...] = ()


def compute_change(event: RoomEvent, related: RelatedEvents, stream: EventStream = "events") -> RoomChange:
    """Check an event, and compute the effects of persisting the event.

    Args:
        event: the event.
        related: the stored neighbours of the event.
        stream: `events` for a live event, `backfill` for history. An out-of-band event is always live.

    Raises:
        BadEvent: the event is refused.
    """
    _check_fields(event)
    if related.stored is not None:
        _check_duplicate(event, related.stored)
    if event.kind.is_outlier:
        outlier_stream: EventStream | None = "events" if event.kind is EventKind.OUT_OF_BAND else None
        return RoomChange((), ends_extremities=False, becomes_extremity=False, missing_prevs=(), stream=outlier_stream)
    _check_prevs_and_depth(event, related)
    deeper = [other for other in related.successors if other.depth > event.depth]
    is_followed = any(other.kind.is_regular for other in deeper)
    return RoomChange(
        edges=event.prevs,
        ends_extremities=event.kind.is_regular or is_followed,
        becomes_extremity=event.kind.is_regular and not is_followed,
        missing_prevs=tuple(id for id in event.prevs if _is_missing(related.prevs.get(id))),
        stream=stream,
        wrong_depth_events=tuple(other.id for other in related.successors if other.depth <= event.depth),
    )


def choose_prevs(extremities: Iterable[EventSummary]) -> tuple[EventSummary, ...]:
    """Choose the prev events of a new event: the deepest `MAX_NEW_PREV_EVENTS` forward extremities."""
    ranked = sorted(extremities, key=lambda extremity: (-extremity.depth, extremity.id))
    return tuple(ranked[:MAX_NEW_PREV_EVENTS])


def compute_depth(prevs: Iterable[EventSummary]) -> int:
    """The depth of the deepest prev event plus one, limited to `MAX_DEPTH`; 1 without prev events."""
    return min(MAX_DEPTH, 1 + max((prev.depth for prev in prevs), default=0))


def _is_missing(prev: EventSummary | None) -> bool:
    return prev is None or prev.kind.is_outlier


def _compared_fields(event: RoomEvent) -> tuple[object, ...]:
    return (
        event.room,
        event.type,
        event.sender,
        event.prevs,
        event.depth,
        event.state_key,
        dict(event.content),
    )


def _check_fields(event: RoomEvent) -> None:
    for name_of, name in (("ID", event.id), ("room", event.room), ("type", event.type), ("sender", event.sender)):
        _require(event, _is_valid_name(name), f"its {name_of}: {explain_bad_name(name)}")
    if event.state_key:
        _require(event, _is_valid_name(event.state_key), f"its state key: {explain_bad_name(event.state_key)}")
    count = len(event.prevs)
    _require(event, count <= MAX_PREV_EVENTS, f"it names {count} prev events, and the maximum is {MAX_PREV_EVENTS}")
    for id in event.prevs:
        _require(event, _is_valid_name(id), f"a prev event: {explain_bad_name(id)}")
    _require(event, event.id not in event.prevs, "it names itself as a prev event")
    _require(event, len({*event.prevs}) == len(event.prevs), "it names a prev event twice")
    is_valid_depth = type(event.depth) is int and 1 <= event.depth <= MAX_DEPTH
    _require(event, is_valid_depth, f"its depth {event.depth!r} is not from 1 to {MAX_DEPTH}")
    if event.kind is EventKind.OUT_OF_BAND:
        membership = event.content.get("membership")
        is_allowed = event.type == MEMBER and bool(event.state_key) and membership in _OUT_OF_BAND_MEMBERSHIPS
        allowed = "a membership event with a state key, and the membership invite, leave or knock"
        _require(event, is_allowed, f"its kind is {event.kind}, but it is not {allowed}")


def _is_valid_name(name: str) -> bool:
    return is_name(name) and name.isprintable()


def _check_duplicate(event: RoomEvent, stored: RoomEvent) -> None:
    _require(event, event.is_same(stored), "another event has this ID")
    replaces_outlier = stored.kind.is_outlier and not event.kind.is_outlier
    _require(event, replaces_outlier, f"a duplicate: it is stored already, as {stored.kind}")


def _check_prevs_and_depth(event: RoomEvent, related: RelatedEvents) -> None:
    """Check that the stored prev events are in the event's room, that the event is deeper than these prev events, and
    that edges form no cycle. Raises `BadEvent`.

    Edges lead from deeper events to less deep events. Between events of `MAX_DEPTH`, edges lead from later to earlier
    events. If a stored event names this event as a prev event but is not deeper, the depth of the stored event is
    wrong, and its edge does not count.
    """
    for prev in related.prevs.values():
        _require(event, prev.room == event.room, f"its prev event {prev.id} is of another room, {prev.room}")
    min_depth = compute_depth(related.prevs.values())
    deepest = max((prev.depth for prev in related.prevs.values()), default=0)
    if len(related.prevs) == len(event.prevs):
        expected = f"an event after these prev events has {min_depth}"
        _require(event, event.depth == min_depth, f"its depth is {event.depth}, and {expected}")
    _require(event, event.depth >= min_depth, f"its depth is {event.depth}, but a prev event has the depth {deepest}")
    for other in related.successors:
        _require(event, other.id not in related.prevs, f"a cycle: it and {other.id} name each other")


def _require(event: RoomEvent, condition: bool, problem: str) -> None:  # noqa: FBT001 - a condition, not a switch
    if not condition:
        raise BadEvent(event.id, problem)


JOINED = "join"


@dataclass(frozen=True, slots=True)
class Stay:
    """The stay of a member in a room, from the event that joins to the event that ends the membership.

    The *turn* of an event is the number of times that the room's lock had been taken when the event was persisted.

    Attributes:
        room: the room.
        begin_turn: the turn of the first event.
        end_turn: the turn of the last event; None while the member is joined.
        leave_id: the stream ID of the fact that reports the end to the member; None while the member is joined. The ID
            was reserved in the turn `end_turn`, so every event of the stay has a lower ID.
    """

    room: str
    begin_turn: int
    end_turn: int | None = None
    leave_id: int | None = None

    def covers(self, turn: int) -> bool:
        """Whether an event with this turn belongs to the stay."""
        return self.begin_turn <= turn and (self.end_turn is None or turn <= self.end_turn)


def is_join(event: RoomEvent) -> bool:
    """Whether a membership event makes its user a joined member. A leave, kick, ban or invite does not."""
    return event.content.get("membership") == JOINED


def compare_joined_members(before: Set[str], after: Set[str]) -> tuple[list[str], list[str]]:
    """Compare the joined members before and after an event. Returns the members who joined, and who left, sorted."""
    return sorted(after - before), sorted(before - after)


MAX_CHAIN_LENGTH = 100
"""The maximum number of state groups on a chain of bases."""

StateKey = tuple[str, str]
"""The type and the state key of an event."""


class StateEntry(NamedTuple):
    """The event that sets a key of a state: its depth and its ID. State resolution keeps the greater entry."""

    depth: int
    id: str


State = Mapping[StateKey, StateEntry]


class StateGroup(NamedTuple):
    """A state group, as it is stored.

    Attributes:
        base_number: the number of the base, from which `delta` differs; None if the group has no base.
        delta: the entries in which the group differs from its base; all entries if the group has no base.
        chain_length: the number of groups in the chain of bases, including the group itself; 0 if not known.
    """

    base_number: int | None
    delta: State
    chain_length: int


class StateGroups(Protocol):
    """Stores the state groups of a room. A group is named by its number. The state of a group never changes."""

    def state(self, group_number: int) -> State:
        """The whole state of a group."""

    def chain(self, group_number: int) -> Sequence[int]:
        """The numbers of the group, its base, the base of the base, and so on."""

    def add(self, state_group: StateGroup) -> int:
        """Store a group, and return its number."""


def resolve_states(states: Iterable[State]) -> dict[StateKey, StateEntry]:
    """Merge states: for each key, the greatest entry of all states."""
    result: dict[StateKey, StateEntry] = {}
    for state in states:
        for key, entry in state.items():
            if key not in result or result[key] < entry:
                result[key] = entry
    return result


def check_state_before(
    event: RoomEvent, change: RoomChange, state_ids: Collection[str] | None, stored: Mapping[str, RoomEvent]
) -> State | None:
    """Check and return the state before `event` that another server sent.

    Args:
        event: the event.
        change: the effects of persisting the event.
        state_ids: the IDs of the events that make up the state, as the other server sent them; None if it sent none.
        stored: ID -> stored event, at least those in `state_ids`.

    Returns:
        The state; None if no prev event is missing. Then the state is not needed, and `state_ids` is ignored.

    Raises:
        BadEvent: the state is required and was not sent, or an event of the state is invalid.
    """
    if not change.missing_prevs:
        return None
    if state_ids is None:
        raise BadEvent(
            event.id,
            f"its prev event {change.missing_prevs[0]} is not stored, or is stored only as an outlier. Then the state"
            " before this event must be given",
        )
    state: dict[StateKey, StateEntry] = {}
    for id in state_ids:
        other = stored.get(id)
        if other is None or other.room != event.room or other.kind is EventKind.REJECTED or other.key is None:
            raise BadEvent(event.id, f"the given state contains {id}, but the room has no accepted state event {id}")
        if other.key in state:
            raise BadEvent(
                event.id, f"the given state contains {id} and another event with the same type and state key"
            )
        if other.depth >= event.depth and event.depth < MAX_DEPTH:
            raise BadEvent(
                event.id,
                f"the given state contains {id}, whose depth {other.depth} is not below the event's depth",
            )
        state[other.key] = StateEntry(other.depth, other.id)
    return state


def find_group_after_event(
    event: RoomEvent, prev_groups: Iterable[int], state_before: State | None, groups: StateGroups
) -> int:
    """Find or add the group of the state after an event. Returns its number.

    Args:
        event: the event.
        prev_groups: the groups of the states after the stored prev events.
        state_before: the state before the event that another server sent; None if no prev event is missing.
        groups: the groups of the room, to which a group is added if none of `prev_groups` has the state.
    """
    own_state = (
        {event.key: StateEntry(event.depth, event.id)} if event.key and event.kind is not EventKind.REJECTED else {}
    )
    return merge_groups([*dict.fromkeys(prev_groups)], state_before, own_state, groups)


def merge_groups(stored_groups: Sequence[int], other_state: State | None, own_state: State, groups: StateGroups) -> int:
    """Resolve states, and find or add the group of the result. Returns its number.

    Args:
        stored_groups: the groups whose states are resolved.
        other_state: one more state that is resolved with these states; None if there is none.
        own_state: the entries that replace the entries of the resolved state.
        groups: the groups of the room, to which a group is added if none of `stored_groups` has the result.
    """
    if len(stored_groups) == 1 and other_state is None:
        (group,) = stored_groups
        return groups.add(make_group_with_base(group, own_state, groups)) if own_state else group
    states = {group: groups.state(group) for group in stored_groups}
    state = {**resolve_states([*states.values(), other_state or {}]), **own_state}
    deltas = {group: difference(state, before) for group, before in states.items()}
    for group, delta in deltas.items():
        if not delta:
            return group
    if not deltas:
        return groups.add(StateGroup(None, state, 1))
    nearest = min(deltas, key=lambda group: (len(deltas[group]), group))
    return groups.add(make_group_with_base(nearest, deltas[nearest], groups))


def make_group_with_base(base_number: int, delta: State, groups: StateGroups) -> StateGroup:
    """Make a group whose state is the state of the group `base_number`, updated by `delta`. Does not add the group to
    `groups`.

    If the chain of `base_number` has `MAX_CHAIN_LENGTH` groups, the base of the new group is the group in the middle of
    this chain, or the new group has no base.
    """
    chain = groups.chain(base_number)
    if len(chain) < MAX_CHAIN_LENGTH:
        return StateGroup(base_number, delta, len(chain) + 1)
    state = {**groups.state(base_number), **delta}
    middle = chain[len(chain) // 2]
    delta_to_middle = difference(state, groups.state(middle))
    if len(delta_to_middle) < len(state):
        return StateGroup(middle, delta_to_middle, len(chain) - len(chain) // 2 + 1)
    return StateGroup(None, state, 1)


def difference(state: State, state_before: State) -> dict[StateKey, StateEntry]:
    """The entries of `state` that are missing or different in `state_before`. `state` must have all keys of
    `state_before`."""
    return {key: entry for key, entry in state.items() if state_before.get(key) != entry}


@dataclass
class MemoryStateGroups:
    """State groups in memory. See `StateGroups`.

    Attributes:
        stored: number -> group.
        last_number: the number that `add` gave to the last group.
    """

    stored: dict[int, StateGroup] = field(default_factory=dict)
    last_number: int = 0

    def state(self, group_number: int) -> State:
        state: dict[StateKey, StateEntry] = {}
        for number in reversed(self.chain(group_number)):
            state.update(self.stored[number].delta)
        return state

    def chain(self, group_number: int) -> Sequence[int]:
        chain = []
        current: int | None = group_number
        while current is not None:
            chain.append(current)
            current = self.stored[current].base_number
        return chain

    def changed_entries(self, old_group: int | None, new_group: int) -> State:
        """The entries of the group `new_group` that differ from the group `old_group`; all entries if `old_group` is
        None."""
        if self.stored[new_group].base_number == old_group:
            return self.stored[new_group].delta
        return difference(self.state(new_group), {} if old_group is None else self.state(old_group))

    def add(self, state_group: StateGroup) -> int:
        self.last_number += 1
        self.stored[self.last_number] = state_group
        return self.last_number


def compact_groups(stored: Mapping[int, StateGroup], used_groups: Collection[int]) -> dict[int, StateGroup]:
    """Compute how to store the groups of a room in fewer rows. Does not change `stored`.

    Args:
        stored: number -> group.
        used_groups: the numbers of the groups that events or the room refer to.

    Returns:
        Number -> group, for the groups to keep. Each group has the same state as before, and a chain of at most
        `MAX_CHAIN_LENGTH` groups. An unused group is kept if several kept groups are based on it, directly or through
        groups that are not kept.
    """
    before, after = MemoryStateGroups(dict(stored)), MemoryStateGroups()
    for group in sorted(_groups_to_keep(stored, used_groups)):
        state = before.state(group)
        base = next((number for number in before.chain(group)[1:] if number in after.stored), None)
        if base is None:
            after.stored[group] = StateGroup(None, state, 1)
        else:
            after.stored[group] = make_group_with_base(base, difference(state, after.state(base)), after)
    return after.stored


def _groups_to_keep(stored: Mapping[int, StateGroup], used_groups: Collection[int]) -> set[int]:
    """The used groups, and the unused groups on which several kept groups are based, directly or through groups that
    are not kept."""
    kept = set(used_groups)
    dependents: Counter[int] = Counter()  # group -> the number of kept groups with this base
    for group in sorted(stored, reverse=True):  # a group has a higher number than its base
        if dependents[group] > 1:
            kept.add(group)
        base = stored[group].base_number
        if base is not None:
            dependents[base] += 1 if group in kept else dependents[group]
    return kept
