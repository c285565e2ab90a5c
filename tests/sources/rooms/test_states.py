"""State resolution and state groups: equal states share a group, chains are bounded, compaction changes no state."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sources.rooms.dags import ROOM, an_event, dags
from tests.sources.rooms.memory import MemoryRooms
from tidemark.sources.rooms.rules import (
    MAX_CHAIN_LENGTH,
    MemoryStateGroups,
    RoomEvent,
    State,
    StateEntry,
    StateGroup,
    compact_groups,
    resolve_states,
)

states = st.dictionaries(
    st.tuples(st.just("topic"), st.sampled_from("abc")),
    st.builds(StateEntry, st.integers(1, 3), st.sampled_from("xyz")),
)


@settings(max_examples=examples(60))
@given(states, states, states)
def test_the_order_of_resolution_does_not_matter(one: State, two: State, three: State) -> None:
    """The number of resolutions does not matter either."""
    assert resolve_states([one, two]) == resolve_states([two, one]) == resolve_states([one, two, one])
    assert resolve_states([resolve_states([one, two]), three]) == resolve_states([one, resolve_states([two, three])])


def test_a_group_is_new_only_if_the_state_changes() -> None:
    """A message has the group of its prev event. So has a merge of two forks if one fork has not changed the state."""
    rooms = MemoryRooms()
    root = an_event("root", key="a")
    left, right = an_event("left", root), an_event("right", root, key="b")
    both = an_event("both", left, right)
    for event in (root, left, right, both, an_event("after", both)):
        rooms.persist(event)
    groups = rooms.group_of
    assert groups["left"] == groups["root"] != groups["right"] == groups["both"] == groups["after"]
    assert len(rooms.rooms[ROOM].groups.stored) == 2


def test_chains_stay_short_and_need_few_rows() -> None:
    """After 1,000 changes of 300 keys no chain is too long, and at most 9 groups store a whole state."""
    rooms = MemoryRooms()
    event = an_event("e0", key="k0")
    for number in range(1, 1001):
        rooms.persist(event)
        event = an_event(f"e{number}", event, key=f"k{number % 300}")
    groups = rooms.rooms[ROOM].groups
    assert max(len(groups.chain(group)) for group in groups.stored) == MAX_CHAIN_LENGTH
    assert sum(len(state_group.delta) for state_group in groups.stored.values()) < 1000 + 9 * 300


@settings(max_examples=examples(60))
@given(dags(40), st.randoms(use_true_random=False), st.integers(0, 100))
def test_compaction_changes_no_state(events: list[RoomEvent], random: object, share: int) -> None:
    """The remaining groups keep their states, need no more rows, and have no longer chains."""
    rooms = MemoryRooms()
    for event in events:
        rooms.persist(event)
    before = rooms.rooms[ROOM].groups
    used = {group for group in before.stored if group * 37 % 101 <= share}
    after = MemoryStateGroups(compact_groups(before.stored, used))
    assert used <= after.stored.keys() <= before.stored.keys()
    assert {group: after.state(group) for group in after.stored} == {
        group: before.state(group) for group in after.stored
    }
    assert rows(after) <= rows(before)
    assert all(len(after.chain(group)) <= len(before.chain(group)) for group in after.stored)
    assert compact_groups(after.stored, used) == after.stored


def test_compaction_keeps_a_group_that_is_the_base_of_several() -> None:
    """Group 2 is unused, but is the base of 3 and 4, which would both store its rows. Group 5 is merged into 6."""
    keys = {("topic", str(number)): StateEntry(1, "e") for number in range(20)}
    own = {number: {("topic", "x"): StateEntry(number, "e")} for number in range(1, 7)}
    chains = {
        1: StateGroup(None, own[1], 1),
        2: StateGroup(1, keys, 2),
        3: StateGroup(2, own[3], 3),
        4: StateGroup(2, own[4], 3),
    }
    after = compact_groups(chains | {5: StateGroup(4, own[5], 4), 6: StateGroup(5, own[6], 5)}, {1, 3, 4, 6})
    assert {number: state_group.base_number for number, state_group in after.items()} == {
        1: None,
        2: 1,
        3: 2,
        4: 2,
        6: 4,
    }
    assert rows(MemoryStateGroups(after)) == 24


def test_compaction_cuts_chains_that_are_too_long() -> None:
    """A chain of 299 groups is cut into chains of at most `MAX_CHAIN_LENGTH`."""
    long = {
        number: StateGroup(number - 1 or None, {("topic", str(number % 7)): StateEntry(number, "e")}, number)
        for number in range(1, 3 * MAX_CHAIN_LENGTH)
    }
    after = MemoryStateGroups(compact_groups(long, long.keys()))
    assert max(len(after.chain(group)) for group in after.stored) <= MAX_CHAIN_LENGTH
    assert {group: after.state(group) for group in long} == {
        group: MemoryStateGroups(long).state(group) for group in long
    }


def rows(groups: MemoryStateGroups) -> int:
    return sum(len(state_group.delta) for state_group in groups.stored.values())
