"""The events that `sync` returns to members who join, leave and are banned, compared with the definitions."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING, examples
from tests.sources.rooms.dags import MEMBER_NAMES, ROOM, arrivals, expected_deliveries
from tests.sources.rooms.test_persisting import SQL_STORE, STORE, a_member
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.persisting import SqlAppender, choose_prevs_and_depth
from tidemark.sources.rooms.reading import VectorPosition, sync
from tidemark.sources.rooms.rules import EventKind, RoomEvent


@dataclass
class Writers:
    """Two writers: `web` writes in short transactions; `service` reserves an ID long before it writes.

    Attributes:
        quick: the connection of `web`.
        slow: the connection of `service`.
        reserved_id: the ID that `service` has reserved; None if it has no open transaction.
    """

    quick: Connection
    slow: Connection
    reserved_id: int | None = None

    def reserve(self) -> None:
        if self.reserved_id is None:
            self.slow.execute("begin")
            self.reserved_id = SqlAppender("service").reserve(self.slow, "events")

    def persist(self, event: RoomEvent, expected: ExpectedRoom, *, late: bool) -> None:
        before = [entry.id for entry in expected.state_before(event).values()]
        for id in {*before} - tables.load_events(self.quick, before).keys():
            STORE.persist(self.quick, replace(expected.all_events[id], kind=EventKind.OUTLIER))
        if late and self.reserved_id is not None:
            SQL_STORE.persist(self.slow, event, state_ids_before=before, reserved_id=self.reserved_id)
            self.end()
        else:
            STORE.persist(self.quick, event, state_ids_before=before)

    def end(self) -> None:
        if self.reserved_id is not None:
            self.slow.execute("commit")
            self.reserved_id = None

    def position(self, *, is_linear: bool) -> VectorPosition:
        """The position that Tidemark would publish."""
        ((last,),) = self.quick.execute("select coalesce(max(stream_ordering), 0) from rooms.timeline").fetchall()
        if self.reserved_id is None:
            return VectorPosition(last)
        return (
            VectorPosition(self.reserved_id - 1) if is_linear else VectorPosition(self.reserved_id - 1, {"web": last})
        )


@dataclass
class SyncingMember:
    """A member who syncs by linear positions or by vectors.

    Attributes:
        name: the member.
        is_linear: whether it uses linear positions.
        since: the position of the last answer.
        received: the events in order of receipt, each as (ID, whether it is the end of a stay).
        rooms: the rooms of the last answer.
    """

    name: str
    is_linear: bool
    since: VectorPosition = field(default_factory=lambda: VectorPosition(0))
    received: list[tuple[str, bool]] = field(default_factory=list)
    rooms: list[str] = field(default_factory=list)

    def sync(self, connection: Connection, now: VectorPosition, limit: int) -> bool:
        result = sync(connection, self.name, self.since, now, limit)
        self.received += [(row.event, False) for row in result.events]
        self.received += [(row.event, True) for row in result.ended_stays]
        self.since, self.rooms = result.until, [*result.rooms]
        return len(result.events) >= limit

    def require_correct(self, expected_rows: list[tuple[str, bool]]) -> None:
        """Each event was received once, and no event of a stay after the end of the stay."""
        assert sorted(self.received) == sorted(expected_rows)
        ends = [
            [place for place, (_, over) in enumerate(received) if over] for received in (self.received, expected_rows)
        ]
        for end, expected_end in zip(*ends, strict=True):
            assert {*expected_rows[: expected_end + 1]} <= {*self.received[: end + 1]}


@settings(max_examples=examples(15), suppress_health_check=SHARING)
@given(arrivals(), st.data())
def test_a_member_receives_its_stays_and_their_ends_despite_slow_writers(
    rooms: Connection, second_connection: Connection, case: tuple[list[RoomEvent], list[RoomEvent]], data: st.DataObject
) -> None:
    """Random rooms with members who join, leave and are banned, and IDs that are reserved long before. Members sync by
    linear positions and by vectors, at any time and with any limit."""
    second_connection.execute("rollback")
    rooms.execute("truncate rooms.rooms, rooms.state_groups, rooms.timeline, rooms.invalidations cascade")
    rooms.execute("truncate rooms.forward_extremities, rooms.backward_extremities")
    everything, order = case
    expected, writers = ExpectedRoom(everything, {}), Writers(rooms, second_connection)
    members = [SyncingMember(name, is_linear) for name in MEMBER_NAMES for is_linear in (True, False)]
    for event in order:
        if data.draw(st.booleans()):
            writers.reserve()
        writers.persist(event, expected, late=data.draw(st.booleans()))
        member = data.draw(st.sampled_from(members))
        member.sync(rooms, writers.position(is_linear=member.is_linear), data.draw(st.sampled_from([1, 3, 100])))
    writers.end()
    for member in members:
        while member.sync(rooms, writers.position(is_linear=True), 3):
            pass
        expected_rows = expected_deliveries(expected, [event.id for event in order], member.name)
        member.require_correct(expected_rows)
        expected_at_end = ExpectedRoom(everything, {event.id: event.kind for event in order})
        stays = expected_at_end.compute_stays((event.id, turn) for turn, event in enumerate(order))
        assert member.rooms == [ROOM for name, _, ended, _ in stays if name == member.name and ended is None]


@pytest.fixture
def tea_room(rooms: Connection) -> Connection:
    """A database with a room that @ada (ID 1) and @bob (ID 2) have joined."""
    ada = a_member("ada", "@ada")
    for event in (ada, a_member("bob", "@bob", ada)):
        STORE.persist(rooms, event)
    return rooms


def send_message(connection: Connection, id: str, reserved_id: int | None = None) -> int | None:
    prevs, depth = choose_prevs_and_depth(connection, ROOM)
    event = RoomEvent(id, ROOM, "m", "@ada", prevs, depth)
    return (SQL_STORE if reserved_id else STORE).persist(connection, event, reserved_id=reserved_id)


def change_membership(connection: Connection, id: str, membership: str) -> int | None:
    prevs, depth = choose_prevs_and_depth(connection, ROOM)
    event = a_member(id, "@bob", membership=membership)
    return STORE.persist(connection, replace(event, prevs=prevs, depth=depth))


@pytest.mark.parametrize("membership", ["leave", "ban", "invite"])
def test_the_end_of_a_stay_is_returned_once(tea_room: Connection, membership: str) -> None:
    """A leave, a ban or an invite ends the stay. The member receives no later events of the room."""
    since = sync(tea_room, "@bob", VectorPosition(0), VectorPosition(2)).until
    end = change_membership(tea_room, "end", membership)
    assert end == 3
    send_message(tea_room, "unheard")
    result = sync(tea_room, "@bob", since, VectorPosition(5))
    assert ([row.event for row in result.events], [row.event for row in result.ended_stays]) == (["end"], ["end"])
    assert (result.rooms, result.out_of_band) == ([], [])
    after = sync(tea_room, "@bob", result.until, VectorPosition(5))
    assert (after.events, after.ended_stays, after.rooms) == ([], [], [])
    assert [row.event for row in sync(tea_room, "@ada", since, VectorPosition(5)).events] == ["end", "unheard"]
    assert not sync(tea_room, "@ada", since, VectorPosition(5)).ended_stays


def test_the_end_waits_for_a_slow_writers_event_of_the_stay(
    tea_room: Connection, second_connection: Connection
) -> None:
    """By vector, the leave event is returned at once. The end of the stay is returned when the linear position has
    passed it."""
    second_connection.execute("begin")
    slow = SqlAppender("service").reserve(second_connection, "events")
    assert send_message(second_connection, "slow", slow) == slow == 3
    waiting = sync(tea_room, "@bob", VectorPosition(2), VectorPosition(2, {"web": 2}))
    assert not waiting.events
    second_connection.execute("commit")
    assert change_membership(tea_room, "end", "leave") == 4
    result = sync(tea_room, "@bob", waiting.until, VectorPosition(2, {"web": 5}))
    assert ([row.event for row in result.events], result.ended_stays, result.rooms) == (["end"], [], [])
    result = sync(tea_room, "@bob", result.until, VectorPosition(5))
    assert ([row.event for row in result.events], [row.event for row in result.ended_stays]) == (["slow"], ["end"])


def test_an_event_after_a_kick_is_not_returned_even_with_a_lower_id(
    tea_room: Connection, second_connection: Connection
) -> None:
    """The ID was reserved before the kick. The order in which the events were persisted decides."""
    second_connection.execute("begin")
    slow = SqlAppender("service").reserve(second_connection, "events")
    assert change_membership(tea_room, "end", "leave") == 4
    send_message(second_connection, "after-the-kick", slow)
    second_connection.execute("commit")
    assert [row.event for row in sync(tea_room, "@bob", VectorPosition(0), VectorPosition(5)).events] == ["bob", "end"]
    assert [row.event for row in sync(tea_room, "@ada", VectorPosition(0), VectorPosition(5)).events] == [
        "ada",
        "bob",
        "after-the-kick",
        "end",
    ]


def test_a_member_who_rejoins_receives_events_from_the_join_on(tea_room: Connection) -> None:
    """The events between the stays are not returned. The answer has the end of the first stay, and lists the room."""
    for id, membership in (("end", "leave"), ("again", "join")):
        change_membership(tea_room, id, membership)
        send_message(tea_room, f"after-{id}")
    result = sync(tea_room, "@bob", VectorPosition(2), VectorPosition(7))
    assert [row.event for row in result.events] == ["end", "again", "after-again"]
    assert ([row.event for row in result.ended_stays], result.rooms) == (["end"], [ROOM])
    assert sync(tea_room, "@bob", result.until, VectorPosition(7)).ended_stays == []


def test_a_leave_known_only_from_a_received_state_ends_the_stay(tea_room: Connection) -> None:
    """The leave is an outlier, so it is in no timeline. The event whose state contains the leave ends the stay."""
    gone = replace(a_member("gone", "@bob", membership="leave"), prevs=("unknown",), depth=8)
    STORE.persist(tea_room, replace(gone, kind=EventKind.OUTLIER))
    far = replace(gone, id="far", type="m", state_key=None, content={}, prevs=("bob", "gone"), depth=9)
    STORE.persist(tea_room, far, state_ids_before=["ada", "gone"])
    result = sync(tea_room, "@bob", VectorPosition(2), VectorPosition(4))
    assert ([row.event for row in result.events], [row.event for row in result.ended_stays]) == (["far"], ["gone"])
