"""Loggers of structlog, which is imported with the first line that is logged: most verbs log none."""

from collections.abc import Callable
from typing import Any


class LateLogger:
    """A logger with the methods of structlog's: `debug`, `info`, `warning`, `error`, `critical`, `exception`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logger: Any = None

    def __getattr__(self, method: str) -> Any:
        if self._logger is None:
            import structlog  # noqa: PLC0415 - its import takes a tenth of a second

            configure_now()
            self._logger = structlog.get_logger(self._name)
        return getattr(self._logger, method)


_configure: list[Callable[[], None]] = []


def configure_later(configure: Callable[[], None]) -> None:
    """Call `configure` once before the next line is logged."""
    _configure[:] = [configure]


def configure_now() -> None:
    """Configure what `configure_later` was given, if that has not been done."""
    while _configure:
        _configure.pop()()


def get_logger(name: str) -> Any:
    """The logger of a module, by its `__name__`."""
    return LateLogger(name)
