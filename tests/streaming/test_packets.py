"""Runs in packets: what is decoded is what was encoded, in columns that are as narrow as their numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.streaming.wire.records import MAX_ID
from tidemark.streaming.wire.runs import POSITION, RDATA, VOID, PackedRun, PackedRuns, RunColumns


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
    return _run(ids, kinds, offsets, start=draw(st.integers(0, ids[0] - 1)), stream=draw(st.sampled_from("ab")))


@given(st.lists(st.lists(runs(), max_size=5), max_size=4))
def test_packets_have_the_runs_that_were_packed(packets: list[list[PackedRun]]) -> None:
    encoded = [PackedRuns.of(packet) for packet in packets]
    assert [[*packed] for packed in encoded] == packets
    together = RunColumns.of(encoded)
    assert [together.run(at) for at in range(len(together))] == [run for packet in packets for run in packet]


def test_sums_of_many_runs_may_overflow() -> None:
    """Each run ends at the highest ID that there is."""
    many = [_run([1, MAX_ID], [RDATA, VOID], [0, 1]) for _ in range(5)]
    assert [*PackedRuns.of(many)] == many


@pytest.mark.parametrize(
    ("step", "width"), [(1, 2), ((1 << 16) - 1, 2), (1 << 16, 4), ((1 << 32) - 1, 4), (1 << 32, 8)]
)
def test_columns_are_as_narrow_as_their_numbers(step: int, width: int) -> None:
    start = MAX_ID - 3 * step
    packed = PackedRuns.of([_run([start + step, start + 2 * step], [RDATA, RDATA], [0, 9], start=start)])
    assert (len(packed.steps), len(packed.offsets)) == (2 * width, 4)
    assert len(PackedRuns.of([_run([1, 2], [RDATA, RDATA], [0, 1 << 16])]).offsets) == 8
