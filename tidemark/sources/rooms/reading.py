"""The reads of clients, at positions that the caller gives: sync, messages, initial sync.

Forwards, by arrival: `sync` returns the events between two positions of the stream `events`, including late events of
slow writers. Backwards, by `(depth, stream_ordering)`: `messages` returns history in pages. The caller reads the
position before the call, so that all events up to the position are visible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.rules import JOINED, KeyHolder, State, Stay, resolved
from tidemark.sources.rooms.tables import ROOMS_OF, as_json, state_of


@dataclass(frozen=True, slots=True)
class Upto:
    """A position in the stream `events`: all writers up to `linear`, and single writers beyond. The content of a
    token."""

    linear: int
    positions: Mapping[str, int] = field(default_factory=dict)

    def at(self, writer: str) -> int:
        return max(self.linear, self.positions.get(writer, 0))

    def passed(self, row: "TimelineRow") -> bool:
        """Whether the position covers the row. It always covers history, which blocks no reader."""
        return row.stream_ordering <= self.at(row.writer)

    def beside(self, other: "Upto") -> "Upto":
        """The position that covers what both positions cover."""
        names = {*self.positions, *other.positions}
        linear = max(self.linear, other.linear)
        return Upto(linear, {name: max(self.at(name), other.at(name)) for name in sorted(names)})

    @property
    def farthest(self) -> int:
        return max([self.linear, *self.positions.values()])


class TimelineRow(NamedTuple):
    """A row of a timeline."""

    stream_ordering: int
    event: str
    room: str
    depth: int
    writer: str


class PageEnd(NamedTuple):
    """The last event of a page: the next page begins before it."""

    depth: int
    stream_ordering: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The new events of a member. `rooms`: the rooms that it has joined. `until`: the `since` of the next call."""

    until: Upto
    rooms: Sequence[str]
    events: Sequence[TimelineRow]
    sent: Sequence[TimelineRow]
    """Out-of-band memberships, which only the member receives."""
    left: Sequence[TimelineRow] = ()
    """The events that ended stays (leave, kick or ban). No more events of such a stay follow. If the member has joined
    again, the room is also in `rooms`."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The initial sync of a room: the newest events of the timeline, the state, and the end of the first page of
    history.
    """

    events: Sequence[TimelineRow]
    state: State
    before: PageEnd | None


_COLUMNS = "stream_ordering, event, room, depth, writer"


def _passed(row: str) -> str:
    """An SQL condition: a row of a timeline is history, or at or below its writer's position."""
    position = f"greatest(%(linear)s, (%(to)s::jsonb->>{row}.writer)::bigint)"
    return f"({row}.stream_ordering < 0 or {row}.stream_ordering <= {position})"


def incarnation(connection: Connection) -> int:
    """The incarnation of the database: tokens and caches of another incarnation are invalid."""
    ((began,),) = connection.execute("select max(began) from rooms.incarnations").fetchall()
    return int(began)


def joined_rooms(connection: Connection, member: str) -> list[str]:
    rows = connection.execute(
        "select room from rooms.memberships where member = %s and membership = %s order by room", [member, JOINED]
    )
    return [room for (room,) in rows.fetchall()]


def members_of(connection: Connection, room: str) -> list[str]:
    rows = connection.execute(
        "select member from rooms.memberships where room = %s and membership = %s order by member", [room, JOINED]
    )
    return [member for (member,) in rows.fetchall()]


def sync(
    connection: Connection, member: str, since: Upto, now: Upto, limit: int = 100, rooms: Sequence[str] | None = None
) -> Synced:
    """The events after `since` up to `now`, in order of arrival, of the member's stays or of the given rooms.

    At most the first `limit` events; `until` is then less than `now`. `until` is never less than `since`, which may
    be beyond the positions that this process knows. The end of a stay is returned only when the linear position has
    passed it: until then a slow writer may add an event of the stay."""
    now = now.beside(since)
    stays = _stays(connection, member, since) if rooms is None else [Stay(room, 0) for room in rooms]
    until = now
    events = _arrived(connection, stays, since, now, limit + 1)
    if len(events) > limit:
        events, until = _cut(events, since, now, limit)
    rows = connection.execute(
        f"""select {_COLUMNS} from rooms.timeline where recipient = %(member)s
            and stream_ordering > %(since)s and stream_ordering <= %(farthest)s order by stream_ordering""".encode(),
        {"member": member, "since": since.linear, "farthest": until.farthest},
    )
    rows_read = [TimelineRow(*row) for row in rows.fetchall()]
    ends = {stay.left_by for stay in stays}
    return Synced(
        until,
        [stay.room for stay in stays if stay.ended is None],
        events,
        [row for row in rows_read if row.stream_ordering not in ends and not since.passed(row) and until.passed(row)],
        [row for row in rows_read if row.stream_ordering in ends and row.stream_ordering <= until.linear],
    )


def _stays(connection: Connection, member: str, since: Upto) -> list[Stay]:
    """The member's stays, except those whose end the member has received."""
    rows = connection.execute(
        "select room, began, ended, left_by from rooms.stays where member = %s"
        " and (left_by is null or left_by > %s) order by room, began",
        [member, since.linear],
    )
    return [Stay(*row) for row in rows.fetchall()]


def _cut(events: list[TimelineRow], since: Upto, now: Upto, limit: int) -> tuple[list[TimelineRow], Upto]:
    """The first `limit` events, and the position after them. Beyond the linear position, each writer has its own
    position."""
    page = events[:limit]
    last = page[-1].stream_ordering
    linear = min(last, now.linear)
    positions = {
        writer: max(min(last, now.at(writer)), since.at(writer)) for writer in {*now.positions, *since.positions}
    }
    return page, Upto(max(linear, since.linear), positions)


def _arrived(connection: Connection, stays: Sequence[Stay], since: Upto, now: Upto, limit: int) -> list[TimelineRow]:
    """Each stay is read by the index, so the cost depends on the events of its room, not of all rooms."""
    writers = [*{*since.positions, *now.positions}]
    rows = connection.execute(
        f"""
        select {_COLUMNS}
        from unnest(%(rooms)s::text[], %(began)s::bigint[], %(ended)s::bigint[]) as stay (name, began, ended)
        cross join lateral (
            select {_COLUMNS} from rooms.timeline as told
            where told.room = stay.name and recipient is null
                and turn >= stay.began and (stay.ended is null or turn <= stay.ended)
                and stream_ordering > %(since)s and stream_ordering <= %(farthest)s
                and stream_ordering > greatest(%(since)s, (%(from)s::jsonb->>writer)::bigint)
                and stream_ordering <= greatest(%(linear)s, (%(to)s::jsonb->>writer)::bigint)
            order by stream_ordering limit %(limit)s
        ) as told
        order by stream_ordering limit %(limit)s
        """.encode(),
        {
            "rooms": [stay.room for stay in stays],
            "began": [stay.began for stay in stays],
            "ended": [stay.ended for stay in stays],
            "since": since.linear,
            "linear": now.linear,
            "farthest": now.farthest,
            "from": as_json({writer: since.at(writer) for writer in writers}),
            "to": as_json({writer: now.at(writer) for writer in writers}),
            "limit": limit,
        },
    )
    return [TimelineRow(*row) for row in rows.fetchall()]


def messages(
    connection: Connection, room: str, upto: Upto, before: PageEnd | None = None, limit: int = 100
) -> tuple[list[TimelineRow], PageEnd | None]:
    """A page of history, the deepest events first, and the beginning of the next page; None: there are no more
    events. Keys are unique, so pages neither omit nor repeat events that exist when the first page is read, even if
    events are inserted meanwhile. Live events beyond `upto` are left to `sync`."""
    begins = PageEnd(2**63 - 1, 2**63 - 1) if before is None else before
    rows = connection.execute(
        f"""
        select {_COLUMNS} from rooms.timeline as told
        where room = %(room)s and recipient is null and {_passed("told")}
            and (depth, stream_ordering) < (%(depth)s, %(stream_ordering)s)
        order by depth desc, stream_ordering desc limit %(limit)s
        """.encode(),
        {"room": room, "limit": limit, **begins._asdict(), **_bounds(upto)},
    )
    page = [TimelineRow(*row) for row in rows.fetchall()]
    last = page[-1] if len(page) == limit else None
    return page, None if last is None else PageEnd(last.depth, last.stream_ordering)


def opened(connection: Connection, room: str, now: Upto, limit: int = 20) -> Opened:
    """The room at `now`. A client continues from there with `sync`, and backwards with `messages`. Reads one
    snapshot; the connection must not be in a transaction."""
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read read only")
        events, before = messages(connection, room, now, None, limit)
        return Opened(events, state_at(connection, room, now), before)


def state_at(connection: Connection, room: str, now: Upto) -> State:
    """The room's state at a position: the state after the events that were the forward extremities at that position."""
    groups = connection.execute(
        f"""
        with recursive later as (
            select event from rooms.timeline
            where room = %(room)s and recipient is null and stream_ordering > %(linear)s
        ), candidates (event) as (
            select event from rooms.forward_extremities where room = %(room)s
            union select unnest(prevs) from later join rooms.events using (event)
            union
            select unnest(held.prevs) from candidates join rooms.events as held using (event)
            where held.room = %(room)s and held.held_as in ('soft-failed', 'rejected')
        ), following (event, last, held_as) as (
            select event, event, 'soft-failed'::text from candidates
            union
            select following.event, edge.event, held.held_as
            from following join rooms.edges as edge on edge.room = %(room)s and edge.prev = following.last
            join rooms.events as held on held.event = edge.event
            join rooms.timeline as naming on naming.event = edge.event
            where following.held_as <> 'regular' and naming.recipient is null and {_passed("naming")}
        )
        select distinct held.state_group
        from candidates join rooms.events as held using (event) join rooms.timeline as told using (event)
        where held.held_as = 'regular' and told.recipient is null and {_passed("told")}
            and not exists (
                select from following where following.event = held.event and following.held_as = 'regular'
            )
        """.encode(),
        {"room": room, **_bounds(now)},
    )
    return resolved([state_of(connection, group) for (group,) in groups.fetchall()])


def _bounds(upto: Upto) -> dict[str, object]:
    return {"linear": upto.linear, "to": as_json(upto.positions)}


def current_state(connection: Connection, room: str) -> tuple[int, State]:
    """The room's current state and its version, from one snapshot."""
    rows = connection.execute(
        """
        with recursive chain as (
            select id, base, version, 1 as place
            from rooms.rooms left join rooms.state_groups on id = rooms.state_group where rooms.room = %s
            union all
            select below.id, below.base, chain.version, chain.place + 1
            from chain join rooms.state_groups as below on below.id = chain.base
        )
        select distinct on (type, state_key) version, type, state_key, depth, event
        from chain left join rooms.state_deltas on state_group = chain.id order by type, state_key, place
        """,
        [room],
    ).fetchall()
    state = {(kind, key): KeyHolder(depth, event) for _, kind, key, depth, event in rows if kind is not None}
    return (rows[0][0] if rows else 0), state


def members_with_version(connection: Connection, room: str) -> tuple[int, list[str]]:
    """The version of the room's state, and its members, from one snapshot."""
    rows = connection.execute(
        "select version, member from rooms.rooms left join rooms.memberships"
        " on memberships.room = rooms.room and membership = %s where rooms.room = %s order by member",
        [JOINED, room],
    ).fetchall()
    return (rows[0][0] if rows else 0), [member for _, member in rows if member is not None]


def joined_with_version(connection: Connection, member: str) -> tuple[int, list[str]]:
    """The number of invalidations of the member's rooms, and the rooms, from one snapshot."""
    ((version, rooms),) = connection.execute(
        """
        select (
            select count(*) from rooms.invalidations
            where cache = %(cache)s and (keys is null or keys = array[%(member)s])
        ), array(
            select room from rooms.memberships where member = %(member)s and membership = %(joined)s order by room
        )
        """,
        {"member": member, "joined": JOINED, "cache": ROOMS_OF},
    ).fetchall()
    return version, rooms


def invalidated(connection: Connection, since: Upto, now: Upto) -> list[tuple[str, list[str] | None]]:
    """The invalidations between two positions of the stream `caches`: cache name, and keys or None. Some may be
    repeated, which does no harm."""
    return connection.execute(
        "select cache, keys from rooms.invalidations where stream_id > %s and stream_id <= %s"
        " and stream_id <= greatest(%s, (%s::jsonb->>writer)::bigint) order by stream_id",
        [since.linear, now.farthest, now.linear, as_json(now.positions)],
    ).fetchall()
