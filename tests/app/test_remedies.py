"""Each remedy that verbs and page show is one that works: it is executed here as it is printed."""

import shlex
import time
from collections.abc import Iterable

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from tests.sinks.reader.given import Pipeline
from tests.streaming.builders import STREAM, Record, Shard, forced, join, opened, position, rdata
from tidemark.app.cli import main
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import OpenRange, remedy
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.wire.records import Timeline

NEVER_JOINED = (rdata("desk", 4, epoch=3),)
SILENT = (join("a", 0), join("b", 0), rdata("a", 3, 2, epoch=1), position("b", 0, 9, epoch=1))
FENCED = (*SILENT, forced(join("a", 3, epoch=2)), forced(join("b", 9)))


@pytest.mark.parametrize(
    ("records", "verdict"),
    [(NEVER_JOINED, "unknown"), (SILENT, "silent"), (FENCED, "fenced")],
    ids=lambda it: str(it)[:8],
)
def test_a_command_that_is_shown_is_accepted(
    records: Iterable[Record], verdict: str, pipeline: Pipeline, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the verb itself, against what Postgres holds, without options that are not shown; `gaps` prints the same."""
    shard = Shard(now=int((time.time() - 600) * 1000))
    pipeline.publish(shard.feed(*records))
    monkeypatch.setenv("TIDEMARK_POSTGRES_DSN", dsn)
    begun = {(STREAM, "a", 2)} if verdict == "fenced" else set()
    found = [it for it in open_ranges.find_open_ranges(shard.states, time.time(), begun=begun) if it.verdict == verdict]
    assert found
    for it in found:
        program, *words = shlex.split(it.verb.replace('"$USER"', "ada"))
        assert program == "tidemark"
        done = CliRunner().invoke(main, [*words, "--dry-run"] if "--" not in words else ["--dry-run", *words])
        assert done.exit_code == 0, done.output
        if verdict != "fenced":
            printed = CliRunner().invoke(main, ["gaps"]).output
            assert it.verb in printed
    skips = [line for line in CliRunner().invoke(main, ["gaps"]).output.splitlines() if "tidemark skip" in line]
    for line in skips:
        words = shlex.split(line.partition("tidemark ")[2].replace('"$USER"', "ada"))
        done = CliRunner().invoke(main, [*words, "--dry-run"])
        assert done.exit_code == 0, done.output


def test_the_statement_that_is_shown_ends_the_transaction(dsn: str) -> None:
    """As a relay names who holds the stream: by the process that Postgres knows."""
    with psycopg.connect(dsn, application_name="billing") as held, psycopg.connect(dsn, autocommit=True) as operator:
        held.execute("create table public.t ()")
        row = operator.execute(
            "select pid, usename, application_name, state, xact_start, query, datname from pg_stat_activity"
            " where application_name = 'billing'"
        ).fetchone()
        assert row is not None
        pid, user, application, state, since, query, database = row
        line = OpenTransaction(STREAM, "shop", pid, None, user, application, state, since, query, database).description
        assert f"in database {database}" in line
        assert "create table public.t ()" in line
        shard = Shard()
        shard.feed(join("shop", 0), rdata("shop", 3, 2, epoch=1), opened("shop", line))
        (found,) = open_ranges.find_open_ranges(shard.states, 11.0)
        operator.execute(found.verb.encode())
        with pytest.raises(psycopg.OperationalError):
            held.execute("select 1")
        held.close()


def test_a_prepared_transaction_is_rolled_back_by_its_name(dsn: str) -> None:
    """The name may hold a quote; the statement is still one."""
    line = OpenTransaction(STREAM, "shop", None, "o'neill 1", "u", "", "", None, "", "shop").description
    found = remedy("open transaction", STREAM, "shop", id=1, epoch=1, transactions=[line], relayed=True, bridged=False)
    assert found.command == "rollback prepared 'o''neill 1'"


def test_values_of_a_query_are_not_published() -> None:
    """The query is named so that it is found in the service's code; its values are the service's own."""
    query = "insert into cards values ('4111 1111', $tag$secret$tag$, 42, E'it\\'s')"
    line = OpenTransaction(STREAM, "shop", 7, None, "u", "app", "active", None, query, "shop").description
    assert "insert into cards values (?, ?, ?, ?)" in line


@pytest.mark.parametrize("names", [("orders", "shop"), ("a'b", "$(reboot)"), ("-rf", 'x;"`')])
def test_commands_are_whole_and_safe_for_a_shell(names: tuple[str, str]) -> None:
    """Whatever streams and writers are called: what is copied says what it seems to."""
    found = remedy("silent", *names, id=7, epoch=1, transactions=[], relayed=False, bridged=False)
    words = shlex.split(found.command)
    assert words[:7] == ["tidemark", "retire", "--id=7", "--by", "$USER", "--why", "gone for good"]
    assert words[7:] == [*(["--"] if names[0].startswith("-") else []), *names]


def test_a_writer_without_a_relay_is_not_looked_up_in_one() -> None:
    """Only who joined as a relay does is known to `tidemark relay blockers`."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1))
    shard.feed(join("r", 0, timeline=Timeline(database="db", start="t1")), rdata("r", 5, 4, epoch=1))
    found = {it.writer: it for it in open_ranges.find_open_ranges(shard.states, 3.0)}
    assert (found["a"].verdict, found["a"].verb) == ("alive", "")
    assert (found["r"].verdict, found["r"].verb) == ("alive", "tidemark relay blockers")
    assert isinstance(found["a"], OpenRange)


def test_why_a_writer_that_never_joined_does_not_retire_below_what_it_completed(
    pipeline: Pipeline, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal names the true reason and the option that is missing."""
    monkeypatch.setenv("TIDEMARK_POSTGRES_DSN", make_conninfo(dsn))
    shard = Shard(now=int((time.time() - 600) * 1000))
    pipeline.publish(shard.feed(*NEVER_JOINED))
    words = ["retire", "--epoch", "3", "--by", "ada", "--why", "gone", STREAM, "desk", "--dry-run"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "desk never joined in epoch 3 and has completed IDs up to 4: --id=4 settles these IDs" in done.output
