"""Shutdown signals as an event that a process can wait for."""

import _thread
import signal
import threading
from collections.abc import Callable, Sequence

SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def shutdown_event(
    then: Callable[[], object] = lambda: None,
    *,
    numbers: Sequence[signal.Signals] = SHUTDOWN_SIGNALS,
    again: signal.Handlers = signal.SIG_IGN,
) -> threading.Event:
    """The event that the first of these signals sets. To be called on the main thread.

    Python runs signal handlers on the main thread, possibly while it has the event's lock inside `wait`. Calling `set`
    there could deadlock, so a helper thread does it; starting it with `_thread` takes no lock.

    Args:
        then: called on the helper thread after the event is set.
        numbers: the signals.
        again: handler of a second signal of the same number.
    """
    shutdown = threading.Event()

    def finish() -> None:
        shutdown.set()
        then()

    def handle(number: int, _: object) -> None:
        signal.signal(number, again)
        _thread.start_new_thread(finish, ())

    for number in numbers:
        signal.signal(number, handle)
    return shutdown
