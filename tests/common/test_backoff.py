import threading
import time

import pytest
from structlog.testing import capture_logs

from tidemark.common.backoff import Backoff, wait_out
from tidemark.common.errors import LeaseLost, Stopping, Unavailable


class Flaky:
    """Fails with `errors`, one a call, and then gives "done"."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def __call__(self) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def away(what: str = "Redis") -> Unavailable:
    return Unavailable(what, "host:1", "refused")


def test_waiting_is_said_once_and_again_when_it_is_over() -> None:
    """Three failed attempts make one line, and one when the server answers again."""
    with capture_logs() as logs:
        assert wait_out(Flaky(away(), away(), away()), threading.Event()) == "done"
    assert [entry["event"] for entry in logs] == ["Waiting for Redis", "The wait for Redis has ended"]


def test_another_server_is_said_at_once() -> None:
    """What is waited for is always the last line, though the ten seconds are not over."""
    with capture_logs() as logs:
        wait_out(Flaky(away("Redis"), away("Postgres")), threading.Event())
    assert [entry["event"] for entry in logs] == [
        "Waiting for Redis",
        "Waiting for Postgres",
        "The wait for Postgres has ended",
    ]


def test_other_errors_are_not_waited_out() -> None:
    """A lost lease passes at once, although it is of the kind that mends itself."""
    with pytest.raises(LeaseLost):
        wait_out(Flaky(LeaseLost(1, 2)), threading.Event())


def test_stopping_cuts_a_pause_short() -> None:
    """However long the pause has become, the wait ends as soon as it is told to."""
    stopping = threading.Event()
    threading.Timer(0.5, stopping.set).start()
    began = time.monotonic()
    with pytest.raises(Stopping):
        wait_out(Flaky(*(away() for _ in range(99))), stopping)
    assert time.monotonic() - began < 3.0


def test_a_limit_ends_the_wait_with_what_the_server_said_last() -> None:
    """A hook of an installation has minutes: whoever waits for it sees the reason, not a deadline."""

    def never() -> None:
        raise Unavailable("Postgres", "db:5432", "nobody listens")

    with pytest.raises(Unavailable, match="nobody listens"):
        wait_out(never, threading.Event(), seconds=0.0)


def test_pauses_grow_up_to_the_longest_and_begin_again_after_a_success() -> None:
    """0.5, 1, 2, 2 s; after `reset` 0.5 s again."""
    backoff = Backoff(0.5, 2.0)
    assert [backoff.next() for _ in range(4)] == [0.5, 1.0, 2.0, 2.0]
    backoff.reset()
    assert backoff.next() == 0.5
