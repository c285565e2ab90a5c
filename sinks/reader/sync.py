"""The reader's library for threads: `Positions`, what is published of streams, and `Reader`, the loop of a service.

The asyncio forms are in `aio`; the logic of both is in `wait`, `follow` and `read`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import psycopg
import redis
from psycopg.rows import TupleRow, dict_row

from tidemark.sinks.reader.databases import Databases
from tidemark.sinks.reader.events import Event, Late, Place
from tidemark.sinks.reader.follow import CaughtUp, Following, Mode
from tidemark.sinks.reader.history import History
from tidemark.sinks.reader.io import (
    Answer,
    AwaitEntry,
    BeginTransaction,
    CloseSessions,
    CommitTransaction,
    Driver,
    Pause,
    ReadHistory,
    ReadKeys,
    ReadList,
    ReadNewest,
    Request,
    Role,
    Row,
    RunSql,
)
from tidemark.sinks.reader.read import Portion, ReadConfig, Reading
from tidemark.sinks.reader.redis import REMEDIES, TIMEOUT, await_entry, reply, seen, translated
from tidemark.sinks.reader.table import Table
from tidemark.sinks.reader.token import ZERO, Token
from tidemark.sinks.reader.wait import GRACE, Recovering, Standing, WaitConfig, getting, target, waiting
from tidemark.sinks.redis.client import RedisAddress, RedisSession, redis_address
from tidemark.streaming.errors import Unavailable

R = TypeVar("R")


class Positions:
    """A context manager; any thread may call.

    `redis` is an address (a URL, or `RedisAddress`) or a client of your own, which stays open; `dsn` is that of
    Tidemark's Postgres (role tidemark_reader): with it a follower learns the evidence of what Redis no longer lists.
    """

    def __init__(self, redis: "str | RedisAddress | redis.Redis", dsn: str | None = None) -> None:
        self._session: RedisSession | _Given = (
            RedisSession(redis_address(redis), REMEDIES, TIMEOUT)
            if isinstance(redis, str | RedisAddress)
            else _Given(redis)
        )
        self._history = None if dsn is None else History(dsn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()
        if self._history is not None:
            self._history.close()

    def get(self, stream: str) -> Standing | Recovering:
        """The published positions of `stream` now. Raises `Unavailable` (call again) and `Refused`."""
        return self._result(Driver[Standing | Recovering](getting(stream)))

    def wait(
        self,
        stream: str,
        until: Token | str | int,
        writer: str | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
    ) -> Standing:
        """Wait until `stream` is complete up to `until`: a token, or an ID (of `writer`, or of all).

        Raises `NotReached` after `timeout` seconds, `TokenFromTheFuture` after `grace` seconds in which `until` was
        beyond every ID that Tidemark has heard of, `BadToken`, `Refused`, and `Unavailable` where Redis is away as the
        time is over.
        """
        return self._result(Driver[Standing](waiting(stream, target(until, writer), WaitConfig(timeout, grace))))

    def follow(
        self,
        stream: str,
        mode: Mode = "vector",
        since: Place | Token | str | None = None,
        stopping: threading.Event | None = None,
    ) -> "Follow":
        """Every advance after `since` (None: after what is published now), each once, joined, in order per writer.

        Waits for servers that are away and says so in the log. Ends soon after `stopping` is set. Raises `Refused`.
        For one thread.
        """
        since = Token.parse(since) if isinstance(since, str) else since
        return Follow(self, Following(stream, mode, since), stopping or threading.Event())

    def carry_out(self, request: Request, stopping: threading.Event) -> Answer:
        """Raises `Unavailable` (the same request may be carried out again) and `Refused`."""
        match request:
            case ReadList() | ReadNewest() | ReadKeys():
                with self._session.use() as client:
                    return seen(request, reply(client, request))
            case AwaitEntry():
                with self._session.use() as client:
                    await_entry(client, request)
            case ReadHistory():
                return None if self._history is None else self._history.past(request)
            case Pause(seconds):
                stopping.wait(seconds)
        return None

    def _result(self, driver: Driver[R]) -> R:
        never = threading.Event()
        result = until_handed(driver, lambda request: self.carry_out(request, never), never.is_set)
        assert result is not None
        return result


class Follow(Iterator[Event]):
    """An iterator of events; `place` is what was handed over so far, to go on from in another `follow`."""

    def __init__(self, positions: Positions, following: Following, stopping: threading.Event) -> None:
        self._positions = positions
        self._following = following
        self._stopping = stopping
        self._driver: Driver[Event | CaughtUp] = Driver(following.steps())

    @property
    def place(self) -> Place | None:
        """None while nothing is known of the stream and we began nowhere."""
        return self._following.place

    def __next__(self) -> Event:
        while True:
            event = until_handed(
                self._driver, lambda request: self._positions.carry_out(request, self._stopping), self._stopping.is_set
            )
            if event is None:
                raise StopIteration
            if not isinstance(event, CaughtUp):
                return event


def until_handed(driver: Driver[R], carry_out: Callable[[Request], Answer], stopped: Callable[[], bool]) -> R | None:
    """Carry out requests of the program until it hands a value over; None: it is over, or we are to stop."""
    while not stopped():
        step = driver.step()
        if not isinstance(step, Request):
            driver.handed_over()
            return step
        try:
            answer = carry_out(step)
        except Unavailable as problem:
            driver.failed(problem)
        else:
            driver.answered(answer)
    return None


class _Given:
    """A client that is not ours, in the place of a `RedisSession`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @contextmanager
    def use(self) -> Iterator[Any]:
        with translated(self._client):
            yield self._client

    def close(self) -> None:
        """It stays open."""


Connection = psycopg.Connection[TupleRow]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class ReadBatch(Generic[C]):
    """Rows of the backing table, ascending, as dicts; all rows of a fact are in one batch.

    Do everything that comes of them on `connection`: it is inside the transaction that also moves the reader's place,
    and that is committed when the loop goes on. Do not keep it. `late` is None for rows in their order; otherwise these
    rows belong to IDs that the reader has passed without them (see `Late`).
    """

    rows: list[Row]
    connection: C
    late: Late | None


class Reader(Iterator[ReadBatch[Connection]]):
    """A context manager and an iterator of batches, for one thread.

    What is done with a batch is committed when the next one is asked for, and only then: a loop that is left by
    `break` or by an error gives the batch in hand back, effects and all. Ends between two batches once `stopping` is
    set. Waits for servers that are away and says so in the log. Raises `Refused`, `ReaderModeChanged`, `LateUnknown`,
    `LateNeedsWriter`, and whatever psycopg raises of a statement that the database does not understand.
    """

    def __init__(
        self,
        positions: Positions,
        stream: str,
        table: Table,
        *,
        name: str,
        source: str,
        effects: str,
        mode: Mode = "linear",
        since: Token = ZERO,
        rows: int = 1000,
        primary: str | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """`name` is that of the place; every copy of a service uses the same, and they take turns.

        `source` is the address of the database with the backing `table`, `effects` that of the reader's own; where
        `source` is a replica, `primary` is that of its primary. `since` is where a new reader begins. A batch has at
        most `rows` rows, unless one fact has more. Raises `BadSetting`.
        """
        self._positions = positions
        self._databases = Databases(source, effects, primary)
        self._name = name
        self._stopping = stopping or threading.Event()
        config = ReadConfig(stream, table, name, mode, since, rows, replica=primary is not None)
        self._driver: Driver[Portion] = Driver(Reading(config).steps())
        self._sessions: dict[Role, Connection] = {}
        self._trusted: set[Role] = set()
        self._transaction: ExitStack | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was not committed."""
        self._transaction = None
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def __next__(self) -> ReadBatch[Connection]:
        portion = until_handed(self._driver, self._carry_out, self._stopped)
        if portion is None:
            raise StopIteration
        return ReadBatch(portion.rows, self._sessions["place"], portion.late)

    def _stopped(self) -> bool:
        return self._stopping.is_set() and self._transaction is None

    def _carry_out(self, request: Request) -> Answer:
        match request:
            case RunSql(role, statement):
                with self._databases.translated(role), self._session(role).cursor(row_factory=dict_row) as cursor:
                    cursor.execute(statement)
                    return cursor.fetchall() if cursor.description else []
            case BeginTransaction():
                with self._databases.translated("place"):
                    transaction = ExitStack()
                    transaction.enter_context(self._session("place").transaction())
                    self._transaction = transaction
            case CommitTransaction():
                assert self._transaction is not None
                transaction, self._transaction = self._transaction, None
                with self._databases.translated("place"):
                    transaction.close()
            case CloseSessions():
                self.close()
            case _:
                return self._positions.carry_out(request, self._stopping)
        return None

    def _session(self, role: Role) -> Connection:
        if role not in self._sessions:
            try:
                made = psycopg.connect(self._databases.conninfo(role, self._name), autocommit=True)
            except psycopg.OperationalError as error:
                if role not in self._trusted:
                    self._databases.refuse(role, error)
                raise
            self._sessions[role] = made
            self._trusted.add(role)
        return self._sessions[role]
