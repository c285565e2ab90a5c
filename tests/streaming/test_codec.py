"""The stored form of a stream."""

import msgspec
import numpy as np
import pytest

from tests.streaming.builders import (
    FACTS,
    STREAM,
    Shard,
    forced,
    join,
    packing,
    position,
    rdata,
    retire,
    skip,
)
from tidemark.common.errors import StateTooNew
from tidemark.streaming.core import codec
from tidemark.streaming.core.chain import DeferredRange
from tidemark.streaming.core.codec import FORMAT
from tidemark.streaming.core.effects import RequeuedRange, summarize
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Topic
from tidemark.streaming.wire.runs import PackedRun, PackedRuns, Packet

UP = Direction.FORWARD


def long_run(start: int, count: int, offset: int) -> Packet:
    """`count` facts of writer a in epoch 1, one after the other, as compaction packs them."""
    ids = np.arange(start + 1, start + count + 1, dtype=np.int64)
    offsets = np.arange(count, dtype=np.uint32)
    kinds = np.zeros(count, np.uint8)
    last = offset + count - 1
    run = PackedRun(
        STREAM, "a", 1, UP, start, ids.tobytes(), kinds.tobytes(), offsets.tobytes(), offset, last, offset, last
    )
    return Packet(FACTS, 0, Topic.FACTS, last + 1, PackedRuns.of([run]), [], [], [])


def test_a_state_comes_back_as_it_went() -> None:
    """With spans, late ranges, retired and unknown writers, and what was refused."""
    shard = Shard()
    shard.feed(
        join("a", 0),
        rdata("a", 9, 7, epoch=1),
        rdata("a", 8, 6, epoch=1),
        skip("a", 2, 4),
        retire("b", 3, epoch=2),
        rdata("c", 5, 2, epoch=3),
        join("d", 2),
        retire("d", 4),
        forced(join("e", 3)),
    )
    stored = shard.states[STREAM]
    once = codec.decode(stored)
    assert codec.encode(once) == stored
    assert [*once.writers["a"].late_ranges] == [(2, 4)]
    assert once.writers["a"].chain.uncertain_up_to == 8
    assert once.unjoined["b", 2].retire_id == 3
    assert once.writers["d"].retired_at == 1000


@pytest.mark.parametrize("more", [[], [["something", "new"]]])
def test_a_newer_format_stops_instead_of_being_misread(more: list[object]) -> None:
    """Also where it looks like ours with something more behind: a person must upgrade."""
    shard = Shard()
    shard.feed(join("a", 3))
    fields = msgspec.msgpack.decode(shard.states[STREAM])
    newer = msgspec.msgpack.encode([FORMAT + 1, *fields[1:], *more])
    with pytest.raises(StateTooNew) as stopped:
        codec.decode(newer)
    assert (stopped.value.found, stopped.value.known) == (FORMAT + 1, FORMAT)


def test_a_newer_format_of_another_shape_stops_too() -> None:
    """Only the leading number is read before the decision."""
    with pytest.raises(StateTooNew):
        codec.decode(msgspec.msgpack.encode([FORMAT + 1, {"all": "different"}]))


def test_a_million_pending_ids_behind_one_gap_are_one_interval() -> None:
    """Rule 8: the state stays below 1 KB, and one edge releases all of them with their facts counted."""
    shard = Shard()
    shard.feed(join("a", 0))
    shard.feed_packets([long_run(1, 1_000_000, 1)])
    assert len(shard.states[STREAM]) < 1024
    (move,) = shard.feed(rdata("a", 1, epoch=1)).advances
    assert (move.prev, move.id, move.facts) == (0, 1_000_001, 1_000_001)


def test_a_stream_without_gaps_has_a_small_state_whatever_it_has_seen() -> None:
    """Rule 8: what is settled leaves nothing behind but the position."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0))
    shard.feed_packets([long_run(0, 100_000, 2)])
    shard.feed(position("b", 0, 100_000, epoch=1))
    assert shard.linear == 100_000
    assert len(shard.states[STREAM]) <= 100  # of which 10 are what the JOINs said


def test_retired_writers_are_given_apart_when_they_change() -> None:
    """Rule 8: a batch gives the table of retired writers only if it has changed."""
    shard = Shard()
    assert shard.feed(join("a", 0), join("b", 0)).retired_table is None
    done = shard.feed(retire("b", 0))
    assert done.retired_table
    assert shard.states[STREAM] == done.state[:-1] + done.retired_table
    assert [*codec.decode(done.state).writers] == ["a"]
    assert shard.feed(rdata("a", 1, epoch=1)).retired_table is None
    for parts in (codec.forget_home(shard.states[STREAM]), codec.mark_uncertain(shard.states[STREAM])):
        assert parts.whole == parts.state[:-1] + (parts.retired_table or b"")
    assert shard.feed(join("b", 2, epoch=2)).retired_table == b"\xc0"


def test_what_was_put_off_comes_back_as_it_went() -> None:
    """Of writers that are open, packed, and held; each is named for people."""
    with packing(0):
        shard = Shard(bounds=Bounds(pending=1))
        shard.feed(join("a", 0), *(rdata(name, id, epoch=1) for id in (3, 5, 7) for name in "ac"))
        stored = shard.states[STREAM]
        once = codec.decode(stored)
        assert codec.encode(once) == stored
        assert (summarize(once).deferred_writers, len(once.writers.waiting)) == (["a/1", "c/1"], 1)
        assert once.writers["a"].chain.deferred == [DeferredRange(3, 3, 4), DeferredRange(5, 5, 6)]
        recalls = [*codec.deferred_ranges(stored)]
        assert recalls == [RequeuedRange(name, 1, 0, at, at) for name, at in (("a", 3), ("a", 5), ("c", 4), ("c", 6))]
