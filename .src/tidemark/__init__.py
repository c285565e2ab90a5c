"""Tidemark tells every reader of an append-only log how far it may safely read.

Services need no deeper import than this package and `tidemark.errors`. Names are loaded when they are first used, so
that a service which only writes needs neither Spark nor Redis.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemark.sinks.reader import AsyncPositions, AsyncReader, Positions, Reader, Table, Token
    from tidemark.sources.writer import AsyncWriter, Direction, Stream, Writer

_HOMES = {
    "AsyncPositions": "tidemark.sinks.reader",
    "AsyncReader": "tidemark.sinks.reader",
    "AsyncWriter": "tidemark.sources.writer",
    "Direction": "tidemark.sources.writer",
    "Positions": "tidemark.sinks.reader",
    "Reader": "tidemark.sinks.reader",
    "Stream": "tidemark.sources.writer",
    "Table": "tidemark.sinks.reader",
    "Token": "tidemark.sinks.reader",
    "Writer": "tidemark.sources.writer",
}

__all__ = [
    "AsyncPositions",
    "AsyncReader",
    "AsyncWriter",
    "Direction",
    "Positions",
    "Reader",
    "Stream",
    "Table",
    "Token",
    "Writer",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
