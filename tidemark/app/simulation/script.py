"""The plan of a simulation: its writers and streams, its faults, and when each is injected. Pure, values only.

The same seed gives the same faults; how the steps of the processes interleave differs.
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

NAMES = ("events", "backfill", "account_data", "to_device", "caches")
BACKWARD = "backfill"


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
    """A service with another writer's name joins in the middle."""
    LEAVE = "leave"
    """A service stops, and its writer retires."""
    RELAY = "relay"
    """The relay's process is killed and restarted."""
    READER = "reader"
    """A reader's process is killed and restarted."""
    PIPELINE = "pipeline"
    """The pipeline of the local stack is killed; `tidemark up` starts it again."""
    REDIS = "redis"
    """The same for Redis."""
    KAFKA = "kafka"
    """The same for the broker."""
    POSTGRES_CRASH = "postgres-crash"
    """A Postgres, the services' or Tidemark's, is killed or stopped at once, and started again."""
    FAILOVER = "failover"
    """A standby replaces a Postgres, with all commits or without the newest ones."""
    RESTORE = "restore"
    """The services' Postgres is restored from a backup of a few seconds before."""
    RESTORE_IN_PLACE = "restore-in-place"
    """The tables and sequences of the services' database are restored under open connections."""
    ROW_SECURITY = "row-security"
    """Row level security is enabled for a table that the relay or the readers query, and disabled again."""
    SEQUENCE_BACK = "sequence-back"
    """A stream's sequence is set below its head."""
    SEQUENCE_JUMP = "sequence-jump"
    """A stream's sequence is set beyond its head."""
    SEQUENCE_CACHE = "sequence-cache"
    """A stream's sequence gets a CACHE, and loses it again."""
    OVERSIZED = "oversized"
    """A service appends a fact above the limit of the facts topic, and the limit is raised later."""
    CONTROL_NUL = "control-nul"
    """An operator override with a NUL character in `by` or `why` comes to the control topic."""


class Successor(StrEnum):
    """The server that replaces a Postgres server."""

    IMAGE = "image"
    """A backup with the same system identifier."""
    IN_STEP = "synchronous standby"
    LAGGING = "lagging standby"


ALL = frozenset(Fault)
OF_SOURCES = frozenset(
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
"""Faults of the tables, sequences and topics that facts come from: `source_faults`."""
OF_DATABASES = frozenset({Fault.POSTGRES_CRASH, Fault.FAILOVER, Fault.RESTORE}) | OF_SOURCES
"""Faults that need a Postgres server of the services' own."""
OF_SERVERS = OF_DATABASES | {Fault.PIPELINE, Fault.REDIS, Fault.KAFKA}
OF_PROCESSES = ALL - OF_SERVERS
"""Faults of the processes that the simulation starts itself."""


def faults(named: str | None) -> Set[Fault]:
    """The faults named in `text`: names with commas between, `all` or `none`. Raises `BadSetting`."""
    match named:
        case None:
            return OF_PROCESSES
        case "all":
            return ALL
        case "none":
            return frozenset()
    words = named.split(",")
    if unknown := [word for word in words if word not in set(Fault)]:
        raise BadSetting("--faults", f"{unknown[0]!r} is none of {', '.join(Fault)}, all, none")
    return frozenset(map(Fault, words))


@dataclass(frozen=True, slots=True)
class SimulatedStream:
    """A stream. Its facts are in the table of the same name."""

    name: str
    direction: DirectionName = "forward"


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """`writers`: the number of writers at the beginning; each writes every stream. `rate`: transactions per second
    of all writers. `prefix`: the beginning of each stream's and writer's name, which must be a valid name in SQL.
    `called`: the rest of a writer's name, before its number. Raises `BadSetting`."""

    streams: int = 5
    writers: int = 3
    rate: float = 40.0
    prefix: str = ""
    base_name: str = "writer"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]{0,40}", self.prefix):
            raise BadSetting("--prefix", f"{self.prefix!r} is not at most 40 lower-case letters, digits and _")

    def stream_list(self) -> list[SimulatedStream]:
        unnamed = (f"stream-{number}" for number in range(len(NAMES) + 1, self.streams + 1))
        return [
            SimulatedStream(f"{self.prefix}{name}", "backward" if name == BACKWARD else "forward")
            for name in (*NAMES[: self.streams], *unnamed)
        ]

    def stream_names(self) -> list[str]:
        return [stream.name for stream in self.stream_list()]

    def writer_name(self, number: int) -> str:
        return f"{self.prefix}{self.base_name}-{number}"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """`fault` is injected at `at` seconds, for `duration` seconds; `choice` in [0, 1) chooses among the processes."""

    at: float
    fault: Fault
    choice: float
    duration: float


# Mean seconds between two faults of a kind, and how long one lasts. Kinds that are not here happen inside transactions:
# `services`.
_INTERVALS: dict[Fault, tuple[float, tuple[float, float]]] = {
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


_SLOWER_AFTER, _SLOWEST = 600.0, 3.0
"""After this many seconds the time between faults grows, up to this factor: a machine that starts processes all the
time reads few facts."""


def fault_schedule(seed: int, faults: Set[Fault], seconds: float) -> Iterator[PlannedFault]:
    """The faults in order of time, without end. Each kind occurs for the first time within half of `seconds`, which may
    be infinite."""
    random = Random(f"script {seed}")
    slower = min(max(1.0, seconds / _SLOWER_AFTER), _SLOWEST) if math.isfinite(seconds) else 1.0
    due: list[tuple[float, Fault]] = []
    for fault, (every, _) in _INTERVALS.items():
        first = random.uniform(0.1, 1.0) * min(every, seconds / 2)
        if fault in faults:
            due.append((first, fault))
    heapify(due)
    while due:
        at, fault = due[0]
        every, duration = _INTERVALS[fault]
        yield PlannedFault(at, fault, random.random(), random.uniform(*duration))
        heapreplace(due, (at + slower * every * random.uniform(0.5, 1.5), fault))
