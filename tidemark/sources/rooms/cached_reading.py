"""What caches of rooms hold, each value with its version, and what they are to forget between two positions."""

from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms.caches import ROOMS_OF
from tidemark.sources.rooms.reading import Upto
from tidemark.sources.rooms.states import KeyHolder, State
from tidemark.sources.rooms.stays import JOINED
from tidemark.sources.rooms.tables import as_json


def current_state(connection: Connection, room: str) -> tuple[int, State]:
    """The room's current state and its version, of one snapshot."""
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
    """The version of the room's state that says so, and its members, of one snapshot."""
    rows = connection.execute(
        "select version, member from rooms.rooms left join rooms.memberships"
        " on memberships.room = rooms.room and membership = %s where rooms.room = %s order by member",
        [JOINED, room],
    ).fetchall()
    return (rows[0][0] if rows else 0), [member for _, member in rows if member is not None]


def joined_with_version(connection: Connection, member: str) -> tuple[int, list[str]]:
    """How often the member's rooms were invalidated, and which they are, of one snapshot."""
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
    """What caches are to forget between two positions of the stream `caches`: name, and keys or None. Some of it may
    have been told before, which does no harm."""
    return connection.execute(
        "select cache, keys from rooms.invalidations where stream_id > %s and stream_id <= %s"
        " and stream_id <= greatest(%s, (%s::jsonb->>writer)::bigint) order by stream_id",
        [since.linear, now.farthest, now.linear, as_json(now.positions)],
    ).fetchall()
