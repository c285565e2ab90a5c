"""The expected extremities, states and stays of a room, computed slowly from their definitions. Pure.

The verification compares the tables of the services with these results. The results depend on all events of the room,
including events that the tables lack. The order of arrival matters only for stays and for events of `MAX_DEPTH`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from tidemark.sources.rooms.rules import MAX_DEPTH, MEMBER, EventKind, RoomEvent, StateEntry, StateKey, is_join


class ExpectedRoom:
    """Computes the expected results for one room.

    An edge to a prev event that is as deep as the event, or deeper, is ignored: the depth of the event is wrong. Edges
    between events of `MAX_DEPTH` are valid, if they lead from a later to an earlier event.

    Args:
        all_events: all events of the room on all servers, with their true kinds.
        stored_kinds: event ID -> kind of the event in the tables, for all events in the tables.
        turns: event ID -> number of the event in order of arrival. Needed only if several events have `MAX_DEPTH`.
    """

    def __init__(
        self,
        all_events: Iterable[RoomEvent],
        stored_kinds: Mapping[str, EventKind],
        turns: Mapping[str, int] | None = None,
    ) -> None:
        self.all_events = {event.id: event for event in all_events}
        self._stored_kinds = stored_kinds
        self._turns = turns or {}
        self._state_by_event: dict[str, dict[StateKey, StateEntry]] = {}

    def restricted_to(self, stored_ids: Collection[str]) -> "ExpectedRoom":
        """Return the same room, as if the tables had only the events with these IDs."""
        room = ExpectedRoom((), {id: kind for id, kind in self._stored_kinds.items() if id in stored_ids}, self._turns)
        room.all_events, room._state_by_event = self.all_events, self._state_by_event
        return room

    @cached_property
    def non_outliers(self) -> set[str]:
        """The IDs of the stored events that are not outliers."""
        return {id for id, kind in self._stored_kinds.items() if not kind.is_outlier}

    @property
    def forward_extremities(self) -> set[str]:
        """The IDs of the regular events that no regular event follows, directly or through soft-failed and rejected
        events."""
        regular = {id for id, kind in self._stored_kinds.items() if kind is EventKind.REGULAR}
        followed: set[str] = set()
        frontier = [*regular]
        while frontier:
            event = self.all_events[frontier.pop()]
            newly_followed = {
                prev for prev in event.prevs if prev in self.non_outliers and self._follows(event, prev)
            } - followed
            followed |= newly_followed
            frontier += newly_followed - regular
        return regular - followed

    def _follows(self, event: RoomEvent, prev: str) -> bool:
        """Whether the edge from `event` to `prev` is valid: `event` is deeper than `prev`, or both have `MAX_DEPTH` and
        `event` arrived later."""
        depth = self.all_events[prev].depth
        if event.depth == MAX_DEPTH == depth:
            return self._turns[prev] < self._turns[event.id]
        return depth < event.depth

    @property
    def backward_extremities(self) -> set[str]:
        """The IDs of those prev events of non-outliers that are not stored, or are stored only as outliers."""
        return {prev for id in self.non_outliers for prev in self.all_events[id].prevs} - self.non_outliers

    def state_at(self, id: str) -> dict[StateKey, StateEntry]:
        """The state after an event that some server has: state key -> deepest event that is not rejected, among this
        event and its ancestors."""
        to_visit = [id]
        while to_visit:
            event = self.all_events[to_visit[-1]]
            unresolved = [prev for prev in self._known_prevs(event) if prev not in self._state_by_event]
            if unresolved:
                to_visit += unresolved
                continue
            to_visit.pop()
            state = self.state_before(event)
            if event.key is not None and event.kind is not EventKind.REJECTED:
                state[event.key] = StateEntry(event.depth, event.id)
            self._state_by_event[event.id] = state
        return self._state_by_event[id]

    def state_before(self, event: RoomEvent) -> dict[StateKey, StateEntry]:
        """The state before an event: for each state key, the deepest entry in the states after its prev events."""
        state: dict[StateKey, StateEntry] = {}
        for prev in self._known_prevs(event):
            _merge_deepest(
                state, self.state_at(prev) if prev not in self._state_by_event else self._state_by_event[prev]
            )
        return state

    def _known_prevs(self, event: RoomEvent) -> list[str]:
        """The IDs of the prev events that some server has, without prev events whose edge from `event` is ignored."""
        known = [prev for prev in event.prevs if prev in self.all_events]
        return [prev for prev in known if self.all_events[prev].depth < event.depth or event.depth == MAX_DEPTH]

    @property
    def current_state(self) -> dict[StateKey, StateEntry]:
        """The current state of the room: for each state key, the deepest entry at any forward extremity."""
        state: dict[StateKey, StateEntry] = {}
        for id in self.forward_extremities:
            _merge_deepest(state, self.state_at(id))
        return state

    def compute_stays(self, arrivals: Iterable[tuple[str, int]]) -> list[tuple[str, int, int | None, str | None]]:
        """The stays of all members (see `rules.Stay`), each as (member, turn of the first event, turn of the last
        event, ID of the event that ended the stay). The last two fields are None while the stay lasts.

        Args:
            arrivals: the IDs of the non-outliers with their turns, in ascending order of turn.
        """
        stays: list[tuple[str, int, int | None, str | None]] = []
        since: dict[str, int] = {}
        listed = [*arrivals]
        for turn, forward in zip((turn for _, turn in listed), self._forward_after_each(listed), strict=True):
            current: dict[StateKey, StateEntry] = {}
            for last in forward:
                _merge_deepest(current, self.state_at(last))
            for (kind, member), entry in current.items():
                joined = kind == MEMBER and is_join(self.all_events[entry.id])
                if joined:
                    since.setdefault(member, turn)
                elif kind == MEMBER and member in since:
                    stays.append((member, since.pop(member), turn, entry.id))
        return [*stays, *((member, turn, None, None) for member, turn in since.items())]

    def _forward_after_each(self, arrivals: Iterable[tuple[str, int]]) -> Iterator[set[str]]:
        """Yield the IDs of the forward extremities after each arrival. The next arrival changes the yielded set."""
        forward: set[str] = set()
        present: set[str] = set()
        ending: set[str] = set()  # events whose edges end forward extremities
        successors: dict[str, list[RoomEvent]] = defaultdict(list)
        for id, _ in arrivals:
            present.add(id)
            event, is_regular = self.all_events[id], self._stored_kinds[id] is EventKind.REGULAR
            successors[id] = [other for other in successors[id] if other.depth > event.depth]
            is_followed = any(other.id in ending for other in successors[id])
            if is_regular and not is_followed:
                forward.add(id)
            for prev in event.prevs:
                successors[prev].append(event)
            frontier = [event] if is_regular or is_followed else []
            while frontier:
                ancestor = frontier.pop()
                ending.add(ancestor.id)
                for prev in ancestor.prevs:
                    if any(other.id == ancestor.id for other in successors[prev]):
                        forward.discard(prev)
                        if prev in present and prev not in ending and self._stored_kinds[prev] is not EventKind.REGULAR:
                            frontier.append(self.all_events[prev])
            yield forward


def _merge_deepest(result: dict[StateKey, StateEntry], state: Mapping[StateKey, StateEntry]) -> None:
    """Merge `state` into `result`: for each key, `result` gets the deeper event."""
    for key, entry in state.items():
        result[key] = max(entry, result.get(key, entry))
