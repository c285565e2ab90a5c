"""The rules of a room's DAG: how one persisted event changes edges, extremities and timelines. Pure.

An event names its `prev_events`, and so the edges point back in time. `persisted` needs only the neighbours of an
event, so a store looks up a few rows, whatever the size of the room.

A state maps each key (type, state key) to the valid event. The state resolution is simpler than Matrix's: for each key
the deepest event wins; among equally deep events, the greatest ID. So the order and number of resolutions do not
matter. An event's own state is the state of its prev events with itself. State groups are stored as deltas on chains of
bounded length.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from tidemark.common.errors import Reject, message
from tidemark.streaming.wire.records import is_name, why_no_name

MOST_PREVS = 10
"""The largest number of prev events of an event that this server creates."""
MOST_NAMED = 20
"""The largest number of prev events of any event."""
DEEPEST_EVENT = 2**63 - 1
MEMBER = "m.room.member"
_OUT_OF_BAND = ("invite", "leave", "knock")

Timeline = Literal["events", "backfill"]


@message("event {event!r} is refused: {problem}")
class BadEvent(Reject):
    event: str
    problem: str


class HeldAs(StrEnum):
    """The kind as which an event is stored."""

    REGULAR = "regular"
    SOFT_FAILED = "soft-failed"
    """Soft-failed: it has edges and a state, but is no forward extremity."""
    REJECTED = "rejected"
    """Rejected: like soft-failed, but it changes no state."""
    OUTLIER = "outlier"
    """Outlier: the room's state at the event is unknown. It has no edges, sets no state, and is in no timeline."""
    OUT_OF_BAND = "out-of-band"
    """An outlier that is sent to its user: an invite, its rejection, a knock."""

    @property
    def outlier(self) -> bool:
        return self in {HeldAs.OUTLIER, HeldAs.OUT_OF_BAND}

    @property
    def counts(self) -> bool:
        """Whether it is a forward extremity until another such event follows it."""
        return self is HeldAs.REGULAR


class KnownEvent(NamedTuple):
    """The fields of a stored event that the rules need."""

    id: str
    room: str
    depth: int
    held_as: HeldAs


@dataclass(frozen=True, slots=True)
class RoomEvent:
    """`depth` (from 1) is one more than that of the deepest prev event; a `state_key` makes it a state event."""

    id: str
    room: str
    type: str
    sender: str
    prevs: tuple[str, ...]
    depth: int
    state_key: str | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    held_as: HeldAs = HeldAs.REGULAR

    @property
    def key(self) -> tuple[str, str] | None:
        """The key of the room's state that the event sets, if it is not rejected."""
        return None if self.state_key is None else (self.type, self.state_key)

    @property
    def known(self) -> KnownEvent:
        return KnownEvent(self.id, self.room, self.depth, self.held_as)

    def same(self, other: "RoomEvent") -> bool:
        """Whether both are the same event. Ignores the kind as which they are stored."""
        return _content(self) == _content(other)


@dataclass(frozen=True, slots=True)
class RelatedEvents:
    """An event's stored copy, if any, its prev events (of any room and kind), and the events of its room with an edge
    to it. An event whose edge counts is included as a regular one.
    """

    itself: RoomEvent | None = None
    prevs: Mapping[str, KnownEvent] = field(default_factory=dict)
    named_by: Collection[KnownEvent] = ()


@dataclass(frozen=True, slots=True)
class RoomChange:
    """The effects of persisting an event.

    If the event has edges, it is no longer a backward extremity.

    Attributes:
        edges: its prev events.
        counts: whether its edges end forward extremities: its prev events are no longer forward extremities. If some of
            the prev events are soft-failed or rejected, their edges count from now on too.
        extremity: whether the event becomes a forward extremity.
        missing: prev events that are not stored; they become backward extremities.
        timeline: the stream on which the event is published; None for an outlier, which is not published.
        untrue: events that state a wrong depth; their edges to this event are removed.
    """

    edges: tuple[str, ...]
    counts: bool
    extremity: bool
    missing: tuple[str, ...]
    timeline: Timeline | None
    untrue: tuple[str, ...] = ()


def persisted(event: RoomEvent, related: RelatedEvents, timeline: Timeline = "events") -> RoomChange:
    """The effects of persisting `event`, which arrives live or as history (`backfill`). Raises `BadEvent`."""
    _check_alone(event)
    if related.itself is not None:
        _check_again(event, related.itself)
    if event.held_as.outlier:
        stream: Timeline | None = "events" if event.held_as is HeldAs.OUT_OF_BAND else None
        return RoomChange((), counts=False, extremity=False, missing=(), timeline=stream)
    _check_place(event, related)
    true = [other for other in related.named_by if other.depth > event.depth]
    is_followed = any(other.held_as.counts for other in true)
    return RoomChange(
        edges=event.prevs,
        counts=event.held_as.counts or is_followed,
        extremity=event.held_as.counts and not is_followed,
        missing=tuple(id for id in event.prevs if _is_missing(related.prevs.get(id))),
        timeline=timeline,
        untrue=tuple(other.id for other in related.named_by if other.depth <= event.depth),
    )


def chosen_prevs(extremities: Iterable[KnownEvent]) -> tuple[KnownEvent, ...]:
    """The prev events of a new event: the deepest forward extremities. The other extremities are left to later
    events.
    """
    ranked = sorted(extremities, key=lambda known: (-known.depth, known.id))
    return tuple(ranked[:MOST_PREVS])


def depth_after(prevs: Iterable[KnownEvent]) -> int:
    """The depth of the deepest prev event plus one, limited to `DEEPEST_EVENT`."""
    return min(DEEPEST_EVENT, 1 + max((known.depth for known in prevs), default=0))


def _is_missing(known: KnownEvent | None) -> bool:
    return known is None or known.held_as.outlier


def _content(event: RoomEvent) -> tuple[object, ...]:
    return (
        event.room,
        event.type,
        event.sender,
        event.prevs,
        event.depth,
        event.state_key,
        dict(event.content),
    )


def _check_alone(event: RoomEvent) -> None:
    for name_of, name in (("ID", event.id), ("room", event.room), ("type", event.type), ("sender", event.sender)):
        _require(event, _is_fit(name), f"its {name_of}: {why_no_name(name)}")
    if event.state_key:
        _require(event, _is_fit(event.state_key), f"its state key: {why_no_name(event.state_key)}")
    named = len(event.prevs)
    _require(event, named <= MOST_NAMED, f"it names {named} prev events, and {MOST_NAMED} are the most")
    for id in event.prevs:
        _require(event, _is_fit(id), f"a prev event: {why_no_name(id)}")
    _require(event, event.id not in event.prevs, "it names itself as a prev event")
    _require(event, len({*event.prevs}) == len(event.prevs), "it names a prev event twice")
    exact = type(event.depth) is int and 1 <= event.depth <= DEEPEST_EVENT
    _require(event, exact, f"its depth {event.depth!r} is not from 1 to {DEEPEST_EVENT}")
    if event.held_as is HeldAs.OUT_OF_BAND:
        membership = event.content.get("membership")
        sent = event.type == MEMBER and bool(event.state_key) and membership in _OUT_OF_BAND
        _require(event, sent, "only an invite, its rejection or a knock is sent to its user out of band")


def _is_fit(name: str) -> bool:
    return is_name(name) and name.isprintable()


def _check_again(event: RoomEvent, stored: RoomEvent) -> None:
    _require(event, event.same(stored), "another event has this ID")
    again = stored.held_as.outlier and not event.held_as.outlier
    _require(event, again, f"a duplicate: it is stored already, as {stored.held_as}")


def _check_place(event: RoomEvent, related: RelatedEvents) -> None:
    """Edges stay in the room and lead from deeper events to less deep ones, or among the deepest to earlier ones, so
    there is no cycle. An event that names this one and is not deeper states a wrong depth; its edge is removed.
    """
    for known in related.prevs.values():
        _require(event, known.room == event.room, f"its prev event {known.id} is of another room, {known.room}")
    least = depth_after(related.prevs.values())
    deepest = max((known.depth for known in related.prevs.values()), default=0)
    if len(related.prevs) == len(event.prevs):
        right = f"an event after these prev events has {least}"
        _require(event, event.depth == least, f"its depth is {event.depth}, and {right}")
    _require(event, event.depth >= least, f"its depth is {event.depth}, and a prev event's is {deepest}")
    for other in related.named_by:
        _require(event, other.id not in related.prevs, f"a cycle: it and {other.id} name each other")


def _require(event: RoomEvent, fine: bool, problem: str) -> None:  # noqa: FBT001 - a condition, not a switch
    if not fine:
        raise BadEvent(event.id, problem)


JOINED = "join"


@dataclass(frozen=True, slots=True)
class Stay:
    """The stay of a member in a room: the turns of its first and its last event (None while it lasts). `left_by`:
    the stream ID of the event that ends it. That ID was reserved in the turn of the last event, so every event of
    the stay has a lower one."""

    room: str
    began: int
    ended: int | None = None
    left_by: int | None = None

    def covers(self, turn: int) -> bool:
        return self.began <= turn and (self.ended is None or turn <= self.ended)


def joins(event: RoomEvent) -> bool:
    """Whether this membership event makes its user a joined member; leave, kick, ban and invite do not."""
    return event.content.get("membership") == JOINED


def moved(before: Set[str], after: Set[str]) -> tuple[list[str], list[str]]:
    """The members whose stays begin and end, from the joined members before and after an event."""
    return sorted(after - before), sorted(before - after)


LONGEST_CHAIN = 100
"""The maximum length of a chain of groups."""

StateKey = tuple[str, str]


class KeyHolder(NamedTuple):
    """The valid event of a key. State resolution keeps the greater holder."""

    depth: int
    id: str


State = Mapping[StateKey, KeyHolder]


class Placed(NamedTuple):
    """A stored group: the keys in which it differs from its `base`, or all keys without a base. `length`: of its
    chain.
    """

    base: int | None
    delta: State
    length: int


class Groups(Protocol):
    """The state groups of a room, by number. The state of a group never changes."""

    def state(self, group: int) -> State: ...

    def chain(self, group: int) -> Sequence[int]:
        """The group, its base, the base of that one, and so on."""

    def add(self, placed: Placed) -> int: ...


def resolved(states: Iterable[State]) -> dict[StateKey, KeyHolder]:
    result: dict[StateKey, KeyHolder] = {}
    for state in states:
        for key, entry in state.items():
            if key not in result or result[key] < entry:
                result[key] = entry
    return result


def given_state(
    event: RoomEvent, change: RoomChange, given: Collection[str] | None, stored: Mapping[str, RoomEvent]
) -> State | None:
    """The state before `event` that another server sent, as IDs of events; None if the server knows the state itself.
    Raises `BadEvent` if the state is required and missing, or impossible.
    """
    if not change.missing:
        return None
    if given is None:
        raise BadEvent(event.id, f"its prev event {change.missing[0]} is not stored, and no state before it is given")
    state: dict[StateKey, KeyHolder] = {}
    for id in given:
        other = stored.get(id)
        if other is None or other.room != event.room or other.held_as is HeldAs.REJECTED or other.key is None:
            raise BadEvent(
                event.id, f"the state before it names {id}, which is not stored as a state event of its room"
            )
        if other.key in state:
            raise BadEvent(
                event.id, f"the state before it names {id} and another event with the same type and state key"
            )
        if other.depth >= event.depth and event.depth < DEEPEST_EVENT:
            raise BadEvent(event.id, f"the state before it names {id}, whose depth {other.depth} is not below its own")
        state[other.key] = KeyHolder(other.depth, other.id)
    return state


def group_at(event: RoomEvent, prevs: Iterable[int], given: State | None, groups: Groups) -> int:
    """The group of the state after a persisted event. Adds a group only if the state changes.

    `prevs`: the groups of the stored prev events. `given`: the state before the event, if not all prev events are
    stored.
    """
    own = {event.key: KeyHolder(event.depth, event.id)} if event.key and event.held_as is not HeldAs.REJECTED else {}
    return merged([*dict.fromkeys(prevs)], given, own, groups)


def merged(stored: Sequence[int], given: State | None, own: State, groups: Groups) -> int:
    """The group of the resolution of the `stored` groups and `given`, with `own` applied last."""
    if len(stored) == 1 and given is None:
        (group,) = stored
        return groups.add(placed_on(group, own, groups)) if own else group
    states = {group: groups.state(group) for group in stored}
    state = {**resolved([*states.values(), given or {}]), **own}
    deltas = {group: difference(state, before) for group, before in states.items()}
    for group, delta in deltas.items():
        if not delta:
            return group
    if not deltas:
        return groups.add(Placed(None, state, 1))
    nearest = min(deltas, key=lambda group: (len(deltas[group]), group))
    return groups.add(placed_on(nearest, deltas[nearest], groups))


def placed_on(base: int, delta: State, groups: Groups) -> Placed:
    """A group that differs from `base` by `delta`: its base is `base`, or the group in the middle of a full chain."""
    chain = groups.chain(base)
    if len(chain) < LONGEST_CHAIN:
        return Placed(base, delta, len(chain) + 1)
    state = {**groups.state(base), **delta}
    half = chain[len(chain) // 2]
    far = difference(state, groups.state(half))
    if len(far) < len(state):
        return Placed(half, far, len(chain) - len(chain) // 2 + 1)
    return Placed(None, state, 1)


def difference(state: State, before: State) -> dict[StateKey, KeyHolder]:
    """The entries of `state` that differ from `before`. `state` has all keys of `before`."""
    return {key: entry for key, entry in state.items() if before.get(key) != entry}


@dataclass
class MemoryGroups:
    """New groups in memory, before they are stored."""

    stored: dict[int, Placed] = field(default_factory=dict)
    last: int = 0

    def state(self, group: int) -> State:
        state: dict[StateKey, KeyHolder] = {}
        for number in reversed(self.chain(group)):
            state.update(self.stored[number].delta)
        return state

    def chain(self, group: int) -> Sequence[int]:
        chain = []
        at: int | None = group
        while at is not None:
            chain.append(at)
            at = self.stored[at].base
        return chain

    def changed(self, before: int | None, after: int) -> State:
        """The entries of a state that differ from an earlier state."""
        if self.stored[after].base == before:
            return self.stored[after].delta
        return difference(self.state(after), {} if before is None else self.state(before))

    def add(self, placed: Placed) -> int:
        self.last += 1
        self.stored[self.last] = placed
        return self.last


def compacted(stored: Mapping[int, Placed], used: Collection[int]) -> dict[int, Placed]:
    """Store the groups in fewer rows. Removes unused groups, except bases of several others. The other groups keep
    their state. Chains that are too long are cut.
    """
    before, after = MemoryGroups(dict(stored)), MemoryGroups()
    for group in sorted(_needed(stored, used)):
        state = before.state(group)
        below = next((number for number in before.chain(group)[1:] if number in after.stored), None)
        if below is None:
            after.stored[group] = Placed(None, state, 1)
        else:
            after.stored[group] = placed_on(below, difference(state, after.state(below)), after)
    return after.stored


def _needed(stored: Mapping[int, Placed], used: Collection[int]) -> set[int]:
    needed = set(used)
    upon: Counter[int] = Counter()
    for group in sorted(stored, reverse=True):  # a group is younger than its base
        if upon[group] > 1:
            needed.add(group)
        base = stored[group].base
        if base is not None:
            upon[base] += 1 if group in needed else upon[group]
    return needed
