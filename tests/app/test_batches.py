"""Batches in the driver, with a publisher that has no sinks and results of Spark that are there already."""

import weakref
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame

from tidemark.app.batches import LET_GO_AFTER, Batches
from tidemark.app.board import Board
from tidemark.app.tracing import untraced
from tidemark.sinks.dead_letters import DeadLettered
from tidemark.sinks.publisher import Published, Publisher
from tidemark.streaming.checkpoint import Seed
from tidemark.streaming.collection import no_collection
from tidemark.streaming.errors import Stopping


class _Empty:
    def collect(self) -> list[Any]:
        return []


class _Quick:
    def publish(self, _: str, number: int, *__: object) -> Published:
        return Published(number, repeated=False, streams=0, dead_lettered=DeadLettered(), published_at=0.0, seconds={})


EMPTY = cast("DataFrame", _Empty())


def batches() -> Batches:
    publisher = cast("Publisher", _Quick())
    return Batches(publisher, Board(streams=1, writers=1), Seed("first", None, 16, {}), {}, untraced)


def test_who_ends_lets_no_batch_begin() -> None:
    """What was handed over is published; the next one is Spark's to give again."""
    ending = batches()
    ending(EMPTY, 0)
    assert ending.finish(60)
    with pytest.raises(Stopping):
        ending(EMPTY, 1)
    assert ending.published == 1


class _Cycle(_Empty):
    """As pyspark makes them: its objects know each other."""

    def __init__(self) -> None:
        self.itself = self


def test_what_spark_made_of_a_batch_is_let_go() -> None:
    """However seldom Python looks for cycles: each of them keeps a plan in the JVM, which would fill up."""
    with no_collection():
        quick = batches()
        made = []
        for number in range(3 * LET_GO_AFTER):
            batch = _Cycle()
            made.append(weakref.ref(batch))
            quick(cast("DataFrame", batch), number)
        assert sum(batch() is not None for batch in made) <= LET_GO_AFTER
