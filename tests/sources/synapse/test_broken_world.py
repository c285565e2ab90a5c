"""What the bridge publishes beside databases that break their promises: every fact once, or as late, or it is held."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.sources.synapse.broken_world import FLOOR, Bridge, BrokenWriters
from tests.sources.synapse.world import NAMES
from tidemark.sources.synapse.decider import StreamFact
from tidemark.sources.synapse.evidence import PublishedFacts

Act = tuple[str, int, bool]
WEIGHTS = {
    "take": 10,
    "begin": 10,
    "end": 10,
    "step": 12,
    "follow": 5,
    "kill": 1,
    "start": 3,
    "answer": 2,
    "orphan": 2,
    "waste": 1,
    "ask": 2,
    "swap": 3,
    "twin": 1,
    "untwin": 1,
    "copy": 1,
    "promote": 1,
    "set_back": 1,
    "filter": 1,
    "cache": 1,
    "jump": 1,
    "retried": 1,
}


def script_of(seed: int) -> list[Act]:
    chance = Random(seed)
    whats = chance.choices([*WEIGHTS], [*WEIGHTS.values()], k=chance.randint(1, 250))
    return [(what, chance.randrange(12), chance.random() < 0.6) for what in whats]


def play(script: Iterable[Act], bridge: Bridge) -> Bridge:
    writers = bridge.writers
    for what, value, flag in script:
        name = NAMES[value % len(NAMES)]
        match what:
            case "take" | "begin" | "follow" | "answer" | "swap" | "twin" | "retried":
                getattr(writers, what)(name)
            case "ask" | "waste" | "copy" | "promote":
                getattr(writers, what)()
            case "end":
                writers.end(name, commits=flag, last=value == 0)
            case "kill" | "untwin":
                getattr(writers, what)(name, committing=flag)
            case "start":
                writers.start(name, lag_ids=flag)
            case "orphan":
                writers.end_orphan(commits=flag)
            case "set_back":
                writers.set_back(value, rows=flag)
            case "cache":
                writers.alter(cache=4 if flag else 1)
            case "jump":
                writers.jump(value)
            case "filter":
                writers.is_filtered = not writers.is_filtered
            case "step":
                bridge.step(value or 100)
    return bridge


@settings(max_examples=examples(600))
@given(seed=st.integers(0, 2**40))
def test_every_fact_is_published_once_or_late_or_held(seed: int) -> None:
    """Whatever goes back, is doubled or hidden; and when everything is in order again, everything is published."""
    play(script_of(seed), Bridge(BrokenWriters())).finish()


def one(number: int, *more: str) -> list[Act]:
    """One writer takes an ID, commits it, and the others follow."""
    acts: list[Act] = [("take", number, True), ("begin", number, True), ("end", number, True)]
    acts += [("follow", other, True) for other in range(3)]
    return [*acts, *((what, 11, True) for what in more), ("step", 0, True)]


BEGUN: list[Act] = [("step", 0, True), ("step", 0, True)]
LAGS: list[Act] = [*BEGUN, *one(0), ("copy", 0, True), *one(1), *one(2), ("promote", 0, True)]
WRITES: list[Act] = [act for number in (1, 2, 0, 1) for act in one(number)[:-1]]
TWINS: list[Act] = [*BEGUN, ("take", 0, True), ("twin", 0, True), ("swap", 0, True), *one(0), *one(1)]
COMES_BELOW: list[Act] = [("swap", 0, True), ("begin", 0, True), ("end", 0, True), ("step", 0, True)]


class _JoinsAtTheHead(PublishedFacts):
    """Takes the head of the moment for the end of what both histories have."""

    def find_last_common_id(self, table: object, sent_upto: object) -> int | None:
        return 10_000

    def find_replaced(self, table: object) -> list[StreamFact]:
        return []

    def find_unpublished(self, table: object, sent_upto: object) -> list[StreamFact]:
        return []


class _NeverLooksBack(PublishedFacts):
    """Believes that nothing comes where everything was told."""

    def find_unpublished(self, table: object, sent_upto: object) -> list[StreamFact]:
        return []


@pytest.mark.parametrize(
    ("bent", "script"),
    [(_JoinsAtTheHead, [*LAGS, *WRITES, ("step", 0, True)]), (_NeverLooksBack, [*TWINS, *COMES_BELOW])],
)
def test_each_rule_is_needed(bent: type[PublishedFacts], script: list[Act]) -> None:
    """A few steps after which every fact is published, and without the rule one is stepped over."""
    play(script, Bridge(BrokenWriters())).finish()
    with pytest.raises(AssertionError, match="stepped over"):
        play(script, Bridge(BrokenWriters(), published=bent(20))).finish()


def test_filtered_session_proves_nothing() -> None:
    """One that believed it would tell committed facts as void."""
    script: list[Act] = [*BEGUN, ("filter", 0, True), *one(0)]
    play(script, Bridge(BrokenWriters())).finish()
    with pytest.raises(AssertionError, match="stepped over"):
        play(script, Bridge(BrokenWriters(), believes_filter=True))


def test_sequence_with_a_cache_holds_its_stream() -> None:
    """Without the check, a position passes an ID that a session keeps, and the fact of that ID is late."""
    script: list[Act] = [*BEGUN, ("cache", 0, True), *one(0), *one(1), *one(0)]
    held = play(script, Bridge(BrokenWriters()))
    assert {*held.sent_upto.values()} == {FLOOR}
    play([("cache", 0, False), ("step", 0, True)], held).finish()
    assert not held.late
    careless = play(script, Bridge(BrokenWriters(), checks_sequence=False))
    careless.finish()
    assert careless.late


def test_sequence_that_jumps_gives_no_facts_between() -> None:
    script: list[Act] = [*BEGUN, *one(0), ("jump", 9, True), *one(1)]
    bridge = play(script, Bridge(BrokenWriters()))
    bridge.finish()
    assert (len(bridge.regular), bridge.late, bridge.timelines) == (2, set(), 0)


class _TakesNoCallForZero(Bridge):
    def head(self) -> int:
        return self.writers.last_value() or 0


def test_sequence_that_was_never_called_has_given_out_what_lies_below() -> None:
    """Its first fact is published, and no timeline begins."""
    script: list[Act] = [*BEGUN, *one(0)]
    assert play(script, Bridge(BrokenWriters())).timelines == 0
    assert play(script, _TakesNoCallForZero(BrokenWriters())).timelines > 0
