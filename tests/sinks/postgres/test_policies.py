"""Policies as operators set and read them, on a real server; what the pipeline makes of them is tested with it."""

import json

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from tests.sinks.given import batch, stream
from tidemark.app.cli import main
from tidemark.common.errors import BadRecord
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres

BY = ("--by", "ada", "--why", "long imports", "--yes")


@pytest.fixture
def known(store: Postgres, lease: Lease, dsn: str) -> str:
    """A database with two streams; no pipeline runs."""
    store.apply(batch(1, stream("imports"), stream("orders"), token=lease.token))
    return dsn


def run(dsn: str, *words: str) -> Result:
    return CliRunner(env={"TIDEMARK_POSTGRES_DSN": dsn, "TIDEMARK_ALERT_GAP_SECONDS": "77"}).invoke(
        main, ["policy", *words]
    )


def test_what_counts_for_a_stream_is_shown_with_where_it_comes_from(known: str) -> None:
    """Its own policy, one for a beginning of its name, that of all, the default: for each setting by itself."""
    assert run(known, "list").output == "no policies\n"
    for name, value in (("*", "silent_seconds=9"), ("imp*", "gap_seconds=600"), ("imports", "pending_bound=50")):
        assert run(known, "set", name, value, *BY).exit_code == 0
    shown = json.loads(run(known, "show", "imports", "--json").stdout)["settings"]
    assert shown["pending_bound"] == {"value": 50, "policy": "imports"}
    assert shown["gap_seconds"] == {"value": 600, "policy": "imp*"}
    assert shown["silent_seconds"] == {"value": 9, "policy": "*"}
    assert shown["behind_ids"] == {"value": None, "policy": None}
    assert "gap_seconds         77  default" in run(known, "show", "orders").output
    assert json.loads(run(known, "list", "--json").stdout) == {
        "policies": {"*": {"silent_seconds": 9}, "imp*": {"gap_seconds": 600}, "imports": {"pending_bound": 50}}
    }


def test_every_change_is_an_act(known: str, sql: psycopg.Connection) -> None:
    """With what was before; what is only tried, or not confirmed, is none."""
    done = run(known, "set", "imp*", "gap_seconds=600", "history_days=30", *BY)
    assert done.output.startswith(
        "the policy imp* fits imports\ngap_seconds: not set -> 600, history_days: not set -> 30"
    )
    assert run(known, "set", "imp*", "gap_seconds=9", *BY, "--dry-run").exit_code == 0
    tried = json.loads(run(known, "set", "imp*", "gap_seconds=9", *BY, "--dry-run", "--json").stdout)
    assert tried == {
        "policy": "imp*",
        "changes": {"gap_seconds": 9},
        "streams": ["imports"],
        "dry_run": True,
        "act": None,
    }
    assert run(known, "set", "imp*", "gap_seconds=9", *BY[:-1]).exit_code == 2
    assert run(known, "unset", "imp*", *BY, "--json").exit_code == 0
    assert run(known, "list").output == "no policies\n"
    shown = CliRunner(env={"TIDEMARK_POSTGRES_DSN": known}).invoke(main, ["overrides", "show", "1"]).output.splitlines()
    assert (shown[0], shown[-1]) == ("POLICY of imp*", f"outcome: {done.output.splitlines()[1].partition(';')[0]}")
    assert sql.execute(
        "select kind, stream, by, seen_as = session_user, outcome from tidemark.overrides"
    ).fetchall() == [
        ("POLICY", "imp*", "ada", True, "gap_seconds: not set -> 600, history_days: not set -> 30"),
        ("POLICY", "imp*", "ada", True, "gap_seconds: 600 -> not set, history_days: 30 -> not set"),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("set", "orders", "colour=3"), "'colour' is not a setting of a policy; the settings are pending_bound, "),
        (("set", "orders", "gap_seconds"), "'gap_seconds': gap_seconds must be a whole number from 1 to 1000000000"),
        (("set", "orders", "gap_seconds=0"), "from 1 to"),
        (("set", "orders", "gap_seconds=-1"), "from 1 to"),
        (("set", "orders", "gap_seconds=1.5"), "from 1 to"),
        (("set", "orders", "gap_seconds=٣"), "from 1 to"),
        (("set", "orders", "history_days=36501"), "from 1 to 36500"),
        (("set", "orders", f"gap_seconds={'9' * 5000}"), "from 1 to"),
        (("set", "orders", "gap_seconds=3", "gap_seconds=4"), "gap_seconds is given twice"),
        (("set", "orders"), "Missing argument 'SETTING=VALUE...'"),
        (("set", "a b", "gap_seconds=3"), "'a b' is neither the name of a stream nor a prefix"),
        (("set", "", "gap_seconds=3"), "'' is neither the name of a stream"),
        (("set", "a" * 256, "gap_seconds=3"), "is neither the name of a stream"),
        (("unset", "orders", "colour"), "'colour' is not a setting"),
    ],
)
def test_what_is_wrong_is_named(known: str, sql: psycopg.Connection, words: tuple[str, ...], told: str) -> None:
    """With exit code 2; nothing is changed, and no act is noted."""
    done = run(known, *words, *BY)
    assert (done.exit_code, told in done.output) == (2, True), done.output
    assert sql.execute("select count(*) from tidemark.overrides").fetchone() == (0,)


def test_what_is_not_set_is_not_taken_back(known: str, store: Postgres, sql: psycopg.Connection) -> None:
    """Exit code 1; also where somebody was quicker, and then all stays that the act would have changed."""
    assert run(known, "set", "orders", "gap_seconds=3", *BY).exit_code == 0
    done = run(known, "unset", "orders", "silent_seconds", *BY)
    assert (done.exit_code, "has no silent_seconds" in done.output) == (1, True)
    assert "has no settings" in run(known, "unset", "typo", *BY).output
    with pytest.raises(BadRecord, match="not_set"):
        store.policies.change("orders", {"gap_seconds": None, "silent_seconds": None}, "bob", "me too")
    assert store.policies.read() == {"orders": {"gap_seconds": 3}}
    assert sql.execute("select count(*) from tidemark.overrides").fetchone() == (1,)


def test_a_name_that_no_stream_has_yet_is_told(known: str) -> None:
    """A policy may come before its stream; whoever mistyped it sees so before it is confirmed."""
    assert run(known, "set", "order", "gap_seconds=3", *BY).output.startswith("no stream fits order yet")
    told = run(known, "set", "*", "pending_bound=3", *BY).output
    assert "fits imports, orders" in told
    assert "restarts its query" in told


def test_who_only_reads_sets_nothing(known: str, sql: psycopg.Connection) -> None:
    """An operator needs the role for acts."""
    sql.execute("create role looker login password 'looker' in role tidemark_reader")
    try:
        reader = make_conninfo(known, user="looker", password="looker")
        assert run(reader, "list").exit_code == 0
        done = run(reader, "set", "orders", "gap_seconds=3", *BY)
        assert (done.exit_code, "tidemark_operator" in done.output) == (2, True), done.output
    finally:
        sql.execute("drop role looker")
