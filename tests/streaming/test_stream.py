"""Edges of one writer: what moves its position, what waits, what is turned away."""

from tests.streaming.builders import Shard, join, position, rdata, row, void


def test_the_worked_example_of_the_design() -> None:
    """The table that opens the README: completions out of order hold the position back and release it, exactly so."""
    shard = Shard()
    shard.feed(join("shop", 1))
    assert shard.positions == {"shop": 1}
    expected = [(3, 2, 1), (2, 1, 3), (5, 4, 3), (4, 3, 5), (6, 5, 6)]
    for id, prev, then in expected:
        shard.feed(rdata("shop", id, prev, epoch=1))
        assert shard.positions == {"shop": then}
        assert shard.linear == then


def test_time_moves_nothing() -> None:
    """Rule 1: a gap is held for ever, however many batches and days go by; only evidence closes it."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 2, epoch=1))
    for _ in range(5):
        shard.now += 30 * 24 * 3600 * 1000
        done = shard.feed(row("a", 1))
        assert (done.advances, shard.positions, shard.linear) == ([], {"a": 0}, 0)
    shard.feed(void("a", 0, 1, epoch=1))
    assert shard.positions == {"a": 2}


def test_an_advance_says_how_each_of_its_ids_was_settled() -> None:
    """Rule 1: facts and voids count one, an announcement its width, and what lies inside an edge is another's."""
    shard = Shard()
    done = shard.feed(join("a", 2), rdata("a", 5, 2, epoch=1), void("a", 5, 9, epoch=1), position("a", 9, 20, epoch=1))
    (move,) = done.advances
    assert (move.prev, move.id) == (0, 20)
    assert (move.facts, move.empty, move.unseen, move.skipped) == (1, 2 + 1 + 11, 0, 0)


def test_evidence_of_what_waited_comes_with_the_advance_that_passes_it() -> None:
    """A pending edge is counted once: when the position passes it, batches later."""
    shard = Shard()
    held = shard.feed(join("a", 0), rdata("a", 3, 1, epoch=1))
    assert held.advances == []
    (move,) = shard.feed(rdata("a", 1, epoch=1)).advances
    assert (move.prev, move.id, move.facts) == (0, 3, 2)


def test_the_first_writer_of_epoch_zero_needs_no_join() -> None:
    """The quickest start: one record of a single writer, and its position moves from 0."""
    shard = Shard()
    shard.feed(rdata("shop", 1))
    assert (shard.positions, shard.linear) == ({"shop": 1}, 1)


def test_rows_of_a_fact_move_nothing() -> None:
    """`"id": "batch"` is counted; only the last row carries the number."""
    shard = Shard()
    done = shard.feed(row("shop"), row("shop"))
    assert (done.counts, done.advances) == ({"batch": 2}, [])
    shard.feed(rdata("shop", 1))
    assert shard.positions == {"shop": 1}


def test_an_edge_that_is_covered_is_a_duplicate() -> None:
    """Below the position, or inside a span that waits: counted, nothing moves."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 1, epoch=1), rdata("a", 5, 3, epoch=1))
    done = shard.feed(rdata("a", 1, epoch=1), rdata("a", 5, 3, epoch=1))
    assert (done.counts, done.advances) == ({"duplicate": 2}, [])


def test_an_edge_that_overlaps_in_part_is_a_conflict() -> None:
    """Whoever came first stays; the later one is rejected, and what it claimed stays open."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 5, 3, epoch=1))
    shard.feed(rdata("a", 4, 2, epoch=1), rdata("a", 7, 4, epoch=1), rdata("a", 8, 2, epoch=1))
    assert shard.rejected == {2: "conflict", 3: "conflict", 4: "conflict"}
    assert [*shard.stream().writers["a"].chain.gaps()] == [(0, 3, 1000)]


def test_backward_streams_count_down() -> None:
    """`backfill` goes -1, -2, ...: out of order as ever, and all that comes out is signed."""
    shard = Shard()
    shard.feed(join("a", -1), rdata("a", -3, -2, epoch=1))
    assert (shard.positions, shard.linear) == ({"a": -1}, -1)
    (move,) = shard.feed(rdata("a", -2, -1, epoch=1)).advances
    assert (move.prev, move.id, move.facts) == (-1, -3, 2)
    assert (shard.positions, shard.linear) == ({"a": -3}, -3)


def test_a_stream_never_mixes_signs() -> None:
    """The first signed ID decides; the other sign is rejected from edges and markers alike."""
    shard = Shard()
    shard.feed(rdata("shop", 1))
    shard.feed(rdata("shop", -1), join("b", -4))
    assert shard.rejected == {1: "mixed_sign", 2: "mixed_sign"}
