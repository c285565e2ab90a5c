"""The steps of `tidemark up` that need no stack; `tests/app/test_up.py` runs whole stacks."""

from typing import cast

import pytest
from structlog.testing import capture_logs

from tidemark.app.stack.processes import ServerProcess, StartFailed
from tidemark.app.verbs.up import _retry_while_running
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

    def failure(self) -> str:
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
    monkeypatch.setattr(backoff, "LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(backoff, "FIRST_PAUSE", 0.001)


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
