"""The writers that have joined: what is packed answers as if it were open, and a batch opens only what it touches."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.builders import STREAM, Record, Sent, Shard, join, packets, packing, position, rdata, retire
from tidemark.streaming.core.batch import StreamBatch
from tidemark.streaming.core.chain import Chain
from tidemark.streaming.core.effects import blockers
from tidemark.streaming.core.store import States, group_by_stream
from tidemark.streaming.core.writer_table import BlockingWriter, PackedTable, StoredWriter, Writers
from tidemark.streaming.core.writers import WriterState
from tidemark.streaming.values.limits import NO_EVIDENCE, Bounds
from tidemark.streaming.wire.runs import UNBOUNDED, RunColumns

Tracer = Callable[[FrameType, str, Any], Any]
NAMES = [f"writer-{number}" for number in range(12)]
acts = st.lists(
    st.tuples(
        st.sampled_from(["add", "advance", "wait", "retire", "return", "fall back", "drop", "mark_uncertain", "pack"]),
        st.sampled_from(NAMES),
        st.integers(1, 5),
    ),
    max_size=60,
)


@settings(max_examples=examples(300))
@given(acts, st.integers(0, 3))
def test_packed_writers_answer_like_open_ones(steps: list[tuple[str, str, int]], few: int) -> None:
    """Whatever happens to single writers: all answers are those of a plain dict, which knows no packing."""
    with packing(few):
        writers, plain = Writers(), dict[str, WriterState]()
        for now, (act, name, number) in enumerate(steps):
            if act == "pack":
                writers = packed_again(writers)
            elif act == "mark_uncertain":
                writers.mark_uncertain()
                for writer in plain.values():
                    writer.chain.mark_uncertain_up_to(UNBOUNDED)
            elif act == "add" and name not in plain:
                plain[name], writers[name] = WriterState(number, Chain(number)), WriterState(number, Chain(number))
            elif name in plain:
                if act == "drop":
                    del plain[name], writers[name]
                else:
                    change(plain[name], act, number, now)
                    change(writers[name], act, number, now)
                    writers.refresh_floor(name)
            assert_like(writers, plain, line=number, before=now - number)
        again = packed_again(writers)
        assert {name: StoredWriter.of(name, it) for name, it in again.items()} == {
            name: StoredWriter.of(name, it) for name, it in plain.items()
        }


def packed_again(writers: Writers) -> Writers:
    opened, active, retired, waiting = writers.pack()
    active, retired = (PackedTable(it.columns.tobytes(), it.rows) for it in (active, retired))
    return Writers(opened, active, retired, waiting)


def change(writer: WriterState, act: str, number: int, now: int) -> None:
    chain = writer.chain
    if act == "advance":
        chain.settle(chain.position, chain.position + number, NO_EVIDENCE, 0, "completed", now)
    elif act == "wait" and not chain.pending:
        chain.settle(chain.position + number, chain.position + number + 1, NO_EVIDENCE, 1, "completed", now)
    elif act == "retire":
        writer.retired_at = writer.retired_at or now + 1
    elif act == "return":
        writer.retired_at = None
    elif act == "fall back" and not chain.pending:
        writer.published_position = max(writer.published_position, chain.position)
        chain.restart_at(max(0, chain.position - number))


def assert_like(writers: Writers, plain: dict[str, WriterState], line: int, before: int) -> None:
    active = {name: it.chain.position for name, it in plain.items() if it.retired_at is None}
    assert len(writers) == len(plain)
    assert writers.floor() == min(active.values(), default=None)
    assert writers.highest_settled() == max((it.chain.highest_settled for it in plain.values()), default=0)
    standing = sorted(BlockingWriter.of(name, plain[name]) for name in active if active[name] <= line)
    assert writers.blocking_writers(line, 2) == (standing[:2], len(standing))
    passed = sorted((it.retired_at, name) for name, it in plain.items() if it.retired_at and it.position <= line)
    expected = [name for at, (since, name) in enumerate(passed) if at < len(passed) - 2 or since <= before]
    assert writers.find_expired(line, 2, before, ()) == expected


def crowd(joining: int, retiring: int) -> Shard:
    shard = Shard()
    names = [f"w{number:05}" for number in range(joining)]
    shard.feed(*(join(name, 5) for name in names))
    shard.feed(*(retire(name, 5) for name in names[:retiring]))
    return shard


def opened(shard: Shard, *records: Record) -> int:
    batch = StreamBatch(STREAM, shard.states[STREAM], shard.now, Bounds())
    brought = packets([Sent(99_000 + at, it) for at, it in enumerate(records)])
    inputs = group_by_stream(brought, RunColumns.of([it.runs for it in brought]), States(shard.states), Bounds())
    batch.feed(inputs[STREAM])
    return batch.stream.writers.decode_count


def test_one_record_opens_no_retired_writer() -> None:
    """Rule 8: with 2 000 retired writers, of which the state has all, a record opens none, and a stranger's none."""
    shard = crowd(2001, 2000)
    assert len(shard.stream().writers) == 2001
    assert opened(shard, rdata("w02000", 6, 5, epoch=1)) == 0
    assert opened(shard, rdata("stranger", 6, 5, epoch=1)) == 0


def test_a_writer_with_much_pending_is_opened_when_it_is_touched() -> None:
    """Rule 8: it waits as bytes, in the summary as in the list of all that holds a position back."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), *(rdata("a", id, id - 1, epoch=1) for id in range(2, 202, 2)))
    assert opened(shard, rdata("b", 1, epoch=1)) == 0
    done = shard.feed(rdata("b", 1, epoch=1))
    everything = blockers(shard.stream())
    assert (done.summary.pending_count, done.summary.gap_count, len(everything)) == (100, 100, 100)
    assert done.summary.oldest_blocker == everything[0]
    assert opened(shard, rdata("a", 1, epoch=1)) == 1
    assert [(it.prev, it.id) for it in shard.feed(rdata("a", 1, epoch=1)).advances] == [(0, 2)]


def test_a_batch_opens_the_writers_that_it_names() -> None:
    """Rule 8: three of 500 active writers and one of 500 retired ones."""
    shard = crowd(1000, 500)
    records = [position(name, 5, 6, epoch=1) for name in ("w00600", "w00700", "w00800")]
    assert opened(shard, *records, join("w00003", 6, epoch=2)) == 4


@pytest.mark.parametrize("marker", [join, retire])
def test_markers_cost_the_same_however_many_there_are(marker: Callable[[str, int], Record]) -> None:
    """Rule 8: four times as many JOINs or RETIREs of one stream in a batch take about four times as many steps."""

    def cost(count: int) -> int:
        names = [f"w{number:05}" for number in range(count)]
        shard = Shard()
        if marker is retire:
            shard.feed(*(join(name, 5) for name in names))
        return steps(shard, [marker(name, 5) for name in names])

    assert cost(400) < 5 * cost(100)


def test_a_join_costs_the_same_however_many_never_joined() -> None:
    """Rule 8: it asks for the incarnations of its own writer, and for no others."""

    def cost(joins: int, strangers: int) -> int:
        shard = Shard()
        shard.feed(join("z", 0), *(rdata(f"s{number}", 9, epoch=1) for number in range(strangers)))
        return steps(shard, [join(f"w{number}", 5) for number in range(joins)])

    assert cost(60, 200) - cost(30, 200) < 1.2 * (cost(60, 0) - cost(30, 0))


def steps(shard: Shard, records: list[Record]) -> int:
    """The bytecode instructions of a batch."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Tracer:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        shard.feed(*records)
    finally:
        sys.settrace(before)
    return count
