"""What crosses a threshold is one line in the log, and what is over is one."""

from dataclasses import replace

from structlog.testing import capture_logs

from tests.streaming.builders import Shard, join, position, rdata
from tidemark.app.pipeline.stream_metrics import MAX_LINES, StreamCollector, ThresholdLog
from tidemark.streaming.core.store import ShardedStates
from tidemark.streaming.engine.query import pack_by_shard
from tidemark.streaming.values.limits import Bounds, Policies


class Watched:
    """A board of one shard, and what its crossings log at each look; `now` in seconds."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.now = 0.0
        self.shard = Shard(bounds=bounds or Bounds())
        self.board = StreamCollector(now=lambda: self.now)
        self._crossings = ThresholdLog(self.board)

    def at(self, now: float) -> list[dict[str, object]]:
        self.now = now
        self.board.load(ShardedStates(4, pack_by_shard(self.shard.states, 4)), {})
        with capture_logs() as told:
            self._crossings.check()
        return [dict(it) for it in told]


def test_a_line_that_waits_is_told_once_and_once_that_it_goes_on() -> None:
    """Not before a transaction has had its time; with the writer for whom it waits, and why."""
    watched = Watched()
    watched.shard.feed(join("a", 0), join("b", 0), rdata("a", 5, 4, epoch=1), position("b", 0, 5, epoch=1))
    assert watched.at(5.0) == []
    assert watched.at(12.0) == [
        {
            "event": "The linear lag of a stream is long",
            "log_level": "warning",
            "stream": "events",
            "linear": 0,
            "ids": 5,
            "seconds": 11,
            "writer": "a",
            "reason": "gap",
        }
    ]
    assert watched.at(90.0) == []
    watched.shard.feed(position("a", 0, 4, epoch=1))
    assert watched.at(91.0) == [
        {"event": "The linear lag of a stream is no longer long", "log_level": "info", "stream": "events"}
    ]
    assert watched.at(99.0) == []


def test_the_policy_of_a_stream_says_how_long_is_long() -> None:
    """As it does for the alerts."""
    watched = Watched()
    watched.board.set_policies(Policies({"events": {"behind_seconds": 60}}))
    watched.shard.feed(join("a", 0), rdata("a", 5, 4, epoch=1))
    assert watched.at(50.0) == []
    assert [it["event"] for it in watched.at(70.0)] == ["The linear lag of a stream is long"]


def test_many_that_cross_together_are_one_line() -> None:
    """A pipeline that comes back finds thousands; the log names some."""
    watched = Watched()
    for number in range(MAX_LINES + 1):
        told = join("a", 0), rdata("a", 5, 4, epoch=1)
        watched.shard.feed(*(replace(it, stream=f"s{number:02}") for it in told))
    (line,) = watched.at(90.0)
    assert (line["event"], line["count"], line["streams"]) == (
        "The linear lag of a stream is long", MAX_LINES + 1, [f"s{number:02}" for number in range(MAX_LINES)],
    )  # fmt: skip


def test_a_bound_that_is_half_full_is_told() -> None:
    """Before it bites."""
    watched = Watched()
    watched.board.set_policies(Policies({"events": {"pending_bound": 4}}))
    watched.shard.feed(join("a", 0), rdata("a", 5, 4, epoch=1), rdata("a", 8, 7, epoch=1))
    told = [it for it in watched.at(2.0) if it["event"] == "A stream is near a bound"]
    assert [(it["bound"], it["used"]) for it in told] == [("pending", 0.5)]
