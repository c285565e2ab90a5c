"""Batches for tests, told in few words; what is not said is empty."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidemark.sinks.port import Batch
from tidemark.sinks.redis.client import key
from tidemark.streaming.core.effects import NextOffset, ShardEffects, StreamEffects, Summary, WriterAdvance, WriterRow
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.limits import RejectedRecords

NOW = 1_790_000_000_000  # ms; some day in 2026


def advance(writer: str, prev: int, id_: int, **more: int) -> WriterAdvance:
    """All of `(prev, id]` are facts unless `more` says otherwise."""
    evidence = {"facts": 0 if more else abs(id_ - prev), "empty": 0, "unseen": 0, "skipped": 0} | more
    return WriterAdvance(writer=writer, prev=prev, id=id_, oldest=NOW, **({"epoch": 1} | evidence))


def stream(name: str, *advances: WriterAdvance, linear: int = 0, **more: Any) -> StreamEffects:
    """The writers' rows follow from the advances unless `writers` is given."""
    fields: dict[str, Any] = {
        "direction": Direction.BACKWARD if any(it.id < 0 for it in advances) else Direction.FORWARD,
        "linear_prev": 0,
        "allocated_prev": 0,
        "allocated": max([linear, *(it.id for it in advances)], key=abs),
        "advances": list(advances),
        "writers": [WriterRow(it.writer, it.epoch, it.id, is_retired=False) for it in advances],
        "gaps": [],
        "closed": [],
        "late": [],
        "overrides": [],
        "timelines": [],
        "dropped_writers": [],
        "counts": {},
        "summary": Summary(0, 0, None, [], 0, None),
        "state": f"state of {name} at {linear}".encode(),
    }
    return StreamEffects(stream=name, linear=linear, **(fields | more))


def shard(
    *streams: StreamEffects, now: int = NOW, rejected: Sequence[RejectedRecords] = (), offset: int = 0, number: int = 0
) -> ShardEffects:
    progress = [NextOffset("facts", 0, offset)] if offset else []
    return ShardEffects(number, now, list(streams), list(rejected), progress)


def batch(number: int, *streams: StreamEffects, token: int = 1, query: str = "query", **more: Any) -> Batch:
    return Batch(query, number, token, [shard(*streams, **more)])


def rejected(
    topic: str, reason: str, offsets: Iterable[int], partition: int = 0, ids: Iterable[int] = ()
) -> RejectedRecords:
    return RejectedRecords(topic, partition, reason, *(np.array(list(it), "<i8").tobytes() for it in (offsets, ids)))


def lines(path: Path) -> list[Any]:
    """What another process has written so far, one JSON value a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def entries(keys: Any, stream: str = "s") -> list[dict[str, str]]:
    """The list of advances in Redis, oldest first."""
    return [fields for _, fields in keys.xrange(key(stream, "advances"))]
