"""The reader's library: how far a stream may be read, what moved it there, and the loop that reads it.

`Positions` and `AsyncPositions` show what is published; `Reader` and `AsyncReader` read a table along with it.
"""

from tidemark.sinks.reader.aio import AsyncFollow, AsyncPositions
from tidemark.sinks.reader.aio_loop import AsyncReader
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.events import Advance, Event, Late, LateLost, LinearMove, Place, Reread
from tidemark.sinks.reader.loop import Reader
from tidemark.sinks.reader.sync import Follow, Positions
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
