"""What a workload of the simulation must provide: its processes, and the verification of what they read and wrote."""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import ClassVar, Self

from tidemark.app.simulation.processes import ProcessRole, SimulationDatabases
from tidemark.app.simulation.script import ALL, Fault, SimulatedStream, Successor, WriterPlan
from tidemark.common.errors import TidemarkError


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What is simulated, and for how long; `math.inf` seconds: until somebody stops it."""

    writer_plan: WriterPlan
    faults: Set[Fault]
    seed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadCount:
    """What is `written` for one reader, and not `read`, is yet to come; `missed` was passed without being read."""

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
    """For people: a line for each; `further` columns are what else is counted."""
    columns = ("WRITTEN", "READ", "MISSED", "DOUBLED", "OUT OF ORDER", *further)
    lines = [" ".join(["READER  ", *(f"{column:>12}" for column in columns)])]
    lines += [" ".join([f"{it.reader:8}", *(f"{figure:12}" for figure in it.figures)]) for it in counts]
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
        """Whether every reader works."""
        return True

    @abstractmethod
    def counts(self) -> Sequence[ReadCount]:
        """How each reader does, since the databases were made; nothing before the first has begun."""

    @abstractmethod
    def final_counts(self) -> Sequence[ReadCount]:
        """The same when nothing more is to come."""

    @abstractmethod
    def is_complete(self, counts: Sequence[ReadCount]) -> bool:
        """Whether each reader has read everything that was written, and rightly."""

    @abstractmethod
    def difference(self, counts: Sequence[ReadCount]) -> TidemarkError:
        """The error for counts that are not right, or not complete."""

    def require_reported(self) -> None:  # noqa: B027 - nothing to do, unless a workload looks for it
        """Raise if facts were lost, and readers were not informed."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Nothing is compared meanwhile; for the thread that calls the next two."""

    @abstractmethod
    def services_go_back(self, server: str, how: Successor, /) -> None:
        """At the DSN `server` is what the services' server is going to be; nobody else uses it yet."""

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
    """The faults that it can have; others are left out."""

    @property
    @abstractmethod
    def database(self) -> str:
        """What the names of its databases end with."""

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
