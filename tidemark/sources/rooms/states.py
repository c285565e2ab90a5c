"""States of rooms: their resolution, and state groups, which are stored as deltas on chains of bounded length. Pure.

A state says for each key (type, state key) which event holds. Resolving states is simple, and is not Matrix's: for each
key the deepest event wins, among equally deep ones the greatest ID. So it does not matter in which order states are
resolved, or how often; and an event's own state is that of its prev events with itself.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tidemark.sources.rooms.rules import DEEPEST_EVENT, BadEvent, HeldAs, RoomChange, RoomEvent

LONGEST_CHAIN = 100
"""Groups from one to the last that it stands on, both counted."""

StateKey = tuple[str, str]


class KeyHolder(NamedTuple):
    """The event that holds a key. The greater one wins."""

    depth: int
    id: str


State = Mapping[StateKey, KeyHolder]


class Placed(NamedTuple):
    """How a group is stored: the keys in which it differs from its `base`, or all of them. `length` is the chain's."""

    base: int | None
    delta: State
    length: int


class Groups(Protocol):
    """The groups of a room. Numbers mean nothing; a group never changes its state."""

    def state(self, group: int) -> State: ...

    def chain(self, group: int) -> Sequence[int]:
        """The group, the one that it stands on, and so forth to the last."""

    def add(self, placed: Placed) -> int: ...


def resolved(states: Iterable[State]) -> dict[StateKey, KeyHolder]:
    found: dict[StateKey, KeyHolder] = {}
    for state in states:
        for key, holder in state.items():
            if key not in found or found[key] < holder:
                found[key] = holder
    return found


def given_state(
    event: RoomEvent, change: RoomChange, given: Collection[str] | None, held: Mapping[str, RoomEvent]
) -> State | None:
    """The state before `event` as another server says, by the IDs of its events; None where our own is known.

    Raises `BadEvent` where it is needed and not there, or names what cannot be the state there.
    """
    if not change.missing:
        return None
    if given is None:
        raise BadEvent(event.id, f"its prev event {change.missing[0]} is not held, and no state before it is given")
    state: dict[StateKey, KeyHolder] = {}
    for id in given:
        other = held.get(id)
        if other is None or other.room != event.room or other.held_as is HeldAs.REJECTED or other.key is None:
            raise BadEvent(event.id, f"the state before it names {id}, which is held as no state event of its room")
        if other.key in state or (other.depth >= event.depth and event.depth < DEEPEST_EVENT):
            raise BadEvent(event.id, f"the state before it names {id}, which is no less deep, or the second of its key")
        state[other.key] = KeyHolder(other.depth, other.id)
    return state


def group_at(event: RoomEvent, prevs: Iterable[int], given: State | None, groups: Groups) -> int:
    """The group of the state at a persisted event, itself included; a new one only where the state changes.

    `prevs` are the groups of those prev events that are held; `given` is the state before it, where not all are.
    """
    own = {event.key: KeyHolder(event.depth, event.id)} if event.key and event.held_as is not HeldAs.REJECTED else {}
    return merged([*dict.fromkeys(prevs)], given, own, groups)


def merged(found: Sequence[int], given: State | None, own: State, groups: Groups) -> int:
    """The group of the state that these groups resolve to, with `given` and then `own`."""
    if len(found) == 1 and given is None:
        (group,) = found
        return groups.add(placed_on(group, own, groups)) if own else group
    states = {group: groups.state(group) for group in found}
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
    """A group that differs from `base` by `delta`: on it, or where the chain is full, on one half way down."""
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
    """What `state` says otherwise than `before`, of which no key is missing in it."""
    return {key: holder for key, holder in state.items() if before.get(key) != holder}


@dataclass
class MemoryGroups:
    """Groups in memory, as they would be stored."""

    stored: dict[int, Placed] = field(default_factory=dict)
    last: int = 0

    def state(self, group: int) -> State:
        found: dict[StateKey, KeyHolder] = {}
        for number in reversed(self.chain(group)):
            found.update(self.stored[number].delta)
        return found

    def chain(self, group: int) -> Sequence[int]:
        found = []
        at: int | None = group
        while at is not None:
            found.append(at)
            at = self.stored[at].base
        return found

    def changed(self, before: int | None, after: int) -> State:
        """What one state says otherwise than an earlier one."""
        if self.stored[after].base == before:
            return self.stored[after].delta
        return difference(self.state(after), {} if before is None else self.state(before))

    def add(self, placed: Placed) -> int:
        self.last += 1
        self.stored[self.last] = placed
        return self.last


def compacted(stored: Mapping[int, Placed], used: Collection[int]) -> dict[int, Placed]:
    """The same groups in fewer rows: those that nobody uses go, but where several others stand on one.

    What stays has the state that it had; where a chain was too long, it is cut.
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
    for group in sorted(stored, reverse=True):  # a group is younger than the one that it stands on
        if upon[group] > 1:
            needed.add(group)
        base = stored[group].base
        if base is not None:
            upon[base] += 1 if group in needed else upon[group]
    return needed
