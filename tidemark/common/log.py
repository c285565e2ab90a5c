"""Loggers that import structlog at the first log line, because most commands log nothing.

A `Progress` shows the progress of long work to a person. `app.output.progress` implements `Progress` as a bar.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""A function that takes the total number of units, and returns a context manager. The context manager yields a function
`advance(units)`. `units` is the number of units that were completed since the last call of `advance`.
"""


@contextmanager
def no_progress(total: int) -> Iterator[Callable[[int], None]]:
    """A `Progress` that shows nothing."""
    yield lambda _: None


class LazyLogger:
    """A logger with structlog's methods: `debug`, `info`, `warning`, `error`, `critical`, `exception`.

    Imports and configures structlog when the first method is used.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger: Any = None

    def __getattr__(self, method: str) -> Any:
        configure_now()
        if self._logger is None:
            import structlog  # noqa: PLC0415 - its import takes a tenth of a second

            self._logger = structlog.get_logger(self._name)
        return getattr(self._logger, method)


_configure: list[Callable[[], None]] = []
_lock = threading.RLock()
"""Locked while logging is configured: other threads cannot log a line before the configuration is complete."""


def configure_later(configure: Callable[[], None]) -> None:
    """Register the function `configure`, which the next log line calls once. Replaces an earlier function."""
    _configure[:] = [configure]


def configure_now() -> None:
    """Call the function that was passed to `configure_later`, unless it was already called."""
    with _lock:
        while _configure:
            _configure[-1]()
            _configure.clear()


def get_logger(name: str) -> Any:
    """Create the logger of a module. `name`: the `__name__` of the module."""
    return LazyLogger(name)
