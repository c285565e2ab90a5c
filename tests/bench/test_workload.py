import msgspec
import pytest

from tests.bench.competitors.gaps import GapBuffer
from tests.bench.latency import MoveTimes
from tests.bench.workload import Completions, Rendering, Shape, WritersAtWork
from tidemark.streaming.wire.records import FactRun, Topic, read

SHAPES = [Shape(streams=3, writers=4), Shape(streams=50, writers=2, in_flight=0.5), Shape(streams=1, writers=1)]


def played(play: WritersAtWork, steps: int = 20) -> list[Completions]:
    return [*(play.step(100) for _ in range(steps)), play.finish()]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_id_of_a_stream_completes_once(shape: Shape) -> None:
    """The IDs of each stream, over all its writers, are 1 to the position at which its line must end."""
    play = WritersAtWork(shape)
    ids: dict[int, list[int]] = {stream: [] for stream in range(shape.streams)}
    for edges in played(play):
        for owner, id_ in zip(edges.owner.tolist(), edges.id.tolist(), strict=True):
            ids[owner // shape.writers].append(id_)
    for stream, found in ids.items():
        assert sorted(found) == list(range(1, play.linear(stream) + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_records_are_good_and_lead_a_tracker_to_the_end(shape: Shape) -> None:
    """Tidemark's decoder takes every record, and a tracker fed with them ends where the workload says."""
    play, rendering, gaps = WritersAtWork(shape), Rendering(shape), GapBuffer()
    records = list(rendering.joins())
    for edges in played(play):
        records += zip(rendering.streams(edges), rendering.values(edges), strict=True)
    for stream, value in records:
        read(value, rendering.keys[stream], Topic.FACTS)
        gaps.add(msgspec.json.decode(value))
    for stream in range(shape.streams):
        for writer, position in play.positions(stream).items():
            assert gaps.positions[shape.stream(stream), writer] == position


@pytest.mark.parametrize("shape", SHAPES)
def test_many_facts_in_a_record_are_the_same_facts(shape: Shape) -> None:
    """Each edge and each void once, and no more in a record than asked for."""
    rendering = Rendering(shape)
    for edges in played(WritersAtWork(shape)):
        records = [(key, read(value, rendering.keys[key], Topic.FACTS)) for key, value in rendering.runs(edges, 7)]
        runs = [record for _, record in records if isinstance(record, FactRun)]
        assert len(runs) == len(records)
        assert all(len(run.ids) <= 7 for run in runs)
        found = [
            (run.stream, run.writer, prev, id_, not rows)
            for run in runs
            for prev, id_, rows in zip([run.prev, *run.ids], run.ids, run.rows, strict=False)
        ]
        owners = [divmod(owner, shape.writers) for owner in edges.owner.tolist()]
        assert sorted(found) == sorted(
            (shape.stream(stream), shape.writer(writer), prev, id_, bool(kind))
            for (stream, writer), prev, id_, kind in zip(
                owners, edges.prev.tolist(), edges.id.tolist(), edges.kind.tolist(), strict=True
            )
        )


def test_facts_complete_out_of_order() -> None:
    """With two transactions open per writer a good part of the records comes before an earlier one of its writer."""
    last: dict[int, int] = {}
    early = total = 0
    for edges in played(WritersAtWork(Shape())):
        for owner, prev, id_ in zip(edges.owner.tolist(), edges.prev.tolist(), edges.id.tolist(), strict=True):
            early += prev > last.get(owner, 0)
            last[owner] = max(id_, last.get(owner, 0))
            total += 1
    assert 0.2 < early / total < 0.8


def test_a_move_is_timed_from_the_completion_that_allowed_it() -> None:
    """An ID that came early moves nothing; the one that closes the gap starts the clock for both."""
    shape = Shape(streams=1, writers=1)
    moves, play = MoveTimes(shape), WritersAtWork(shape)
    whole = played(play, steps=1)[0]
    order = whole.id.argsort()
    first, second = whole.pick(order[:1]), whole.pick(order[1:2])
    moves.completed(second, at=1.0)
    moves.completed(first, at=3.0)
    assert moves.unseen == 1
    moves.seen("events-0", "writer-0", 1, at=3.5)
    assert moves.unseen == 1
    moves.seen("events-0", "writer-0", 2, at=4.0)
    assert moves.latencies == [(3.0, 1.0)]
