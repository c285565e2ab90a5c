"""What the relay sends of what is decided, in records of one fact or of many."""

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tidemark.sources.kafka_lookup import split_run
from tidemark.sources.relay.decider import Decision
from tidemark.sources.relay.epochs import StreamEpoch, WriterEpoch
from tidemark.sources.relay.evidence import EmptyRange
from tidemark.sources.relay.queries import COMMON_CUT, AppendedFact, AppendStream
from tidemark.sources.relay.relay import MAX_RUN_BYTES, MAX_RUN_FACTS, encode_decision
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals
from tidemark.streaming.wire.records import (
    DatabaseStart,
    FactRun,
    Position,
    Rdata,
    Record,
    Topic,
    effective_prev,
    encode,
    read,
)


def of(direction: Direction = Direction.FORWARD) -> StreamEpoch:
    writers = {name: WriterEpoch(name, 7, 0, "joined", frozenset()) for name in ("shop", "till")}
    return StreamEpoch(AppendStream(1, "orders", direction), 1, 0, 0, DatabaseStart("d", "s"), "shop", writers)


def fact(id: int, *rows: str, writer: str = "") -> AppendedFact:
    return AppendedFact(id, [body.encode() for body in rows], sum(200 + len(body) for body in rows), writer)


def sent(decided: Decision, most: int) -> list[Record]:
    """As whoever reads Kafka reads it."""
    return [read(value, b"orders", Topic.FACTS) for value in encode_decision(decided, most)]


def said(records: Iterable[Record]) -> list[bytes]:
    """One by one, in one form."""
    return [
        encode(replace(one, prev=effective_prev(one)) if isinstance(one, Rdata) and one.id != "batch" else one)
        for record in records
        for one in split_run(record)
    ]


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    ids = draw(st.lists(st.integers(1, 60), unique=True, max_size=40).map(sorted))
    rows = st.lists(st.sampled_from(['{"a": 1}', "null", '"\u00fc"']), max_size=3)
    writers = st.sampled_from(["", "", "till", COMMON_CUT])
    facts, voids = list[AppendedFact](), list[int]()
    for id in ids:
        if draw(st.booleans()):
            facts.append(fact(id, *draw(rows), writer=draw(writers)))
        else:
            voids.append(id)
    announced = draw(st.lists(st.sampled_from([EmptyRange("shop", 60, 64), EmptyRange("till", 61, 63)]), unique=True))
    direction = draw(st.sampled_from([Direction.FORWARD, Direction.BACKWARD]))
    return Decision(of(direction), facts, Intervals.from_ids(np.array(voids, np.int64)), announced)


@given(decisions(), st.integers(2, 7))
def test_records_of_many_facts_say_what_records_of_one_do(decided: Decision, most: int) -> None:
    """The same edges in the same order, and never more of them in one."""
    together, alone = sent(decided, most), sent(decided, 1)
    assert said(together) == said(alone)
    assert all(len(record.ids) <= most for record in together if isinstance(record, FactRun))
    assert not any(isinstance(record, FactRun) for record in alone)


def runs(facts: Sequence[AppendedFact]) -> list[int]:
    """How many facts each record has."""
    return [
        len(it.ids) if isinstance(it, FactRun) else 1 for it in sent(Decision(of(), facts, NO_INTERVALS), MAX_RUN_FACTS)
    ]


def test_a_backlog_shares_records_up_to_their_bounds() -> None:
    """By number, and by bytes: what Kafka would refuse for its size is never made out of what it takes."""
    assert runs([fact(id, "{}") for id in range(1, 450)]) == [200, 200, 49]
    large = f'"{"x" * (MAX_RUN_BYTES // 2 - 300)}"'
    assert runs([fact(1, large), fact(2, large), fact(3, large)]) == [2, 1]
    assert runs([fact(1, "{}"), fact(2, f'"{"x" * MAX_RUN_BYTES}"'), fact(3, "{}")]) == [1, 1, 1]


def test_a_fact_alone_is_told_as_ever() -> None:
    """So that a log without backlog stays as readable as it was; neighbours of other writers share nothing."""
    facts = [fact(4, "{}"), fact(5, "{}", writer="till"), fact(7, "{}")]
    records = sent(Decision(of(), facts, NO_INTERVALS, [EmptyRange("till", 5, 8)]), MAX_RUN_FACTS)
    assert [type(record) for record in records] == [Rdata, Rdata, Rdata, Position]
