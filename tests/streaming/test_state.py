"""The stored form of a stream."""

import msgspec
import numpy as np
import pytest

from tests.streaming.builders import (
    FACTS,
    STATE_OF_FORMAT_5,
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
from tidemark.streaming.core import codec as state
from tidemark.streaming.core.codec import FORMAT
from tidemark.streaming.core.deferred import PutOff
from tidemark.streaming.core.effects import Recall, summarize
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
    once = state.decode(stored)
    assert state.encode(once) == stored
    assert [*once.writers["a"].late] == [(2, 4)]
    assert once.writers["a"].chain.refused == 8
    assert once.held["b", 2].retire == 3
    assert once.writers["d"].retired == 1000


@pytest.mark.parametrize("more", [[], [["something", "new"]]])
def test_a_newer_format_stops_instead_of_being_misread(more: list[object]) -> None:
    """Also where it looks like ours with something more behind: a person must upgrade."""
    shard = Shard()
    shard.feed(join("a", 3))
    fields = msgspec.msgpack.decode(shard.states[STREAM])
    newer = msgspec.msgpack.encode([FORMAT + 1, *fields[1:], *more])
    with pytest.raises(StateTooNew) as stopped:
        state.decode(newer)
    assert (stopped.value.found, stopped.value.known) == (FORMAT + 1, FORMAT)


def test_a_newer_format_of_another_shape_stops_too() -> None:
    """Only the leading number is read before the decision."""
    with pytest.raises(StateTooNew):
        state.decode(msgspec.msgpack.encode([FORMAT + 1, {"all": "different"}]))


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


def test_a_state_of_format_1_is_read() -> None:
    """Written by the version before: writer a was set back from 3 to 1, and (2, 3] and (6, 7] came again."""
    old = bytes.fromhex(
        "9701010003919206079298a16102930300919806070100000001cd07d0c09192010303930100929802030100000001cd07d0980607010000"
        "0001cd07d0c298a1620193030090c09000c0c290"
    )
    stream = state.decode(old)
    a, b = stream.writers["a"], stream.writers["b"]
    assert (a.position, a.chain.position, [*a.chain.gaps()]) == (3, 1, [(1, 2, 2000), (3, 6, 2000)])
    assert (b.position, stream.line.position, stream.timeline) == (3, 3, 1)
    shard = Shard({STREAM: old}, next_offset=20, now=3000)
    shard.feed(rdata("a", 2, 1, epoch=2), rdata("a", 6, 3, epoch=2))
    assert (shard.positions, shard.linear) == ({"a": 7, "b": 3}, 3)


def test_a_state_of_format_2_is_read() -> None:
    """Written by the version before: a waits, b has retired at 4, and c is unknown."""
    old = bytes.fromhex(
        "990201000092920103920809929aa16101940000919801020100000001cd03e890c09000c0c201c09aa162019404009092920002920304cd"
        "03e89000c0c201c09196a1630194ff00919808090100000001cd03e890cd03e8c0c201c0"
    )
    shard = Shard({STREAM: old}, next_offset=20, now=2000)
    assert state.decode(state.encode(shard.stream())).writers["b"].retired == 1000
    shard.feed(forced(retire("c", 9)), retire("a", 2))
    assert (shard.positions, shard.linear) == ({"a": 2, "b": 4, "c": 9}, 9)


def test_a_state_of_format_6_is_read() -> None:
    """Written by the version before: w1 waits at 11, w2 has retired at 9, and what writers declared to be without facts
    and what completed beyond the line were packed otherwise."""
    old = bytes.fromhex(
        "dc001306010002c40c010400000000000000020402929ba2773101950b00909192010290c09000c0c201c00a9ba277330195000091980a0c"
        "0100000001cd07d09090c09000c0c201c0089001c009c0c00000028090919202cd07d092c41d180000000009000000000000000900000000"
        "000000d007000000000000c4189ba2773201950900909192050990cd07d09000c0c201c009"
    )
    stream = state.decode(old)
    assert [*stream.line.completed] == [(4, 6), (10, 12)]
    assert {name: [*it.chain.empty] for name, it in stream.writers.items()} == {
        "w1": [(1, 2)],
        "w2": [(5, 9)],
        "w3": [],
    }
    assert state.encode(state.decode(state.encode(stream))) == state.encode(stream)
    shard = Shard({STREAM: old}, next_offset=20, now=3000)
    assert shard.feed(rdata("w1", 2, 1, epoch=1)).late
    shard.feed(rdata("w3", 10, 0, epoch=1))
    assert (shard.positions, shard.linear) == ({"w1": 11, "w2": 9, "w3": 12}, 12)


def test_retired_writers_are_given_apart_when_they_change() -> None:
    """Rule 8: it goes along where it changed, and where it is not kept apart yet, as with a state of format 3."""
    shard = Shard()
    assert shard.feed(join("a", 0), join("b", 0)).retired is None
    done = shard.feed(retire("b", 0))
    assert done.retired
    assert shard.states[STREAM] == done.state[:-1] + done.retired
    assert [*state.decode(done.state).writers] == ["a"]
    assert shard.feed(rdata("a", 1, epoch=1)).retired is None
    for parts in (state.homeless(shard.states[STREAM]), state.doubtful(shard.states[STREAM])):
        assert parts.whole == parts.state[:-1] + (parts.retired or b"")
    *fields, table = msgspec.msgpack.decode(shard.states[STREAM])
    older = Shard({STREAM: msgspec.msgpack.encode([3, *fields[1:11], table, *fields[12:17]])}, next_offset=9, now=9000)
    assert older.feed(rdata("a", 2, epoch=1)).retired == done.retired
    assert shard.feed(join("b", 2, epoch=2)).retired == b"\xc0"


def test_a_state_of_format_4_is_read() -> None:
    """Written by the version before: a waits, and its 7 was refused for want of room; b has retired, c is unknown."""
    old = bytes.fromhex(
        "dc00120401000093920203920405920809909196a1630194ff00919808090100000001cd03e890cd03e8c0c201c004c0c000000180919aa1"
        "6101000502020002cd03e8c4269aa16101940007929802030100000001cd03e89804050100000001cd03e890c09000c0c201c092c41d1500"
        "00000004000000000000000400000000000000e803000000000000c4159aa162019404009091920004cd03e89000c0c201c0"
    )
    shard = Shard({STREAM: old}, next_offset=20, now=2000)
    assert summarize(shard.stream()).put_off == []
    shard.feed(*(rdata("a", id, epoch=1) for id in (1, 2, 4)), forced(retire("c", 9)))
    assert (shard.positions, shard.linear) == ({"a": 5, "b": 4, "c": 9}, 5)
    (move,) = shard.feed(join("a", 9, epoch=2)).advances
    assert (move.unseen, move.empty) == (2, 2)


def test_a_state_of_format_5_is_read() -> None:
    """Written by the version before: w1 is silent at 7, w3 waits above a gap. Nobody noted since when the line waits,
    nor when anybody was last seen; the next batch does.
    """
    shard = Shard({STREAM: STATE_OF_FORMAT_5}, next_offset=20, now=2000)
    before = summarize(shard.stream()).behind
    assert before is not None
    assert [(it.writer, it.reason, it.since, it.seen) for it in before.holders] == [
        ("w1", "silent", 2000, 0),
        ("w3", "gap", 2000, 0),
    ]
    after = shard.feed(position("w2", 12, 14, epoch=1)).summary.behind
    assert after is not None
    assert (before.ids, after.ids, after.since) == (5, 7, 3000)
    shard.feed(position("w1", 7, 14, epoch=1), rdata("w3", 9, 7, epoch=1), retire("w3", 14))
    assert (shard.linear, shard.stream().writers["r"].retired) == (14, 1000)


def test_what_was_put_off_comes_back_as_it_went() -> None:
    """Of writers that are open, packed, and held; each is named for people."""
    with packing(0):
        shard = Shard(bounds=Bounds(pending=1))
        shard.feed(join("a", 0), *(rdata(name, id, epoch=1) for id in (3, 5, 7) for name in "ac"))
        stored = shard.states[STREAM]
        once = state.decode(stored)
        assert state.encode(once) == stored
        assert (summarize(once).put_off, len(once.writers.waiting)) == (["a/1", "c/1"], 1)
        assert once.writers["a"].chain.put_off == [PutOff(3, 3, 4), PutOff(5, 5, 6)]
        recalls = [*state.put_off(stored)]
        assert recalls == [Recall(name, 1, 0, at, at) for name, at in (("a", 3), ("a", 5), ("c", 4), ("c", 6))]
