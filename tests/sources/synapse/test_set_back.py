"""A sequence of Synapse that is set back, or was never called, under the bridge itself and on real databases."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.sources.synapse.stepped import WRITERS, SteppedBridge, stepped
from tidemark.sources import run_loop
from tidemark.sources.synapse import bridge as bridge_module


@pytest.fixture(autouse=True)
def checks_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round checks the streams, and a new connection follows at once."""
    monkeypatch.setattr(bridge_module, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(run_loop, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(run_loop, "LONGEST_PAUSE_SECONDS", 0.01)


@pytest.fixture(params=["push_rules", "caches"])
def bridge(another_database: str, database: str, request: pytest.FixtureRequest) -> Iterator[SteppedBridge]:
    """A stream with eight published facts. `push_rules` has no rows that prove a history, `caches` has."""
    with stepped(another_database, database, request.param) as bridge:
        bridge.rounds()
        bridge.write(8)
        bridge.announce()
        bridge.rounds()
        assert (bridge.core.line, bridge.unpublished) == (8, {})
        yield bridge


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed first", "noticed later"])
@pytest.mark.parametrize("rows", ["kept", "deleted", "none"])
def test_facts_at_ids_that_are_given_out_again_are_published_or_late(
    bridge: SteppedBridge, rows: str, *, is_noticed: bool
) -> None:
    """`setval` takes four IDs back under a connected bridge. Workers write below, up to and beyond the head of before,
    after the next round or before it; the rows of before are there, are deleted, or never were."""
    core, timelines = bridge.core, 0
    for written in (2, 4, 6):
        if rows == "none":
            for _ in range(4):
                bridge.waste()
            bridge.announce()
            bridge.rounds()
        head = bridge.head()
        assert core.line == head
        bridge.set_sequence(head - 4)
        if rows == "deleted":
            bridge.delete_rows(head - 4)
        # Facts at IDs that had none are late, unless the head shows that the sequence went back.
        timelines += is_noticed or rows != "none" or written < 4
        if is_noticed:
            bridge.rounds()
            assert len(core.timelines) == timelines
        assert bridge.write(written)[0] == head - 3
        bridge.rounds()
        bridge.announce()
        bridge.rounds()
        bridge.write(6)
        bridge.announce()
        bridge.rounds()
        assert bridge.unpublished == {}
        assert (core.line, len(core.timelines)) == (bridge.head(), timelines)


def test_workers_that_restart_after_the_sequence_went_back_are_published_at_once(bridge: SteppedBridge) -> None:
    """They announce what they find, so what they write at IDs that are given out again is published at once."""
    core, head = bridge.core, bridge.head()
    bridge.set_sequence(head - 4)
    bridge.rounds()
    bridge.restart_workers()
    ids = bridge.write(2)
    bridge.announce()
    bridge.rounds()
    assert ids == [head - 3, head - 2]
    assert bridge.unpublished == {}
    assert bridge.sent_upto == dict.fromkeys(WRITERS, head - 2)
    assert (core.line, len(core.timelines)) == (head, 1)
    assert {*ids} <= core.late_ids


def test_workers_that_go_on_after_the_sequence_went_back_hold_their_stream(bridge: SteppedBridge) -> None:
    """They announce IDs that are not given out, which proves nothing: no position passes an ID that may be in use."""
    head = bridge.head()
    bridge.set_sequence(head - 4)
    bridge.rounds()
    bridge.write(2)
    bridge.announce()
    bridge.rounds()
    assert bridge.sent_upto == dict.fromkeys(WRITERS, bridge.core.timelines[0][0])
    bridge.write(3)
    bridge.announce()
    bridge.rounds()
    assert bridge.unpublished == {}
    assert bridge.core.line == bridge.head() == head + 1


WEIGHTS = {
    "round": 12,
    "reserve": 8,
    "begin": 8,
    "end": 8,
    "announce": 6,
    "set back": 3,
    "waste": 1,
    "restart workers": 1,
    "restart bridge": 1,
    "disconnect": 1,
    "audits": 2,
}


def play(bridge: SteppedBridge, chance: Random, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many random steps of workers, bridge and operator. `audits`: the bridge checks the streams, or waits with
    it."""
    for what in chance.choices([*WEIGHTS], [*WEIGHTS.values()], k=steps):
        worker = chance.choice(bridge.workers)
        match what:
            case "round":
                bridge.round()
            case "reserve":
                bridge.reserve(worker)
            case "begin":
                bridge.begin_write(worker)
            case "end":
                bridge.end_write(chance.randrange(9), commits=chance.random() < 0.8)
            case "announce":
                bridge.announce()
            case "set back":
                bridge.set_sequence(max(1, bridge.head() - chance.randrange(8)))
                if chance.random() < 0.5:
                    bridge.delete_rows(bridge.head())
            case "waste":
                bridge.waste()
            case "restart workers":
                bridge.restart_workers()
            case "restart bridge":
                bridge.restart()
            case "disconnect":
                bridge.disconnect()
            case "audits":
                monkeypatch.setattr(bridge_module, "_CHECK_SECONDS", chance.choice([0.0, 3600.0]))
    monkeypatch.setattr(bridge_module, "_CHECK_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_every_fact_is_published_or_late_whenever_the_sequence_is_set_back(
    bridge: SteppedBridge, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers reserve, write and announce, processes end, and the sequence goes back, with its rows or without."""
    chance = Random(seed)
    for _ in range(3):
        play(bridge, chance, chance.randint(10, 60), monkeypatch)
        bridge.finish()


NEVER_CALLED = {
    "never touched": "",
    "as a port script leaves it": """
        alter sequence push_rules_stream_sequence restart with 51;
        alter sequence cache_invalidation_stream_seq restart with 51;
    """,
    "set to its next ID": """
        select setval('push_rules_stream_sequence', 51, false);
        select setval('cache_invalidation_stream_seq', 51, false);
    """,
}


@pytest.mark.parametrize("name", ["push_rules", "caches"])
@pytest.mark.parametrize("prepare", NEVER_CALLED.values(), ids=NEVER_CALLED.keys())
def test_restart_before_the_first_event_of_a_sequence_that_was_never_called_begins_no_timeline(
    another_database: str, database: str, name: str, prepare: str
) -> None:
    """No timeline begins at a new process or a new connection, and the first fact is published in time."""
    with stepped(another_database, database, name, prepare) as bridge:
        first = bridge.head() + 1
        bridge.rounds()
        assert dict.fromkeys(WRITERS, first - 1) == bridge.sent_upto == bridge.core.positions
        bridge.restart()
        bridge.rounds()
        assert bridge.disconnect()
        bridge.rounds()
        bridge.restart()
        assert bridge.write() == [first]
        bridge.announce()
        bridge.rounds()
        core = bridge.core
        assert (core.line, {*core.facts}, core.timelines, core.late_ids) == (first, {first}, [], set())
