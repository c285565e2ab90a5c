"""A source that was set back hands IDs out again, and an operator clears up after strangers."""

from tests.streaming.builders import Shard, forced, join, rdata, retire, skip


def set_back() -> Shard:
    """a stood at 10 and joins again at 7; b is at 5, and so is the line."""
    shard = Shard()
    shard.feed(join("b", 5), join("a", 10), join("a", 7, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 10, "b": 5}, 5)
    return shard


def test_the_line_does_not_pass_an_id_that_is_in_flight_again() -> None:
    """Rule 1: a's 8 was complete once, was taken back, and may be in flight again; its position says nothing of it."""
    shard = set_back()
    shard.feed(rdata("b", 12, 5, epoch=1))
    assert shard.linear == 7
    shard.feed(rdata("a", 9, 8, epoch=2))
    assert shard.linear == 7
    shard.feed(rdata("a", 8, 7, epoch=2))
    assert shard.linear == 9
    shard.feed(rdata("a", 11, 9, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 11, "b": 12}, 11)
    shard.feed(join("b", 12, 2))
    shard.feed(rdata("a", 12, 11, epoch=2))
    assert shard.linear == 12


def test_the_writer_is_named_for_which_the_line_waits() -> None:
    """Without a gap nobody else would say who holds the line back."""
    shard = set_back()
    done = shard.feed(rdata("b", 12, 5, epoch=1))
    assert done.summary.linear_lag is not None
    assert [(it.writer, it.position) for it in done.summary.linear_lag.blockers] == [("a", 7)]
    assert shard.feed(rdata("a", 12, 7, epoch=2)).summary.linear_lag is None


def test_an_operator_may_skip_an_id_that_does_not_come_again() -> None:
    """A SKIP of the range that was passed once already lets the line go on."""
    shard = set_back()
    shard.feed(rdata("b", 12, 5, epoch=1))
    assert shard.feed(skip("a", 7, 10, epoch=2)).counts == {"applied": 1}
    assert shard.linear == 10


def test_a_retirement_ends_the_waiting() -> None:
    """The writer says that all of it is complete and nothing follows."""
    shard = set_back()
    shard.feed(rdata("b", 12, 5, epoch=1), retire("a", 10, epoch=2), join("b", 12, 2))
    assert shard.linear == 12


def test_getting_rid_of_a_stranger_leaves_the_writer_alone() -> None:
    """Rule 9: garbage with a high epoch is thrown out as late; the writer that has joined goes on and is no zombie."""
    shard = Shard()
    shard.feed(join("a", 3), rdata("a", 9, 8, epoch=999), rdata("a", 4, 3, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 4}, 3)
    done = shard.feed(forced(retire("a", 9, epoch=999)))
    assert [(it.epoch, it.prev, it.id, it.facts, it.why) for it in done.late] == [(999, 8, 9, 1, "skipped")]
    shard.feed(rdata("a", 5, 4, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 5}, 5)


def test_getting_rid_of_nobody_is_refused() -> None:
    """An operator's RETIRE of an epoch that was never seen goes to the dead letters."""
    shard = Shard()
    shard.feed(join("a", 3))
    shard.feed(forced(retire("a", 3, epoch=7)))
    assert list(shard.rejected.values()) == ["unknown_writer"]
