"""Who holds a writer's open IDs, by its own word: shown to people, and nothing more."""

import pytest

from tests.streaming.builders import STREAM, Record, Shard, join, opened, rdata, retire
from tidemark.streaming.core.effects import summarize
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
