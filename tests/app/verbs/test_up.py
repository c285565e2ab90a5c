"""The steps of `tidemark up` that need at most a Postgres; `tests/app/test_up.py` runs whole stacks."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from structlog.testing import capture_logs

from tests.fix_servers import deaf, own_postgres
from tests.waiting import eventually
from tidemark.app import relay
from tidemark.app.settings import load
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import CHAT_DATABASE, ServerProcess, StartFailed
from tidemark.app.stack.up import LocalStack
from tidemark.app.verbs import up
from tidemark.app.verbs.up import (
    _chat_streams,
    _earlier_demo_notice,
    _retry_while_running,
    _stored_streams,
    _tidemark_processes,
    _wait_for_first_position,
)
from tidemark.common import backoff
from tidemark.common.errors import Unavailable
from tidemark.sinks.postgres.database import migrate


class Server:
    """A server that ends after some questions whether it runs."""

    name, returncode = "postgres", 1

    def __init__(self, lives: int) -> None:
        self.lives = lives

    @property
    def running(self) -> bool:
        self.lives -= 1
        return self.lives > 0

    def failure_cause(self) -> str:
        return "PANIC: disk full; its log: postgres.log"


class Migration:
    """Succeeds after some failures."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __call__(self) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise Unavailable("Postgres", "127.0.0.1:5432", "connection timeout expired")
        return "applied"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "LONGEST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(backoff, "FIRST_PAUSE_SECONDS", 0.001)


def test_migrations_wait_as_long_as_the_server_runs() -> None:
    """There is no time limit. The log says what the start waits for."""
    with capture_logs() as logs:
        assert _retry_while_running(Migration(300), cast("ServerProcess", Server(1000))) == "applied"
    assert logs[0]["event"] == "Waiting for Postgres"
    assert "connection timeout expired" in logs[0]["problem"]


def test_migrations_do_not_wait_for_a_server_that_has_ended() -> None:
    """The error has the server's own message."""
    with capture_logs(), pytest.raises(StartFailed, match="it ended with code 1: PANIC: disk full"):
        _retry_while_running(Migration(300), cast("ServerProcess", Server(3)))


def stack(tmp_path: Path) -> LocalStack:
    """A stack of which only the directory is used."""
    return cast("LocalStack", SimpleNamespace(home=SimpleNamespace(root=tmp_path)))


def test_a_demo_is_ready_when_status_shows_its_first_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wait has an end. A stack that has positions from an earlier start is ready at once."""
    answers = iter([[], [], ["payments"]])
    monkeypatch.setattr(up, "_stored_streams", lambda _: next(answers))
    _wait_for_first_position(stack(tmp_path))
    assert (next(answers, None), capsys.readouterr().out) == (None, "waiting for the first position of the demo\n")
    monkeypatch.setattr(up, "_stored_streams", lambda _: ["payments"])
    _wait_for_first_position(stack(tmp_path))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(up, "FIRST_POSITION_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(up, "_stored_streams", lambda _: [])
    _wait_for_first_position(stack(tmp_path))


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A stack's own Postgres, with positions of two streams that are not the chat server's."""
    with own_postgres(tmp_path_factory.mktemp("up")) as server:
        migrate(server.dsn())
        relay.migrate(server.dsn(), ["payments"], "forward", say=lambda _: None)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(
                "insert into tidemark.streams (stream, linear, head, direction, shard, state, updated_at)"
                " select stream, 1, 1, 1, 0, '', now() from unnest(array['payments', 'sales']) as stream"
            )
        yield server


@pytest.fixture
def real_stack(tmp_path: Path, postgres: PostgresServer) -> LocalStack:
    """A stack whose Postgres runs, and no other server."""
    stack = LocalStack(Home(tmp_path), load(), "java")
    stack.postgres = postgres
    return stack


@pytest.fixture
def chat_dsn(postgres: PostgresServer) -> Iterator[str]:
    """The chat server's database as a demo leaves it if it is killed at once: empty."""
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"create database {CHAT_DATABASE}")
        yield postgres.dsn(CHAT_DATABASE)
        connection.execute(f"drop database {CHAT_DATABASE} with (force)")


def has_demo_relay(stack: LocalStack, streams: Sequence[str]) -> bool:
    return "demo-relay" in [process.name for process in _tidemark_processes(stack, streams, demo=False)]


def test_no_earlier_demo_needs_no_relay(real_stack: LocalStack) -> None:
    """Without the chat server's database there is neither a relay nor a notice, also if there are other streams."""
    assert _stored_streams(real_stack) == ["payments", "sales"]
    assert _chat_streams(real_stack) == []
    assert not has_demo_relay(real_stack, [])


def test_demo_killed_before_its_first_stream_needs_no_relay(real_stack: LocalStack, chat_dsn: str) -> None:
    """The table of streams may be missing, or empty."""
    assert _chat_streams(real_stack) == []
    relay.migrate(chat_dsn, [], "forward", say=lambda _: None)
    assert _chat_streams(real_stack) == []


def test_streams_of_an_earlier_demo_are_relayed_and_named_without_positions(
    real_stack: LocalStack, chat_dsn: str
) -> None:
    """The chat server was killed before its streams had positions. The notice has the command that removes them."""
    relay.migrate(chat_dsn, ["chat_events", "chat_caches"], "forward", say=lambda _: None)
    assert _stored_streams(real_stack) == ["payments", "sales"]
    streams = _chat_streams(real_stack)
    assert streams == ["chat_caches", "chat_events"]
    assert has_demo_relay(real_stack, streams)
    notice = _earlier_demo_notice(real_stack, streams)
    assert notice.startswith("chat_caches, chat_events: streams of an earlier `tidemark up --demo`.")
    assert notice.endswith(f"rm -r {real_stack.home.root}/data")


def test_streams_of_an_earlier_demo_are_found_after_an_outage(
    real_stack: LocalStack, chat_dsn: str, postgres: PostgresServer
) -> None:
    """A Postgres that does not answer is not a Postgres without streams."""
    relay.migrate(chat_dsn, ["chat_events"], "forward", say=lambda _: None)
    with ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        with deaf(postgres):
            streams = pool.submit(_chat_streams, real_stack)
            eventually(lambda: logs)
            assert not streams.done()
        assert streams.result(60) == ["chat_events"]
    assert logs[0]["event"] == "Waiting for Postgres"
