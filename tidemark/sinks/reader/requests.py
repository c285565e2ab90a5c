"""Requests of a program, their answers, and the driver of a program. No sockets.

A program is a generator that decides what to do and yields requests. `async_positions` and `async_reader` run the
requests with asyncio; `positions` and `reader`, which are generated from them, run them in threads. So both versions
share every decision.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

from psycopg.sql import Composed

from tidemark.common.backoff import WaitLog
from tidemark.common.errors import ReaderInUse, Unavailable
from tidemark.common.tasks import cancel_until_done
from tidemark.sinks.reader.events import Advance, Late, Place

LONGEST_WAIT = 1.0  # seconds between two reads: the linear position may move without a list entry (a writer retires)


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An entry of a stream's list of advances in Redis, unparsed."""

    name: str
    fields: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One step of I/O, which may be repeated any number of times."""


@dataclass(frozen=True, slots=True)
class ReadList(Request):
    """Read all keys of `stream` in one transaction, and the list entries after `after` (None: from its start)."""

    stream: str
    after: ListEntry | None


@dataclass(frozen=True, slots=True)
class ReadNewest(Request):
    """Read all keys of `stream` in one transaction, and the newest entry of its list, to continue from there."""

    stream: str


@dataclass(frozen=True, slots=True)
class ReadKeys(Request):
    """Read the keys of `stream` in one transaction, without its list."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """The answer to `ReadList`, `ReadNewest` and `ReadKeys`.

    Attributes:
        linear: None if Redis does not know the stream.
        late: the number of the newest late completion.
        allocated: the highest ID that any record of the stream named; None: not known.
        entries: the entries after `after` of a `ReadList`.
        is_continuous: whether `after` is still on the list. True without an `after`.
        has_more: whether the list has more entries.
        last: the name of the newest entry that was read.
    """

    linear: int | None
    positions: Mapping[str, int]
    late: int = 0
    allocated: int | None = None
    entries: Sequence[ListEntry] = ()
    is_continuous: bool = True
    has_more: bool = False
    last: str = "0-0"


@dataclass(frozen=True, slots=True)
class CheckStreamName(Request):
    """Query whether a stream with this name may exist. Answered by a bool. False: Postgres, or without Postgres a
    filled Redis, does not know the stream.
    """

    stream: str


@dataclass(frozen=True, slots=True)
class AwaitEntry(Request):
    """Wait until the list of `stream` has an entry after the entry named `after`, or for `seconds`. No answer."""

    stream: str
    after: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadHistory(Request):
    """Read the history of `stream` beyond `place` in Postgres: at most `limit` advances and `limit` late completions.
    Answered by `StreamHistory`, or None without a Postgres."""

    stream: str
    place: Place
    limit: int


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """A page of the history of a stream, beyond a place.

    Attributes:
        chains: for each writer beyond the place: its position, and its newest stored advances up to that position,
            oldest first.
        late: the late completions after the place's one, oldest first.
        has_more: whether another page follows. If so, a position may be an intermediate one.
    """

    chains: Mapping[str, tuple[int, Sequence[Advance]]] = field(default_factory=dict)
    late: Sequence[Late] = ()
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Pause(Request):
    """Wait `seconds` before a retry. No answer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PlaceBusy(Pause):
    """A pause because another copy of the reader has locked the place."""


@dataclass(frozen=True, slots=True)
class RunSql(Request):
    """Run a statement on the session of a role. Answered by its rows, or [].

    Attributes:
        role: `place`: the reader's own database, inside its transaction if one is open; `source`: the database with the
            backing table; `primary`: the server that `source` is a replica of.
        id: the column that names a row in an error.
    """

    role: "Role"
    statement: Composed
    id: str = ""


@dataclass(frozen=True, slots=True)
class BeginTransaction(Request):
    """Begin a transaction on the reader's own database. No answer."""


@dataclass(frozen=True, slots=True)
class CommitTransaction(Request):
    """Commit the transaction. No answer. After a failure the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class CloseSessions(Request):
    """Close all database sessions, which rolls back an open transaction. No answer."""


Role = Literal["place", "source", "primary"]
Row = dict[str, Any]
Answer = StreamKeys | StreamHistory | list[Row] | bool | None


def repeat_while_unavailable(request: Request) -> Generator[Request, Answer, Answer]:
    """Repeat the request while it fails with `Unavailable`."""
    wait_log = WaitLog()
    while True:
        try:
            answer = yield request
        except Unavailable as problem:
            yield Pause(wait_log.pause_after(problem))
        else:
            wait_log.note_success()
            return answer


def rows(request: RunSql) -> Generator[Request, Answer, list[Row]]:
    """Run the statement and return its rows."""
    answer = yield request
    assert isinstance(answer, list)
    return answer


R = TypeVar("R")


class Driver(Generic[R]):
    """Runs a program.

    `step` returns the same request or value until `send_answer`, `throw` or `mark_handed_over` is called. So an
    interrupted request is repeated.
    """

    def __init__(self, program: Generator[Request | R, Answer, None]) -> None:
        self._program = program
        self._step: Request | R | None = None

    def step(self) -> Request | R | None:
        """Return the current request or value, and run the program to the next one if there is none. None: the program
        has ended. Errors of the program are raised and end it."""
        if self._step is None:
            self._step = next(self._program, None)
        return self._step

    def mark_handed_over(self) -> None:
        self._step = None

    def send_answer(self, answer: Answer) -> None:
        self._step = None
        self._step = self._program.send(answer)

    def throw(self, problem: Unavailable) -> None:
        self._step = None
        self._step = self._program.throw(problem)


async def async_pause(stopping: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or once `stopping` is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), seconds)


def pause(stopping: threading.Event, seconds: float) -> None:
    """`async_pause` for threads."""
    stopping.wait(seconds)


class AsyncStep:
    """The next step of a reader, for one asyncio task at a time.

    A step is a separate task: if the caller is cancelled, for example by a time-out, the step continues, and the next
    call gets its result.
    """

    def __init__(self, reader: str, stream: str) -> None:
        self._reader_and_stream = reader, stream
        self._caller: asyncio.Task[Any] | None = None
        self._is_in_use = False
        self._task: asyncio.Task[Any] | None = None

    async def result(self, begin: Callable[[], Awaitable[R]]) -> R:
        """Start `begin`, unless a step still runs, and wait for the result. Raises `ReaderInUse`."""
        if self._is_in_use:
            raise ReaderInUse(*self._reader_and_stream, "task")
        self._is_in_use, self._caller = True, asyncio.current_task()
        if self._task is None:
            self._task = asyncio.ensure_future(begin())
        task = self._task
        try:
            # If the caller is cancelled at the moment when the step ends, the next call gets the result.
            await asyncio.wait([task])
            self._task = None
            return cast("R", task.result())
        finally:
            self._is_in_use = False

    def check_can_begin_loop(self) -> None:
        """Check that a new loop may begin. Raises `ReaderInUse` if the task of the current batch is running."""
        if self._caller not in {None, asyncio.current_task()} and not self._caller.done():
            raise ReaderInUse(*self._reader_and_stream, "task")

    async def aclose(self) -> None:
        """Cancel a step that still runs."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_until_done(task)


class Step:
    """`AsyncStep` for threads."""

    def __init__(self, reader: str, stream: str) -> None:
        self._reader_and_stream = reader, stream
        self._caller: threading.Thread | None = None
        self._lock = threading.Lock()

    def result(self, begin: Callable[[], R]) -> R:
        """Run `begin` and return its result. Raises `ReaderInUse`."""
        if not self._lock.acquire(blocking=False):
            raise ReaderInUse(*self._reader_and_stream, "thread")
        self._caller = threading.current_thread()
        try:
            return begin()
        finally:
            self._lock.release()

    def check_can_begin_loop(self) -> None:
        """Check that a new loop may begin. Raises `ReaderInUse` if the thread of the current batch is running."""
        if self._caller not in {None, threading.current_thread()} and self._caller.is_alive():
            raise ReaderInUse(*self._reader_and_stream, "thread")

    def close(self) -> None:
        """Do nothing: in threads, a step has always ended when `result` returns."""
