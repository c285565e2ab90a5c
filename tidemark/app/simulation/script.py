"""The plan of a simulation: its streams, writers and faults, and the times of the faults. Pure, values only.

The same seed, kinds of faults and duration give the same schedule of faults. The steps of the processes still
interleave differently in each run.
"""

import math
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace
from random import Random

from tidemark.common.errors import BadSetting
from tidemark.streaming.values.direction import DirectionName

STREAM_NAMES = ("events", "backfill", "account_data", "to_device", "caches")
"""The names of the first five streams, without the prefix. Further streams are `stream-6`, `stream-7` and so on."""
BACKWARD_STREAM = "backfill"
"""The stream whose IDs count down: -1, -2, ..."""


class Fault(StrEnum):
    """The faults of a simulation. The value is the name on the command line."""

    ROLLBACK = "rollback"
    """Some transactions, and some savepoints, roll back."""
    HANG = "hang"
    """Some transactions stay open for seconds."""
    CRASH = "crash"
    """A service's process is killed and restarted."""
    PAUSE = "pause"
    """A service's process is paused for a while, with its transactions open, and continues."""
    LATE = "late"
    """One more service, with a writer of its own, starts during the simulation."""
    LEAVE = "leave"
    """A service stops, and is not restarted."""
    RELAY = "relay"
    """The relay's process is killed and restarted."""
    READER = "reader"
    """A reader's process is killed and restarted."""
    PIPELINE = "pipeline"
    """The pipeline of the local stack is killed; `tidemark up` starts it again."""
    REDIS = "redis"
    """The Redis of the local stack is killed; `tidemark up` starts it again."""
    KAFKA = "kafka"
    """The Kafka broker of the local stack is killed; `tidemark up` starts it again."""
    POSTGRES_CRASH = "postgres-crash"
    """The services' Postgres or Tidemark's is killed, or stopped by an immediate shutdown, and started again."""
    FAILOVER = "failover"
    """A standby with all commits, or without the newest commits, replaces a Postgres server."""
    RESTORE = "restore"
    """The services' Postgres is restored from a backup that is a few seconds old."""
    RESTORE_IN_PLACE = "restore-in-place"
    """The tables and sequences of the services' database are set back by some seconds while clients are connected."""
    ROW_SECURITY = "row-security"
    """Row level security is enabled for a table that the relay or the readers query, and disabled again."""
    SEQUENCE_BACK = "sequence-back"
    """A stream's sequence is set back, so that it gives out IDs again."""
    SEQUENCE_JUMP = "sequence-jump"
    """A stream's sequence is set forward, so that it skips IDs."""
    SEQUENCE_CACHE = "sequence-cache"
    """A stream's sequence gets CACHE 20, later CACHE 1 again."""
    OVERSIZED = "oversized"
    """The size limit of the facts topic is lowered, and a larger fact is appended. The limit is raised later."""
    CONTROL_NUL = "control-nul"
    """An operator override with a NUL character in `by` or `why` is sent to the control topic."""


class Successor(StrEnum):
    """The server that replaces a Postgres server."""

    BASE_BACKUP = "image"
    """A server from a physical backup, with the same system identifier. It lacks the newest commits."""
    SYNCHRONOUS_STANDBY = "synchronous standby"
    """A promoted standby with all commits."""
    LAGGING_STANDBY = "lagging standby"
    """A promoted standby that lacks the newest commits."""


ALL_FAULTS = frozenset(Fault)
SOURCE_FAULTS = frozenset(
    {
        Fault.RESTORE_IN_PLACE,
        Fault.ROW_SECURITY,
        Fault.SEQUENCE_BACK,
        Fault.SEQUENCE_JUMP,
        Fault.SEQUENCE_CACHE,
        Fault.OVERSIZED,
        Fault.CONTROL_NUL,
    }
)
"""Faults of tables, sequences and topics. The module `source_faults` injects them."""
DATABASE_FAULTS = frozenset({Fault.POSTGRES_CRASH, Fault.FAILOVER, Fault.RESTORE}) | SOURCE_FAULTS
"""Faults that need a Postgres server that only the services use."""
SERVER_FAULTS = DATABASE_FAULTS | {Fault.PIPELINE, Fault.REDIS, Fault.KAFKA}
PROCESS_FAULTS = ALL_FAULTS - SERVER_FAULTS
"""Faults of the processes that the simulation starts itself."""


def parse_faults(text: str | None) -> Set[Fault]:
    """Parse the value of `--faults`: names separated by commas, `all` or `none`.

    Returns `PROCESS_FAULTS` if `text` is None. Raises `BadSetting` for an unknown name.
    """
    match text:
        case None:
            return PROCESS_FAULTS
        case "all":
            return ALL_FAULTS
        case "none":
            return frozenset()
    words = text.split(",")
    if unknown := [word for word in words if word not in set(Fault)]:
        problem = f"{unknown[0]!r} is not one of {', '.join(Fault)}: give some of these names, or only `all` or `none`"
        raise BadSetting("--faults", problem)
    return frozenset(map(Fault, words))


@dataclass(frozen=True, slots=True)
class SimulatedStream:
    """A stream of a simulation.

    In the workload `streams`, the services' table with the same name has the rows of the stream's facts.
    """

    name: str
    direction: DirectionName = "forward"


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """The streams and writers of a simulation. Raises `BadSetting` for a bad prefix.

    Attributes:
        stream_count: number of streams.
        writer_count: number of writers at the beginning. Each writer appends to all streams.
        transactions_per_second: of these writers together.
        prefix: prefix of the names of streams and writers: at most 40 lower-case letters, digits and underscores.
        base_name: the part of a writer's name between the prefix and its number.
    """

    stream_count: int = 5
    writer_count: int = 3
    transactions_per_second: float = 40.0
    prefix: str = ""
    base_name: str = "writer"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]{0,40}", self.prefix):
            raise BadSetting(
                "--prefix", f"{self.prefix!r} must have at most 40 characters, only lower-case letters, digits and _"
            )

    def stream_list(self) -> list[SimulatedStream]:
        unnamed = (f"stream-{number}" for number in range(len(STREAM_NAMES) + 1, self.stream_count + 1))
        return [
            SimulatedStream(f"{self.prefix}{name}", "backward" if name == BACKWARD_STREAM else "forward")
            for name in (*STREAM_NAMES[: self.stream_count], *unnamed)
        ]

    def stream_names(self) -> list[str]:
        return [stream.name for stream in self.stream_list()]

    def writer_name(self, number: int) -> str:
        return f"{self.prefix}{self.base_name}-{number}"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault of the schedule.

    Attributes:
        due_seconds: when the fault is due, in seconds since the beginning of the simulation.
        fault: the kind of the fault.
        choice: a random number in [0, 1) that chooses one of the possible targets.
        duration_seconds: the duration of the fault in seconds. 0 for a fault without a duration.
    """

    due_seconds: float
    fault: Fault
    choice: float
    duration_seconds: float


# For each kind: mean seconds between two faults, and the shortest and longest duration in seconds. The other kinds
# happen inside transactions, see `services`.
_FAULT_TIMES: dict[Fault, tuple[float, tuple[float, float]]] = {
    Fault.CRASH: (20.0, (0.2, 4.0)),
    Fault.PAUSE: (45.0, (3.0, 8.0)),
    Fault.LATE: (30.0, (0.0, 0.0)),
    Fault.LEAVE: (40.0, (0.0, 0.0)),
    Fault.RELAY: (25.0, (0.2, 4.0)),
    Fault.READER: (30.0, (0.2, 4.0)),
    Fault.PIPELINE: (75.0, (0.0, 0.0)),
    Fault.REDIS: (45.0, (0.0, 0.0)),
    Fault.KAFKA: (90.0, (0.0, 0.0)),
    Fault.POSTGRES_CRASH: (45.0, (0.0, 0.0)),
    Fault.FAILOVER: (40.0, (0.5, 5.0)),
    Fault.RESTORE: (45.0, (2.0, 10.0)),
    Fault.RESTORE_IN_PLACE: (45.0, (1.0, 10.0)),
    Fault.ROW_SECURITY: (30.0, (1.0, 6.0)),
    Fault.SEQUENCE_BACK: (30.0, (0.0, 0.0)),
    Fault.SEQUENCE_JUMP: (30.0, (0.0, 0.0)),
    Fault.SEQUENCE_CACHE: (40.0, (1.0, 6.0)),
    Fault.OVERSIZED: (60.0, (1.0, 6.0)),
    Fault.CONTROL_NUL: (20.0, (0.0, 0.0)),
}

_FULL_RATE_SECONDS, _MAX_SLOWDOWN = 600.0, 3.0
"""In simulations longer than `_FULL_RATE_SECONDS`, the time between faults grows in proportion to the duration, up to
`_MAX_SLOWDOWN` times (not in endless simulations). Otherwise the readers would mostly restart, and read few facts."""


def fault_schedule(seed: int, faults: Set[Fault], seconds: float) -> Iterator[PlannedFault]:
    """Yield faults in order of time, without end; nothing if `faults` has only faults inside transactions.

    Args:
        seed: the seed of the schedule.
        faults: the kinds of faults.
        seconds: the duration of the simulation, which may be infinite. The first fault of each kind is due within half
            of this time.
    """
    random = Random(f"script {seed}")
    slowdown = min(max(1.0, seconds / _FULL_RATE_SECONDS), _MAX_SLOWDOWN) if math.isfinite(seconds) else 1.0
    due: list[tuple[float, Fault]] = []
    for fault, (interval, _) in _FAULT_TIMES.items():
        first = random.uniform(0.1, 1.0) * min(interval, seconds / 2)
        if fault in faults:
            due.append((first, fault))
    heapify(due)
    while due:
        at, fault = due[0]
        interval, duration = _FAULT_TIMES[fault]
        yield PlannedFault(at, fault, random.random(), random.uniform(*duration))
        heapreplace(due, (at + slowdown * interval * random.uniform(0.5, 1.5), fault))
