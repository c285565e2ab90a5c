"""Waiting for what must come, without a fixed sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

SHORTEST, LONGEST = 0.02, 0.25  # seconds between two looks
SHARE = 0.05  # of what was waited so far: a look may cost as much as what it waits for


def eventually(found: Callable[[], T | None], seconds: float = 60.0, what: Callable[[], str] = lambda: "it holds") -> T:
    """The first true answer of `found`, asked fifty times a second at first, and after five seconds four times.

    Fails after `seconds`, saying `what` was waited for and how it is.
    """
    began = time.monotonic()
    while not (answer := found()):
        waited = time.monotonic() - began
        if waited > seconds:
            pytest.fail(f"not within {seconds:g} s: {what()}")
        time.sleep(min(max(SHORTEST, SHARE * waited), LONGEST))
    return answer
