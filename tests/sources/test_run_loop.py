"""How often the run loop asks for the topic's limit while a record is too large for the topic. The clock is a fake."""

from collections.abc import Callable
from itertools import accumulate, count, takewhile

import pytest
from prometheus_client import CollectorRegistry

from tidemark.app.stack.processes import LOOPBACK, free_port
from tidemark.common.errors import Unavailable
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.producer import NO_TIME_LIMIT, RecordProducer
from tidemark.sources.run_loop import (
    FIRST_LIMIT_PAUSE_SECONDS,
    LONGEST_LIMIT_PAUSE_SECONDS,
    LoopMetrics,
    OversizedRecords,
)

BEGAN = 1000.0
TICK = 0.5
"""Seconds between two rounds of the loop."""
PAUSES = [FIRST_LIMIT_PAUSE_SECONDS, 5.0, 10.0, 20.0, 40.0, LONGEST_LIMIT_PAUSE_SECONDS, LONGEST_LIMIT_PAUSE_SECONDS]


def producer(max_bytes: int) -> RecordProducer:
    """It never reaches a broker: nothing is sent."""
    return RecordProducer(KafkaConnection(f"{LOOPBACK}:{free_port()}"), "facts", NO_TIME_LIMIT, max_bytes)


@pytest.fixture(scope="module")
def small() -> RecordProducer:
    return producer(10_000)


@pytest.fixture
def oversized() -> OversizedRecords:
    return OversizedRecords(LoopMetrics(CollectorRegistry(), "tidemark_test", "test", ["stream"]).oversized)


def queries(
    oversized: OversizedRecords, make: Callable[[], RecordProducer], began: float, seconds: float
) -> list[float]:
    """The seconds since `began` at which `make` is called in this time, with a round at every tick."""
    times = list[float]()

    def noting() -> RecordProducer:
        times.append(now - began)
        return make()

    for now in takewhile(lambda at: at < began + seconds, count(began, TICK)):
        assert oversized.make_larger_producer(noting, now) is None
    return times


def unreachable() -> RecordProducer:
    raise Unavailable("Kafka", "here", "no")


@pytest.mark.parametrize("answers", ["too small", "unreachable"])
def test_pauses_between_two_queries_for_the_limit_grow_up_to_the_longest(
    oversized: OversizedRecords, small: RecordProducer, answers: str
) -> None:
    """5, 5, 10, 20, 40 s, then every minute, whether the topic stays too small or Kafka does not answer."""
    oversized.add("orders", "shop", 7, 20_000, small, BEGAN)
    make = unreachable if answers == "unreachable" else lambda: small
    assert queries(oversized, make, BEGAN, sum(PAUSES) + TICK) == [*accumulate(PAUSES)]


def test_another_record_that_is_too_large_does_not_shorten_the_pauses(
    oversized: OversizedRecords, small: RecordProducer
) -> None:
    """Records of two streams that come one after the other share the pauses, which begin again once none waits."""
    oversized.add("orders", "shop", 7, 20_000, small, BEGAN)
    assert queries(oversized, lambda: small, BEGAN, 41.0) == [5.0, 10.0, 20.0, 40.0]
    oversized.add("tills", "shop", 3, 30_000, small, BEGAN + 41.0)
    assert queries(oversized, lambda: small, BEGAN + 41.0, 101.0) == [39.0, 99.0]
    oversized.clear()
    assert queries(oversized, lambda: small, BEGAN + 142.0, 200.0) == []
    oversized.add("orders", "shop", 7, 20_000, small, BEGAN + 342.0)
    assert queries(oversized, lambda: small, BEGAN + 342.0, 11.0) == [5.0, 10.0]


def test_the_first_query_after_the_topic_takes_one_of_the_records_gives_a_producer(
    oversized: OversizedRecords, small: RecordProducer
) -> None:
    """One that fits is enough; nothing is asked before the pause is over."""
    oversized.add("orders", "shop", 7, 20_000, small, BEGAN)
    oversized.add("orders", "shop", 8, 90_000, small, BEGAN)
    assert queries(oversized, lambda: small, BEGAN, 12.0) == [5.0, 10.0]
    large = producer(30_000)
    assert oversized.make_larger_producer(lambda: large, BEGAN + 19.5) is None
    assert oversized.make_larger_producer(lambda: large, BEGAN + 20.0) is large
