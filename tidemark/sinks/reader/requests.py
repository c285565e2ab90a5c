"""Requests of a program, their answers, and the driver of a program. No sockets.

A program is a generator that decides what to do and yields requests. `async_positions` and `async_reader` carry the
requests out, for asyncio; `positions` and `reader`, which are generated from them, do so for threads. So both forms
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
from tidemark.sinks.reader.events import Advance, Late, Place

LONGEST_WAIT = 1.0  # seconds between two readings: the linear position may move without a list entry (a writer retires)


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An entry of a stream's list of advances in Redis, unparsed."""

    name: str
    fields: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One step of I/O, which may be carried out any number of times."""


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
        allocated: the highest ID that any record of the stream named; None: not known.
        entries: of a `ReadList`, the entries after `after`.
        joined: whether `after` is still on the list. True without an `after`.
        more: whether the list has more entries.
        last: the name of the newest entry that was read.
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
    """Ask whether a stream of that name may exist. Answered by a bool. False: Postgres, or without Postgres a filled
    Redis, does not know it."""

    stream: str


@dataclass(frozen=True, slots=True)
class AwaitEntry(Request):
    """Return when the list of `stream` has an entry after the entry named `after`, or after `seconds`. No answer."""

    stream: str
    after: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadHistory(Request):
    """Read what Postgres knows of `stream` beyond `place`, at most `most` advances and as many late completions.
    Answered by `StreamHistory`, or None without a Postgres."""

    stream: str
    place: Place
    most: int


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """A page of the history of a stream, beyond a place.

    Attributes:
        chains: by writer that is beyond the place: its position, and its newest advances up to there that are still
            stored, oldest first.
        late: the late completions after that of the place, oldest first.
        more: whether there is another page, after this one. If so, a position may be an intermediate one.
    """

    chains: Mapping[str, tuple[int, Sequence[Advance]]] = field(default_factory=dict)
    late: Sequence[Late] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class Pause(Request):
    """Wait `seconds` before a retry. No answer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PlaceBusy(Pause):
    """A pause because another copy of the reader has the place."""


@dataclass(frozen=True, slots=True)
class RunSql(Request):
    """Run a statement on the session of a role. Answered by its rows, [] if it returns none.

    Attributes:
        role: `place`: the reader's own database, inside its transaction if one is open; `source`: where the backing
            table is read; `primary`: the server that `source` is a replica of.
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
    """Commit it. No answer. After a failure the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class CloseSessions(Request):
    """Close all database sessions, and with them an open transaction. No answer."""


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


class AsyncStep:
    """The next step of a reader, for one asyncio task at a time.

    A step is a task of its own: if the caller is cancelled, for example by a time-out, the step goes on, and the next
    call gets its result.
    """

    def __init__(self, reader: str, stream: str) -> None:
        self._names = reader, stream
        self._caller: asyncio.Task[Any] | None = None
        self._is_taken = False
        self._task: asyncio.Task[Any] | None = None

    async def result(self, begin: Callable[[], Awaitable[R]]) -> R:
        """The result of `begin`, or of the step that goes on. Raises `ReaderInUse`."""
        if self._is_taken:
            raise ReaderInUse(*self._names, "task")
        self._is_taken, self._caller = True, asyncio.current_task()
        if self._task is None:
            self._task = asyncio.ensure_future(begin())
        task = self._task
        try:
            # The caller may be cancelled in the moment in which the step ends. Its result is then for the next call.
            await asyncio.wait([task])
            self._task = None
            return cast("R", task.result())
        finally:
            self._is_taken = False

    def check_loop(self) -> None:
        """A loop begins while a batch is in hand. Raises `ReaderInUse` if the task of that batch is running."""
        if self._caller not in {None, asyncio.current_task()} and not self._caller.done():
            raise ReaderInUse(*self._names, "task")

    async def aclose(self) -> None:
        """End a step that goes on."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.1)  # redis-py may swallow a cancellation while it connects
        if task is not None and not task.cancelled():
            task.exception()


class Step:
    """`AsyncStep` for threads."""

    def __init__(self, reader: str, stream: str) -> None:
        self._names = reader, stream
        self._caller: threading.Thread | None = None
        self._taken = threading.Lock()

    def result(self, begin: Callable[[], R]) -> R:
        """The result of `begin`. Raises `ReaderInUse`."""
        if not self._taken.acquire(blocking=False):
            raise ReaderInUse(*self._names, "thread")
        self._caller = threading.current_thread()
        try:
            return begin()
        finally:
            self._taken.release()

    def check_loop(self) -> None:
        """A loop begins while a batch is in hand. Raises `ReaderInUse` if the thread of that batch is running."""
        if self._caller not in {None, threading.current_thread()} and self._caller.is_alive():
            raise ReaderInUse(*self._names, "thread")

    def close(self) -> None:
        """A step never goes on after its call."""
