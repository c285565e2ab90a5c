"""The reader's library: how far a stream may be read, what moved it there, and the loop that reads it.

`Positions` and `AsyncPositions` show what is published; `Reader` and `AsyncReader` read a table along with it.
"""

from tidemark.sinks.reader.async_positions import AsyncFollow, AsyncPositions
from tidemark.sinks.reader.async_reader import AsyncReader
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.events import Advance, Event, Late, LateLost, LinearMove, Place, Reread
from tidemark.sinks.reader.positions import Follow, Positions
from tidemark.sinks.reader.reader import Reader
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Order, Token, interval_text, parse_intervals
from tidemark.sinks.reader.wait import Recovering, Standing
from tidemark.streaming.values.limits import Evidence

__all__ = [
    "ZERO",
    "Advance",
    "AsyncFollow",
    "AsyncPositions",
    "AsyncReader",
    "Event",
    "Evidence",
    "Follow",
    "Late",
    "LateLost",
    "LinearMove",
    "Order",
    "Place",
    "Positions",
    "ReadBatch",
    "Reader",
    "Recovering",
    "Reread",
    "Standing",
    "Table",
    "Token",
    "interval_text",
    "parse_intervals",
]
