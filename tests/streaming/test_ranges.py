"""Offset ranges of a real topic: exact whatever transactions, holes and losses are in them."""

import time
from collections.abc import Iterator
from random import Random

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.streaming.builders import contents
from tests.streaming.kafka_log import PARTITIONS, Log, Seen, values
from tidemark.app.stack.processes import KafkaServer, free_port
from tidemark.common.errors import Refused, Unavailable
from tidemark.sources.kafka import KafkaConnection
from tidemark.streaming.ingest import native_consumer, ranges
from tidemark.streaming.ingest.consumer import PythonConsumer
from tidemark.streaming.ingest.native_consumer import NativeConsumer
from tidemark.streaming.ingest.ranges import EndOffsets, RangeReader
from tidemark.streaming.ingest.record_batch import PlannedRange
from tidemark.streaming.wire.records import Topic


@pytest.fixture
def log(connection: KafkaConnection, prefix: str) -> Log:
    return Log(connection, prefix)


@pytest.fixture(params=[NativeConsumer, PythonConsumer])
def consumer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[NativeConsumer | PythonConsumer]:
    """The class that reads messages: both must give the same."""
    chosen: type[NativeConsumer | PythonConsumer] = request.param
    monkeypatch.setattr(ranges, "open_consumer", chosen)
    return chosen


@pytest.fixture
def reader(log: Log, consumer: type[NativeConsumer | PythonConsumer]) -> Iterator[RangeReader]:
    reader = RangeReader(log.connection.client_settings(), {Topic.FACTS: log.name}, patience=60)
    yield reader
    reader.close()


def numbers(reader: RangeReader, start: int, end: int, partition: int = 0) -> list[tuple[int, int]]:
    """Offset and number of each record of the range."""
    found = reader.read([PlannedRange(Topic.FACTS, partition, start, end)])
    return [
        (int(offset), int(value)) for _, part in found for offset, value in zip(part.offsets, values(part), strict=True)
    ]


def test_a_range_is_read_from_its_start_to_its_end(log: Log, reader: RangeReader) -> None:
    """And not a record further, in whatever order ranges and partitions are asked for."""
    log.send(*range(10))
    log.send(*range(100, 110), partition=1)
    assert numbers(reader, 3, 7) == [(at, at) for at in range(3, 7)]
    assert numbers(reader, 0, 10, partition=1) == [(at, 100 + at) for at in range(10)]
    assert numbers(reader, 9, 10) == [(9, 9)]
    reader.stop_fetching()
    assert numbers(reader, 0, 1) == [(0, 0)]


def test_what_a_transaction_aborted_never_happened(log: Log, reader: RangeReader) -> None:
    """Rule 1: aborted records and the marks of transactions are holes, at the start, inside and at the end of a range,
    and a range of nothing but holes comes to its end."""
    log.begin(1, 2)
    log.abort()
    log.send(3)
    log.begin(4)
    log.commit()
    assert log.end() == 6
    assert numbers(reader, 0, 6) == [(3, 3), (4, 4)]
    assert numbers(reader, 0, 3) == []
    assert numbers(reader, 5, 6) == []
    assert numbers(reader, 4, 5) == [(4, 4)]


def test_an_open_transaction_is_not_read_into(log: Log, reader: RangeReader) -> None:
    """The end of a partition is where what is committed ends, whatever others wrote behind it."""
    log.send(0)
    log.begin(1)
    log.send(2)
    assert log.end() == 1
    assert numbers(reader, 0, 1) == [(0, 0)]
    log.commit()
    assert numbers(reader, 1, log.end()) == [(1, 1), (2, 2)]


@pytest.mark.usefixtures("consumer")
def test_records_that_are_gone_are_not_passed_over(log: Log, admin: AdminClient) -> None:
    """Rule 5: a range that begins before the oldest record raises, and says so."""
    log.send(*range(5))
    for done in admin.delete_records([TopicPartition(log.name, 0, 3)]).values():
        done.result(30)
    reader = RangeReader(log.connection.client_settings(), {Topic.FACTS: log.name}, patience=60)
    with pytest.raises(Unavailable, match=rf"{log.name}\[0\]: .*out of range"):
        numbers(reader, 2, 5)
    reader.close()


def test_a_range_beyond_the_end_is_waited_for_and_then_raises(log: Log, reader: RangeReader) -> None:
    """Rule 9: Spark names no such range, unless brokers lost what they had committed."""
    log.send(0)
    impatient = RangeReader(log.connection.client_settings(), {Topic.FACTS: log.name}, patience=0.2)
    with pytest.raises(Unavailable, match=rf"{log.name}\[0\] from offset 1 to 2 \(unfinished ranges: 1\)"):
        numbers(impatient, 0, 3)
    impatient.close()
    with pytest.raises(Unavailable, match="ends at offset 1, but the next to read is 2"):
        EndOffsets(log.connection.client_settings(), patience=6).fetch({log.name: {0: 2}})


@pytest.mark.parametrize("few", [1, 100_000])
def test_many_messages_come_as_few_do(few: int, log: Log, reader: RangeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compiled code, and one by one: nulls, what is empty, bytes of all kinds, and what is larger than the rest."""
    monkeypatch.setattr(native_consumer, "_MIN_COMPILED_MESSAGES", few)
    random, now = Random(few), int(time.time() * 1000)
    sent: list[tuple[bytes | None, bytes | None, int]] = [
        (
            random.choice([None, b"", b"key", random.randbytes(random.randrange(40))]),
            random.choice([None, b"", random.randbytes(random.randrange(300)), b"x" * random.choice([9, 700_000])]),
            now - random.randrange(100_000),
        )
        for _ in range(200)
    ]
    for key, value, at in sent:
        log.plain.produce(log.name, partition=0, key=key, value=value, timestamp=at)
    assert log.plain.flush(30) == 0
    parts = [part for _, part in reader.read([PlannedRange(Topic.FACTS, 0, 10, 190)])]
    found = [(*it, at) for part in parts for it, at in zip(contents(part), part.times.tolist(), strict=True)]
    assert found == [(key or b"", value or b"", at) for key, value, at in sent[10:190]]
    assert [it for part in parts for it in part.offsets.tolist()] == [*range(10, 190)]


def test_a_reader_that_is_closed_says_so(reader: RangeReader) -> None:
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(reader.read([PlannedRange(Topic.FACTS, 0, 0, 1)]))


@pytest.mark.usefixtures("consumer")
def test_a_setting_that_librdkafka_does_not_know_is_named() -> None:
    with pytest.raises(Refused, match=r"no\.such\.setting"):
        RangeReader({"bootstrap.servers": "127.0.0.1:1", "no.such.setting": "1"}, {Topic.FACTS: "f"})


def test_nulls_and_times_come_as_they_are(log: Log, reader: RangeReader) -> None:
    """A null value is an empty one and a null key none: both are refused further on, for what they are."""
    log.plain.produce(log.name, partition=0, timestamp=1_234)
    log.plain.produce(log.name, partition=0, key=b"", value=b"x", timestamp=5_678)
    log.plain.flush(30)
    parts = [part for _, part in reader.read([PlannedRange(Topic.FACTS, 0, 0, 2)])]
    assert [it for part in parts for it in contents(part)] == [(b"", b""), (b"", b"x")]
    assert [time for part in parts for time in part.times.tolist()] == [1_234, 5_678]


def test_small_ranges_in_any_order_lose_nothing(log: Log, reader: RangeReader) -> None:
    """Rule 5: hundreds of small ranges over both partitions by turns, parked or not, while transactions leave holes:
    each holds what one great range holds there."""
    for first in range(0, 200, 10):
        log.begin(*range(first, first + 5), partition=first // 10 % 2)
        log.abort() if first % 40 == 0 else log.commit()
        log.send(*range(first + 5, first + 10), partition=first // 10 % 2)
    ends = [log.end(partition) for partition in range(PARTITIONS)]
    whole = [numbers(reader, 0, end, partition) for partition, end in enumerate(ends)]
    pieces: list[list[tuple[int, int]]] = [[], []]
    for start in range(0, max(ends), 3):
        for partition, end in enumerate(ends):
            pieces[partition] += numbers(reader, min(start, end), min(start + 3, end), partition)
            if start % 2:
                reader.stop_fetching()
    assert pieces == whole
    together: list[list[tuple[int, int]]] = [[], []]
    for start in range(0, max(ends), 3):
        wanted = [PlannedRange(Topic.FACTS, it, min(start, end), min(start + 3, end)) for it, end in enumerate(ends)]
        for it, part in reader.read(wanted):
            together[it.partition] += zip(part.offsets.tolist(), map(int, values(part)), strict=True)
        if start % 2:
            reader.stop_fetching()
    assert together == whole


def test_a_range_that_ends_with_holes_is_at_its_end_where_a_record_comes_from_behind_it(
    log: Log,
    reader: RangeReader,
    consumer: type[NativeConsumer | PythonConsumer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline that catches up reads ranges with far more behind them than in them, and none of that is gone
    through."""
    log.send(1)
    log.begin(2)
    log.abort()
    log.send(*range(20_000))
    seen = Seen(monkeypatch, consumer)
    assert numbers(reader, 0, 3) == [(0, 1)]
    assert numbers(reader, 1, 3) == []
    assert numbers(reader, 2, 5) == [(3, 0), (4, 1)]
    assert seen.count < 30


def test_a_broker_that_is_away_is_named() -> None:
    """With what keeps us from it, after the patience of whoever asks."""
    nowhere = KafkaConnection(f"127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable, match="Kafka at"):
        EndOffsets(nowhere.client_settings(), patience=0.3).fetch({"t": {0: 0}})


def test_a_broker_that_comes_back_is_asked_again(kafka: KafkaServer, log: Log) -> None:
    """Whoever plans ranges asks the same object for weeks."""
    ends = EndOffsets(log.connection.client_settings(), patience=60)
    log.send(0)
    assert ends.fetch({log.name: {0: 0}}) == {log.name: {0: 1}}
    kafka.stop()
    kafka.start()
    assert ends.fetch({log.name: {0: 1}}) == {log.name: {0: 1}}


# -- ranges of several partitions that are fetched together


@pytest.mark.parametrize("few", [1, 100_000])
@pytest.mark.usefixtures("consumer")
def test_ranges_that_are_read_together_are_exact(few: int, connection: KafkaConnection, prefix: str) -> None:
    """Of both topics, one of which is at its end at once, one has only holes, one goes on for long behind its end, and
    one is empty."""
    log, control = Log(connection, prefix), Log(connection, f"{prefix}.control")
    log.send(*range(2_000))
    log.begin(1, 2, 3, partition=1)
    log.abort()
    control.send(*range(100, 110))
    control.send(7, partition=1)
    reader = RangeReader(
        connection.client_settings(), {Topic.FACTS: log.name, Topic.CONTROL: control.name}, patience=60
    )
    wanted = [
        PlannedRange(Topic.FACTS, 0, 5, 9),
        PlannedRange(Topic.FACTS, 1, 0, 4),
        PlannedRange(Topic.CONTROL, 0, 3, 10),
        PlannedRange(Topic.CONTROL, 1, 1, 1),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_consumer, "_MIN_COMPILED_MESSAGES", few)
        for _ in range(20):
            found: dict[PlannedRange, list[int]] = {it: [] for it in wanted}
            for it, part in reader.read(wanted):
                found[it] += map(int, values(part))
            assert found == dict(zip(wanted, [[5, 6, 7, 8], [], [*range(103, 110)], []], strict=True))
    reader.close()


def test_what_lies_behind_ranges_is_not_gone_through_for_the_others(
    connection: KafkaConnection,
    prefix: str,
    consumer: type[NativeConsumer | PythonConsumer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A range that is at its end is fetched no more, whichever comes first; and what comes again comes whole."""
    log = Log(connection, prefix, partitions=12)
    for partition in range(12):
        log.send(*range(3_000), partition=partition)
    reader = RangeReader(connection.client_settings(), {Topic.FACTS: log.name}, patience=60)
    seen = Seen(monkeypatch, consumer)
    for start, size in ((0, 1), (1, 2), (1_000, 40), (0, 1)):
        wanted = [PlannedRange(Topic.FACTS, it, start, start + size) for it in range(12)]
        found: dict[PlannedRange, list[int]] = {it: [] for it in wanted}
        for it, part in reader.read(wanted):
            found[it] += map(int, values(part))
        assert all(of == [*range(start, start + size)] for of in found.values())
    assert seen.count < 12 * 3_000
    reader.close()


@pytest.mark.usefixtures("consumer")
def test_one_of_several_ranges_that_never_comes_raises(connection: KafkaConnection, prefix: str) -> None:
    """Rule 9, whatever the others hold; it is named."""
    log = Log(connection, prefix)
    log.send(0, 1)
    log.send(0, partition=1)
    reader = RangeReader(log.connection.client_settings(), {Topic.FACTS: log.name}, patience=0.5)
    with pytest.raises(Unavailable, match=rf"{log.name}\[1\] from offset 1 to 2 \(unfinished ranges: 1\)"):
        list(reader.read([PlannedRange(Topic.FACTS, 0, 0, 2), PlannedRange(Topic.FACTS, 1, 0, 3)]))
    with pytest.raises(Unavailable, match=rf"{log.name}\[0\] from offset 2 to 8 \(unfinished ranges: 2\)"):
        list(reader.read([PlannedRange(Topic.FACTS, 0, 0, 9), PlannedRange(Topic.FACTS, 1, 0, 3)]))
    reader.close()
