"""Loads the modules of compiled code, which need numba. If numba is missing or broken, their callers use slower code.

`decode` then decodes each record in Python, `compact` sorts with numpy, and `native_consumer` copies messages one by
one.
"""

from functools import cache
from types import ModuleType

from tidemark.common.log import get_logger

log = get_logger(__name__)

SLOW_DECODING = "Slow decoding"
"""The first words of a warning about a fallback. The pipeline repeats such lines of Spark's workers in its own log."""
NUMBA_WARNING = f"{SLOW_DECODING}: numba cannot be used; a record takes about 12 µs of CPU instead of 0.5 µs"

warned: list[str] = []
"""The modules that could not be loaded in this process."""


@cache
def load_field_scan() -> ModuleType | None:
    """Import `field_scan` and compile its functions, or load them from the cache of compiled code.

    Returns:
        The module. None if numba is missing or cannot compile it; the process logs one warning then.
    """
    try:
        from tidemark.streaming.ingest import field_scan  # noqa: PLC0415  # takes 0.4 s of CPU

        field_scan.compile_all()
    except Exception as error:  # noqa: BLE001  # a broken numba or llvmlite raises errors of any type
        _warn("field_scan", error)
        return None
    return field_scan


@cache
def load_kernels() -> ModuleType | None:
    """Import `kernels`, as `load_field_scan` does."""
    try:
        from tidemark.streaming.ingest import kernels  # noqa: PLC0415  # takes 0.4 s of CPU

        kernels.compile_all()
    except Exception as error:  # noqa: BLE001  # see above
        _warn("kernels", error)
        return None
    return kernels


def _warn(name: str, error: Exception) -> None:
    if not warned:
        log.warning(NUMBA_WARNING, cause=f"{type(error).__name__}: {error}".splitlines()[0])
    warned.append(name)
