"""`tidemark readers` on real servers: what is shown of readers, and what changes them."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from tests.sinks.given import advance, stream
from tests.sinks.reader.conftest import brisk, service
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService, effect
from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.verbs.readers import _distance_text
from tidemark.sinks.reader import Positions, Reader
from tidemark.sinks.reader_database import install, reader_session
from tidemark.streaming.core.effects import LateCompletion

__all__ = ["brisk", "service"]

SIGNED = ("--by=ada", "--why=repaired", "--yes")


@pytest.fixture
def readers(service: ReadingService, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`tidemark readers`, with five facts in stream `s`, of which `copier` has read three."""
    monkeypatch.setattr("tidemark.sinks.reader.read_loop.OPERATOR_QUERY_SECONDS", 0.1)
    service.write(1, 2, 3)
    pipeline.move("w", 0, 3)
    service.until(lambda: len(service.ids()) == 3)
    service.write(4, 5)
    pipeline.move("w", 3, 5)
    env = {"TIDEMARK_POSTGRES_DSN": service.dsn, "TIDEMARK_REDIS_URL": service.redis}
    return lambda *words: CliRunner().invoke(main, ["readers", *words], env=env)


def status(readers: Callable[..., Result]) -> dict[str, Any]:
    shown = readers("show", "copier", "s", "--json")
    assert shown.exit_code == 0, shown.output
    answer: dict[str, Any]
    (answer,) = json.loads(shown.output)["readers"]
    return answer


def park(service: ReadingService, id: int) -> None:
    """Have the next batch park one of its facts."""
    with Positions(service.redis, service.dsn) as positions, Reader(positions, "s", **service.arguments()) as reader:
        batch = next(reader)
        for fact, rows in batch.facts():
            with batch.parking(fact, ValueError):
                for row in rows:
                    batch.connection.execute(*effect(row, batch))
                    if fact == id:
                        raise ValueError("no such order")
        reader._stopping.set()
        assert next(reader, None) is None


def test_a_reader_that_does_not_run_is_listed_with_its_lag(readers: Callable[..., Result]) -> None:
    """Place and lag in IDs and seconds; `--check` finds it."""
    heading, row = readers("list").output.splitlines()
    assert heading.split() == [
        *(
            "STREAM",
            "READER",
            "PARTITION",
            "STATE",
            "PLACE",
            "LAG",
            "(IDS)",
            "LAG",
            "LAST",
            "COMMIT",
            "COPIES",
            "PARKED",
            "LATE",
        ),
    ]
    assert row.split()[:6] == ["s", "copier", "not", "running", "m3", "2"]
    assert row.split()[-3:] == ["0", "0", "0"]
    found = status(readers)
    assert {name: found[name] for name in ("token", "linear", "stream_linear", "lag_ids", "copies", "state")} == {
        "token": "m3", "linear": 3, "stream_linear": 5, "lag_ids": 2, "copies": 0, "state": "not running",
    }  # fmt: skip
    assert found["lag_seconds"] > 0
    assert readers("list", "--check").exit_code == 3
    assert readers("list", "none").exit_code == 1
    assert readers("show", "nobody", "s").exit_code == 1


def test_a_running_reader_is_current_and_its_copies_are_counted(
    readers: Callable[..., Result], service: ReadingService
) -> None:
    """One connection to the places for each copy, although each has another to the table."""
    with service.running(), service.running():
        eventually(lambda: len(service.ids()) == 5)
        eventually(lambda: status(readers)["copies"] == 2)
        assert (status(readers)["state"], status(readers)["lag_ids"]) == ("current", 0)
        assert "waits for new facts of s" in readers("show", "copier", "s").output
        assert readers("list", "--check").exit_code == 0
        refused = readers("delete", "copier", "s", *SIGNED)
        assert (refused.exit_code, "2 copies of copier" in refused.output) == (1, True)


def test_a_busy_copy_is_shown(readers: Callable[..., Result], service: ReadingService) -> None:
    """A handler that takes long: since when it works on its batch, and a seek that cannot get the lock says so."""
    with Positions(service.redis, service.dsn) as positions, Reader(positions, "s", **service.arguments()) as reader:
        next(reader)
        assert "a copy has worked on one batch for 0 s" in readers("show", "copier", "s").output
        refused = readers("reset", "copier", "s", *SIGNED)
    assert (refused.exit_code, "has locked the place" in refused.output) == (2, True)
    assert service.place().linear == 3


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (3, 3, "the linear position does not change; facts that were read beyond it are read again"),
        (3, 4, "1 ID is skipped"),
        (3, 5, "2 IDs are skipped"),
        (-3, -2, "1 ID is read again"),
        (31, 0, "31 IDs are read again"),
    ],
)
def test_the_distance_of_a_seek_is_in_words(before: int, after: int, text: str) -> None:
    assert _distance_text(before, after) == text


@pytest.mark.parametrize(("token", "again"), [("m1", [2, 3, 4, 5]), ("now", []), ("beginning", [1, 2, 3, 4, 5])])
def test_a_reader_is_moved(
    readers: Callable[..., Result], service: ReadingService, pipeline: Pipeline, token: str, again: list[int]
) -> None:
    """Back: facts are handed over again; on: they are skipped. A dry run says the same and changes nothing."""
    asked = readers("seek", "copier", "s", token, *SIGNED, "--dry-run", "--json")
    assert json.loads(asked.stdout)["number"] is None
    assert service.place().linear == 3
    done = readers("seek", "copier", "s", token, *SIGNED)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == json.loads(asked.stdout)["would"]
    overrides = CliRunner().invoke(main, ["overrides", "list"], env={"TIDEMARK_POSTGRES_DSN": service.dsn}).output
    assert "READER SEEK" in overrides
    assert "applied" in overrides
    service.write(6)
    pipeline.move("w", 5, 6)
    service.until(lambda: service.ids()[-1:] == [6])
    assert service.ids() == [1, 2, 3, *again, 6]


def test_a_running_reader_follows_its_new_place(readers: Callable[..., Result], service: ReadingService) -> None:
    """It continues from there without a restart, and may be moved twice."""
    with service.running():
        eventually(lambda: len(service.ids()) == 5)
        for rounds in (1, 2):
            assert readers("seek", "copier", "s", "m3", *SIGNED).exit_code == 0
            eventually(lambda rounds=rounds: len(service.ids()) == 5 + 2 * rounds)  # type: ignore[misc]
    assert service.ids() == [1, 2, 3, 4, 5, 4, 5, 4, 5]


def test_a_place_that_moves_back_gets_late_facts_of_proven_empty_ranges(
    readers: Callable[..., Result], service: ReadingService, pipeline: Pipeline
) -> None:
    """The evidence of IDs 6 to 9 counts no fact; 7 came late, and is handed over again after a seek all the same."""
    pipeline.move("w", 5, 9, empty=4)
    service.until(lambda: service.place().linear == 9)
    service.write(7)
    pipeline.publish(stream("s", linear=9, late=[LateCompletion("w", 1, 6, 7, 1, "announced")]))
    service.until(lambda: service.ids(late=True) == [7])
    assert readers("seek", "copier", "s", "m5", *SIGNED).exit_code == 0
    service.until(lambda: service.place().linear == 9)
    assert service.ids()[-1] == 7
    assert service.ids(late=True) == [7]


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("seek", "copier", "s", "m9"), 1, "the reader would miss facts"),
        (("seek", "copier", "s", "m-2"), 2, "the other direction"),
        (("seek", "copier", "s", "m1~w.4"), 1, "give a token without writers, m1"),
        (("seek", "copier", "s", "seven"), 2, "does not begin with m"),
        (("seek", "nobody", "s", "m1"), 1, "there is no reader nobody of s"),
        (("parked", "retry", "copier", "s", "4"), 1, "has no parked fact with ID 4"),
        (("parked", "drop", "copier", "s", "4"), 1, "has no parked fact with ID 4"),
    ],
)
def test_what_cannot_be_is_refused(
    readers: Callable[..., Result], service: ReadingService, words: tuple[str, ...], code: int, problem: str
) -> None:
    refused = readers(*words, *SIGNED)
    assert (refused.exit_code, problem in refused.output) == (code, True), refused.output
    assert service.place().linear == 3


def test_a_seek_leaves_no_parked_fact_in_doubt(readers: Callable[..., Result], service: ReadingService) -> None:
    """Where writers are at different positions, nobody knows whether a parked fact between them would be read again. A
    seek would lose it, or hand it over twice."""
    with psycopg.connect(service.dsn, autocommit=True) as sql:
        sql.execute("update tidemark_reader.places set mode = 'vector'")
        sql.execute(
            "insert into tidemark_reader.parked (reader, stream, id, reason)"
            " values ('copier', 's', 3, 'x'), ('copier', 's', 5, 'x')"
        )
        for more in (["--dry-run"], []):
            refused = readers("seek", "copier", "s", "m1~w.4", *SIGNED, *more)
            expected = (
                "parked facts of copier are beyond the linear position of m1~w.4, but not beyond its highest position"
                " of a writer: 3"
            )
            assert expected in refused.output
            assert refused.exit_code == 2
        parked = "select array_agg(id order by id) from tidemark_reader.parked"
        assert sql.execute(parked).fetchone() == ([3, 5],)
        assert service.place().linear == 3
        assert readers("seek", "copier", "s", "m3~w.4", *SIGNED).exit_code == 0
        assert sql.execute(parked).fetchone() == ([3],)


def test_a_reader_is_reset_and_deleted(readers: Callable[..., Result], service: ReadingService) -> None:
    """After a reset it begins again; what is deleted is not listed any more."""
    assert readers("reset", "copier", "s", *SIGNED).exit_code == 0
    assert status(readers)["state"] == "not begun"
    service.until(lambda: len(service.ids()) == 8)
    assert service.ids() == [1, 2, 3, 1, 2, 3, 4, 5]
    assert readers("delete", "copier", "s", *SIGNED).exit_code == 0
    assert readers("list").output.startswith("no readers in ")
    assert json.loads(readers("list", "--json").output) == {"readers": []}


def test_a_parked_fact_is_handed_over_again(
    readers: Callable[..., Result], service: ReadingService, sql: psycopg.Connection
) -> None:
    """A copy that waits for the stream gets it within seconds; the fact is not parked any more."""
    park(service, 4)
    assert service.ids() == [1, 2, 3, 5]
    assert status(readers)["parked"] == 1
    listed = readers("parked", "list", "copier", "s").output.splitlines()[1].split()
    assert [listed[0], listed[1], listed[2], *listed[-4:]] == ["copier", "s", "4", "ValueError:", "no", "such", "order"]
    stopping = threading.Event()
    retries: list[int] = []

    def run() -> None:
        with (
            Positions(service.redis, service.dsn) as positions,
            Reader(positions, "s", **service.arguments(stopping=stopping)) as reader,
        ):
            for batch in reader:
                retries.extend(row["stream_id"] for row in batch.rows if batch.is_retry)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        time.sleep(0.5)
        assert json.loads(readers("parked", "retry", "copier", "s", "4", *SIGNED, "--json").stdout)["ids"] == [4]
        eventually(lambda: status(readers)["parked"] == 0)
    finally:
        stopping.set()
        thread.join(60)
    assert retries == [4]
    assert sql.execute("select count(*) from tidemark_reader.parked").fetchone() == (0,)


def test_a_parked_fact_is_dropped(readers: Callable[..., Result], service: ReadingService) -> None:
    """Its effects stay missing."""
    park(service, 4)
    assert readers("parked", "drop", "copier", "s", "4", *SIGNED).exit_code == 0
    assert readers("parked", "list").output == "no parked facts\n"
    assert json.loads(readers("parked", "list", "--json").output) == {"parked": []}
    assert service.ids() == [1, 2, 3, 5]


def test_late_facts_that_wait_for_a_reader_are_counted(readers: Callable[..., Result], pipeline: Pipeline) -> None:
    """Those after the last one that it was handed."""
    pipeline.publish(stream("s", advance("w", 5, 6), linear=6, late=[LateCompletion("w", 1, 1, 2, 1, "skipped")]))
    assert status(readers)["late"] == 1


def test_partitions_are_listed_and_shown(
    readers: Callable[..., Result], service: ReadingService, pipeline: Pipeline
) -> None:
    """Each with its number, in order; a change names one of them. Copies that read in SQL cannot be counted."""
    service.sql.execute("delete from tidemark_reader.places")
    service.sql.execute("delete from effects")
    service.given = {"partitions": 11, "key": "ordinal"}
    places = "select count(*) from tidemark_reader.places where linear = 5"
    service.until(lambda: service.sql.execute(places).fetchone() == (11,))
    rows = [line.split() for line in readers("list", "s").output.splitlines()[1:]]
    assert [row[:4] for row in rows] == [["s", "copier", f"{number}/11", "current"] for number in range(11)]
    shown = json.loads(readers("show", "copier", "s", "--json").output)["readers"]
    assert [(status["reader"], status["partition"], status["partitions"]) for status in shown] == [
        (f"copier[{number}/11]", number, 11) for number in range(11)
    ]
    (one,) = json.loads(readers("show", "copier[3/11]", "s", "--json").output)["readers"]
    assert (one["partition"], one["linear"], one["copies"]) == (3, 5, 0)
    refused = readers("reset", "copier", "s", *SIGNED)
    assert (refused.exit_code, "has 11 partitions: name one of them, such as 'copier[0/11]'" in refused.output) == (
        1,
        True,
    )
    assert readers("seek", "copier[3/11]", "s", "m3", *SIGNED).exit_code == 0
    assert readers("list", "s").output.count("not running") == 1
    with reader_session(service.dsn, "test") as session:
        install(session)
    service.sql.execute("update tidemark_reader.places set timeline = 1 where reader = 'copier[3/11]'")
    (one,) = json.loads(readers("show", "copier[3/11]", "s", "--json").output)["readers"]
    assert (one["state"], one["copies"]) == ("reading", None)
