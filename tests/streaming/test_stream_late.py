"""What operators force, and what completes after that."""

from dataclasses import replace

import pytest

from tests.streaming.builders import Record, Shard, forced, join, position, rdata, retire, skip, void
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.wire.records import CURRENT_EPOCH


def late(done: StreamEffects) -> list[tuple[str, int, int, int, str]]:
    return [(it.writer, it.prev, it.id, it.facts, it.why) for it in done.late]


@pytest.fixture
def shard() -> Shard:
    """Writer a stands at 0; (0, 5] is open, 6 waits."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 6, 5, epoch=1))
    return shard


def test_a_skip_settles_what_is_open_and_is_told_with_its_reason(shard: Shard) -> None:
    """Rule 1: the only way over an ID without evidence is an operator's audited act."""
    done = shard.feed(skip("a", 0, 5))
    (move,) = done.advances
    assert (move.prev, move.id, move.facts, move.skipped) == (0, 6, 1, 5)
    assert [(it.kind, it.prev, it.id, it.by, it.why) for it in done.overrides] == [("SKIP", 0, 5, "ann", "because")]
    assert [(it.top, it.how) for it in done.closed] == [(5, "skipped")]
    assert shard.linear == 6


def test_completions_inside_a_skip_are_late_and_do_not_vanish(shard: Shard) -> None:
    """Rule 5: facts and voids are told as late, an announcement is a duplicate; no position moves."""
    shard.feed(skip("a", 0, 5))
    done = shard.feed(rdata("a", 2, 0, epoch=1), void("a", 2, 3, epoch=1), position("a", 3, 5, epoch=1))
    assert late(done) == [("a", 0, 3, 1, "skipped")]
    assert done.counts == {"late": 2, "duplicate": 1}
    assert done.advances == []


def test_an_edge_across_the_end_of_a_skip_counts_beyond_it(shard: Shard) -> None:
    """A skip in the middle of an edge: the fact lies outside, so it is a fact and not late."""
    shard.feed(rdata("a", 20, 15, epoch=1), skip("a", 6, 10))
    done = shard.feed(rdata("a", 15, 8, epoch=1))
    assert (late(done), done.counts) == ([], {"applied": 1})
    assert shard.positions == {"a": 0}
    shard.feed(skip("a", 0, 5))
    assert shard.positions == {"a": 20}


def test_an_edge_into_a_skip_is_late_and_settles_what_lies_before_it(shard: Shard) -> None:
    """The fact lies inside, so it is late; that its writer owns nothing before it is evidence as ever."""
    shard.feed(skip("a", 3, 5))
    done = shard.feed(rdata("a", 4, 0, epoch=1))
    assert late(done) == [("a", 0, 4, 1, "skipped")]
    assert shard.positions == {"a": 6}


def test_a_join_forgets_what_was_skipped(shard: Shard) -> None:
    """The next epoch has a new beginning: its JOIN says that nothing is in the old range, so a fact there denies it."""
    shard.feed(skip("a", 0, 5))
    shard.feed(join("a", 6, epoch=2))
    assert late(shard.feed(rdata("a", 2, 0, epoch=2))) == [("a", 1, 2, 1, "announced")]
    assert shard.feed(rdata("a", 2, 0, epoch=2)).counts == {"duplicate": 1}


def test_skips_of_unknown_zombie_and_retired_writers_are_refused(shard: Shard) -> None:
    """An operator who names the wrong incarnation is told, and nothing changes, not even the stream's sign."""
    shard.feed(join("r", 0), retire("r", 3))
    shard.feed(skip("nobody", 0, 5), skip("a", 0, 5, epoch=0), skip("a", 0, 5, epoch=2), skip("r", 3, 5))
    assert shard.rejected == {4: "unknown_writer", 5: "zombie", 6: "unknown_writer", 7: "conflict"}
    other = Shard()
    other.feed(skip("a", -1, -3))
    other.feed(join("a", 4))
    assert (other.rejected, other.positions) == ({}, {"a": 4})


def test_an_act_without_an_epoch_means_the_writer_as_it_lives_now(shard: Shard) -> None:
    """An operator need not look an epoch up: joined, else the newest that is held; the audit names it."""
    shard.feed(join("a", 6, epoch=7), rdata("a", 9, 8, epoch=7), rdata("b", 9, 8, epoch=3), rdata("b", 8, epoch=2))
    done = shard.feed(skip("a", 6, 8, epoch=CURRENT_EPOCH), forced(join("b", 7, epoch=CURRENT_EPOCH)))
    assert [(it.kind, it.writer, it.epoch) for it in done.overrides] == [("SKIP", "a", 7), ("JOIN", "b", 3)]
    assert (shard.rejected, shard.positions) == ({}, {"a": 9, "b": 7})
    shard.feed(retire("a", 9, epoch=7), rdata("a", 12, 9, epoch=8))
    (act,) = shard.feed(forced(retire("a", 12, epoch=CURRENT_EPOCH))).overrides
    assert (act.epoch, [*shard.stream().unjoined]) == (8, [])


@pytest.mark.parametrize("act", [skip("a", 0, 7), forced(retire("a", 7)), forced(join("a", 7, epoch=2))])
def test_an_act_beyond_what_is_allocated_is_refused_unless_it_says_so(shard: Shard, act: Record) -> None:
    """A mistyped ID moves nothing: a position would pass facts that nobody has written yet, and never come back."""
    done = shard.feed(act)
    assert (shard.rejected, done.overrides, shard.positions) == ({2: "beyond_allocated"}, [], {"a": 0})
    done = shard.feed(replace(act, beyond=True))
    assert (shard.rejected, len(done.overrides), shard.positions) == ({}, 1, {"a": 7})


@pytest.mark.parametrize("restarts", [True, False])
def test_past_a_skip_that_went_too_far_facts_count_again(restarts: bool, shard: Shard) -> None:
    """docs/how-to/runbooks/join.md: once the sequence is past the ID, nothing is late and no timeline begins."""
    far = 2_000_000_000
    shard.feed(join("b", 6), rdata("b", 7, 6, epoch=1), skip("a", 0, far, beyond=True))
    assert late(shard.feed(rdata("a", 8, 6, epoch=1))) == [("a", 6, 8, 1, "skipped")]
    if restarts:
        done = shard.feed(join("a", far, epoch=2), rdata("a", far + 1, far, epoch=2))
    else:
        done = shard.feed(rdata("a", far + 1, 8, epoch=1))
    assert (late(done), done.timelines, shard.positions) == ([], [], {"a": far + 1, "b": 7})
    done = shard.feed(rdata("b", far + 2, 7, epoch=1))
    assert (late(done), done.timelines, shard.linear) == ([], [], far + 2)


def test_what_the_facts_of_its_batch_allocate_an_act_may_settle(shard: Shard) -> None:
    """Operators' records come after the facts, whatever their offset."""
    shard.feed(skip("a", 0, 9), rdata("a", 9, 8, epoch=1))
    assert (shard.rejected, shard.positions) == ({}, {"a": 9})


def test_a_skip_of_nothing_open_is_a_duplicate(shard: Shard) -> None:
    """Repeated, it changes nothing, but stays in the audit."""
    shard.feed(skip("a", 0, 5))
    done = shard.feed(skip("a", 0, 5))
    assert (done.counts, done.advances, len(done.overrides)) == ({"duplicate": 1}, [], 1)


def test_what_the_facts_of_a_batch_settle_needs_no_force() -> None:
    """An operator's record comes after the facts of its batch, whatever its offset: evidence beats force."""
    shard = Shard()
    done = shard.feed(join("a", 0), skip("a", 0, 5), rdata("a", 5, 0, epoch=1))
    (move,) = done.advances
    assert (move.facts, move.skipped, done.late) == (1, 0, [])


def test_a_forced_join_skips_and_begins_an_epoch() -> None:
    """Without its writer's evidence what it settles is skipped, and late afterwards."""
    shard = Shard()
    shard.feed(join("a", 0))
    (move,) = shard.feed(forced(join("a", 4, epoch=2), beyond=True)).advances
    assert (move.epoch, move.skipped) == (2, 4)
    assert late(shard.feed(rdata("a", 3, 2, epoch=2))) == [("a", 2, 3, 1, "skipped")]


def test_an_edge_across_a_forced_retire_is_held() -> None:
    """Rule 9: the writer lives on beyond its RETIRE, so its record waits and holds the line."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 9), forced(retire("a", 4)))
    assert shard.linear == 9
    done = shard.feed(rdata("a", 12, 2, epoch=1), rdata("b", 20, 9, epoch=1))
    assert done.counts == {"applied": 1, "buffered": 1}
    assert (shard.positions, shard.linear) == ({"a": 4, "b": 20}, 9)
