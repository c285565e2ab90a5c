"""An operator's act that settled what it should not have: taken back by its writer's JOIN, or by an operator."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.examples import examples
from tests.streaming.builders import Record, Shard, forced, join, position, rdata, retire, skip, void
from tests.streaming.protocol import Database
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import CURRENT_EPOCH, DatabaseStart

FAR = 2_000_000_000
WRITERS = ("a", "b", "c")
writers = st.sampled_from(WRITERS)


def late(done: StreamEffects) -> list[tuple[str, int, int, int, str]]:
    return [(it.writer, it.prev, it.id, it.facts, it.why) for it in done.late]


def chain(shard: Shard, name: str) -> int:
    return shard.stream().writers[name].chain.position


@pytest.fixture
def shard() -> Shard:
    """a stands at 6 and has 8 in flight, b at 7; then a is skipped to an ID that nobody has given out."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), rdata("a", 6, 0, epoch=1), rdata("b", 7, 0, epoch=1))
    done = shard.feed(skip("a", 6, FAR, beyond=True))
    assert (shard.positions, shard.linear, late(done)) == ({"a": FAR, "b": 7}, 7, [])
    return shard


def test_a_join_below_a_skip_takes_it_back_and_begins_no_timeline(shard: Shard) -> None:
    """It is no database that went back: the writer never said that it had completed what was skipped."""
    done = shard.feed(join("a", 8, epoch=2, timeline=DatabaseStart("db/1", "a2")))
    assert (done.timelines, late(done), done.advances) == ([], [], [])
    assert (shard.positions, chain(shard, "a")) == ({"a": FAR, "b": 7}, 8)
    shard.feed(rdata("b", 12, 7, epoch=1))
    assert shard.linear == 8
    done = shard.feed(rdata("a", 11, 8, epoch=2))
    assert (late(done), shard.linear) == ([("a", 8, 11, 1, "regressed")], 12)


def test_a_join_below_what_came_late_into_a_skip_begins_a_timeline(shard: Shard) -> None:
    """The writer did complete 8: a JOIN that does not know of it comes from a database that went back."""
    shard.feed(rdata("a", 8, 6, epoch=1))
    (begun,) = shard.feed(join("a", 7, epoch=2)).timelines
    assert (begun.id, begun.position, begun.why) == (7, FAR, "position")


@pytest.mark.parametrize("id", [0, 6])
def test_an_operator_takes_a_skip_back(shard: Shard, id: int) -> None:
    """A JOIN at the current epoch: what only an operator settled beyond its ID is open again, and the line waits."""
    done = shard.feed(forced(join("a", id, epoch=CURRENT_EPOCH)))
    assert [(it.kind, it.epoch, it.id) for it in done.overrides] == [("JOIN", 1, id)]
    assert (done.counts, late(done), done.timelines, shard.rejected) == ({"applied": 1}, [], [], {})
    assert (shard.positions, chain(shard, "a"), done.allocated) == ({"a": FAR, "b": 7}, 6, 7)
    shard.feed(rdata("b", 12, 7, epoch=1))
    assert shard.linear == 7
    done = shard.feed(rdata("a", 8, 6, epoch=1), rdata("a", 11, 8, epoch=1))
    assert late(done) == [("a", 6, 11, 2, "regressed")]
    assert (shard.positions, shard.linear) == ({"a": FAR, "b": 12}, 12)
    assert shard.feed(forced(join("a", 11, epoch=CURRENT_EPOCH))).counts == {"duplicate": 1}


def test_what_is_taken_back_may_be_less_than_what_was_skipped(shard: Shard) -> None:
    """Up to the ID of the act the skip stands, also where no edge of the writer ends there."""
    shard.feed(forced(join("a", 7, epoch=CURRENT_EPOCH)))
    assert chain(shard, "a") == 7
    shard.feed(rdata("a", 8, 6, epoch=1))
    assert chain(shard, "a") == 8
    shard.feed(skip("a", 8, 9), rdata("a", 11, 8, epoch=1))
    assert chain(shard, "a") == 11


def test_what_its_writer_completed_in_a_skip_stays_when_the_skip_is_taken_back(shard: Shard) -> None:
    """Its record came once, late, and will not come again; what is open below it holds the line as ever."""
    done = shard.feed(rdata("a", 11, 8, epoch=1), forced(join("a", 6, epoch=CURRENT_EPOCH)))
    assert late(done) == [("a", 8, 11, 1, "skipped")]
    assert (chain(shard, "a"), [*shard.stream().writers["a"].chain.gaps()]) == (6, [(6, 8, shard.now)])
    shard.feed(rdata("b", 12, 7, epoch=1), rdata("a", 8, 6, epoch=1))
    assert (chain(shard, "a"), shard.linear) == (11, 12)


def test_a_skip_above_a_gap_is_taken_back_whole() -> None:
    """No position passed it, so what comes there counts, and is not late. Counts of what it is cut from are at most the
    width.
    """
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 9, 8, epoch=1), skip("a", 9, FAR, beyond=True))
    assert shard.positions == {"a": 0}
    done = shard.feed(forced(join("a", 0, epoch=CURRENT_EPOCH)), rdata("a", 12, 9, epoch=1))
    assert late(done) == [("a", 9, 12, 1, "skipped")]
    done = shard.feed(rdata("a", 14, 12, epoch=1), rdata("a", 8, 0, epoch=1))
    assert (late(done), shard.positions, done.counts) == ([], {"a": 14}, {"applied": 2})
    assert [(it.facts, it.skipped) for it in done.advances] == [(3, 4)]


def test_a_far_retirement_is_taken_back_by_its_writers_join() -> None:
    """Rule 1: when all have retired after all, the line goes where they stood, and not where it was mistyped."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), rdata("a", 6, 0, epoch=1), forced(retire("a", FAR), beyond=True))
    done = shard.feed(join("a", 8, epoch=2), rdata("a", 9, 8, epoch=2))
    assert done.timelines == []
    shard.feed(retire("a", 9, epoch=2), retire("b", 0))
    assert shard.linear == 9


def test_a_timeline_forgets_what_an_operator_settled_and_nobody_completed(shard: Shard) -> None:
    """What is late because the database went back is what was completed: of a skip there is nothing to tell."""
    done = shard.feed(join("b", 5, epoch=2))
    assert [it.why for it in done.timelines] == ["position"]
    assert late(done) == []


def test_late_ranges_have_the_bound_of_pending_spans() -> None:
    """Rule 9: past it what came late is taken for an operator's word alone, so taken back it is waited for."""
    shard = Shard(bounds=Bounds(pending=3))
    shard.feed(join("a", 0), skip("a", 0, 100, beyond=True))
    shard.feed(*(rdata("a", id, epoch=1) for id in range(2, 40, 2)))
    assert [*shard.stream().writers["a"].late_ranges] == [(0, 1), (2, 3), (4, 100)]
    shard.feed(forced(join("a", 0, epoch=CURRENT_EPOCH)))
    assert [*shard.stream().writers["a"].chain.gaps()] == [(0, 1, shard.now), (2, 3, shard.now)]


def test_each_id_of_a_skip_comes_late_once(shard: Shard) -> None:
    """Rule 5: what is sent again is a duplicate; a fact that its writer had declared not to be there denies it."""
    shard.feed(rdata("a", 8, 6, epoch=1), position("a", 8, 11, epoch=1), void("a", 11, 12, epoch=1))
    assert shard.feed(rdata("a", 8, 6, epoch=1), position("a", 8, 11, epoch=1)).counts == {"duplicate": 2}
    assert late(shard.feed(rdata("a", 10, 8, epoch=1))) == [("a", 9, 10, 1, "announced")]
    assert shard.feed(rdata("a", 10, 8, epoch=1)).counts == {"duplicate": 1}


class Operated(RuleBasedStateMachine):
    """Rule 1: writers that keep the contract, and an operator who skips what is open, or was never given out, and takes
    it back: nothing else is passed, and once all is taken back nothing is held for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard()
        self.queue: list[Record] = []
        self.signed: dict[str, set[int]] = {name: set() for name in WRITERS}

    @initialize(sign=st.sampled_from([1, -1]))
    def begin(self, sign: int) -> None:
        self.database = Database(sign, WRITERS)

    @rule(name=writers, count=st.integers(0, 4), ends=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=5))
    def work(self, name: str, count: int, ends: list[tuple[int, bool]]) -> None:
        process = self.database.processes[name]
        if not process.alive:
            self.crash(name)
        for _ in range(count):
            self.database.reserve(name)
        for which, commit in ends[: len(process.open)]:
            if commit:
                self.database.commit(name, which)
                self.queue.extend(self.database.send(name, -1))
            else:
                self.queue.extend(self.database.roll_back(name, which))

    @rule(name=writers)
    def beat(self, name: str) -> None:
        if self.database.processes[name].alive:
            self.queue.extend(self.database.heartbeat(name))

    @rule(name=writers)
    def crash(self, name: str) -> None:
        self.advance()  # what the line passes before the process is there needs no word about it
        self.queue.extend(self.database.start(name))
        self.signed[name].clear()
        self.advance()

    @rule(name=writers, at=st.integers(-4, 4), width=st.sampled_from([1, 2, 3, 50]))
    def skip(self, name: str, at: int, width: int) -> None:
        prev = max(0, self.database.processes[name].last + at)
        if self.act(
            Record("SKIP", name, CURRENT_EPOCH, self.database.sign * prev, self.database.sign * (prev + width))
        ):
            self.signed[name] |= {*range(prev + 1, prev + width + 1)}

    @rule(name=writers, at=st.integers(-6, 4))
    def take_back(self, name: str, at: int) -> None:
        id = max(0, self.database.processes[name].last + at)
        if self.act(Record("JOIN", name, CURRENT_EPOCH, id=self.database.sign * id)):
            self.signed[name] = {it for it in self.signed[name] if it <= id}

    def act(self, record: Record) -> bool:
        """Whether it was taken."""
        self.advance()
        self.queue.append(forced(record, beyond=True))
        return not self.advance(acting=record)

    @rule()
    def read(self) -> None:
        self.advance()

    def advance(self, acting: Record | None = None) -> dict[int, str]:
        """All that was sent; gives what was rejected of it."""
        before, line = dict(self.shard.positions), abs(self.shard.linear)
        if not self.queue:
            return {}
        done = self.shard.feed(*self.queue)
        self.queue.clear()
        assert not done.timelines
        assert not self.shard.rejected or acting is not None
        if acting is not None and acting.kind == "SKIP":
            return self.shard.rejected
        passed = {*range(line + 1, abs(self.shard.linear) + 1)}
        running = [name for name in WRITERS if self.database.processes[name].alive]
        assert all(id <= self.database.last_value or all(id in self.signed[name] for name in running) for id in passed)
        for name, id in self.database.in_flight():
            if id not in self.signed[name]:
                assert id not in passed
                assert not abs(before.get(name, 0)) < id <= abs(self.shard.positions[name])
        return self.shard.rejected

    def teardown(self) -> None:
        """All is taken back, and all that is in flight ends: every chain is at the end of the sequence."""
        self.advance()
        for name, process in self.database.processes.items():
            if process.alive:
                self.act(Record("JOIN", name, CURRENT_EPOCH))
                self.signed[name].clear()
        for name, process in self.database.processes.items():
            for _ in range(len(process.open)):
                self.queue.extend(self.database.roll_back(name, 0))
        for name in WRITERS:
            self.beat(name)
        self.advance()
        for name, process in self.database.processes.items():
            if process.alive:
                chain_ = self.shard.stream().writers[name].chain
                assert (chain_.position, chain_.pending) == (self.database.last_value, [])


Operated.TestCase.settings = settings(max_examples=examples(200), print_blob=True)
TestOperated = Operated.TestCase
