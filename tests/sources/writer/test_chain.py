"""The chain as a state machine: whatever happens in whatever order, what is told tiles the line and tells the truth."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sources.writer.judge import Verdict, judged
from tidemark.sources.writer.chain import NextvalCall, ReservationChain, SettledSpan
from tidemark.sources.writer.records import OutboxFact, RecordBuilder
from tidemark.streaming.direction import Direction
from tidemark.streaming.records import Timeline

START = 3


class Writing(RuleBasedStateMachine):
    """A writer with several `nextval` on their way, whose sequence others use too.

    `truth` says of each of its IDs whether a row was committed with it.
    """

    @initialize(sign=st.sampled_from([1, -1]), seed=st.integers(0, 2**32))
    def begin(self, sign: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.builder = RecordBuilder("shop", 1, "orders", Direction(sign))
        self.chain = ReservationChain(START)
        self.head = START
        self.sent: list[NextvalCall] = []
        self.executed: list[tuple[NextvalCall, list[int]]] = []
        self.open: set[int] = set()
        self.truth: dict[int, bool] = {}
        self.taken: list[SettledSpan] = []
        self.records: list[bytes] = []

    @rule()
    def another_writer_takes_an_id(self) -> None:
        self.head += 1

    @rule()
    def send_a_nextval(self) -> None:
        self.sent.append(self.chain.begin())

    @precondition(lambda self: self.sent)
    @rule(count=st.integers(1, 3))
    def the_server_executes_one(self, count: int) -> None:
        """Any of those on their way. Other IDs may lie between those of one call."""
        call = self.sent.pop(self.random.randrange(len(self.sent)))
        ids = []
        for _ in range(count):
            self.head += self.random.randint(1, 2)
            ids.append(self.head)
        self.executed.append((call, ids))

    @precondition(lambda self: self.executed)
    @rule()
    def an_answer_comes(self) -> None:
        """Of any that were executed, in any order."""
        call, ids = self.executed.pop(self.random.randrange(len(self.executed)))
        self.chain.took(call, ids, 0.0)
        self.open.update(ids)

    @precondition(lambda self: self.executed)
    @rule()
    def an_answer_is_lost(self) -> None:
        """The server gave IDs and the connection died: nobody knows of them."""
        call, _ = self.executed.pop(self.random.randrange(len(self.executed)))
        self.chain.missed(call)

    @precondition(lambda self: self.sent)
    @rule()
    def a_connection_dies_before_its_nextval_is_executed(self) -> None:
        """The server may execute it yet, at any time later."""
        self.chain.missed(self.sent.pop(self.random.randrange(len(self.sent))))
        self.head += self.random.randint(0, 1)

    @precondition(lambda self: self.open)
    @rule(row=st.booleans(), known=st.booleans())
    def end(self, row: bool, known: bool) -> None:
        """Any transaction ends; that it wrote nothing may be known at once or only from the outbox."""
        id = self.random.choice(sorted(self.open))
        self.open.remove(id)
        self.truth[id] = row
        self.chain.end([id], [id] if known and not row else [], 0.0)

    @rule()
    def beat(self) -> None:
        on_its_way = bool(self.sent or self.executed)
        last = self.chain.last
        assert self.chain.announce(self.head, self.chain.calm(), 0.0) == (not on_its_way and self.head > last)

    @rule()
    def beat_while_reserving(self) -> None:
        """A head that was read while a nextval was on its way says nothing: the new ID may be below it."""
        calm = self.chain.calm()
        call = self.chain.begin()
        assert self.chain.calm() is None
        self.head += 1
        assert not self.chain.announce(self.head, calm, 0.0)
        self.chain.missed(call)
        assert not self.chain.announce(self.head, calm, 0.0)

    @rule()
    def take(self) -> None:
        self.taken += self.chain.take()

    @precondition(lambda self: self.taken)
    @rule()
    def put_back(self) -> None:
        self.chain.put_back(self.taken.pop(self.random.randrange(len(self.taken))))

    @rule()
    def crash_of_the_database(self) -> None:
        self.chain.doubt_voids()

    @precondition(lambda self: self.taken)
    @rule(facts=st.integers(1, 3))
    def tell(self, facts: int) -> None:
        """No more facts of a span are read at once than `facts`; the rest of it goes back."""
        span = self.taken.pop(self.random.randrange(len(self.taken)))
        ids = sorted(id for id, row in self.truth.items() if row and span.prev < id <= span.id)
        if len(ids) > facts:
            ids = ids[:facts]
            span, rest = span.cut(ids[-1], len(ids))
            self.chain.put_back(rest)
        found = [OutboxFact(id, ("{}",)) for id in ids]
        self.records += self.builder.span(span, found, self.chain.voids(span))
        self.chain.acknowledged(span)

    @invariant()
    def in_flight_is_what_is_open(self) -> None:
        if hasattr(self, "chain"):
            assert self.chain.in_flight == len(self.open)

    def teardown(self) -> None:
        """All ends, all is told, in any order: the position is the last ID, and the facts are the truth's."""
        if not hasattr(self, "chain"):
            return
        while self.sent:
            self.the_server_executes_one(1)
        while self.executed:
            self.an_answer_comes()
        while self.open:
            self.end(row=True, known=False)
        self.beat()
        self.taken += self.chain.take()
        while self.taken:
            self.tell(10**6)
            self.taken += self.chain.take()
        assert self.chain.unacknowledged == 0
        self.random.shuffle(self.records)
        verdict = judge(self.builder, self.records)
        facts = {self.builder.towards.signed(id) for id, row in self.truth.items() if row}
        assert verdict.rejected == {}
        assert verdict.announced.get("orders", set()) == facts
        assert verdict.position("orders", "shop") == self.chain.last == max(self.head, START)
        effects = verdict.effects["orders"]
        assert sum(move.facts for move in effects.advances) == len(facts)
        assert effects.counts.get("duplicate", 0) == 0


def judge(builder: RecordBuilder, told: list[bytes]) -> Verdict:
    return judged([(b"orders", value) for value in [builder.join(START, Timeline("db/1", "start 1")), *told]])


TestWriting = Writing.TestCase


@given(st.permutations([4, 5, 6, 7, 8]))
def test_what_ended_is_one_span_as_soon_as_it_joins(order: list[int]) -> None:
    """Five IDs in any order of their ends: never more spans than gaps between them, and one at the end."""
    chain = ReservationChain(START)
    chain.took(chain.begin(), [4, 5, 6, 7, 8], 0.0)
    ended: set[int] = set()
    for id in order:
        chain.end([id], [], 0.0)
        ended.add(id)
        spans = chain.take()
        assert len(spans) == sum(1 for each in ended if each - 1 not in ended)
        for span in spans:
            chain.put_back(span)
    assert chain.take() == [SettledSpan(START, 8, 5, 0.0)]


def test_a_million_ended_ids_are_one_span() -> None:
    """Kafka is away for long: what is kept of the facts that wait does not grow with them."""
    chain = ReservationChain(0)
    for id in range(1, 100_001):
        chain.took(chain.begin(), [id], 0.0)
        chain.end([id], [id] if id % 5 == 0 else [], 0.0)
    (span,) = chain.take()
    assert (span.prev, span.id, span.ids) == (0, 100_000, 100_000)
    assert len(chain.voids(span)) == 10_000


def test_an_id_that_was_promised_to_be_empty_is_never_taken() -> None:
    """A sequence that was set back gives an ID at or below the last: it must not become a fact."""
    chain = ReservationChain(START)
    assert chain.announce(9, chain.calm(), 0.0)
    call = chain.begin()
    with pytest.raises(ValueError, match="9 was reserved after 9"):
        chain.took(call, [9], 0.0)


def test_void_ids_are_named_only_while_the_database_has_not_crashed() -> None:
    """After a crash a number may be given again to another writer: as an edge it moves our position, not the line."""
    chain = ReservationChain(START)
    chain.took(chain.begin(), [4, 5, 6], 0.0)
    chain.end([4], [4], 0.0)
    chain.doubt_voids()
    chain.end([5], [5], 0.0)
    chain.took(chain.begin(), [7], 0.0)
    chain.end([6, 7], [7], 0.0)
    (span,) = chain.take()
    told = [
        *RecordBuilder("shop", 1, "orders", Direction.FORWARD).span(span, [OutboxFact(6, ("{}",))], chain.voids(span))
    ]
    kinds = judge(RecordBuilder("shop", 1, "orders", Direction.FORWARD), told).kinds()
    assert kinds == [("JOIN", 1, 3), ("RDATA", 1, 6), ("VOID", 1, 7)]


def test_an_id_waits_for_the_answers_that_may_still_bring_a_lower_one() -> None:
    """7 came and ended first; 5 and 6 are of calls that were out then. A call that began later holds nothing back."""
    chain = ReservationChain(START)
    slow, lost = chain.begin(), chain.begin()
    chain.took(chain.begin(), [7], 0.0)
    chain.end([7], [], 0.0)
    later = chain.begin()
    assert chain.take() == []
    chain.took(slow, [5], 0.0)
    assert chain.take() == []
    chain.missed(lost)
    assert chain.take() == [SettledSpan(5, 7, 1, 0.0)]
    chain.end([5], [], 0.0)
    assert chain.take() == [SettledSpan(START, 5, 1, 0.0)]
    chain.took(later, [8], 0.0)
