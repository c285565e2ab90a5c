"""Extremities, depths and states, computed slowly from their definitions. Stores are compared with this. Pure. It
knows all events, also those that a store lacks, and does not know their order of arrival."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from tidemark.sources.rooms.rules import DEEPEST_EVENT, MEMBER, HeldAs, KeyHolder, RoomEvent, StateKey, joins


class Truth:
    """One room. `everything` has each event's true kind, rejected or not; `held` the kind as which the store has it;
    `turns` the order in which events were placed, which decides among events of the deepest depth. If an event names a
    previous event that is at least as deep, its depth is false, and that reference is ignored.
    """

    def __init__(
        self, everything: Iterable[RoomEvent], held: Mapping[str, HeldAs], turns: Mapping[str, int] | None = None
    ) -> None:
        self.everything = {event.id: event for event in everything}
        self._held = held
        self._turns = turns or {}
        self._states: dict[str, dict[StateKey, KeyHolder]] = {}

    def part(self, stored: Collection[str]) -> "Truth":
        """The same room if the store had only these events."""
        part = Truth((), {id: kind for id, kind in self._held.items() if id in stored}, self._turns)
        part.everything, part._states = self.everything, self._states
        return part

    @cached_property
    def placed(self) -> set[str]:
        """The stored events that are not outliers."""
        return {id for id, kind in self._held.items() if not kind.outlier}

    @property
    def forward(self) -> set[str]:
        """Regular events that no regular event follows, directly or through other events."""
        regular = {id for id, kind in self._held.items() if kind is HeldAs.REGULAR}
        followed: set[str] = set()
        through = [*regular]
        while through:
            event = self.everything[through.pop()]
            forward = {prev for prev in event.prevs if prev in self.placed and self._follows(event, prev)} - followed
            followed |= forward
            through += forward - regular
        return regular - followed

    def _follows(self, event: RoomEvent, prev: str) -> bool:
        """Whether `event`, which names `prev`, truly does so."""
        depth = self.everything[prev].depth
        if event.depth == DEEPEST_EVENT == depth:
            return self._turns[prev] < self._turns[event.id]
        return depth < event.depth

    @property
    def backward(self) -> set[str]:
        """The events that a placed event names, and that are not placed."""
        return {prev for id in self.placed for prev in self.everything[id].prevs} - self.placed

    def state_at(self, id: str) -> dict[StateKey, KeyHolder]:
        """By state key, the deepest event among this one and all before it. Rejected events do not count."""
        open_ones = [id]
        while open_ones:
            event = self.everything[open_ones[-1]]
            waits_for = [prev for prev in self._known(event) if prev not in self._states]
            if waits_for:
                open_ones += waits_for
                continue
            open_ones.pop()
            state = self.state_before(event)
            if event.key is not None and event.held_as is not HeldAs.REJECTED:
                state[event.key] = KeyHolder(event.depth, event.id)
            self._states[event.id] = state
        return self._states[id]

    def state_before(self, event: RoomEvent) -> dict[StateKey, KeyHolder]:
        state: dict[StateKey, KeyHolder] = {}
        for prev in self._known(event):
            _deepen(state, self.state_at(prev) if prev not in self._states else self._states[prev])
        return state

    def _known(self, event: RoomEvent) -> list[str]:
        """The previous events that a server knows and whose depth fits."""
        known = [prev for prev in event.prevs if prev in self.everything]
        return [prev for prev in known if self.everything[prev].depth < event.depth or event.depth == DEEPEST_EVENT]

    @property
    def current(self) -> dict[StateKey, KeyHolder]:
        state: dict[StateKey, KeyHolder] = {}
        for id in self.forward:
            _deepen(state, self.state_at(id))
        return state

    def stays(self, placed: Iterable[tuple[str, int]]) -> list[tuple[str, int, int | None, str | None]]:
        """The memberships: member, the turns of the first and the last event, and the event that ended the membership
        (None while it lasts)."""
        stays: list[tuple[str, int, int | None, str | None]] = []
        since: dict[str, int] = {}
        listed = [*placed]
        for turn, forward in zip((turn for _, turn in listed), self._forward_after_each(listed), strict=True):
            current: dict[StateKey, KeyHolder] = {}
            for last in forward:
                _deepen(current, self.state_at(last))
            for (kind, member), entry in current.items():
                joined = kind == MEMBER and joins(self.everything[entry.id])
                if joined:
                    since.setdefault(member, turn)
                elif kind == MEMBER and member in since:
                    stays.append((member, since.pop(member), turn, entry.id))
        return [*stays, *((member, turn, None, None) for member, turn in since.items())]

    def _forward_after_each(self, placed: Iterable[tuple[str, int]]) -> Iterator[set[str]]:
        """The forward extremities after each of these events was placed."""
        forward: set[str] = set()
        present: set[str] = set()
        counting: set[str] = set()
        named_by: dict[str, list[RoomEvent]] = defaultdict(list)
        for id, _ in placed:
            present.add(id)
            event, is_regular = self.everything[id], self._held[id] is HeldAs.REGULAR
            named_by[id] = [other for other in named_by[id] if other.depth > event.depth]
            is_followed = any(other.id in counting for other in named_by[id])
            if is_regular and not is_followed:
                forward.add(id)
            for prev in event.prevs:
                named_by[prev].append(event)
            through = [event] if is_regular or is_followed else []
            while through:
                at = through.pop()
                counting.add(at.id)
                for prev in at.prevs:
                    if any(other.id == at.id for other in named_by[prev]):
                        forward.discard(prev)
                        if prev in present and prev not in counting and self._held[prev] is not HeldAs.REGULAR:
                            through.append(self.everything[prev])
            yield forward


def _deepen(result: dict[StateKey, KeyHolder], state: Mapping[StateKey, KeyHolder]) -> None:
    for key, entry in state.items():
        result[key] = max(entry, result.get(key, entry))
