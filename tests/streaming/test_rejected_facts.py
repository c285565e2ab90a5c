"""A record that was turned away may be a fact: what its writer settles next is never called empty (rule 5), and a
writer that is known only from such a record holds the line (rule 9). All of it from Kafka's bytes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from tests.streaming.builders import STREAM, Shard, packed, rejections
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Topic


@dataclass(frozen=True)
class Message:
    """A record as bytes; where it has no key that is said, it has the right one."""

    value: bytes
    key: bytes | None = STREAM.encode()
    partition: int = 0
    topic: Topic = Topic.FACTS


def record(kind: str, writer: str, id: int | str, epoch: int = 1, **fields: Any) -> Message:
    value = {"kind": kind, "stream": STREAM, "writer": writer, "epoch": epoch, "id": id, **fields}
    return Message(msgspec.json.encode(value), str(value["stream"]).encode())


def rdata(writer: str, id: int | str, prev: int = 0, epoch: int = 1, **fields: Any) -> Message:
    return record("RDATA", writer, id, epoch, prev=prev, row={}, **fields)


def join(writer: str, id: int, epoch: int = 1, **fields: Any) -> Message:
    return record("JOIN", writer, id, epoch, **fields)


def unread(value: bytes = b"nonsense") -> Message:
    return Message(value)


def feed(shard: Shard, *items: Message) -> list[StreamEffects]:
    """One batch of one shard, in the order in which it was produced."""
    first = shard.next_offset
    shard.next_offset += len(items)
    done = shard.feed_packets(
        packed(
            (offset, offset, (item.topic, item.partition), item.key, item.value)
            for offset, item in enumerate(items, first)
        )
    )
    shard.rejected = rejections(done)
    return done.streams


def evidence(done: Sequence[StreamEffects]) -> list[tuple[str, int, int, int, int]]:
    return [(it.writer, it.prev, it.id, it.empty, it.unseen) for stream in done for it in stream.advances]


def linear(shard: Shard) -> int:
    return shard.stream().linear.position


# -- nobody can read it


def test_a_join_after_an_unreadable_record_leaves_its_range_unseen() -> None:
    """The record is a dead letter; readers are told to look at the table, once, not that there is nothing."""
    shard = Shard()
    feed(shard, join("a", 2))
    assert evidence(feed(shard, unread(b'{"kind":"RDATA","stream":"ev'), join("a", 5, 2))) == [("a", 2, 5, 0, 3)]
    assert evidence(feed(shard, join("a", 9, 3))) == [("a", 5, 9, 4, 0)]


def test_the_doubt_outlasts_its_batch_and_falls_on_all_writers() -> None:
    """Nobody knows who sent it, so each writer's next join is marked as uncertain, whenever it comes."""
    shard = Shard()
    feed(shard, join("a", 2), join("b", 2))
    feed(shard, unread(), unread(b"more nonsense"))
    assert evidence(feed(shard, join("a", 3, 2), join("b", 4, 2))) == [("a", 2, 3, 0, 1), ("b", 2, 4, 0, 2)]


def test_what_was_settled_before_it_is_not_in_doubt() -> None:
    """Order counts inside a batch too."""
    shard = Shard()
    assert evidence(feed(shard, join("a", 2), join("a", 5, 2), unread())) == [("a", 0, 5, 5, 0)]


@pytest.mark.parametrize("at_once", [True, False])
def test_it_is_remembered_for_writers_that_join_later(*, at_once: bool) -> None:
    """The first record of a stream, before anybody joined; and a writer that joins a stream in which one was unread."""
    shard = Shard()
    log = [unread(), join("a", 2), join("b", 3)]
    batches = [log] if at_once else [[message] for message in log]
    assert [it for batch in batches for it in evidence(feed(shard, *batch))] == [("a", 0, 2, 0, 2), ("b", 0, 3, 0, 3)]
    assert evidence(feed(shard, join("a", 5, 2))) == [("a", 2, 5, 3, 0)]


@pytest.mark.parametrize("ids", [[3, 4], [3, "4"], [4, 2**63]])
def test_a_run_that_was_turned_away_may_hold_facts(ids: list[object]) -> None:
    """It names its writer and so doubts no other."""
    shard = Shard()
    feed(shard, join("a", 2), join("b", 2))
    bad = record("RUN", "a", 0, prev=2, ids=ids, rows=[])
    assert evidence(feed(shard, bad, join("a", 4, 2), join("b", 4, 2))) == [("a", 2, 4, 0, 2), ("b", 2, 4, 2, 0)]


def test_a_key_that_is_no_name_makes_no_stream() -> None:
    """Nonsense without a usable key leaves no trace but the dead letter."""
    shard = Shard()
    for key in (None, b"", b"two words", b"\xff"):
        assert feed(shard, replace(unread(), key=key)) == []
    assert shard.states == {}


def test_nonsense_under_many_keys_makes_a_bounded_number_of_streams() -> None:
    """Past the bound each stream that begins in the shard is marked as uncertain: its name may have been among them."""
    shard = Shard(bounds=Bounds(unreadable=2))
    feed(shard, *(replace(unread(), key=b"k%d" % number) for number in range(5)))
    assert sorted(shard.states) == ["k0", "k1"]
    assert evidence(feed(shard, join("a", 2))) == [("a", 0, 2, 0, 2)]


@pytest.mark.parametrize(
    "value",
    [
        b'{"kind":"RDATA","stream":"events","writer":"b","epoch":1,"prev":0,"id":99999999999999999999,"row":1}',
        b'{"kind":"FUTURE","stream":"events","writer":"b","epoch":1}',
        b'{"kind":"JOIN","stream":"events","writer":"b","epoch":1,"id":"3"}',
        b'{"kind":"RDATA","stream":"events","writer":"b","epoch":1,"prev":3,"id":2,"row":1}',
    ],
)
def test_a_writer_that_a_refused_record_names_alone_is_in_doubt(value: bytes) -> None:
    """It says whose it is, in spite of what is wrong; where that writer has not joined, it holds the line."""
    shard = Shard()
    feed(shard, join("a", 1), join("c", 1))
    feed(shard, unread(value), rdata("a", 2, 1), join("c", 2, 2))
    assert linear(shard) == 1
    done = feed(shard, join("b", 2, 2), join("a", 4, 2))
    assert evidence(done)[0] == ("a", 2, 4, 2, 0)
    assert (evidence(done)[1][4] > 0) == (b"JOIN" not in value)
    assert linear(shard) == 2


# -- in the wrong place


def test_a_key_that_is_not_the_stream_puts_the_stream_of_the_value_in_doubt() -> None:
    """Wherever the key brought the record: the fact is of the stream that it names."""
    shard = Shard()
    feed(shard, join("a", 0), join("b", 0))
    astray = replace(rdata("a", 2), key=b"elsewhere", partition=5)
    assert [it.stream for it in feed(shard, astray)] == [STREAM]
    assert evidence(feed(shard, join("a", 3, 2), join("b", 3, 2))) == [("a", 0, 3, 1, 2), ("b", 0, 3, 3, 0)]
    assert "elsewhere" not in shard.states


def test_a_key_that_is_a_stream_puts_that_one_in_doubt_too() -> None:
    """The key may be right and the value wrong."""
    shard = Shard()
    feed(shard, join("a", 0), join("a", 0, stream="other"))
    feed(shard, replace(rdata("a", 2, stream="other"), key=STREAM.encode()))
    assert evidence(feed(shard, join("a", 3, 2))) == [("a", 0, 3, 0, 3)]
    assert evidence(feed(shard, join("a", 3, 2, stream="other"))) == [("a", 0, 3, 1, 2)]


def test_a_join_under_a_wrong_key_holds_the_line() -> None:
    """Rule 9: its writer may reserve from then on."""
    shard = Shard()
    feed(shard, join("a", 0))
    feed(shard, replace(join("b", 0), key=None, partition=3))
    feed(shard, rdata("a", 2))
    assert linear(shard) == 0
    feed(shard, join("b", 2, 2))
    assert linear(shard) == 2


@pytest.mark.parametrize("astray", [{"partition": 1}, {"key": b"x", "partition": 1}, {"topic": Topic.CONTROL}])
@pytest.mark.parametrize("first", [True, False])
def test_a_fact_elsewhere_in_one_batch_with_the_join(astray: dict[str, Any], *, first: bool) -> None:
    """There is no order between the two, so that JOIN is marked as uncertain, and so is the one after it."""
    shard = Shard()
    feed(shard, join("a", 0))
    found = [replace(rdata("a", 4), **astray), join("a", 5, 2)]
    assert evidence(feed(shard, *(found if first else reversed(found)))) == [("a", 0, 5, 1, 4)]


def test_a_stream_that_begins_with_facts_in_two_partitions() -> None:
    """The writer is the first, by epoch 0; what went elsewhere is marked as uncertain."""
    shard = Shard()
    feed(shard, rdata("a", 1, 0, 0), replace(rdata("a", 2, 1, 0), partition=1))
    assert evidence(feed(shard, join("a", 3, 1))) == [("a", 1, 3, 1, 1)]


def test_a_fact_on_the_control_topic_is_in_doubt() -> None:
    """It is refused there; its writer, if it has not joined, holds the line."""
    shard = Shard()
    feed(shard, join("a", 0))
    feed(shard, replace(rdata("a", 2), topic=Topic.CONTROL), replace(rdata("b", 1), topic=Topic.CONTROL))
    assert sorted(shard.rejected.values()) == ["wrong_topic", "wrong_topic"]
    assert evidence(feed(shard, join("a", 3, 2))) == [("a", 0, 3, 1, 2)]
    assert linear(shard) == 0
    assert evidence(feed(shard, join("b", 3, 2))) == [("b", 0, 3, 2, 1)]
    assert linear(shard) == 3


def test_an_act_without_a_signature_puts_nothing_in_doubt() -> None:
    """A SKIP or RETIRE is no fact, whatever is wrong with it."""
    shard = Shard()
    feed(shard, join("a", 0))
    feed(shard, replace(record("RETIRE", "b", 2), topic=Topic.CONTROL), record("SKIP", "b", 2, prev=0))
    assert sorted(shard.rejected.values()) == ["missing_field", "wrong_topic"]
    assert evidence(feed(shard, join("a", 3, 2))) == [("a", 0, 3, 3, 0)]
    assert linear(shard) == 3


# -- past a bound, and after the end


def test_an_unknown_writer_past_the_bound_holds_the_line_after_the_others_have_joined() -> None:
    """It was turned away, so nobody knows what it has open; its JOIN alone does not tell that it was the only one."""
    shard = Shard(bounds=Bounds(unjoined=1))
    feed(shard, join("a", 0))
    feed(shard, rdata("b", 3, 2), rdata("c", 2, 1))
    assert sorted(shard.rejected.values()) == ["buffer_overflow"]
    feed(shard, join("b", 4, 2), join("a", 4, 2))
    assert linear(shard) == 0
    assert evidence(feed(shard, join("c", 4, 2))) == [("c", 0, 4, 0, 4)]
    assert linear(shard) == 0


def test_facts_past_the_bound_of_unknown_writers_are_in_doubt() -> None:
    """Those who were turned away are not known by name, so every next JOIN is marked as uncertain."""
    shard = Shard(bounds=Bounds(unjoined=1))
    feed(shard, join("a", 0), rdata("b", 3, 2), rdata("a", 2, 1, epoch=2))
    assert evidence(feed(shard, join("a", 4, 3))) == [("a", 0, 4, 0, 4)]


def test_an_operator_gets_rid_of_all_that_never_joined() -> None:
    """RETIRE of `*`: what they completed is late, and the line goes on."""
    shard = Shard(bounds=Bounds(unjoined=1))
    feed(shard, join("a", 0), rdata("b", 3, 2), rdata("c", 2, 1))
    feed(shard, rdata("a", 4))
    act = replace(record("RETIRE", "*", 0, by="ann", why="load test"), topic=Topic.CONTROL)
    (told,) = feed(shard, act)
    assert [(it.writer, it.prev, it.id, it.why) for it in told.late] == [("b", 2, 3, "skipped")]
    assert linear(shard) == 4
    assert evidence(feed(shard, join("b", 5, 2))) == [("b", 0, 5, 0, 5)]


def test_rows_after_a_retire_show_that_the_writer_lives() -> None:
    """It is unknown again: the line stays, and its next JOIN may not call empty what the rows belong to."""
    shard = Shard()
    feed(shard, join("a", 0), join("b", 0), record("RETIRE", "b", 2))
    feed(shard, rdata("b", "batch"), rdata("a", 4))
    assert linear(shard) == 0
    assert evidence(feed(shard, join("b", 4, 2))) == [("b", 2, 4, 0, 2)]
    assert linear(shard) == 4


def test_doubt_outlasts_a_writer_that_leaves_the_state() -> None:
    """A retired writer is forgotten after a while; what was refused of it is not."""
    shard = Shard(bounds=Bounds(retired=0))
    feed(shard, join("a", 0), join("b", 0))
    feed(shard, replace(rdata("b", 3, 2), partition=1))
    feed(shard, record("RETIRE", "b", 0))
    feed(shard, join("a", 5, 2))
    feed(shard, join("a", 6, 3))
    assert sorted(shard.stream().writers) == ["a"]
    assert evidence(feed(shard, join("b", 6, 2))) == [("b", 0, 6, 3, 3)]
