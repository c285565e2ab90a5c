"""What members are told by sync of rooms that they join, leave and are thrown out of, against the definitions."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import SHARING, examples
from tests.sources.rooms.dags import MEMBER_NAMES, ROOM, arrivals, told_by_definition
from tests.sources.rooms.test_persisting import OWN, STORE, a_member
from tidemark.app.simulation.expected_room import ExpectedRoom
from tidemark.common.postgres_session import Connection
from tidemark.sources.rooms import tables
from tidemark.sources.rooms.persisting import SqlAppender, next_prevs_and_depth
from tidemark.sources.rooms.reading import VectorPosition, sync
from tidemark.sources.rooms.rules import EventKind, RoomEvent


@dataclass
class Arriving:
    """A writer in quick transactions, and one that has reserved an ID before, in a transaction that stays open."""

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
            STORE.persist(self.quick, replace(expected.all_events[id], held_as=EventKind.OUTLIER))
        if late and self.reserved_id is not None:
            OWN.persist(self.slow, event, given=before, reserved_id=self.reserved_id)
            self.end()
        else:
            STORE.persist(self.quick, event, given=before)

    def end(self) -> None:
        if self.reserved_id is not None:
            self.slow.execute("commit")
            self.reserved_id = None

    def position(self, *, by_line: bool) -> VectorPosition:
        """As Tidemark would publish it."""
        ((last,),) = self.quick.execute("select coalesce(max(stream_ordering), 0) from rooms.timeline").fetchall()
        if self.reserved_id is None:
            return VectorPosition(last)
        return VectorPosition(self.reserved_id - 1) if by_line else VectorPosition(self.reserved_id - 1, {"web": last})


@dataclass
class SyncingMember:
    """`told`: events, and (True) those that ended a stay, in the order in which they came."""

    name: str
    by_line: bool
    since: VectorPosition = field(default_factory=lambda: VectorPosition(0))
    told: list[tuple[str, bool]] = field(default_factory=list)
    rooms: list[str] = field(default_factory=list)

    def sync(self, connection: Connection, now: VectorPosition, limit: int) -> bool:
        found = sync(connection, self.name, self.since, now, limit)
        self.told += [(it.event, False) for it in found.events]
        self.told += [(it.event, True) for it in found.ended_stays]
        self.since, self.rooms = found.until, [*found.rooms]
        return len(found.events) >= limit

    def require_right(self, wanted: list[tuple[str, bool]]) -> None:
        """Everything once, and nothing of a stay behind its end."""
        assert sorted(self.told) == sorted(wanted)
        ends = [[place for place, (_, over) in enumerate(told) if over] for told in (self.told, wanted)]
        for end, wanted_end in zip(*ends, strict=True):
            assert {*wanted[: wanted_end + 1]} <= {*self.told[: end + 1]}


@settings(max_examples=examples(15), suppress_health_check=SHARING)
@given(arrivals(), st.data())
def test_a_member_is_told_its_stays_and_their_ends_whoever_is_slow(
    rooms: Connection, another: Connection, given: tuple[list[RoomEvent], list[RoomEvent]], data: st.DataObject
) -> None:
    """Random rooms with members who join, leave and are banned; IDs that are reserved long before; readers by line and
    by vector who ask at any time for any number of events."""
    another.execute("rollback")
    rooms.execute("truncate rooms.rooms, rooms.state_groups, rooms.timeline, rooms.invalidations cascade")
    rooms.execute("truncate rooms.forward_extremities, rooms.backward_extremities")
    everything, order = given
    expected, arriving = ExpectedRoom(everything, {}), Arriving(rooms, another)
    members = [SyncingMember(name, by_line) for name in MEMBER_NAMES for by_line in (True, False)]
    for event in order:
        if data.draw(st.booleans()):
            arriving.reserve()
        arriving.persist(event, expected, late=data.draw(st.booleans()))
        member = data.draw(st.sampled_from(members))
        member.sync(rooms, arriving.position(by_line=member.by_line), data.draw(st.sampled_from([1, 3, 100])))
    arriving.end()
    for member in members:
        while member.sync(rooms, arriving.position(by_line=True), 3):
            pass
        wanted = told_by_definition(expected, [event.id for event in order], member.name)
        member.require_right(wanted)
        held = ExpectedRoom(everything, {event.id: event.held_as for event in order})
        stays = held.stays((event.id, turn) for turn, event in enumerate(order))
        assert member.rooms == [ROOM for name, _, ended, _ in stays if name == member.name and ended is None]


@pytest.fixture
def tea(rooms: Connection) -> Connection:
    """A room that @ada (1) and @bob (2) have joined."""
    ada = a_member("ada", "@ada")
    for event in (ada, a_member("bob", "@bob", ada)):
        STORE.persist(rooms, event)
    return rooms


def say(connection: Connection, id: str, reserved_id: int | None = None) -> int | None:
    prevs, depth = next_prevs_and_depth(connection, ROOM)
    event = RoomEvent(id, ROOM, "m", "@ada", prevs, depth)
    return (OWN if reserved_id else STORE).persist(connection, event, reserved_id=reserved_id)


def become(connection: Connection, id: str, membership: str) -> int | None:
    prevs, depth = next_prevs_and_depth(connection, ROOM)
    event = a_member(id, "@bob", membership=membership)
    return STORE.persist(connection, replace(event, prevs=prevs, depth=depth))


@pytest.mark.parametrize("membership", ["leave", "ban", "invite"])
def test_a_room_that_was_left_is_shown_once_more_with_the_event_that_ended_it(tea: Connection, membership: str) -> None:
    """A leave, a kick, a ban, whatever is no join: told once, and nothing of the room after it."""
    since = sync(tea, "@bob", VectorPosition(0), VectorPosition(2)).until
    end = become(tea, "end", membership)
    assert end == 3
    say(tea, "unheard")
    found = sync(tea, "@bob", since, VectorPosition(5))
    assert ([it.event for it in found.events], [it.event for it in found.ended_stays]) == (["end"], ["end"])
    assert (found.rooms, found.out_of_band) == ([], [])
    after = sync(tea, "@bob", found.until, VectorPosition(5))
    assert (after.events, after.ended_stays, after.rooms) == ([], [], [])
    assert [it.event for it in sync(tea, "@ada", since, VectorPosition(5)).events] == ["end", "unheard"]
    assert not sync(tea, "@ada", since, VectorPosition(5)).ended_stays


def test_the_end_waits_for_a_slow_writers_event_of_the_stay(tea: Connection, another: Connection) -> None:
    """By vector the leave itself comes at once; that it is over, when nothing of before can come any more."""
    another.execute("begin")
    slow = SqlAppender("service").reserve(another, "events")
    assert say(another, "slow", slow) == slow == 3
    waiting = sync(tea, "@bob", VectorPosition(2), VectorPosition(2, {"web": 2}))
    assert not waiting.events
    another.execute("commit")
    assert become(tea, "end", "leave") == 4
    found = sync(tea, "@bob", waiting.until, VectorPosition(2, {"web": 5}))
    assert ([it.event for it in found.events], found.ended_stays, found.rooms) == (["end"], [], [])
    found = sync(tea, "@bob", found.until, VectorPosition(5))
    assert ([it.event for it in found.events], [it.event for it in found.ended_stays]) == (["slow"], ["end"])


def test_what_was_written_after_a_kick_is_not_told_whatever_its_id(tea: Connection, another: Connection) -> None:
    """The ID was reserved before; the order in which the room was changed decides."""
    another.execute("begin")
    slow = SqlAppender("service").reserve(another, "events")
    assert become(tea, "end", "leave") == 4
    say(another, "behind-the-back", slow)
    another.execute("commit")
    assert [it.event for it in sync(tea, "@bob", VectorPosition(0), VectorPosition(5)).events] == ["bob", "end"]
    assert [it.event for it in sync(tea, "@ada", VectorPosition(0), VectorPosition(5)).events] == ["ada", "bob", "behind-the-back", "end"]


def test_who_comes_back_is_told_from_there_on(tea: Connection) -> None:
    """Not what was said meanwhile; the room is among those of the member, though its first stay is over."""
    for id, membership in (("end", "leave"), ("again", "join")):
        become(tea, id, membership)
        say(tea, f"after-{id}")
    found = sync(tea, "@bob", VectorPosition(2), VectorPosition(7))
    assert [it.event for it in found.events] == ["end", "again", "after-again"]
    assert ([it.event for it in found.ended_stays], found.rooms) == (["end"], [ROOM])
    assert sync(tea, "@bob", found.until, VectorPosition(7)).ended_stays == []


def test_a_leave_that_we_hear_of_in_a_state_alone_is_told_all_the_same(tea: Connection) -> None:
    """Held as an outlier, it is in no timeline; the event whose state says so ends the stay."""
    gone = replace(a_member("gone", "@bob", membership="leave"), prevs=("unknown",), depth=8)
    STORE.persist(tea, replace(gone, held_as=EventKind.OUTLIER))
    far = replace(gone, id="far", type="m", state_key=None, content={}, prevs=("bob", "gone"), depth=9)
    STORE.persist(tea, far, given=["ada", "gone"])
    found = sync(tea, "@bob", VectorPosition(2), VectorPosition(4))
    assert ([it.event for it in found.events], [it.event for it in found.ended_stays]) == (["far"], ["gone"])
