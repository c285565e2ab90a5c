"""A batch of a shard: order from offsets, partitions, counts, chained advances."""

from dataclasses import replace
from itertools import permutations

import numpy as np

from tests.streaming.builders import (
    CONTROL,
    FACTS,
    STREAM,
    Sent,
    Shard,
    compacted,
    join,
    packets,
    position,
    rdata,
    rejections,
    retire,
    row,
    sent,
    skip,
)
from tidemark.streaming.core import codec, effects
from tidemark.streaming.values.limits import RejectedRecords
from tidemark.streaming.wire.records import Topic
from tidemark.streaming.wire.runs import PackedRuns, Packet


def test_order_comes_from_offsets_and_not_from_arrival() -> None:
    """A JOIN between two epochs' records: however the packets arrive, the effects are the same bytes."""
    log = sent([join("a", 0), rdata("a", 3, 2, epoch=1), join("a", 4, epoch=2), rdata("a", 2, 1, epoch=1)])
    results = set()
    for order in permutations(packets(log)):
        results.add(effects.encode(Shard().feed_packets(order)))
    assert len(results) == 1
    done = effects.decode(results.pop())
    assert rejections(done) == {3: "zombie"}


def test_each_advance_begins_where_the_last_one_ended() -> None:
    """Rule 3: across batches, epochs, skips and a regress there is no hole and no overlap."""
    shard = Shard()
    stands = 0
    for records in [
        [join("a", 3), rdata("a", 6, 5, epoch=1)],
        [rdata("a", 5, 3, epoch=1)],
        [skip("a", 6, 9, beyond=True)],
        [join("a", 7, epoch=2), rdata("a", 12, 7, epoch=2)],
        [retire("a", 15, epoch=2)],
        [join("a", 20, epoch=3)],
    ]:
        (move,) = shard.feed(*records).advances
        assert move.prev == stands < move.id
        stands = move.id
    assert stands == 20


def test_one_advance_per_writer_and_batch() -> None:
    """However many steps it took, readers are told one move."""
    shard = Shard()
    done = shard.feed(join("a", 0), rdata("a", 1, epoch=1), join("a", 5, epoch=2), rdata("a", 6, 5, epoch=2))
    assert [(it.writer, it.epoch, it.prev, it.id, it.facts, it.empty) for it in done.advances] == [("a", 2, 0, 6, 2, 4)]


def test_every_record_has_one_outcome() -> None:
    """Rule 5: applied, held, duplicate, late, batch and rejected add up to what came in."""
    shard = Shard()
    log = [
        join("a", 0),
        rdata("a", 1, epoch=1),
        rdata("a", 1, epoch=1),
        row("a", 1),
        rdata("b", 4, 3, epoch=1),
        rdata("a", 5, 0, epoch=1),
        rdata("a", 9, 7, epoch=0),
        skip("a", 1, 2),
        rdata("a", -3, -2, epoch=1),
    ]
    done = shard.feed(*log)
    assert done.counts == {"applied": 3, "batch": 1, "duplicate": 1, "buffered": 1}
    assert shard.rejected == {5: "conflict", 6: "zombie", 8: "mixed_sign"}
    assert sum(done.counts.values()) + len(shard.rejected) == len(log)
    done = shard.feed(rdata("a", 2, 1, epoch=1))
    assert done.counts == {"late": 1}


def test_records_in_another_partition_are_turned_away() -> None:
    """A stream lives in the partition of its first record; elsewhere it has no order, and nothing there counts."""
    shard = Shard()
    shard.feed(join("a", 0))
    done = shard.feed_packets(packets([Sent(10, replace(rdata("a", 1, epoch=1), partition=2))]))
    assert rejections(done) == {10: "wrong_partition"}
    assert done.streams[0].advances == []


def test_a_refused_record_settles_no_home() -> None:
    """After the partitions changed a zombie comes first, from where it does not matter: the JOIN says where to live."""
    shard = Shard()
    shard.feed(join("a", 3, epoch=2))
    shard.states[STREAM] = codec.forget_home(shard.states[STREAM]).whole
    zombie = replace(rdata("a", 2, 1, epoch=1), partition=1)
    alone = shard.feed_packets(packets([Sent(10, zombie)]))
    assert (rejections(alone), shard.stream().home_partition) == ({10: "zombie"}, None)
    done = shard.feed_packets(packets([Sent(11, zombie), Sent(20, replace(join("a", 3, epoch=3), partition=2))]))
    assert (rejections(done), shard.stream().home_partition) == ({11: "zombie"}, 2)
    assert [(it.topic, it.partition) for it in done.rejected] == [(FACTS, 1)]


def test_an_unknown_writer_in_another_partition_holds_the_line() -> None:
    """Rule 9: it may reserve IDs; until it joins where the stream lives, the line stays."""
    shard = Shard()
    shard.feed(join("a", 0), join("r", 0), retire("r", 0))
    strays = [join("b", 0), rdata("r", 7, 6, epoch=1)]
    shard.feed_packets(packets([Sent(10 + at, replace(it, partition=2)) for at, it in enumerate(strays)]))
    shard.feed(position("a", 0, 5, epoch=1))
    assert (shard.positions["a"], shard.linear) == (5, 0)
    shard.feed(join("b", 5), join("r", 7, epoch=2))
    assert shard.linear == 5


def test_facts_that_were_turned_away_are_never_called_empty() -> None:
    """A fact in the wrong partition: what its writer's next JOIN settles there may hold it."""
    shard = Shard()
    shard.feed(join("a", 0))
    shard.feed_packets(packets([Sent(10, replace(rdata("a", 2, 0, epoch=1), partition=2))]))
    (move,) = shard.feed(join("a", 5, epoch=2)).advances
    assert (move.unseen, move.empty) == (2, 3)


def test_a_batch_tells_how_far_each_partition_was_read() -> None:
    """Also of partitions and topics that brought no good record; the highest of each."""
    parts = [
        Packet(FACTS, 1, Topic.FACTS, 7, PackedRuns(), [], [], []),
        Packet(FACTS, 1, Topic.FACTS, 9, PackedRuns(), [], [], []),
        Packet(CONTROL, 0, Topic.CONTROL, 4, PackedRuns(), [], [], []),
    ]
    done = Shard().feed_packets(parts)
    assert [(it.topic, it.partition, it.offset) for it in done.next_offsets] == [(CONTROL, 0, 4), (FACTS, 1, 9)]
    assert done.streams == []


def test_rejections_of_decoding_and_of_state_go_out_together() -> None:
    """By topic, partition and reason, each with its offsets in order."""
    bad = RejectedRecords(FACTS, 0, "not_json", np.array([8, 9], np.int64).tobytes())
    log = packets(sent([join("a", 5), join("a", 6), join("a", 7)]))
    done = Shard().feed_packets([*log, Packet(FACTS, 0, Topic.FACTS, 10, PackedRuns(), [], [], [bad])])
    assert [(it.reason, np.frombuffer(it.offsets, np.int64).tolist()) for it in done.rejected] == [
        ("conflict", [1, 2]),
        ("not_json", [8, 9]),
    ]


def test_streams_of_a_shard_do_not_touch_each_other() -> None:
    """Only streams with records in the batch are told, sorted by name; states of others stay the same bytes."""
    shard = Shard()
    shard.feed_packets(packets(sent([replace(join("a", 3), stream=name) for name in ("z", "y", "x")])))
    before = dict(shard.states)
    more = [replace(rdata("a", 4, 3, epoch=1), stream=name) for name in ("z", "x")]
    done = shard.feed_packets(packets(sent(more, 3)))
    assert [it.stream for it in done.streams] == ["x", "z"]
    assert shard.states["y"] == before["y"]


def test_compaction_and_single_runs_give_the_same_effects() -> None:
    """A batch with rows, rollbacks, crashes and duplicates: how the edges were packed does not show."""
    log = sent(
        [
            join("a", 0),
            *(rdata("a", id, epoch=1) for id in (3, 2, 5, 3, 1, 9)),
            row("a", 1),
            rdata("a", 6, 4, epoch=1),
            join("a", 10, epoch=2),
            rdata("a", 7, 6, epoch=1),
            rdata("a", 11, 10, epoch=2),
        ]
    )
    assert effects.encode(Shard().feed_packets(compacted(log))) == effects.encode(Shard().feed_packets(packets(log)))
