"""Very many IDs through one stream, synthetic: compaction and positions alone, in this process, and its memory."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click
import msgspec
import numpy as np
import psutil

from tests.bench.table import mib, rate, table
from tests.bench.whole import WrongResult
from tests.bench.workload import Completions, Rendering, Shape, WritersAtWork
from tidemark.streaming.core import codec
from tidemark.streaming.core.batch import apply_batch
from tidemark.streaming.core.store import States
from tidemark.streaming.ingest.compact import MAX_FACTS, compact
from tidemark.streaming.ingest.record_batch import PlannedRange, RecordBatch
from tidemark.streaming.values.limits import Bounds
from tidemark.streaming.wire.records import Topic
from tidemark.streaming.wire.runs import Packet

_TOPIC = "facts"
_AT_ONCE = 2_000  # as streaming.ingest.ranges has them
_packets = msgspec.msgpack.Decoder(Packet)
_SHAPE = Shape(streams=1, writers=8)


@dataclass(frozen=True, slots=True)
class FlatPlan:
    records: int = 100_000_000
    batch: int = 250_000


class LoneShard:
    """The one shard of the query, without Spark."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._key = stream.encode()
        self._states: dict[str, bytes] = {}
        self._next = 0

    def feed(self, values: list[bytes]) -> int:
        """One batch; returns how many records it applied."""
        wanted = PlannedRange(Topic.FACTS, 0, self._next, self._next + len(values))
        read = ((wanted, part) for part in self._fetched(values))
        compacted = compact([([wanted], read)], keys=[0], names={Topic.FACTS: _TOPIC}, max_facts=MAX_FACTS)
        packets = [_packets.decode(data) for out in compacted for data in out.column("packet").to_pylist()]
        effects = apply_batch(0, States(self._states), packets, self._next, Bounds())
        return sum(stream.counts.get("applied", 0) for stream in effects.streams)

    @property
    def stored(self) -> bytes:
        return self._states[self._stream]

    def _fetched(self, values: list[bytes]) -> Iterator[RecordBatch]:
        for first in range(0, len(values), _AT_ONCE):
            part = values[first : first + _AT_ONCE]
            numbers = np.arange(self._next, self._next + len(part))
            yield RecordBatch.of([self._key] * len(part), part, numbers, numbers)
            self._next += len(part)


def run(plan: FlatPlan) -> dict[str, Any]:
    """Making the records is not counted into the time; what it holds is counted into the memory."""
    stream = _SHAPE.stream(0)
    shard, play, rendering = LoneShard(stream), WritersAtWork(_SHAPE), Rendering(_SHAPE)
    process = psutil.Process()
    seconds, applied = 0.0, 0
    rows: list[dict[str, float]] = []

    def feed(values: list[bytes]) -> None:
        nonlocal seconds, applied
        began = time.perf_counter()
        applied += shard.feed(values)
        seconds += time.perf_counter() - began

    feed([value for _, value in rendering.joins()])
    for edges, begun in _steps(play, plan):
        feed(rendering.values(edges))
        if begun * 10 // plan.records > len(rows):
            rows.append(
                {
                    "records": applied,
                    "rss": process.memory_info().rss,
                    "state": len(shard.stored),
                    "per_second": applied / seconds,
                }
            )
            click.echo(f"{applied} records, {mib(rows[-1]['rss'])}", err=True)
    _check(shard.stored, play)
    return {"records": applied, "batch": plan.batch, "rows": rows}


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = figures["rows"]
    growth = rows[-1]["rss"] - rows[0]["rss"]
    return [
        f"{figures['records']:,} records of one stream with 8 writers, in batches of {figures['batch']:,}, from JSON to"
        " encoded state in one process without Spark and Kafka. The rate is that of one core.",
        "",
        *table(
            ["records so far", "resident", "state", "records/s"],
            [
                [f"{row['records']:,}", mib(row["rss"]), f"{row['state']:,.0f} bytes", rate(row["per_second"])]
                for row in rows
            ],
        ),
        "",
        f"From the first row to the last the memory changed by {growth / (1 << 20):+.1f} MiB.",
    ]


def _steps(play: WritersAtWork, plan: FlatPlan) -> Iterator[tuple[Completions, int]]:
    """Completions, and how many transactions had begun."""
    begun = 0
    while begun < plan.records:
        count = min(plan.batch, plan.records - begun)
        begun += count
        yield play.step(count), begun
    yield play.finish(), begun


def _check(stored: bytes, play: WritersAtWork) -> None:
    stream = codec.decode(stored)
    found = {name: writer.position for name, writer in stream.writers.items()}, stream.linear.position
    wanted = play.positions(0), play.linear(0)
    if found != wanted:
        raise WrongResult(f"the state stands at {found}, the workload ends at {wanted}")
