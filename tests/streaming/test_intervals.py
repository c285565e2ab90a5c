"""Interval sets, held against sets of IDs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals, PackedSteps, append_steps, last_bound
from tidemark.streaming.wire.records import MAX_ID

Pairs = list[tuple[int, int]]

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)).map(lambda it: (it[0], it[0] + it[1])), max_size=12)
points = st.integers(0, 50)


def ids(intervals: Intervals) -> set[int]:
    return {at for low, high in intervals for at in range(low + 1, high + 1)}


def is_normal(intervals: Intervals) -> bool:
    flat = [at for pair in intervals for at in pair]
    return flat == sorted(set(flat))


@given(pairs, pairs)
def test_a_union_holds_what_either_holds(one: Pairs, other: Pairs) -> None:
    """Whatever touches or overlaps is merged, in any order."""
    union = Intervals.of(one).union(Intervals.of(other))
    assert is_normal(union)
    assert ids(union) == ids(Intervals.of(one)) | ids(Intervals.of(other))
    assert union == Intervals.of([*other, *one])
    assert hash(union) == hash(Intervals.of([*other, *one]))
    assert union.width() == len(ids(union))


@given(st.lists(st.integers(1, 60)) | st.lists(st.integers(1, 60) | st.integers(1, MAX_ID)))
def test_single_ids_become_intervals(numbers: list[int]) -> None:
    """Each ID is the interval below it, and neighbours are one, whether they lie close together or far apart."""
    made = Intervals.from_ids(np.array(numbers, np.int64))
    assert is_normal(made)
    assert ids(made) == set(numbers)


@given(pairs, points, points)
def test_a_cut_keeps_what_lies_on_its_side(raw: Pairs, low: int, high: int) -> None:
    """`above`, `upto`, `within` and `missing` cut an interval that lies across."""
    made, low, high = Intervals.of(raw), min(low, high), max(low, high)
    held = ids(made)
    inside = set(range(low + 1, high + 1))
    for found, expected in [
        (made.above(low), {at for at in held if at > low}),
        (made.up_to(high), {at for at in held if at <= high}),
        (made.within(low, high), held & inside),
        (made.missing(low, high), inside - held),
    ]:
        assert is_normal(found)
        assert ids(found) == expected


@given(pairs, points)
def test_reach_goes_as_far_as_the_set_is_unbroken(raw: Pairs, position: int) -> None:
    """From the position on, over every ID that is in the set."""
    made, at = Intervals.of(raw), position
    while at + 1 in ids(made):
        at += 1
    assert made.contiguous_end(position) == at


def test_the_empty_set_holds_nothing() -> None:
    """No interval, no width, nothing to reach."""
    assert (
        len(NO_INTERVALS),
        NO_INTERVALS.width(),
        NO_INTERVALS.contiguous_end(3),
        [*NO_INTERVALS.union(NO_INTERVALS)],
    ) == (0, 0, 3, [])


def test_the_lowest_are_kept() -> None:
    """What a bound cuts off are the highest."""
    assert [*Intervals.of([(0, 1), (4, 5), (8, 9)]).lowest(2)] == [(0, 1), (4, 5)]


@given(pairs, st.sampled_from([1, 300, 10**12, 2**56 + 1]), st.sampled_from([0, 10**12, 2**62]))
def test_what_is_packed_comes_back(raw: Pairs, scale: int, first: int) -> None:
    """Whatever the bounds and the steps between them; equal sets give equal bytes."""
    intervals = Intervals.of((first + low * scale, first + high * scale) for low, high in raw)
    assert Intervals.unpack(intervals.pack()) == intervals
    assert Intervals.of(reversed([*intervals])).pack() == intervals.pack()


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 3)), max_size=6),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 3)), max_size=6),
    st.sampled_from([1, 300, 10**12]),
    st.sampled_from([1, 10**12]),
    st.integers(1, 8),
)
def test_packed_intervals_are_extended_as_sets_are(
    before: Pairs, after: Pairs, scale: int, other: int, most: int
) -> None:
    """Byte for byte, whatever falls away at the lower end, and where steps of another size come or go."""

    def spread(steps: Pairs, low: int, scale: int) -> Pairs:
        found = []
        for gap, width in steps:
            found.append((low + gap * scale, low + (gap + width) * scale))
            low = found[-1][1]
        return found

    known = spread(before, 0, scale)
    more = spread(
        [(max(gap, at and 1), width) for at, (gap, width) in enumerate(after)], max([0, *sum(known, ())]), other
    )
    packed, newest = Intervals.of(known).highest(most).pack(), Intervals.of(more).highest(most)
    wanted = Intervals.of(known).highest(most).union(Intervals.of(more)).highest(most)
    firsts = np.array([0, len(newest)])
    twice = [np.concatenate([it, it]) for it in (newest.lows, newest.highs)]
    for added in PackedSteps.split(twice[0], twice[1], firsts) if len(newest) else [None]:
        assert append_steps(packed, added, most) == wanted.pack()
    assert last_bound(wanted.pack()) == max([0, *sum(wanted, ())])


def test_packed_intervals_are_small() -> None:
    """Ten thousand near one another take four bytes each, wherever they are."""
    low = 10**15
    assert len(Intervals.of((low + 9 * at, low + 9 * at + 4) for at in range(10_000)).pack()) == 40_007
