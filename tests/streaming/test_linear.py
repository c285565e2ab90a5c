"""The linear position: both halves of its definition, and what holds it."""

from tests.streaming.builders import Shard, join, position, rdata, retire, void


def test_line_does_not_pass_an_announced_id_of_another_writer() -> None:
    """B announces 5 while A's 5 is in flight: B's position moves, the line stays at 4."""
    shard = Shard()
    shard.feed(join("A", 4), join("B", 4))
    shard.feed(position("B", 4, 5, epoch=1))
    assert (shard.positions, shard.linear) == ({"A": 4, "B": 5}, 4)
    shard.feed(rdata("A", 5, 4, epoch=1))
    assert shard.linear == 5


def test_line_moves_over_completed_ids_while_a_writer_is_slow_further_up() -> None:
    """The first half: every ID that completed, by whomever, needs no word of the others."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0))
    shard.feed(rdata("a", 1, 0, epoch=1), void("a", 1, 2, epoch=1), rdata("b", 3, 0, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 2, "b": 3}, 3)


def test_line_passes_ids_that_nobody_owns() -> None:
    """The second half: at or below the position of every writer there is nothing to wait for."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), position("a", 0, 7, epoch=1))
    assert shard.linear == 0
    shard.feed(rdata("b", 6, 0, epoch=1))
    assert shard.linear == 6


def test_a_pending_completion_bridges_the_line() -> None:
    """A completed ID counts for the line although its own writer is still held by a gap."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0))
    shard.feed(rdata("a", 2, 1, epoch=1), rdata("b", 1, 0, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 0, "b": 1}, 2)


def test_what_came_before_an_unknown_writer_still_moves_the_line() -> None:
    """In one batch as in two: the line stays where the records before the stranger's first one put it."""
    log = [join("a", 0), rdata("a", 1, epoch=1), rdata("stranger", 3, 2, epoch=1), rdata("a", 2, 1, epoch=1)]
    together, apart = Shard(), Shard()
    together.feed(*log)
    for record in log:
        apart.feed(record)
    assert together.linear == apart.linear == 1
    assert together.positions == apart.positions == {"a": 2}


def test_line_never_goes_back_for_a_writer_that_joins_below() -> None:
    """Rule 2: a late joiner below the line holds it where it is."""
    shard = Shard()
    shard.feed(join("a", 9))
    shard.feed(join("b", 3))
    assert shard.linear == 9
    shard.feed(rdata("a", 11, 9, epoch=1))
    assert shard.linear == 9
    shard.feed(retire("b", 3))
    assert shard.linear == 11


def test_allocated_is_the_highest_id_that_anybody_named() -> None:
    """Joined, pending, announced or of a writer that never joined: every ID up to there was allocated."""
    shard = Shard()
    assert shard.feed(join("a", 3)).allocated == 3
    assert shard.feed(rdata("a", 9, 7, epoch=1)).allocated == 9
    assert shard.feed(position("a", 9, 11, epoch=1)).allocated == 11
    assert shard.feed(rdata("stranger", 20, 19, epoch=4)).allocated == 20
    assert shard.feed(rdata("a", 5, 3, epoch=1)).allocated == 20
