"""The signals by which a process is told to end, as an event that it can wait for."""

import _thread
import signal
import threading
from collections.abc import Callable, Sequence

ENDING = (signal.SIGTERM, signal.SIGINT)


def told_to_end(
    then: Callable[[], object] = lambda: None,
    *,
    numbers: Sequence[signal.Signals] = ENDING,
    again: signal.Handlers = signal.SIG_IGN,
) -> threading.Event:
    """The event that the first of these signals sets; `then` is called after it, in a thread. For the main thread.

    What comes under the same number once more does what `again` says.

    A handler runs between any two steps of the main thread, also where that has the event's lock because it begins to
    wait; so it is another thread that sets it, and one of `_thread`, which takes no lock to begin.
    """
    told = threading.Event()

    def tell() -> None:
        told.set()
        then()

    def act(number: int, _: object) -> None:
        signal.signal(number, again)
        _thread.start_new_thread(tell, ())

    for number in numbers:
        signal.signal(number, act)
    return told
