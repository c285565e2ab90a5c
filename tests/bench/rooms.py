"""The room DAG: what the pure rules do on one core, and how long a sync takes among very many events."""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import click
import psycopg

from tests.bench.site import BenchSite
from tests.bench.table import rate, table
from tests.sources.rooms.memory import MemoryRooms
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of
from tidemark.sources.rooms.reading import VectorPosition, sync
from tidemark.sources.rooms.rules import MAX_CHAIN_LENGTH, RoomEvent, compute_depth
from tidemark.sources.rooms.tables import SCHEMA


@dataclass(frozen=True, slots=True)
class RoomsPlan:
    events: int = 200_000
    rooms: int = 100
    members: int = 200
    held: int = 1_000_000
    syncs: int = 2_000


JOINED = 100  # rooms of the member
_BEHIND = (100, 10_000, 500_000)  # events of all rooms since its last sync


def run(site: BenchSite, plan: RoomsPlan) -> dict[str, Any]:
    return {"rules": _rules(plan), "sync": _syncs(site, plan)}


def _rules(plan: RoomsPlan) -> dict[str, Any]:
    """Only `persist` is timed. One event in five changes the state, one in ten forks its room."""
    rooms, dice = MemoryRooms(), random.Random(1)
    seconds = 0.0
    for event in _arriving(rooms, dice, plan):
        began = time.perf_counter()
        rooms.persist(event)
        seconds += time.perf_counter() - began
    longest = max(len(room.groups.chain(group)) for room in rooms.rooms.values() for group in room.groups.stored)
    assert longest <= MAX_CHAIN_LENGTH
    rows = sum(len(state_group.delta) for room in rooms.rooms.values() for state_group in room.groups.stored.values())
    figures = {"events": plan.events, "per_second": plan.events / seconds, "longest": longest, "rows": rows}
    click.echo(str(figures), err=True)
    return figures


def _arriving(rooms: MemoryRooms, dice: random.Random, plan: RoomsPlan) -> Iterator[RoomEvent]:
    for number in range(plan.events):
        room = f"!{dice.randrange(plan.rooms)}"
        prevs = rooms.extremities(room)
        if len(prevs) == 1 and dice.random() < 0.1:  # upon what the last one followed: a fork
            prevs = tuple(rooms.events[id].summary for id in rooms.events[prevs[0].id].prevs) or prevs
        key = f"@{dice.randrange(plan.members)}" if dice.random() < 0.2 else None
        names = tuple(prev.id for prev in prevs)
        yield RoomEvent(f"${number}", room, "m.room.member", "@ada", names, compute_depth(prevs), key)


def _syncs(site: BenchSite, plan: RoomsPlan) -> dict[str, Any]:
    """A member of `JOINED` of ten thousand rooms asks for at most 100 events, one sync after the other."""
    dsn = site.database()
    with session_of(dsn, "bench") as session:
        SCHEMA.migrate(session)
    figures: dict[str, Any] = {"held": plan.held, "rows": []}
    with psycopg.connect(dsn, autocommit=True) as connection:
        _fill(connection, plan.held)
        dice = random.Random(2)
        for behind in _BEHIND:
            seconds = []
            events = 0
            for _ in range(plan.syncs):
                since = max(0, plan.held - behind - dice.randrange(100))
                began = time.perf_counter()
                found = sync(
                    connection, "@ada", VectorPosition(since), VectorPosition(plan.held - 50, {"web": plan.held})
                )
                seconds.append(time.perf_counter() - began)
                events += len(found.events)
                assert len(found.rooms) == JOINED
            median, *_, late = quantiles(seconds, n=100)[49:]
            figures["rows"].append({"behind": behind, "events": events / plan.syncs, "p50": median, "p99": late})
            click.echo(str(figures["rows"][-1]), err=True)
    return figures


def _fill(connection: Connection, held: int) -> None:
    """Rooms are as busy as one another; a member's are among them."""
    for statement in (
        "insert into rooms.rooms (room) select '!' || n from generate_series(0, 9999) as n",
        "insert into rooms.events (event, room, type, sender, prevs, depth, content, held_as)"
        " select '$' || n, '!' || n * 7919 % 10000, 'm', '@ada', '{}', 1 + n / 10000, '{}', 'regular'"
        f" from generate_series(1, {held}::bigint) as n",
        "insert into rooms.timeline (stream_ordering, event, room, depth, writer)"
        " select n, '$' || n, '!' || n * 7919 % 10000, 1 + n / 10000, (array['web', 'api', 'mail'])[1 + n % 3]"
        f" from generate_series(1, {held}::bigint) as n",
        "insert into rooms.memberships (member, room, membership, event)"
        f" select '@ada', '!' || n * 100, 'join', '$1' from generate_series(0, {JOINED - 1}) as n",
        "insert into rooms.stays (member, room, began) select member, room, 0 from rooms.memberships",
        "vacuum analyze",
    ):
        connection.execute(statement.encode())


def render(figures: Mapping[str, Any]) -> list[str]:
    rules = figures["rules"]
    return [
        "Rooms of a homeserver ([rooms.md](rooms.md)). The pure rules, on one core: edges, depth, extremities and state"
        " groups of each event, and the room's current state. One event in five changes the state of its room, one in"
        " ten forks it.",
        "",
        *table(
            ["events", "events/s", "longest chain of state groups", "rows in them"],
            [[f"{rules['events']:,}", rate(rules["per_second"]), str(rules["longest"]), f"{rules['rows']:,}"]],
        ),
        "",
        f"`sync` of a member of {JOINED} rooms, one after the other, with {figures['sync']['held']:,} events in 10,000"
        " rooms in Postgres, by how many events of all rooms it is behind, and how many it is given (at most 100):",
        "",
        *table(
            ["events behind", "events given", "median", "p99"],
            [
                [
                    f"{row['behind']:,}",
                    f"{row['events']:.0f}",
                    f"{row['p50'] * 1e3:.1f} ms",
                    f"{row['p99'] * 1e3:.1f} ms",
                ]
                for row in figures["sync"]["rows"]
            ],
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
