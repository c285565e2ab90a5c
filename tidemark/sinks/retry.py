"""Waiting out what the world will mend, without end but not without word."""

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from tidemark.common.errors import Stopping, Unavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
SAY_EVERY = 10.0


class Patience:
    """The pauses between attempts, and the log of a wait. One wait at a time.

    Pauses grow from 0.1 s to 5 s. Logs what is waited for at once, then every 10 s, and when it is over.
    """

    def __init__(self) -> None:
        self._began = self._said = 0.0
        self._pause = FIRST_PAUSE
        self._waited_for = ""

    def pause_after(self, problem: Unavailable) -> float:
        """Seconds to wait after this failure."""
        now = time.monotonic()
        if not self._waited_for:
            self._began, self._pause = now, FIRST_PAUSE
        if now - self._said >= SAY_EVERY or problem.what != self._waited_for:
            seconds = round(now - self._began)
            log.warning(f"Waiting for {problem.what}", problem=str(problem), seconds=seconds)
            self._said, self._waited_for = now, problem.what
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause

    def succeeded(self) -> None:
        """An attempt went well."""
        if self._waited_for:
            log.info(f"{self._waited_for} answers again", seconds=round(time.monotonic() - self._began, 1))
            self._waited_for = ""


def wait_out(
    step: Callable[[], T],
    stopping: threading.Event,
    seconds: float = math.inf,
    failed: Callable[[Unavailable], object] = lambda _: None,
) -> T:
    """Call `step` until it does not raise `Unavailable`; every other error passes, and this one too after `seconds`.

    `failed` is told of each that is waited out.

    Raises `Stopping` as soon as `stopping` is set during a pause.
    """
    patience, deadline = Patience(), time.monotonic() + seconds
    while True:
        try:
            result = step()
        except Unavailable as problem:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            failed(problem)
            if stopping.wait(min(patience.pause_after(problem), left)):
                raise Stopping(f"told to stop while waiting for {problem.what}") from problem
        else:
            patience.succeeded()
            return result
