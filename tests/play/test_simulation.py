"""The play: repeatable, in the order that the contract asks for, and true to its own truth."""

import itertools
from collections import defaultdict

import pytest

from tests.play.cast import CALM, Cast, Habits
from tests.play.simulation import Simulation
from tidemark.streaming.wire.records import Join, Position, Rdata, Record, Retire, Topic, Void, encode, read

WILD = Habits(
    duration=0.2,
    rollback=0.2,
    sent_twice=0.1,
    stuck_every=2.0,
    stuck_for=(1.0, 3.0),
    idle_every=3.0,
    crash_every=3.0,
    down_for=(0.5, 2.0),
    turnover_every=2.0,
)
CAST = Cast(streams=3, writers=3, rate=100.0, habits=WILD)


def played(seed: int, cast: Cast = CAST, seconds: float = 20.0) -> tuple[Simulation, list[Record]]:
    simulation = Simulation(seed, cast)
    return simulation, simulation.step(seconds)


def test_the_same_seed_plays_the_same_however_time_is_sliced() -> None:
    """One step of 20 s and two thousand of 10 ms give the same records in the same order."""
    whole = played(7)[1]
    sliced = Simulation(7, CAST)
    assert [record for tick in range(2001) for record in sliced.step(tick / 100)] == whole
    assert played(8)[1] != whole


def test_every_record_keeps_the_contract() -> None:
    """The pipeline's own reader takes every record of a wild play."""
    for record in played(1)[1]:
        assert read(encode(record), record.stream.encode(), Topic.FACTS) == record


def test_a_wild_play_has_everything() -> None:
    """All kinds of records, several rows, both directions, records sent twice and zombies."""
    simulation, records = played(1, seconds=60.0)
    assert {type(record) for record in records} == {Rdata, Void, Position, Join, Retire}
    assert any(isinstance(record, Rdata) and record.id == "batch" for record in records)
    assert {stream.direction for stream in simulation.streams()} == {1, -1}
    assert min(simulation.sent()["duplicate"], simulation.sent()["zombie"]) > 0


def test_a_writer_joins_before_it_owns_anything() -> None:
    """The JOIN of an epoch is its first record, and nothing else of that epoch reaches back to it or below."""
    joined: dict[tuple[str, str, int], int] = {}
    for record in played(2)[1]:
        incarnation = (record.stream, record.writer, record.epoch)
        if isinstance(record, Join):
            assert incarnation not in joined
            joined[incarnation] = abs(record.id)
        elif isinstance(record, Rdata | Void | Position) and not isinstance(record.id, str):
            assert abs(record.id) > joined[incarnation]


def test_edges_of_an_epoch_tile_the_line() -> None:
    """Sorted, the edges of one incarnation follow each other without overlap; only repeats are equal."""
    edges: defaultdict[tuple[str, str, int], set[tuple[int, int]]] = defaultdict(set)
    for record in played(3)[1]:
        if isinstance(record, Rdata | Void | Position) and not isinstance(record.id, str):
            assert isinstance(record.prev, int)
            edges[record.stream, record.writer, record.epoch].add((abs(record.prev), abs(record.id)))
    assert edges
    for tiles in edges.values():
        for (_, low_end), (high_start, _) in itertools.pairwise(sorted(tiles)):
            assert low_end <= high_start


@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_what_a_reader_of_the_records_can_prove(seed: int) -> None:
    """A reader that follows chains of edges, and knows no reservations, finds the very positions of the truth."""
    simulation = Simulation(seed, CAST)
    chains = NaivePositions()
    for second in range(40):
        chains.feed(simulation.step(second / 2))
        for stream in simulation.streams():
            assert chains.positions[stream.name] == stream.positions()


class NaivePositions:
    """Positions from the records alone: an independent and naive reading of docs/design.md 3."""

    def __init__(self) -> None:
        self.positions: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._epochs: dict[tuple[str, str], int] = {}
        self._edges: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)

    def feed(self, records: list[Record]) -> None:
        for record in records:
            writer = (record.stream, record.writer)
            if record.epoch < self._epochs.get(writer, 0):
                continue
            if isinstance(record, Join | Retire):
                self._epochs[writer] = record.epoch
                self._edges[writer].clear()
                self.positions[record.stream][record.writer] = record.id
            elif isinstance(record, Rdata | Void | Position) and not isinstance(record.id, str):
                assert isinstance(record.prev, int)
                self._edges[writer][record.prev] = record.id
                while (position := self.positions[record.stream][record.writer]) in self._edges[writer]:
                    self.positions[record.stream][record.writer] = self._edges[writer].pop(position)


def test_a_drained_play_has_no_gap_left() -> None:
    """Every writer that lives, and every line, stands at the last ID of its stream."""
    simulation, _ = played(4)
    simulation.drain()
    assert simulation.held() == []
    assert simulation.down() == []
    for stream in simulation.streams():
        last = stream.direction * stream.last
        assert stream.linear() == last
        assert {stream.positions()[w.name] for w in stream.writers.values() if w.running} == {last}
    assert simulation.step(1000.0) == []


def test_a_drain_may_leave_gaps_which_a_second_one_closes() -> None:
    """What is left open holds its writer and the line just below it, and nothing else."""
    cast = Cast(streams=1, writers=2, rate=100.0, habits=Habits(stuck_every=1.0, crash_every=1e9, turnover_every=1e9))
    simulation, _ = played(5, cast, seconds=10.0)
    gap = simulation.held()[0]
    simulation.drain(leaving=[gap])
    stream = simulation.streams()[0]
    assert [held.id for held in simulation.held()] == [gap.id]
    assert stream.linear() == gap.id - 1
    assert all((stream.positions()[name] == stream.last) == (name != gap.writer) for name in stream.writers)
    simulation.drain()
    assert stream.linear() == stream.last


def test_a_calm_play_only_completes_out_of_order() -> None:
    """No JOIN but the first ones, no VOID, nothing twice, and still IDs that come before smaller ones."""
    simulation, records = played(6, Cast(streams=1, writers=1, rate=100.0, habits=CALM))
    ids = [record.id for record in records if isinstance(record, Rdata)]
    assert ids != sorted(ids, key=int)
    assert set(simulation.sent()) <= {"JOIN", "RDATA", "POSITION"}
