"""Edges that compiled code arranges: as numpy's own sorting does, and no slower where they come in disorder."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemark.streaming.ingest.kernels import MAX_STEPS, sort_edges
from tidemark.streaming.ingest.record_batch import Edges


def made(groups: list[int], prevs: list[int]) -> Edges:
    """With a number of its own for each in every other column."""
    count = len(groups)
    numbers = np.arange(count)
    return Edges(
        np.array(groups, np.int64),
        (numbers % 3).astype(np.uint8),
        np.array(prevs, np.int64),
        np.array(prevs, np.int64) + 1,
        numbers + 100,
        numbers + 1000,
    )


def arranged(edges: Edges, groups: int) -> Edges | None:
    found = Edges.allocate(edges.size)
    return found if sort_edges(edges, found, np.zeros(groups + 2, np.int64), Edges.allocate(1)) else None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9) | st.just(2**63 - 2)), max_size=30))
def test_edges_stand_by_group_and_prev_and_else_as_they_came(pairs: list[tuple[int, int]]) -> None:
    """Every column of an edge goes along."""
    edges = made([group for group, _ in pairs], [prev for _, prev in pairs])
    found = arranged(edges, 4)
    assert found is not None
    wanted = edges.take(np.lexsort((edges.prevs, edges.writer_epochs)))
    assert [column.tolist() for column in found] == [column.tolist() for column in wanted]


def test_what_comes_backwards_is_left_to_others() -> None:
    """A writer whose edges come from the last to the first: each would be taken past all others."""
    count = 4 * MAX_STEPS
    assert arranged(made([0] * count, [*range(count, 0, -1)]), 1) is None
