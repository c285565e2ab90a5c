"""Requests of a program, the answers to the requests, and the driver of a program. No sockets.

A program is a generator that decides what to do, and yields requests and values. `async_positions` and `async_reader`
carry out the requests with asyncio. `positions` and `reader`, which are generated from these two modules, carry out the
requests in threads. So both versions share every decision.
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

LONGEST_WAIT_SECONDS = 1.0
"""The longest wait for a list entry, in seconds. Afterwards the positions are read again, because the retirement of a
writer moves the linear position without a list entry."""


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An entry of a stream's list of advances (a Redis Stream), not parsed yet (`redis.parse_entry`).

    Attributes:
        name: the ID that Redis gave the entry, such as `1700000000000-0`.
        fields: field -> value.
    """

    name: str
    fields: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One step of I/O. Each class names the answer to its requests. If a request fails, it may be repeated, except
    `CommitTransaction`."""


@dataclass(frozen=True, slots=True)
class ReadList(Request):
    """Read the keys of `stream`, and a page of its list, in one transaction. The answer is `StreamKeys`.

    The page begins after the entry `after`; if `after` is None, at the start of the list.
    """

    stream: str
    after: ListEntry | None


@dataclass(frozen=True, slots=True)
class ReadNewest(Request):
    """Read the keys of `stream`, and the newest entry of its list, in one transaction. The answer is `StreamKeys`."""

    stream: str


@dataclass(frozen=True, slots=True)
class ReadKeys(Request):
    """Read the keys of `stream`, and the name of its newest entry, in one transaction. The answer is `StreamKeys`."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """The answer to `ReadList`, `ReadNewest` and `ReadKeys`.

    Attributes:
        linear: the linear position; None if the stream is unknown.
        positions: writer -> position.
        last_late_number: the number of the newest late completion; 0 if there is none.
        allocated: the ID farthest from 0 that any record of the stream has named; None if unknown.
        entries: the entries that the request asked for, oldest first; empty for `ReadKeys`.
        is_continuous: False if the entry `after` of a `ReadList` is no longer on the list, or if the keys come from
            Postgres. Otherwise True.
        has_more: whether another `ReadList` gets more entries.
        last_entry_name: the name of the last entry that was read; `0-0` if none was read.
    """

    linear: int | None
    positions: Mapping[str, int]
    last_late_number: int = 0
    allocated: int | None = None
    entries: Sequence[ListEntry] = ()
    is_continuous: bool = True
    has_more: bool = False
    last_entry_name: str = "0-0"


@dataclass(frozen=True, slots=True)
class CheckStreamName(Request):
    """Query whether a stream with this name may exist. The answer is a bool.

    With Postgres, the answer is False if Postgres does not know the stream. Without Postgres, the answer is False if
    Redis is filled and does not know the stream.
    """

    stream: str


@dataclass(frozen=True, slots=True)
class AwaitEntry(Request):
    """Wait for an entry after the entry named `entry_name` on the list of advances of `stream`, at most `seconds`.

    No answer.
    """

    stream: str
    entry_name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadHistory(Request):
    """Read a page of the history of `stream` beyond `place` from Postgres. The answer is `StreamHistory`.

    The page has at most `limit` advances and `limit` late completions. Without a Postgres, the answer is None.
    """

    stream: str
    place: Place
    limit: int


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """A page of the history of a stream, beyond a place.

    Attributes:
        chains: writer -> (position, advances). Has the writers whose position is beyond the place. The advances end at
            this position and are in ascending order. If older advances are no longer stored, the first advance begins
            beyond the place.
        late: the late completions with higher numbers than the place's `late`, oldest first.
        has_more: whether another page follows. If so, some writers may be missing, and the position of one writer may
            be lower than the published position.
    """

    chains: Mapping[str, tuple[int, Sequence[Advance]]] = field(default_factory=dict)
    late: Sequence[Late] = ()
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Pause(Request):
    """Wait `seconds`, or until the reader or follower is stopped. No answer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PlaceBusy(Pause):
    """Wait `seconds` because another copy of the reader has locked the place. No answer."""


@dataclass(frozen=True, slots=True)
class RunSql(Request):
    """Run a statement on one of the databases. The answer is a list with its rows, empty if it returns none.

    Attributes:
        role: the database. `place`: the reader's own database, inside the open transaction if there is one. `source`:
            the database with the backing table. `primary`: the server that `source` is a replica of.
        statement: the SQL statement.
        id_column: the column whose value names the row in a `RowUnreadable`; empty if no row can be named.
    """

    role: "Role"
    statement: Composed
    id_column: str = ""


@dataclass(frozen=True, slots=True)
class BeginTransaction(Request):
    """Begin a transaction on the reader's own database. No answer."""


@dataclass(frozen=True, slots=True)
class CommitTransaction(Request):
    """Commit the open transaction of the reader's own database. No answer. If this fails, the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class CloseSessions(Request):
    """Close all database sessions, which rolls back an open transaction. No answer."""


Role = Literal["place", "source", "primary"]
Row = dict[str, Any]
Answer = StreamKeys | StreamHistory | list[Row] | bool | None


def repeat_while_unavailable(request: Request) -> Generator[Request, Answer, Answer]:
    """Yield the request until it succeeds, with pauses after each `Unavailable`, and return its answer."""
    wait_log = WaitLog()
    while True:
        try:
            answer = yield request
        except Unavailable as problem:
            yield Pause(wait_log.pause_after(problem))
        else:
            wait_log.note_success()
            return answer


def fetch_rows(request: RunSql) -> Generator[Request, Answer, list[Row]]:
    """Yield the request and return the rows of its statement, each as a dict (column -> value)."""
    answer = yield request
    assert isinstance(answer, list)
    return answer


R = TypeVar("R")


class Driver(Generic[R]):
    """Runs a program step by step.

    `step` returns the current request or value. The caller carries out a request and calls `send_answer` or `throw`, or
    takes a value and calls `mark_handed_over`. Until one of these calls, `step` returns the same request or value. So
    an interrupted request is repeated.
    """

    def __init__(self, program: Generator[Request | R, Answer, None]) -> None:
        self._program = program
        self._step: Request | R | None = None

    def step(self) -> Request | R | None:
        """Return the current request or value. If there is none, first run the program to the next one.

        Returns None if the program has ended. An error of the program is raised, and ends the program.
        """
        if self._step is None:
            self._step = next(self._program, None)
        return self._step

    def mark_handed_over(self) -> None:
        """Record that the caller has taken the current value."""
        self._step = None

    def send_answer(self, answer: Answer) -> None:
        """Give the program the answer to the current request, and run the program to its next request or value."""
        self._step = None
        self._step = self._program.send(answer)

    def throw(self, problem: Unavailable) -> None:
        """Raise `problem` in the program at the current request, and run the program to its next request or value."""
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
    """Runs the steps of a reader, for one asyncio task at a time.

    Each step runs in a task of its own. If the caller is cancelled, for example by a time-out, the step continues, and
    the next call of `run` gets the result of the step.
    """

    def __init__(self, reader: str, stream: str) -> None:
        self._reader_and_stream = reader, stream
        self._caller: asyncio.Task[Any] | None = None
        self._is_in_use = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self, begin: Callable[[], Awaitable[R]]) -> R:
        """Return the result of the step that still runs; if there is none, run `begin` as a new step.

        Raises `ReaderInUse` if another task is waiting for a result.
        """
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
        """Raise `ReaderInUse` if another task called `run` last and still runs: it may be processing a batch."""
        if self._caller not in {None, asyncio.current_task()} and not self._caller.done():
            raise ReaderInUse(*self._reader_and_stream, "task")

    async def aclose(self) -> None:
        """Cancel the step that still runs, if there is one, and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_until_done(task)


class Step:
    """`AsyncStep` for threads. A step runs in the thread of the caller."""

    def __init__(self, reader: str, stream: str) -> None:
        self._reader_and_stream = reader, stream
        self._caller: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, begin: Callable[[], R]) -> R:
        """Run `begin` and return its result. Raises `ReaderInUse` if another thread is running a step."""
        if not self._lock.acquire(blocking=False):
            raise ReaderInUse(*self._reader_and_stream, "thread")
        self._caller = threading.current_thread()
        try:
            return begin()
        finally:
            self._lock.release()

    def check_can_begin_loop(self) -> None:
        """Raise `ReaderInUse` if another thread called `run` last and still runs: it may be processing a batch."""
        if self._caller not in {None, threading.current_thread()} and self._caller.is_alive():
            raise ReaderInUse(*self._reader_and_stream, "thread")

    def close(self) -> None:
        """Do nothing: in threads, a step has always ended when `run` returns."""
