"""Python's garbage collector, and when it is not wanted."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
