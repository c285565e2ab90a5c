"""Pauses between attempts. `wait_out` repeats a step until its server is available."""

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tidemark.common.errors import Stopping, Unavailable
from tidemark.common.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LOG_INTERVAL_SECONDS = 10.0  # between two log lines about the same wait


class Backoff:
    """Pauses that grow from `first_seconds` to `longest_seconds`. Each pause is `factor` times the previous one."""

    def __init__(self, first_seconds: float, longest_seconds: float, factor: float = 2.0) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        self._factor = factor
        self._pause = first_seconds

    def next(self) -> float:
        """Return the seconds until the next attempt. The following pause is longer, up to `longest_seconds`."""
        pause, self._pause = self._pause, min(self._factor * self._pause, self._longest)
        return pause

    def reset(self) -> None:
        """Begin with the pause `first_seconds` again. Call this after a success."""
        self._pause = self._first


class WaitLog:
    """Computes the pauses of a wait for a server, and logs the wait.

    Logs the first failure, the first failure of another server, one failure every `LOG_INTERVAL_SECONDS`, and the first
    success.
    """

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._began_at = self._logged_at = 0.0
        self._server = ""

    def pause_after(self, problem: Unavailable) -> float:
        """Log the failure `problem` if it is due (see the class), and compute the pause.

        Returns:
            The pause before the next attempt, in seconds. The caller pauses.
        """
        now = time.monotonic()
        if not self._server:
            self._began_at = now
            self._backoff.reset()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS or problem.what != self._server:
            seconds = round(now - self._began_at)
            log.warning(f"Waiting for {problem.what}", problem=str(problem), seconds=seconds)
            self._logged_at, self._server = now, problem.what
        return self._backoff.next()

    def note_success(self) -> None:
        """Log the end of the wait, if a failure was logged before."""
        if self._server:
            log.info(f"The wait for {self._server} has ended", seconds=round(time.monotonic() - self._began_at, 1))
            self._server = ""


def wait_out(
    step: Callable[[], T],
    stop_event: threading.Event,
    seconds: float = math.inf,
    on_failure: Callable[[Unavailable], object] = lambda _: None,
) -> T:
    """Call `step` until a call does not raise `Unavailable`, and return the result of this call. Logs the wait.

    Args:
        step: called once or more. Errors other than `Unavailable` are raised at once.
        stop_event: ends the wait when the event is set.
        seconds: the time limit, checked after each failed call.
        on_failure: called with each `Unavailable` before the pause.

    Raises:
        Stopping: `stop_event` was set during a pause.
        Unavailable: the first failure after the time limit.
    """
    wait_log, deadline = WaitLog(), time.monotonic() + seconds
    while True:
        try:
            result = step()
        except Unavailable as problem:
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise
            on_failure(problem)
            if stop_event.wait(min(wait_log.pause_after(problem), remaining_seconds)):
                raise Stopping(f"stopped while waiting for {problem.what}") from problem
        else:
            wait_log.note_success()
            return result
