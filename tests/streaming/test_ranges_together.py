"""Offset ranges of several partitions of a real topic that are fetched together: each as exact as by itself."""

import pytest

from tests.streaming.kafka_log import Log, Seen, values
from tidemark.common.errors import Unavailable
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming.ingest import consumer as librdkafka
from tidemark.streaming.ingest.ranges import RangeReader
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.wire.records import Topic


@pytest.mark.parametrize("few", [1, 100_000])
def test_ranges_that_are_read_together_are_exact(few: int, connection: KafkaConnection, prefix: str) -> None:
    """Of both topics, one of which is at its end at once, one has only holes, one goes on for long behind its end, and
    one is empty."""
    log, control = Log(connection, prefix), Log(connection, f"{prefix}.control")
    log.send(*range(2_000))
    log.begin(1, 2, 3, partition=1)
    log.abort()
    control.send(*range(100, 110))
    control.send(7, partition=1)
    reader = RangeReader(connection.client(), {Topic.FACTS: log.name, Topic.CONTROL: control.name}, patience=60)
    wanted = [
        PlannedRange(Topic.FACTS, 0, 5, 9),
        PlannedRange(Topic.FACTS, 1, 0, 4),
        PlannedRange(Topic.CONTROL, 0, 3, 10),
        PlannedRange(Topic.CONTROL, 1, 1, 1),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(librdkafka, "_FEW", few)
        for _ in range(20):
            found: dict[PlannedRange, list[int]] = {it: [] for it in wanted}
            for it, part in reader.read(wanted):
                found[it] += map(int, values(part))
            assert found == dict(zip(wanted, [[5, 6, 7, 8], [], [*range(103, 110)], []], strict=True))
    reader.close()


def test_what_lies_behind_ranges_is_not_gone_through_for_the_others(
    connection: KafkaConnection, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that is at its end is fetched no more, whichever comes first; and what comes again comes whole."""
    log = Log(connection, prefix, partitions=12)
    for partition in range(12):
        log.send(*range(3_000), partition=partition)
    reader = RangeReader(connection.client(), {Topic.FACTS: log.name}, patience=60)
    seen = Seen(monkeypatch)
    for start, size in ((0, 1), (1, 2), (1_000, 40), (0, 1)):
        wanted = [PlannedRange(Topic.FACTS, it, start, start + size) for it in range(12)]
        found: dict[PlannedRange, list[int]] = {it: [] for it in wanted}
        for it, part in reader.read(wanted):
            found[it] += map(int, values(part))
        assert all(of == [*range(start, start + size)] for of in found.values())
    assert seen.count < 12 * 3_000
    reader.close()


def test_one_of_several_ranges_that_never_comes_raises(connection: KafkaConnection, prefix: str) -> None:
    """Rule 9, whatever the others hold; it is named."""
    log = Log(connection, prefix)
    log.send(0, 1)
    log.send(0, partition=1)
    reader = RangeReader(log.connection.client(), {Topic.FACTS: log.name}, patience=0.5)
    with pytest.raises(Unavailable, match=rf"{log.name}\[1\] from 1 to 3"):
        list(reader.read([PlannedRange(Topic.FACTS, 0, 0, 2), PlannedRange(Topic.FACTS, 1, 0, 3)]))
    with pytest.raises(Unavailable, match=rf"{log.name}\[0\] from 2 to 9, nor of 1 other ranges"):
        list(reader.read([PlannedRange(Topic.FACTS, 0, 0, 9), PlannedRange(Topic.FACTS, 1, 0, 3)]))
    reader.close()
