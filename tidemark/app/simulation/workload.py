"""A workload of the simulation: its processes, and the verification of what they read and wrote.

`processes` of a simulation are started, killed and stopped here.
"""

import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from tidemark.app.simulation.room_services import RoomClientRole, RoomServiceRole
from tidemark.app.simulation.script import ALL, Fault, SimulatedStream, Successor, WriterPlan
from tidemark.app.simulation.services import ReaderRole, ServiceRole
from tidemark.app.simulation.sql_readers import SqlReaderRole
from tidemark.app.stack.home import Home
from tidemark.common.errors import TidemarkError


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """The configuration that a process reads from its standard input, because its arguments are visible to other
    users. Without a role, the process is the relay of the services' database."""

    facts: str
    effects: str
    service: ServiceRole | None = None
    reader: ReaderRole | None = None
    sql_reader: SqlReaderRole | None = None
    room_service: RoomServiceRole | None = None
    room_client: RoomClientRole | None = None


class ChildProcess:
    """Started at once. Its output goes to the end of `log`. It ends by itself when its parent dies."""

    def __init__(self, role: ProcessRole, log: Path) -> None:
        with log.open("ab") as output:
            # A user's own servers may need what is in the environment (PGSSLROOTCERT): this process inherits it.
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
        """The exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process, as the kernel does when memory runs out."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.terminate()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SimulationDatabases:
    """`facts` and `effects` are the DSNs of the services' and the readers' databases; `home` has logs and servers.

    `relay` and `readers` are DSNs of the services' database, too: with the logins of the relay and of the readers.
    """

    home: Home
    facts: str
    effects: str
    relay: str
    readers: str


@dataclass
class SimulatedProcess:
    """A service, a reader, or the relay, whose output goes to a log in `home`. `process` is None while it is down.
    `role` gives the role of the process that is started as the `incarnation`-th one."""

    name: str
    home: Home
    role: Callable[[int], ProcessRole]
    process: ChildProcess | None = None
    incarnation: int = 0

    def start(self) -> None:
        self.incarnation += 1
        self.process = ChildProcess(self.role(self.incarnation), self.home.log(f"simulate-{self.name}"))

    def detach(self) -> ChildProcess:
        """Give the process to the caller. From now on it counts as down."""
        assert self.process is not None
        process, self.process = self.process, None
        return process


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What is simulated, and for how long; `math.inf` seconds: until somebody stops it."""

    writer_plan: WriterPlan
    faults: Set[Fault]
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadCount:
    """Counts of one reader: facts `written` and not `read` are still to come; `missed` facts were passed without being
    read."""

    reader: str
    written: int = 0
    read: int = 0
    missed: int = 0
    doubled: int = 0
    disordered: int = 0

    @property
    def is_right(self) -> bool:
        return not (self.missed or self.doubled or self.disordered)

    @property
    def is_complete(self) -> bool:
        return self.is_right and self.read == self.written

    @property
    def figures(self) -> tuple[int, ...]:
        return astuple(self)[1:]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.reader, *map(sum, zip(self.figures, other.figures, strict=True)))


def table(counts: Sequence[ReadCount], *further: str) -> str:
    """A text table with a line for each reader; `further` are additional columns."""
    columns = ("WRITTEN", "READ", "MISSED", "DOUBLED", "OUT OF ORDER", *further)
    lines = [" ".join(["READER  ", *(f"{column:>12}" for column in columns)])]
    lines += [" ".join([f"{row.reader:8}", *(f"{figure:12}" for figure in row.figures)]) for row in counts]
    return "\n".join(lines)


class Verification(ABC):
    """Compares what was read with what was written. A context manager; any thread may call it.

    Methods raise `Unavailable` if a database does not answer.
    """

    columns: ClassVar[Sequence[str]]
    """Names of the figures that its counts have beside those of `ReadCount`."""
    seconds_between: ClassVar[float] = 0.1
    """Seconds between two comparisons in the end."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    def has_begun(self) -> bool:
        """Whether every reader runs."""
        return True

    @abstractmethod
    def counts(self) -> Sequence[ReadCount]:
        """The counts of each reader since the databases were created; nothing before the first reader has begun."""

    @abstractmethod
    def final_counts(self) -> Sequence[ReadCount]:
        """The final counts, when no more facts follow."""

    @abstractmethod
    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        """Whether each reader has correctly read everything that was written."""

    @abstractmethod
    def difference(self, counts: Sequence[ReadCount]) -> TidemarkError:
        """The error for counts that are wrong or incomplete."""

    def require_reported(self) -> None:  # noqa: B027 - nothing to do, unless a workload looks for it
        """Raise if facts were lost, and readers were not informed."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Pause comparisons while the block runs. Only the thread in the block may call the next two methods."""

    @abstractmethod
    def services_go_back(self, server: str, how: Successor, /) -> None:
        """`server` is the DSN of the next server of the services, which no other process uses yet."""

    @abstractmethod
    def readers_go_back(self, server: str, /) -> None:
        """The same for the readers', with their checkpoints."""


class Workload(ABC):
    """The services that write and the readers that read in a simulation."""

    writing_readers: ClassVar[Sequence[str]] = ()
    """The names of readers that also write. They are started again when the services have ended."""

    def __init__(self, plan: SimulationPlan, *, verify: bool) -> None:
        self.plan = plan
        self.verify = verify
        self.services_ended = False
        """Readers that are started from then on write nothing: what is written would never be complete."""

    faults: ClassVar[Set[Fault]] = ALL
    """The faults that the workload supports; others are left out."""

    @property
    @abstractmethod
    def database(self) -> str:
        """The suffix of the names of its databases."""

    @property
    @abstractmethod
    def streams(self) -> Sequence[SimulatedStream]:
        """The streams that its services write."""

    @property
    @abstractmethod
    def readers(self) -> Sequence[str]:
        """The names of its readers."""

    @abstractmethod
    def make_tables(self, facts: str, effects: str) -> None:
        """Make the streams and tables that are missing in the services' database and in that of the readers."""

    @abstractmethod
    def service(self, databases: SimulationDatabases, name: str, incarnation: int) -> ProcessRole:
        """The role of a service that writes under this name, at its `incarnation`-th start."""

    @abstractmethod
    def reader(self, databases: SimulationDatabases, name: str, incarnation: int) -> ProcessRole:
        """The role of a reader, at its `incarnation`-th start."""

    @abstractmethod
    def verification(self, databases: SimulationDatabases, tidemark: str) -> Verification:
        """The verification; `tidemark` is the DSN of Tidemark's own database."""
