"""What a state may hold: past each bound Tidemark holds or turns away, and never moves (docs/design.md, rule 9)."""

from tests.streaming.builders import Shard, join, position, rdata, retire, row
from tidemark.streaming.core.effects import RequeuedRange
from tidemark.streaming.values.limits import Bounds


def test_an_edge_past_the_bound_of_pending_spans_is_put_off() -> None:
    """Rule 9: its gap stays open; edges that add no span still go in. It comes again once there is room."""
    shard = Shard(bounds=Bounds(pending=2))
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1), rdata("a", 6, 5, epoch=1))
    done = shard.feed(rdata("a", 9, 8, epoch=1), rdata("a", 7, 6, epoch=1), rdata("a", 2, 1, epoch=1))
    assert (done.counts, done.requeues, done.summary.deferred_writers) == ({"applied": 2, "deferred": 1}, [], ["a/1"])
    done = shard.feed(rdata("a", 1, epoch=1))
    assert (shard.positions, done.requeues, done.summary.deferred_writers) == (
        {"a": 3},
        [RequeuedRange("a", 1, 0, 3, 3)],
        [],
    )
    shard.feed(rdata("a", 9, 8, epoch=1), position("a", 3, 5, epoch=1), rdata("a", 8, 7, epoch=1))
    assert shard.positions == {"a": 9}


def test_a_fact_past_the_bound_is_never_called_empty() -> None:
    """Its writer's next JOIN says that all is complete, but not that nothing was there."""
    shard = Shard(bounds=Bounds(pending=1))
    shard.feed(join("a", 0), rdata("a", 3, 2, epoch=1), rdata("a", 6, 5, epoch=1))
    (move,) = shard.feed(join("a", 8, epoch=2)).advances
    assert (move.facts, move.unseen, move.empty) == (1, 5, 2)


def test_completed_ids_past_their_bound_are_forgotten() -> None:
    """Rule 9: the highest go first, which holds the line longer and never lets it move; the count is told."""
    shard = Shard(bounds=Bounds(completed=1))
    shard.feed(join("a", 0), join("b", 0))
    done = shard.feed(rdata("a", 2, 0, epoch=1), rdata("a", 4, 2, epoch=1))
    assert (done.counts["forgotten"], done.summary.completed_interval_count) == (1, 1)
    shard.feed(rdata("b", 3, 0, epoch=1))
    assert shard.linear == 3
    shard.feed(position("b", 3, 4, epoch=1))
    assert shard.linear == 4


def test_unknown_writers_past_their_bound_are_rejected() -> None:
    """Rule 9: the line is held by those that are there already."""
    shard = Shard(bounds=Bounds(unjoined=1))
    shard.feed(join("a", 0), rdata("b", 2, epoch=1), rdata("c", 3, epoch=1), row("c", 1), retire("d", 3))
    assert shard.rejected == {2: "buffer_overflow", 3: "buffer_overflow", 4: "buffer_overflow"}
    shard.feed(rdata("a", 1, epoch=1))
    assert shard.linear == 0


def test_retired_writers_leave_after_their_retention() -> None:
    """Once the line has passed them they are only told as dropped; their positions live on in Postgres."""
    shard = Shard(bounds=Bounds(retirement_ms=10_000))
    shard.feed(join("a", 0), join("b", 0), retire("b", 0))
    shard.now += 9_000
    done = shard.feed(rdata("a", 1, epoch=1))
    assert done.dropped_writers == ["b"]
    assert shard.positions == {"a": 1}


def test_the_longest_retired_leave_past_their_bound() -> None:
    """Oldest first, and never in the batch that still has their advance to tell."""
    shard = Shard(bounds=Bounds(retired=1))
    shard.feed(join("a", 9), join("b", 9), retire("b", 9), join("c", 9), retire("c", 9))
    assert shard.positions == {"a": 9, "b": 9, "c": 9}
    done = shard.feed(rdata("a", 10, 9, epoch=1))
    assert done.dropped_writers == ["b"]


def test_a_retired_writer_above_the_line_stays() -> None:
    """Where no writer is left the line goes to the highest position, so that must not be forgotten."""
    shard = Shard(bounds=Bounds(retired=0, retirement_ms=0))
    shard.feed(join("a", 0), join("b", 0), retire("b", 9))
    assert shard.feed(row("a", 1)).dropped_writers == []
    assert shard.feed(retire("a", 4)).dropped_writers == ["b"]
    assert shard.linear == 9
    assert shard.feed(row("a", 1)).dropped_writers == ["a"]
    assert shard.linear == 9
