"""Each remedy that verbs and page show is one that works: it is executed here as it is printed."""

import json
import shlex
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from tests.app.recording import Recording
from tests.sinks.reader.given import Pipeline
from tests.streaming.builders import STREAM, Record, Shard, as_json, forced, join, opened, position, rdata
from tidemark.app import relay
from tidemark.app.cli import main
from tidemark.app.diagnosis import open_ranges
from tidemark.app.diagnosis.open_ranges import OpenRange, choose_remedy
from tidemark.app.stack.processes import KafkaServer
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.wire.records import DatabaseStart

NEVER_JOINED = (rdata("desk", 4, epoch=3),)
SILENT = (join("a", 0), join("b", 0), rdata("a", 3, 2, epoch=1), position("b", 0, 9, epoch=1))
FENCED = (*SILENT, forced(join("a", 3, epoch=2)), forced(join("b", 9)))


@pytest.fixture
def recording(
    pipeline: Pipeline, dsn: str, redis_url: str, kafka: KafkaServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recording]:
    """Real topics without a record. Its batches have the time of an hour ago, so that writers are silent."""
    began = int((time.time() - 3600) * 1000)
    with Recording(pipeline, dsn, redis_url, kafka.bootstrap_servers, prefix, began) as empty:
        for name, value in empty.variables.items():
            monkeypatch.setenv(name, value)
        yield empty


@contextmanager
def reading(recording: Recording) -> Iterator[None]:
    """A pipeline reads what is sent while the block runs."""
    stopped = Event()

    def read() -> None:
        while not stopped.wait(0.1):
            recording.read()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(read)
        try:
            yield
        finally:
            stopped.set()
        done.result()


def printed_commands(verb: str) -> list[str]:
    """The commands with this verb that `tidemark gaps` prints."""
    lines = CliRunner().invoke(main, ["gaps"]).output.splitlines()
    return [line[line.index(f"tidemark {verb} ") :] for line in lines if f"tidemark {verb} " in line]


@pytest.mark.parametrize(
    ("records", "verdict", "verb"),
    [
        (NEVER_JOINED, "unknown", "retire"),
        (SILENT, "silent", "retire"),
        (SILENT, "silent", "skip"),
        (FENCED, "fenced", "retire"),
    ],
)
def test_a_command_that_is_shown_settles_what_it_is_shown_for(
    records: Iterable[Record], verdict: str, verb: str, recording: Recording
) -> None:
    """Each command is executed as `gaps` prints it, without options that are not shown. The pipeline applies it, and
    `gaps` shows it no more."""
    for record in records:
        topic = recording.control if record.control else recording.facts
        recording.send_bytes((as_json(record), STREAM), topic=topic)
        recording.read()
    found = json.loads(CliRunner().invoke(main, ["gaps", "--json"]).stdout)["gaps"]
    assert verdict in {gap["verdict"] for gap in found}
    commands = printed_commands(verb)
    assert commands
    if verb == "retire":
        assert {*commands} == {gap["verb"] for gap in found}
    for command in commands:
        program, word, *others = shlex.split(command.replace('"$USER"', "ada"))
        assert (program, word) == ("tidemark", verb)
        with reading(recording):
            done = CliRunner().invoke(main, [verb, "--yes", *others])
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1].startswith("applied: ")
    assert printed_commands(verb) == []


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


def test_a_prepared_transaction_is_rolled_back_by_the_statement_that_is_shown(database: str) -> None:
    """A transaction of a coordinator that has died, with a fact, as the relay finds it in the service's database."""
    relay.migrate(database, [STREAM], "forward", say=lambda _: None)
    with psycopg.connect(database) as service:
        service.execute("select tidemark.append(%s, '{}')", [STREAM])
        service.execute("prepare transaction 'o''neill 1'")
    [transaction] = relay.read_blockers(database)
    assert (transaction.pid, transaction.gid) == (None, "o'neill 1")
    shard = Shard()
    shard.feed(join("shop", 0), rdata("shop", 3, 2, epoch=1), opened("shop", transaction.description))
    (found,) = open_ranges.find_open_ranges(shard.states, 11.0)
    assert found.verb == transaction.ending_statement == "rollback prepared 'o''neill 1'"
    with psycopg.connect(database, autocommit=True) as operator:
        operator.execute(found.verb.encode())
        assert operator.execute(
            "select count(*) from pg_prepared_xacts where database = current_database()"
        ).fetchone() == (0,)
    assert relay.read_blockers(database) == []


def test_the_name_of_a_prepared_transaction_may_hold_a_quote() -> None:
    """The statement is still one."""
    line = OpenTransaction(STREAM, "shop", None, "o'neill 1", "u", "", "", None, "", "shop").description
    found = choose_remedy(
        "open transaction", STREAM, "shop", id=1, epoch=1, transactions=[line], is_relayed=True, is_bridged=False
    )
    assert found.command == "rollback prepared 'o''neill 1'"


def test_values_of_a_query_are_not_published() -> None:
    """The query is named so that it is found in the service's code; its values are the service's own."""
    query = "insert into cards values ('4111 1111', $tag$secret$tag$, 42, E'it\\'s')"
    line = OpenTransaction(STREAM, "shop", 7, None, "u", "app", "active", None, query, "shop").description
    assert "insert into cards values (?, ?, ?, ?)" in line


@pytest.mark.parametrize("names", [("orders", "shop"), ("a'b", "$(reboot)"), ("-rf", 'x;"`')])
def test_commands_are_whole_and_safe_for_a_shell(names: tuple[str, str]) -> None:
    """Whatever streams and writers are called: what is copied says what it seems to."""
    found = choose_remedy("silent", *names, id=7, epoch=1, transactions=[], is_relayed=False, is_bridged=False)
    words = shlex.split(found.command)
    assert words[:7] == ["tidemark", "retire", "--id=7", "--by", "$USER", "--why", "gone for good"]
    assert words[7:] == [*(["--"] if names[0].startswith("-") else []), *names]


def test_a_writer_without_a_relay_is_not_looked_up_in_one() -> None:
    """Only who joined as a relay does is known to `tidemark relay blockers`."""
    shard = Shard()
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1))
    shard.feed(join("r", 0, timeline=DatabaseStart(database="db", start="t1")), rdata("r", 5, 4, epoch=1))
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
    assert (
        "desk never joined in epoch 3 and has completed IDs up to 4: --id=4 settles all its IDs up to there"
        in done.output
    )
