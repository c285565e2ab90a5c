"""Clients of rooms in a play: sync by line and by vector, history, caches, and who waits for an event of its own.

What each was answered goes into `play.answers` of the readers' database, where it is held against the tables. The last
answer of a syncing client is its place: after a kill it goes on there.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any
from uuid import uuid4

import msgspec
import psycopg

from tidemark.app.simulation.reading import ReaderServers
from tidemark.common.errors import NotReached, Retry, StreamNotKnown, TokenFromTheFuture
from tidemark.common.postgres_session import Connection
from tidemark.common.session_settings import SessionConnection
from tidemark.sinks.reader import Positions, Standing
from tidemark.sources.rooms.caches import ALL_OF_ROOM, MEMBERS, ROOMS_OF, STATE, Caches
from tidemark.sources.rooms.persisting import RoomStore, RoomStreams, WriterAppender, following
from tidemark.sources.rooms.reading import (
    Upto,
    current_state,
    incarnation,
    invalidated,
    joined_with_version,
    members_with_version,
    messages,
    opened,
    sync,
)
from tidemark.sources.rooms.rules import RoomEvent
from tidemark.sources.simulator.drivers import BrokenOff, lost
from tidemark.sources.simulator.rooms import COMER, GUEST, ROOMS, SPEAKERS
from tidemark.sources.simulator.rooms import MEMBERS as READERS
from tidemark.sources.simulator.service import together

SYNCING = (*READERS, COMER, GUEST)
"""The members for whom clients sync, by line and by vector."""
PAUSE_SECONDS = 0.05
OWN_SECONDS = 1.0  # between two events of the client that waits for its own
PATIENCE = 60.0  # of that client

ANSWERS = """
create schema if not exists play;
create table if not exists play.answers (
    number      bigint  primary key generated always as identity,
    client      text    not null,
    kind        text    not null,
    about       text    not null,
    since       jsonb,
    upto        jsonb   not null,
    answer      jsonb   not null
);
alter table play.answers add column if not exists incarnation bigint not null default 0;
create index if not exists answers_by_client on play.answers (client, kind, about, number);
comment on column play.answers.about is 'The member, room or cache';
comment on column play.answers.incarnation is 'Of the services'' database, which gave the answer'
"""


class ClientKind(StrEnum):
    """What clients do."""

    LINE = "line"
    VECTOR = "vector"
    HISTORY = "history"
    CACHES = "caches"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class RoomClientRole:
    """The part of one process; `writer` is the name under which it writes, if it does. Without `kept` it leaves no more
    than the places of those who sync, so that it may go on for ever."""

    kinds: Sequence[ClientKind]
    streams: RoomStreams
    writer: str
    seed: str
    kept: bool = True


def read_rooms(role: RoomClientRole, servers: ReaderServers, stopping: threading.Event) -> None:
    """Ask until `stopping` is set. Raises what the library or psycopg does, unless it mends by itself."""
    with Positions(servers.redis, servers.tidemark) as positions:
        clients = [_Client(kind, role, servers, positions, stopping) for kind in role.kinds]
        together([work for client in clients for work in client.work()], stopping)


class _Client:
    """Its methods run on threads of their own, until they are stopped or something breaks off."""

    def __init__(
        self,
        kind: ClientKind,
        role: RoomClientRole,
        servers: ReaderServers,
        positions: Positions,
        stopping: threading.Event,
    ) -> None:
        self._kind = kind
        self._role = role
        self._servers = servers
        self._positions = positions
        self._stopping = stopping
        self._random = Random(f"{role.seed} {kind}")

    def work(self) -> Sequence[Callable[[], None]]:
        """What is done at once."""
        match self._kind:
            case ClientKind.HISTORY:
                return [self.history]
            case ClientKind.CACHES:
                return [self.caches]
            case ClientKind.OWN:
                return [self.own]
            case _:
                return [partial(self.sync, member) for member in SYNCING]

    def sync(self, member: str) -> None:
        """From answer to answer, the first of which begins with the first event."""
        with ExitStack() as stack:
            facts, answers = self._connections(stack)
            since = answers.place(member)
            while not self._stopping.wait(self._random.random() * 2 * PAUSE_SECONDS):
                now = self._now(self._role.streams.events)
                if now is None or now == since:
                    continue
                found = sync(facts, member, since, now, limit=self._random.choice([5, 50, 500]))
                told = {"events": found.events, "sent": found.sent, "left": found.left}
                answer = {kind: [it.stream_ordering for it in rows] for kind, rows in told.items()}
                answers.add("sync", member, since, found.until, answer)
                since = found.until

    def history(self) -> None:
        """Open a room, and go back through all of it."""
        with ExitStack() as stack:
            facts, answers = self._connections(stack)
            while not self._stopping.wait(PAUSE_SECONDS):
                room = f"!{self._random.randrange(ROOMS)}"
                now, history = self._now(self._role.streams.events), self._now(self._role.streams.backfill)
                if now is None or history is None:
                    continue
                first = opened(facts, room, now, limit=5)
                found, before = [*first.events], first.before
                while before is not None and not self._stopping.wait(self._random.random() * PAUSE_SECONDS):
                    page, before = messages(facts, room, now, before, limit=self._random.choice([3, 10, 40]))
                    found += page
                if before is None:
                    answer = {
                        "events": [(it.depth, it.stream_ordering) for it in found],
                        "history": history.linear,
                        "state": [(*key, *holder) for key, holder in first.state.items()],
                    }
                    answers.add("history", room, None, now, answer)

    def caches(self) -> None:
        """Apply what was invalidated up to the position of each writer, and then serve."""
        with ExitStack() as stack:
            facts, answers = self._connections(stack)
            caches = Caches({ALL_OF_ROOM: [STATE, MEMBERS]})
            applied = None
            while not self._stopping.wait(PAUSE_SECONDS):
                now = self._now(self._role.streams.caches)
                if now is None:
                    continue
                if applied is None:
                    caches.clear()
                else:
                    for cache, keys in invalidated(facts, applied, now):
                        caches.invalidated(cache, keys)
                applied = now
                served = [self._served(caches, facts) for _ in range(20)]
                answers.add("served", "", None, now, {"served": served})

    def _served(self, caches: Caches, facts: Connection) -> tuple[str, str, int]:
        cache = self._random.choice([STATE, MEMBERS, ROOMS_OF])
        key = f"@m{self._random.randrange(SPEAKERS)}" if cache == ROOMS_OF else f"!{self._random.randrange(ROOMS)}"
        load: Mapping[str, Callable[[], tuple[int, object]]] = {
            STATE: lambda: current_state(facts, key),
            MEMBERS: lambda: members_with_version(facts, key),
            ROOMS_OF: lambda: joined_with_version(facts, key),
        }
        version, _ = caches.get(cache, [key], load[cache])
        return cache, key, version

    def own(self) -> None:
        """Write an event, and wait for nothing but it: whoever else is slow, the next sync has it."""
        with ExitStack() as stack:
            facts, answers = self._connections(stack)
            store = RoomStore(WriterAppender(self._role.writer), self._role.streams)
            stream, member = self._role.streams.events, READERS[0]
            since = None
            while not self._stopping.wait(OWN_SECONDS):
                room = f"!{self._random.randrange(ROOMS)}"
                with facts.transaction():
                    prevs, depth = following(facts, room)
                    event = RoomEvent(f"$own{uuid4().hex}", room, "m.room.message", member, prevs, depth)
                    id = store.persist(facts, event) if prevs else None
                if id is None:
                    continue
                try:
                    stands = self._positions.wait(stream, id, self._role.writer, timeout=PATIENCE, grace=PATIENCE)
                except (NotReached, StreamNotKnown, TokenFromTheFuture):
                    if self._stopping.is_set():
                        return
                    raise
                now = _upto(stands)
                found = sync(facts, member, since or Upto(id - 1), now, limit=10_000)
                since = found.until
                answer = {"id": id, "found": id in {it.stream_ordering for it in found.events}}
                answers.add("own", room, None, now, answer)

    def _connections(self, stack: ExitStack) -> tuple[Connection, "_Answers"]:
        """To the services' database, and where its answers are kept."""
        stack.enter_context(lost(psycopg.OperationalError, psycopg.InterfaceError))
        facts = stack.enter_context(SessionConnection.open(self._servers.facts))
        effects = stack.enter_context(SessionConnection.open(self._servers.effects))
        return facts, _Answers(effects, self._kind, self._role.kept, incarnation(facts))

    def _now(self, stream: str) -> Upto | None:
        """The published position; None while it is not known."""
        try:
            stands = self._positions.get(stream)
        except Retry as problem:
            raise BrokenOff(str(problem)) from problem
        if not isinstance(stands, Standing):
            time.sleep(PAUSE_SECONDS)
            return None
        return Upto(stands.linear) if self._kind is ClientKind.LINE else _upto(stands)


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one client was answered by one incarnation of the services' database, in the readers' database."""

    effects: Connection
    client: ClientKind
    kept: bool
    incarnation: int

    def place(self, member: str) -> Upto:
        """Where the member's client goes on; at the beginning, where the last answers were of another incarnation."""
        row = self.effects.execute(
            "select upto from play.answers where client = %s and kind = 'sync' and about = %s and incarnation = %s"
            " order by number desc limit 1",
            [self.client.value, member, self.incarnation],
        ).fetchone()
        return Upto(0) if row is None else msgspec.convert(row[0], Upto)

    def add(self, kind: str, about: str, since: Upto | None, upto: Upto, answer: Mapping[str, Any]) -> None:
        if not self.kept and kind != "sync":
            return
        texts = [msgspec.json.encode(it).decode() for it in (since, upto, answer)]
        with self.effects.transaction():
            if not self.kept:
                self.effects.execute(
                    "delete from play.answers where client = %s and kind = %s and about = %s",
                    [self.client.value, kind, about],
                )
            self.effects.execute(
                "insert into play.answers (client, kind, about, since, upto, answer, incarnation)"
                " values (%s, %s, %s, %s, %s, %s, %s)",
                [self.client.value, kind, about, *texts, self.incarnation],
            )


def _upto(stands: Standing) -> Upto:
    """The published vector, without writers that are no further than the line."""
    return Upto(stands.linear, {writer: id for writer, id in stands.vector.items() if abs(id) > abs(stands.linear)})
