"""The script of a play: repeatable, in order of time, and nothing that was asked for stays away."""

import itertools
import math

import pytest

from tidemark.app.simulation.script import (
    ALL_FAULTS,
    PROCESS_FAULTS,
    Fault,
    PlannedFault,
    WriterPlan,
    fault_schedule,
    parse_faults,
)
from tidemark.common.errors import BadSetting

INSIDE = {Fault.ROLLBACK, Fault.HANG}


def acts(seed: int, seconds: float) -> list[PlannedFault]:
    return list(itertools.takewhile(lambda act: act.due_seconds < seconds, fault_schedule(seed, ALL_FAULTS, seconds)))


def test_the_same_seed_gives_the_same_script() -> None:
    """Who does what when is the seed's alone."""
    assert acts(7, 300.0) == acts(7, 300.0) != acts(8, 300.0)


@pytest.mark.parametrize("seed", range(5))
def test_every_fault_comes_in_the_first_half(seed: int) -> None:
    """However short a play is, all that was asked for happens, and there is time to recover; acts come in order."""
    found = acts(seed, 20.0)
    assert {act.fault for act in found if act.due_seconds <= 10.0} == ALL_FAULTS - INSIDE
    assert [act.due_seconds for act in found] == sorted(act.due_seconds for act in found)


def test_only_what_was_asked_for_happens() -> None:
    """One kind alone, for ever; and nothing at all."""
    assert {act.fault for act in itertools.islice(fault_schedule(1, {Fault.CRASH}, math.inf), 50)} == {Fault.CRASH}
    assert next(fault_schedule(1, INSIDE, 10.0), None) is None


def test_faults_are_asked_for_by_name() -> None:
    """Names with commas, all, none; without a word all but the servers; a wrong name is told with the right ones."""
    assert parse_faults("crash,redis") == {Fault.CRASH, Fault.REDIS}
    assert (parse_faults("all"), parse_faults("none"), parse_faults(None)) == (ALL_FAULTS, set(), PROCESS_FAULTS)
    with pytest.raises(BadSetting, match="'fire' is not one of rollback, hang"):
        parse_faults("crash,fire")


def test_a_prefix_must_be_fit_for_names_in_sql() -> None:
    """It begins the names of tables and sequences."""
    assert WriterPlan(stream_count=1, prefix="mine_").stream_names() == ["mine_events"]
    with pytest.raises(BadSetting, match="--prefix"):
        WriterPlan(prefix="Mine-")
