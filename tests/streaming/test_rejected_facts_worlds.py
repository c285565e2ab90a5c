"""Writers that keep the contract, and records of theirs that are turned away, for every reason: nothing that committed
is ever told as empty, and the line passes nothing that is in flight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.streaming.builders import Record, Shard, Taken, as_json, packed
from tests.streaming.protocol import Database
from tidemark.sinks.dead_letters import is_edge
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Topic

WRITERS = ("a", "b", "c")
writers = st.sampled_from(WRITERS)

# What may become of a record on its way; twice as often it is the next one of the list, which is nothing.
FATES = ["well"] * 6 + ["wrong key", "no key", "wrong partition", "control topic", "cut off", "too large", "odd epoch"]


@dataclass(frozen=True)
class Produced:
    """A record as it came to Kafka."""

    value: bytes
    key: bytes | None
    partition: int
    topic: Topic


def produced(record: Record, fate: str) -> Produced:
    value, key = as_json(record), record.stream.encode()
    sent = Produced(value, key, 0, Topic.FACTS)
    match fate:
        case "wrong key":
            return replace(sent, key=b"caches", partition=1)
        case "no key":
            return replace(sent, key=None, partition=2)
        case "wrong partition":
            return replace(sent, partition=2)
        case "control topic":
            return replace(sent, topic=Topic.CONTROL)
        case "cut off":
            return replace(sent, value=value[:-1])
        case "too large":
            return replace(sent, value=msgspec.json.encode(msgspec.json.decode(value) | {"id": 2**70}))
        case "odd epoch":
            return replace(sent, value=msgspec.json.encode(msgspec.json.decode(value) | {"epoch": "1"}))
    return sent


class World:
    """Bounds are so low that they are reached too."""

    def __init__(self, sign: int) -> None:
        self.database = Database(sign, WRITERS)
        self.shard = Shard(bounds=Bounds(pending=2, unjoined=1, retired=0, unreadable=1))
        self.topic: list[Produced] = []
        self.kept: dict[int, Produced] = {}  # what was read from the facts topic, by offset
        self.linear = 0
        self.no_reuse_up_to = dict.fromkeys(WRITERS, 0)
        self.late: set[tuple[str, int]] = set()
        self.nameless: set[str] = set()  # whose last JOIN nobody could read
        self.dropped: set[str] = set()  # retired writers that left the state

    def act(self, name: str, op: str, which: int, fate: str) -> None:
        process = self.database.processes[name]
        if not process.alive or op == "crash":
            for record in self.database.start(name):
                self.send(record, fate if op == "crash" else "well")
        elif op == "reserve":
            self.database.reserve(name)
        elif op == "commit" and process.open:
            self.database.commit(name, which)
            self.produce(self.database.send(name, -1), fate)
        elif op == "roll back" and process.open:
            self.produce(self.database.roll_back(name, which), fate)
        elif op == "heartbeat":
            self.produce(self.database.heartbeat(name), fate)
        elif op == "retire" and not process.open:
            self.produce(self.database.retire(name), fate)
        elif op == "read":
            self.read()

    def produce(self, records: Iterator[Record], fate: str) -> None:
        for record in records:
            self.send(record, fate)

    def send(self, record: Record, fate: str) -> None:
        if record.kind == "JOIN":
            (self.nameless.add if fate in ("cut off", "odd epoch") else self.nameless.discard)(record.writer)
        self.topic.append(produced(record, fate))

    def read(self) -> None:
        """All that was produced, as one batch; what is recalled is produced again."""
        self.kept |= {at: it for at, it in enumerate(self.topic, self.shard.next_offset) if it.topic is Topic.FACTS}
        taken: list[Taken] = [
            (offset, offset, (it.topic, it.partition), it.key, it.value)
            for offset, it in enumerate(self.topic, self.shard.next_offset)
        ]
        self.shard.next_offset += len(taken)
        self.topic.clear()
        for stream in self.shard.feed_packets(packed(taken)).streams if taken else ():
            if stream.stream == "events":
                self.look(stream)
        in_flight = self.database.in_flight()
        assert all(self.linear < id for name, id in in_flight if name not in self.nameless)

    def look(self, stream: StreamEffects) -> None:
        self.linear = abs(stream.linear)
        for recall in stream.requeues:
            found = [self.kept[at] for at in range(recall.first_offset, recall.last_offset + 1) if at in self.kept]
            self.topic += [
                it
                for it in found
                if it.partition == recall.partition and is_edge(it.value, it.key, "events", recall.writer, recall.epoch)
            ]
        for it in stream.late:
            self.late |= {(it.writer, id) for id in range(abs(it.prev) + 1, abs(it.id) + 1)}
        for move in stream.advances:
            prev, id = abs(move.prev), abs(move.id)
            if move.writer in self.dropped:  # it begins at 0 again, and Postgres tells what is beyond its old position
                prev, id = max(prev, self.no_reuse_up_to[move.writer]), max(id, self.no_reuse_up_to[move.writer])
            assert self.no_reuse_up_to[move.writer] == prev
            self.no_reuse_up_to[move.writer] = id
            committed = {it for name, it in self.database.facts if name == move.writer and prev < it <= id}
            told = {it for name, it in self.late if name == move.writer}
            assert move.unseen or move.facts >= len(committed - told)
        self.dropped -= {move.writer for move in stream.advances}
        self.dropped.update(stream.dropped_writers)


OPS = ["reserve"] * 6 + ["commit"] * 6 + ["roll back", "heartbeat", "crash", "crash", "retire", "read", "read"]


@settings(max_examples=examples(600))
@given(
    st.sampled_from([1, -1]),
    st.lists(
        st.tuples(writers, st.sampled_from(OPS), st.integers(0, 5), st.sampled_from(FATES)), min_size=10, max_size=80
    ),
)
@example(1, [("b", "reserve", 0, "well"), ("b", "retire", 0, "well"), ("a", "read", 0, "well")])  # b is forgotten
def test_nothing_that_committed_is_told_as_empty(sign: int, acts: list[tuple[str, str, int, str]]) -> None:
    """Rules 1, 5 and 9, whatever is turned away; but for a JOIN that nobody can read, from which nobody can know that
    its writer is there."""
    world = World(sign)
    for act in acts:
        world.act(*act)
    world.read()
    for name in WRITERS:
        world.act(name, "crash", 0, "well")
    while world.topic:
        world.read()


ODD = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["RDATA", "VOID", "POSITION", "JOIN", "RETIRE", "SKIP", "RUN", None, 5]),
        "stream": st.sampled_from(["events", "caches", "a b", "", None, 7]),
        "writer": st.sampled_from(["a", "b", "*", "w w", "", None]),
        "epoch": st.sampled_from([0, 1, 2, 2**63 - 1, 2**63, -1, 1.5, "1", None]),
        "prev": st.sampled_from([0, 1, -1, 2**62, None]),
        "id": st.sampled_from([1, 2, -3, 2**63 - 1, 2**63, 2**70, -(2**63), "batch", "x", 1e3, None]),
        "row": st.none(),
        "by": st.sampled_from(["ann", "", None, 3]),
        "why": st.just("so"),
    },
).map(msgspec.json.encode)
KEYS = st.sampled_from([b"events", b"caches", b"", None, b"\xff", b"a b", b"x1", b"x2", b"x3"])
PLACES = st.sampled_from([*[(Topic.FACTS, 0)] * 3, (Topic.FACTS, 1), (Topic.CONTROL, 0)])
odd_records = st.tuples(PLACES, KEYS, ODD | st.binary(max_size=9))


@settings(max_examples=examples(200))
@given(st.lists(st.lists(odd_records, min_size=1, max_size=20), max_size=6))
def test_a_hostile_producer_breaks_no_rule(batches: list[list[tuple[tuple[Topic, int], bytes | None, bytes]]]) -> None:
    """Rules 2 and 5: whatever it sends, under whatever key and to whatever topic, each record has one outcome, and no
    line goes back."""
    shard = Shard(bounds=Bounds(pending=2, unjoined=2, retired=1, unreadable=2))
    linear: dict[str, int] = {}
    for batch in batches:
        taken = [(at, at, place, key, value) for at, (place, key, value) in enumerate(batch, shard.next_offset)]
        shard.next_offset += len(batch)
        done = shard.feed_packets(packed(taken))
        outcomes = [count for it in done.streams for what, count in it.counts.items() if what != "forgotten"]
        assert sum(outcomes) + sum(it.count for it in done.rejected) == len(batch)
        for it in done.streams:
            assert abs(it.linear) >= linear.get(it.stream, 0)
            linear[it.stream] = abs(it.linear)
