"""What extremities, depths and states are, by their definitions alone: the slow truth that stores are held against.

Pure. It knows all events, also those that a store does not hold, and nothing of the order in which they came.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from tidemark.sources.rooms.rules import MEMBER, HeldAs, RoomEvent
from tidemark.sources.rooms.states import KeyHolder, StateKey
from tidemark.sources.rooms.stays import joins


class Truth:
    """One room. `everything` says of its events what they are, rejected or not; `held` as what they are held."""

    def __init__(self, everything: Iterable[RoomEvent], held: Mapping[str, HeldAs]) -> None:
        self.everything = {event.id: event for event in everything}
        self._held = held
        self._states: dict[str, dict[StateKey, KeyHolder]] = {}

    def part(self, held: Collection[str]) -> "Truth":
        """The same room, were only these of its events held."""
        part = Truth((), {id: kept for id, kept in self._held.items() if id in held})
        part.everything, part._states = self.everything, self._states
        return part

    @cached_property
    def placed(self) -> set[str]:
        """Held, and no outliers."""
        return {id for id, kept in self._held.items() if not kept.outlier}

    @property
    def forward(self) -> set[str]:
        """Regular events that no regular event names."""
        regular = {id for id, kept in self._held.items() if kept is HeldAs.REGULAR}
        return regular - {prev for id in regular for prev in self.everything[id].prevs}

    @property
    def backward(self) -> set[str]:
        """Named by an event that is placed, and not placed."""
        return {prev for id in self.placed for prev in self.everything[id].prevs} - self.placed

    def state_at(self, id: str) -> dict[StateKey, KeyHolder]:
        """Of each key the deepest event among this one and all before it, rejected ones aside."""
        open_ones = [id]
        while open_ones:
            event = self.everything[open_ones[-1]]
            waits_for = [prev for prev in event.prevs if prev not in self._states]
            if waits_for:
                open_ones += waits_for
                continue
            open_ones.pop()
            found = self.state_before(event)
            if event.key is not None and event.held_as is not HeldAs.REJECTED:
                _deepen(found, {event.key: KeyHolder(event.depth, event.id)})
            self._states[event.id] = found
        return self._states[id]

    def state_before(self, event: RoomEvent) -> dict[StateKey, KeyHolder]:
        found: dict[StateKey, KeyHolder] = {}
        for prev in event.prevs:
            _deepen(found, self.state_at(prev) if prev not in self._states else self._states[prev])
        return found

    @property
    def current(self) -> dict[StateKey, KeyHolder]:
        found: dict[StateKey, KeyHolder] = {}
        for id in self.forward:
            _deepen(found, self.state_at(id))
        return found

    def stays(self, placed: Iterable[tuple[str, int]]) -> list[tuple[str, int, int | None, str | None]]:
        """By events and their turns, in which they were placed: who was joined, the turns of the first event and of the
        last one, and the event of the membership that ended it; None while it lasts."""
        found: list[tuple[str, int, int | None, str | None]] = []
        since: dict[str, int] = {}
        named: set[str] = set()
        forward: set[str] = set()
        for id, turn in placed:
            if self._held[id] is HeldAs.REGULAR:
                named.update(self.everything[id].prevs)
                forward = (forward | {id}) - named
            current: dict[StateKey, KeyHolder] = {}
            for last in forward:
                _deepen(current, self.state_at(last))
            for (kind, member), holder in current.items():
                joined = kind == MEMBER and joins(self.everything[holder.id])
                if joined:
                    since.setdefault(member, turn)
                elif kind == MEMBER and member in since:
                    found.append((member, since.pop(member), turn, holder.id))
        return [*found, *((member, turn, None, None) for member, turn in since.items())]


def _deepen(found: dict[StateKey, KeyHolder], state: Mapping[StateKey, KeyHolder]) -> None:
    for key, holder in state.items():
        found[key] = max(holder, found.get(key, holder))
