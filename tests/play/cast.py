"""Who plays, and how they behave. Values only."""

import math
from dataclasses import dataclass, field

BACKWARD = "backfill"
NAMES = ("events", BACKWARD, "account_data", "to_device", "caches")


@dataclass(frozen=True, slots=True)
class Habits:
    """Chances are per fact, `..._every` mean seconds per stream (`math.inf`: never), the rest seconds."""

    duration: float = 0.05
    """Mean of a transaction: facts complete out of order because this differs."""
    rollback: float = 0.05
    several_rows: float = 0.1
    sent_twice: float = 0.01
    stuck_every: float = 20.0
    stuck_for: tuple[float, float] = (3.0, 8.0)
    idle_every: float = 30.0
    idle_for: tuple[float, float] = (2.0, 10.0)
    crash_every: float = 60.0
    down_for: tuple[float, float] = (1.0, 5.0)
    committed_untold: float = 0.5
    """Share of a crashed writer's transactions that had committed: the next epoch begins by telling of them."""
    zombie: float = 0.5
    """How often a dead epoch sends something after its successor has joined."""
    turnover_every: float = 45.0
    """A writer joins or one retires; their number stays within one of the wanted."""


CALM = Habits(
    rollback=0.0,
    several_rows=0.0,
    sent_twice=0.0,
    stuck_every=math.inf,
    idle_every=math.inf,
    crash_every=math.inf,
    turnover_every=math.inf,
)
"""Nothing but facts that complete out of order."""


@dataclass(frozen=True, slots=True)
class Cast:
    """`writers` for each stream; `rate` is facts per second over all streams."""

    streams: int = 5
    writers: int = 3
    rate: float = 200.0
    habits: Habits = field(default_factory=Habits)

    def stream_names(self) -> list[str]:
        unnamed = (f"stream-{number}" for number in range(len(NAMES) + 1, self.streams + 1))
        return [*NAMES[: self.streams], *unnamed]

    def writer_names(self) -> list[str]:
        return [f"writer-{number}" for number in range(1, self.writers + 1)]


def direction(stream: str) -> int:
    """-1 for the streams whose IDs go down. A matter of the name alone, so that it is the same in every play."""
    return -1 if stream.endswith(BACKWARD) else 1
