"""Wild plays through the pipeline's own compaction and state machine, without Spark: what comes out is the truth."""

from collections import Counter
from random import Random

import pytest

from tests.play.cast import Cast, Habits
from tests.play.simulation import Simulation
from tests.streaming.builders import IN_FACTS, packed
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.effects import ShardEffects
from tidemark.streaming.core.store import States
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Record, encode

WILD = Habits(
    duration=0.3,
    rollback=0.2,
    several_rows=0.2,
    sent_twice=0.1,
    stuck_every=2.0,
    stuck_for=(1.0, 3.0),
    idle_every=3.0,
    crash_every=2.0,
    down_for=(0.5, 2.0),
    turnover_every=1.0,
)
NO_BOUNDS = Bounds(pending=10**6, completed=10**6, retired=10**6, retirement_ms=10**12)


class Core:
    """One partition and one shard: everything between Kafka and the sinks."""

    def __init__(self) -> None:
        self.linear: dict[str, int] = {}
        self.positions: dict[str, dict[str, int]] = {}
        self.counts: Counter[str] = Counter()
        self._states: dict[str, bytes] = {}
        self._offset = 0

    def feed(self, records: list[Record], now: int) -> None:
        packets = packed(
            (self._offset + number, now, IN_FACTS, record.stream.encode(), encode(record))
            for number, record in enumerate(records)
        )
        self._offset += len(records)
        self._take(apply_batch(0, States(self._states), packets, now, NO_BOUNDS))

    def _take(self, effects: ShardEffects) -> None:
        for stream in effects.streams:
            positions = self.positions.setdefault(stream.stream, {})
            for advanced in stream.advances:
                assert positions.get(advanced.writer, advanced.prev) == advanced.prev, "rule 3: advances are chained"
            for writer in stream.writers:
                assert abs(writer.position) >= abs(positions.get(writer.writer, 0)), "rule 2: positions are monotone"
                positions[writer.writer] = writer.position
            self.linear[stream.stream] = stream.linear
            self.counts.update(stream.counts)
        for rejected in effects.rejected:
            self.counts[rejected.reason] += rejected.count


@pytest.mark.parametrize("seed", range(12))
def test_the_core_finds_the_truth_after_every_batch(seed: int) -> None:
    """Rules 1 to 5: whatever the writers do and however batches are cut, positions and lines are exactly the truth."""
    simulation = Simulation(seed, Cast(streams=3, writers=3, rate=150.0, habits=WILD))
    cuts = Random(seed)
    core = Core()
    now = 0.0
    while now < 20.0:
        now += cuts.choice([0.01, 0.1, 1.0, 4.0])
        compare(core, simulation, simulation.step(now), now)
    compare(core, simulation, simulation.drain(simulation.held()[:1]), now)
    compare(core, simulation, simulation.drain(), now)
    assert core.counts["duplicate"] == simulation.sent()["duplicate"]
    assert core.counts["zombie"] == simulation.sent()["zombie"]


def compare(core: Core, simulation: Simulation, records: list[Record], now: float) -> None:
    if records:
        core.feed(records, int(now * 1000))
    for stream in simulation.streams():
        assert core.linear.get(stream.name, 0) == stream.linear()
        assert core.positions.get(stream.name, {}) == stream.positions()
