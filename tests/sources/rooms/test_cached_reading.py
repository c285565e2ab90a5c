"""Readers with caches: a reader whose position covers an invalidation never serves an older value."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING, examples
from tests.sources.rooms.dags import an_event
from tests.sources.rooms.test_persisting import SQL_STORE, STORE, a_member
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms import persisting
from tidemark.sources.rooms.persisting import RoomStore, choose_prevs_and_depth
from tidemark.sources.rooms.reading import (
    VectorPosition,
    load_current_state,
    load_invalidations,
    load_joined_rooms_with_version,
    load_members_with_version,
)
from tidemark.sources.rooms.rules import EventKind, RoomEvent
from tidemark.sources.rooms.tables import JOINED_ROOMS_CACHE, MEMBERS_CACHE, ROOM_CACHES, STATE_CACHE, Caches

SLOW_ROOM, QUICK_ROOMS = "!slow", ("!one", "!two")
MEMBER_NAMES = ("@ada", "@bob", "@eve")
ENTRIES = [
    *((cache, room) for cache in (STATE_CACHE, MEMBERS_CACHE) for room in (SLOW_ROOM, *QUICK_ROOMS)),
    *((JOINED_ROOMS_CACHE, member) for member in MEMBER_NAMES),
]
KINDS = st.sampled_from(
    ["message", "topic", *(f"join {name}" for name in MEMBER_NAMES), "leave @ada", "several members"]
)

Entry = tuple[str, str]
Value = tuple[int, object]


def load_value(connection: Connection, entry: Entry) -> Value:
    cache, key = entry
    load: Mapping[str, Callable[[Connection, str], Value]] = {
        STATE_CACHE: load_current_state,
        # The version is that of the room's state, so it changes without the members.
        MEMBERS_CACHE: lambda connection, room: (0, load_members_with_version(connection, room)[1]),
        JOINED_ROOMS_CACHE: load_joined_rooms_with_version,
    }
    return load[cache](connection, key)


@dataclass
class Commit:
    """A committed transaction: its writer, the IDs of its invalidations, and all values after it."""

    writer: str
    ids: set[int]
    values: Mapping[Entry, Value]


@dataclass
class CachingReader:
    """A reader with caches, and the position up to which it has applied the invalidations."""

    caches: Caches = field(default_factory=lambda: Caches({ROOM_CACHES: [STATE_CACHE, MEMBERS_CACHE]}))
    applied: VectorPosition = field(default_factory=lambda: VectorPosition(0))


@dataclass
class Server:
    """Two writers: `web` writes in short transactions, `service` in a long transaction.

    Attributes:
        quick: the connection of `web`.
        slow: the connection of `service`.
        number: the number of events.
        last: the highest ID of an invalidation, committed or not.
        open_ids: the IDs of the invalidations of the long transaction; None if no transaction is open.
        history: the committed transactions.
    """

    quick: Connection
    slow: Connection
    number: int = 0
    last: int = 0
    open_ids: set[int] | None = None
    history: list[Commit] = field(default_factory=list)

    def write(self, connection: Connection, store: RoomStore, room: str, kind: str) -> set[int]:
        """Write one event. Returns the IDs of its invalidations."""
        before = self._ids(connection)
        prevs, depth = choose_prevs_and_depth(connection, room)
        self.number += 1
        id = f"e{self.number}"
        change, _, member = kind.partition(" ")
        event = replace(an_event(id, key="" if change == "topic" else None, room=room), prevs=prevs, depth=depth)
        if member:
            event = replace(a_member(id, member, membership=change), room=room, prevs=prevs, depth=depth)
        if change == "several members":
            self._persist_with_unknown_prev(connection, store, event)
        else:
            store.persist(connection, event)
        new_ids = self._ids(connection) - before
        self.last = max(self.last, *new_ids) if new_ids else self.last
        return new_ids

    def _persist_with_unknown_prev(self, connection: Connection, store: RoomStore, event: RoomEvent) -> None:
        """Persist an event one of whose prev events is not stored, with a state before it that has several members."""
        members = [replace(a_member(f"{event.id}{name}", name), room=event.room) for name in MEMBER_NAMES]
        for member in members:
            store.persist(connection, replace(member, depth=event.depth, kind=EventKind.OUTLIER))
        store.persist(
            connection,
            replace(event, prevs=(*event.prevs, f"unknown{event.id}"), depth=event.depth + 1),
            state_ids_before=[member.id for member in members],
        )

    def _ids(self, connection: Connection) -> set[int]:
        return {id for (id,) in connection.execute("select stream_id from rooms.invalidations").fetchall()}

    def commit_quickly(self, room: str, kind: str) -> None:
        with self.quick.transaction():
            ids = self.write(self.quick, STORE, room, kind)
        self._note_commit("web", ids)

    def open(self, kind: str) -> None:
        if self.open_ids is None:
            self.slow.execute("begin")
            self.open_ids = set()
        self.open_ids |= self.write(self.slow, SQL_STORE, SLOW_ROOM, kind)

    def end(self, how: str) -> None:
        if self.open_ids is not None:
            self.slow.execute(how.encode())
            if how == "commit":
                self._note_commit("service", self.open_ids)
            self.open_ids = None

    def _note_commit(self, writer: str, ids: set[int]) -> None:
        values = {entry: load_value(self.quick, entry) for entry in ENTRIES}
        self.history.append(Commit(writer, ids, values))

    def position(self, *, is_linear: bool) -> VectorPosition:
        """The position that Tidemark would publish."""
        low = min(self.open_ids) - 1 if self.open_ids else self.last
        return VectorPosition(low) if is_linear else VectorPosition(low, {"web": self.last})


def apply_invalidations(server: Server, reader: CachingReader, *, is_linear: bool) -> None:
    now = server.position(is_linear=is_linear).merge(reader.applied)
    for cache, keys in load_invalidations(server.quick, reader.applied, now):
        reader.caches.invalidate(cache, keys)
    reader.applied = now


def allowed_values(server: Server, reader: CachingReader, entry: Entry) -> Iterator[Value]:
    """The value at the reader's position, and all newer values."""
    oldest_allowed = -1
    values = [commit.values[entry] for commit in server.history]
    for number, commit in enumerate(server.history):
        is_covered = all(id <= reader.applied.position_of(commit.writer) for id in commit.ids)
        if is_covered and (number == 0 or values[number] != values[number - 1]):
            oldest_allowed = number
    yield from values[max(oldest_allowed, 0) :]


@pytest.fixture
def two_members_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the memberships of three members change, the cache of joined rooms is cleared."""
    monkeypatch.setattr(persisting, "MAX_INVALIDATED_MEMBERS", 2)


@settings(max_examples=examples(15), suppress_health_check=SHARING)
@given(st.data())
@pytest.mark.usefixtures("two_members_are_many")
def test_no_reader_serves_a_value_older_than_its_position(
    rooms: Connection, second_connection: Connection, data: st.DataObject
) -> None:
    """Caches of states, members and joined rooms. Invalidations name one key, a group of caches, or all keys (null).
    Transactions commit in any order of their IDs, roll back, and commit while a value is loaded. One reader uses the
    linear position, the other the vector."""
    second_connection.execute("rollback")
    rooms.execute("truncate rooms.rooms, rooms.state_groups, rooms.timeline, rooms.invalidations cascade")
    rooms.execute("truncate rooms.forward_extremities, rooms.backward_extremities")
    server = Server(rooms, second_connection)
    for room in QUICK_ROOMS:
        server.commit_quickly(room, "join @ada")
    readers = {is_linear: CachingReader() for is_linear in (True, False)}
    for number in range(data.draw(st.integers(3, 10))):
        action = data.draw(st.sampled_from(["commit", "commit", "open", "end", "undo"]))
        if action == "commit":
            server.commit_quickly(data.draw(st.sampled_from(QUICK_ROOMS)), data.draw(KINDS))
        elif action == "open":
            server.open(data.draw(KINDS))
        else:
            server.end("commit" if action == "end" else "rollback")
        is_linear = data.draw(st.booleans())
        reader = readers[is_linear]
        if data.draw(st.booleans()):
            apply_invalidations(server, reader, is_linear=is_linear)
        commit_while_loading = data.draw(st.booleans())

        def load(entry: Entry) -> Value:
            nonlocal commit_while_loading
            value = load_value(rooms, entry)
            if commit_while_loading:
                commit_while_loading = False
                server.commit_quickly(QUICK_ROOMS[0], f"join {MEMBER_NAMES[number % 3]}")  # noqa: B023 - called at once
                apply_invalidations(server, reader, is_linear=is_linear)  # noqa: B023 - the same
            return value

        for entry in ENTRIES:
            value = reader.caches.get(entry[0], [entry[1]], lambda entry=entry: load(entry))  # type: ignore[misc]
            assert value in [*allowed_values(server, reader, entry)], (entry, value, reader.applied)
    server.end("rollback")
