"""The library with which a service writes facts to its own Postgres, so that each has a stream ID with exact positions.

    with Writer(dsn, "kafka:9092", instance="shop-1", streams=["orders"]) as writer, psycopg.connect(dsn) as connection:
        with writer.transaction(connection) as facts:
            id = facts.append("orders", {"total": 40})
            connection.execute("insert into orders (id, total) values (%s, 40)", [id])

`docs/writer.md` shows the use, docs/design.md 4 says why it is exact.
"""

from tidemark.sources.writer.aio import AsyncFacts, AsyncWriter
from tidemark.sources.writer.sequences import Stream
from tidemark.sources.writer.writer import Facts, Writer
from tidemark.streaming.direction import DirectionName

__all__ = ["AsyncFacts", "AsyncWriter", "DirectionName", "Facts", "Stream", "Writer"]
