"""The decision alone, against a truth that knows who owns each ID."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidemark.sources.relay.evidence import StreamEvidence, ids_of
from tidemark.streaming.intervals import Intervals

Ids = st.integers(1, 40)


@dataclass
class Owned:
    """IDs of transactions, numbered from 1; each runs, has committed or has rolled back."""

    owner: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)

    def give(self, transaction: int) -> None:
        if transaction in self.running:
            self.owner[len(self.owner) + 1] = transaction

    def facts(self) -> set[int]:
        return {id for id, transaction in self.owner.items() if transaction in self.committed}


Act = st.one_of(
    st.tuples(st.just("give"), st.integers(1, 5)),
    st.tuples(st.just("begin"), st.integers(1, 5)),
    st.tuples(st.just("commit"), st.integers(1, 5)),
    st.tuples(st.just("roll back"), st.integers(1, 5)),
    st.tuples(st.just("look"), st.integers(1, 4)),
)


@settings(max_examples=examples(400))
@given(acts=st.lists(Act, max_size=60), locks=st.booleans())
def test_each_id_is_decided_once_and_rightly(acts: list[tuple[str, int]], locks: bool) -> None:
    """With pages of a few facts and transactions in any order, asked for locks or not; in the end nothing is open."""
    truth, evidence = Owned(), StreamEvidence(0)
    told: set[int] = set()
    voids: set[int] = set()
    numbers = {name: name for name in range(1, 6)}

    def look(size: int) -> None:
        holders = frozenset(truth.owner.values()) & truth.running if locks and evidence.lingers else None
        evidence.look(len(truth.owner), frozenset(truth.running), holders)
        if asked := evidence.unread():
            inside = sorted(id for id in truth.facts() if asked.within(id - 1, id))
            upto = inside[size - 1] if len(inside) > size else int(asked.highs[-1])
            found = [id for id in inside if id <= upto]
            new = {*ids_of(evidence.read(asked.upto(upto), 0, found))}
            assert not (voids | told) & new
            assert not (voids | told) & {*found}
            voids.update(new)
            told.update(found)

    for act, value in acts:
        transaction = numbers[value]
        if act == "begin" and transaction not in truth.running | truth.committed:
            truth.running.add(transaction)
        elif act == "give":
            truth.give(transaction)
        elif act in {"commit", "roll back"} and transaction in truth.running:
            truth.running.remove(transaction)
            if act == "commit":
                truth.committed.add(transaction)
            numbers[value] = transaction + 10
        elif act == "look":
            look(value)
        assert not voids & truth.facts()
    truth.running.clear()
    for _ in range(100):
        if evidence.open or evidence.head < len(truth.owner):
            look(3)
    assert not evidence.open
    assert told == truth.facts()
    assert voids == truth.owner.keys() - told


def test_many_transactions_are_few_marks() -> None:
    """What is remembered is bounded, however many looks found somebody running; then it only waits for more of them."""
    evidence = StreamEvidence(0)
    for number in range(1, 200):
        evidence.look(number, frozenset(range(number, 400)))
        evidence.read(evidence.unread(), 0, [])
    assert len(evidence._marks) <= 33
    evidence.look(199, frozenset())
    asked = evidence.unread()
    assert asked == Intervals.of([(0, 199)])
    assert [*ids_of(evidence.read(asked, 0, [7]))] == [id for id in range(1, 200) if id != 7]


def test_what_another_relay_has_decided_is_not_decided_again() -> None:
    """At or below the floor nothing is missing: it is gone."""
    evidence = StreamEvidence(0)
    evidence.look(9, frozenset())
    assert [*ids_of(evidence.read(evidence.unread(), 6, [8]))] == [7, 9]
    assert not evidence.open
