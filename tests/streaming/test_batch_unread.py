"""A record that nobody can read may be a fact: what is settled after it is never called empty."""

from collections.abc import Sequence

import msgspec

from tests.streaming.builders import Shard
from tests.streaming.naive_compact import CONTROL, FACTS, Message, arrow, message
from tidemark.streaming import records
from tidemark.streaming.compact import compactor
from tidemark.streaming.effects import StreamEffects
from tidemark.streaming.runs import Packet

STREAM = "events"


def join(epoch: int, id: int, writer: str = "a") -> records.Join:
    return records.Join(stream=STREAM, writer=writer, epoch=epoch, id=id)


def packets(messages: Sequence[Message]) -> list[Packet]:
    batches = compactor(1, FACTS, CONTROL)(iter([arrow(messages)]))
    return [msgspec.msgpack.decode(row["packet"], type=Packet) for batch in batches for row in batch.to_pylist()]


def feed(shard: Shard, *items: records.Join | bytes) -> list[StreamEffects]:
    """A batch of records, and of values that cannot be read, all under the stream's key."""
    first = shard.next_offset
    shard.next_offset += len(items)
    return shard.feed_packets(
        packets(
            [
                Message(item, STREAM.encode(), offset, 0) if isinstance(item, bytes) else message(item, offset)
                for offset, item in enumerate(items, first)
            ]
        )
    ).streams


def evidence(done: list[StreamEffects]) -> list[tuple[str, int, int, int, int]]:
    return [(it.writer, it.prev, it.id, it.empty, it.unseen) for stream in done for it in stream.advances]


def test_a_join_after_an_unreadable_record_leaves_its_range_unseen() -> None:
    """Rule 5: the record is a dead letter; readers are told to look at the table, once, not that there is nothing."""
    shard = Shard()
    feed(shard, join(1, 2))
    assert evidence(feed(shard, b'{"kind":"RDATA","stream":"ev', join(2, 5))) == [("a", 2, 5, 0, 3)]
    assert evidence(feed(shard, join(3, 9))) == [("a", 5, 9, 4, 0)]


def test_the_doubt_outlasts_its_batch_and_falls_on_all_writers() -> None:
    """Nobody knows who sent it, so each writer's next join is in doubt, whenever it comes."""
    shard = Shard()
    feed(shard, join(1, 2), join(1, 2, "b"))
    feed(shard, b"nonsense", b"more nonsense")
    assert evidence(feed(shard, join(2, 3), join(2, 4, "b"))) == [("a", 2, 3, 0, 1), ("b", 2, 4, 0, 2)]


def test_what_was_settled_before_it_is_not_in_doubt() -> None:
    """Order counts inside a batch too."""
    shard = Shard()
    assert evidence(feed(shard, join(1, 2), join(2, 5), b"nonsense")) == [("a", 0, 5, 5, 0)]


def test_nonsense_makes_no_stream() -> None:
    """A key that is no stream's name leaves no trace but the dead letter."""
    shard = Shard()
    assert feed(shard, b"nonsense") == []
    assert shard.states == {}
