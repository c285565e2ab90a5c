"""The tables of the rooms, in the service's own database, and caches of their rows.

The caches follow the stream `caches`: rows `[name, keys or null, ms]`. A value that was loaded before an invalidation
is never returned after it was `invalidated`, even if it was still loading. So a reader applies the invalidations up to
a position first, and then returns no older values.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.rules import (
    JOINED,
    HeldAs,
    KeyHolder,
    KnownEvent,
    Placed,
    RoomEvent,
    State,
    StateKey,
    compacted,
)

SCHEMA = Migrations("tidemark.sources.rooms", "rooms_schema_version", "tidemark simulate --workload rooms")

_STATE = """
with recursive chain as (
    select id, base, 1 as place from rooms.state_groups where id = %s
    union all
    select below.id, below.base, chain.place + 1
    from chain join rooms.state_groups as below on below.id = chain.base
)
"""


class PostgresGroups:
    """The state groups of one room, in one transaction that holds the room's lock; a state is read once."""

    def __init__(self, connection: Connection, room: str) -> None:
        self._connection = connection
        self._room = room
        self._states: dict[int, State] = {}

    def state(self, group: int) -> State:
        if group not in self._states:
            self._states[group] = state_of(self._connection, group)
        return self._states[group]

    def chain(self, group: int) -> Sequence[int]:
        rows = self._connection.execute(f"{_STATE} select id from chain order by place".encode(), [group])
        return [id for (id,) in rows.fetchall()]

    def add(self, placed: Placed) -> int:
        types, keys, events, depths = _columns(placed.delta)
        row = self._connection.execute(
            """
            with made as (insert into rooms.state_groups (room, base) values (%s, %s) returning id),
                filled as (
                    insert into rooms.state_deltas (state_group, type, state_key, event, depth)
                    select made.id, delta.* from made, unnest(%s::text[], %s::text[], %s::text[], %s::bigint[]) as delta
                )
            select id from made
            """,
            [self._room, placed.base, types, keys, events, depths],
        ).fetchone()
        assert row is not None
        return int(row[0])


def state_of(connection: Connection, group: int) -> State:
    """The whole state of a group."""
    rows = connection.execute(
        f"""{_STATE} select distinct on (type, state_key) type, state_key, depth, event
            from chain join rooms.state_deltas on state_group = chain.id order by type, state_key, place""".encode(),
        [group],
    )
    return {(kind, key): KeyHolder(depth, event) for kind, key, depth, event in rows.fetchall()}


class LockedRoom(NamedTuple):
    """A room whose lock is taken. `group`, `version`: of its current state. `turn`: how often the lock was taken."""

    group: int | None
    version: int
    turn: int


def lock_room(connection: Connection, room: str) -> LockedRoom:
    """Take the room's lock until the transaction ends."""
    row = connection.execute(
        "insert into rooms.rooms (room, turn) values (%s, 1) on conflict (room) do update set turn = rooms.turn + 1"
        " returning state_group, version, turn",
        [room],
    ).fetchone()
    assert row is not None
    return LockedRoom(*row)


def events_of(connection: Connection, ids: Collection[str]) -> dict[str, tuple[RoomEvent, int | None]]:
    """The stored events of these IDs, with the groups of their states."""
    rows = connection.execute(
        "select event, room, type, sender, prevs, depth, state_key, content, held_as, state_group"
        " from rooms.events where event = any(%s)",
        [[*ids]],
    )
    return {row[0]: (_event(row), row[9]) for row in rows.fetchall()}


def _event(row: Sequence[Any]) -> RoomEvent:
    id, room, kind, sender, prevs, depth, key, content, kind_held, _ = row
    return RoomEvent(id, room, kind, sender, tuple(prevs), depth, key, content, HeldAs(kind_held))


def named_by(connection: Connection, room: str, id: str) -> list[KnownEvent]:
    """The events with an edge to an event. An event whose edge does not count is returned as soft-failed."""
    rows = connection.execute("select event, depth, counts from rooms.edges where room = %s and prev = %s", [room, id])
    return [
        KnownEvent(event, room, depth, HeldAs.REGULAR if counts else HeldAs.SOFT_FAILED)
        for event, depth, counts in rows.fetchall()
    ]


def forward_extremities(connection: Connection, room: str) -> dict[str, tuple[KnownEvent, int]]:
    """The forward extremities, with the groups of their states."""
    rows = connection.execute(
        "select event, depth, held_as, state_group from rooms.forward_extremities join rooms.events using (event)"
        " where forward_extremities.room = %s",
        [room],
    )
    return {
        id: (KnownEvent(id, room, depth, HeldAs(stored_as)), group) for id, depth, stored_as, group in rows.fetchall()
    }


def end_extremities(connection: Connection, room: str, events: Sequence[str]) -> None:
    """End the forward extremities at `events`, which a later event now follows. If one of them is soft-failed or
    rejected, its edges count from now on too, recursively.
    """
    connection.execute(
        """
        with recursive followed (event) as (
            select unnest(%(events)s::text[])
            union
            select edge.prev from followed
            join rooms.events as held using (event) cross join unnest(held.prevs) as named (prev)
            join rooms.edges as edge on (edge.room, edge.prev, edge.event) = (held.room, named.prev, held.event)
            where held.room = %(room)s and held.held_as in ('soft-failed', 'rejected') and not edge.counts
        ), counting as (
            update rooms.edges as edge set counts = true
            from followed join rooms.events as held using (event)
            where held.room = %(room)s and held.held_as in ('soft-failed', 'rejected')
                and edge.room = held.room and edge.event = held.event and edge.prev = any(held.prevs)
                and not edge.counts
        )
        delete from rooms.forward_extremities where room = %(room)s and event in (select event from followed)
        """,
        {"room": room, "events": [*events]},
    )


def backward_extremities(connection: Connection, room: str) -> list[str]:
    """The missing prev events, ordered by the depth of the events that name them, deepest first."""
    rows = connection.execute(
        "select missing.event from rooms.backward_extremities as missing"
        " left join rooms.edges as edge on edge.room = missing.room and edge.prev = missing.event"
        " where missing.room = %s group by missing.event order by max(edge.depth) desc, missing.event",
        [room],
    )
    return [event for (event,) in rows.fetchall()]


def joined_of(connection: Connection, room: str, members: Collection[str]) -> set[str]:
    """The members among these that have joined, by the room's current state."""
    rows = connection.execute(
        "select member from rooms.memberships where room = %s and member = any(%s) and membership = %s",
        [room, [*members], JOINED],
    )
    return {member for (member,) in rows.fetchall()}


def renew_members(connection: Connection, room: str, events: Sequence[str]) -> None:
    """Store the new memberships, each with its event."""
    connection.execute(
        "insert into rooms.memberships (member, room, membership, event)"
        " select state_key, %s, coalesce(content->>'membership', 'leave'), event"
        " from rooms.events where event = any(%s)"
        " on conflict (member, room) do update set membership = excluded.membership, event = excluded.event",
        [room, [*events]],
    )


def renew_stays(connection: Connection, room: str, turn: int, came: Sequence[str], went: Mapping[str, int]) -> None:
    """Begin and end stays of members, each with the stream ID of its event."""
    connection.execute(
        "insert into rooms.stays (member, room, began) select unnest(%s::text[]), %s, %s", [came, room, turn]
    )
    connection.execute(
        "update rooms.stays set ended = %s, left_by = id from unnest(%s::text[], %s::bigint[]) as told (member, id)"
        " where stays.room = %s and stays.member = told.member and stays.ended is null",
        [turn, [*went], [*went.values()], room],
    )


def as_json(content: object) -> str:
    return msgspec.json.encode(content).decode()


def compact_states(connection: Connection, room: str) -> int:
    """Store the room's state groups in fewer rows, in a transaction of its own. Returns the number of removed
    groups."""
    with connection.transaction():
        lock_room(connection, room)
        stored = _stored(connection, room)
        rows = connection.execute(
            "select distinct state_group from rooms.events where room = %(room)s and state_group is not null"
            " union select state_group from rooms.rooms where room = %(room)s and state_group is not null",
            {"room": room},
        )
        after = compacted(stored, {group for (group,) in rows.fetchall()})
        for group, placed in after.items():
            if placed.base == stored[group].base and placed.delta == stored[group].delta:
                continue
            connection.execute("delete from rooms.state_deltas where state_group = %s", [group])
            connection.execute("update rooms.state_groups set base = %s where id = %s", [placed.base, group])
            connection.execute(
                "insert into rooms.state_deltas (state_group, type, state_key, event, depth)"
                " select %s, delta.* from unnest(%s::text[], %s::text[], %s::text[], %s::bigint[]) as delta",
                [group, *_columns(placed.delta)],
            )
        gone = sorted(stored.keys() - after.keys(), reverse=True)
        connection.execute("delete from rooms.state_groups where id = any(%s)", [gone])
    return len(gone)


def _stored(connection: Connection, room: str) -> dict[int, Placed]:
    deltas: dict[int, dict[StateKey, KeyHolder]] = {}
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
            delta[kind, key] = KeyHolder(depth, event)
    return {id: Placed(base, deltas[id], 0) for id, base in bases.items()}


def _columns(delta: State) -> tuple[list[str], list[str], list[str], list[int]]:
    items: Iterable[tuple[StateKey, KeyHolder]] = delta.items()
    types, keys, events, depths = [], [], [], []
    for (kind, key), entry in items:
        types.append(kind)
        keys.append(key)
        events.append(entry.id)
        depths.append(entry.depth)
    return types, keys, events, depths


ALL_OF_ROOM = "*room"
"""Used instead of a cache's name: every cache whose key is the room."""
STATE, MEMBERS, ROOMS_OF = "state", "members", "rooms_of"
"""Caches of a room's current state, of its members, and of a member's rooms."""

V = TypeVar("V")

Entry = tuple[str, tuple[str, ...]]


class Caches:
    """Thread-safe. `groups`: names of groups of caches that share a key. `most`: the largest number of entries."""

    def __init__(self, groups: Mapping[str, Collection[str]], most: int = 10_000) -> None:
        self._groups = groups
        self._most = most
        self._values: dict[Entry, Any] = {}
        self._loading: dict[Entry, list[set[str]]] = {}
        """Running loads. An entry that is not empty was overtaken by an invalidation."""
        self._lock = Lock()

    def get(self, cache: str, keys: Sequence[str], load: Callable[[], V]) -> V:
        """The cached value, or the result of `load`. `load` is called again if an invalidation came meanwhile."""
        entry = cache, tuple(keys)
        while True:
            overtaken: set[str] = set()
            with self._lock:
                if entry in self._values:
                    cached: V = self._values[entry]
                    return cached
                self._loading.setdefault(entry, []).append(overtaken)
            try:
                value = load()
            finally:
                with self._lock:
                    self._ended(entry, overtaken)
            with self._lock:
                if not overtaken:
                    self._values[entry] = value
                    while len(self._values) > self._most:
                        del self._values[next(iter(self._values))]
                    return value

    def invalidated(self, cache: str, keys: Sequence[str] | None) -> None:
        """Remove the keys from a cache; without keys, clear the cache. Ignores names of caches that this reader does
        not have.
        """
        with self._lock:
            for name in self._groups.get(cache, (cache,)):
                self._forget(
                    [entry for entry in (*self._values, *self._loading) if entry[0] == name]
                    if keys is None
                    else [(name, tuple(keys))]
                )

    def clear(self) -> None:
        """Clear all caches, because invalidations may have been missed."""
        with self._lock:
            self._forget([*self._values, *self._loading])

    def __len__(self) -> int:
        return len(self._values)

    def _forget(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._values.pop(entry, None)
            for load in self._loading.get(entry, ()):
                load.add("overtaken")

    def _ended(self, entry: Entry, load: set[str]) -> None:
        loads = self._loading[entry]
        loads[:] = [other for other in loads if other is not load]
        if not loads:
            del self._loading[entry]
