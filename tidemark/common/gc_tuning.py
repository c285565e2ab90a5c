"""Python's garbage collector, and when it is not wanted."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, in the whole process: it would go through the objects of many streams again
    and again, and finds no cycle.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze() -> None:
    """Keep the collector from what is loaded, which lives as long as the process. For the tasks of a worker, after each
    of which Spark has it collect: 10 ms of a core, and 40 once there is a compiler.
    """
    _freeze(len(sys.modules))


@cache
def _freeze(modules: int) -> None:  # with more of them it is done again
    gc.collect()
    gc.freeze()
