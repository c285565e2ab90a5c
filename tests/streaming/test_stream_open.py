"""What a writer reports of itself: open transactions, what blocks it, its heartbeat. Shown to people, and no more."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streaming.builders import (
    STREAM,
    Record,
    Shard,
    compacted,
    join,
    opened,
    packets,
    position,
    rdata,
    retire,
    sent,
)
from tidemark.streaming.core.effects import Source, SourceReport, StreamEffects, summarize
from tidemark.streaming.values.limits import Reason


def shown(shard: Shard) -> dict[str, list[str]]:
    return summarize(shard.stream()).transactions


def test_open_transactions_are_shown_until_their_writer_says_so_no_more() -> None:
    """They stay from batch to batch, each OPEN replaces the one before, and an empty one ends it."""
    shard = Shard()
    done = shard.feed(join("shop", 0), rdata("shop", 2, 1, epoch=1), opened("shop", "pid 7: insert", "pid 8"))
    assert done.summary.transactions == {"shop": ["pid 7: insert", "pid 8"]}
    shard.feed(rdata("shop", 3, 2, epoch=1))
    assert shown(shard) == {"shop": ["pid 7: insert", "pid 8"]}
    shard.feed(opened("shop", "pid 8"))
    assert shown(shard) == {"shop": ["pid 8"]}
    shard.feed(opened("shop"))
    assert shown(shard) == {}


def test_open_transactions_move_nothing() -> None:
    """Rule 1: what they say is no evidence, neither that an ID is open nor that it is not."""
    shard = Shard()
    shard.feed(join("a", 0), join("b", 0), rdata("a", 2, 1, epoch=1))
    for transactions in (("pid 7",), ()):
        done = shard.feed(opened("a", *transactions), opened("b", *transactions))
        assert (done.advances, done.closed, shard.positions, shard.linear) == ([], [], {"a": 0, "b": 0}, 0)


@pytest.mark.parametrize("end", [join("shop", 2, epoch=2), retire("shop", 2)])
def test_open_transactions_end_with_the_epoch_that_named_them(end: Record) -> None:
    """A writer that joins anew or retires has settled what they held."""
    shard = Shard()
    shard.feed(join("shop", 0), rdata("shop", 2, 1, epoch=1), opened("shop", "pid 7"))
    shard.feed(end)
    assert shown(shard) == {}


def test_only_a_writer_that_has_joined_may_name_them() -> None:
    """OPEN of an unknown writer, an earlier epoch or a retired one is refused, and marks nothing as uncertain."""
    shard = Shard()
    shard.feed(join("shop", 0, epoch=2), join("old", 0), retire("old", 0))
    shard.feed(opened("stranger", "x"), opened("shop", "x", epoch=1), opened("shop", "x", epoch=3), opened("old", "x"))
    unknown = Reason.UNKNOWN_WRITER
    assert [shard.rejected[offset] for offset in sorted(shard.rejected)] == [unknown, Reason.ZOMBIE, unknown, unknown]
    assert shown(shard) == {}
    assert shard.stream(STREAM).unjoined == {}


def test_what_a_terminal_would_obey_is_not_kept() -> None:
    """A query is anybody's text: its control characters do not reach the screen of who looks."""
    shard = Shard()
    shard.feed(join("shop", 0), opened("shop", "pid 7: select '\x1b[2J\u202e'"))
    assert shown(shard) == {"shop": ["pid 7: select '\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}'"]}


def test_a_heartbeat_is_kept_with_the_cause_that_blocks_and_since_when() -> None:
    """The time of a cause is that of the batch that read it first. A record of any kind is a sign of life."""
    shard = Shard()
    done = shard.feed(join("shop", 0), opened("shop", heartbeat=30))
    assert done.summary.sources == [Source("shop", 1000, SourceReport(30, "", 0))]
    shard.feed(opened("shop", heartbeat=30, blocked="the sequence has a CACHE"))
    done = shard.feed(opened("shop", heartbeat=30, blocked="the sequence has a CACHE"))
    assert done.summary.sources == [Source("shop", 3000, SourceReport(30, "the sequence has a CACHE", 2000))]
    done = shard.feed(rdata("shop", 1, epoch=1))
    assert done.summary.sources == [Source("shop", 4000, SourceReport(30, "the sequence has a CACHE", 2000))]
    assert shard.feed(opened("shop", heartbeat=30)).summary.sources == [Source("shop", 5000, SourceReport(30, "", 0))]
    assert shard.feed(opened("shop")).summary.sources == []


def test_a_writer_that_joins_anew_promises_anew() -> None:
    """The next program of that name may send no heartbeats."""
    shard = Shard()
    shard.feed(join("shop", 0), opened("shop", heartbeat=30))
    assert shard.feed(join("shop", 0, epoch=2)).summary.sources == []
    shard.feed(opened("shop", heartbeat=30, epoch=2))
    assert shard.feed(retire("shop", 0, epoch=2)).summary.sources == []


def test_a_heartbeat_is_missed_after_twice_its_time_that_a_pipeline_has_read() -> None:
    """Before, the record may be on its way; and what no pipeline reads says nothing about its writer."""
    source = Source("shop", 100_000, SourceReport(30, "", 0))
    assert source.overdue_seconds(165.0, 0.0) is None
    assert source.overdue_seconds(166.0, 0.0) == 66.0
    assert source.overdue_seconds(1200.0, 1150.0) is None
    assert source.overdue_seconds(1200.0, 1100.0) == 1100.0
    assert Source("shop", 0, SourceReport(0, "", 0)).overdue_seconds(1e9, 0.0) is None


WRITERS = ("a", "b")
HISTORY = (
    join("a", 0),
    join("b", 0),
    rdata("a", 1, 0, epoch=1),
    rdata("b", 3, 0, epoch=1),
    position("a", 1, 3, epoch=1),
    rdata("a", 5, 3, epoch=1),
    rdata("b", 4, 3, epoch=1),
    join("a", 5, epoch=2),
    position("b", 4, 7, epoch=1),
    rdata("a", 8, 7, epoch=2),
    rdata("a", 7, 5, epoch=2),
    retire("b", 7),
)
reports = st.builds(
    opened,
    st.sampled_from([*WRITERS, "stranger"]),
    epoch=st.integers(0, 3),
    heartbeat=st.sampled_from([0, 1, 30, 604_800]),
    blocked=st.sampled_from(["", "the sequence has a CACHE"]),
)


def _moves(done: StreamEffects) -> object:
    """All that a reader can see of a batch."""
    moves = [msgspec.structs.replace(move, oldest=0) for move in done.advances]
    gaps = [(gap.writer, gap.low, gap.top) for gap in done.gaps]
    return moves, done.writers, gaps, done.closed, done.late, done.timelines, done.linear, done.allocated


@given(st.lists(st.lists(reports, max_size=3), min_size=len(HISTORY), max_size=len(HISTORY)), st.booleans())
def test_heartbeats_never_move_a_position(between: list[list[Record]], as_records: bool) -> None:
    """Rule 1: with any heartbeats of any writers and epochs in between, each record does what it does alone."""
    quiet, noisy = Shard(), Shard()
    for record, extra in zip(HISTORY, between, strict=True):
        expected = _moves(quiet.feed(record))
        batch = sent([*extra, record], noisy.next_offset)
        noisy.next_offset += len(batch)
        (done,) = noisy.feed_packets((compacted if as_records else packets)(batch)).streams
        assert _moves(done) == expected
        assert (noisy.stream().linear, noisy.stream().unjoined) == (quiet.stream().linear, quiet.stream().unjoined)
