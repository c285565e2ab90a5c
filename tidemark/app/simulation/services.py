"""The services of the streams workload, which write with several Postgres drivers, and its readers in Python.

The drivers are psycopg, SQLAlchemy on psycopg, and asyncpg. SQLAlchemy and asyncpg are used if they are installed;
`tidemark-streams[local]` does not install them.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any, Protocol, TypeVar

import psycopg
from msgspec import json
from psycopg.conninfo import conninfo_to_dict

from tidemark.app.simulation.script import Fault, SimulatedStream
from tidemark.common.log import get_logger
from tidemark.sinks.reader import Mode, Positions, Reader, Table
from tidemark.sinks.redis.client import RedisAddress
from tidemark.sources.writer import Writer

T = TypeVar("T")

Row = dict[str, int]


class ConnectionLost(Exception):
    """A call failed, perhaps because a connection was lost. The caller must try again with new connections."""


class RolledBack(Exception):
    """Raised inside a transaction or savepoint to roll it back."""


class ServiceConnection(Protocol):
    """One connection of a service that appends as one writer. Methods raise the errors of the driver.

    `append`, `append_many`, `reserve` and `complete` do the same as the methods of `tidemark.Writer`.
    """

    def transaction(self) -> AbstractContextManager[object]:
        """Run the block in a transaction, or in a savepoint inside a transaction.

        An exception in the block causes a rollback, and is raised again.
        """

    def append(self, stream: str, *rows: Row) -> int: ...

    def append_many(self, stream: str, rows: Sequence[Row]) -> list[int]: ...

    def reserve(self, stream: str) -> int: ...

    def complete(self, stream: str, id: int, *rows: Row) -> None: ...

    def insert(self, stream: str, id: int, part: int) -> None:
        """Insert a row into the service's table of the stream. `part` is the number of the row in its fact, from 1."""


Driver = Callable[[str, str], AbstractContextManager[ServiceConnection]]
"""Opens a connection for a DSN and a writer's name while a block runs. Errors of the connection leave the block as
`ConnectionLost`."""


def find_installed_drivers() -> list[Driver]:
    """The drivers that are installed; psycopg always is."""
    others = {"sqlalchemy": open_sqlalchemy, "asyncpg": open_asyncpg}
    return [open_psycopg, *(driver for name, driver in others.items() if find_spec(name))]


_INSERT = 'insert into demo."{}" (stream_id, part, writer, written_at) values (%s, %s, %s, now())'


class _WriterConnection:
    """Appends with `tidemark.Writer`, which accepts connections of psycopg and of SQLAlchemy."""

    def __init__(
        self, connection: Any, name: str, execute: Callable[[str, Any], object], begin: Callable[[], Any]
    ) -> None:
        self._connection = connection
        self._writer = Writer(name)
        self._name = name
        self._execute = execute
        self.transaction = begin

    def append(self, stream: str, *rows: Row) -> int:
        return self._writer.append(self._connection, stream, *rows)

    def append_many(self, stream: str, rows: Sequence[Row]) -> list[int]:
        return self._writer.append_many(self._connection, stream, rows)

    def reserve(self, stream: str) -> int:
        return self._writer.reserve(self._connection, stream)

    def complete(self, stream: str, id: int, *rows: Row) -> None:
        self._writer.complete(self._connection, stream, id, *rows)

    def insert(self, stream: str, id: int, part: int) -> None:
        self._execute(_INSERT.format(stream), (id, part, self._name))


@contextmanager
def convert_connection_errors(*errors: type[Exception]) -> Iterator[None]:
    """Raise `ConnectionLost` if the block raises one of these errors of a driver."""
    try:
        yield
    except errors as problem:
        raise ConnectionLost(str(problem)) from problem


@contextmanager
def open_psycopg(dsn: str, name: str) -> Iterator[ServiceConnection]:
    with (
        convert_connection_errors(psycopg.OperationalError, psycopg.InterfaceError, psycopg.IntegrityError),
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        yield _WriterConnection(connection, name, connection.execute, connection.transaction)


@contextmanager
def open_sqlalchemy(dsn: str, name: str) -> Iterator[ServiceConnection]:
    from sqlalchemy import create_engine  # noqa: PLC0415  # optional
    from sqlalchemy.exc import DBAPIError, InvalidRequestError  # noqa: PLC0415  # optional
    from sqlalchemy.pool import NullPool  # noqa: PLC0415  # optional

    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), poolclass=NullPool)
    # After a lost connection, the next call inside the transaction raises InvalidRequestError.
    lost = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.IntegrityError, DBAPIError, InvalidRequestError)
    with (
        convert_connection_errors(*lost),
        engine.connect() as connection,
    ):

        def begin() -> Any:
            return connection.begin_nested() if connection.in_transaction() else connection.begin()

        yield _WriterConnection(connection, name, connection.exec_driver_sql, begin)


@contextmanager
def open_asyncpg(dsn: str, name: str) -> Iterator[ServiceConnection]:
    import asyncpg  # noqa: PLC0415  # optional

    kinds = [asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.OperatorInterventionError]
    kinds += [asyncpg.IntegrityConstraintViolationError, asyncpg.TransactionRollbackError]
    params = conninfo_to_dict(dsn)
    names = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    with convert_connection_errors(*kinds, asyncpg.InsufficientResourcesError, OSError), asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(**{to: params[name] for name, to in names.items() if name in params}))
        try:
            yield _AsyncpgConnection(connection, runner, name)
        finally:
            connection.terminate()


class _AsyncpgConnection:
    """Appends with the SQL functions, without `tidemark.Writer`."""

    def __init__(self, connection: Any, runner: asyncio.Runner, name: str) -> None:
        self._connection = connection
        self._runner = runner
        self._name = name

    @contextmanager
    def transaction(self) -> Iterator[None]:
        transaction = self._connection.transaction()
        self._runner.run(transaction.start())
        try:
            yield
        except BaseException:
            if not self._connection.is_closed():
                self._runner.run(transaction.rollback())
            raise
        self._runner.run(transaction.commit())

    def append(self, stream: str, *rows: Row) -> int:
        return int(
            self._fetch_value("select tidemark.append_as($1, $2, variadic $3)", self._name, stream, _encode_rows(rows))
        )

    def append_many(self, stream: str, rows: Sequence[Row]) -> list[int]:
        return [
            *self._fetch_value(
                "select tidemark.append_many($1, $2, writer => $3)", stream, _encode_rows(rows), self._name
            )
        ]

    def reserve(self, stream: str) -> int:
        return int(self._fetch_value("select tidemark.reserve($1, writer => $2)", stream, self._name))

    def complete(self, stream: str, id: int, *rows: Row) -> None:
        self._fetch_value("select tidemark.complete($1, $2, variadic $3)", stream, id, _encode_rows(rows))

    def insert(self, stream: str, id: int, part: int) -> None:
        numbered = _INSERT.format(stream) % ("$1", "$2", "$3")
        self._runner.run(self._connection.execute(numbered, id, part, self._name))

    def _fetch_value(self, statement: str, *params: object) -> Any:
        return self._runner.run(self._connection.fetchval(statement, *params))


def _encode_rows(rows: Sequence[Row]) -> list[str]:
    return [json.encode(row).decode() for row in rows]


log = get_logger(__name__)

CONNECTION_COUNT = 3  # of one service
MEAN_TRANSACTION_SECONDS = 0.03  # mean time between the reservation of an ID and the end of the transaction
HANG_SECONDS = (1.5, 6.0)  # shortest and longest duration of a transaction that hangs
RECONNECT_SECONDS = 0.2
ROLLBACK_PROBABILITY = 0.1
HANG_PROBABILITY = 0.01


@dataclass(frozen=True, slots=True)
class ServiceRole:
    """Configuration of one writing process.

    Attributes:
        writer: the name of the writer.
        streams: the streams in which the process appends facts.
        faults: the faults of the simulation. The process injects `ROLLBACK` and `HANG`, and ignores other faults.
        transactions_per_second: of the whole process.
        seed: seed of the random choices.
    """

    writer: str
    streams: Sequence[SimulatedStream]
    faults: Set[Fault]
    transactions_per_second: float
    seed: str


def run_service(role: ServiceRole, dsn: str, stopping: threading.Event) -> None:
    """Write on `CONNECTION_COUNT` connections until `stopping` is set.

    After `ConnectionLost`, opens a new connection. At another error of a driver, sets `stopping`, and raises the error.
    """
    drivers = find_installed_drivers()
    threads = [
        _ServiceThread(role, number, dsn, stopping, drivers[number % len(drivers)])
        for number in range(CONNECTION_COUNT)
    ]
    run_threads([thread.work for thread in threads], stopping)


def run_threads(functions: Sequence[Callable[[], None]], stopping: threading.Event) -> None:
    """Run each function on its own thread, and wait until all have ended.

    A function that returns or raises `ConnectionLost` is called again, until `stopping` is set. If a function raises
    another exception, `stopping` is set, and the exception is raised when all functions have ended.
    """

    def run_repeatedly(function: Callable[[], None]) -> None:
        while not stopping.is_set():
            try:
                function()
            except ConnectionLost as problem:
                log.warning("A call to Postgres or Redis failed; opening new connections", problem=str(problem))
                stopping.wait(RECONNECT_SECONDS)

    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(run_repeatedly, function) for function in functions]
        wait(futures, return_when=FIRST_EXCEPTION)
        stopping.set()
    for future in futures:
        future.result()


def sleep_in_transaction(faults: Set[Fault], random: Random, stopping: threading.Event) -> None:
    """Sleep for a random time, which is `MEAN_TRANSACTION_SECONDS` on average. With the fault HANG, some times are in
    the range `HANG_SECONDS`; such a sleep ends early when `stopping` is set."""
    if Fault.HANG in faults and random.random() < HANG_PROBABILITY:
        stopping.wait(random.uniform(*HANG_SECONDS))
    else:
        time.sleep(random.expovariate(1 / MEAN_TRANSACTION_SECONDS))


class _ServiceThread:
    """A writing thread with its own connection."""

    def __init__(self, role: ServiceRole, number: int, dsn: str, stopping: threading.Event, driver: Driver) -> None:
        self._role = role
        self._random = Random(f"{role.seed} {number}")
        self._dsn = dsn
        self._stopping = stopping
        self._driver = driver

    def work(self) -> None:
        with self._driver(self._dsn, self._role.writer) as connection:
            while not self._stopping.wait(
                self._random.expovariate(self._role.transactions_per_second / CONNECTION_COUNT)
            ):
                self._transact(connection)

    def _transact(self, connection: ServiceConnection) -> None:
        """Write in one transaction. Some transactions are rolled back.

        Other transactions have two savepoints, of which the first is rolled back.
        """
        chance = self._random.random()
        rolls_back = Fault.ROLLBACK in self._role.faults and chance < ROLLBACK_PROBABILITY
        savepoints = rolls_back and chance < ROLLBACK_PROBABILITY / 4
        with connection.transaction() if savepoints else nullcontext():
            with suppress(RolledBack), connection.transaction():
                self._write(connection)
                sleep_in_transaction(self._role.faults, self._random, self._stopping)
                if rolls_back:
                    raise RolledBack
            if savepoints:
                with connection.transaction():
                    self._write(connection)

    def _write(self, connection: ServiceConnection) -> None:
        """Append facts to one or two streams, and insert their rows: usually one fact with one row, sometimes several
        facts or several rows."""
        several = min(2, len(self._role.streams))
        for stream in self._random.sample(self._role.streams, self._random.choice((1, 1, 1, several))):
            count, parts = self._random.choice((1, 1, 1, 3)), [{"part": 1}]
            if count > 1:
                for id in connection.append_many(stream.name, parts * count):
                    connection.insert(stream.name, id, 1)
            elif self._random.random() < 0.5:
                connection.insert(stream.name, connection.append(stream.name, *parts), 1)
            else:
                id = connection.reserve(stream.name)
                parts = [{"part": part} for part in range(1, self._random.choice((1, 3)) + 1)]
                for row in parts:
                    connection.insert(stream.name, id, row["part"])
                connection.complete(stream.name, id, *parts)


@dataclass(frozen=True, slots=True)
class ReaderRole:
    """Configuration of one reading process. The name of the reader is the mode."""

    mode: Mode
    streams: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReaderServers:
    """The servers of a reader.

    Attributes:
        facts_dsn: the DSN of the services' database.
        effects_dsn: the DSN of the readers' database.
        redis: Tidemark's Redis.
        tidemark_dsn: the DSN of Tidemark's own database.
    """

    facts_dsn: str
    effects_dsn: str
    redis: RedisAddress
    tidemark_dsn: str


def run_reader(role: ReaderRole, servers: ReaderServers, stopping: threading.Event) -> None:
    """Read until `stopping` is set, each stream on its own thread.

    At an error of the reader library or of psycopg, sets `stopping`, and raises the error when all threads have ended.
    """
    with (
        Positions(servers.redis, servers.tidemark_dsn) as positions,
        ThreadPoolExecutor(len(role.streams)) as pool,
    ):
        futures = [pool.submit(_read, role.mode, stream, positions, servers, stopping) for stream in role.streams]
        wait(futures, return_when=FIRST_EXCEPTION)
        stopping.set()
    for future in futures:
        future.result()


def _read(mode: Mode, stream: str, positions: Positions, servers: ReaderServers, stopping: threading.Event) -> None:
    table = Table(f"demo.{stream}", id="stream_id", writer="writer", then=["part"])
    with Reader(
        positions,
        stream,
        table,
        name=mode,
        source=servers.facts_dsn,
        effects=servers.effects_dsn,
        mode=mode,
        rows=200,
        stopping=stopping,
    ) as reader:
        for batch in reader:
            with batch.connection.cursor() as cursor:
                late = batch.late.number if batch.late else None
                cursor.executemany(
                    "insert into demo.effects (reader, stream, stream_id, writer, mark, late)"
                    " values (%s, %s, %s, %s, %s, %s)",
                    [(mode, stream, row["stream_id"], row["writer"], row["mark"], late) for row in batch.rows],
                )
