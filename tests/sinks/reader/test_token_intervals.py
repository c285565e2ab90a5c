"""Sets of IDs as text for people."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark import interval_text, parse_intervals
from tidemark.errors import BadToken
from tidemark.streaming.values.direction import DirectionName
from tidemark.streaming.values.intervals import Intervals

SETS = st.dictionaries(
    st.sampled_from(("first", "second-1", "a:b", "c,d", "5-7", "100%")),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5).map(
        lambda pairs: [*Intervals.of((low, low + width) for low, width in pairs)]
    ),
)


def test_text_reads_like_gtid_sets() -> None:
    """1 to 7 and 9 of one writer, 8 of another; the same with a minus on a backward stream."""
    sets = {"second": [(7, 8)], "first": [(0, 7), (8, 9)], "none": []}
    assert interval_text(sets) == "first:1-7:9,second:8"
    assert interval_text(sets, "backward") == "first:-1--7:-9,second:-8"


@given(SETS, st.sampled_from(get_args(DirectionName)))
def test_text_comes_back(sets: dict[str, list[tuple[int, int]]], direction: DirectionName) -> None:
    """Whatever the names are, what is printed is read again: the intervals of the core, without its arrays."""
    assert parse_intervals(interval_text(sets, direction)) == sets


def test_overlaps_are_merged() -> None:
    """A person may write ranges in any order, and a writer twice."""
    assert parse_intervals("w:5-9:1-5,w:10") == {"w": [(0, 10)]}


@pytest.mark.parametrize("text", ["first", "first:", ":1-7", "first:7-1", "first:0-3", "first:1-x", "a:1,b:-1", ","])
def test_other_text_is_refused(text: str) -> None:
    """What cannot be read is named."""
    with pytest.raises(BadToken):
        parse_intervals(text)
