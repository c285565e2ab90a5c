"""Loads the modules of compiled code, which need numba. Until a module is loaded, the callers use slower code.

If numba is missing or broken, they use the slower code for ever. Then `decode` decodes each record in Python, `compact`
sorts with numpy, and `native_consumer` copies messages one by one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from types import ModuleType
from typing import TypeAlias

from tidemark.common.log import get_logger

log = get_logger(__name__)

Loader: TypeAlias = Callable[[], ModuleType | None]

MAX_SLOW_SECONDS = 2.0
"""If slower code would take this many seconds or more, the task waits for the compiled code. The wait delays all
streams
of the batch: loading takes 1 s of CPU, or many seconds if the cache of compiled code is empty.
"""

SLOW_DECODING = "Slow decoding"
"""The first words of each warning that slower code is used. If Spark's workers log such a warning, the pipeline repeats
the warning in its own log (`engine.jvm`).
"""
NUMBA_WARNING = f"{SLOW_DECODING}: numba cannot be used; a record takes about 12 µs of CPU instead of 0.5 µs"

failed_modules: list[str] = []
"""The modules that this process could not load."""


@cache
def load_field_scan() -> ModuleType | None:
    """Import `field_scan`, and compile its functions or load them from the cache of compiled code.

    Returns:
        The module; None if numba is missing or cannot compile the module. Then the process logs one warning, also if
        both modules fail.
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
    """Like `load_field_scan`, for `kernels`."""
    try:
        from tidemark.streaming.ingest import kernels  # noqa: PLC0415  # takes 0.4 s of CPU

        kernels.compile_all()
    except Exception as error:  # noqa: BLE001  # see above
        _warn("kernels", error)
        return None
    return kernels


_futures: dict[Loader, "Future[ModuleType | None]"] = {}
_lock = threading.Lock()


def get_module(loader: Loader, seconds: float) -> ModuleType | None:
    """Return the module of a loader if the module is loaded. The first call starts a thread that loads the module.

    Args:
        loader: `load_field_scan` or `load_kernels`.
        seconds: the time that slower code would take. If this is `MAX_SLOW_SECONDS` or more, the call waits until the
            module is loaded, without a time limit.

    Returns:
        The module; None if it is not loaded yet, or cannot be loaded.
    """
    with _lock:
        if (future := _futures.get(loader)) is None:
            future = _futures[loader] = Future()
            threading.Thread(target=_load_into, args=(future, loader), name="compiled code", daemon=True).start()
    return future.result() if future.done() or seconds >= MAX_SLOW_SECONDS else None


def _load_into(future: "Future[ModuleType | None]", loader: Loader) -> None:
    try:
        future.set_result(loader())
    except BaseException as error:  # noqa: BLE001  # raised in the threads that wait for the module
        future.set_exception(error)


def _warn(name: str, error: Exception) -> None:
    """Add the module to `failed_modules`. Logs a warning if this is the first one."""
    if not failed_modules:
        log.warning(NUMBA_WARNING, cause=f"{type(error).__name__}: {error}".splitlines()[0])
    failed_modules.append(name)
