"""The tables of the rooms, in the service's own database, and caches of their rows.

A reader invalidates its caches with the rows of the stream `caches`: `[name, keys or null, ms]`. After `invalidate`,
`Caches.get` returns no value whose load began before. So a reader that has applied the invalidations up to a position
returns no older values.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.rules import (
    JOINED,
    EventKind,
    EventSummary,
    RoomEvent,
    State,
    StateEntry,
    StateGroup,
    StateKey,
    compact_groups,
)

SCHEMA = Migrations("tidemark.sources.rooms", "rooms_schema_version", "tidemark simulate --workload rooms")

# The chain of bases of a group; `place` is 1 for the group itself, 2 for its base, and so on.
_CHAIN_CTE = """
with recursive chain as (
    select id, base, 1 as place from rooms.state_groups where id = %s
    union all
    select below.id, below.base, chain.place + 1
    from chain join rooms.state_groups as below on below.id = chain.base
)
"""


class PostgresStateGroups:
    """The state groups of one room in Postgres (see `StateGroups`). Caches each state that `state` has read.

    Args:
        connection: in a transaction that has locked the room.
        room: the room.
    """

    def __init__(self, connection: Connection, room: str) -> None:
        self._connection = connection
        self._room = room
        self._state_by_group: dict[int, State] = {}

    def state(self, group_number: int) -> State:
        if group_number not in self._state_by_group:
            self._state_by_group[group_number] = load_state(self._connection, group_number)
        return self._state_by_group[group_number]

    def chain(self, group_number: int) -> Sequence[int]:
        rows = self._connection.execute(f"{_CHAIN_CTE} select id from chain order by place".encode(), [group_number])
        return [id for (id,) in rows.fetchall()]

    def add(self, state_group: StateGroup) -> int:
        types, keys, events, depths = _split_columns(state_group.delta)
        row = self._connection.execute(
            """
            with made as (insert into rooms.state_groups (room, base) values (%s, %s) returning id),
                filled as (
                    insert into rooms.state_deltas (state_group, type, state_key, event, depth)
                    select made.id, delta.* from made, unnest(%s::text[], %s::text[], %s::text[], %s::bigint[]) as delta
                )
            select id from made
            """,
            [self._room, state_group.base_number, types, keys, events, depths],
        ).fetchone()
        assert row is not None
        return int(row[0])


def load_state(connection: Connection, group_number: int) -> State:
    """Load the whole state of a group."""
    rows = connection.execute(
        f"""{_CHAIN_CTE} select distinct on (type, state_key) type, state_key, depth, event
            from chain join rooms.state_deltas on state_group = chain.id order by type, state_key, place""".encode(),
        [group_number],
    )
    return {(kind, key): StateEntry(depth, event) for kind, key, depth, event in rows.fetchall()}


class LockedRoom(NamedTuple):
    """A room whose lock is taken.

    Attributes:
        group_number: the number of the group of the room's current state; None if the room has no forward extremities.
        version: the number of changes of the room's current state.
        lock_count: the number of times that the room's lock was taken: the turn of the event that this transaction
            persists (see `rules.Stay`).
    """

    group_number: int | None
    version: int
    lock_count: int


def lock_room(connection: Connection, room: str) -> LockedRoom:
    """Create the room if it is new, and take the room's lock until the transaction ends. Waits for the lock.

    Also adds 1 to the room's lock count (column `turn`).
    """
    row = connection.execute(
        "insert into rooms.rooms (room, turn) values (%s, 1) on conflict (room) do update set turn = rooms.turn + 1"
        " returning state_group, version, turn",
        [room],
    ).fetchone()
    assert row is not None
    return LockedRoom(*row)


def load_events(connection: Connection, ids: Collection[str]) -> dict[str, tuple[RoomEvent, int | None]]:
    """Load stored events: ID -> the event, and the group of the state after the event (None for an outlier).

    IDs without a stored event are left out.
    """
    rows = connection.execute(
        "select event, room, type, sender, prevs, depth, state_key, content, held_as, state_group"
        " from rooms.events where event = any(%s)",
        [[*ids]],
    )
    return {row[0]: (_event_from_row(row), row[9]) for row in rows.fetchall()}


def _event_from_row(row: Sequence[Any]) -> RoomEvent:
    id, room, event_type, sender, prevs, depth, key, content, kind, _ = row
    return RoomEvent(id, room, event_type, sender, tuple(prevs), depth, key, content, EventKind(kind))


def load_successors(connection: Connection, room: str, id: str) -> list[EventSummary]:
    """Load the events that have an edge to the event `id`.

    The kind in the result is not the event's kind: `REGULAR` if the edge ends forward extremities, otherwise
    `SOFT_FAILED`.
    """
    rows = connection.execute("select event, depth, counts from rooms.edges where room = %s and prev = %s", [room, id])
    return [
        EventSummary(event, room, depth, EventKind.REGULAR if counts else EventKind.SOFT_FAILED)
        for event, depth, counts in rows.fetchall()
    ]


def load_forward_extremities(connection: Connection, room: str) -> dict[str, tuple[EventSummary, int]]:
    """Load the forward extremities of the room: ID -> the event, and the group of the state after the event."""
    rows = connection.execute(
        "select event, depth, held_as, state_group from rooms.forward_extremities join rooms.events using (event)"
        " where forward_extremities.room = %s",
        [room],
    )
    return {id: (EventSummary(id, room, depth, EventKind(kind)), group) for id, depth, kind, group in rows.fetchall()}


def end_extremities(connection: Connection, room: str, events: Sequence[str]) -> None:
    """Remove events from the forward extremities, because a regular event follows these events.

    If one of `events` is soft-failed or rejected, also removes the prev events of this event, recursively. Marks the
    edges of these soft-failed and rejected events as edges that end forward extremities.
    """
    connection.execute(
        """
        with recursive followed (event) as (
            select unnest(%(events)s::text[])
            union
            select edge.prev from followed
            join rooms.events as stored using (event) cross join unnest(stored.prevs) as named (prev)
            join rooms.edges as edge on (edge.room, edge.prev, edge.event) = (stored.room, named.prev, stored.event)
            where stored.room = %(room)s and stored.held_as in ('soft-failed', 'rejected') and not edge.counts
        ), updated_edges as (
            update rooms.edges as edge set counts = true
            from followed join rooms.events as stored using (event)
            where stored.room = %(room)s and stored.held_as in ('soft-failed', 'rejected')
                and edge.room = stored.room and edge.event = stored.event and edge.prev = any(stored.prevs)
                and not edge.counts
        )
        delete from rooms.forward_extremities where room = %(room)s and event in (select event from followed)
        """,
        {"room": room, "events": [*events]},
    )


def load_backward_extremities(connection: Connection, room: str) -> list[str]:
    """Load the IDs of the room's backward extremities: prev events that are missing, or stored as outliers. Prev events
    of the deepest events are first."""
    rows = connection.execute(
        "select missing.event from rooms.backward_extremities as missing"
        " left join rooms.edges as edge on edge.room = missing.room and edge.prev = missing.event"
        " where missing.room = %s group by missing.event order by max(edge.depth) desc, missing.event",
        [room],
    )
    return [event for (event,) in rows.fetchall()]


def load_joined_members(connection: Connection, room: str, members: Collection[str]) -> set[str]:
    """Load the members of `members` who are joined in the room."""
    rows = connection.execute(
        "select member from rooms.memberships where room = %s and member = any(%s) and membership = %s",
        [room, [*members], JOINED],
    )
    return {member for (member,) in rows.fetchall()}


def store_memberships(connection: Connection, room: str, events: Sequence[str]) -> None:
    """Store the memberships that these events set. An event without a membership counts as `leave`.

    Args:
        connection: in the transaction that has locked the room.
        room: the room.
        events: the IDs of stored membership events.
    """
    connection.execute(
        "insert into rooms.memberships (member, room, membership, event)"
        " select state_key, %s, coalesce(content->>'membership', 'leave'), event"
        " from rooms.events where event = any(%s)"
        " on conflict (member, room) do update set membership = excluded.membership, event = excluded.event",
        [room, [*events]],
    )


def update_stays(
    connection: Connection, room: str, turn: int, joined_members: Sequence[str], leave_ids: Mapping[str, int]
) -> None:
    """Begin and end stays of members.

    Args:
        connection: in the transaction that has locked the room.
        room: the room.
        turn: the turn of the event that changed the memberships (see `rules.Stay`).
        joined_members: the members whose stays begin.
        leave_ids: member whose stay ends -> the stream ID of the fact that reports the end.
    """
    connection.execute(
        "insert into rooms.stays (member, room, began) select unnest(%s::text[]), %s, %s", [joined_members, room, turn]
    )
    connection.execute(
        "update rooms.stays set ended = %s, left_by = id from unnest(%s::text[], %s::bigint[]) as leaver (member, id)"
        " where stays.room = %s and stays.member = leaver.member and stays.ended is null",
        [turn, [*leave_ids], [*leave_ids.values()], room],
    )


def as_json(content: object) -> str:
    """Encode a value as a JSON text."""
    return msgspec.json.encode(content).decode()


def compact_states(connection: Connection, room: str) -> int:
    """Store the room's state groups in fewer rows. Returns the number of removed groups.

    Runs in its own transaction, or in a savepoint if the connection is in a transaction. Takes the room's lock until
    the end of the transaction.
    """
    with connection.transaction():
        lock_room(connection, room)
        stored = _load_groups(connection, room)
        rows = connection.execute(
            "select distinct state_group from rooms.events where room = %(room)s and state_group is not null"
            " union select state_group from rooms.rooms where room = %(room)s and state_group is not null",
            {"room": room},
        )
        after = compact_groups(stored, {group for (group,) in rows.fetchall()})
        for group, state_group in after.items():
            if state_group.base_number == stored[group].base_number and state_group.delta == stored[group].delta:
                continue
            connection.execute("delete from rooms.state_deltas where state_group = %s", [group])
            connection.execute(
                "update rooms.state_groups set base = %s where id = %s", [state_group.base_number, group]
            )
            connection.execute(
                "insert into rooms.state_deltas (state_group, type, state_key, event, depth)"
                " select %s, delta.* from unnest(%s::text[], %s::text[], %s::text[], %s::bigint[]) as delta",
                [group, *_split_columns(state_group.delta)],
            )
        removed = sorted(stored.keys() - after.keys(), reverse=True)
        connection.execute("delete from rooms.state_groups where id = any(%s)", [removed])
    return len(removed)


def _load_groups(connection: Connection, room: str) -> dict[int, StateGroup]:
    """Load the state groups of a room: number -> group, with `chain_length` 0."""
    deltas: dict[int, dict[StateKey, StateEntry]] = {}
    bases: dict[int, int | None] = {}
    rows = connection.execute(
        "select id, base, type, state_key, depth, event from rooms.state_groups"
        " left join rooms.state_deltas on state_group = id where room = %s",
        [room],
    )
    for id, base, kind, key, depth, event in rows.fetchall():
        bases[id] = base
        delta = deltas.setdefault(id, {})
        if kind is not None:
            delta[kind, key] = StateEntry(depth, event)
    return {id: StateGroup(base, deltas[id], 0) for id, base in bases.items()}


def _split_columns(delta: State) -> tuple[list[str], list[str], list[str], list[int]]:
    """Convert entries to columns: the types, the state keys, the event IDs and the depths."""
    items: Iterable[tuple[StateKey, StateEntry]] = delta.items()
    types, keys, events, depths = [], [], [], []
    for (kind, key), entry in items:
        types.append(kind)
        keys.append(key)
        events.append(entry.id)
        depths.append(entry.depth)
    return types, keys, events, depths


ROOM_CACHES = "*room"
"""The name of the group of all caches whose key is the room."""
STATE_CACHE, MEMBERS_CACHE, JOINED_ROOMS_CACHE = "state", "members", "rooms_of"
"""The names of the caches of a room's current state, of its joined members, and of the rooms that a member has
joined."""

V = TypeVar("V")

CacheKey = tuple[str, tuple[str, ...]]
"""The name of a cache, and the key of a value in the cache."""


class Caches:
    """Named caches. Thread-safe.

    Args:
        caches_by_group: name of a group -> the names of its caches. An invalidation may name a group.
        max_entries: the largest number of values in all caches together. The oldest values are removed first.
    """

    def __init__(self, caches_by_group: Mapping[str, Collection[str]], max_entries: int = 10_000) -> None:
        self._caches_by_group = caches_by_group
        self._max_entries = max_entries
        self._values: dict[CacheKey, Any] = {}
        self._running_loads: dict[CacheKey, list[set[str]]] = {}
        """Key -> the running loads of its value. Each load is a set, to which an invalidation adds an element."""
        self._lock = Lock()

    def get(self, cache: str, keys: Sequence[str], load: Callable[[], V]) -> V:
        """Return the cached value. If there is none, call `load`, cache the loaded value, and return this value.

        If the value is invalidated while `load` runs, calls `load` again. Does not hold a lock while `load` runs, so
        several threads may load a value at the same time. Raises the errors of `load`.
        """
        cache_key = cache, tuple(keys)
        while True:
            stale: set[str] = set()
            with self._lock:
                if cache_key in self._values:
                    cached: V = self._values[cache_key]
                    return cached
                self._running_loads.setdefault(cache_key, []).append(stale)
            try:
                value = load()
            except BaseException:
                with self._lock:
                    self._remove_load(cache_key, stale)
                raise
            # In one step: an invalidation comes before it and marks the load, or after it and removes the value.
            with self._lock:
                self._remove_load(cache_key, stale)
                if not stale:
                    self._values[cache_key] = value
                    while len(self._values) > self._max_entries:
                        del self._values[next(iter(self._values))]
                    return value

    def invalidate(self, cache: str, keys: Sequence[str] | None) -> None:
        """Remove a value from a cache or from a group of caches, if present. A running load of the value is repeated.

        Args:
            cache: the name of a cache or of a group of caches.
            keys: the key of the value; None to remove all values.
        """
        with self._lock:
            for name in self._caches_by_group.get(cache, (cache,)):
                self._forget(
                    [cache_key for cache_key in (*self._values, *self._running_loads) if cache_key[0] == name]
                    if keys is None
                    else [(name, tuple(keys))]
                )

    def clear(self) -> None:
        """Remove all values from all caches, because invalidations may have been missed. Running loads are repeated."""
        with self._lock:
            self._forget([*self._values, *self._running_loads])

    def __len__(self) -> int:
        return len(self._values)

    def _forget(self, cache_keys: Iterable[CacheKey]) -> None:
        """Remove cached values, and mark the running loads of these values as stale."""
        for cache_key in cache_keys:
            self._values.pop(cache_key, None)
            for load in self._running_loads.get(cache_key, ()):
                load.add("stale")

    def _remove_load(self, cache_key: CacheKey, load: set[str]) -> None:
        """Remove a load from the running loads of a value."""
        loads = self._running_loads[cache_key]
        loads[:] = [other for other in loads if other is not load]
        if not loads:
            del self._running_loads[cache_key]
