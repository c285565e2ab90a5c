"""The services and clients of the rooms workload.

The services write their own events and events of other servers: forks, outliers, invites, and history.

The table `play.remote` has the events of other servers, each with the state before the event. The services fetch events
from this table as outliers and by backfill. The verification also reads the table.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any
from uuid import uuid4

import msgspec
import psycopg

from tidemark.app.simulation.script import Fault, SimulatedStream
from tidemark.app.simulation.services import (
    ROLLBACK_PROBABILITY,
    ConnectionLost,
    ReaderServers,
    RolledBack,
    convert_connection_errors,
    run_threads,
    sleep_in_transaction,
)
from tidemark.common.errors import NotReached, Retry, StreamNotKnown
from tidemark.common.postgres_session import Connection, SessionConnection
from tidemark.sinks.reader import Positions, PositionSnapshot
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.persisting import (
    Appender,
    RoomStore,
    RoomStreams,
    SqlAppender,
    WriterAppender,
    choose_prevs_and_depth,
)
from tidemark.sources.rooms.reading import (
    VectorPosition,
    initial_sync,
    load_current_state,
    load_incarnation,
    load_invalidations,
    load_joined_rooms_with_version,
    load_members_with_version,
    messages,
    sync,
)
from tidemark.sources.rooms.rules import MEMBER, EventKind, RoomEvent, State, StateEntry, resolve_states
from tidemark.sources.rooms.tables import JOINED_ROOMS_CACHE, MEMBERS_CACHE, ROOM_CACHES, STATE_CACHE, Caches

ROOM_COUNT = 12
ROOM_MEMBERS = ("@ada", "@bob")
"""The members who join every room when the room is created, and never leave."""
GUEST = "@eve"
"""The member who is invited and never joins."""
OTHER_MEMBER_COUNT = 20
"""Number of other members, `@m0` and so on. They join, leave and are banned."""
FREQUENT_JOINER = "@m0"
"""The member who joins and leaves most often."""
LIVE_THREAD_COUNT = 2  # of one service
BACKFILL_INTERVAL_SECONDS = 0.3  # mean time between two backfills of one service
COMPACTION_PROBABILITY = 0.05  # of a compaction before a backfill
_RANDOM_KINDS = [*[EventKind.REGULAR] * 7, EventKind.SOFT_FAILED, EventKind.REJECTED]

REMOTE_TABLE = """
create schema if not exists play;
create table if not exists play.remote (
    event       text    primary key,
    room        text    not null,
    body        jsonb   not null,
    before      text[]  not null
);
comment on table play.remote is 'Events of other servers, each with the kind as which it is stored and the state before
it'
"""


@dataclass(frozen=True, slots=True)
class RoomServiceRole:
    """Configuration of one service process.

    Attributes:
        writer: the name of the service's writer; None: the service calls `tidemark.append`, and the writer is the
            database.
        streams: the streams of the rooms.
        faults: the faults of the simulation. The service injects `ROLLBACK` and `HANG`, and ignores other faults.
        transactions_per_second: number of transactions with live events, without backfill.
        seed: seed of the random choices.
    """

    writer: str | None
    streams: RoomStreams
    faults: Set[Fault]
    transactions_per_second: float
    seed: str


def make_room_streams(prefix: str) -> RoomStreams:
    return RoomStreams(f"{prefix}events", f"{prefix}backfill", f"{prefix}caches")


def make_simulated_streams(streams: RoomStreams) -> list[SimulatedStream]:
    return [
        SimulatedStream(streams.events),
        SimulatedStream(streams.backfill, "backward"),
        SimulatedStream(streams.caches),
    ]


def run_room_service(role: RoomServiceRole, dsn: str, stopping: threading.Event) -> None:
    """Write live events and backfill missing history until `stopping` is set.

    After a lost connection, opens a new one. At another error, sets `stopping`, and raises the error.
    """
    threads = [_LiveThread(role, number, dsn, stopping) for number in range(LIVE_THREAD_COUNT)]
    run_threads(
        [*(thread.work for thread in threads), _BackfillThread(role, LIVE_THREAD_COUNT, dsn, stopping).work], stopping
    )


class _RoomThread:
    """A writing thread with its own connection."""

    def __init__(self, role: RoomServiceRole, number: int, dsn: str, stopping: threading.Event) -> None:
        self._role = role
        self._random = Random(f"{role.seed} {number}")
        self._dsn = dsn
        self._stopping = stopping

    def _run_transactions(self, mean_pause_seconds: float, write: Callable[[Connection, str], None]) -> None:
        """Call `write(connection, room)` for random rooms until `stopping` is set, each call in a transaction.

        Some transactions are rolled back. Raises `ConnectionLost` if the connection to Postgres is lost.
        """
        with (
            convert_connection_errors(psycopg.OperationalError, psycopg.InterfaceError),
            psycopg.connect(self._dsn, autocommit=True) as connection,
        ):
            writer = self._role.writer
            self._appender: Appender = WriterAppender(writer) if writer else SqlAppender(connection.info.dbname)
            self._store = RoomStore(self._appender, self._role.streams)
            while not self._stopping.wait(self._random.expovariate(1 / mean_pause_seconds)):
                with suppress(RolledBack), connection.transaction():
                    write(connection, f"!{self._random.randrange(ROOM_COUNT)}")
                    sleep_in_transaction(self._role.faults, self._random, self._stopping)
                    if Fault.ROLLBACK in self._role.faults and self._random.random() < ROLLBACK_PROBABILITY:
                        raise RolledBack

    def _store_outliers(self, connection: Connection, event_ids: Iterable[str]) -> None:
        """Copy events from `play.remote` to the tables as outliers. Leaves out events that are stored already."""
        ids = [*event_ids]
        missing = {*ids} - tables.load_events(connection, ids).keys()
        for event, _ in fetch_remote_events(connection, missing):
            self._store.persist(connection, replace(event, kind=EventKind.OUTLIER))


class _LiveThread(_RoomThread):
    """Writes live events: own events and events that other servers send."""

    def work(self) -> None:
        self._run_transactions(LIVE_THREAD_COUNT / self._role.transactions_per_second, self._write_live)

    def _write_live(self, connection: Connection, room: str) -> None:
        """Write one random live event. If the room does not exist, create the room instead."""
        reserved_id = None
        if self._random.random() < 0.3:  # before the room is locked, so that IDs complete out of order
            reserved_id = self._appender.reserve(connection, self._role.streams.events)
            sleep_in_transaction(self._role.faults, self._random, self._stopping)
        prevs, depth = choose_prevs_and_depth(connection, room)
        if not prevs:
            self._create_room(connection, room)
            return
        chance = self._random.random()
        if chance < 0.6:
            self._store.persist(connection, self._make_event(room, prevs, depth), reserved_id=reserved_id)
        elif chance < 0.7:
            fork = self._make_fork_event(connection, room)
            self._store.persist(
                connection, replace(fork, kind=self._random.choice(_RANDOM_KINDS)), reserved_id=reserved_id
            )
        elif chance < 0.93:
            self._receive_remote_event(connection, room, reserved_id)
        else:
            self._store_outlier_again(connection, room, reserved_id)

    def _create_room(self, connection: Connection, room: str) -> None:
        event = RoomEvent(_make_id(), room, "m.room.create", ROOM_MEMBERS[0], (), 1, "")
        self._store.persist(connection, event)
        for member in ROOM_MEMBERS:
            event = RoomEvent(
                _make_id(), room, MEMBER, member, (event.id,), event.depth + 1, member, {"membership": "join"}
            )
            self._store.persist(connection, event)

    def _make_event(self, room: str, prevs: Sequence[str], depth: int) -> RoomEvent:
        """Make a random event: a message, a topic, or a membership change. `prevs` are the IDs of the prev events."""
        chance, sender = self._random.random(), f"@m{self._random.randrange(OTHER_MEMBER_COUNT)}"
        prev_ids = tuple(prevs)
        if chance < 0.7:
            return RoomEvent(_make_id(), room, "m.room.message", sender, prev_ids, depth, None, {"body": "hello"})
        if chance < 0.8:
            return RoomEvent(_make_id(), room, "m.room.topic", sender, prev_ids, depth, "", {"topic": _make_id()})
        content = {"membership": self._random.choice(["join", "join", "leave", "ban"])}
        member = f"@m{int(OTHER_MEMBER_COUNT * self._random.random() ** 2)}"
        return RoomEvent(_make_id(), room, MEMBER, sender, prev_ids, depth, member, content)

    def _make_fork_event(self, connection: Connection, room: str) -> RoomEvent:
        """Make an event after up to three random ones of the room's eight deepest events. It may fork the room."""
        rows = connection.execute(
            "select event, depth from rooms.events where room = %s and state_group is not null"
            " order by depth desc limit 8",
            [room],
        ).fetchall()
        prevs = self._random.sample(rows, min(len(rows), self._random.choice((1, 1, 2, 3))))
        return self._make_event(room, [event for event, _ in prevs], 1 + max(depth for _, depth in prevs))

    def _receive_remote_event(self, connection: Connection, room: str, reserved_id: int | None) -> None:
        """Write a chain of events into `play.remote`, and store only the last event, as a live event or as an invite.

        The other events of the chain reach the tables by backfill. `reserved_id`: the reserved stream ID of the stored
        event; None to take the next ID.
        """
        event = self._make_fork_event(connection, room)
        groups = [group for _, group in tables.load_events(connection, event.prevs).values() if group is not None]
        state: State = resolve_states([tables.load_state(connection, group) for group in groups])
        before: list[str] = []
        is_invite = self._random.random() < 0.2
        for remaining_events in range(self._random.randrange(4), -1, -1):
            if is_invite and not remaining_events:
                event = replace(event, type=MEMBER, state_key=GUEST, content={"membership": "invite"})
            event = replace(event, kind=EventKind.REGULAR if is_invite else self._random.choice(_RANDOM_KINDS))
            before = [entry.id for entry in state.values()]
            connection.execute(
                "insert into play.remote (event, room, body, before) values (%s, %s, %s, %s)",
                [event.id, room, msgspec.json.encode(event).decode(), before],
            )
            if remaining_events:
                if event.key and event.kind is not EventKind.REJECTED:
                    state = {**state, event.key: StateEntry(event.depth, event.id)}
                event = self._make_event(room, [event.id], event.depth + 1)
        if is_invite:
            event = replace(event, kind=EventKind.OUT_OF_BAND)
        self._store_outliers(connection, before)
        self._store.persist(connection, event, state_ids_before=before, reserved_id=reserved_id)

    def _store_outlier_again(self, connection: Connection, room: str, reserved_id: int | None) -> None:
        """Store a random outlier of the room again, as the kind in `play.remote`, with its edges and state. Does
        nothing if the room has no outlier."""
        rows = connection.execute(
            "select event from rooms.events where room = %s and held_as in ('outlier', 'out-of-band')", [room]
        ).fetchall()
        if rows:
            for event, before in fetch_remote_events(connection, self._random.choice(rows)):
                self._store_outliers(connection, before)
                self._store.persist(connection, event, state_ids_before=before, reserved_id=reserved_id)


class _BackfillThread(_RoomThread):
    """Backfills missing events of rooms as history, and sometimes compacts the states of rooms."""

    def work(self) -> None:
        self._run_transactions(BACKFILL_INTERVAL_SECONDS, self._backfill)

    def _backfill(self, connection: Connection, room: str) -> None:
        """Store up to five missing events as history. Sometimes compact the room's states first."""
        if self._random.random() < COMPACTION_PROBABILITY:
            tables.compact_states(connection, room)
        tables.lock_room(connection, room)
        missing = tables.load_backward_extremities(connection, room)[:5]
        for event, before in sorted(
            fetch_remote_events(connection, missing), key=lambda fetched_event: -fetched_event[0].depth
        ):
            self._store_outliers(connection, before)
            self._store.persist(connection, event, "backfill", before)


def fetch_remote_events(connection: Connection, events: Iterable[str]) -> list[tuple[RoomEvent, list[str]]]:
    """Read events from `play.remote` by their IDs, each with the IDs of the events that make up the state before it.

    The order is undefined. Events that the table lacks are left out.
    """
    rows = connection.execute("select body, before from play.remote where event = any(%s)", [[*events]])
    return [(msgspec.convert(body, RoomEvent), before) for body, before in rows.fetchall()]


def _make_id() -> str:
    return f"${uuid4().hex[:20]}"


SYNCING_MEMBERS = (*ROOM_MEMBERS, FREQUENT_JOINER, GUEST)
"""The members for whom clients sync, with linear positions and with vectors."""
PAUSE_SECONDS = 0.05  # between two requests of a client; of a sync, the mean time
OWN_EVENT_INTERVAL_SECONDS = 1.0  # between two events of the client that waits for its own events
OWN_EVENT_TIMEOUT_SECONDS = 60.0

ANSWERS_TABLE = """
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
comment on column play.answers.about is 'The member or the room';
comment on column play.answers.incarnation is 'The incarnation of the services'' database that gave the answer'
"""


class ClientKind(StrEnum):
    """What a client requests. The value is its name in `play.answers` and in the output."""

    LINEAR = "line"
    """Sync by linear positions."""
    VECTOR = "vector"
    """Sync by vectors."""
    HISTORY = "history"
    """The initial sync and the history of a room."""
    CACHES = "caches"
    """Values from caches."""
    OWN_EVENT = "own"
    """Sync after the client has written an event of its own."""


@dataclass(frozen=True, slots=True)
class RoomClientRole:
    """Configuration of one process of clients.

    Attributes:
        kinds: the kinds of the clients in this process.
        streams: the streams of the rooms.
        writer: the writer name with which the client of kind `OWN_EVENT` writes.
        seed: seed of the random choices.
        stores_all: whether to store all answers, for the verification. If False, only the last answer of each syncing
            client is stored, so that a simulation can run forever.
    """

    kinds: Sequence[ClientKind]
    streams: RoomStreams
    writer: str
    seed: str
    stores_all: bool = True


def run_room_clients(role: RoomClientRole, servers: ReaderServers, stopping: threading.Event) -> None:
    """Send requests until `stopping` is set.

    After `ConnectionLost`, opens new connections. At another error, sets `stopping`, and raises the error.
    """
    with Positions(servers.redis, servers.tidemark_dsn) as positions:
        clients = [_Clients(kind, role, servers, positions, stopping) for kind in role.kinds]
        run_threads([loop for client in clients for loop in client.loops()], stopping)


class _Clients:
    """The clients of one kind.

    The caller runs each function of `loops` on its own thread. A function returns when `stopping` is set, and raises
    `ConnectionLost` if a connection is lost.
    """

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

    def loops(self) -> Sequence[Callable[[], None]]:
        """The functions to run, each on its own thread."""
        match self._kind:
            case ClientKind.HISTORY:
                return [self._page_histories]
            case ClientKind.CACHES:
                return [self._read_caches]
            case ClientKind.OWN_EVENT:
                return [self._write_and_sync]
            case _:
                return [partial(self._sync, member) for member in SYNCING_MEMBERS]

    def _sync(self, member: str) -> None:
        """Sync repeatedly, each time from the position of the last stored answer of the incarnation; from 0 without
        one."""
        with ExitStack() as stack:
            facts, answers = self._open_connections(stack)
            since = answers.read_last_position(member)
            while not self._stopping.wait(self._random.random() * 2 * PAUSE_SECONDS):
                now = self._read_published_position(self._role.streams.events)
                if now is None or now == since:
                    continue
                synced = sync(facts, member, since, now, limit=self._random.choice([5, 50, 500]))
                sections = {"events": synced.events, "sent": synced.out_of_band, "left": synced.ended_stays}
                answer = {kind: [row.stream_ordering for row in rows] for kind, rows in sections.items()}
                answers.add("sync", member, since, synced.until, answer)
                since = synced.until

    def _page_histories(self) -> None:
        """Open a random room, page back to the first event of the room, and store the whole history as one answer.
        Repeatedly."""
        with ExitStack() as stack:
            facts, answers = self._open_connections(stack)
            while not self._stopping.wait(PAUSE_SECONDS):
                room = f"!{self._random.randrange(ROOM_COUNT)}"
                now, history = (
                    self._read_published_position(self._role.streams.events),
                    self._read_published_position(self._role.streams.backfill),
                )
                if now is None or history is None:
                    continue
                first = initial_sync(facts, room, now, limit=5)
                events, page_end = [*first.events], first.page_end
                while page_end is not None and not self._stopping.wait(self._random.random() * PAUSE_SECONDS):
                    page, page_end = messages(facts, room, now, page_end, limit=self._random.choice([3, 10, 40]))
                    events += page
                if page_end is None:
                    answer = {
                        "events": [(event.depth, event.stream_ordering) for event in events],
                        "history": history.linear,
                        "state": [(*key, *entry) for key, entry in first.state.items()],
                    }
                    answers.add("history", room, None, now, answer)

    def _read_caches(self) -> None:
        """Apply the invalidations up to the published vector, read 20 values from the caches, and store their versions
        as one answer. Repeatedly."""
        with ExitStack() as stack:
            facts, answers = self._open_connections(stack)
            caches = Caches({ROOM_CACHES: [STATE_CACHE, MEMBERS_CACHE]})
            applied = None
            while not self._stopping.wait(PAUSE_SECONDS):
                now = self._read_published_position(self._role.streams.caches)
                if now is None:
                    continue
                if applied is None:
                    caches.clear()
                else:
                    for cache, keys in load_invalidations(facts, applied, now):
                        caches.invalidate(cache, keys)
                applied = now
                served = [self._read_cached(caches, facts) for _ in range(20)]
                answers.add("served", "", None, now, {"served": served})

    def _read_cached(self, caches: Caches, facts: Connection) -> tuple[str, str, int]:
        """Read a random value. Returns the name of the cache, the key, and the version of the value."""
        cache = self._random.choice([STATE_CACHE, MEMBERS_CACHE, JOINED_ROOMS_CACHE])
        key = (
            f"@m{self._random.randrange(OTHER_MEMBER_COUNT)}"
            if cache == JOINED_ROOMS_CACHE
            else f"!{self._random.randrange(ROOM_COUNT)}"
        )
        load: Mapping[str, Callable[[], tuple[int, object]]] = {
            STATE_CACHE: lambda: load_current_state(facts, key),
            MEMBERS_CACHE: lambda: load_members_with_version(facts, key),
            JOINED_ROOMS_CACHE: lambda: load_joined_rooms_with_version(facts, key),
        }
        version, _ = caches.get(cache, [key], load[cache])
        return cache, key, version

    def _write_and_sync(self) -> None:
        """Write an event, wait until the position of the client's own writer reaches the event, and sync. Repeatedly.

        The sync must contain the event, even if other writers are slow. May raise `NotReached`.
        """
        with ExitStack() as stack:
            facts, answers = self._open_connections(stack)
            store = RoomStore(WriterAppender(self._role.writer), self._role.streams)
            stream, member = self._role.streams.events, ROOM_MEMBERS[0]
            since = None
            while not self._stopping.wait(OWN_EVENT_INTERVAL_SECONDS):
                room = f"!{self._random.randrange(ROOM_COUNT)}"
                with facts.transaction():
                    prevs, depth = choose_prevs_and_depth(facts, room)
                    event = RoomEvent(f"$own{uuid4().hex}", room, "m.room.message", member, prevs, depth)
                    id = store.persist(facts, event) if prevs else None
                if id is None:
                    continue
                try:
                    snapshot = self._positions.wait(
                        stream,
                        id,
                        self._role.writer,
                        timeout=OWN_EVENT_TIMEOUT_SECONDS,
                        grace=OWN_EVENT_TIMEOUT_SECONDS,
                    )
                except (NotReached, StreamNotKnown):
                    if self._stopping.is_set():
                        return
                    raise
                now = _make_vector_position(snapshot)
                synced = sync(facts, member, since or VectorPosition(id - 1), now, limit=10_000)
                since = synced.until
                answer = {"id": id, "found": id in {event.stream_ordering for event in synced.events}}
                answers.add("own", room, None, now, answer)

    def _open_connections(self, stack: ExitStack) -> tuple[Connection, "_Answers"]:
        """Open connections to the services' database and to the database that stores the answers. `stack` closes the
        connections, and converts their errors to `ConnectionLost`."""
        stack.enter_context(convert_connection_errors(psycopg.OperationalError, psycopg.InterfaceError))
        facts = stack.enter_context(SessionConnection.open(self._servers.facts_dsn))
        effects = stack.enter_context(SessionConnection.open(self._servers.effects_dsn))
        return facts, _Answers(effects, self._kind, self._role.stores_all, load_incarnation(facts))

    def _read_published_position(self, stream: str) -> VectorPosition | None:
        """Read the published position of the stream: a linear position if the client is `LINEAR`, otherwise a vector.

        If none is published yet, sleeps for `PAUSE_SECONDS`, and returns None. May raise `ConnectionLost`.
        """
        try:
            snapshot = self._positions.get(stream)
        except Retry as problem:
            raise ConnectionLost(str(problem)) from problem
        if not isinstance(snapshot, PositionSnapshot):
            time.sleep(PAUSE_SECONDS)
            return None
        return VectorPosition(snapshot.linear) if self._kind is ClientKind.LINEAR else _make_vector_position(snapshot)


@dataclass(frozen=True, slots=True)
class _Answers:
    """Stores the answers of one client in the readers' database.

    Attributes:
        connection: a connection to the readers' database.
        client: the kind of the client.
        stores_all: see `RoomClientRole`.
        incarnation: the incarnation of the services' database that gave the answers. A restore begins a new one.
    """

    connection: Connection
    client: ClientKind
    stores_all: bool
    incarnation: int

    def read_last_position(self, member: str) -> VectorPosition:
        """Read the position of the client's last stored sync for this member and incarnation; position 0 if none is
        stored."""
        row = self.connection.execute(
            "select upto from play.answers where client = %s and kind = 'sync' and about = %s and incarnation = %s"
            " order by number desc limit 1",
            [self.client.value, member, self.incarnation],
        ).fetchone()
        return VectorPosition(0) if row is None else msgspec.convert(row[0], VectorPosition)

    def add(
        self, kind: str, about: str, since: VectorPosition | None, upto: VectorPosition, answer: Mapping[str, Any]
    ) -> None:
        """Store one answer. If `stores_all` is False, stores only a `sync`, in place of the last sync of the member.

        Args:
            kind: `sync`, `history`, `served` or `own`.
            about: the member or the room.
            since: the position from which a sync began; otherwise None.
            upto: the position of the answer.
            answer: depends on `kind`; see `rooms.compare_answer` and `rooms.compare_syncs`.
        """
        if not self.stores_all and kind != "sync":
            return
        texts = [msgspec.json.encode(part).decode() for part in (since, upto, answer)]
        with self.connection.transaction():
            if not self.stores_all:
                self.connection.execute(
                    "delete from play.answers where client = %s and kind = %s and about = %s",
                    [self.client.value, kind, about],
                )
            self.connection.execute(
                "insert into play.answers (client, kind, about, since, upto, answer, incarnation)"
                " values (%s, %s, %s, %s, %s, %s, %s)",
                [self.client.value, kind, about, *texts, self.incarnation],
            )


def _make_vector_position(snapshot: PositionSnapshot) -> VectorPosition:
    """The published vector, without writers at or below the linear position."""
    return VectorPosition(
        snapshot.linear, {writer: id for writer, id in snapshot.vector.items() if abs(id) > abs(snapshot.linear)}
    )
