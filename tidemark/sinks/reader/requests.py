"""Requests of a program, their answers, and the driver of a program. No sockets.

A program is a generator that decides what to do and yields requests. `async_positions` and `async_reader` carry the
requests out, for asyncio; `positions` and `reader`, which are generated from them, do so for threads. So both forms
share every decision.
"""

import asyncio
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from psycopg.sql import Composed

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import Unavailable
from tidemark.sinks.reader.events import Advance, Late, Place

LONGEST_WAIT = 1.0  # seconds between two readings: the line may move without an entry on the list (a writer retires)


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An item of a stream's list of advances in Redis, as it stands there."""

    name: str
    fields: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One step of I/O, which may be carried out any number of times."""


@dataclass(frozen=True, slots=True)
class ReadList(Request):
    """Read all keys of `stream` in one transaction, and what its list holds from `after` on; None: from its start."""

    stream: str
    after: ListEntry | None


@dataclass(frozen=True, slots=True)
class ReadNewest(Request):
    """Read all keys of `stream` in one transaction, and the newest entry of its list, to read on from there."""

    stream: str


@dataclass(frozen=True, slots=True)
class ReadKeys(Request):
    """Read the keys of `stream` in one transaction, without its list."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """The answer to `ReadList`, `ReadNewest` and `ReadKeys`. `linear` is None where Redis knows nothing of the stream;
    `allocated` is the highest ID that any record of it named, None where that is not known.

    `entries` of a `ReadList` begin behind `after`; `joined` tells whether `after` still stands there (always, without
    an `after`). `more` says that the list goes on. `last` names the newest entry of the list that was read.
    """

    linear: int | None
    positions: Mapping[str, int]
    late: int = 0
    allocated: int | None = None
    entries: Sequence[ListEntry] = ()
    joined: bool = True
    more: bool = False
    last: str = "0-0"


@dataclass(frozen=True, slots=True)
class ReadName(Request):
    """Look whether there may be a stream of that name. Answered by a bool: False where Postgres, or without one a Redis
    that is filled, has never heard of it."""

    stream: str


@dataclass(frozen=True, slots=True)
class AwaitEntry(Request):
    """Return when the list of `stream` goes on behind the entry named `after`, or after `seconds`. No answer."""

    stream: str
    after: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadHistory(Request):
    """Read what Postgres knows of `stream` beyond `place`, at most so many advances, and as many late completions.
    Answered by `StreamHistory`, or None without a Postgres."""

    stream: str
    place: Place
    most: int


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """`chains` has every writer that stands beyond the place: its position, and those of its newest advances up to
    there that are still kept, oldest first. `late`, oldest first, are late completions after the place's.

    `more`: that was not all, and the next page begins behind it. A position is then perhaps one on the way.
    """

    chains: Mapping[str, tuple[int, Sequence[Advance]]] = field(default_factory=dict)
    late: Sequence[Late] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class Pause(Request):
    """Wait `seconds` before something is tried again. No answer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RunSql(Request):
    """Run a statement on the session of that role and give its rows, [] where it gives none.

    `place`: the reader's own database, inside its transaction where one is open; `source`: where the backing table
    is read; `primary`: the server that `source` is a replica of. `id` is the column that names a row in an error.
    """

    role: "Role"
    statement: Composed
    id: str = ""


@dataclass(frozen=True, slots=True)
class BeginTransaction(Request):
    """Begin a transaction on the reader's own database. No answer."""


@dataclass(frozen=True, slots=True)
class CommitTransaction(Request):
    """Commit it. No answer. After a failure it may have happened."""


@dataclass(frozen=True, slots=True)
class CloseSessions(Request):
    """Close all database sessions, and with them the transaction that may be open. No answer."""


Role = Literal["place", "source", "primary"]
Row = dict[str, Any]
Answer = StreamKeys | StreamHistory | list[Row] | bool | None


def patiently(request: Request) -> Generator[Request, Answer, Answer]:
    """Repeat the request until it does not fail with `Unavailable`."""
    patience = WaitLog()
    while True:
        try:
            answer = yield request
        except Unavailable as problem:
            yield Pause(patience.pause_after(problem))
        else:
            patience.succeeded()
            return answer


def rows(request: RunSql) -> Generator[Request, Answer, list[Row]]:
    """The rows that a statement gave."""
    answer = yield request
    assert isinstance(answer, list)
    return answer


R = TypeVar("R")


class Driver(Generic[R]):
    """`step` is the program's current request or value. It stays until `answered`, `failed` or `handed_over` is called.

    So a request that was interrupted is carried out again.
    """

    def __init__(self, program: Generator[Request | R, Answer, None]) -> None:
        self._program = program
        self._step: Request | R | None = None

    def step(self) -> Request | R | None:
        """None: the program is over. Raises what the program raises; it is over then."""
        if self._step is None:
            self._step = next(self._program, None)
        return self._step

    def handed_over(self) -> None:
        self._step = None

    def answered(self, answer: Answer) -> None:
        self._step = None
        self._step = self._program.send(answer)

    def failed(self, problem: Unavailable) -> None:
        self._step = None
        self._step = self._program.throw(problem)


async def async_pause(stopping: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or once `stopping` is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), seconds)


def pause(stopping: threading.Event, seconds: float) -> None:
    """`async_pause` for threads."""
    stopping.wait(seconds)
