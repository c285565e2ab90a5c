"""Batches in the driver, with a publisher that has no sinks and results of Spark that are there already."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame

from tests.waiting import eventually
from tidemark.app.batches import LET_GO_AFTER, Batches
from tidemark.app.board import Board
from tidemark.app.tracing import untraced
from tidemark.sinks.dead_letters import DeadLettered
from tidemark.sinks.publisher import Published, Publisher
from tidemark.streaming.checkpoint import Seed
from tidemark.streaming.decode import no_collection
from tidemark.streaming.errors import Stopping

LONG = 3600.0


class _Empty:
    def collect(self) -> list[Any]:
        return []


class _Quick:
    def publish(self, _: str, number: int, *__: object) -> Published:
        return Published(number, repeated=False, streams=0, dead_lettered=DeadLettered(), published_at=0.0, seconds={})


EMPTY = cast("DataFrame", _Empty())


def batches(interval: float) -> Batches:
    publisher = cast("Publisher", _Quick())
    return Batches(publisher, Board(streams=1, writers=1), Seed("first", None, 16, {}), {}, interval, untraced)


@contextmanager
def called(begun: Batches, number: int) -> Iterator[threading.Thread]:
    """Spark's thread, which gives a batch and waits until it is taken."""
    thread = threading.Thread(target=begun, args=(EMPTY, number))
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def test_the_next_batch_waits_and_this_one_does_not() -> None:
    """A batch is published at once; Spark is held until the interval is over, and let go by whoever ends."""
    paced = batches(LONG)
    with called(paced, 0) as spark:
        eventually(lambda: paced.published == 1)
        assert spark.is_alive()
        assert paced.finish(60)
    with pytest.raises(Stopping):
        paced(EMPTY, 1)
    assert paced.published == 1


def test_without_an_interval_nothing_waits() -> None:
    """One batch after the other, as quickly as they come."""
    quick = batches(0)
    for number in range(100):
        quick(EMPTY, number)
    assert quick.published == 100


class _Cycle(_Empty):
    """As pyspark makes them: its objects know each other."""

    def __init__(self) -> None:
        self.itself = self


def test_what_spark_made_of_a_batch_is_let_go() -> None:
    """However seldom Python looks for cycles: each of them keeps a plan in the JVM, which would fill up."""
    with no_collection():
        quick = batches(0)
        made = []
        for number in range(3 * LET_GO_AFTER):
            batch = _Cycle()
            made.append(weakref.ref(batch))
            quick(cast("DataFrame", batch), number)
        assert sum(batch() is not None for batch in made) <= LET_GO_AFTER
