"""Postgres as the sidecar asks it, on threads."""

import asyncio

import pytest

from tests.sinks.given import advance, batch, stream
from tests.sinks.reader.given import Pipeline
from tidemark.app.read_side.postgres_reader import PostgresReader, TopicProgress
from tidemark.common.errors import Unavailable
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.reader.history import History


def test_how_far_the_pipeline_has_read(pipeline: Pipeline, store: Postgres, dsn: str) -> None:
    """The next offset of each partition, and of each stream the highest ID that an earlier record can have named."""
    store.apply(batch(1, stream("s", advance("w", 0, 7), allocated=12), token=pipeline.lease.token, offset=40))
    found = asyncio.run(PostgresReader(store, History(dsn)).topic_progress("facts"))
    assert found == TopicProgress({0: 40}, {"s": 12})


def test_topic_that_was_never_read(store: Postgres, dsn: str) -> None:
    """Nothing is known, so it is read from its start."""
    assert asyncio.run(PostgresReader(store, History(dsn)).topic_progress("facts")) == TopicProgress({}, {})


def test_end_waits_for_threads_that_ask(store: Postgres, dsn: str) -> None:
    """Who asked may be gone, its thread is not: no connection is opened after the end, and nobody may ask any more."""

    async def ask_and_end() -> None:
        postgres_reader = PostgresReader(store, History(dsn))
        asking = asyncio.create_task(postgres_reader.names())
        await asyncio.sleep(0)
        asking.cancel()
        await postgres_reader.aclose()
        with pytest.raises(Unavailable, match="is stopping"):
            await postgres_reader.names()

    asyncio.run(ask_and_end())
