"""A process that publishes advances at an even rate, by the sinks that the pipeline publishes with.

Prints a line of JSON when it is ready, begins at a line on its input, and at the end prints when each batch went to
Redis and where every writer stands.
"""

import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from tests.bench.crowd.talk import say
from tidemark.app import logs, settings
from tidemark.sinks.port import Batch
from tidemark.sinks.postgres.lease import Lease, LeaseConfig
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.redis.mirror import Mirror
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.streaming.core import codec
from tidemark.streaming.core.chain import Chain
from tidemark.streaming.core.effects import ShardEffects, StreamEffects, Summary, WriterAdvance, WriterRow
from tidemark.streaming.core.stream import StreamState
from tidemark.streaming.core.writer_table import Writers
from tidemark.streaming.core.writers import LinearPosition, WriterState
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import NO_INTERVALS

BATCHES_PER_SECOND = 5  # as a pipeline under light traffic has


class Load(msgspec.Struct, frozen=True):
    """Each batch moves every writer of every stream to its next ID. They hold no facts: rows would have to be waited
    for, which is not what is measured."""

    dsn: str
    redis: str
    streams: int
    writers: int
    seconds: float

    @property
    def advances_per_second(self) -> int:
        return self.streams * self.writers * BATCHES_PER_SECOND

    def positions(self, batch: int) -> dict[str, int]:
        """Where the writers of any stream stand after `batch` batches, counted from 1."""
        return {f"writer-{place}": (batch - 1) * self.writers + place for place in range(1, self.writers + 1)}


class PublishedLoad(msgspec.Struct, frozen=True):
    """`sent`: batch -> when it was handed to Redis (s since 1970). `late` is by how much the last one was (s)."""

    sent: dict[int, float]
    positions: dict[str, int]
    late: float


def stream_name(number: int) -> str:
    return f"stream-{number:03}"


def main() -> None:
    logs.configure(settings.load(log_level="warning"))  # to standard error
    load = msgspec.json.decode(sys.argv[1], type=Load)
    with (
        Postgres(PostgresConfig(load.dsn)) as postgres,
        Redis(RedisConfig(load.redis)) as redis,
        Lease.acquire(load.dsn, LeaseConfig("bench"), threading.Event()) as lease,
    ):
        mirror = Mirror(postgres, redis, lease)
        sent: dict[int, float] = {}
        batches = _batches(load, lease.token)
        for number, batch in batches:
            if number == 2:  # all streams are there
                say({})
                sys.stdin.readline()
                began = time.monotonic()
            if number > 1:
                time.sleep(max(0.0, began + (number - 2) / BATCHES_PER_SECOND - time.monotonic()))
            applied = postgres.apply(batch)
            sent[number] = time.time()
            mirror.publish(batch, applied)
        late = time.monotonic() - began - (number - 2) / BATCHES_PER_SECOND
    say(PublishedLoad(sent, load.positions(number), late))


def _batches(load: Load, token: int) -> Iterator[tuple[int, Batch]]:
    for number in range(1, round(load.seconds * BATCHES_PER_SECOND) + 2):
        effects = _effects(load, number)
        yield number, Batch("bench", number, token, [ShardEffects(0, int(time.time() * 1000), effects, [], [])])


def _effects(load: Load, number: int) -> list[StreamEffects]:
    now = int(time.time() * 1000)
    after, before = load.positions(number), load.positions(number - 1) if number > 1 else {}
    line = max(after.values())
    writers = {name: WriterState(1, Chain(id)) for name, id in after.items()}
    encoded = codec.encode(StreamState(Direction.FORWARD, 0, LinearPosition(line, NO_INTERVALS), Writers(writers)))
    advances = [
        WriterAdvance(name, 1, before.get(name, 0), id, 0, id - before.get(name, 0), 0, 0, now)
        for name, id in after.items()
    ]
    rows = [WriterRow(name, 1, id, is_retired=False) for name, id in after.items()]
    return [
        StreamEffects(
            stream=stream_name(place),
            direction=Direction.FORWARD,
            linear_prev=max(before.values(), default=0),
            linear=line,
            allocated_prev=max(before.values(), default=0),
            allocated=line,
            advances=advances,
            writers=rows,
            gaps=[],
            closed=[],
            late=[],
            overrides=[],
            timelines=[],
            dropped_writers=[],
            counts={"applied": load.writers},
            summary=Summary(0, 0, None, [], 0, None),
            state=encoded,
        )
        for place in range(load.streams)
    ]


if __name__ == "__main__":
    main()
