"""Where reading starts, decided from what the topics are and what was remembered of them. No server needed."""

import pytest

from tidemark.common.errors import (
    PartitionsChanged,
    RecordsBeyondEnd,
    RecordsGone,
    Stop,
    TopicReplaced,
    WrongCleanupPolicy,
)
from tidemark.sources.topics import (
    Acceptance,
    Partition,
    TopicIdentity,
    TopicState,
    require_policy,
    starting_offsets,
)

AS_BEFORE = TopicIdentity("id-1", 2)


def topic(*partitions: tuple[int, int], name: str = "facts", policy: str = "delete") -> TopicState:
    return TopicState(name, "id-1", policy, tuple(Partition(earliest, end) for earliest, end in partitions))


def offsets(
    found: TopicState,
    before: TopicIdentity | None,
    stored: dict[int, int],
    accept: frozenset[Acceptance] = frozenset(),
) -> dict[int, int]:
    remembered = {} if before is None else {found.name: before}
    return starting_offsets({found.name: found}, remembered, {found.name: stored}, accept)[found.name]


def test_a_first_start_reads_every_partition_from_its_oldest_record() -> None:
    """Nothing remembered, nothing stored: all partitions are named, all start at the earliest offset."""
    assert offsets(topic((0, 9), (5, 5)), None, {}) == {0: 0, 1: 5}


def test_stored_offsets_are_kept_also_at_both_ends_of_what_the_partition_holds() -> None:
    """The next offset may be the oldest record, or the record that is not written yet."""
    assert offsets(topic((3, 9), (3, 9)), AS_BEFORE, {0: 3, 1: 9}) == {0: 3, 1: 9}


def test_a_partition_that_was_never_read_starts_at_its_oldest_record() -> None:
    """A stored offset of one partition says nothing of the others."""
    assert offsets(topic((0, 9), (0, 9)), AS_BEFORE, {1: 4}) == {0: 0, 1: 4}


@pytest.mark.parametrize(
    ("found", "before", "stored", "error"),
    [
        (topic((0, 9)), AS_BEFORE, {}, PartitionsChanged),
        (topic((0, 9), (0, 9), (0, 9)), AS_BEFORE, {}, PartitionsChanged),
        (topic((0, 9), (0, 9)), TopicIdentity("id-0", 2), {}, TopicReplaced),
        (topic((5, 9), (0, 9)), AS_BEFORE, {0: 4}, RecordsGone),
        (topic((0, 9), (0, 9)), AS_BEFORE, {1: 10}, RecordsBeyondEnd),
    ],
    ids=["fewer partitions", "more partitions", "another topic", "retention", "lost end"],
)
def test_what_would_lose_order_or_records_stops_the_start(
    found: TopicState, before: TopicIdentity, stored: dict[int, int], error: type[Stop]
) -> None:
    """Rule 5: nothing is passed over in silence; each cause has its own error with the procedure to follow."""
    with pytest.raises(error):
        offsets(found, before, stored)


def test_accepted_loss_reads_what_is_left_of_the_partition() -> None:
    """After retention, and after a lost end, the oldest record that still exists comes next; others keep theirs."""
    found = topic((5, 9), (2, 9))
    assert offsets(found, AS_BEFORE, {0: 4, 1: 3}, frozenset({"loss"})) == {0: 5, 1: 3}
    assert offsets(found, AS_BEFORE, {0: 6, 1: 12}, frozenset({"loss"})) == {0: 6, 1: 2}


def test_accepted_loss_of_a_whole_topic_forgets_the_offsets_of_the_old_one() -> None:
    """An offset of the deleted topic means nothing in the new one, even where it would fit."""
    assert offsets(topic((0, 9)), TopicIdentity("id-0", 2), {0: 4}, frozenset({"loss"})) == {0: 0}


def test_accepted_partitions_keep_the_offsets_of_those_that_were_there() -> None:
    """Old partitions go on where they stood and new ones are read whole."""
    found = topic((0, 9), (0, 9), (0, 9))
    accept: frozenset[Acceptance] = frozenset({"partitions"})
    assert offsets(found, AS_BEFORE, {0: 4, 1: 9}, accept) == {0: 4, 1: 9, 2: 0}


def test_accepting_one_thing_does_not_accept_the_other() -> None:
    """Lost records stay an error for who accepted a changed partition count, and the reverse."""
    with pytest.raises(RecordsGone):
        offsets(topic((5, 9)), AS_BEFORE, {0: 4}, frozenset({"partitions"}))
    with pytest.raises(PartitionsChanged):
        offsets(topic((0, 9)), AS_BEFORE, {0: 4}, frozenset({"loss"}))


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_is_refused(policy: str) -> None:
    """Compaction keeps the last record of a key, and the key is the stream."""
    with pytest.raises(WrongCleanupPolicy, match=policy):
        require_policy([topic((0, 9), policy=policy)])
