"""Runs in packets: what is decoded is what was encoded, in columns that are as narrow as their numbers."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.streaming.core.fast_path import EdgeColumns
from tidemark.streaming.values.intervals import Intervals
from tidemark.streaming.wire.records import MAX_ID
from tidemark.streaming.wire.runs import POSITION, RDATA, VOID, PackedColumn, PackedRun, PackedRuns, Run, RunColumns


def _run(ids: list[int], kinds: list[int], offsets: list[int], *, start: int = 0, stream: str = "s") -> PackedRun:
    return PackedRun(
        stream,
        "w",
        1,
        1,
        start,
        np.array(ids, "<i8").tobytes(),
        np.array(kinds, np.uint8).tobytes(),
        np.array(offsets, "<u4").tobytes(),
        7,
        7 + max(offsets),
        1000,
        2000,
    )


@st.composite
def runs(draw: st.DrawFn) -> PackedRun:
    highest = draw(st.sampled_from([100, 1 << 16, 1 << 33, MAX_ID]))
    ids = sorted(draw(st.sets(st.integers(1, highest), min_size=1, max_size=20)))
    kinds = draw(st.lists(st.sampled_from([RDATA, VOID, POSITION]), min_size=len(ids), max_size=len(ids)))
    top = draw(st.sampled_from([10, (1 << 16) - 1, 1 << 16, (1 << 32) - 1]))
    offsets = draw(st.lists(st.integers(0, top), min_size=len(ids), max_size=len(ids)))
    if draw(st.booleans()):
        offsets = [offsets[0]] * len(ids)
    return _run(ids, kinds, offsets, start=draw(st.integers(0, ids[0] - 1)), stream=draw(st.sampled_from("ab")))


@given(st.lists(st.lists(runs(), max_size=5), max_size=4))
def test_packets_have_the_runs_that_were_packed(packets: list[list[PackedRun]]) -> None:
    encoded = [PackedRuns.of(packet) for packet in packets]
    assert [[*packed] for packed in encoded] == packets
    together = RunColumns.of(encoded)
    assert [together.run(at) for at in range(len(together))] == [run for packet in packets for run in packet]


@given(runs(), st.integers(1, 3))
def test_the_highest_empty_ranges_are_those_of_the_whole_run(packed: PackedRun, count: int) -> None:
    """Although most of the run is not looked at."""
    run = Run.unpack(packed)
    assert run.highest_empty(count) == run.empty().highest(count)


@given(st.lists(runs(), min_size=1, max_size=5), st.integers(1, 4))
def test_the_fast_path_finds_the_highest_empty_ranges_of_each_run(packed: list[PackedRun], count: int) -> None:
    """Although it reads only the last edges if the runs are long."""
    columns = RunColumns.of([PackedRuns.of(packed)])
    edges = EdgeColumns(columns.ids, columns.kinds, columns.rows["start"], columns.begins, np.array([0]))
    found = {
        number: Intervals.unpack(bytes([steps.step_bytes]) + steps.high.to_bytes(8, "little") + steps.steps)
        for number, steps in edges.empty_ranges(count)
    }
    expected = {number: Run.unpack(run).empty().highest(count) for number, run in enumerate(packed)}
    assert found == {number: ranges for number, ranges in expected.items() if len(ranges)}


def test_void_edges_take_little_memory_in_the_fast_path() -> None:
    """At most 24 bytes at a time for each edge, because a batch may have millions of edges without a fact."""
    count = 100_000
    ids, kinds = np.arange(1, count + 1), np.full(count, VOID, np.uint8)
    edges = EdgeColumns(ids, kinds, np.array([0]), np.array([0]), np.array([0]))
    tracemalloc.start()
    try:
        assert edges.count_facts_and_empty() == ([0], [count])
        ((_, ranges),) = edges.empty_ranges(32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (ranges.low, ranges.high) == (0, count)
    assert peak < 24 * count


def test_sums_of_many_runs_may_overflow() -> None:
    """Each run ends at the highest ID that there is."""
    many = [_run([1, MAX_ID], [RDATA, VOID], [0, 1]) for _ in range(5)]
    assert [*PackedRuns.of(many)] == many


@pytest.mark.parametrize(
    ("step", "width"),
    [(1, 1), ((1 << 8) - 1, 1), (1 << 8, 2), ((1 << 16) - 1, 2), (1 << 16, 4), ((1 << 32) - 1, 4), (1 << 32, 8)],
)
def test_columns_are_as_narrow_as_their_numbers(step: int, width: int) -> None:
    start = MAX_ID - 3 * step
    packed = PackedRuns.of([_run([start + step, start + 2 * step], [RDATA, RDATA], [0, 9], start=start)])
    assert (packed.steps.width, len(packed.steps.values), len(packed.offsets.values)) == (width, 2 * width, 2)
    assert len(PackedRuns.of([_run([1, 2], [RDATA, RDATA], [0, 1 << 16])]).offsets.values) == 8


def test_equal_numbers_of_neighbouring_edges_are_stored_once() -> None:
    """The edges of a RUN have the same offset, and most edges are facts."""
    count = 1000
    run = _run([*range(5, 5 + count)], [RDATA] * (count - 1) + [VOID], [300] * 600 + [301] * 400, start=4)
    packed = PackedRuns.of([run])
    assert packed.steps == PackedColumn(1, b"\x01", count.to_bytes(2, "little"))
    assert packed.kinds == PackedColumn(1, bytes([RDATA, VOID]), b"".join(n.to_bytes(2, "little") for n in (999, 1)))
    assert (packed.offsets.width, len(packed.offsets.values), len(packed.offsets.repeats)) == (2, 4, 4)
    assert [*packed] == [run]


@given(
    st.lists(st.tuples(st.integers(0, MAX_ID), st.integers(1, 300)), min_size=1, max_size=20),
    st.sampled_from(["<u1", "<u4", "<u8"]),
)
def test_columns_have_the_numbers_that_were_packed(groups: list[tuple[int, int]], dtype: str) -> None:
    numbers = np.repeat(np.array([number for number, _ in groups], "<u8").astype(dtype), [count for _, count in groups])
    column = PackedColumn.of(numbers)
    assert column.decode().tolist() == numbers.tolist()
    assert len(column.values) + len(column.repeats) <= numbers.nbytes
