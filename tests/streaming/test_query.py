"""What a Python worker of the query keeps from one task to the next."""

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
import pandas as pd
import pytest

from tests.streaming.builders import STREAM, Shard, join, packets, rdata, sent
from tidemark.streaming.core import effects
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.engine import query
from tidemark.streaming.engine.query import advance_shard, pack_by_shard
from tidemark.streaming.values.limits import Bounds


@dataclass
class SentSeeds:
    """As Spark gives them to a task: anew where the task before it had none."""

    seeds: dict[int, bytes]
    reads: list[str]
    name: str

    @property
    def value(self) -> dict[int, bytes]:
        self.reads.append(self.name)
        return self.seeds


@dataclass
class EmptyState:
    """Of a shard before the first batch of its line."""

    exists: bool = False
    kept: list[tuple[bytes]] = field(default_factory=list)

    def getCurrentProcessingTimeMs(self) -> int:  # noqa: N802 - Spark's name
        return 1000

    def update(self, values: tuple[bytes]) -> None:
        self.kept.append(values)


def test_a_worker_reads_the_seeds_of_a_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 8: a batch of a few records does not read the states of a million streams again; those of another line of
    batches are others."""
    monkeypatch.setattr(query, "freeze", lambda: None)  # this process is no worker
    reads: list[str] = []
    first, second = uuid4().hex, uuid4().hex

    def advanced(line: str, at: int) -> StreamEffects:
        shard = Shard()
        shard.feed(join("w", at))
        given: Any = SentSeeds(pack_by_shard(shard.states, 1), reads, line)
        packet = msgspec.msgpack.encode(packets(sent([rdata("w", at + 1, epoch=1)], 1))[0])
        frames, state = iter([pd.DataFrame({"packet": [packet]})]), EmptyState()
        spark: Any = state
        began = time.time_ns() // 1_000_000
        (frame,) = advance_shard((0,), frames, spark, shards=1, seeds=given, bounds=Bounds(), query=line)
        done = effects.decode(frame["effects"][0])
        assert began <= done.computation_start <= time.time() * 1000
        (stream,) = done.streams
        assert stream.stream == STREAM
        assert len(state.kept) == 1
        return stream

    assert [advanced(line, at).linear for line, at in ((first, 4), (first, 4), (second, 8), (second, 8))] == [
        5,
        5,
        9,
        9,
    ]
    assert reads == [first, second]
