"""A server's rooms without a database: the rules applied to dictionaries, one event after the other."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from tidemark.sources.rooms.rules import (
    MAX_DEPTH,
    MEMBER,
    EventKind,
    EventSummary,
    MemoryStateGroups,
    RelatedEvents,
    RoomChange,
    RoomEvent,
    State,
    Stay,
    Timeline,
    choose_prevs,
    check_state_before,
    group_after_event,
    is_join,
    merge_groups,
    joined_and_left,
    compute_change,
)


@dataclass
class MemoryRoom:
    """One room. `group` is that of its current state, None where it has no forward extremity."""

    forward_extremities: dict[str, EventSummary] = field(default_factory=dict)
    backward_extremities: set[str] = field(default_factory=set)
    groups: MemoryStateGroups = field(default_factory=MemoryStateGroups)
    group: int | None = None
    successor_depths: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Edges backwards: who names an event, held or not, with their depths."""
    events_ending_extremities: set[str] = field(default_factory=set)
    """Events whose edges count."""
    joined: dict[str, int] = field(default_factory=dict)
    """Of each who has joined the turn in which the stay began."""

    def successors_of(self, room: str, id: str) -> list[EventSummary]:
        return [
            EventSummary(other, room, depth, EventKind.REGULAR if other in self.events_ending_extremities else EventKind.SOFT_FAILED)
            for other, depth in self.successor_depths.get(id, {}).items()
        ]


class MemoryRooms:
    """All rooms of a server, with the timelines of their events: IDs 1, 2, ... live, -1, -2, ... of history."""

    def __init__(self) -> None:
        self.events: dict[str, RoomEvent] = {}
        self.rooms: dict[str, MemoryRoom] = defaultdict(MemoryRoom)
        self.group_of: dict[str, int] = {}
        self.live: list[str] = []
        self.history: list[str] = []
        self.recipients: dict[int, str] = {}
        """Of each ID in `live` that is not for a room the user whom it is for."""
        self.stays: dict[str, list[Stay]] = defaultdict(list)
        """Of each member those that are over."""
        self._turns: dict[str, int] = {}
        self._known: dict[str, EventSummary] = {}

    def persist(
        self, event: RoomEvent, timeline: Timeline = "events", given: Collection[str] | None = None
    ) -> RoomChange:
        """Persist an event; `given` are the events of the state before it, where not all of its prev events are held.

        Raises `BadEvent`; nothing is changed then.
        """
        room = self.rooms.get(event.room) or MemoryRoom()
        prevs = {id: self._known[id] for id in event.prevs if id in self._known}
        related = RelatedEvents(self.events.get(event.id), prevs, room.successors_of(event.room, event.id))
        change = compute_change(event, related, timeline)
        before = check_state_before(event, change, given, self.events)
        self.rooms[event.room] = room
        self.events[event.id], self._known[event.id] = event, event.summary
        if change.timeline:
            (self.live if change.timeline == "events" else self.history).append(event.id)
        if event.held_as is EventKind.OUT_OF_BAND and event.state_key:
            self.recipients[len(self.live)] = event.state_key
        if not event.held_as.outlier:
            self._turns[event.id] = len(self._turns)
            self._place(event, room, change, before)
        return change

    def told(self, member: str) -> list[int]:
        """The IDs of what arrived for a member: of its stays, and of what is sent to it alone."""
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

    def _place(self, event: RoomEvent, room: MemoryRoom, change: RoomChange, given: State | None) -> None:
        prevs = [self.group_of[id] for id in event.prevs if id in self.group_of]
        group = group_after_event(event, prevs, given, room.groups)
        self.group_of[event.id] = group
        room.backward_extremities.discard(event.id)
        room.backward_extremities.update(change.missing)
        for id in change.wrong_depth_events:
            del room.successor_depths[event.id][id]
        for id in change.edges:
            room.successor_depths[id][event.id] = event.depth
        if change.becomes_extremity:
            room.forward_extremities[event.id] = event.summary
        if change.counts:
            self._count(event, room)
            before = room.group
            replaces = change.becomes_extremity and event.depth < MAX_DEPTH
            room.group = self._current(room, group if replaces else None)
            if room.group is not None and room.group != before:
                self._update_members(event, room, before, room.group)

    def _count(self, event: RoomEvent, room: MemoryRoom) -> None:
        """The event's edges count, and with them those of events that it follows and that are no extremities."""
        events_ending_extremities = [event]
        while events_ending_extremities:
            at = events_ending_extremities.pop()
            room.events_ending_extremities.add(at.id)
            for id in at.prevs:
                if at.id in room.successor_depths[id]:
                    room.forward_extremities.pop(id, None)
                    prev = self.events[id] if id in self.group_of else None
                    if prev and prev.room == event.room and not prev.held_as.counts and id not in room.events_ending_extremities:
                        events_ending_extremities.append(prev)

    def _update_members(self, event: RoomEvent, room: MemoryRoom, before: int | None, after: int) -> None:
        changed = room.groups.changed_entries(before, after)
        members = {key: self.events[entry.id] for (kind, key), entry in changed.items() if kind == MEMBER}
        came, went = joined_and_left(room.joined.keys() & members, {member for member, it in members.items() if is_join(it)})
        turn = self._turns[event.id]
        for member in went:
            self.live.append(members[member].id)
            self.recipients[len(self.live)] = member
            self.stays[member].append(Stay(event.room, room.joined.pop(member), turn, len(self.live)))
        room.joined.update(dict.fromkeys(came, turn))

    def _current(self, room: MemoryRoom, newest: int | None) -> int | None:
        """The group of the current state, which resolves those of the forward extremities. `newest` is the group of the
        one that came last, if its state holds the states of those that it replaced: not so at the deepest depth."""
        groups = dict.fromkeys(self.group_of[id] for id in room.forward_extremities)
        if newest is not None and room.group is not None and len(groups) > 1:
            groups = dict.fromkeys([room.group, newest])
        return merge_groups([*groups], None, {}, room.groups) if groups else None
