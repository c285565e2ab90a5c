"""Positions against the brute-force model, over records of every kind: what writers would send, mixed with garbage."""

import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.examples import examples
from tests.streaming.builders import EDGES, Record, Sent, Shard, compacted, forced, packets, packing, rejections
from tests.streaming.model import EMPTY, FACTS, SKIPPED, UNSEEN, Model
from tests.streaming.protocol import Database
from tidemark.streaming.core import codec, writer_table
from tidemark.streaming.core.effects import ShardEffects, StreamEffects
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.wire.records import CURRENT_EPOCH

WRITERS = ("a", "b", "c")
writers = st.sampled_from(WRITERS)


@dataclass(frozen=True)
class Hint:
    """A record near to where its writer stands: epoch and prev are told from there, so that most of them matter."""

    kind: str
    writer: str
    epoch: int
    prev: int
    width: int
    unseen: bool = False
    wrong_sign: bool = False
    partition: int = 0
    published: int | None = None


def hints(kinds: str) -> st.SearchStrategy[Hint]:
    return st.builds(
        Hint,
        st.sampled_from(kinds.split()),
        writers,
        st.sampled_from([0, 0, 0, 0, 0, 0, 1, 1, 2, -1]),
        st.integers(-4, 8),
        st.integers(1, 4),
        st.booleans(),
        st.sampled_from([False] * 30 + [True]),
        st.sampled_from([0] * 30 + [1]),
        st.none() | st.integers(-6, 8),
    )


def assert_equal_effects(one: ShardEffects, other: ShardEffects) -> None:
    for mine, its in zip(one.streams, other.streams, strict=True):
        for name in mine.__struct_fields__:
            assert getattr(mine, name) == getattr(its, name), name
    assert one == other


class Compared(RuleBasedStateMachine):
    """Each rule sends records; `flush` makes a batch of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard()
        self.model = Model()
        self.queue: list[Record] = []
        self.history: list[Record] = []
        self.no_reuse_up_to: dict[str, int] = {}
        self.retired_table = b"\xc0"
        self.packing = ExitStack()

    @initialize(sign=st.sampled_from([1, -1]), few=st.sampled_from([0, 1, writer_table.UNPACKED_MAX]))
    def begin(self, sign: int, few: int) -> None:
        self.database = Database(sign, WRITERS)
        self.packing.enter_context(packing(few))

    def send(self, *records: Record) -> None:
        self.queue.extend(records)
        self.history.extend(records)

    @rule(name=writers, luck=st.integers(0, 3))
    def crash(self, name: str, luck: int) -> None:
        if luck == 3:
            self.send(*self.database.start(name))

    @rule(name=writers, back=st.integers(0, 6), told=st.booleans())
    def start_in_the_same_epoch(self, name: str, back: int, *, told: bool) -> None:
        """Of a database that went back, with the epochs in it."""
        self.database.restore(max(0, self.database.last_value - back), told=told)
        self.send(*self.database.start(name, raised=False))

    @rule(name=writers, count=st.integers(0, 6), ends=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=6))
    def work(self, name: str, count: int, ends: list[tuple[int, bool]]) -> None:
        """Reserve some, complete some, in any order."""
        process = self.database.processes[name]
        if not process.alive:
            self.send(*self.database.start(name))
        for _ in range(count):
            self.database.reserve(name)
        for which, commit in ends[: len(process.open)]:
            if commit:
                self.database.commit(name, which)
                self.send(*self.database.send(name, -1))
            else:
                self.send(*self.database.roll_back(name, which))

    @rule()
    def heartbeats(self) -> None:
        for name, process in self.database.processes.items():
            if process.alive:
                self.send(*self.database.heartbeat(name))

    @rule(name=writers)
    def retire(self, name: str) -> None:
        process = self.database.processes[name]
        if process.alive and not process.open:
            self.send(*self.database.retire(name))

    @rule(back=st.integers(0, 6), told=st.booleans())
    def restore(self, back: int, *, told: bool) -> None:
        self.database.restore(max(0, self.database.last_value - back), told=told)

    @rule(seen=st.lists(hints("RDATA RDATA RDATA RDATA VOID VOID POSITION JOIN RETIRE ROW"), min_size=1, max_size=10))
    def babble(self, seen: list[Hint]) -> None:
        """Anything that decoding lets through, whatever was sent before."""
        self.send(*(self.near(hint) for hint in seen))

    @rule(hint=hints("SKIP SKIP SKIP RETIRE JOIN"), current_epoch=st.booleans(), beyond=st.booleans())
    def operate(self, hint: Hint, *, current_epoch: bool, beyond: bool) -> None:
        record = replace(self.near(hint), partition=0, unseen=False)
        self.send(forced(replace(record, epoch=CURRENT_EPOCH) if current_epoch else record, beyond=beyond))

    @rule(luck=st.integers(0, 3))
    def throw_out_everybody(self, luck: int) -> None:
        if luck == 3:
            self.send(forced(Record("RETIRE", "*")))

    def near(self, hint: Hint) -> Record:
        known = self.model.writers.get(hint.writer)
        edge, marker = hint.kind in EDGES or hint.kind == "SKIP", hint.kind in ("JOIN", "RETIRE")
        sign = self.database.sign * (-1 if hint.wrong_sign else 1)
        prev = max(0, (known.position if known else 0) + hint.prev)
        return Record(
            hint.kind,
            hint.writer,
            max(0, (known.epoch if known else 0) + hint.epoch),
            prev=sign * prev if edge else 0,
            id=sign * (prev + hint.width) if edge else sign * prev if marker else 0,
            unseen=hint.kind == "JOIN" and hint.unseen,
            partition=hint.partition,
            published=None if hint.published is None or hint.kind != "JOIN" else sign * max(0, prev + hint.published),
        )

    @precondition(lambda self: self.history)
    @rule(where=st.integers(0, 1000), count=st.integers(1, 10))
    def replay(self, where: int, count: int) -> None:
        at = where % len(self.history)
        self.send(*self.history[at : at + count])

    @precondition(lambda self: self.queue)
    @rule(seed=st.integers(0, 3))
    def flush(self, seed: int) -> None:
        batch = [Sent(at, record) for at, record in enumerate(self.queue, self.shard.next_offset)]
        self.queue = []
        self.shard.next_offset += len(batch)
        before = self.model.late_facts.copy(), len(self.model.timelines), self.model.linear
        # Operators' records have no order against the facts: they come last. Those of other partitions have none
        # either: they may have come before all others, and after all others.
        ordered = sorted(batch, key=lambda it: (it.record.control, it.record.partition != self.home(batch), it.offset))
        astray = [it.record for it in batch if not it.record.control and it.record.partition != self.home(batch)]
        self.model.elsewhere = any(it.kind != "RETIRE" for it in astray)
        for record in astray:
            self.model.astray(record)
        outcomes = {it.offset: self.model.feed(it.record) for it in ordered}

        parts = packets(batch)
        random.Random(seed).shuffle(parts)
        twin = replace(self.shard, states=dict(self.shard.states))
        done = self.shard.feed_packets(parts)
        assert_equal_effects(twin.feed_packets(compacted(batch)), done)
        (effects,) = done.streams
        stored = codec.decode(self.shard.states[effects.stream])

        rejected = {at: it.removeprefix("rejected: ") for at, it in outcomes.items() if it.startswith("rejected: ")}
        assert rejections(done) == rejected
        kept = Counter(it for at, it in outcomes.items() if at not in rejected)
        assert {k: v for k, v in effects.counts.items() if k != "forgotten"} == kept
        late, timelines, line = before
        self.compare_standing(effects, stored)
        self.compare_moves(effects)
        self.compare_late(effects, self.model.late_facts - late)
        sign = self.sign
        assert [(it.writer, it.epoch, sign * it.id, sign * it.position, it.why) for it in effects.timelines] == (
            self.model.timelines[timelines:]
        )
        assert sign * effects.linear_prev == line <= sign * effects.linear
        self.compare_encoded(effects, stored)

    def home(self, batch: list[Sent]) -> int:
        if self.model.home is None:
            return min((it.record.partition for it in batch if not it.record.control), default=0)
        return self.model.home

    @property
    def sign(self) -> int:
        return -1 if self.model.direction < 0 else 1

    def compare_standing(self, effects: StreamEffects, stored: StreamState) -> None:
        """Positions, line, gaps, what is held: all that the state says."""
        model = self.model
        assert {name: it.position for name, it in sorted(stored.writers.items())} == model.positions()
        assert self.sign * effects.linear == stored.linear.position == model.linear
        assert stored.direction == effects.direction == model.direction
        for name, writer in stored.writers.items():
            twin = model.writers[name]
            assert (writer.epoch, writer.retired_at is not None) == (twin.epoch, twin.retired)
            assert [(low, top) for low, top, _ in writer.chain.gaps()] == twin.gaps()
        assert {key: [(it.prev, it.id) for it in held.chain.pending] for key, held in stored.unjoined.items()} == {
            key: held.ranges() for key, held in model.unjoined.items()
        }
        completed = {at for low, high in stored.linear.completed_ids for at in range(low + 1, high + 1)}
        assert completed == {at for at in model.done if at > model.linear}

    def compare_encoded(self, effects: StreamEffects, stored: StreamState) -> None:
        """What Postgres has of the state by parts, each written when it changed, is the whole."""
        self.retired_table = self.retired_table if effects.retired_table is None else effects.retired_table
        assert codec.encode(stored) == self.shard.states[effects.stream] == effects.state[:-1] + self.retired_table

    def compare_moves(self, effects: StreamEffects) -> None:
        """Each advance begins where the last one ended, and its evidence is that of its IDs."""
        for move in effects.advances:
            prev, id = self.sign * move.prev, self.sign * move.id
            assert self.no_reuse_up_to.get(move.writer, 0) == prev < id
            self.no_reuse_up_to[move.writer] = id
            counts = {FACTS: move.facts, EMPTY: move.empty, UNSEEN: move.unseen, SKIPPED: move.skipped}
            twin = self.model.writers[move.writer]
            exact = twin.evidence(prev, id)
            if twin.blurred:
                assert all(exact[how] <= count <= id - prev for how, count in counts.items())
            else:
                assert +Counter(counts) == +exact
        assert {name: at for name, at in self.model.positions().items() if at} == self.no_reuse_up_to

    def compare_late(self, effects: StreamEffects, expected: Counter[tuple[str, str]]) -> None:
        """No fact that came too late vanishes."""
        found: Counter[tuple[str, str]] = Counter()
        for late in effects.late:
            found[late.writer, late.why] += late.facts
        blurred = {name for name, writer in self.model.writers.items() if writer.blurred}
        for key in found | expected:
            assert found[key] >= expected[key] if key[0] in blurred else found[key] == expected[key]

    def teardown(self) -> None:
        try:
            if self.queue:
                self.flush(0)
        finally:
            self.packing.close()


Compared.TestCase.settings = settings(max_examples=examples(200), print_blob=True)
TestCompared = Compared.TestCase


def test_what_was_told_before_it_was_taken_back_is_not_late() -> None:
    """A fact that an advance has told stays told where a database goes back after an operator's act was taken back."""
    compared = Compared()
    compared.begin(sign=1, few=0)
    act = Hint("JOIN", "c", 2, 0, 1)
    compared.babble(seen=[Hint("RDATA", "c", 0, 0, 1)])
    for _ in range(2):
        compared.operate(beyond=False, hint=act, current_epoch=False)
    compared.babble(seen=[Hint("RDATA", "a", 0, 0, 1), Hint("RDATA", "c", 2, 0, 2)])
    compared.flush(seed=0)
    compared.work(count=0, ends=[], name="a")
    compared.teardown()


def test_records_of_another_partition_are_the_same_however_they_are_packed() -> None:
    """A run of a new writer there has edges before and after the first record of another epoch: what they may be does
    not depend on whether it is one run or two."""
    compared = Compared()
    compared.begin(sign=1, few=0)
    astray = [Hint("RDATA", "b", 0, 7, 1), Hint("RDATA", "a", 1, 0, 1), Hint("RDATA", "b", 0, 8, 1)]
    compared.babble(seen=[Hint("RDATA", "a", 0, 0, 1)] * 2)
    for record in astray:
        compared.babble(seen=[replace(record, partition=1), *[Hint("RDATA", "a", 0, 0, 1)] * 20])
    compared.teardown()


def test_a_record_of_another_partition_after_that_of_another_writer_holds_the_position_back() -> None:
    """A run of a new writer there begins before the first record of another epoch, and one of its records comes after
    it: the position does not move until the writer joins."""
    compared = Compared()
    compared.begin(sign=1, few=0)
    astray = [Hint("RDATA", "b", 0, 0, 1), Hint("RDATA", "a", 1, 0, 1), Hint("RDATA", "b", 0, 0, 1)]
    compared.babble(seen=[*(replace(record, partition=1) for record in astray), Hint("JOIN", "a", 1, 1, 1)])
    compared.flush(seed=0)
    assert compared.model.linear == 0
    compared.teardown()
