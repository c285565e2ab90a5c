"""Edges that find no room on their chain come again from Kafka once there is some, without a JOIN."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.builders import (
    STREAM,
    Record,
    Shard,
    as_json,
    forced,
    join,
    packing,
    position,
    rdata,
    retire,
    void,
)
from tests.streaming.protocol import Database
from tidemark.sinks.dead_letters import is_edge
from tidemark.streaming.core import chain as chains
from tidemark.streaming.core import codec
from tidemark.streaming.core.chain import DeferredRange, merge_ranges
from tidemark.streaming.core.effects import RequeuedRange, StreamEffects, summarize
from tidemark.streaming.values.limits import Bounds

A1 = [join("a", 0)]


@dataclass
class Topic:
    """A partition with one stream, and a shard that reads it. What is recalled is produced again when that is asked."""

    bounds: Bounds
    records: list[Record] = field(default_factory=list)
    recalls: list[RequeuedRange] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    again: int = 0

    def __post_init__(self) -> None:
        self.shard = Shard(bounds=self.bounds)

    def feed(self, *records: Record) -> StreamEffects:
        """In one batch."""
        self.records += records
        done = self.shard.feed(*records)
        self.recalls += done.requeues
        for move in done.advances:
            self.told.update(facts=move.facts, empty=move.empty, unseen=move.unseen, width=abs(move.id - move.prev))
        for late in done.late:
            self.told[f"late {late.why}"] += late.facts
        return done

    def recall(self, at: int = 0) -> None:
        """Produce again what one of the recalls names, as the pipeline does."""
        it = self.recalls.pop(at)
        found = self.records[it.first_offset : it.last_offset + 1]
        ours = [one for one in found if is_edge(as_json(one), STREAM.encode(), STREAM, it.writer, it.epoch)]
        self.again += len(ours)
        if ours:
            self.feed(*ours)

    def settle(self) -> None:
        while self.recalls:
            assert self.again < 10_000, "it goes round in circles"
            self.recall()


def test_all_orders_of_a_few_edges_end_in_the_same_place() -> None:
    """Whatever the order of five edges, two of them void, where a chain has room for one span or two: all is applied in
    the end, and told as what it was. So it is where what is recalled comes before the next record, and after the last.
    """
    edges = [
        *(rdata("a", id, prev, epoch=1) for prev, id in ((0, 2), (2, 3), (5, 6))),
        void("a", 3, 5, epoch=1),
        position("a", 6, 8, epoch=1),
    ]
    for order, pending, at_once in product(permutations(edges), (1, 2), (True, False)):
        topic = Topic(Bounds(pending=pending))
        for record in (*A1, *order):
            topic.feed(record)
            if at_once:
                topic.settle()
        topic.settle()
        assert topic.shard.positions == {"a": 8}, order
        assert topic.told == Counter(facts=3, empty=3, width=8), order
        chain = topic.shard.stream().writers["a"].chain
        assert (chain.pending, chain.deferred) == ([], []), order


OPS = ["reserve"] * 5 + ["commit"] * 4 + ["roll back", "heartbeat", "read", "read", "recall"]


@settings(max_examples=examples(150))
@given(
    st.sampled_from([1, -1]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0, 32]),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(OPS), st.integers(0, 9)), min_size=10, max_size=120),
)
def test_every_fact_is_applied_without_a_join_once_the_gaps_close(
    sign: int, pending: int, ranges: int, few: int, acts: list[tuple[str, str, int]]
) -> None:
    """Three writers whose transactions end in any order, chains that hold next to nothing, and fewer ranges of offsets
    than it takes: each ID is told as what it was, the line passes nothing in flight and ends where the sequence does.
    """
    database, topic = Database(sign, ("a", "b", "c")), Topic(Bounds(pending=pending))
    queue: list[Record] = []
    with packing(few), pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "DEFERRED_RANGES_MAX", ranges)
        for name in "abc":
            queue += database.start(name)
        for name, op, which in acts:
            process = database.processes[name]
            if op == "reserve":
                database.reserve(name)
            elif op == "commit" and process.open:
                database.commit(name, which)
                queue += database.send(name, -1)
            elif op == "roll back" and process.open:
                queue += database.roll_back(name, which)
            elif op == "heartbeat":
                queue += database.heartbeat(name)
            elif op == "recall" and topic.recalls:
                topic.recall(which % len(topic.recalls))
            elif op == "read" and queue:
                topic.feed(*queue)
                queue.clear()
                assert all(abs(topic.shard.linear) < id for _, id in database.in_flight())
        for name, process in database.processes.items():
            while process.open:
                queue += database.roll_back(name, len(process.open) // 2)
        for name in "abc":
            queue += database.heartbeat(name)
        for record in queue:
            topic.feed(record)
        topic.settle()
    assert set(topic.shard.positions.values()) == {sign * database.last_value} or not database.last_value
    assert topic.shard.linear == sign * database.last_value
    assert topic.told["facts"] == len(database.facts)
    assert not topic.told["unseen"]
    assert not [what for what in topic.told if what.startswith("late")]


def overfull(*more: Record, pending: int = 2) -> Topic:
    """Writer a waits at 0, and its IDs 7 and 9 were put off."""
    topic = Topic(Bounds(pending=pending))
    topic.feed(*A1, *(rdata("a", id, id - 1, epoch=1) for id in (3, 5, 7, 9)), *more)
    return topic


def test_nothing_comes_again_before_half_of_the_room_is_free() -> None:
    """Else each place that gets free would bring all that was put off, and all but one would be put off again."""
    topic = overfull(pending=4)
    topic.feed(rdata("a", 11, 10, epoch=1), rdata("a", 1, epoch=1))
    assert not topic.recalls
    topic.feed(rdata("a", 2, epoch=1))
    assert not topic.recalls
    topic.feed(rdata("a", 4, epoch=1))
    assert topic.recalls == [RequeuedRange("a", 1, 0, 5, 5)]


def test_what_the_position_has_come_to_comes_again_though_nothing_is_free() -> None:
    """Its place is at the position: it would wait for ever for the spans that wait for it."""
    topic = Topic(Bounds(pending=2))
    topic.feed(*A1, rdata("a", 7, 6, epoch=1), rdata("a", 9, 8, epoch=1), rdata("a", 4, 3, epoch=1))
    topic.feed(position("a", 0, 3, epoch=1))
    assert topic.recalls == [RequeuedRange("a", 1, 0, 3, 3)]
    topic.settle()
    assert topic.shard.positions == {"a": 4}


def test_a_join_retire_or_end_of_a_writer_forgets_what_was_put_off() -> None:
    """The JOIN settles it as unseen, for it may be facts; what an earlier epoch left in Kafka would be a zombie."""
    for end in (join("a", 9, epoch=2), retire("a", 9), forced(retire("a", 9), beyond=True)):
        topic = overfull()
        (move,) = topic.feed(end).advances
        assert move.facts == 2
        assert move.skipped or (move.unseen, move.empty) == (7, 0)
        assert not topic.recalls
        assert not topic.feed(join("b", 9)).summary.deferred_writers


def test_what_was_put_off_before_the_join_of_its_epoch_comes_again_after_it() -> None:
    """A writer that has not joined is held, and its chain is bounded too; the JOIN answers for what lies below it."""
    topic = Topic(Bounds(pending=1))
    done = topic.feed(*(rdata("a", id, id - 1, epoch=2) for id in (3, 5, 7)))
    assert (done.counts, done.summary.deferred_writers) == ({"buffered": 1, "deferred": 2}, ["a/2"])
    topic.feed(join("a", 4, epoch=2))
    topic.settle()
    topic.feed(rdata("a", 6, epoch=2))
    topic.settle()
    assert topic.shard.positions == {"a": 7}
    assert topic.told["facts"] == 4


def test_a_skip_over_what_was_put_off_tells_it_as_late() -> None:
    """An operator settles it without evidence; what comes again is told to readers, once."""
    topic = overfull()
    topic.feed(forced(Record("SKIP", "a", 1, 0, 9), beyond=True))
    topic.settle()
    assert (topic.shard.positions, topic.told["late skipped"]) == ({"a": 9}, 2)


def test_late_completions_without_room_come_again() -> None:
    """A database that went back: what the chain follows below the published position may find no room either."""
    topic = Topic(Bounds(pending=1))
    topic.feed(*A1, position("a", 0, 9, epoch=1), join("a", 0, epoch=2))
    topic.feed(*(rdata("a", id, id - 1, epoch=2) for id in (3, 5, 7)))
    topic.feed(*(void("a", id - 1, id, epoch=2) for id in (1, 2, 4, 6, 8, 9)))
    topic.settle()
    topic.feed(rdata("a", 10, epoch=2))
    assert topic.shard.positions == {"a": 10}
    assert topic.shard.stream().writers["a"].chain.position == 10


def test_a_stream_whose_offsets_mean_nothing_any_more_waits_for_the_join() -> None:
    """It may live in another partition, or records may be gone: nothing is recalled, and nothing stepped over."""
    for changed in (codec.forget_home, codec.mark_uncertain):
        topic = overfull(rdata("b", 4, 3, epoch=3))
        parts = changed(topic.shard.states[STREAM])
        assert parts.whole == parts.state[:-1] + (parts.retired_table or b"")
        topic.shard.states[STREAM] = parts.whole
        done = topic.feed(*(rdata("a", id, epoch=1) for id in (1, 2, 4, 6)))
        assert (topic.shard.positions, done.requeues, done.summary.deferred_writers) == ({"a": 6}, [], [])
        (move,) = topic.feed(join("a", 9, epoch=2)).advances
        assert move.unseen == 3


def test_a_writer_with_nothing_pending_is_still_named_for_what_was_put_off() -> None:
    """One range comes at a time: until the next record of the writer it is kept among those that a batch looks at."""
    with packing(0):
        topic = Topic(Bounds(pending=1))
        topic.feed(*A1, *(rdata("a", id, epoch=1) for id in (3, 5)), join("b", 0), rdata("a", 7, epoch=1))
        topic.feed(rdata("a", 1, epoch=1), rdata("a", 2, epoch=1))
        assert topic.recalls == [RequeuedRange("a", 1, 0, 2, 2)]
        assert summarize(topic.shard.stream()).deferred_writers == ["a/1"]
        moved = codec.decode(codec.forget_home(topic.shard.states[STREAM]).whole)
        assert not moved.writers["a"].chain.deferred


def test_only_the_writers_own_edges_come_again() -> None:
    """Not its markers, its rows, or what was refused: a RETIRE that came twice, and late, would be another one."""
    ours = [rdata("a", 3, 2, epoch=1), void("a", 2, 3, epoch=1), position("a", 2, 9, epoch=1)]
    others = [rdata("b", 3, 2, epoch=1), rdata("a", 3, 2), join("a", 3), retire("a", 3), Record("ROW", "a", 1)]
    key = STREAM.encode()
    assert all(is_edge(as_json(it), key, STREAM, "a", 1) for it in ours)
    assert not any(is_edge(as_json(it), key, STREAM, "a", 1) for it in others)
    value = as_json(ours[0])
    bad: list[tuple[bytes | None, bytes | None]] = [(value[:-1], key), (value, b"other"), (value, None), (None, key)]
    assert not any(is_edge(*it, STREAM, "a", 1) for it in bad)


ranges = st.lists(st.builds(lambda low, width, prev: DeferredRange(low, low + width, prev), *[st.integers(0, 300)] * 3))


@given(ranges)
def test_ranges_are_bounded_and_lose_nothing(found: list[DeferredRange]) -> None:
    """Each is in one of them, with a `prev` that is no higher; they are apart and in order."""
    kept = merge_ranges(found)
    assert len(kept) <= chains.DEFERRED_RANGES_MAX
    assert all(one.last_offset + 1 < other.first_offset for one, other in pairwise(kept))
    for it in found:
        assert any(
            one.first_offset <= it.first_offset and it.last_offset <= one.last_offset and one.prev <= it.prev
            for one in kept
        )
