"""`tidemark overrides`: what the table of acts and the audit tell together, on a real database."""

import json

import psycopg
import pytest
from click.testing import CliRunner

from tests.sinks.given import batch, stream
from tests.sinks.reader.given import Pipeline
from tidemark.app.cli import main
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.operators import LoggedOverride, OverrideLog
from tidemark.streaming.core.effects import OperatorOverride

SKIP = OperatorOverride("w", 1, "SKIP", 2, 4, "ann", "lost")
TWIN = OperatorOverride("w", 1, "SKIP", 2, 4, "bob", "also lost")
WIDER = OperatorOverride("w", 1, "SKIP", 2, 9, "bob", "also lost")
JOIN = OperatorOverride("w", 1, "JOIN", 0, 9, "ann", "too far")
LOWER = OperatorOverride("w", 1, "JOIN", 0, 4, "bob", "much too far")
OTHER = OperatorOverride("w", 1, "SKIP", 5, 9, "bob", "also lost")


def noted(acts: OverrideLog, *forced: OperatorOverride, first: int = 0) -> list[LoggedOverride]:
    """All sent before any is read."""
    found = [acts.log("s", it) for it in forced]
    for offset, it in enumerate(found, first):
        acts.note_sent(it, "control", 0, offset)
    return found


def applied(pipeline: Pipeline, *forced: OperatorOverride) -> None:
    pipeline.number += 1
    made = batch(pipeline.number, stream("s", overrides=list(forced)), token=pipeline.lease.token)
    pipeline.store.apply(made)


@pytest.mark.parametrize(
    ("first", "second", "became"),
    [
        (SKIP, TWIN, "settled before"),
        (SKIP, SKIP, "settled before"),
        (WIDER, SKIP, "settled before"),
        (SKIP, WIDER, "applied"),
        (SKIP, OTHER, "applied"),
        (JOIN, LOWER, "applied"),
        (JOIN, JOIN, "settled before"),
    ],
)
def test_of_two_who_settle_the_same_the_second_is_told(
    pipeline: Pipeline, dsn: str, first: OperatorOverride, second: OperatorOverride, became: str
) -> None:
    """Both tried it while it was open, and the records that say so were applied one after the other."""
    with session_of(dsn, "test") as session:
        acts = OverrideLog(session)
        one, other = noted(acts, first, second)
        assert acts.find_outcome(one) == acts.find_outcome(other) == "refused"
        applied(pipeline, first, second)
        assert (acts.find_outcome(one), acts.find_outcome(other)) == ("applied", became)
        (again,) = noted(acts, second, first=2)
        assert acts.find_outcome(again) == "refused"
        applied(pipeline, second)
        assert acts.find_outcome(again) == "applied"


def test_an_act_that_was_refused_does_not_hide_its_repetition(pipeline: Pipeline, dsn: str) -> None:
    """The same words a second time, after what was wrong is mended."""
    with session_of(dsn, "test") as session:
        acts = OverrideLog(session)
        noted(acts, SKIP)
        (again,) = noted(acts, SKIP, first=1)
        applied(pipeline, SKIP)
        assert acts.find_outcome(again) == "applied"


def test_acts_are_listed_with_who_did_them(pipeline: Pipeline, dsn: str, sql: psycopg.Connection) -> None:
    """Also what came to the control topic by other means, whose sender nobody knows; no terminal obeys a word."""
    with session_of(dsn, "test") as session:
        acts = OverrideLog(session)
        (done,) = noted(acts, SKIP)
        acts.log("s", OperatorOverride("w", 1, "RETIRE", 0, 9, "ann", "gone"))
        applied(pipeline, SKIP, OperatorOverride("v", 1, "JOIN", 0, 9, "eve\x1b[2J", "x" * 90))
        acts.note_outcome(done, "applied")
    runner = CliRunner(env={"TIDEMARK_POSTGRES_DSN": dsn})
    listed = runner.invoke(main, ["overrides", "list"]).output.splitlines()
    assert listed[0].startswith("NUMBER ")
    text = "\n".join(listed)
    assert "not sent" in text
    assert "eve\\x1b[2J" in text
    assert "unknown" in text
    rows = json.loads(runner.invoke(main, ["overrides", "list", "s", "--json"]).output)["overrides"]
    user = sql.execute("select session_user").fetchone()
    assert {(it["kind"], it["outcome"], it["seen_as"]) for it in rows} == {
        ("SKIP", "applied", (user or [None])[0]),
        ("RETIRE", None, (user or [None])[0]),
        ("JOIN", "applied", None),
    }
    shown = runner.invoke(main, ["overrides", "show", str(done.number)]).output.splitlines()
    assert shown[0] == "SKIP of w (epoch 1) of s 3..4"
    assert shown[-2:] == ["sent: control/0 0", "outcome: applied"]
    assert json.loads(runner.invoke(main, ["overrides", "show", str(done.number), "--json"]).output) in rows
    assert runner.invoke(main, ["overrides", "show", "99"]).exit_code == 1
    sql.execute("truncate tidemark.skips, tidemark.overrides cascade")
    assert runner.invoke(main, ["overrides", "list", "s"]).output == "no overrides\n"
    mistyped = runner.invoke(main, ["overrides", "list", "none"])
    assert (mistyped.exit_code, "there is no stream none" in mistyped.output) == (1, True)
