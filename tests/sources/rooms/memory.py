"""A server's rooms without a database: the rules applied to dictionaries, one event after the other."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from tidemark.sources.rooms.rules import (
    MAX_DEPTH,
    MEMBER,
    EventKind,
    EventStream,
    EventSummary,
    MemoryStateGroups,
    RelatedEvents,
    RoomChange,
    RoomEvent,
    State,
    Stay,
    check_state_before,
    choose_prevs,
    compare_joined_members,
    compute_change,
    find_group_after_event,
    is_join,
    merge_groups,
)


@dataclass
class MemoryRoom:
    """One room. `group`: the group of its current state; None without forward extremities."""

    forward_extremities: dict[str, EventSummary] = field(default_factory=dict)
    backward_extremities: set[str] = field(default_factory=set)
    groups: MemoryStateGroups = field(default_factory=MemoryStateGroups)
    group: int | None = None
    successor_depths: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By ID of an event, stored or not, the events that name it as a prev event, each with its depth."""
    ending_events: set[str] = field(default_factory=set)
    """The IDs of the events whose edges end forward extremities."""
    joined: dict[str, int] = field(default_factory=dict)
    """By joined member, the turn in which the stay began."""

    def successors_of(self, room: str, id: str) -> list[EventSummary]:
        return [
            EventSummary(
                other, room, depth, EventKind.REGULAR if other in self.ending_events else EventKind.SOFT_FAILED
            )
            for other, depth in self.successor_depths.get(id, {}).items()
        ]


class MemoryRooms:
    """All rooms of a server, and their timelines: `live` has the IDs of the events with the stream IDs 1, 2, and so on;
    `history` has the IDs of the events with the stream IDs -1, -2, and so on."""

    def __init__(self) -> None:
        self.events: dict[str, RoomEvent] = {}
        self.rooms: dict[str, MemoryRoom] = defaultdict(MemoryRoom)
        self.group_of: dict[str, int] = {}
        self.live: list[str] = []
        self.history: list[str] = []
        self.recipients: dict[int, str] = {}
        """By stream ID of an event that only one member receives, the member."""
        self.stays: dict[str, list[Stay]] = defaultdict(list)
        """By member, the stays that have ended."""
        self._turns: dict[str, int] = {}
        self._summaries: dict[str, EventSummary] = {}

    def persist(
        self, event: RoomEvent, stream: EventStream = "events", state_ids_before: Collection[str] | None = None
    ) -> RoomChange:
        """Persist an event, as `RoomStore.persist` does. If it raises `BadEvent`, nothing is changed."""
        room = self.rooms.get(event.room) or MemoryRoom()
        prevs = {id: self._summaries[id] for id in event.prevs if id in self._summaries}
        related = RelatedEvents(self.events.get(event.id), prevs, room.successors_of(event.room, event.id))
        change = compute_change(event, related, stream)
        state_before = check_state_before(event, change, state_ids_before, self.events)
        self.rooms[event.room] = room
        self.events[event.id], self._summaries[event.id] = event, event.summary
        if change.stream:
            (self.live if change.stream == "events" else self.history).append(event.id)
        if event.kind is EventKind.OUT_OF_BAND and event.state_key:
            self.recipients[len(self.live)] = event.state_key
        if not event.kind.is_outlier:
            self._turns[event.id] = len(self._turns)
            self._store_edges_and_state(event, room, change, state_before)
        return change

    def received_ids(self, member: str) -> list[int]:
        """The stream IDs of the live events that a member receives: the events of its stays, and events that only the
        member receives."""
        stays = [*self.stays[member]]
        stays += [Stay(name, room.joined[member]) for name, room in self.rooms.items() if member in room.joined]
        return [
            id
            for id, event in enumerate(self.live, 1)
            if (
                self.recipients[id] == member
                if id in self.recipients
                else any(stay.room == self.events[event].room and stay.covers(self._turns[event]) for stay in stays)
            )
        ]

    def extremities(self, room: str) -> tuple[EventSummary, ...]:
        """The prev events of a new event."""
        return choose_prevs(self.rooms[room].forward_extremities.values())

    def _store_edges_and_state(
        self, event: RoomEvent, room: MemoryRoom, change: RoomChange, state_before: State | None
    ) -> None:
        prev_groups = [self.group_of[id] for id in event.prevs if id in self.group_of]
        group = find_group_after_event(event, prev_groups, state_before, room.groups)
        self.group_of[event.id] = group
        room.backward_extremities.discard(event.id)
        room.backward_extremities.update(change.missing_prevs)
        for id in change.wrong_depth_events:
            del room.successor_depths[event.id][id]
        for id in change.edges:
            room.successor_depths[id][event.id] = event.depth
        if change.becomes_extremity:
            room.forward_extremities[event.id] = event.summary
        if change.ends_extremities:
            self._end_extremities(event, room)
            before = room.group
            includes_prevs = change.becomes_extremity and event.depth < MAX_DEPTH
            room.group = self._resolve_current_group(room, group if includes_prevs else None)
            if room.group is not None and room.group != before:
                self._update_members(event, room, before, room.group)

    def _end_extremities(self, event: RoomEvent, room: MemoryRoom) -> None:
        """End the forward extremities that the event follows, directly or through soft-failed and rejected events."""
        queue = [event]
        while queue:
            current = queue.pop()
            room.ending_events.add(current.id)
            for id in current.prevs:
                if current.id in room.successor_depths[id]:
                    room.forward_extremities.pop(id, None)
                    prev = self.events[id] if id in self.group_of else None
                    if prev and prev.room == event.room and not prev.kind.is_regular and id not in room.ending_events:
                        queue.append(prev)

    def _update_members(self, event: RoomEvent, room: MemoryRoom, before: int | None, after: int) -> None:
        changed = room.groups.changed_entries(before, after)
        members = {key: self.events[entry.id] for (kind, key), entry in changed.items() if kind == MEMBER}
        joined, left = compare_joined_members(
            room.joined.keys() & members, {member for member, other in members.items() if is_join(other)}
        )
        turn = self._turns[event.id]
        for member in left:
            self.live.append(members[member].id)
            self.recipients[len(self.live)] = member
            self.stays[member].append(Stay(event.room, room.joined.pop(member), turn, len(self.live)))
        room.joined.update(dict.fromkeys(joined, turn))

    def _resolve_current_group(self, room: MemoryRoom, newest: int | None) -> int | None:
        """The group of the current state; None without forward extremities. `newest`: the group of the newest event, if
        its state includes the states of the forward extremities that it replaced; otherwise None."""
        groups = dict.fromkeys(self.group_of[id] for id in room.forward_extremities)
        if newest is not None and room.group is not None and len(groups) > 1:
            groups = dict.fromkeys([room.group, newest])
        return merge_groups([*groups], None, {}, room.groups) if groups else None
