"""What Python's garbage collector looks at in a worker."""

import subprocess
import sys


def test_a_collection_after_a_task_passes_over_what_is_loaded_by_then() -> None:
    """Rule 8: Spark has the worker collect after each task, for ever; what an earlier task loaded is not looked at."""
    program = """
import gc
from tidemark.streaming.collection import freeze
freeze()
settled = len(gc.get_objects())
import numba
loaded = len(gc.get_objects())
freeze()
print(settled, loaded, len(gc.get_objects()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    settled, loaded, frozen = map(int, done.stdout.split())
    assert loaded > 10_000 + settled
    assert frozen < 1_000


def test_nothing_is_collected_while_no_module_comes() -> None:
    """A collection for each task would cost what it spares."""
    program = """
import gc
from tidemark.streaming.collection import freeze
freeze()
before = gc.get_stats()[2]["collections"]
for _ in range(9):
    freeze()
print(gc.get_stats()[2]["collections"] - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n"
