"""Waiting for what must come, without a fixed sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def eventually(found: Callable[[], T | None], seconds: float = 15.0, what: Callable[[], str] = lambda: "it holds") -> T:
    """The first true answer of `found`, asked fifty times a second.

    Fails after `seconds`, saying `what` was waited for and how it is.
    """
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what()}")
        time.sleep(0.02)
    return answer
