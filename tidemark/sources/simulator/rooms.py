"""A server of rooms in a play: events of its own and of other servers, forks, outliers, invites, and history.

What other servers have is in `play.remote`: events that ours learns of later, when backfill comes to them, and for each
the state before it. That table and the rooms' own are what everything is held against in the end.
"""

import threading
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from uuid import uuid4

import msgspec
import psycopg

from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.persisting import Appender, RoomStore, RoomStreams, SqlAppender, WriterAppender, following
from tidemark.sources.rooms.rules import MEMBER, HeldAs, RoomEvent
from tidemark.sources.rooms.states import KeyHolder, State, resolved
from tidemark.sources.simulator.drivers import Undone, lost
from tidemark.sources.simulator.script import Fault, PlayedStream
from tidemark.sources.simulator.service import ROLLBACKS, dwell, together

ROOMS = 12
MEMBERS = ("@ada", "@bob")
"""They join every room as it is made, and stay."""
GUEST = "@eve"
"""She is invited, and never joins."""
SPEAKERS = 20
"""Others, @m0 and so forth, who come and go, or are banned."""
COMER = "@m0"
"""The one who does so most often."""
LIVE_HANDS = 2
BACKFILL_SECONDS = 0.3  # between two looks
COMPACTIONS = 0.05
_BAD = [*[HeldAs.REGULAR] * 7, HeldAs.SOFT_FAILED, HeldAs.REJECTED]

REMOTE = """
create schema if not exists play;
create table if not exists play.remote (
    event       text    primary key,
    room        text    not null,
    body        jsonb   not null,
    before      text[]  not null
);
comment on table play.remote is 'What other servers have: events as they are to be held, and the state before each'
"""


@dataclass(frozen=True, slots=True)
class RoomServiceRole:
    """The part of one process, which writes as `writer`, or (None) as the database itself. `rate`: transactions/s."""

    writer: str | None
    streams: RoomStreams
    faults: Set[Fault]
    rate: float
    seed: str


def room_streams(prefix: str) -> RoomStreams:
    return RoomStreams(f"{prefix}events", f"{prefix}backfill", f"{prefix}caches")


def played(streams: RoomStreams) -> list[PlayedStream]:
    return [PlayedStream(streams.events), PlayedStream(streams.backfill, "backward"), PlayedStream(streams.caches)]


def serve_rooms(role: RoomServiceRole, dsn: str, told: threading.Event) -> None:
    """Live events, and the history that they lack, until `told` is set. Raises what the database refuses."""
    hands = [_LiveHand(role, number, dsn, told) for number in range(LIVE_HANDS)]
    together([*(hand.work for hand in hands), _HistoryHand(role, LIVE_HANDS, dsn, told).work], told)


class _RoomHand:
    """One connection at work, on a thread of its own."""

    def __init__(self, role: RoomServiceRole, number: int, dsn: str, told: threading.Event) -> None:
        self._role = role
        self._random = Random(f"{role.seed} {number}")
        self._dsn = dsn
        self._told = told

    def _work(self, pause: float, act: Callable[[Connection, str], None]) -> None:
        """Act in rooms, each time in a transaction of which some are undone."""
        with (
            lost(psycopg.OperationalError, psycopg.InterfaceError),
            psycopg.connect(self._dsn, autocommit=True) as connection,
        ):
            name = self._role.writer
            self._appender: Appender = WriterAppender(name) if name else SqlAppender(connection.info.dbname)
            self._store = RoomStore(self._appender, self._role.streams)
            while not self._told.wait(self._random.expovariate(1 / pause)):
                with suppress(Undone), connection.transaction():
                    act(connection, f"!{self._random.randrange(ROOMS)}")
                    dwell(self._role.faults, self._random, self._told)
                    if Fault.ROLLBACK in self._role.faults and self._random.random() < ROLLBACKS:
                        raise Undone

    def _fetch(self, connection: Connection, events: Iterable[str]) -> None:
        """Hold these at least as outliers."""
        wanted = [*events]
        missing = {*wanted} - tables.events_of(connection, wanted).keys()
        for event, _ in fetched(connection, missing):
            self._store.persist(connection, replace(event, held_as=HeldAs.OUTLIER))


class _LiveHand(_RoomHand):
    """Events as they arrive."""

    def work(self) -> None:
        self._work(LIVE_HANDS / self._role.rate, self._arrive)

    def _arrive(self, connection: Connection, room: str) -> None:
        reserved = None
        if self._random.random() < 0.3:  # before the room is locked: its events complete in any order
            reserved = self._appender.reserve(connection, self._role.streams.events)
            dwell(self._role.faults, self._random, self._told)
        prevs, depth = following(connection, room)
        if not prevs:
            self._begin(connection, room)
            return
        chance = self._random.random()
        if chance < 0.6:
            self._store.persist(connection, self._any(room, prevs, depth), reserved=reserved)
        elif chance < 0.7:
            fork = self._upon(connection, room)
            self._store.persist(connection, replace(fork, held_as=self._random.choice(_BAD)), reserved=reserved)
        elif chance < 0.93:
            self._hear(connection, room, reserved)
        else:
            self._place_outlier(connection, room, reserved)

    def _begin(self, connection: Connection, room: str) -> None:
        event = RoomEvent(_new(), room, "m.room.create", MEMBERS[0], (), 1, "")
        self._store.persist(connection, event)
        for member in MEMBERS:
            event = RoomEvent(
                _new(), room, MEMBER, member, (event.id,), event.depth + 1, member, {"membership": "join"}
            )
            self._store.persist(connection, event)

    def _any(self, room: str, prevs: Sequence[str], depth: int) -> RoomEvent:
        """A message, a topic, or somebody who comes or goes."""
        chance, sender = self._random.random(), f"@m{self._random.randrange(SPEAKERS)}"
        names = tuple(prevs)
        if chance < 0.7:
            return RoomEvent(_new(), room, "m.room.message", sender, names, depth, None, {"body": "hello"})
        if chance < 0.8:
            return RoomEvent(_new(), room, "m.room.topic", sender, names, depth, "", {"topic": _new()})
        content = {"membership": self._random.choice(["join", "join", "leave", "ban"])}
        member = f"@m{int(SPEAKERS * self._random.random() ** 2)}"
        return RoomEvent(_new(), room, MEMBER, sender, names, depth, member, content)

    def _upon(self, connection: Connection, room: str) -> RoomEvent:
        """One that follows some of the newest events, whatever followed them already."""
        rows = connection.execute(
            "select event, depth from rooms.events where room = %s and state_group is not null"
            " order by depth desc limit 8",
            [room],
        ).fetchall()
        chosen = self._random.sample(rows, min(len(rows), self._random.choice((1, 1, 2, 3))))
        return self._any(room, [event for event, _ in chosen], 1 + max(depth for _, depth in chosen))

    def _hear(self, connection: Connection, room: str, reserved: int | None) -> None:
        """Of some events of another server the last one alone, live or as an invite; backfill is to find the others."""
        event = self._upon(connection, room)
        groups = [group for _, group in tables.events_of(connection, event.prevs).values() if group is not None]
        state: State = resolved([tables.state_of(connection, group) for group in groups])
        before: list[str] = []
        invites = self._random.random() < 0.2
        for left in range(self._random.randrange(4), -1, -1):
            if invites and not left:
                event = replace(event, type=MEMBER, state_key=GUEST, content={"membership": "invite"})
            event = replace(event, held_as=HeldAs.REGULAR if invites else self._random.choice(_BAD))
            before = [holder.id for holder in state.values()]
            connection.execute(
                "insert into play.remote (event, room, body, before) values (%s, %s, %s, %s)",
                [event.id, room, msgspec.json.encode(event).decode(), before],
            )
            if left:
                if event.key and event.held_as is not HeldAs.REJECTED:
                    state = {**state, event.key: KeyHolder(event.depth, event.id)}
                event = self._any(room, [event.id], event.depth + 1)
        if invites:
            event = replace(event, held_as=HeldAs.OUT_OF_BAND)
        self._fetch(connection, before)
        self._store.persist(connection, event, given=before, reserved=reserved)

    def _place_outlier(self, connection: Connection, room: str, reserved: int | None) -> None:
        """One of those that are held becomes what it is."""
        rows = connection.execute(
            "select event from rooms.events where room = %s and held_as in ('outlier', 'out-of-band')", [room]
        ).fetchall()
        if rows:
            for event, before in fetched(connection, self._random.choice(rows)):
                self._fetch(connection, before)
                self._store.persist(connection, event, given=before, reserved=reserved)


class _HistoryHand(_RoomHand):
    """Fetches what rooms lack, as history, and compacts their states."""

    def work(self) -> None:
        self._work(BACKFILL_SECONDS, self._backfill)

    def _backfill(self, connection: Connection, room: str) -> None:
        if self._random.random() < COMPACTIONS:
            tables.compact_states(connection, room)
        tables.locked(connection, room)
        missing = tables.backward_extremities(connection, room)[:5]
        for event, before in sorted(fetched(connection, missing), key=lambda found: -found[0].depth):
            self._fetch(connection, before)
            self._store.persist(connection, event, "backfill", before)


def fetched(connection: Connection, events: Iterable[str]) -> list[tuple[RoomEvent, list[str]]]:
    """What another server says of these events, each with the state before it."""
    rows = connection.execute("select body, before from play.remote where event = any(%s)", [[*events]])
    return [(msgspec.convert(body, RoomEvent), before) for body, before in rows.fetchall()]


def _new() -> str:
    return f"${uuid4().hex[:20]}"
