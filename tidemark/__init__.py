"""Tidemark publishes how far readers of an append-only log can read without missing a fact that completes later.

Services import only this package and `tidemark.errors`. Every other name is loaded at its first use, so a service that
only writes needs no library for reading. If a library is missing, `errors.ExtraMissing` (also an `ImportError`) names
the extra to install.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tidemark import errors

if TYPE_CHECKING:
    from tidemark.sinks.reader import (
        ZERO,
        Advance,
        AsyncFollow,
        AsyncPositions,
        AsyncReader,
        Event,
        Evidence,
        Follow,
        Late,
        LinearMove,
        MissingLateCompletions,
        Order,
        Place,
        Positions,
        PositionSnapshot,
        ReadBatch,
        Reader,
        ReadProgress,
        Recovering,
        Reread,
        Table,
        Token,
        interval_text,
        parse_intervals,
    )
    from tidemark.sinks.redis.client import RedisAddress
    from tidemark.sources.writer import AsyncWriter, Writer

__all__ = [
    "ZERO",
    "Advance",
    "AsyncFollow",
    "AsyncPositions",
    "AsyncReader",
    "AsyncWriter",
    "Event",
    "Evidence",
    "Follow",
    "Late",
    "LinearMove",
    "MissingLateCompletions",
    "Order",
    "Place",
    "PositionSnapshot",
    "Positions",
    "ReadBatch",
    "ReadProgress",
    "Reader",
    "Recovering",
    "RedisAddress",
    "Reread",
    "Table",
    "Token",
    "Writer",
    "errors",
    "interval_text",
    "parse_intervals",
]

_MODULES = {
    "AsyncWriter": "tidemark.sources.writer",
    "RedisAddress": "tidemark.sinks.redis.client",
    "Writer": "tidemark.sources.writer",
}


def _load(name: str) -> object:
    """Import the value of a name in `__all__`, and store it in this module.

    Raises:
        AttributeError: the name is not in `__all__`.
        errors.ExtraMissing: a library that the value needs is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "tidemark.sinks.reader")
    try:
        value: object = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise errors.ExtraMissing.for_import_error(error, f"{__name__}.{name}", "reader") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:
    __getattr__ = _load  # hidden from type checkers, which would accept any name
