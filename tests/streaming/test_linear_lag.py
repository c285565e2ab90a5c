"""Who holds the linear position below what is allocated is named, gap or no gap, with a since and a sign of life."""

import pytest

from tests.streaming.builders import STREAM, Shard, forced, join, opened, packing, position, rdata, retire
from tidemark.app.diagnosis import open_ranges
from tidemark.streaming.core import writers
from tidemark.streaming.core.effects import LinearLag, Summary, summarize
from tidemark.streaming.core.writers import LinearPosition


def held(summary: Summary) -> list[tuple[str, str, int | None]]:
    """Writer, reason and since of each holder."""
    assert summary.linear_lag is not None
    return [(it.writer, it.reason, it.since) for it in summary.linear_lag.blockers]


@pytest.mark.parametrize("few", [0, 32])
def test_a_dead_writer_is_named_without_a_gap(few: int) -> None:
    """w1 dies holding 8 and w2 goes on to 20: the line stays at 7 because of w1, since 8 was given out."""
    with packing(few):
        shard = Shard()
        assert shard.feed(join("w1", 0), join("w2", 0), rdata("w1", 7, 0, epoch=1)).summary.linear_lag is not None
        assert shard.feed(position("w2", 0, 7, epoch=1)).summary.linear_lag is None
        for id in range(9, 21):
            done = shard.feed(rdata("w2", id, id - 1 if id > 9 else 7, epoch=1))
        assert (shard.linear, done.summary.gap_count) == (7, 0)
        assert held(done.summary) == [("w1", "silent", 3000)]
        assert done.summary.linear_lag is not None
        (holder,) = done.summary.linear_lag.blockers
        assert (done.summary.linear_lag.id_count, done.summary.linear_lag.since) == (13, 3000)
        assert (holder.epoch, holder.position, holder.last_seen) == (1, 7, 1000)
        assert summarize(shard.stream()) == done.summary


def test_a_line_that_follows_is_behind_since_what_it_waits_for_now() -> None:
    """A slow writer is told from a lost one: the since moves with the line, and so does the last sign of life."""
    shard = Shard()
    shard.feed(join("slow", 0), join("quick", 0))
    for id in range(10, 60, 10):
        shard.feed(position("quick", id - 10, id, epoch=1))
    assert held(shard.feed(rdata("slow", 25, 0, epoch=1)).summary) == [("slow", "silent", 4000)]
    done = shard.feed(rdata("slow", 45, 25, epoch=1))
    assert done.summary.linear_lag is not None
    assert (shard.linear, done.summary.linear_lag.id_count, done.summary.linear_lag.since) == (45, 5, 6000)
    assert [it.last_seen for it in done.summary.linear_lag.blockers] == [8000]
    assert shard.feed(position("slow", 45, 50, epoch=1)).summary.linear_lag is None


def test_a_gap_and_an_open_transaction_are_reasons_of_their_own() -> None:
    """A gap tells its own since; where the writer says who holds its IDs, that is the reason."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0))
    done = shard.feed(rdata("a", 3, 2, epoch=1), position("b", 0, 9, epoch=1))
    assert held(done.summary) == [("a", "gap", 2000)]
    done = shard.feed(opened("a", "pid 7: insert"))
    assert held(done.summary) == [("a", "transaction", 2000)]
    assert held(shard.feed(opened("a")).summary) == [("a", "gap", 2000)]


def test_an_unknown_writer_is_named_before_those_that_wait_with_it() -> None:
    """It holds the line alone as long as it has not joined; it counts from its first record."""
    shard = Shard()
    shard.feed(join("a", 5))
    assert shard.stream().linear.position == 5
    done = shard.feed(rdata("new", 7, 6, epoch=4))
    assert held(done.summary) == [("new", "unknown", 2000), ("a", "silent", 2000)]
    assert done.summary.linear_lag is not None
    assert [it.last_seen for it in done.summary.linear_lag.blockers] == [2000, 1000]
    assert held(shard.feed(position("a", 5, 7, epoch=1)).summary) == [("new", "unknown", 2000)]


def test_who_is_idle_with_the_others_or_retired_holds_nothing() -> None:
    """A quiet stream has no holder, however long it is quiet, and a retired writer is none."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), join("c", 0))
    shard.feed(retire("c", 0), rdata("a", 2, 0, epoch=1), position("b", 0, 2, epoch=1))
    assert summarize(shard.stream()).linear_lag is None


def test_an_operators_word_is_no_sign_of_life() -> None:
    """A writer that was joined by force was never heard of."""
    shard = Shard()
    shard.feed(join("b", 0), forced(join("a", 0)))
    shard.feed(position("b", 0, 4, epoch=1))
    behind = summarize(shard.stream()).linear_lag
    assert behind is not None
    assert [(it.writer, it.last_seen) for it in behind.blockers] == [("a", 0)]


def test_records_that_change_nothing_are_a_sign_of_life() -> None:
    """A duplicate moves no position and shows that its writer lives."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), position("b", 0, 4, epoch=1))
    shard.feed(join("a", 0))
    behind = summarize(shard.stream()).linear_lag
    assert behind is not None
    assert [(it.writer, it.last_seen, it.since) for it in behind.blockers] == [("a", 2000, 1000)]


@pytest.mark.parametrize("time", [0, 820_000, 10**6, 10**10])
def test_the_clock_of_a_writer_proves_nothing_of_its_life(time: int) -> None:
    """A record's timestamp may be minutes behind, in seconds, or years ahead: last seen is when the batch read it."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), position("b", 0, 4, epoch=1))
    shard.now, shard.next_offset = 1_000_000, time  # the offset is the record's timestamp too
    shard.feed(rdata("a", 2, 0, epoch=1))
    behind = summarize(shard.stream()).linear_lag
    assert behind is not None
    assert [it.last_seen for it in behind.blockers] == [1_001_000]
    assert [it.verdict for it in open_ranges.find_open_ranges(shard.states, 1030.0)] == ["alive"]


@pytest.mark.parametrize("few", [0, 32])
def test_of_many_holders_the_furthest_behind_are_named_and_all_counted(few: int) -> None:
    """A thousand silent writers make no thousand names a batch."""
    with packing(few):
        shard = Shard()
        shard.feed(join("z", 0), *(join(f"w{number}", number) for number in range(40)))
        behind = shard.feed(position("z", 0, 100, epoch=1)).summary.linear_lag
        assert behind is not None
        assert [it.writer for it in behind.blockers] == ["w0"]
        shard.feed(rdata("z", 101, 100, epoch=1), *(rdata("z", id, id - 1, epoch=1) for id in range(102, 110)))
        shard.feed(*(position(f"w{number}", number, 39, epoch=1) for number in range(39)))
        behind = summarize(shard.stream()).linear_lag
        assert behind is not None
        assert ([it.writer for it in behind.blockers], behind.blocker_count) == (
            sorted(f"w{number}" for number in range(40))[:10],
            40,
        )


def test_since_when_it_is_behind_stays_short_and_never_becomes_younger() -> None:
    """Rule 8: of a thousand batches a few are remembered; what lies between two of them counts from the earlier."""
    line = LinearPosition()
    for batch in range(1, 1001):
        line.update_heads((batch - 1) * 10, batch * 10, batch)
        assert len(line.heads) <= writers.HEADS_MAX
    for id in range(0, 10_000, 7):
        line.advance(id)
        line.update_heads(10_000, 10_000, 2000)
        (position, since), *_ = line.heads
        assert position == id
        assert since <= id // 10 + 1
    line.advance(10_000)
    line.update_heads(10_000, 10_000, 3000)
    assert line.heads == []


def test_a_database_that_goes_back_takes_its_ids_with_it() -> None:
    """What was given out beyond is none any more."""
    line = LinearPosition(5)
    line.update_heads(5, 10, 1000)
    line.update_heads(10, 20, 2000)
    line.update_heads(20, 8, 3000)
    assert line.heads == [(5, 1000)]


def test_a_backward_stream_tells_signed_ids() -> None:
    """The distance is a magnitude; the position of the holder has its sign."""
    shard = Shard()
    behind = shard.feed(join("a", 0), join("b", 0), position("b", 0, -4, epoch=1)).summary.linear_lag
    assert isinstance(behind, LinearLag)
    assert (behind.id_count, behind.blockers[0].writer, behind.blockers[0].position) == (4, "a", 0)
    assert shard.feed(rdata("a", -2, 0, epoch=1)).stream == STREAM
    behind = summarize(shard.stream()).linear_lag
    assert behind is not None
    assert behind.blockers[0].position == -2
