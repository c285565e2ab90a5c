"""What Python's garbage collector looks at in a worker."""

from tests.programs import printed


def test_a_collection_after_a_task_passes_over_what_is_loaded_by_then() -> None:
    """Rule 8: Spark has the worker collect after each task, for ever; what an earlier task loaded is not looked at."""
    program = """
import gc
from tidemark.common.gc_tuning import freeze
freeze()
settled = len(gc.get_objects())
import numba
loaded = len(gc.get_objects())
freeze()
print(settled, loaded, len(gc.get_objects()))
"""
    settled, loaded, frozen = map(int, printed(program))
    assert loaded > 10_000 + settled
    assert frozen < 1_000


def test_nothing_is_collected_while_no_module_comes() -> None:
    """A collection for each task would cost what it spares."""
    program = """
import gc
from tidemark.common.gc_tuning import freeze
freeze()
before = gc.get_stats()[2]["collections"]
for _ in range(9):
    freeze()
print(gc.get_stats()[2]["collections"] - before)
"""
    assert printed(program) == ["0"]
