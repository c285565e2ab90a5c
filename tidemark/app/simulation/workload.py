"""The base classes of a workload and its verification, and the processes and tables of a simulation.

The services' tables have the facts, and the readers' tables have the effects.
"""

import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tidemark.app import relay
from tidemark.app.simulation.room_services import RoomClientRole, RoomServiceRole
from tidemark.app.simulation.script import ALL_FAULTS, Fault, SimulatedStream, Successor, WriterPlan
from tidemark.app.simulation.services import ReaderRole, ServiceRole
from tidemark.app.simulation.sql_readers import SqlReaderRole
from tidemark.app.stack.home import Home
from tidemark.common.errors import TidemarkError
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """The configuration of a process. Passed by standard input, because other users can see command-line arguments.

    At most one field besides the DSNs is set. If only the DSNs are set, the process is the relay of the services'
    database.

    Attributes:
        facts_dsn: the DSN of the services' database.
        effects_dsn: the DSN of the readers' database.
    """

    facts_dsn: str
    effects_dsn: str
    service: ServiceRole | None = None
    reader: ReaderRole | None = None
    sql_reader: SqlReaderRole | None = None
    room_service: RoomServiceRole | None = None
    room_client: RoomClientRole | None = None


class ChildProcess:
    """A process of the simulation, started by the constructor. The process ends by itself when this process dies.

    The output of the process is appended to the file `log_path`.
    """

    def __init__(self, role: ProcessRole, log_path: Path) -> None:
        with log_path.open("ab") as output:
            # The child inherits the environment: it may configure connections to the user's servers (PGSSLROOTCERT).
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidemark.app.simulation"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(role) + b"\n")
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Send SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, and return without a wait."""
        self._process.terminate()

    def wait_for_exit(self, seconds: float) -> bool:
        """Wait up to `seconds` until the process has ended. Returns False if the process still runs."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SimulationDatabases:
    """The databases of a simulation. Each field except `home` is a DSN.

    Attributes:
        home: the folder of the local stack, with the logs of the processes.
        facts_dsn: the services' database.
        effects_dsn: the readers' database.
        relay_dsn: the services' database, with the login of the relay.
        readers_dsn: the services' database, with the login of the readers in SQL.
    """

    home: Home
    facts_dsn: str
    effects_dsn: str
    relay_dsn: str
    readers_dsn: str


@dataclass
class SimulatedProcess:
    """A service, a reader, or the relay, which may be started several times.

    Attributes:
        name: the name of the process and of its log file.
        home: the folder of the log file.
        make_role: returns the role for a start. The argument is the number of the start, from 1.
        child: the started process; None before the first start, and after `detach`.
        start_count: the number of starts until now.
    """

    name: str
    home: Home
    make_role: Callable[[int], ProcessRole]
    child: ChildProcess | None = None
    start_count: int = 0

    def start(self) -> None:
        """Start the process, and set `child`. The caller must have ended or detached an earlier process."""
        self.start_count += 1
        self.child = ChildProcess(self.make_role(self.start_count), self.home.log(f"simulate-{self.name}"))

    def detach(self) -> ChildProcess:
        """Set `child` to None, and return the process, which the caller must end. Allowed only if `child` is set."""
        assert self.child is not None
        child, self.child = self.child, None
        return child


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """The parameters of a simulation.

    Attributes:
        writer_plan: the streams and the writers.
        faults: the kinds of faults.
        seed: the seed of the fault schedule and of random choices.
        seconds: the duration of the simulation; `math.inf`: until a signal.
    """

    writer_plan: WriterPlan
    faults: Set[Fault]
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadCount:
    """Counts of one reader.

    Attributes:
        reader: the name of the reader.
        written: facts that were written.
        read: facts that were written and read.
        missed: facts that the reader's position covers, and that the reader did not receive.
        duplicated: facts that the reader received twice, and received facts that are not in the tables.
        disordered: facts that the reader received out of order.
    """

    reader: str
    written: int = 0
    read: int = 0
    missed: int = 0
    duplicated: int = 0
    disordered: int = 0

    @property
    def is_correct(self) -> bool:
        """Whether no fact was missed, duplicated or out of order."""
        return not (self.missed or self.duplicated or self.disordered)

    @property
    def is_complete(self) -> bool:
        """Whether the count is correct, and every written fact was read."""
        return self.is_correct and self.read == self.written

    @property
    def figures(self) -> tuple[int, ...]:
        """All counts, in the order of the fields."""
        return astuple(self)[1:]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.reader, *map(sum, zip(self.figures, other.figures, strict=True)))


def format_table(counts: Sequence[ReadCount], *extra_columns: str) -> str:
    """Make a text table with one line for each reader.

    `extra_columns` are the names of the figures that `counts` have in addition to the figures of `ReadCount`.
    """
    columns = ("WRITTEN", "READ", "MISSED", "DUPLICATED", "OUT OF ORDER", *extra_columns)
    lines = [" ".join(["READER  ", *(f"{column:>12}" for column in columns)])]
    lines += [" ".join([f"{row.reader:8}", *(f"{figure:12}" for figure in row.figures)]) for row in counts]
    return "\n".join(lines)


class Verification(ABC):
    """Compares what was read with what was written. A context manager that closes its connections.

    Any thread may call the methods. They raise `Unavailable` if a database does not answer. Comparisons wait while the
    verification is paused.
    """

    columns: ClassVar[Sequence[str]]
    """The column names of the figures that `counts` has in addition to the figures of `ReadCount`."""
    comparison_interval_seconds: ClassVar[float] = 0.1
    """Minimum seconds between two comparisons at the end of a simulation."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    def has_begun(self) -> bool:
        """Whether every reader has read something. A verification that cannot check this returns True."""
        return True

    @abstractmethod
    def counts(self) -> Sequence[ReadCount]:
        """Compare, and return the counts of each reader since the databases were created.

        Empty, or all counts are 0, before the first reader has begun.
        """

    @abstractmethod
    def final_counts(self) -> Sequence[ReadCount]:
        """Compare for the last time, when no more facts are written, and return the counts of each reader."""

    @abstractmethod
    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        """Whether each reader has correctly read everything that was written, according to `counts`."""

    @abstractmethod
    def error_for(self, counts: Sequence[ReadCount]) -> TidemarkError:
        """Make the error to raise for counts that are wrong or incomplete."""

    def require_loss_reported(self) -> None:  # noqa: B027 - a workload may override it
        """Raise an error if facts were lost and Tidemark did not report the loss. By default, does nothing."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Pause comparisons while the block runs. Only the thread in the block may call the methods `prepare_*`."""

    @abstractmethod
    def prepare_services_server(self, server_dsn: str, successor: Successor, /) -> None:
        """Adapt the verification and the tables to a new server of the services. No other process uses the server yet.

        Args:
            server_dsn: the DSN of the new server.
            successor: the kind of the new server.
        """

    @abstractmethod
    def prepare_readers_server(self, server_dsn: str, /) -> None:
        """Adapt the verification and the tables to a new server of the readers. No other process uses the server yet.

        Args:
            server_dsn: the DSN of the new server.
        """


class Workload(ABC):
    """The services that write and the readers that read in a simulation."""

    writing_readers: ClassVar[Sequence[str]] = ()
    """The names of processes that read and also write. They are restarted when the services have ended."""

    def __init__(self, plan: SimulationPlan, *, verify: bool) -> None:
        self.plan = plan
        self.verify = verify
        self.have_services_ended = False
        """Whether the services have ended. Readers that start later must not write, or the verification would never
        complete."""

    faults: ClassVar[Set[Fault]] = ALL_FAULTS
    """The faults that the workload supports; others are not injected."""

    @property
    @abstractmethod
    def database_suffix(self) -> str:
        """The last part of the names of the workload's databases."""

    @property
    @abstractmethod
    def streams(self) -> Sequence[SimulatedStream]:
        """The streams to which the services append facts."""

    @property
    @abstractmethod
    def readers(self) -> Sequence[str]:
        """The names of the processes that read."""

    @abstractmethod
    def make_tables(self, facts_dsn: str, effects_dsn: str) -> None:
        """Create the missing streams and tables.

        Args:
            facts_dsn: the DSN of the services' database.
            effects_dsn: the DSN of the readers' database.
        """

    @abstractmethod
    def make_service_role(self, databases: SimulationDatabases, name: str, start_number: int) -> ProcessRole:
        """Make the role of the service whose writer is `name`. `start_number` is the number of the start, from 1."""

    @abstractmethod
    def make_reader_role(self, databases: SimulationDatabases, name: str, start_number: int) -> ProcessRole:
        """Make the role of the reading process `name`. `start_number` is the number of the start, from 1."""

    @abstractmethod
    def make_verification(self, databases: SimulationDatabases, tidemark_dsn: str) -> Verification:
        """Make the verification. `tidemark_dsn`: the DSN of Tidemark's own database."""


APPLICATION_NAME = "tidemark simulate"
LOGINS = ("simulate_relay", "simulate_reader")

_EFFECTS = """
create schema if not exists demo;
create table if not exists demo.effects (
    number      bigint  generated always as identity primary key,
    reader      text    not null,
    stream      text    not null,
    stream_id   bigint  not null,
    writer      text    not null,
    mark        uuid    not null,
    late        bigint
);
create index if not exists effects_by_stream on demo.effects (stream, reader, number);
comment on table demo.effects is 'The effect of each row that a reader received, in the order of receipt';
comment on column demo.effects.late is 'The number of the late completion with which the row came; null without one';
create table if not exists demo.compared (
    reader      text    not null,
    stream      text    not null,
    facts       bigint  not null,
    primary key (reader, stream)
);
comment on table demo.compared is 'Number of facts that were verified as read exactly once, and then deleted';
"""

_FACTS = """
create table if not exists {table} (
    stream_id   bigint  not null,
    part        integer not null,
    writer      text    not null,
    written_at  timestamptz not null,
    mark        uuid    not null default gen_random_uuid(),
    primary key (stream_id, part)
);
create index if not exists {by_writer} on {table} (writer, stream_id);
comment on column {table}.mark is 'Distinguishes this row from a row that had the same ID before the database was
restored';
"""


def make_simulation_dsn(dsn: str, suffix: str = "demo") -> str:
    """The DSN of the simulation's database on the server of `dsn`.

    The name of the database is the name of the database in `dsn` (`tidemark` if there is none), `_` and `suffix`.
    """
    return make_conninfo(dsn, dbname=f"{conninfo_to_dict(dsn).get('dbname') or 'tidemark'}_{suffix}")


def make_database(dsn: str, suffix: str = "demo") -> str:
    """Create the database of `make_simulation_dsn` if it is missing. Returns its DSN. Raises `Unavailable` and
    `Refused`."""
    new_dsn = make_simulation_dsn(dsn, suffix)
    name = str(conninfo_to_dict(new_dsn)["dbname"])
    with _connect(dsn) as connection:
        if not connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone():
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    return new_dsn


def prepare_writing(dsn: str) -> None:
    """Create or update the schemas that the services' writers, the relay and readers in SQL need."""
    relay.migrate(dsn, (), "forward", say=lambda _: None)


def find_missing_streams(dsn: str, streams: Iterable[SimulatedStream]) -> list[SimulatedStream]:
    """The streams that the database `dsn` lacks."""
    with _connect(dsn) as connection:
        known = {name for (name,) in connection.execute("select stream from tidemark.append_streams").fetchall()}
    return [stream for stream in streams if stream.name not in known]


def make_fact_tables(dsn: str, streams: Iterable[SimulatedStream]) -> None:
    """Create the missing streams, and the missing tables of the services, in the database `dsn`."""
    with _connect(dsn) as connection, connection.transaction():
        connection.execute("create schema if not exists demo")
        for stream in streams:
            connection.execute(
                sql.SQL(_FACTS).format(
                    table=sql.Identifier("demo", stream.name), by_writer=sql.Identifier(f"{stream.name}_by_writer")
                )
            )
            connection.execute("select tidemark.create_stream(%s, %s)", [stream.name, stream.direction])


def make_effect_tables(dsn: str) -> None:
    """Create the missing tables of the readers in the database `dsn`."""
    run_script(dsn, _EFFECTS)


def run_script(dsn: str, script: str) -> None:
    """Run the SQL statements of `script` in one transaction."""
    with _connect(dsn) as connection, connection.transaction():
        connection.execute(script.encode())


def make_streams(dsn: str, streams: Iterable[SimulatedStream]) -> None:
    """Create the missing streams in the database `dsn`, without tables for the rows of facts."""
    with _connect(dsn) as connection, connection.transaction():
        for stream in streams:
            connection.execute("select tidemark.create_stream(%s, %s)", [stream.name, stream.direction])


def make_logins(dsn: str, streams: Iterable[SimulatedStream]) -> tuple[str, str]:
    """Create the missing logins of the relay and of the readers, with only the necessary rights and the password of
    `dsn`.

    Some faults need such logins, because row level security does not apply to a superuser.

    Returns:
        The DSN of the relay and the DSN of the readers.
    """
    password = str(conninfo_to_dict(dsn).get("password") or "")
    with _connect(dsn) as connection:
        for login in LOGINS:
            with suppress(psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
                connection.execute(
                    sql.SQL("create role {} login password {}").format(sql.Identifier(login), sql.Literal(password))
                )
        relay, readers = map(sql.Identifier, LOGINS)
        connection.execute(sql.SQL("grant tidemark_relay to {}").format(relay))
        connection.execute(sql.SQL("grant tidemark_take to {}").format(readers))
        connection.execute(sql.SQL("grant usage on schema demo to {}").format(readers))
        connection.execute(sql.SQL("grant select, insert, delete on demo.effects to {}").format(readers))
        for stream in streams:
            table = sql.Identifier("demo", stream.name)
            connection.execute(sql.SQL("grant select on {} to {}").format(table, readers))
    relay_dsn, readers_dsn = (make_conninfo(dsn, user=login) for login in LOGINS)
    return relay_dsn, readers_dsn


def read_floors_and_heads(connection: psycopg.Connection) -> dict[str, tuple[int, int]]:
    """Read stream -> (floor, last ID that the sequence gave out), as magnitudes."""
    rows = connection.execute(
        "select stream, abs(floor), abs(coalesce(pg_sequence_last_value(ids), s.after))"
        " from tidemark.append_progress join tidemark.append_streams s using (number)"
    ).fetchall()
    return {stream: (floor, head) for stream, floor, head in rows}


@contextmanager
def _connect(dsn: str) -> Iterator[Connection]:
    with closing(session_of(dsn, APPLICATION_NAME)) as session, session.use() as connection:
        yield connection
