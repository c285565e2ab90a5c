"""The requests of clients, at positions that the caller passes: sync, initial sync, and pages of history.

`sync` returns the events between two positions of the stream `events`, in order of arrival; it includes the events of
slow writers. `messages` returns pages of history in descending order of `(depth, stream_ordering)`. The caller reads
the position before the call, so that all events up to the position are visible.
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
        positions: by writer, the writer positions beyond `linear`.
    """

    linear: int
    positions: Mapping[str, int] = field(default_factory=dict)

    def position_of(self, writer: str) -> int:
        return max(self.linear, self.positions.get(writer, 0))

    def covers(self, row: "TimelineRow") -> bool:
        """Whether the row is at or below the position of its writer. True for all history, whose IDs are negative."""
        return row.stream_ordering <= self.position_of(row.writer)

    def merge(self, other: "VectorPosition") -> "VectorPosition":
        """The position that covers every ID that either position covers."""
        names = {*self.positions, *other.positions}
        linear = max(self.linear, other.linear)
        return VectorPosition(
            linear, {name: max(self.position_of(name), other.position_of(name)) for name in sorted(names)}
        )

    @property
    def max_id(self) -> int:
        return max([self.linear, *self.positions.values()])


class TimelineRow(NamedTuple):
    """A row of the table `rooms.timeline`."""

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
class SyncResult:
    """The answer to `sync`.

    Attributes:
        until: the position to pass as `since` to the next call.
        rooms: the rooms that the member has joined.
        events: the new events of the member's stays, in order of arrival.
        out_of_band: new out-of-band memberships, which only the member receives.
        ended_stays: the events that ended stays (leave, kick or ban). No more events of such a stay follow. If the
            member has joined again, the room is also in `rooms`.
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
        events: the newest events of the room, the first page of its history.
        state: the state of the room.
        before: the end of that page, for `messages`; None if there are no more events.
    """

    events: Sequence[TimelineRow]
    state: State
    before: PageEnd | None


_COLUMNS = "stream_ordering, event, room, depth, writer"


def _covered_condition(row: str) -> str:
    """The SQL of `VectorPosition.covers` for the row of the alias `row`. Needs `_position_parameters`."""
    position = f"greatest(%(linear)s, (%(to)s::jsonb->>{row}.writer)::bigint)"
    return f"({row}.stream_ordering < 0 or {row}.stream_ordering <= {position})"


def incarnation(connection: Connection) -> int:
    """The incarnation of the database: the time in microseconds since 1970 when it was last opened after a restore, or
    0. Tokens and caches of another incarnation are invalid."""
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
    connection: Connection,
    member: str,
    since: VectorPosition,
    now: VectorPosition,
    limit: int = 100,
    rooms: Sequence[str] | None = None,
) -> SyncResult:
    """The events after `since` and up to `now`, in order of arrival.

    The end of a stay is returned only when the linear position has passed it: before that, a slow writer may add an
    event of the stay.

    Args:
        connection: to the database of the rooms.
        member: the member whose stays are read.
        since: the `until` of the last answer. It may be beyond `now`.
        now: the published position.
        limit: the maximum number of events. If there are more, `until` of the result is below `now`.
        rooms: read all events of these rooms instead of the member's stays.
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
    ends = {stay.left_by for stay in stays}
    return SyncResult(
        until,
        [stay.room for stay in stays if stay.ended is None],
        events,
        [row for row in received if row.stream_ordering not in ends and not since.covers(row) and until.covers(row)],
        [row for row in received if row.stream_ordering in ends and row.stream_ordering <= until.linear],
    )


def _load_stays(connection: Connection, member: str, since: VectorPosition) -> list[Stay]:
    """The member's stays, except the stays that end at or below the linear position of `since`."""
    rows = connection.execute(
        "select room, began, ended, left_by from rooms.stays where member = %s"
        " and (left_by is null or left_by > %s) order by room, began",
        [member, since.linear],
    )
    return [Stay(*row) for row in rows.fetchall()]


def _limit_events(
    events: list[TimelineRow], since: VectorPosition, now: VectorPosition, limit: int
) -> tuple[list[TimelineRow], VectorPosition]:
    """The first `limit` events, and the position after them."""
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
    """The first `limit` events of the stays. An index is used for each stay, so the cost depends only on the events of
    its rooms."""
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
            "began": [stay.began for stay in stays],
            "ended": [stay.ended for stay in stays],
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
    connection: Connection, room: str, upto: VectorPosition, before: PageEnd | None = None, limit: int = 100
) -> tuple[list[TimelineRow], PageEnd | None]:
    """A page of history, the deepest events first.

    The order by `(depth, stream_ordering)` is unique: pages neither omit nor repeat an event that exists when the first
    page is read, even if events are inserted meanwhile.

    Args:
        connection: to the database of the rooms.
        room: the room.
        upto: live events beyond this position are omitted; `sync` returns them.
        before: the end of the previous page; None for the first page.
        limit: the maximum number of events.

    Returns:
        The events, and the end of the page; None instead of the end if there are no more events.
    """
    page_start = PageEnd(2**63 - 1, 2**63 - 1) if before is None else before
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
    """The room at the position `now`, from one snapshot. The connection must not be in a transaction.

    A client continues forwards with `sync(since=now)`, and backwards with `messages(before=result.before)`.
    """
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read read only")
        events, before = messages(connection, room, now, None, limit)
        return InitialSync(events, state_at(connection, room, now), before)


def state_at(connection: Connection, room: str, now: VectorPosition) -> State:
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


def current_state(connection: Connection, room: str) -> tuple[int, State]:
    """The version of the room's current state, and the state, from one snapshot."""
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


def members_with_version(connection: Connection, room: str) -> tuple[int, list[str]]:
    """The version of the room's current state, and its joined members, from one snapshot."""
    rows = connection.execute(
        "select version, member from rooms.rooms left join rooms.memberships"
        " on memberships.room = rooms.room and membership = %s where rooms.room = %s order by member",
        [JOINED, room],
    ).fetchall()
    return (rows[0][0] if rows else 0), [member for _, member in rows if member is not None]


def joined_rooms_with_version(connection: Connection, member: str) -> tuple[int, list[str]]:
    """The number of invalidations of the member's list of joined rooms, and the list, from one snapshot."""
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
    """The invalidations after `since` and up to `now`, positions of the stream `caches`. Some may have been returned
    before.

    Returns:
        The name of a cache or of a group of caches, and its keys; None instead of keys for all values.
    """
    return connection.execute(
        "select cache, keys from rooms.invalidations where stream_id > %s and stream_id <= %s"
        " and stream_id <= greatest(%s, (%s::jsonb->>writer)::bigint) order by stream_id",
        [since.linear, now.max_id, now.linear, as_json(now.positions)],
    ).fetchall()
