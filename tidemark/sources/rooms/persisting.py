"""Persists events in the caller's transaction, with their facts on the streams `events`, `backfill` and `caches`.

A transaction first takes the lock of the event's room. So one transaction at a time changes a room, and rooms are
independent of each other. The isolation level must be `read committed`. Then the statements after the lock see all
changes that other transactions have committed.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import psycopg

from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.rules import (
    MAX_DEPTH,
    MEMBER,
    BadEvent,
    EventKind,
    EventStream,
    EventSummary,
    RelatedEvents,
    RoomChange,
    RoomEvent,
    State,
    StateEntry,
    check_state_before,
    choose_prevs,
    compare_joined_members,
    compute_change,
    compute_depth,
    difference,
    find_group_after_event,
    merge_groups,
)
from tidemark.sources.rooms.tables import JOINED_ROOMS_CACHE, ROOM_CACHES, STATE_CACHE, LockedRoom, PostgresStateGroups
from tidemark.sources.writer import Writer

# An escaped NUL in JSON, but not an escaped backslash before `u0000`.
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
MAX_INVALIDATED_MEMBERS = 10
"""If the memberships of more members change at once, the cache of joined rooms is cleared for all members."""


class Appender(Protocol):
    """Appends facts to streams, as the writer `name`. See `tidemark.sources.writer.Writer` for the methods."""

    name: str

    def append(self, connection: Connection, stream: str, row: object, /) -> int: ...

    def reserve(self, connection: Connection, stream: str) -> int: ...

    def complete(self, connection: Connection, stream: str, id: int, row: object, /) -> None: ...


class WriterAppender(Writer):
    """Appends with `tidemark.Writer`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class SqlAppender:
    """Appends with the SQL functions, as the writer of the database. `name`: the name of the database's own writer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def append(self, connection: Connection, stream: str, row: object) -> int:
        result = connection.execute("select tidemark.append(%s, %s::jsonb)", [stream, tables.as_json(row)]).fetchone()
        assert result is not None
        return int(result[0])

    def reserve(self, connection: Connection, stream: str) -> int:
        row = connection.execute("select tidemark.reserve(%s)", [stream]).fetchone()
        assert row is not None
        return int(row[0])

    def complete(self, connection: Connection, stream: str, id: int, row: object) -> None:
        connection.execute("select tidemark.complete(%s, %s, %s::jsonb)", [stream, id, tables.as_json(row)])


@dataclass(frozen=True, slots=True)
class RoomStreams:
    """The names of the streams of the rooms."""

    events: str = "events"
    backfill: str = "backfill"
    caches: str = "caches"

    def name_of(self, stream: EventStream) -> str:
        """The name of the stream of live events or of history."""
        return self.events if stream == "events" else self.backfill


class RoomStore:
    """Persists events as one writer. Only one thread at a time may call a method.

    Args:
        appender: appends the facts.
        streams: the names of the streams.
        clock: returns the time in seconds since 1970, for the rows of the stream `caches`.
    """

    def __init__(self, appender: Appender, streams: RoomStreams, clock: Callable[[], float] = time.time) -> None:
        self._appender = appender
        self._streams = streams
        self._clock = clock

    def persist(
        self,
        connection: Connection,
        event: RoomEvent,
        stream: EventStream = "events",
        state_ids_before: Collection[str] | None = None,
        reserved_id: int | None = None,
    ) -> int | None:
        """Persist an event, update the room, and append the facts. Takes the room's lock until the transaction ends.

        Args:
            connection: in the transaction of the service.
            event: the event.
            stream: `events` for a live event, `backfill` for history.
            state_ids_before: the IDs of the events that make up the state before `event`. Required if a prev event of
                `event` is not stored, or is an outlier; otherwise ignored.
            reserved_id: the ID for the event's fact, which this transaction has reserved on this stream; None
                to take the next ID.

        Returns:
            The stream ID of the event; None if the event is not published: it is an outlier and not out-of-band.

        Raises:
            BadEvent: the event is refused, and nothing was written. The transaction can continue.
        """
        event = _normalize_content(event)
        try:
            with connection.transaction():
                return self._persist(connection, event, stream, state_ids_before, reserved_id)
        except psycopg.errors.UniqueViolation as error:  # two rooms with the same event ID at the same time
            raise BadEvent(event.id, "another event has this ID") from error

    def _persist(
        self,
        connection: Connection,
        event: RoomEvent,
        stream: EventStream,
        state_ids_before: Collection[str] | None,
        reserved_id: int | None,
    ) -> int | None:
        room = tables.lock_room(connection, event.room)
        events = tables.load_events(connection, {event.id, *event.prevs, *(state_ids_before or ())})
        stored = {id: other for id, (other, _) in events.items()}
        related = RelatedEvents(
            stored.get(event.id),
            {id: stored[id].summary for id in event.prevs if id in stored},
            tables.load_successors(connection, event.room, event.id),
        )
        change = compute_change(event, related, stream)
        state_before = check_state_before(event, change, state_ids_before, stored)
        groups, group = PostgresStateGroups(connection, event.room), None
        if not event.kind.is_outlier:
            prev_groups = [group for id in event.prevs if id in events and (group := events[id][1]) is not None]
            group = find_group_after_event(event, prev_groups, state_before, groups)
        _store_event(connection, event, group)
        _store_change(connection, event, change)
        id = None
        if change.stream:
            recipient = event.state_key if event.kind is EventKind.OUT_OF_BAND else None
            id = self._publish(connection, event.summary, change.stream, room.lock_count, recipient, reserved_id)
        if change.ends_extremities:
            includes_prevs = change.becomes_extremity and event.depth < MAX_DEPTH
            self._update_current_state(connection, event.room, room, groups, group if includes_prevs else None)
        return id

    def _publish(
        self,
        connection: Connection,
        event: EventSummary,
        stream: EventStream,
        turn: int,
        recipient: str | None,
        reserved_id: int | None = None,
    ) -> int:
        """Append the fact of an event to a stream. Returns the fact's stream ID.

        Args:
            connection: in the transaction that has locked the room.
            event: the event.
            stream: the stream.
            turn: the turn of the event (see `rules.Stay`).
            recipient: the only member who receives the fact; None for all members of the room.
            reserved_id: the reserved ID of the fact; None to take the next ID.
        """
        stream_name, row = self._streams.name_of(stream), {"event": event.id, "room": event.room}
        id = self._appender.append(connection, stream_name, row) if reserved_id is None else reserved_id
        if reserved_id is not None:
            self._appender.complete(connection, stream_name, id, row)
        connection.execute(
            "insert into rooms.timeline (stream_ordering, event, room, depth, writer, recipient, turn)"
            " values (%s, %s, %s, %s, %s, %s, %s)",
            [id, event.id, event.room, event.depth, self._appender.name, recipient, turn],
        )
        return id

    def _update_current_state(
        self,
        connection: Connection,
        room: str,
        locked_room: LockedRoom,
        groups: PostgresStateGroups,
        newest_group: int | None,
    ) -> None:
        """Update the room's current state and memberships, and invalidate the caches of the previous state. Does
        nothing if the state has not changed.

        Args:
            connection: in the transaction that has locked the room.
            room: the room.
            locked_room: the room before the event.
            groups: the state groups of the room.
            newest_group: the group of the state after the event, if the event replaced its prev events as a forward
                extremity. Then this state includes the states after the prev events. Otherwise None.
        """
        current = locked_room.group_number
        current_groups = dict.fromkeys(group for _, group in tables.load_forward_extremities(connection, room).values())
        if newest_group is not None and current is not None and len(current_groups) > 1:
            current_groups = dict.fromkeys([current, newest_group])
        group = merge_groups([*current_groups], None, {}, groups) if current_groups else None
        if group == current:
            return
        after: State = {} if group is None else groups.state(group)
        changed = difference(after, {} if current is None else groups.state(current))
        if not changed:  # an equal state in another group
            return
        connection.execute(
            "update rooms.rooms set state_group = %s, version = %s where room = %s",
            [group, locked_room.version + 1, room],
        )
        members = {key: entry for (kind, key), entry in changed.items() if kind == MEMBER}
        if members:
            self._update_members(connection, room, locked_room.lock_count, members)
        for cache, keys in _caches_to_invalidate(room, [*members]):
            self._invalidate(connection, cache, keys, locked_room.version + 1 if cache != JOINED_ROOMS_CACHE else None)

    def _update_members(self, connection: Connection, room: str, turn: int, members: Mapping[str, StateEntry]) -> None:
        """Update memberships and stays, and publish the end of each stay that ends.

        Args:
            connection: in the transaction that has locked the room.
            room: the room.
            turn: the turn of the event that changes the memberships (see `rules.Stay`).
            members: member -> the changed entry of the room's current state.
        """
        before = tables.load_joined_members(connection, room, members)
        tables.store_memberships(connection, room, [entry.id for entry in members.values()])
        joined, left = compare_joined_members(before, tables.load_joined_members(connection, room, members))
        left_by = []
        for member in left:
            event = EventSummary(members[member].id, room, members[member].depth, EventKind.REGULAR)
            left_by.append(self._publish(connection, event, "events", turn, member))
        tables.update_stays(connection, room, turn, joined, dict(zip(left, left_by, strict=True)))

    def _invalidate(self, connection: Connection, cache: str, keys: Sequence[str] | None, version: int | None) -> None:
        """Append an invalidation to the stream `caches`.

        Args:
            connection: in the transaction that has locked the room.
            cache: the name of a cache or of a group of caches.
            keys: the key of the value to remove; None for all values.
            version: the new version of the room's current state; None for a cache that is not of a room.
        """
        now = int(self._clock() * 1000)
        id = self._appender.append(connection, self._streams.caches, [cache, keys, now])
        connection.execute(
            "insert into rooms.invalidations (stream_id, cache, keys, ms, writer, version)"
            " values (%s, %s, %s, %s, %s, %s)",
            [id, cache, keys if keys is None else [*keys], now, self._appender.name, version],
        )


def _caches_to_invalidate(room: str, members: Sequence[str]) -> Iterator[tuple[str, Sequence[str] | None]]:
    """Yield the caches that a change of the room's state invalidates: a name, and a key or None for all values.

    `members`: the members whose memberships changed; empty if only other keys of the state changed.
    """
    if not members:
        yield STATE_CACHE, [room]
        return
    yield ROOM_CACHES, [room]
    if len(members) > MAX_INVALIDATED_MEMBERS:
        yield JOINED_ROOMS_CACHE, None
    else:
        yield from ((JOINED_ROOMS_CACHE, [member]) for member in members)


def _store_event(connection: Connection, event: RoomEvent, group_number: int | None) -> None:
    """Store an event, or replace a stored outlier. `group_number`: the group of the state after the event; None for an
    outlier."""
    connection.execute(
        "insert into rooms.events (event, room, type, sender, prevs, depth, state_key, content, held_as, state_group)"
        " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
        " on conflict (event) do update set held_as = excluded.held_as, state_group = excluded.state_group"
        " where events.held_as in ('outlier', 'out-of-band')",
        [
            *(event.id, event.room, event.type, event.sender, [*event.prevs], event.depth, event.state_key),
            *(tables.as_json(event.content), event.kind.value, group_number),
        ],
    )


def _store_change(connection: Connection, event: RoomEvent, change: RoomChange) -> None:
    """Update the room's edges and extremities. Does nothing for an outlier."""
    if event.kind.is_outlier:
        return
    edges = [*change.edges]
    if change.wrong_depth_events:
        connection.execute(
            "delete from rooms.edges where room = %s and prev = %s and event = any(%s)",
            [event.room, event.id, [*change.wrong_depth_events]],
        )
    connection.execute(
        "insert into rooms.edges (room, prev, event, depth, counts)"
        " select %s, prev, %s, %s, %s from unnest(%s::text[]) as prev",
        [event.room, event.id, event.depth, change.ends_extremities, edges],
    )
    connection.execute("delete from rooms.backward_extremities where room = %s and event = %s", [event.room, event.id])
    if change.missing_prevs:
        connection.execute(
            "insert into rooms.backward_extremities (room, event) select %s, unnest(%s::text[]) on conflict do nothing",
            [event.room, [*change.missing_prevs]],
        )
    if change.ends_extremities:
        tables.end_extremities(connection, event.room, edges)
    if change.becomes_extremity:
        connection.execute(
            "insert into rooms.forward_extremities (room, event) values (%s, %s)", [event.room, event.id]
        )


def _normalize_content(event: RoomEvent) -> RoomEvent:
    """Copy the event, with the content that the table will return. Raises `BadEvent` if the table cannot store the
    content."""
    try:
        text = tables.as_json(event.content)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadEvent(event.id, f"its content cannot be stored as JSON: {error}") from error
    if _ESCAPED_NUL.search(text):
        raise BadEvent(event.id, "its content has the character NUL, which Postgres does not accept")
    return replace(event, content=msgspec.json.decode(text))


def choose_prevs_and_depth(connection: Connection, room: str) -> tuple[tuple[str, ...], int]:
    """Take the room's lock until the transaction ends, and choose the prev events of a new event. Creates the room if
    it is new.

    Returns:
        The IDs of the prev events, and the depth of the new event. No IDs and depth 1 without forward extremities.
    """
    tables.lock_room(connection, room)
    prevs = choose_prevs(extremity for extremity, _ in tables.load_forward_extremities(connection, room).values())
    return tuple(prev.id for prev in prevs), compute_depth(prevs)
