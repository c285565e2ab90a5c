"""Writers that come and go: JOIN, RETIRE, epochs, zombies, and those that never joined."""

from tests.streaming.builders import Shard, forced, join, position, rdata, retire, row, void
from tidemark.streaming.core.effects import StreamEffects


def moves(done: StreamEffects) -> list[tuple[str, int, int, int, int, int, int]]:
    return [(it.writer, it.prev, it.id, it.facts, it.empty, it.unseen, it.skipped) for it in done.advances]


def test_a_join_keeps_what_waited_and_settles_the_rest_as_empty() -> None:
    """Facts are facts: the pending ones of the epoch before count as facts, what it left open as empty."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1))
    done = shard.feed(join("a", 5, epoch=2))
    assert moves(done) == [("a", 0, 5, 1, 4, 0, 0)]
    assert [(it.top, it.how) for it in done.closed] == [(2, "joined")]


def test_a_join_of_a_writer_without_an_outbox_leaves_its_range_unseen() -> None:
    """`unseen: true`: readers are told to look, also where a pending fact is known."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1))
    assert moves(shard.feed(join("a", 5, epoch=2, unseen=True))) == [("a", 0, 5, 1, 0, 4, 0)]


def test_what_was_refused_is_never_called_empty() -> None:
    """A fact was rejected as a conflict: what the next JOIN settles up to its ID may hold it, so it counts unseen."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 1, epoch=1), rdata("a", 6, 2, epoch=1))
    assert shard.rejected == {2: "conflict"}
    assert moves(shard.feed(join("a", 9, epoch=2))) == [("a", 0, 9, 1, 3, 4, 0)]


def test_a_retire_does_not_call_empty_what_was_refused() -> None:
    """The same for the other marker by which a writer settles what is open."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 1, epoch=1), rdata("a", 6, 2, epoch=1))
    assert moves(shard.feed(retire("a", 9))) == [("a", 0, 9, 1, 3, 4, 0)]


def test_records_of_an_earlier_epoch_are_zombies() -> None:
    """After the JOIN of epoch 2 nothing of epoch 1 is applied, whatever its kind."""
    shard = Shard()
    shard.feed(join("a", 0, epoch=2))
    shard.feed(rdata("a", 1, epoch=1), row("a", 1), join("a", 4, epoch=1), retire("a", 4, epoch=1))
    assert shard.rejected == dict.fromkeys(range(1, 5), "zombie")
    assert shard.positions == {"a": 0}


def test_a_second_join_of_an_epoch_is_a_duplicate_or_a_conflict() -> None:
    """An epoch begins once: repeated it changes nothing, and it cannot carry the position further."""
    shard = Shard()
    shard.feed(join("a", 3))
    assert shard.feed(join("a", 3), join("a", 3)).counts == {"duplicate": 2}
    shard.feed(join("a", 4))
    assert shard.rejected == {3: "conflict"}
    assert shard.positions == {"a": 3}


def test_an_unknown_writer_is_held_and_holds_the_line() -> None:
    """Rule 9: records of a writer that never joined wait, and the line with them, while other positions move."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 1, epoch=1))
    done = shard.feed(rdata("b", 2, epoch=1), rdata("a", 3, 1, epoch=1))
    assert done.counts == {"applied": 1, "buffered": 1}
    assert done.summary.unknown_writers == ["b/1"]
    assert (shard.positions, shard.linear) == ({"a": 3}, 1)
    done = shard.feed(join("b", 3))
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 3}, 3)
    assert moves(done) == [("b", 0, 3, 1, 2, 0, 0)]


def test_a_second_writer_of_epoch_zero_is_unknown() -> None:
    """Epoch 0 without a JOIN is for a single writer; the next one must join."""
    shard = Shard()
    shard.feed(rdata("a", 1))
    shard.feed(rdata("b", 2))
    assert (shard.positions, shard.linear) == ({"a": 1}, 1)
    shard.feed(join("b", 2, epoch=0), position("a", 1, 2))
    assert (shard.positions, shard.linear) == ({"a": 2, "b": 2}, 2)


def test_an_epoch_ahead_of_its_join_is_unknown() -> None:
    """The writer of epoch 1 goes on; what came of epoch 2 waits for its JOIN and keeps its place."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 5, 4, epoch=2), rdata("a", 1, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 1}, 0)
    shard.feed(join("a", 4, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 5}, 5)


def test_rows_of_an_unknown_writer_hold_the_line_too() -> None:
    """A row shows that its writer lives, and so may reserve IDs that nobody announced."""
    shard = Shard()
    shard.feed(join("a", 0), row("b", 1), rdata("a", 1, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 1}, 0)


def test_a_retired_writer_holds_nothing_back() -> None:
    """RETIRE settles what is open and takes the writer out of the line's second half."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), rdata("a", 2, 0, epoch=1), rdata("a", 9, 2, epoch=1))
    assert shard.linear == 0
    done = shard.feed(retire("b", 1))
    assert moves(done) == [("b", 0, 1, 0, 1, 0, 0)]
    assert shard.linear == 9


def test_with_no_writer_left_the_line_goes_to_the_highest_position() -> None:
    """All have retired: nobody can still write below."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), retire("a", 7), retire("b", 4))
    assert shard.linear == 7


def test_a_retire_below_a_pending_edge_is_a_conflict() -> None:
    """The writer contradicts itself: it stays, and goes on holding the line."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 5, 4, epoch=1))
    shard.feed(retire("a", 3))
    assert shard.rejected == {2: "conflict"}
    assert (shard.positions, shard.linear) == ({"a": 0}, 0)


def test_a_second_retire_is_a_duplicate_or_a_conflict() -> None:
    """It cannot carry the position of a retired writer further."""
    shard = Shard()
    shard.feed(join("a", 0), retire("a", 3))
    assert shard.feed(retire("a", 3)).counts == {"duplicate": 1}
    shard.feed(retire("a", 4))
    assert shard.rejected == {3: "conflict"}


def test_a_retired_writer_that_goes_on_is_unknown_again() -> None:
    """Rule 9: what lies beyond its RETIRE is held and holds the line, until its next JOIN."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), retire("a", 3))
    shard.feed(rdata("a", 4, 3, epoch=1), rdata("b", 9, 0, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 3, "b": 9}, 0)
    shard.feed(join("a", 8, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 8, "b": 9}, 9)


def test_an_operator_retires_a_writer_that_went_on() -> None:
    """Its completions count as facts, and the line is free again without a new epoch."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 9), retire("a", 3), rdata("a", 5, 4, epoch=1))
    shard.feed(position("b", 9, 12, epoch=1))
    assert shard.linear == 9
    done = shard.feed(forced(retire("a", 6)))
    assert moves(done) == [("a", 3, 6, 1, 0, 0, 2)]
    assert shard.linear == 12


def test_the_retire_of_an_unknown_writer_waits_for_its_join() -> None:
    """It has said nothing that may move a position: held, and counted once."""
    shard = Shard()
    shard.feed(join("a", 0))
    assert shard.feed(retire("b", 4)).counts == {"buffered": 1}
    assert (shard.positions, shard.linear) == ({"a": 0}, 0)
    assert shard.feed(join("b", 2), retire("a", 1)).counts == {"applied": 2}
    assert (shard.positions, shard.linear) == ({"a": 1, "b": 4}, 4)


def test_an_operators_retire_gets_rid_of_an_unknown_writer() -> None:
    """What it completed is kept as evidence, the rest counts as skipped, and the line is free."""
    shard = Shard()
    shard.feed(join("a", 9), rdata("b", 3, 2, epoch=1))
    done = shard.feed(forced(retire("b", 4)))
    assert moves(done) == [("b", 0, 4, 1, 0, 0, 3)]
    assert shard.linear == 9


def test_a_refused_retire_of_an_operator_changes_nothing() -> None:
    """Below what the unknown writer completed it is a conflict, and the writer stays unknown."""
    shard = Shard()
    shard.feed(join("a", 9), rdata("b", 3, 2, epoch=1))
    before = shard.states["events"]
    shard.feed(forced(retire("b", 2)))
    assert shard.rejected == {2: "conflict"}
    assert shard.states["events"] == before


def test_a_join_below_the_position_moves_nothing_back() -> None:
    """Rule 2: a database restored from a backup raises a regress; what is written again is late until it passes."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 8, 0, epoch=1))
    done = shard.feed(join("a", 5, epoch=2))
    assert [(it.id, it.position) for it in done.timelines] == [(5, 8)]
    assert (done.advances, shard.positions, shard.linear) == ([], {"a": 8}, 8)
    done = shard.feed(rdata("a", 6, 5, epoch=2), void("a", 6, 7, epoch=2), rdata("a", 10, 7, epoch=2))
    assert [(it.prev, it.id, it.facts, it.why) for it in done.late] == [(5, 7, 1, "regressed")]
    assert moves(done) == [("a", 8, 10, 1, 0, 0, 0)]


def test_what_waited_beyond_a_join_that_went_back_is_late() -> None:
    """Completions that the restored database does not know leave the chain, are told, and their IDs may come again."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 9, 8, epoch=1))
    done = shard.feed(join("a", 5, epoch=2))
    assert [(it.epoch, it.prev, it.id, it.facts, it.why) for it in done.late] == [(1, 8, 9, 1, "regressed")]
    assert done.counts == {"applied": 1, "forgotten": 1}
    assert shard.positions == {"a": 5}
    shard.feed(rdata("a", 9, 5, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 9}, 9)


def test_a_writer_that_retired_and_joins_again_in_one_batch_holds_the_line() -> None:
    """It has IDs of its own again, from its JOIN on."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), retire("a", 0), join("a", 0, epoch=2), rdata("b", 5, 0, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": 0, "b": 5}, 0)
