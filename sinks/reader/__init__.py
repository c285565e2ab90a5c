"""The reader's library: how far a stream may be read, what moved it there, and the loop that reads it.

`Positions` and `AsyncPositions` look at what is published; `Reader` and `AsyncReader` read a table along with it.
"""

from tidemark.sinks.reader.aio import AsyncFollow, AsyncPositions
from tidemark.sinks.reader.aio_reader import AsyncReader
from tidemark.sinks.reader.events import Advance, Event, Evidence, Late, LateLost, Line, Reread
from tidemark.sinks.reader.interval_text import interval_text, parse_intervals
from tidemark.sinks.reader.place import Place
from tidemark.sinks.reader.positions import Follow, Positions
from tidemark.sinks.reader.reader import Batch, Reader
from tidemark.sinks.reader.standing import Recovering, Standing
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Order, Token

__all__ = [
    "ZERO",
    "Advance",
    "AsyncFollow",
    "AsyncPositions",
    "AsyncReader",
    "Batch",
    "Event",
    "Evidence",
    "Follow",
    "Late",
    "LateLost",
    "Line",
    "Order",
    "Place",
    "Positions",
    "Reader",
    "Recovering",
    "Reread",
    "Standing",
    "Table",
    "Token",
    "interval_text",
    "parse_intervals",
]
