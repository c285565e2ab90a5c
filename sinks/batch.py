"""A batch, as it goes to the sinks, and what Postgres made of it. Values only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemark.streaming.effects import ShardEffects, StreamEffects, WriterAdvance
from tidemark.streaming.model import Rejected


@dataclass(frozen=True, slots=True)
class Batch:
    """What batch `number` of `query` (Spark's id of it, which lives in the checkpoint) did, under the lease `token`."""

    query: str
    number: int
    token: int
    effects: Sequence[ShardEffects]

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
    """What the transaction made of a batch.

    `repeated`: it was applied before, and nothing was written now. `settled` and `positions` (by stream and writer)
    hold only what came out otherwise than the batch says, because a writer that had left the state was known here:
    its advance cut to what was open (None: nothing was), and the position that stands. `late` has the numbers that
    the late completions of a stream were given, in the batch's order.
    """

    repeated: bool = False
    settled: dict[tuple[str, str], WriterAdvance | None] = field(default_factory=dict)
    positions: dict[tuple[str, str], int] = field(default_factory=dict)
    late: dict[str, list[int]] = field(default_factory=dict)
