"""Extremities, depths and states of a room, computed slowly from their definitions. The verification compares a store
with them. Pure.

This module knows all events, also those that the store lacks, but not their order of arrival."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from tidemark.sources.rooms.rules import MAX_DEPTH, MEMBER, EventKind, StateEntry, RoomEvent, StateKey, is_join


class Truth:
    """One room.

    If an event names a previous event that is at least as deep, its depth is false, and that reference is ignored.

    Args:
        everything: all events of the room on all servers, with their true kinds.
        stored_kinds: by event ID, the kind as which the store has the event.
        turns: by event ID, its number in the order of placing. This orders events of the maximal depth.
    """

    def __init__(
        self,
        everything: Iterable[RoomEvent],
        stored_kinds: Mapping[str, EventKind],
        turns: Mapping[str, int] | None = None,
    ) -> None:
        self.everything = {event.id: event for event in everything}
        self._stored_kinds = stored_kinds
        self._turns = turns or {}
        self._states: dict[str, dict[StateKey, StateEntry]] = {}

    def part(self, stored: Collection[str]) -> "Truth":
        """The same room if the store had only these events."""
        part = Truth((), {id: kind for id, kind in self._stored_kinds.items() if id in stored}, self._turns)
        part.everything, part._states = self.everything, self._states
        return part

    @cached_property
    def placed(self) -> set[str]:
        """The stored events that are not outliers."""
        return {id for id, kind in self._stored_kinds.items() if not kind.outlier}

    @property
    def forward(self) -> set[str]:
        """Regular events that no regular event follows, directly or through other events."""
        regular = {id for id, kind in self._stored_kinds.items() if kind is EventKind.REGULAR}
        followed: set[str] = set()
        frontier = [*regular]
        while frontier:
            event = self.everything[frontier.pop()]
            forward = {prev for prev in event.prevs if prev in self.placed and self._follows(event, prev)} - followed
            followed |= forward
            frontier += forward - regular
        return regular - followed

    def _follows(self, event: RoomEvent, prev: str) -> bool:
        """Whether `event`, which names `prev`, truly does so."""
        depth = self.everything[prev].depth
        if event.depth == MAX_DEPTH == depth:
            return self._turns[prev] < self._turns[event.id]
        return depth < event.depth

    @property
    def backward(self) -> set[str]:
        """The events that a placed event names as previous events, and that are not placed themselves."""
        return {prev for id in self.placed for prev in self.everything[id].prevs} - self.placed

    def state_at(self, id: str) -> dict[StateKey, StateEntry]:
        """By state key, the deepest event among this event and its ancestors. Rejected events do not count."""
        to_visit = [id]
        while to_visit:
            event = self.everything[to_visit[-1]]
            unresolved = [prev for prev in self._known(event) if prev not in self._states]
            if unresolved:
                to_visit += unresolved
                continue
            to_visit.pop()
            state = self.state_before(event)
            if event.key is not None and event.held_as is not EventKind.REJECTED:
                state[event.key] = StateEntry(event.depth, event.id)
            self._states[event.id] = state
        return self._states[id]

    def state_before(self, event: RoomEvent) -> dict[StateKey, StateEntry]:
        state: dict[StateKey, StateEntry] = {}
        for prev in self._known(event):
            _merge_deepest(state, self.state_at(prev) if prev not in self._states else self._states[prev])
        return state

    def _known(self, event: RoomEvent) -> list[str]:
        """The previous events that a server knows and whose depth fits."""
        known = [prev for prev in event.prevs if prev in self.everything]
        return [prev for prev in known if self.everything[prev].depth < event.depth or event.depth == MAX_DEPTH]

    @property
    def current(self) -> dict[StateKey, StateEntry]:
        state: dict[StateKey, StateEntry] = {}
        for id in self.forward:
            _merge_deepest(state, self.state_at(id))
        return state

    def stays(self, placed: Iterable[tuple[str, int]]) -> list[tuple[str, int, int | None, str | None]]:
        """The memberships, each as (member, turn of the first event, turn of the last event, event that ended it). The
        last two are None while the membership lasts.

        Args:
            placed: the placed events with their turns, in ascending order of turn.
        """
        stays: list[tuple[str, int, int | None, str | None]] = []
        since: dict[str, int] = {}
        listed = [*placed]
        for turn, forward in zip((turn for _, turn in listed), self._forward_after_each(listed), strict=True):
            current: dict[StateKey, StateEntry] = {}
            for last in forward:
                _merge_deepest(current, self.state_at(last))
            for (kind, member), entry in current.items():
                joined = kind == MEMBER and is_join(self.everything[entry.id])
                if joined:
                    since.setdefault(member, turn)
                elif kind == MEMBER and member in since:
                    stays.append((member, since.pop(member), turn, entry.id))
        return [*stays, *((member, turn, None, None) for member, turn in since.items())]

    def _forward_after_each(self, placed: Iterable[tuple[str, int]]) -> Iterator[set[str]]:
        """Yield the forward extremities after each of these events was placed."""
        forward: set[str] = set()
        present: set[str] = set()
        effective: set[str] = set()
        named_by: dict[str, list[RoomEvent]] = defaultdict(list)
        for id, _ in placed:
            present.add(id)
            event, is_regular = self.everything[id], self._stored_kinds[id] is EventKind.REGULAR
            named_by[id] = [other for other in named_by[id] if other.depth > event.depth]
            is_followed = any(other.id in effective for other in named_by[id])
            if is_regular and not is_followed:
                forward.add(id)
            for prev in event.prevs:
                named_by[prev].append(event)
            frontier = [event] if is_regular or is_followed else []
            while frontier:
                ancestor = frontier.pop()
                effective.add(ancestor.id)
                for prev in ancestor.prevs:
                    if any(other.id == ancestor.id for other in named_by[prev]):
                        forward.discard(prev)
                        if prev in present and prev not in effective and self._stored_kinds[prev] is not EventKind.REGULAR:
                            frontier.append(self.everything[prev])
            yield forward


def _merge_deepest(result: dict[StateKey, StateEntry], state: Mapping[StateKey, StateEntry]) -> None:
    """Merge `state` into `result`. For each key the deeper event wins."""
    for key, entry in state.items():
        result[key] = max(entry, result.get(key, entry))
