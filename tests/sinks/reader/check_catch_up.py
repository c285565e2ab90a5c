"""How fast a reader with an empty handler catches up on two million facts, and its memory: `pytest -s` on this file."""

import os
import resource
import sys
import threading
import time

import psycopg
import pytest

from tests.sinks.reader.conftest import brisk, service
from tests.sinks.reader.given import Pipeline
from tests.sinks.reader.service import ReadingService
from tidemark.sinks.reader import Positions, Reader

__all__ = ["brisk", "service"]

FACTS = int(os.environ.get("FACTS", "2_000_000"))


@pytest.mark.parametrize("rows", [1000, 10_000])
def test_old_facts_are_read(service: ReadingService, pipeline: Pipeline, sql: psycopg.Connection, rows: int) -> None:
    """Rows a second of wall time and of this process's CPU time, and how much the memory grew in the second half."""
    sql.execute("insert into facts select n, 'w', 0 from generate_series(1, %s) n", (FACTS,))
    sql.execute("create index on facts (stream_id)")
    sql.execute("analyze facts")
    for first in range(0, FACTS, FACTS // 50):
        pipeline.move("w", first, first + FACTS // 50)
    stopping, done, half = threading.Event(), 0, 0
    began, cpu = time.monotonic(), time.process_time()
    with (
        Positions(service.redis, service.dsn) as positions,
        Reader(positions, "s", **service.arguments(stopping=stopping, rows=rows)) as reader,
    ):
        for batch in reader:
            done += len(batch.rows)
            if not half and done > FACTS / 2:
                half = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if done == FACTS:
                stopping.set()
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - half) / 1024
    rates = f"{done / seconds:,.0f} rows/s, {done / used:,.0f} rows/s of CPU"
    sys.stdout.write(f"\n{rows} rows a batch: {rates}, {grown:.0f} MiB grown\n")
    assert done == FACTS
    assert grown < 32
