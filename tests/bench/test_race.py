from typing import Any, cast

import pytest

from tests.bench import race, runs
from tests.bench.contestants import WHOLE, Contestants, RacePlan
from tests.bench.site import BenchSite
from tests.bench.usage import Sample, Samples
from tests.bench.workload import Shape

NO_SITE = cast(BenchSite, None)
PLAN = RacePlan(Shape(), {"loop-json": 2.0, "streams-heap": 1.0, "loop-java": None}, 1000)


@pytest.mark.parametrize("missing", ["mvn", "javac"])
def test_without_maven_the_others_race(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Who is left out is said, with what is not there."""
    monkeypatch.setattr("shutil.which", lambda program: None if program == missing else program)
    contestants = Contestants(NO_SITE, PLAN)
    assert contestants.names == [WHOLE, "loop-json"]
    assert contestants.skipped == f"For want of `{missing}` nobody measured streams-heap, loop-java."


def test_only_those_that_are_named_race_against_tidemark() -> None:
    """Also where one is named that this race does not have."""
    plan = RacePlan(Shape(), {"loop-json": 2.0, "loop-java": None}, 1000, against=("loop-json", "quixstreams"))
    assert Contestants(NO_SITE, plan).names == [WHOLE, "loop-json"]


def test_a_row_has_rate_core_time_and_ratio() -> None:
    """The ratio is that of the rounds, and a competitor of whom nothing is wanted has no verdict."""
    figures = {
        **{"streams": 4, "writers": 8, "partitions": 4, "records": 10, "bytes": 1, "in_flight": 2, "batch": 5},
        **{"warm_batches": 1, "window": 1, "memory": {"driver": 0, "jvm": 0, "workers": 0}, "turn": 1, "sinks": {}},
        "rates": {WHOLE: [10.0, 30.0, 20.0], "loop-json": [5.0, 10.0, 10.0], "loop-java": [40.0, 40.0, 40.0]},
        "prices": {WHOLE: [1.0, 2.0, 3.0], "loop-json": [4.0, 4.0, 4.0], "loop-java": [0.5, 0.5, 0.5]},
        "wanted": {"loop-json": 3.0, "loop-java": None},
        **{"jvm": "", "skipped": "For want of it."},
    }
    text = "\n".join(race.render(figures))
    assert "included | 20 | 10, 30, 20 | 2.00 |  |  |" in text
    assert "`json` | 10 | 5, 10, 10 | 4.00 | 2.00 x | 3 x **missed** |" in text
    assert "no evidence | 40 | 40, 40, 40 | 0.50 | 0.50 x |  |" in text
    assert "\n\nFor want of it.\n\n" in text


def test_what_an_even_pace_costs_is_a_column_where_it_was_measured() -> None:
    """One who took no part has an empty cell; without the measure there is no column."""
    figures: dict[str, Any] = {"rates": {WHOLE: [10.0], "loop-java": [40.0]}}
    figures["prices"] = {WHOLE: [0.5], "loop-java": [0.1]}
    assert race.columns(figures)[-1] == race.columns(figures | {"paced": {}})[-1] == "µs of a core per fact"
    assert race.cells(WHOLE, figures, figures) == ["10", "10", "0.50"]
    figures |= {"cores": {WHOLE: 0.456}, "paced": {"warm_seconds": 1, "seconds": 1}}
    assert race.columns(figures)[-1] == "cores at 200/s"
    assert race.cells(WHOLE, figures, figures) == ["10", "10", "0.50", "0.46"]
    assert race.cells("loop-java", figures, figures) == ["40", "40", "0.10", ""]


def test_many_facts_are_compared_with_tidemark_and_with_one_by_one() -> None:
    """Each contestant against itself and against Tidemark with as many facts a record; of Tidemark a rate is wanted."""
    one = {"facts": 1.0, "bytes": 100, "wanted": None, "rates": {WHOLE: [10.0], "loop-java": [40.0]}, "prices": {}}
    many: dict[str, object] = {"facts": 20.0, "bytes": 50, "wanted": 31.0}
    many |= {"rates": {WHOLE: [30.0], "loop-java": [60.0]}, "prices": {WHOLE: [0.25]}}
    text = "\n".join(runs.render({"facts": 7, "rows": [one, many], "jvm": "on it", "skipped": ""}))
    assert (
        "| 20.0, 50 | **Tidemark whole**, Postgres and Redis included | 30 | 30 | 0.25 |  | 3.00 x | 31/s **missed** |"
        in text
    )
    assert "no evidence | 60 | 60 |  | 0.50 x | 1.50 x |  |" in text
    assert text.endswith("\n\nOn the JVM: on it.")


def test_core_time_is_even_between_two_looks_and_never_falls() -> None:
    """A process that went takes its time along until its parent has waited for it."""
    looks = [(10.0, 5.0), (12.0, 9.0), (13.0, 8.0), (14.0, 10.0)]
    samples = Samples([Sample(at, 0, 0, 0, cpu) for at, cpu in looks])
    assert samples.cpu(11.0, 12.0) == 2.0
    assert samples.cpu(12.0, 13.0) == 0.0
    assert samples.cpu(10.0, 14.0) == 5.0
