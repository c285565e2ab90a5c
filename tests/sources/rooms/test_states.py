"""Resolution, and state groups: equal states share a group, chains are bounded, compaction changes no state."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sources.rooms.dags import ROOM, an_event, dags
from tests.sources.rooms.memory import MemoryRooms
from tidemark.sources.rooms.rules import (
    LONGEST_CHAIN,
    KeyHolder,
    MemoryGroups,
    Placed,
    RoomEvent,
    State,
    compacted,
    resolved,
)

states = st.dictionaries(
    st.tuples(st.just("topic"), st.sampled_from("abc")), st.builds(KeyHolder, st.integers(1, 3), st.sampled_from("xyz"))
)


@settings(max_examples=examples(60))
@given(states, states, states)
def test_the_order_of_resolution_does_not_matter(one: State, two: State, three: State) -> None:
    """Nor how often a state is resolved."""
    assert resolved([one, two]) == resolved([two, one]) == resolved([one, two, one])
    assert resolved([resolved([one, two]), three]) == resolved([one, resolved([two, three])])


def test_a_group_is_new_only_where_the_state_changes() -> None:
    """Messages share the group of what they follow; so does one that merges forks of which one has changed nothing."""
    rooms = MemoryRooms()
    root = an_event("root", key="a")
    left, right = an_event("left", root), an_event("right", root, key="b")
    both = an_event("both", left, right)
    for event in (root, left, right, both, an_event("after", both)):
        rooms.persist(event)
    groups = rooms.group_of
    assert groups["left"] == groups["root"] != groups["right"] == groups["both"] == groups["after"]
    assert len(rooms.rooms[ROOM].groups.stored) == 2


def test_chains_keep_their_bound_and_few_rows() -> None:
    """A thousand changes of ten keys: no chain is too long, and there is less than one whole state for each hundred."""
    rooms = MemoryRooms()
    event = an_event("e0", key="k0")
    for number in range(1, 1001):
        rooms.persist(event)
        event = an_event(f"e{number}", event, key=f"k{number % 300}")
    groups = rooms.rooms[ROOM].groups
    assert max(len(groups.chain(group)) for group in groups.stored) == LONGEST_CHAIN
    assert sum(len(placed.delta) for placed in groups.stored.values()) < 1000 + 9 * 300


@settings(max_examples=examples(60))
@given(dags(40), st.randoms(use_true_random=False), st.integers(0, 100))
def test_compaction_changes_no_state(events: list[RoomEvent], random: object, share: int) -> None:
    """Of any groups that are used: they have the states that they had, in no more rows, on no longer chains."""
    rooms = MemoryRooms()
    for event in events:
        rooms.persist(event)
    before = rooms.rooms[ROOM].groups
    used = {group for group in before.stored if group * 37 % 101 <= share}
    after = MemoryGroups(compacted(before.stored, used))
    assert used <= after.stored.keys() <= before.stored.keys()
    assert {group: after.state(group) for group in after.stored} == {
        group: before.state(group) for group in after.stored
    }
    assert rows(after) <= rows(before)
    assert all(len(after.chain(group)) <= len(before.chain(group)) for group in after.stored)
    assert compacted(after.stored, used) == after.stored


def test_compaction_keeps_a_group_on_which_several_stand() -> None:
    """Nobody uses 2, whose rows would be written twice without it; 5 goes into the one group that stands on it."""
    keys = {("topic", str(number)): KeyHolder(1, "e") for number in range(20)}
    own = {number: {("topic", "x"): KeyHolder(number, "e")} for number in range(1, 7)}
    chains = {1: Placed(None, own[1], 1), 2: Placed(1, keys, 2), 3: Placed(2, own[3], 3), 4: Placed(2, own[4], 3)}
    after = compacted(chains | {5: Placed(4, own[5], 4), 6: Placed(5, own[6], 5)}, {1, 3, 4, 6})
    assert {number: placed.base for number, placed in after.items()} == {1: None, 2: 1, 3: 2, 4: 2, 6: 4}
    assert rows(MemoryGroups(after)) == 24


def test_compaction_cuts_chains_that_are_too_long() -> None:
    """As another version may have stored them."""
    long = {
        number: Placed(number - 1 or None, {("topic", str(number % 7)): KeyHolder(number, "e")}, number)
        for number in range(1, 3 * LONGEST_CHAIN)
    }
    after = MemoryGroups(compacted(long, long.keys()))
    assert max(len(after.chain(group)) for group in after.stored) <= LONGEST_CHAIN
    assert {group: after.state(group) for group in long} == {group: MemoryGroups(long).state(group) for group in long}


def rows(groups: MemoryGroups) -> int:
    return sum(len(placed.delta) for placed in groups.stored.values())
