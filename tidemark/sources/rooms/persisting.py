"""Persisting an event: in the caller's transaction, with its facts on the streams `events`, `backfill` and `caches`.

A transaction first takes the lock of the event's room. So rooms are independent, and one transaction at a time changes
a room. The isolation level is `read committed`: after it has taken the lock, the transaction sees the committed changes
of other transactions.
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
    DEEPEST_EVENT,
    MEMBER,
    BadEvent,
    HeldAs,
    KeyHolder,
    KnownEvent,
    RelatedEvents,
    RoomChange,
    RoomEvent,
    State,
    Timeline,
    chosen_prevs,
    depth_after,
    difference,
    given_state,
    group_at,
    merged,
    moved,
    persisted,
)
from tidemark.sources.rooms.tables import ALL_OF_ROOM, ROOMS_OF, STATE, LockedRoom, PostgresGroups
from tidemark.sources.writer import Writer

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # not if the backslash itself is escaped
MOST_MEMBERS = 10
"""If the memberships of more members change, the whole cache is cleared."""


class Appender(Protocol):
    """Publishes the facts of a service. `name`: the name of its writer."""

    name: str

    def append(self, connection: Connection, stream: str, row: object, /) -> int: ...

    def reserve(self, connection: Connection, stream: str) -> int: ...

    def complete(self, connection: Connection, stream: str, id: int, row: object, /) -> None: ...


class WriterAppender(Writer):
    """Append with `tidemark.Writer`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class SqlAppender:
    """Append with the SQL functions; `name`, the database itself, is the writer."""

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
    """The names of the streams."""

    events: str = "events"
    backfill: str = "backfill"
    caches: str = "caches"

    def of(self, timeline: Timeline) -> str:
        return self.events if timeline == "events" else self.backfill


class RoomStore:
    """Persists events as one writer. For one thread at a time; it has no state."""

    def __init__(self, appender: Appender, streams: RoomStreams, clock: Callable[[], float] = time.time) -> None:
        self._appender = appender
        self._streams = streams
        self._clock = clock

    def persist(
        self,
        connection: Connection,
        event: RoomEvent,
        timeline: Timeline = "events",
        given: Collection[str] | None = None,
        reserved: int | None = None,
    ) -> int | None:
        """Persist an event in the open transaction; returns its stream ID, or None for an outlier that is not
        published.

        `given`: the events of the state before it, required if not all of its prev events are stored. `reserved`: an
        ID of the timeline's stream that this transaction has reserved. Raises `BadEvent`; then nothing was written."""
        event = _as_stored(event)
        try:
            with connection.transaction():
                return self._persist(connection, event, timeline, given, reserved)
        except psycopg.errors.UniqueViolation as error:  # two rooms with the same event ID at the same time
            raise BadEvent(event.id, "another event has this ID") from error

    def _persist(
        self,
        connection: Connection,
        event: RoomEvent,
        timeline: Timeline,
        given: Collection[str] | None,
        reserved: int | None,
    ) -> int | None:
        room = tables.lock_room(connection, event.room)
        events = tables.events_of(connection, {event.id, *event.prevs, *(given or ())})
        stored = {id: other for id, (other, _) in events.items()}
        related = RelatedEvents(
            stored.get(event.id),
            {id: stored[id].known for id in event.prevs if id in stored},
            tables.named_by(connection, event.room, event.id),
        )
        change = persisted(event, related, timeline)
        before = given_state(event, change, given, stored)
        groups, group = PostgresGroups(connection, event.room), None
        if not event.held_as.outlier:
            prevs = [group for id in event.prevs if id in events and (group := events[id][1]) is not None]
            group = group_at(event, prevs, before, groups)
        _write(connection, event, group)
        _change(connection, event, change)
        id = None
        if change.timeline:
            recipient = event.state_key if event.held_as is HeldAs.OUT_OF_BAND else None
            id = self._tell(connection, event.known, change.timeline, room.turn, recipient, reserved)
        if change.counts:
            replaces = change.extremity and event.depth < DEEPEST_EVENT
            self._renew(connection, event.room, room, groups, group if replaces else None)
        return id

    def _tell(
        self,
        connection: Connection,
        event: KnownEvent,
        timeline: Timeline,
        turn: int,
        recipient: str | None,
        reserved: int | None = None,
    ) -> int:
        stream, row = self._streams.of(timeline), {"event": event.id, "room": event.room}
        id = self._appender.append(connection, stream, row) if reserved is None else reserved
        if reserved is not None:
            self._appender.complete(connection, stream, id, row)
        connection.execute(
            "insert into rooms.timeline (stream_ordering, event, room, depth, writer, recipient, turn)"
            " values (%s, %s, %s, %s, %s, %s, %s)",
            [id, event.id, event.room, event.depth, self._appender.name, recipient, turn],
        )
        return id

    def _renew(
        self,
        connection: Connection,
        room: str,
        before: LockedRoom,
        groups: PostgresGroups,
        newest: int | None,
    ) -> None:
        """Update the room's current state, the tables derived from it, and invalidate the caches of the previous
        state."""
        current = before.group
        current_groups = dict.fromkeys(group for _, group in tables.forward_extremities(connection, room).values())
        if newest is not None and current is not None and len(current_groups) > 1:
            current_groups = dict.fromkeys([current, newest])  # the newest state includes the replaced states
        group = merged([*current_groups], None, {}, groups) if current_groups else None
        if group == current:
            return
        after: State = {} if group is None else groups.state(group)
        changed = difference(after, {} if current is None else groups.state(current))
        if not changed:  # an equal state in another group
            return
        connection.execute(
            "update rooms.rooms set state_group = %s, version = %s where room = %s", [group, before.version + 1, room]
        )
        members = {key: entry for (kind, key), entry in changed.items() if kind == MEMBER}
        if members:
            self._move(connection, room, before.turn, members)
        for cache, keys in _stale(room, [*members]):
            self._invalidate(connection, cache, keys, before.version + 1 if cache != ROOMS_OF else None)

    def _move(self, connection: Connection, room: str, turn: int, members: Mapping[str, KeyHolder]) -> None:
        """Update memberships and stays of members, and notify each member whose stay ends."""
        before = tables.joined_of(connection, room, members)
        tables.renew_members(connection, room, [entry.id for entry in members.values()])
        came, went = moved(before, tables.joined_of(connection, room, members))
        left_by = []
        for member in went:
            event = KnownEvent(members[member].id, room, members[member].depth, HeldAs.REGULAR)
            left_by.append(self._tell(connection, event, "events", turn, member))
        tables.renew_stays(connection, room, turn, came, dict(zip(went, left_by, strict=True)))

    def _invalidate(self, connection: Connection, cache: str, keys: Sequence[str] | None, version: int | None) -> None:
        now = int(self._clock() * 1000)
        id = self._appender.append(connection, self._streams.caches, [cache, keys, now])
        connection.execute(
            "insert into rooms.invalidations (stream_id, cache, keys, ms, writer, version)"
            " values (%s, %s, %s, %s, %s, %s)",
            [id, cache, keys if keys is None else [*keys], now, self._appender.name, version],
        )


def _stale(room: str, members: Sequence[str]) -> Iterator[tuple[str, Sequence[str] | None]]:
    if not members:
        yield STATE, [room]
        return
    yield ALL_OF_ROOM, [room]
    if len(members) > MOST_MEMBERS:
        yield ROOMS_OF, None
    else:
        yield from ((ROOMS_OF, [member]) for member in members)


def _write(connection: Connection, event: RoomEvent, group: int | None) -> None:
    connection.execute(
        "insert into rooms.events (event, room, type, sender, prevs, depth, state_key, content, held_as, state_group)"
        " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
        " on conflict (event) do update set held_as = excluded.held_as, state_group = excluded.state_group"
        " where events.held_as in ('outlier', 'out-of-band')",
        [
            *(event.id, event.room, event.type, event.sender, [*event.prevs], event.depth, event.state_key),
            *(tables.as_json(event.content), event.held_as.value, group),
        ],
    )


def _change(connection: Connection, event: RoomEvent, change: RoomChange) -> None:
    if event.held_as.outlier:
        return
    edges = [*change.edges]
    if change.untrue:
        connection.execute(
            "delete from rooms.edges where room = %s and prev = %s and event = any(%s)",
            [event.room, event.id, [*change.untrue]],
        )
    connection.execute(
        "insert into rooms.edges (room, prev, event, depth, counts)"
        " select %s, prev, %s, %s, %s from unnest(%s::text[]) as prev",
        [event.room, event.id, event.depth, change.counts, edges],
    )
    connection.execute("delete from rooms.backward_extremities where room = %s and event = %s", [event.room, event.id])
    if change.missing:
        connection.execute(
            "insert into rooms.backward_extremities (room, event) select %s, unnest(%s::text[]) on conflict do nothing",
            [event.room, [*change.missing]],
        )
    if change.counts:
        tables.end_extremities(connection, event.room, edges)
    if change.extremity:
        connection.execute(
            "insert into rooms.forward_extremities (room, event) values (%s, %s)", [event.room, event.id]
        )


def _as_stored(event: RoomEvent) -> RoomEvent:
    """The event with its content as the table returns it. Raises `BadEvent` if the table or a reader could not store
    it."""
    try:
        text = tables.as_json(event.content)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadEvent(event.id, f"its content is no JSON: {error}") from error
    if _NUL.search(text):
        raise BadEvent(event.id, "its content has the character NUL, which Postgres does not take")
    return replace(event, content=msgspec.json.decode(text))


def following(connection: Connection, room: str) -> tuple[tuple[str, ...], int]:
    """The prev events and the depth of a new event, which follows the room's forward extremities. Requires the room's
    lock.
    """
    tables.lock_room(connection, room)
    prevs = chosen_prevs(known for known, _ in tables.forward_extremities(connection, room).values())
    return tuple(known.id for known in prevs), depth_after(prevs)
