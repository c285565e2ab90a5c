"""The pure core of `follow` against a model of the stream, Redis and Postgres: whatever happens, in any order."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.examples import examples
from tests.sinks.reader.model import StreamModel
from tidemark.sinks.reader.events import Advance, Event, Late, LinearMove, MissingLateCompletions, Place, Reread
from tidemark.sinks.reader.follow import CaughtUp, FollowProgram
from tidemark.sinks.reader.requests import AwaitEntry, Driver, Request
from tidemark.streaming.values.direction import is_beyond

NAMES = ("a", "b", "c")
WHATS = ("fact", "fact", "void", "announced")


class FollowWorld(RuleBasedStateMachine):
    """Writers, the pipeline and faults; two followers (one of each mode) look whenever they are told."""

    @initialize(sign=st.sampled_from((1, -1)), postgres=st.booleans())
    def begin(self, sign: int, postgres: bool) -> None:
        self.model = StreamModel(sign)
        self.postgres = postgres
        self.model.join("a")
        self.vector = ModelReader(self.model, "vector", postgres)
        self.linear = ModelReader(self.model, "linear", postgres)

    @rule(seed=st.integers(0, 2**32))
    def storm(self, seed: int) -> None:
        """Thirty likely things in a row: deeper than single rules come."""
        chance = Random(seed)
        for _ in range(30):
            self.anything(chance)

    def anything(self, chance: Random) -> None:
        name = chance.choice(NAMES)
        match chance.randrange(17):
            case 0 | 1 | 2:
                steps = [(chance.choice(NAMES), chance.choice(WHATS), chance.random() < 0.7) for _ in range(4)]
                self.write(steps)
            case 3 | 4 if self.model.open():
                who, edge = chance.choice(self.model.open())
                if chance.random() < 0.3:
                    self.model.skip(who, edge, early=chance.random() < 0.5)
                else:
                    self.model.deliver(who, edge)
            case 5 if self.model.skipped:
                self.model.come_late(*chance.choice(self.model.skipped))
            case 6:
                self.join(name)
            case 7 if chance.random() < 0.5:
                self.leave(name, forget=chance.random() < 0.5, back=chance.random() < 0.5)
            case 8:
                self.model.trim(chance.randrange(1, 5))
            case 9 if chance.random() < 0.3:
                self.model.flush(clock_back=chance.random() < 0.5)
            case 10 if self.model.positions and chance.random() < 0.5:
                self.model.refill(chance.randrange(6))
            case 11 if chance.random() < 0.3:
                self.prune(1)
            case 12 | 13:
                self.model.publish()
            case 14:
                self.observe(chance)
            case 16 if name in self.model.writers and chance.random() < 0.5:
                self.model.throw_out(name, chance.randrange(1, 6))
            case 15 if chance.random() < 0.3:
                self.restart()

    def observe(self, chance: Random) -> None:
        self.look(chance.random() < 0.5)
        self.each_once()

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.model.writers or self.model.writers[name].retired:
            self.model.join(name)

    @rule(steps=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(WHATS), st.booleans()), max_size=6))
    def write(self, steps: list[tuple[str, str, bool]]) -> None:
        """IDs are reserved; some complete at once."""
        for name, what, done in steps:
            if name not in self.model.writers or self.model.writers[name].retired:
                continue
            if what == "announced":
                self.model.announce(name)
            else:
                self.model.reserve(name, what)
            for who, edge in self.model.open()[-1:]:
                if done and who == name:
                    self.model.deliver(who, edge)

    @rule(data=st.data(), skip=st.integers(0, 5))
    @precondition(lambda self: self.model.open())
    def complete(self, data: st.DataObject, skip: int) -> None:
        name, edge = data.draw(st.sampled_from(self.model.open()))
        if skip < 2:
            self.model.skip(name, edge, early=skip == 0)
        else:
            self.model.deliver(name, edge)

    @rule(data=st.data())
    @precondition(lambda self: self.model.skipped)
    def come_late(self, data: st.DataObject) -> None:
        self.model.come_late(*data.draw(st.sampled_from(self.model.skipped)))

    @rule(name=st.sampled_from(NAMES))
    def finish(self, name: str) -> None:
        """All that a writer has open completes."""
        for who, edge in self.model.open():
            if who == name:
                self.model.deliver(who, edge)

    @rule(name=st.sampled_from(NAMES), forget=st.booleans(), back=st.booleans())
    def leave(self, name: str, forget: bool, back: bool) -> None:
        """A writer retires; perhaps it is forgotten, and comes back."""
        if name in self.model.writers:
            self.finish(name)
            self.model.retire(name)
            self.model.publish()
            if forget:
                self.model.forget(name)
            if back:
                self.model.join(name)

    @rule()
    def publish(self) -> None:
        self.model.publish()

    @rule()
    def commit(self) -> None:
        """The pipeline dies between Postgres and Redis: what it committed is shown with the next batch."""
        self.model.commit()
        self.model.flush(clock_back=False)

    @rule(count=st.integers(1, 5))
    def trim(self, count: int) -> None:
        self.model.trim(count)

    @rule(clock_back=st.booleans())
    def flush(self, clock_back: bool) -> None:
        self.model.flush(clock_back=clock_back)

    @rule(newest=st.integers(0, 5))
    def refill(self, newest: int) -> None:
        if self.model.positions:
            self.model.refill(newest)

    @rule(count=st.integers(1, 3))
    def prune(self, count: int) -> None:
        self.model.prune(count)

    @rule(both=st.booleans())
    def look(self, both: bool) -> None:
        self.vector.look()
        if both:
            self.linear.look()

    @rule()
    def publish_and_look(self) -> None:
        self.model.publish()
        self.look(True)

    @rule()
    def restart(self) -> None:
        self.vector.restart()
        self.linear.restart()

    @invariant()
    def each_once(self) -> None:
        if hasattr(self, "vector"):
            self.vector.check()
            self.linear.check()


class ModelReader:
    """Drives one follower and holds what it hands over against the model."""

    def __init__(self, model: StreamModel, mode: str, postgres: bool) -> None:
        self.model = model
        self.mode = mode
        self.postgres = postgres
        self.covered: dict[str, int] = {}  # writer -> how far its events have come
        self.line = 0
        self.read: set[int] = set()  # IDs of facts that a service would have read
        self.late: set[int] = set()  # and of facts that came late
        self.late_upto = 0
        self.excused = False  # told that late completions are not known any more
        self.caught_up = False
        self._start(Place())

    def _start(self, place: Place) -> None:
        self.following = FollowProgram("s", self.mode, place)  # type: ignore[arg-type]
        self.driver: Driver[Event | CaughtUp] = Driver(self.following.steps())

    def restart(self) -> None:
        place = self.following.place
        assert place is not None
        self._start(place)

    def look(self) -> None:
        """One whole look: until it would wait."""
        self.caught_up = False
        rung = isinstance(self.driver.step(), AwaitEntry)
        while True:
            step = self.driver.step()
            assert step is not None
            if isinstance(step, AwaitEntry):
                if not rung:
                    return
                rung = False
                self.driver.send_answer(None)
            elif isinstance(step, Request):
                self.driver.send_answer(self.model.answer(step, postgres=self.postgres))
            else:
                self.driver.mark_handed_over()
                self._take(step)

    def _take(self, event: Event | CaughtUp) -> None:
        match event:
            case CaughtUp():
                self.caught_up = True
                line, shown = self.model.shown_line, self.model.shown
                # Who is gone and was passed by the line is like one that never was: it may begin at the line.
                self.covered = {it: at for it, at in self.covered.items() if it in shown or is_beyond(at, line)}
                if self.mode == "vector":
                    assert self.following.writer_count <= len(shown) + len(self.covered.keys() - shown.keys())
            case Advance():
                self._covers(event.writer, event.prev, event.id)
                if event.proven_empty:
                    facts = self._facts(event.prev, event.id, lambda who: who == event.writer)
                    assert facts <= self.model.thrown
                self._read(event.prev, event.id, lambda who: who == event.writer)
            case Reread(writer=None):
                assert self.mode == "vector"
                self._read(event.prev, event.id, lambda who: who not in event.besides)
            case Reread(writer=writer):
                assert writer is not None
                self._covers(writer, event.prev, event.id)
                self._read(event.prev, event.id, lambda who: who == writer)
            case LinearMove():
                assert self.mode == "linear"
                assert event.prev == self.line
                assert is_beyond(event.id, event.prev)
                self.line = event.id
                facts = self._facts(event.prev, event.id, lambda _: True)
                if event.proven_empty:
                    assert facts <= self.model.thrown
                self._read(event.prev, event.id, lambda _: True)
            case Late():
                assert event.number > self.late_upto
                self.late_upto = event.number
                self.late |= self._facts(event.prev, event.id, lambda who: who == event.writer)
            case MissingLateCompletions():
                assert not self.postgres
                assert event.after == self.late_upto
                assert event.number > event.after
                self.late_upto = event.number
                self.excused = True

    def _covers(self, writer: str, prev: int, id: int) -> None:
        assert is_beyond(id, prev)
        # A writer that we meet for the first time begins where the line was that we had seen settled.
        assert prev == self.covered.get(writer, prev)
        self.covered[writer] = id

    def _facts(self, prev: int, id: int, whose: Callable[[str | None], bool]) -> set[int]:
        return {
            fact
            for fact, who in self.model.facts.items()
            if whose(who) and is_beyond(fact, prev) and not is_beyond(fact, id)
        }

    def _read(self, prev: int, id: int, whose: Callable[[str | None], bool]) -> None:
        facts = self._facts(prev, id, whose)
        assert not facts & self.read, "handed over twice"
        self.read |= facts

    def check(self) -> None:
        """After a look, every fact up to the published positions was handed over."""
        if not self.caught_up:
            return
        self.caught_up = False  # the world goes on
        line = self.model.shown_line
        for fact, who in self.model.facts.items():
            position = line if self.mode == "linear" else self.model.shown.get(who or "", line)
            if not is_beyond(fact, position) and fact not in self.model.untold() and not self.excused:
                assert fact in self.read | self.late, f"{fact} of {who} was stepped over"
        assert self.late_upto >= self.model.shown_late


@pytest.mark.parametrize("mode", ["vector", "linear"])
def test_where_a_list_that_is_filled_anew_lacks_late_completions_readers_hear_of_it(mode: str) -> None:
    """Whoever cannot ask Postgres hears that some are lost, and is handed those that are there."""
    model = StreamModel(1)
    model.join("a")
    reader = ModelReader(model, mode, postgres=False)
    for _ in range(3):
        model.reserve("a", "fact")
    for who, edge in model.open():
        model.skip(who, edge, early=False)
    model.publish()
    reader.look()
    for who, edge in [*model.skipped]:
        model.come_late(who, edge)
    model.flush(clock_back=False)
    model.commit()
    model.refill(1)
    reader.look()
    reader.check()
    assert reader.excused
    assert reader.late == {3}


def test_events_join_and_hand_over_everything_once() -> None:
    """Events join exactly per writer, hand every fact over once, step over none, and never call a fact empty."""
    run_state_machine_as_test(FollowWorld, settings=settings(max_examples=examples(150)))
