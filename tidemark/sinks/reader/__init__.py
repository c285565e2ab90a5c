"""The reader library: the published positions of a stream, its advances, and the loop that reads its table.

The names in `__all__` are the interface for services; `tidemark` exports these names too. All other names are for the
rest of Tidemark, such as the sidecar, which runs the I/O itself. *Programs* (`FollowProgram` and others) decide what to
read and yield requests. A `Driver` runs a program step by step, and its caller carries out the requests.
"""

from tidemark.sinks.reader.async_positions import AsyncFollow, AsyncPositions
from tidemark.sinks.reader.async_positions import read_redis_or_postgres as read_redis_or_postgres
from tidemark.sinks.reader.async_reader import AsyncReader
from tidemark.sinks.reader.batch import ReadBatch
from tidemark.sinks.reader.events import (
    Advance,
    Event,
    Late,
    LinearMove,
    MissingLateCompletions,
    Place,
    ReadProgress,
    Reread,
)
from tidemark.sinks.reader.follow import CaughtUp as CaughtUp
from tidemark.sinks.reader.follow import EventMerge as EventMerge
from tidemark.sinks.reader.follow import FollowProgram as FollowProgram
from tidemark.sinks.reader.follow import Mode as Mode
from tidemark.sinks.reader.history import History as History
from tidemark.sinks.reader.history import MissedChanges as MissedChanges
from tidemark.sinks.reader.places import ParkedFact as ParkedFact
from tidemark.sinks.reader.places import ReaderPlaces as ReaderPlaces
from tidemark.sinks.reader.places import StoredPlace as StoredPlace
from tidemark.sinks.reader.positions import Follow, Positions
from tidemark.sinks.reader.reader import Reader
from tidemark.sinks.reader.redis import REMEDIES as REMEDIES
from tidemark.sinks.reader.redis import queue_commands as queue_commands
from tidemark.sinks.reader.redis import read_reply as read_reply
from tidemark.sinks.reader.redis import send_request as send_request
from tidemark.sinks.reader.redis import translate_errors as translate_errors
from tidemark.sinks.reader.requests import LONGEST_WAIT_SECONDS as LONGEST_WAIT_SECONDS
from tidemark.sinks.reader.requests import Answer as Answer
from tidemark.sinks.reader.requests import AwaitEntry as AwaitEntry
from tidemark.sinks.reader.requests import CheckStreamName as CheckStreamName
from tidemark.sinks.reader.requests import Driver as Driver
from tidemark.sinks.reader.requests import ListEntry as ListEntry
from tidemark.sinks.reader.requests import Pause as Pause
from tidemark.sinks.reader.requests import ReadHistory as ReadHistory
from tidemark.sinks.reader.requests import ReadKeys as ReadKeys
from tidemark.sinks.reader.requests import ReadList as ReadList
from tidemark.sinks.reader.requests import ReadNewest as ReadNewest
from tidemark.sinks.reader.requests import Request as Request
from tidemark.sinks.reader.requests import StreamHistory as StreamHistory
from tidemark.sinks.reader.requests import StreamKeys as StreamKeys
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import TOKEN_PATTERN as TOKEN_PATTERN
from tidemark.sinks.reader.token import ZERO, Order, Token, interval_text, parse_intervals
from tidemark.sinks.reader.wait import GRACE_SECONDS as GRACE_SECONDS
from tidemark.sinks.reader.wait import MonotonicPositions as MonotonicPositions
from tidemark.sinks.reader.wait import PositionSnapshot, Recovering
from tidemark.sinks.reader.wait import PublishedPositions as PublishedPositions
from tidemark.sinks.reader.wait import WaitConfig as WaitConfig
from tidemark.sinks.reader.wait import target_token as target_token
from tidemark.sinks.reader.wait import wait_for_token as wait_for_token
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
    "Reread",
    "Table",
    "Token",
    "interval_text",
    "parse_intervals",
]
