"""Waiting out what the world will mend, without end but not without word."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from streaming.errors import Stopping, Unavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
SAY_EVERY = 10.0


def wait_out(step: Callable[[], T], stopping: threading.Event) -> T:
    """Call `step` until it does not raise `Unavailable`; every other error passes.

    Pauses grow from 0.1 s to 5 s. Logs what is waited for at once, then every 10 s, and when it is over. Raises
    `Stopping` as soon as `stopping` is set during a pause.
    """
    began = time.monotonic()
    said = began - SAY_EVERY
    pause = FIRST_PAUSE
    waited_for = ""
    while True:
        try:
            result = step()
        except Unavailable as problem:
            now = time.monotonic()
            if now - said >= SAY_EVERY or problem.what != waited_for:
                log.warning(f"Waiting for {problem.what}", problem=str(problem), seconds=round(now - began))
                said, waited_for = now, problem.what
            if stopping.wait(pause):
                raise Stopping(f"told to stop while waiting for {problem.what}") from problem
            pause = min(2 * pause, LONGEST_PAUSE)
        else:
            if waited_for:
                log.info(f"{waited_for} answers again", seconds=round(time.monotonic() - began, 1))
            return result
