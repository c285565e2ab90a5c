"""The port for sinks: the protocol that each keeps, and the values that the publisher hands over.

A sink shows readers a copy of what Postgres has committed. Two neighbours are none: Postgres itself (`postgres.store`),
which decides what is true, and the dead letters, which hold records and no positions. `redis.mirror` is a sink; another
one is a module with a class that keeps this protocol, and a line in `app.pipeline`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Protocol

from tidemark.streaming.core.effects import ShardEffects, StreamEffects, WriterAdvance
from tidemark.streaming.values.limits import Rejected


@dataclass(frozen=True, slots=True)
class Batch:
    """The effects of batch `number` of `query` (the name of a line of batches), under the lease `token`.

    `after` is the batch that must be the last that Postgres applied: that before it, or what the query began with
    (None: none at all; `...`: not checked, for batches that no query has made).
    """

    query: str
    number: int
    token: int
    effects: Sequence[ShardEffects]
    after: tuple[str, int] | EllipsisType | None = ...

    def streams(self) -> Iterator[tuple[ShardEffects, StreamEffects]]:
        return ((shard, stream) for shard in self.effects for stream in shard.streams)

    def rejected(self) -> list[Rejected]:
        return [item for shard in self.effects for item in shard.rejected]

    def offsets(self) -> dict[str, dict[int, int]]:
        """Topic -> partition -> the next offset to read."""
        offsets: dict[str, dict[int, int]] = {}
        for shard in self.effects:
            for seen in shard.progress:
                topic = offsets.setdefault(seen.topic, {})
                topic[seen.partition] = max(seen.offset, topic.get(seen.partition, 0))
        return offsets


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of a batch's transaction in Postgres.

    `repeated`: it was applied before, and nothing was written now. `settled` and `positions` (by stream and writer)
    hold only what came out otherwise than the batch says, because a writer that had left the state was known here:
    its advance cut to what was open (None: nothing was), and the position that stands. `late` has the numbers that
    the late completions of a stream were given, in the batch's order.
    """

    repeated: bool = False
    settled: dict[tuple[str, str], WriterAdvance | None] = field(default_factory=dict)
    positions: dict[tuple[str, str], int] = field(default_factory=dict)
    late: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refilled:
    """Streams of which a sink lacked something, and the entries of their history that were copied."""

    streams: int
    entries: int = 0


class Fence(Protocol):
    """The right to publish, as a sink sees the lease."""

    @property
    def token(self) -> int:
        """Higher than that of every owner before."""

    def check(self) -> None:
        """Raise `LeaseLost` once it is known that somebody else has the lease. Cheap; asks no server."""


class Sink(Protocol):
    """Made with the `Postgres` that it copies from and the `Fence` under which it writes. Any thread may call.

    `tests/sinks/test_contract.py` holds every sink to five laws:

    - monotone: no call moves a position that readers see towards 0, whatever is published again, late or out of order;
    - idempotent: a call that is repeated, after a failure or a crash at any moment, leaves what one call leaves;
    - fenced: it remembers the highest token it has seen where it keeps its data, and refuses lower ones; the first
      `LeaseLost` names that highest token, so that the next owner need not climb there;
    - isolated: what one stream's data there make impossible is a fault of that stream, and none of the others;
    - refilled: whatever it lost, `refill` brings back out of Postgres, and `lost` finds out that this is needed.

    All methods raise `Unavailable` (call again) and `Refused`. `Unavailable` is for outages alone: it is waited out
    without end.
    """

    @property
    def name(self) -> str:
        """In the log, and as a label of the metrics."""

    def check(self) -> None:
        """Return if it lets us in: called at the start, rather than to find out at the first batch."""

    def publish(self, batch: Batch, committed: Committed) -> int:
        """Show a batch that Postgres has committed; returns the count of streams that changed for readers.

        Earlier batches may be missing (their process died between Postgres and here): then it refills first, so that
        readers never see half of a stream. Raises `LeaseLost`, having shown nothing of the stream in question.
        """

    def faults(self) -> Mapping[str, str]:
        """Streams that it could not show by a fault of their own, each with what was said; asks nobody.

        They are left out until a `refill` has tried them again. Any number of streams may be among them.
        """

    def compared(self) -> Mapping[str, tuple[int, int]]:
        """The linear position of each stream in Postgres, and the one shown here, when a `refill` last compared them:
        before it mended anything. Without streams that are not shown; asks nobody."""

    def lost(self) -> bool:
        """Whether it may lack what was published since the last call; True at the first one. Called every second."""

    def refill(self) -> Refilled:
        """Compare every stream with Postgres and write what is missing, while readers keep reading.

        Also called from time to time when nothing seems lost. Raises `LeaseLost`.
        """
