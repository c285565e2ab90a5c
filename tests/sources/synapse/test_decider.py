"""The decision alone, against writers of whom everything is known."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sources.synapse.world import NAMES, WriterPositions, Writers
from tidemark.sources.synapse.decider import ProvenAdvance, StreamDecider, StreamFact

Act = tuple[str, int, bool]
MakeDecider = Callable[[], StreamDecider]
WEIGHTS = {
    "take": 8,
    "begin": 8,
    "end": 8,
    "hear": 8,
    "read": 8,
    "follow": 4,
    "kill": 2,
    "start": 4,
    "answer": 2,
    "orphan": 2,
    "waste": 1,
    "look": 2,
    "lose": 1,
    "retire": 1,
    "ask": 2,
}


def script_of(seed: int) -> list[Act]:
    chance = Random(seed)
    whats = chance.choices([*WEIGHTS], [*WEIGHTS.values()], k=chance.randint(1, 200))
    return [(what, chance.randrange(6), chance.random() < 0.6) for what in whats]


def play(script: list[Act], make: MakeDecider, *, forgets: bool = False) -> WriterPositions:
    writers = Writers()
    sent_upto = WriterPositions(writers, make(), forgets=forgets)
    for what, value, flag in script:
        name = NAMES[value % len(NAMES)]
        match what:
            case "take" | "begin" | "follow" | "answer":
                getattr(writers, what)(name)
            case "ask" | "waste":
                getattr(writers, what)()
            case "end":
                writers.end(name, commits=flag, last=value == 0)
            case "kill":
                writers.kill(name, committing=flag)
            case "start" if name not in sent_upto.retiring:
                writers.start(name, lag_ids=flag)
            case "retire" if name not in writers.live:
                sent_upto.retire(name)
            case "orphan":
                writers.end_orphan(commits=flag)
            case "hear":
                sent_upto.receive(value)
            case "lose":
                sent_upto.lose(value)
            case "look":
                sent_upto.look()
            case "read":
                sent_upto.look()
                sent_upto.read()
        sent_upto.check()
    return sent_upto


def _made() -> StreamDecider:
    return StreamDecider(dict.fromkeys(NAMES, 1))


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**40))
def test_no_event_is_stepped_over(seed: int) -> None:
    """Whatever is killed, late, rolled back or lost; and when everything rests, everything is told, once."""
    play(script_of(seed), _made).finish()


def _who_does_not_know_all() -> StreamDecider:
    return StreamDecider(dict.fromkeys(NAMES[:1], 1))


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**40))
def test_no_event_of_one_that_comes_later_is_stepped_over(seed: int) -> None:
    """One that nobody knew joins where the others are, and what it writes or wrote below is told once it has ended."""
    play(script_of(seed), _who_does_not_know_all).finish()


def _of_overwritten() -> StreamDecider:
    return StreamDecider(dict.fromkeys(NAMES, 1), keeps_rows=False)


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**40))
def test_of_overwritten_rows_nothing_is_called_empty_that_was_a_fact(seed: int) -> None:
    """Where the table forgets and lines are lost, readers are told to look; what was heard or is there is told."""
    play(script_of(seed), _of_overwritten, forgets=True).finish()


def test_of_overwritten_rows_nothing_is_unseen_where_nothing_was_lost() -> None:
    """What was heard needs no table, and the announcement of a writer is its word that nothing is there."""
    script: list[Act] = [*SPOKEN, ("answer", 1, True), ("answer", 2, True), *SPOKEN]
    script += [("take", 0, True), ("begin", 0, True), ("end", 0, True), ("follow", 1, True), ("follow", 2, True)]
    sent_upto = play([*script, ("hear", 9, True), ("read", 0, True)], _of_overwritten, forgets=True)
    assert (sent_upto.facts, sent_upto.unseen, sent_upto.at) == ({2: NAMES[0]}, set(), dict.fromkeys(NAMES, 2))


class _NoBarrier(StreamDecider):
    """Takes a successor's word for its predecessor's."""

    def observe(self, head: int, running: frozenset[int]) -> None:
        super().observe(head, frozenset())


class _NoDoubt(StreamDecider):
    """Takes who begins for one who goes on."""

    def mark_uncertain(self) -> None:
        pass

    def apply_position(self, writer: str, prev: int, id: int) -> None:
        super().apply_position(writer, min(prev, id - 1), id)


class _WordOfOthers(StreamDecider):
    """Takes the word of one writer for that of all."""

    def apply_position(self, writer: str, prev: int, id: int) -> None:
        for name in NAMES:
            super().apply_position(name, prev, id)


class _HeardAlone(StreamDecider):
    """Believes that whoever is heard has told all its facts."""

    def apply_facts(self, ids: tuple[int, int], head: int, facts: object) -> list[ProvenAdvance]:
        return super().apply_facts(ids, head, [])


SPOKEN: list[Act] = [("answer", 0, True), ("hear", 9, True), ("read", 0, True)]
SUCCESSOR: list[Act] = [("take", 0, True), ("begin", 0, True), ("kill", 0, True), ("start", 0, False), *SPOKEN[1:]]
LATE: Act = ("orphan", 0, True)
ONES_OWN: list[Act] = [("take", 0, True), ("follow", 1, True), *SPOKEN[1:], ("begin", 0, True), ("end", 0, True)]
LOST: list[Act] = [("take", 0, True), ("begin", 0, True), ("end", 0, True), ("lose", 6, True), *SPOKEN]


def test_a_missing_row_that_may_be_overwritten_proves_nothing() -> None:
    """As above, of a table that forgets."""
    play(LOST, _of_overwritten, forgets=True).finish()
    with pytest.raises(AssertionError, match="stepped over"):
        play(LOST, _made, forgets=True)


@pytest.mark.parametrize(
    ("bent", "script"),
    [
        (_NoBarrier, [*SUCCESSOR, LATE]),
        (_NoDoubt, [*SPOKEN, *SUCCESSOR, LATE]),
        (_WordOfOthers, ONES_OWN),
        (_HeardAlone, LOST),
    ],
)
def test_each_rule_is_needed(bent: type[StreamDecider], script: list[Act]) -> None:
    """A few steps after which no event is stepped over, and without the rule one is."""
    play(script, _made).finish()
    with pytest.raises(AssertionError, match="stepped over"):
        play(script, lambda: bent(dict.fromkeys(NAMES, 1)))


def test_who_is_asked_waits_for_nobody_elses_transaction() -> None:
    """A writer that goes on and answers is no successor: what another one has open for long is not its own."""
    hung: list[Act] = [*SPOKEN, ("answer", 1, True), *SPOKEN[1:], ("take", 0, True), ("begin", 0, True)]
    goes_on: list[Act] = [("take", 1, True), ("begin", 1, True), ("end", 1, True), *SPOKEN[1:]]
    script = [*hung, ("ask", 0, True), *SPOKEN[1:], *goes_on, *goes_on]
    sent_upto = play(script, lambda: StreamDecider(dict.fromkeys(NAMES[:2], 1)))
    assert sent_upto.at == {NAMES[0]: 1, NAMES[1]: 4, NAMES[2]: 1}
    sent_upto.finish()


class _PaysAtOnce(StreamDecider):
    """Reads what a newcomer has below as it joins."""

    @property
    def sendable_backlogs(self) -> list[str]:
        return [name for name, writer in self._writers.items() if writer.has_backlog]


def test_what_a_newcomer_has_below_is_read_once_it_has_ended() -> None:
    """A transaction of it may be open there when it is first heard."""
    passed: list[Act] = [*SPOKEN, ("take", 1, True), ("begin", 1, True), ("follow", 0, True), *SPOKEN[1:]]
    script = [*passed, ("answer", 1, True), *SPOKEN[1:], ("end", 1, True), *SPOKEN[1:]]
    play(script, _who_does_not_know_all).finish()
    with pytest.raises(AssertionError, match="stepped over"):
        play(script, lambda: _PaysAtOnce(dict.fromkeys(NAMES[:1], 1)))


def test_what_a_writer_said_before_it_was_known_counts() -> None:
    """It is not asked again; and nothing is told until it has joined."""
    decider = StreamDecider({"event1": 1})
    for name in ("event1", "event2"):
        decider.apply_position(name, 3, 3)
    decider.observe(3, frozenset())
    assert (decider.unknown_writers, decider.range_to_read()) == ({"event2"}, (1, 3))
    assert decider.apply_facts((1, 3), 3, [StreamFact(3, "event2", ["{}"])]) == []
    decider.add_writer("event2", 1)
    assert (decider.needs_observation, decider.sendable_backlogs) == (True, [])
    decider.observe(3, frozenset())
    assert decider.sendable_backlogs == ["event2"]
    decider.note_backlog_sent("event2")
    sent_upto = decider.apply_facts((1, 3), 3, [StreamFact(3, "event2", ["{}"])])
    assert [(each.writer, each.id, len(each.facts)) for each in sent_upto] == [("event1", 3, 0), ("event2", 3, 1)]


def test_row_that_names_nobody_is_of_the_only_writer() -> None:
    """Or of who announced it: some of Synapse's tables leave the name out."""
    decider = StreamDecider({"misc1": 1})
    decider.apply_position("misc1", 3, 3)
    decider.observe(3, frozenset())
    (sent_upto,) = decider.apply_facts((1, 3), 3, [StreamFact(3, "", ["{}"])])
    assert [(fact.id, fact.writer) for fact in sent_upto.facts] == [(3, "misc1")]


def test_missing_row_that_may_have_been_deleted_for_its_age_proves_nothing() -> None:
    """Of IDs beyond those that are old, it is void as ever."""
    for kept_above, unseen in ((1, False), (2, True), (9, True)):
        decider = StreamDecider({"master": 1})
        decider.kept_above = kept_above
        decider.apply_position("master", 4, 4)
        decider.observe(4, frozenset())
        (sent_upto,) = decider.apply_facts(
            (1, 4), 4, [StreamFact(3, "master", ["{}"]), StreamFact(4, "master", ["{}"])]
        )
        assert ([fact.id for fact in sent_upto.facts], sent_upto.is_unseen) == ([3, 4], unseen)


def test_word_beyond_what_was_given_out_counts_for_nothing() -> None:
    """The stream is not founded with it, and its writer is held and named until it says another one."""
    decider = StreamDecider({"event1": 0, "event2": 0})
    decider.apply_position("event1", 50, 50)
    decider.apply_position("event2", 40, 40)
    decider.observe(40, frozenset())
    assert (decider.find_floor(), decider.discarded_positions, decider.announced_positions["event1"]) == (
        None,
        {"event1": 50},
        0,
    )
    decider.apply_position("event1", 39, 40)
    decider.observe(40, frozenset())
    assert (decider.find_floor(), decider.discarded_positions) == (40, {})
    decider.begin(40)
    decider.apply_position("event1", 40, 60)
    decider.apply_rdata("event1", 60, "{}")
    assert decider.range_to_read() == (40, 60)
    assert decider.apply_facts((40, 60), 45, []) == []
    assert (decider.sent_upto, decider.discarded_positions) == ({"event1": 40, "event2": 40}, {"event1": 60})
