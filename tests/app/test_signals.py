"""How a process hears that it is to end."""

import signal
import threading
from collections.abc import Iterator

import pytest

from tidemark.app.logs import SHUTDOWN_SIGNALS, shutdown_event


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SHUTDOWN_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_is_heard_wherever_the_wait_for_it_stands() -> None:
    """Also where it has just taken the event's lock: one that sets the event there waits for itself."""
    told = shutdown_event()
    with told._cond:  # type: ignore[attr-defined]  # where `wait` is as it begins and as it ends
        signal.raise_signal(signal.SIGTERM)
    assert told.wait(60)


def test_what_follows_is_done_once() -> None:
    """Two signals of one kind end a process once; `again` may say that the second does as it does of itself."""
    done = threading.Semaphore(0)
    told = shutdown_event(done.release, repeat_handler=signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert told.wait(60)
    assert done.acquire(timeout=60)
    assert not done.acquire(timeout=0.1)
    shutdown_event(repeat_handler=signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
