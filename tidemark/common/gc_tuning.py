"""Disables Python's garbage collector for code in which it costs time and finds nothing."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector of the whole process.

    For code that creates the objects of many streams: the collector would scan them again and again, and there are no
    reference cycles to find.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze() -> None:
    """Exclude all objects that exist now from garbage collection: loaded modules live as long as the process.

    For Spark's Python workers, which collect garbage after each task. Without this it costs 10 ms of CPU time for each
    task, and 40 ms once the compiler is loaded.
    """
    _freeze(len(sys.modules))


@cache
def _freeze(modules: int) -> None:  # repeated after more modules were loaded
    gc.collect()
    gc.freeze()
