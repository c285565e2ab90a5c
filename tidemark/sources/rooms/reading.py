"""Answers the requests of clients: sync, initial sync, and pages of history.

`sync` returns the events between two positions of the stream `events`, in the order of their stream IDs, including the
events of slow writers. `messages` returns pages of history in descending order of `(depth, stream_ordering)`. The
caller must read the published position before it calls a function, so that all events up to the position are visible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.rules import JOINED, State, StateEntry, Stay, resolve_states
from tidemark.sources.rooms.tables import JOINED_ROOMS_CACHE, as_json, load_state


@dataclass(frozen=True, slots=True)
class VectorPosition:
    """A position in a stream, the content of a token.

    Attributes:
        linear: the linear position.
        positions: writer -> the writer's position, of writers beyond `linear`.
    """

    linear: int
    positions: Mapping[str, int] = field(default_factory=dict)

    def position_of(self, writer: str) -> int:
        """The position of a writer: at least `linear`."""
        return max(self.linear, self.positions.get(writer, 0))

    def covers(self, row: "TimelineRow") -> bool:
        """Whether the row is at or below the position of the row's writer. True for all rows of the stream `backfill`,
        because their IDs are negative."""
        return row.stream_ordering <= self.position_of(row.writer)

    def merge(self, other: "VectorPosition") -> "VectorPosition":
        """Merge two positions into the lowest position that covers all rows of both."""
        names = {*self.positions, *other.positions}
        linear = max(self.linear, other.linear)
        return VectorPosition(
            linear, {name: max(self.position_of(name), other.position_of(name)) for name in sorted(names)}
        )

    @property
    def max_id(self) -> int:
        """The highest position of all writers. The position covers no higher ID."""
        return max([self.linear, *self.positions.values()])


class TimelineRow(NamedTuple):
    """A row of the table `rooms.timeline`.

    Attributes:
        stream_ordering: the signed stream ID of the event; negative for history.
        event: the ID of the event.
        room: the room of the event.
        depth: the depth of the event.
        writer: the writer of the event's fact.
    """

    stream_ordering: int
    event: str
    room: str
    depth: int
    writer: str


class PageEnd(NamedTuple):
    """The last event of a page. The next page begins after this event, in descending order of `(depth,
    stream_ordering)`."""

    depth: int
    stream_ordering: int


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The answer to `sync`.

    Attributes:
        until: the position to pass as `since` to the next call.
        rooms: the rooms in which the member is joined at the time of the query, or the rooms that the caller passed.
        events: the new events of the member's stays, in the order of their stream IDs.
        out_of_band: the new out-of-band memberships, which only the member receives.
        ended_stays: the events that ended stays of the member (leave, kick or ban). No more events of such a stay
            follow. If the member has joined again, the room is also in `rooms`.
    """

    until: VectorPosition
    rooms: Sequence[str]
    events: Sequence[TimelineRow]
    out_of_band: Sequence[TimelineRow]
    ended_stays: Sequence[TimelineRow] = ()


@dataclass(frozen=True, slots=True)
class InitialSync:
    """The answer to `initial_sync`.

    Attributes:
        events: the first page of the room's history: the deepest events.
        state: the state of the room.
        page_end: where `events` end, to pass to `messages` as `previous_page_end`; None if there are no more events.
    """

    events: Sequence[TimelineRow]
    state: State
    page_end: PageEnd | None


_COLUMNS = "stream_ordering, event, room, depth, writer"


def _covered_condition(row: str) -> str:
    """The SQL condition for `VectorPosition.covers`. The condition needs the parameters of `_position_parameters`.

    `row`: the alias of the row of `rooms.timeline`.
    """
    position = f"greatest(%(linear)s, (%(to)s::jsonb->>{row}.writer)::bigint)"
    return f"({row}.stream_ordering < 0 or {row}.stream_ordering <= {position})"


def load_incarnation(connection: Connection) -> int:
    """Query the incarnation of the database. Tokens and caches of another incarnation are invalid.

    The incarnation is the time, in microseconds since 1970, at which the function `rooms.begin_anew` was last
    called; 0 if it was never called.
    """
    ((began,),) = connection.execute("select max(began) from rooms.incarnations").fetchall()
    return int(began)


def load_joined_rooms(connection: Connection, member: str) -> list[str]:
    """Query the rooms in which a member is joined now, sorted."""
    rows = connection.execute(
        "select room from rooms.memberships where member = %s and membership = %s order by room", [member, JOINED]
    )
    return [room for (room,) in rows.fetchall()]


def load_members(connection: Connection, room: str) -> list[str]:
    """Query the members who are joined in a room now, sorted."""
    rows = connection.execute(
        "select member from rooms.memberships where room = %s and membership = %s order by member", [room, JOINED]
    )
    return [member for (member,) in rows.fetchall()]


def sync(
    connection: Connection,
    member: str,
    since: VectorPosition,
    now: VectorPosition,
    limit: int = 100,
    rooms: Sequence[str] | None = None,
) -> SyncResult:
    """Query the live events after `since` and up to `now`, in the order of their stream IDs.

    The end of a stay is returned only when the linear position has reached this end. Before that, a slow writer may add
    an event of the stay.

    Args:
        connection: to the database of the rooms.
        member: the member whose stays are read.
        since: the `until` of the last answer. This position may be beyond `now`.
        now: the published position.
        limit: the largest number of `events` in the result. If there are more, `until` of the result is below `now`.
            `out_of_band` and `ended_stays` have no limit.
        rooms: the rooms of which to read all events; None to read only the member's stays.
    """
    now = now.merge(since)
    stays = _load_stays(connection, member, since) if rooms is None else [Stay(room, 0) for room in rooms]
    until = now
    events = _load_arrived_events(connection, stays, since, now, limit + 1)
    if len(events) > limit:
        events, until = _limit_events(events, since, now, limit)
    rows = connection.execute(
        f"""select {_COLUMNS} from rooms.timeline where recipient = %(member)s
            and stream_ordering > %(since)s and stream_ordering <= %(farthest)s order by stream_ordering""".encode(),
        {"member": member, "since": since.linear, "farthest": until.max_id},
    )
    received = [TimelineRow(*row) for row in rows.fetchall()]
    ends = {stay.leave_id for stay in stays}
    return SyncResult(
        until,
        [stay.room for stay in stays if stay.end_turn is None],
        events,
        [row for row in received if row.stream_ordering not in ends and not since.covers(row) and until.covers(row)],
        [row for row in received if row.stream_ordering in ends and row.stream_ordering <= until.linear],
    )


def _load_stays(connection: Connection, member: str, since: VectorPosition) -> list[Stay]:
    """Query the member's stays, except the stays whose end is at or below the linear position of `since`."""
    rows = connection.execute(
        "select room, began, ended, left_by from rooms.stays where member = %s"
        " and (left_by is null or left_by > %s) order by room, began",
        [member, since.linear],
    )
    return [Stay(*row) for row in rows.fetchall()]


def _limit_events(
    events: list[TimelineRow], since: VectorPosition, now: VectorPosition, limit: int
) -> tuple[list[TimelineRow], VectorPosition]:
    """Return the first `limit` events, and the position after these events: between `since` and `now`.

    `events`: the events in the order of their stream IDs.
    """
    page = events[:limit]
    last = page[-1].stream_ordering
    linear = min(last, now.linear)
    positions = {
        writer: max(min(last, now.position_of(writer)), since.position_of(writer))
        for writer in {*now.positions, *since.positions}
    }
    return page, VectorPosition(max(linear, since.linear), positions)


def _load_arrived_events(
    connection: Connection, stays: Sequence[Stay], since: VectorPosition, now: VectorPosition, limit: int
) -> list[TimelineRow]:
    """Query the first `limit` events of the stays, after `since` and up to `now`, in the order of their stream IDs.

    The query uses an index for each stay, so its cost depends only on the events of these rooms.
    """
    writers = [*{*since.positions, *now.positions}]
    rows = connection.execute(
        f"""
        select {_COLUMNS}
        from unnest(%(rooms)s::text[], %(began)s::bigint[], %(ended)s::bigint[]) as stay (name, began, ended)
        cross join lateral (
            select {_COLUMNS} from rooms.timeline as entry
            where entry.room = stay.name and recipient is null
                and turn >= stay.began and (stay.ended is null or turn <= stay.ended)
                and stream_ordering > %(since)s and stream_ordering <= %(farthest)s
                and stream_ordering > greatest(%(since)s, (%(from)s::jsonb->>writer)::bigint)
                and stream_ordering <= greatest(%(linear)s, (%(to)s::jsonb->>writer)::bigint)
            order by stream_ordering limit %(limit)s
        ) as arrived
        order by stream_ordering limit %(limit)s
        """.encode(),
        {
            "rooms": [stay.room for stay in stays],
            "began": [stay.begin_turn for stay in stays],
            "ended": [stay.end_turn for stay in stays],
            "since": since.linear,
            "linear": now.linear,
            "farthest": now.max_id,
            "from": as_json({writer: since.position_of(writer) for writer in writers}),
            "to": as_json({writer: now.position_of(writer) for writer in writers}),
            "limit": limit,
        },
    )
    return [TimelineRow(*row) for row in rows.fetchall()]


def messages(
    connection: Connection, room: str, upto: VectorPosition, previous_page_end: PageEnd | None = None, limit: int = 100
) -> tuple[list[TimelineRow], PageEnd | None]:
    """Query a page of history, the deepest events first.

    The order by `(depth, stream_ordering)` is unique. So an event that exists when the first page is read is on exactly
    one page, even if other events are inserted meanwhile.

    Args:
        connection: to the database of the rooms.
        room: the room.
        upto: live events beyond this position are left out, because `sync` returns them.
        previous_page_end: the end of the previous page, as returned with that page; None for the first page.
        limit: the largest number of events.

    Returns:
        The events, and the end of the page to pass as `previous_page_end`. The end is None if the page has fewer than
        `limit` events: then there are no more events.
    """
    page_start = PageEnd(2**63 - 1, 2**63 - 1) if previous_page_end is None else previous_page_end
    rows = connection.execute(
        f"""
        select {_COLUMNS} from rooms.timeline as entry
        where room = %(room)s and recipient is null and {_covered_condition("entry")}
            and (depth, stream_ordering) < (%(depth)s, %(stream_ordering)s)
        order by depth desc, stream_ordering desc limit %(limit)s
        """.encode(),
        {"room": room, "limit": limit, **page_start._asdict(), **_position_parameters(upto)},
    )
    page = [TimelineRow(*row) for row in rows.fetchall()]
    last = page[-1] if len(page) == limit else None
    return page, None if last is None else PageEnd(last.depth, last.stream_ordering)


def initial_sync(connection: Connection, room: str, now: VectorPosition, limit: int = 20) -> InitialSync:
    """Query the deepest events and the state of the room at the position `now`, from one snapshot.

    The connection must not be in a transaction. A client reads later events with `sync(since=now)`, and earlier events
    with `messages(upto=now, previous_page_end=result.page_end)`. `limit`: the largest number of events.
    """
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read read only")
        events, page_end = messages(connection, room, now, None, limit)
        return InitialSync(events, load_state_at(connection, room, now), page_end)


def load_state_at(connection: Connection, room: str, now: VectorPosition) -> State:
    """Query the room's state at a position. Takes the last regular events that the position covers (no covered regular
    event follows them), and resolves the states after these events."""
    groups = connection.execute(
        f"""
        with recursive later as (
            select event from rooms.timeline
            where room = %(room)s and recipient is null and stream_ordering > %(linear)s
        ), candidates (event) as (
            select event from rooms.forward_extremities where room = %(room)s
            union select unnest(prevs) from later join rooms.events using (event)
            union
            select unnest(stored.prevs) from candidates join rooms.events as stored using (event)
            where stored.room = %(room)s and stored.held_as in ('soft-failed', 'rejected')
        ), following (event, last, held_as) as (
            select event, event, 'soft-failed'::text from candidates
            union
            select following.event, edge.event, stored.held_as
            from following join rooms.edges as edge on edge.room = %(room)s and edge.prev = following.last
            join rooms.events as stored on stored.event = edge.event
            join rooms.timeline as successor on successor.event = edge.event
            where following.held_as <> 'regular' and successor.recipient is null and {_covered_condition("successor")}
        )
        select distinct stored.state_group
        from candidates join rooms.events as stored using (event) join rooms.timeline as entry using (event)
        where stored.held_as = 'regular' and entry.recipient is null and {_covered_condition("entry")}
            and not exists (
                select from following where following.event = stored.event and following.held_as = 'regular'
            )
        """.encode(),
        {"room": room, **_position_parameters(now)},
    )
    return resolve_states([load_state(connection, group) for (group,) in groups.fetchall()])


def _position_parameters(upto: VectorPosition) -> dict[str, object]:
    """The parameters of `_covered_condition`."""
    return {"linear": upto.linear, "to": as_json(upto.positions)}


def load_current_state(connection: Connection, room: str) -> tuple[int, State]:
    """Query the version of the room's current state, and the state, from one snapshot. Returns version 0 and an empty
    state if there is no room."""
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
    state = {(kind, key): StateEntry(depth, event) for _, kind, key, depth, event in rows if kind is not None}
    return (rows[0][0] if rows else 0), state


def load_members_with_version(connection: Connection, room: str) -> tuple[int, list[str]]:
    """Query the version of the room's current state, and the joined members, sorted, from one snapshot. Returns version
    0 and no members if there is no room."""
    rows = connection.execute(
        "select version, member from rooms.rooms left join rooms.memberships"
        " on memberships.room = rooms.room and membership = %s where rooms.room = %s order by member",
        [JOINED, room],
    ).fetchall()
    return (rows[0][0] if rows else 0), [member for _, member in rows if member is not None]


def load_joined_rooms_with_version(connection: Connection, member: str) -> tuple[int, list[str]]:
    """Query the version of the member's list of joined rooms, and the sorted list, from one snapshot.

    The version is the number of invalidations of the list.
    """
    ((version, rooms),) = connection.execute(
        """
        select (
            select count(*) from rooms.invalidations
            where cache = %(cache)s and (keys is null or keys = array[%(member)s])
        ), array(
            select room from rooms.memberships where member = %(member)s and membership = %(joined)s order by room
        )
        """,
        {"member": member, "joined": JOINED, "cache": JOINED_ROOMS_CACHE},
    ).fetchall()
    return version, rooms


def load_invalidations(
    connection: Connection, since: VectorPosition, now: VectorPosition
) -> list[tuple[str, list[str] | None]]:
    """Query the invalidations after `since` and up to `now`, which are positions of the stream `caches`.

    Invalidations beyond the linear position of `since` may be returned again, although `since` covers them.

    Returns:
        The name of a cache or of a group of caches, and the key of the invalid value, for each invalidation in the
        order of IDs. The key is None for all values of the cache.
    """
    return connection.execute(
        "select cache, keys from rooms.invalidations where stream_id > %s and stream_id <= %s"
        " and stream_id <= greatest(%s, (%s::jsonb->>writer)::bigint) order by stream_id",
        [since.linear, now.max_id, now.linear, as_json(now.positions)],
    ).fetchall()
