"""The script of a play: what befalls whom and when. Pure, and the same for the same seed; the interleaving is not."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from heapq import heapify, heapreplace
from random import Random

from tidemark.sources.simulator.cast import Fault


@dataclass(frozen=True, slots=True)
class Act:
    """At `at` seconds `fault` befalls one of those whom it can, chosen by `lot` in [0, 1); it lasts `spell` seconds."""

    at: float
    fault: Fault
    lot: float
    spell: float


# Mean seconds between two, and how long one lasts. What is not here happens inside transactions: `service`.
_HABITS: dict[Fault, tuple[float, tuple[float, float]]] = {
    Fault.CRASH: (20.0, (0.2, 4.0)),
    Fault.PAUSE: (45.0, (3.0, 8.0)),
    Fault.LATE: (30.0, (0.0, 0.0)),
    Fault.RETIRE: (40.0, (0.0, 0.0)),
    Fault.READER: (30.0, (0.2, 4.0)),
    Fault.PIPELINE: (75.0, (0.0, 0.0)),
    Fault.REDIS: (45.0, (0.0, 0.0)),
}


def script(seed: int, faults: Set[Fault], seconds: float) -> Iterator[Act]:
    """Acts in order of time, without end. Each kind comes for the first time within half of `seconds` (may be inf)."""
    random = Random(f"script {seed}")
    due: list[tuple[float, Fault]] = []
    for fault, (every, _) in _HABITS.items():
        first = random.uniform(0.1, 1.0) * min(every, seconds / 2)
        if fault in faults:
            due.append((first, fault))
    heapify(due)
    while due:
        at, fault = due[0]
        every, spell = _HABITS[fault]
        yield Act(at, fault, random.random(), random.uniform(*spell))
        heapreplace(due, (at + every * random.uniform(0.5, 1.5), fault))
