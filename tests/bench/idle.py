"""Very many streams of which hardly any moves: a start from Postgres, memory, and what a batch costs.

The streams are at rest, with two writers each, and were last heard of longer ago than history is kept. They are laid
into Postgres with the states that the state machine gives them. A pipeline without a checkpoint starts from there
twice: with an empty Redis, which it fills, and with that Redis, which it compares.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any

import click
import psutil
import psycopg
import redis
from confluent_kafka import Producer

from tests.bench.site import BenchSite
from tests.bench.table import mib, table, verdict
from tests.bench.topic import create
from tests.bench.usage import KINDS, sampled
from tests.bench.whole import Whole, WrongResult, not_begun
from tests.streaming.builders import Record, Shard, packets, sent
from tidemark.streaming.core.effects import StreamEffects
from tidemark.streaming.values.limits import shard_of

_FEW = 1000
_VARIANTS, _PARTITIONS, _SHARDS = 1000, 4, 16
_WRITERS = "writer-1", "writer-2"
_ASLEEP = 1_790_000_000_000  # ms since 1970 of their last records
_LONGEST = 900.0  # seconds that a start may take
_WANTED_SECONDS, _WANTED_BYTES = 60.0, 1024.0


@dataclass(frozen=True, slots=True)
class IdlePlan:
    """Compared with a pipeline of 1 000 streams. `seconds` of traffic, `rate` records a second, each of another
    stream."""

    streams: int = 1_000_000
    seconds: float = 20.0
    rate: float = 5.0


def run(site: BenchSite, plan: IdlePlan) -> dict[str, Any]:
    rows = {str(streams): _measured(site, plan, streams) for streams in (_FEW, plan.streams)}
    return {"seconds": plan.seconds, "rate": plan.rate, "rows": rows}


def _measured(site: BenchSite, plan: IdlePlan, streams: int) -> dict[str, Any]:
    topic, dsn = site.fresh("idle"), site.database()
    create(site.connection, topic, _PARTITIONS)
    began = time.monotonic()
    _lay(dsn, streams)
    click.echo(f"{streams} streams are in Postgres after {time.monotonic() - began:.0f} s", err=True)
    facts, redis_url = _Facts(site, topic, streams), site.emptied_redis()
    found: dict[str, Any] = {}
    # With an empty Redis the first move is shown among the first that are filled in, the second once all are.
    for name, moves in (("fill", 2), ("start", 1)):
        running = not_begun(site, topic, _PARTITIONS, dsn, redis_url, {})
        try:
            found[name] = _started(running, facts, moves)
            if name == "start":
                running.server.await_answer()
                found |= _at_work(running, plan, facts)
        finally:
            running.server.stop()
        click.echo(f"{streams} streams, {name}: {found}", err=True)
    return found


def _started(running: Whole, facts: "_Facts", moves: int) -> dict[str, float]:
    """From the start of the process to so many moves in Redis, one after the other: seconds, core time (s) of the
    driver and of all, and the most memory that the driver had."""
    fact = facts.send()
    began = time.time()
    running.server.spawn()
    with sampled(running.pid, 0.5) as samples:
        _await(running, fact)
        for _ in range(1, moves):
            _await(running, facts.send())
        driver = psutil.Process(running.pid).cpu_times()
    ended = time.time()
    return {
        "seconds": ended - began,
        "driver_cpu": driver.user + driver.system,
        "cpu": samples.taken[-1].cpu,
        "peak": samples.peak("driver"),
    }


def _at_work(running: Whole, plan: IdlePlan, facts: "_Facts") -> dict[str, Any]:
    with sampled(running.pid, 0.5) as samples:
        _send(plan, facts)  # in which each worker reads its seeds
        before, began = running.batches(), time.time()
        fact = _send(plan, facts)
        _await(running, fact)
        ended, after = time.time(), running.batches()
        memory = _memory(running.pid)
    return {
        "batches": after - before,
        "batch_cpu": samples.cpu(began, ended) / (after - before),
        "memory": memory,
    }


def _send(plan: IdlePlan, facts: "_Facts") -> "_Fact":
    fact, began = facts.send(), time.monotonic()
    for number in range(1, int(plan.seconds * plan.rate)):
        time.sleep(max(0.0, began + number / plan.rate - time.monotonic()))
        fact = facts.send()
    return fact


def _memory(pid: int) -> dict[str, int]:
    """Bytes."""
    driver, found = psutil.Process(pid), dict.fromkeys(KINDS, 0)
    found["driver"] = driver.memory_full_info().pss
    for child in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a worker that was let go
            found["jvm" if child.name() == "java" else "workers"] += child.memory_full_info().pss
    return found


@dataclass(frozen=True, slots=True)
class _Fact:
    stream: str
    line: int
    """Of the stream, once the fact is counted."""


class _Facts:
    """One for each stream, one after the other, from a stream's first writer."""

    def __init__(self, site: BenchSite, topic: str, streams: int) -> None:
        self._producer = Producer(site.connection.producer_settings())
        self._topic = topic
        # Those next to each other in a list of all would be of one chunk.
        self._numbers: Iterator[int] = (number * 619 % streams for number in count())

    def send(self) -> _Fact:
        number = next(self._numbers)
        prev, id = _ids(number)[0], _ids(number)[1] + 1
        value = {"kind": "RDATA", "stream": _name(number), "writer": _WRITERS[0], "epoch": 1, "prev": prev, "id": id}
        self._producer.produce(
            self._topic, json.dumps(value | {"row": {}}), _name(number), partition=number % _PARTITIONS
        )
        if self._producer.flush(10):
            raise RuntimeError("Kafka did not take a record")
        return _Fact(_name(number), id)


def _await(running: Whole, fact: _Fact) -> None:
    deadline = time.monotonic() + _LONGEST
    with redis.Redis.from_url(running.redis_url) as client:
        while int(client.get(f"tidemark:{{{fact.stream}}}:linear") or 0) != fact.line:
            _ = running.pid
            if time.monotonic() > deadline:
                raise WrongResult(f"no position after {_LONGEST:.0f} s: {running.server.log_tail(3)}")
            time.sleep(0.05)


def _name(number: int) -> str:
    return f"room-{number:07}"


def _ids(number: int) -> tuple[int, int]:
    """Where the two writers of a stream stand."""
    first = 10_000 + 1_000 * (number % _VARIANTS)
    return first, first + 1


def _lay(dsn: str, streams: int) -> None:
    """Write the streams as the pipeline would have left them."""
    variants, then = _variants(), datetime.fromtimestamp(_ASLEEP / 1000, UTC)
    with psycopg.connect(dsn, autocommit=True) as sql, sql.cursor() as cursor:
        with cursor.copy(
            "copy tidemark.streams (stream, linear, head, direction, shard, state, updated_at) from stdin"
        ) as to:
            for number in range(streams):
                name, it = _name(number), variants[number % _VARIANTS]
                to.write_row((name, it.linear, it.allocated, it.direction, shard_of(name, _SHARDS), it.state, then))
        with cursor.copy(
            "copy tidemark.stream_positions (stream, writer, epoch, position, retired, updated_at) from stdin"
        ) as to:
            for number in range(streams):
                for row in variants[number % _VARIANTS].writers:
                    to.write_row((_name(number), row.writer, row.epoch, row.position, row.is_retired, then))
        cursor.execute("vacuum analyze")


def _variants() -> list[StreamEffects]:
    records = [
        record
        for number in range(_VARIANTS)
        for record in (
            *(Record("JOIN", it, 1, id=0, stream=_name(number), partition=number % _PARTITIONS) for it in _WRITERS),
            *(
                Record("RDATA", it, 1, 0, id, stream=_name(number), partition=number % _PARTITIONS)
                for it, id in zip(_WRITERS, _ids(number), strict=True)
            ),
        )
    ]
    done = Shard(now=_ASLEEP).feed_packets(packets(sent(records, _ASLEEP - len(records))))
    return sorted(done.streams, key=lambda it: it.stream)


def render(figures: Mapping[str, Any]) -> list[str]:
    rows = figures["rows"]
    few, many = rows.values()
    streams = max(map(int, rows))
    more = {kind: (many["memory"][kind] - few["memory"][kind]) / streams for kind in KINDS}
    ours = more["driver"] + more["workers"]
    return [
        "Streams at rest with 2 writers each. A pipeline starts from Postgres, without a checkpoint, with a record for"
        " one of them waiting: time to its move in Redis, core time of the driver, and of it with its JVM and its"
        f" workers. Then {figures['rate']:g} records a second, each of another stream: memory, of which what processes"
        " share is divided among them, and core time a batch.",
        "",
        *table(
            [
                "streams",
                *("start", "driver", "all", "driver's peak"),
                *("Redis filled", "driver", "all"),
                *KINDS,
                "a batch",
            ],
            [
                [
                    f"{int(name):,}",
                    *_times(row["start"]),
                    mib(row["start"]["peak"]),
                    *_times(row["fill"]),
                    *(mib(row["memory"][kind]) for kind in KINDS),
                    f"{row['batch_cpu'] * 1000:.0f} ms",
                ]
                for name, row in rows.items()
            ],
        ),
        "",
        f"A start with {streams:,} streams: {verdict(many['start']['seconds'], _WANTED_SECONDS, ' s')}. A stream more"
        f" takes {more['driver']:,.0f} bytes of the driver and {more['workers']:,.0f} of the workers together:"
        f" {verdict(ours, _WANTED_BYTES, ' bytes')}; of the JVM {more['jvm']:,.0f}.",
    ]


def _times(start: Mapping[str, float]) -> list[str]:
    return [f"{start[name]:.1f} s" for name in ("seconds", "driver_cpu", "cpu")]
