"""One writer's chain: spans, gaps and their age, and what is told of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streaming.builders import Shard, join, rdata, skip
from tidemark.streaming.core.chain import NO_POSITION, Chain, Span
from tidemark.streaming.values.limits import Evidence

FACT = Evidence(facts=1)


def settled(chain: Chain, *edges: tuple[int, int], since: int = 0) -> Chain:
    for prev, id in edges:
        chain.settle(prev, id, FACT, 1, "completed", since)
    return chain


def test_a_gap_that_is_split_hands_its_age_to_both_parts() -> None:
    """Rule 7: an edge in the middle of an old gap makes no new gap of either half."""
    chain = settled(Chain(), (9, 10), since=100)
    settled(chain, (4, 5), since=700)
    assert [*chain.gaps()] == [(0, 4, 100), (5, 9, 100)]


def test_a_gap_that_narrows_keeps_its_age() -> None:
    """Rule 7: from below, from above, or because the position moved up to it."""
    chain = settled(Chain(), (2, 3), (9, 10), since=100)
    settled(chain, (3, 4), (8, 9), (0, 1), since=700)
    assert [*chain.gaps()] == [(1, 2, 100), (4, 8, 100)]


def test_a_gap_beyond_all_others_is_new() -> None:
    """It counts from the batch in which it was first seen."""
    chain = settled(settled(Chain(), (2, 3), since=100), (8, 9), since=700)
    assert [*chain.gaps()] == [(0, 2, 100), (3, 8, 700)]


def test_gap_ages_survive_every_batch() -> None:
    """Rule 7: the clock lives in the state, so a restart (decode and encode) does not set it back."""
    shard = Shard()
    opened = shard.feed(join("a", 0), rdata("a", 5, 4, epoch=1))
    assert [(it.low, it.top, it.since) for it in opened.gaps] == [(0, 4, 1000)]
    later = shard.feed(rdata("a", 1, epoch=1), rdata("a", 3, 2, epoch=1))
    assert [(it.low, it.top, it.since) for it in later.gaps] == [(1, 2, 1000), (3, 4, 1000)]
    assert later.summary.oldest_blocker is not None
    assert later.summary.oldest_blocker.since == 1000


def test_gaps_of_a_writer_that_joins_late_count_from_their_first_sight() -> None:
    """Rule 7: what was held for an unknown writer was seen when it was held, not when its JOIN came."""
    shard = Shard()
    shard.feed(rdata("a", 5, 4, epoch=1))
    shard.feed(rdata("a", 9, 8, epoch=1))
    done = shard.feed(join("a", 2))
    assert [(it.low, it.top, it.since) for it in done.gaps] == [(2, 4, 1000), (5, 8, 2000)]


def test_a_gap_that_comes_and_goes_in_a_batch_is_not_told() -> None:
    """Effects say what a batch did, not by which steps."""
    shard = Shard()
    shard.feed(join("a", 0))
    done = shard.feed(rdata("a", 2, epoch=1), rdata("a", 1, epoch=1))
    assert (done.gaps, done.closed) == ([], [])


def test_a_gap_that_is_closed_and_opened_again_in_a_batch_is_told_as_both() -> None:
    """The source went back and the same ID waits anew: the old gap is closed, and the new one has an age of its own."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 9, 8, epoch=1))
    done = shard.feed(join("a", 5, epoch=2), rdata("a", 9, 8, epoch=2))
    assert [(it.low, it.top, it.since) for it in done.gaps] == [(5, 8, 2000)]
    assert [(it.top, it.how) for it in done.closed] == [(8, "joined")]


def test_a_cut_divides_a_span_and_closes_only_gaps_that_were() -> None:
    """The lower part keeps its gap; counts cannot be divided, so each part carries at most its width."""
    chain = settled(Chain(), (4, 5), (5, 6), (6, 9), (12, 13))
    chain.take_changes()
    gone = chain.cut_above(5)
    assert [(it.prev, it.id, it.evidence.facts) for it in gone] == [(5, 9, 3), (12, 13, 1)]
    assert [(it.prev, it.id, it.evidence.facts) for it in chain.pending] == [(4, 5, 1)]
    assert chain.take_changes().closed_gaps == {12: "joined"}


def test_nothing_joins_a_chain_that_never_began() -> None:
    """Without a JOIN not even an edge from 0 is a position."""
    chain = settled(Chain(NO_POSITION), (0, 3))
    assert chain.position == NO_POSITION
    assert [(it.prev, it.id) for it in chain.pending] == [(0, 3)]


@pytest.mark.parametrize(
    ("edge", "expected"), [((0, 1), True), ((6, 7), True), ((3, 4), True), ((2, 3), False), ((7, 8), False)]
)
def test_an_edge_adjoins_what_it_touches(edge: tuple[int, int], expected: bool) -> None:
    """The position, a span's end or a span's beginning: only an edge that touches none of them adds a span."""
    chain = Chain(0, [Span(4, 6, FACT, 1, 0)])
    assert chain.adjoins(*edge) is expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=25))
def test_a_chain_is_the_set_of_what_was_settled(edges: list[tuple[int, int]]) -> None:
    """Position, spans, gaps and what is missing: as a set of IDs would say."""
    chain = Chain()
    ids: set[int] = set()
    for prev, width in edges:
        wanted = set(range(prev + 1, prev + width + 1))
        missing = chain.open_ranges(prev, prev + width)
        assert {at for low, high in missing for at in range(low + 1, high + 1)} == wanted - ids
        covered = chain.settled_ranges(prev, prev + width)
        assert {at for low, high in covered for at in range(low + 1, high + 1)} & wanted == wanted & ids
        settled(chain, *missing)
        ids |= wanted
    spans = {at for span in chain.pending for at in range(span.prev + 1, span.id + 1)}
    assert spans | set(range(1, chain.position + 1)) == ids
    assert chain.position + 1 not in ids
    assert all(low < high for low, high, _ in chain.gaps())


def test_a_dead_range_of_a_hundred_million_costs_one_step() -> None:
    """FIELD lesson 5: skipped as one range, late as one range, and the state does not grow with its width."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 10**8 + 1, 10**8, epoch=1))
    done = shard.feed(skip("a", 0, 10**8))
    assert shard.positions == {"a": 10**8 + 1}
    assert len(done.state) < 100
