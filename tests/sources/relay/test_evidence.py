"""The decision alone, against a truth that knows who owns each ID."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidemark.sources.relay.evidence import LockOwner, StreamEvidence, WriterChains, iterate_ids
from tidemark.streaming.values.intervals import Intervals

OWN, COMMON_CUT, NAMES = "0", "-1", ("0", "1", "2")
"""Writers; two may have one number of locks."""


@dataclass
class Owned:
    """IDs of transactions, numbered from 1, each in the name of a writer; a transaction runs, has committed or rolled
    back.
    """

    hashes: int
    owner: dict[int, tuple[int, str]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)

    def give(self, transaction: int, writer: str) -> None:
        if transaction in self.running:
            self.owner[len(self.owner) + 1] = transaction, writer

    def facts(self) -> dict[int, str]:
        return {id: writer for id, (transaction, writer) in self.owner.items() if transaction in self.committed}

    def number(self, writer: str) -> int:
        return min(int(writer), self.hashes)

    def lock_owners(self) -> frozenset[LockOwner]:
        return frozenset(
            LockOwner(each, self.number(writer)) for each, writer in self.owner.values() if each in self.running
        )


class Looking:
    """What one relay knows and has told: facts, voids, and edges by writer."""

    def __init__(self, truth: Owned, *, several: bool, locks: bool) -> None:
        self._truth = truth
        self._locks = locks
        self.evidence = StreamEvidence(0, has_several_writers=several)
        self.chains = WriterChains(dict.fromkeys(NAMES, 0)) if several else None
        self.told: set[int] = set()
        self.voids: set[int] = set()
        self.edges: dict[str, set[tuple[int, int]]] = defaultdict(set)

    def look(self, size: int) -> None:
        truth, evidence = self._truth, self.evidence
        lock_owners = truth.lock_owners() if self._locks and evidence.needs_locks else None
        evidence.observe(len(truth.owner), frozenset(truth.running), lock_owners)
        if asked := evidence.unread_ranges():
            facts = truth.facts()
            inside = sorted(id for id in facts if asked.within(id - 1, id))
            upto = inside[size - 1] if len(inside) > size else int(asked.highs[-1])
            found = [id for id in inside if id <= upto]
            new = {*iterate_ids(evidence.note_rows(asked.up_to(upto), found))}
            assert not (self.voids | self.told) & new
            assert not (self.voids | self.told) & {*found}
            self.voids.update(new)
            self.told.update(found)
            for id in [*found, *new]:
                writer = facts.get(id, OWN)
                self._tell(OWN if writer == COMMON_CUT else writer, id)
                if self.chains is not None and writer == COMMON_CUT:
                    self.chains.note_common_cut(id)
        if self.chains is not None:
            for name, prev, id in self.chains.announce(self._open_to):
                self.edges[name].add((prev, id))

    def _tell(self, writer: str, id: int) -> None:
        self.edges[writer].add((id - 1, id))
        if self.chains is not None:
            self.chains.note_sent(writer, Intervals.from_ids(np.array([id])))

    def _open_to(self, name: str) -> Intervals:
        return self.evidence.undecided_ids(None if name == OWN else {self._truth.number(name)})


Act = st.one_of(
    st.tuples(st.just("give"), st.integers(1, 5), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["begin", "commit", "roll back"]), st.integers(1, 5), st.just("")),
    st.tuples(st.just("look"), st.integers(1, 4), st.sampled_from(["0", "1"])),
    st.tuples(st.just("common cut"), st.just(0), st.just("")),
)


@settings(max_examples=examples(400))
@given(acts=st.lists(Act, max_size=80), locks=st.booleans(), several=st.booleans(), hashes=st.integers(1, 2))
def test_each_id_is_decided_once_and_rightly(
    acts: list[tuple[str, int, str]], locks: bool, several: bool, hashes: int
) -> None:
    """With pages of a few facts and transactions in any order, asked for locks or not; in the end nothing is open. Two
    that look at different times tell edges that are equal or apart, and no range over a fact of its writer.
    """
    truth = Owned(hashes)
    both = [Looking(truth, several=several, locks=locks) for _ in range(2)]
    numbers = {name: name for name in range(1, 6)}

    def check() -> None:
        facts = truth.facts()
        for each in both:
            assert not each.voids & facts.keys()
            for writer, edges in each.edges.items():
                own = {id for id, name in facts.items() if name == writer} - each.told
                assert not any(prev < id <= top for id in own for prev, top in edges)

    for act, value, more in acts:
        transaction = numbers.get(value, 0)
        if act == "begin" and transaction not in truth.running | truth.committed:
            truth.running.add(transaction)
        elif act == "give":
            truth.give(transaction, more)
        elif act == "common cut":
            truth.running.add(-1)
            truth.give(-1, COMMON_CUT)
            truth.running.remove(-1)
            truth.committed.add(-1)
        elif act in {"commit", "roll back"} and transaction in truth.running:
            truth.running.remove(transaction)
            if act == "commit":
                truth.committed.add(transaction)
            numbers[value] = transaction + 10
        elif act == "look":
            both[int(more)].look(value)
        check()
    truth.running.clear()
    truth.committed.add(-1)
    truth.owner[len(truth.owner) + 1] = -1, COMMON_CUT
    for each in both:
        for _ in range(100):
            each.look(3)
        assert not each.evidence.has_undecided
        assert each.told == truth.facts().keys()
        assert each.voids == truth.owner.keys() - each.told
    check()
    for writer in NAMES if several else (OWN,):
        one, other = (each.edges[writer] for each in both)
        assert one == other
        if several:
            at = 0
            for prev, id in sorted(one):
                assert prev == at
                at = id
            assert at == len(truth.owner)


def test_no_range_beyond_an_id_at_which_its_writer_may_end() -> None:
    """Whose lock is held exclusively, or nobody knows yet how. Others announce what is beyond, and so does the writer
    where the lock is held as for an append, and when that transaction has ended."""
    evidence, retiring = StreamEvidence(0, has_several_writers=True), LockOwner(7, 1, is_exclusive=True)
    evidence.observe(3, frozenset({7}))
    evidence.note_rows(evidence.unread_ranges(), [2, 3])
    beyond = Intervals.of([(2, 3)])
    assert evidence.undecided_ids([1]).intersection(beyond) == beyond
    evidence.observe(3, frozenset({7}), frozenset({retiring}))
    assert evidence.undecided_ids([1]) == Intervals.of([(0, 3)])
    assert evidence.undecided_ids([2]) == Intervals.of([])
    assert evidence.undecided_ids(None) == Intervals.of([(0, 1)])
    evidence.observe(3, frozenset())
    assert evidence.undecided_ids([1]) == Intervals.of([(0, 3)])
    evidence.note_rows(evidence.unread_ranges(), [1])
    assert evidence.undecided_ids([1]) == Intervals.of([])

    appending = StreamEvidence(0, has_several_writers=True)
    appending.observe(3, frozenset({7}), frozenset({LockOwner(7, 1)}))
    appending.note_rows(appending.unread_ranges(), [2, 3])
    assert appending.undecided_ids([1]) == Intervals.of([(0, 1)])


def test_many_transactions_are_few_groups() -> None:
    """What is remembered is bounded, however many looks found somebody running; then it only waits for more of them."""
    evidence = StreamEvidence(0)
    for number in range(1, 200):
        evidence.observe(number, frozenset(range(number, 400)))
        evidence.note_rows(evidence.unread_ranges(), [])
    assert len(evidence._groups) <= 33
    evidence.observe(199, frozenset())
    asked = evidence.unread_ranges()
    assert asked == Intervals.of([(0, 199)])
    assert [*iterate_ids(evidence.note_rows(asked, [7]))] == [id for id in range(1, 200) if id != 7]
