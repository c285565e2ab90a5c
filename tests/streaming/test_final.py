"""Rule 10: what is settled is final; whatever contradicts it is late, counted and told, and never a mere duplicate."""

import pytest

from tests.streaming.builders import Record, Shard, join, position, rdata, void
from tidemark.streaming.core.chain import EMPTY_RANGES_MAX
from tidemark.streaming.core.effects import StreamEffects


def late(done: StreamEffects) -> list[tuple[str, int, int, int, str]]:
    return [(it.writer, it.prev, it.id, it.facts, it.why) for it in done.late]


def test_one_id_of_two_writers_is_late_for_the_second() -> None:
    """Rule 10: the lower offset counts; the other one moves its writer's position all the same."""
    shard = Shard()
    done = shard.feed(join("a", 0), join("b", 0), rdata("b", 3, 2, epoch=1), rdata("a", 3, 0, epoch=1))
    assert late(done) == [("a", 0, 3, 1, "final")]
    assert done.counts == {"applied": 3, "late": 1}
    assert shard.positions == {"a": 3, "b": 0}


def test_an_id_that_the_line_has_passed_is_late() -> None:
    """Rule 10: c completes 3 although the line stands at 4: no protocol allows it, and linear readers are beyond it."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), position("a", 0, 4, epoch=1), rdata("b", 1, 0, epoch=1))
    shard.feed(void("b", 1, 4, epoch=1))
    assert shard.linear == 4
    done = shard.feed(rdata("a", 5, 4, epoch=1), join("c", 2), rdata("c", 3, 2, epoch=1))
    assert late(done) == [("c", 2, 3, 1, "final")]
    assert shard.positions == {"a": 5, "b": 4, "c": 3}


@pytest.mark.parametrize("said", [position("a", 0, 5, epoch=1), void("a", 0, 5, epoch=1), join("a", 5, 2)])
def test_a_fact_where_its_writer_said_there_is_none_is_late_once(said: Record) -> None:
    """Rule 10: a forked process's fact was announced as empty by its parent; readers have passed it."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), said)
    fact = rdata("a", 5, 0, epoch=2 if said.kind == "JOIN" else 1)
    assert late(shard.feed(fact)) == [("a", 4, 5, 1, "announced")]
    assert shard.feed(fact).counts == {"duplicate": 1}


@pytest.mark.parametrize("kind", ["VOID", "RDATA"])
@pytest.mark.parametrize("together", [True, False])
def test_a_fact_inside_an_edge_of_its_own_writer_is_late_once(kind: str, *, together: bool) -> None:
    """Rule 10: the edge said that none of the IDs between are the writer's, and readers have passed them."""
    shard = Shard()
    shard.feed(join("w", 0), rdata("w", 1, 0, epoch=1))
    edge, fact = Record(kind, "w", 1, 1, 4), rdata("w", 2, 1, epoch=1)
    if together:
        done = shard.feed(edge, fact)
        assert done.counts == {"applied": 1, "late": 1}
    else:
        shard.feed(edge)
        done = shard.feed(fact)
        assert done.counts == {"late": 1}
    assert late(done) == [("w", 1, 2, 1, "announced")]
    assert (shard.positions, shard.linear) == ({"w": 4}, 4)
    assert shard.feed(fact, edge).counts == {"duplicate": 2}


def test_a_fact_inside_an_edge_that_waits_is_late_too() -> None:
    """Rule 10: a gap below the edge changes nothing; and so it is of a writer that has not joined."""
    shard = Shard()
    shard.feed(join("w", 0), rdata("w", 9, 5, epoch=1), rdata("x", 9, 5, epoch=1))
    assert late(shard.feed(rdata("w", 7, 6, epoch=1))) == [("w", 6, 7, 1, "announced")]
    assert late(shard.feed(rdata("x", 7, 6, epoch=1))) == [("x", 6, 7, 1, "announced")]


def test_a_fact_inside_an_edge_of_the_epoch_before_is_late() -> None:
    """Rule 10: a JOIN takes none of it back."""
    shard = Shard()
    shard.feed(join("w", 0), rdata("w", 4, 0, epoch=1), join("w", 4, 2))
    assert late(shard.feed(rdata("w", 2, 1, epoch=2))) == [("w", 1, 2, 1, "announced")]


def test_a_fact_that_was_told_before_is_a_duplicate() -> None:
    """At-least-once producers send twice: that is no contradiction, whatever was announced behind it."""
    shard = Shard()
    fact = rdata("a", 3, 0, epoch=1)
    shard.feed(join("a", 0), fact, position("a", 3, 9, epoch=1), void("a", 9, 10, epoch=1))
    done = shard.feed(fact, void("a", 9, 10, epoch=1), position("a", 3, 9, epoch=1))
    assert (late(done), done.counts) == ([], {"duplicate": 3})


def test_what_was_declared_empty_is_kept_within_a_bound() -> None:
    """Rule 8: the newest ranges of each writer; neighbours are one range."""
    shard = Shard()
    shard.feed(join("a", 0), position("a", 0, 3, epoch=1), position("a", 3, 7, epoch=1))
    assert list(shard.stream().writers["a"].chain.empty_ranges) == [(0, 7)]
    for at in range(8, 8 + 4 * EMPTY_RANGES_MAX, 4):  # by announcements, and by what lies inside facts' edges
        said = position("a", at, at + 3, epoch=1) if at % 8 else rdata("a", at + 4, at, epoch=1)
        shard.feed(rdata("a", at, at - 1, epoch=1), said)
    kept = shard.stream().writers["a"].chain.empty_ranges
    assert len(kept) == EMPTY_RANGES_MAX
    assert next(iter(kept)) == (8, 11)
