"""The steps of `tidemark up` that need no stack; `tests/app/test_up.py` runs whole stacks."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from tidemark.app.stack.processes import ServerProcess, StartFailed
from tidemark.app.stack.up import LocalStack
from tidemark.app.verbs import up
from tidemark.app.verbs.up import _earlier_demo_notice, _retry_while_running, _wait_for_first_position
from tidemark.common import backoff
from tidemark.common.errors import Unavailable


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


def test_streams_of_an_earlier_demo_are_named_without_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that removes them."""
    monkeypatch.setattr(up, "_stored_streams", lambda _: ["chat_events", "payments", "sales"])
    warning = _earlier_demo_notice(stack(tmp_path))
    assert warning is not None
    assert warning.startswith("chat_events: streams of an earlier `tidemark up --demo`.")
    assert warning.endswith(f"rm -r {tmp_path}/data")
    monkeypatch.setattr(up, "_stored_streams", lambda _: ["payments", "sales"])
    assert _earlier_demo_notice(stack(tmp_path)) is None
