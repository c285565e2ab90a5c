"""Positions against the truth: writers that keep the protocol, whose databases know what is in flight."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.streaming.builders import Record, Shard
from tests.streaming.protocol import Database, Process

WRITERS = ("a", "b", "c")
writers = st.sampled_from(WRITERS)


class Truthful(RuleBasedStateMachine):
    """Rules 1, 9 and 10: nothing is passed that may still appear, what comes contradicts nothing that is settled, and
    once nothing is in flight, nothing is held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard()
        self.topic: list[Record] = []
        self.read = 0
        self.linear = 0
        self.evidence: Counter[str] = Counter()

    @initialize(sign=st.sampled_from([1, -1]))
    def begin(self, sign: int) -> None:
        self.database = Database(sign, WRITERS)

    def running(self, name: str) -> Process:
        process = self.database.processes[name]
        if not process.alive:
            self.topic.extend(self.database.start(name))
        return process

    @rule(name=writers, count=st.integers(1, 4))
    def reserve(self, name: str, count: int) -> None:
        self.running(name)
        for _ in range(count):
            self.database.reserve(name)

    @rule(name=writers, ends=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["commit", "void"])), max_size=5))
    def complete(self, name: str, ends: list[tuple[int, str]]) -> None:
        for which, how in ends[: len(self.running(name).open)]:
            if how == "commit":
                self.database.commit(name, which)
            else:
                self.topic.extend(self.database.roll_back(name, which))

    @rule(name=writers, which=st.lists(st.integers(0, 7), max_size=5))
    def send(self, name: str, which: list[int]) -> None:
        for at in which[: len(self.running(name).outbox)]:
            self.topic.extend(self.database.send(name, at))

    @rule(name=writers)
    def heartbeat(self, name: str) -> None:
        self.running(name)
        self.topic.extend(self.database.heartbeat(name))

    @rule(name=writers)
    def crash(self, name: str) -> None:
        self.topic.extend(self.database.start(name))

    @rule(name=writers)
    def retire(self, name: str) -> None:
        process = self.running(name)
        if not process.open and not process.outbox:
            self.topic.extend(self.database.retire(name))

    @precondition(lambda self: self.read < len(self.topic))
    @rule(count=st.integers(1, 30))
    def advance(self, count: int) -> None:
        batch = self.topic[self.read : self.read + count]
        self.read += len(batch)
        done = self.shard.feed(*batch)
        assert not self.shard.rejected
        assert sum(done.counts.values()) == len(batch)
        for move in done.advances:
            self.evidence[move.writer] += move.facts
            assert not move.unseen
            assert not move.skipped
        assert not done.late
        self.look()

    def look(self) -> None:
        sign = self.database.sign
        unread = {(it.writer, abs(it.id)) for it in self.topic[self.read :] if it.kind in ("RDATA", "VOID")}
        facts = {(it.writer, abs(it.id)) for it in self.topic[self.read :] if it.kind == "RDATA"}
        in_flight = self.database.in_flight() | unread
        assert all(sign * self.shard.linear < id for _, id in in_flight)
        for name, at in self.shard.positions.items():
            assert all(sign * at < id for writer, id in in_flight if writer == name)
            passed = {id for writer, id in self.database.facts - facts if writer == name and id <= sign * at}
            assert self.evidence[name] == len(passed)

    def teardown(self) -> None:
        """All that is in flight ends; then every position and the line reach the end of the sequence."""
        for name in WRITERS:
            for _ in range(len(self.running(name).open)):
                self.topic.extend(self.database.roll_back(name, 0))
            for _ in range(len(self.running(name).outbox)):
                self.topic.extend(self.database.send(name, 0))
        for name in WRITERS:
            self.topic.extend(self.database.heartbeat(name))
        if self.read < len(self.topic):
            self.advance(len(self.topic) - self.read)
        last = self.database.sign * self.database.last_value
        assert self.shard.linear == last
        assert self.shard.positions == dict.fromkeys(WRITERS, last)


Truthful.TestCase.settings = settings(print_blob=True)
TestTruthful = Truthful.TestCase
