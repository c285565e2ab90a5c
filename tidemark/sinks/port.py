"""The port for sinks: the protocol of a sink, and the values that the publisher passes to it.

A sink publishes a copy of what Postgres has committed. Postgres itself (`postgres.store`) is not a sink, because it is
the source of truth. The dead letters are not a sink, because they have records and no positions. `redis.mirror` is a
sink. To add one, write a class with this protocol and create it in `app.pipeline.supervisor`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Protocol

from tidemark.streaming.core.effects import ShardEffects, StreamEffects, WriterAdvance
from tidemark.streaming.values.limits import RejectedRecords


@dataclass(frozen=True, slots=True)
class Batch:
    """The effects of a batch.

    Attributes:
        query: the name of the query, one for each start of the pipeline.
        number: the number of the batch in its query.
        token: the token of the lease.
        after: query and number of the batch that Postgres must have applied last; None if Postgres must have applied
            no batch; `...` to skip the check, for batches without a query.
    """

    query: str
    number: int
    token: int
    effects: Sequence[ShardEffects]
    after: tuple[str, int] | EllipsisType | None = ...

    def streams(self) -> Iterator[tuple[ShardEffects, StreamEffects]]:
        return ((shard, stream) for shard in self.effects for stream in shard.streams)

    def rejected(self) -> list[RejectedRecords]:
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
class CommitResult:
    """The outcome of a batch's transaction in Postgres.

    `corrected_advances` and `higher_positions` are by (stream, writer). They have entries only if Postgres differs
    from the batch: Postgres may know a writer that the state has dropped.

    Attributes:
        is_repeat: whether the batch was applied before. If so, this call wrote nothing.
        corrected_advances: advances that were cut to the part that was open; None if no part was open.
        higher_positions: stored positions that are beyond the positions of the batch.
        late_numbers: stream -> the numbers of its late completions, in the order of the batch.
    """

    is_repeat: bool = False
    corrected_advances: dict[tuple[str, str], WriterAdvance | None] = field(default_factory=dict)
    higher_positions: dict[tuple[str, str], int] = field(default_factory=dict)
    late_numbers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RefillResult:
    """The number of streams that lacked data in the sink, and the number of history entries that were copied."""

    streams: int
    entries: int = 0


class Fence(Protocol):
    """The right to publish: the sink's interface to the lease."""

    @property
    def token(self) -> int:
        """The fencing token of this owner. It is higher than the token of every earlier owner."""

    def check(self) -> None:
        """Raise `LeaseLost` if this process knows that another process has the lease. Queries no server."""


class Sink(Protocol):
    """Publishes a copy of Postgres. Created with the `Postgres` to copy and the `Fence` with the token. Thread-safe.

    `tests/sinks/test_contract.py` checks five laws for every sink:

    - monotone: no call moves a visible position towards 0, even if batches are repeated, late or out of order;
    - idempotent: a call that is repeated, after a failure or a crash at any moment, has the effect of one call;
    - fenced: the sink stores the highest token that it has seen with its data, and refuses lower ones; the first
      `LeaseLost` names that token, so that the next owner can choose a higher one at once;
    - isolated: a failure that is caused by the data of one stream is a fault of that stream only;
    - refilled: `check_for_loss` detects a loss of data, and `refill` restores the data from Postgres.

    All methods raise `Unavailable` (call again) and `Refused`. `Unavailable` is for outages only: the caller waits
    without limit.
    """

    @property
    def name(self) -> str:
        """The name in the log and in the labels of metrics."""

    def check(self) -> None:
        """Check the connection and the rights. Called at the start, before the first batch."""

    def publish(self, batch: Batch, committed: CommitResult) -> int:
        """Publish a batch that Postgres has committed.

        Earlier batches may be missing, if their process died after the commit. The sink then refills first, so that
        readers never see an incomplete stream.

        Returns:
            The number of streams that changed for readers.

        Raises:
            LeaseLost: the sink has a higher token. It published nothing of the streams with the higher token.
        """

    def faults(self) -> Mapping[str, str]:
        """Streams that the sink cannot publish, and the problem of each. Queries no server.

        Publishing skips them until a `refill` has retried them. Their number is unbounded.
        """

    def compared_positions(self) -> Mapping[str, tuple[int, int]]:
        """The linear position of each stream in Postgres and in the sink, when a `refill` last compared them.

        The values are from before the refill. Faulty streams are left out. Queries no server.
        """

    def check_for_loss(self) -> bool:
        """Whether the sink may have lost data since the last call; True at the first call. Called every second."""

    def refill(self) -> RefillResult:
        """Compare every stream with Postgres and write what is missing. Readers may read meanwhile.

        Also called periodically, even if `check_for_loss` reports no loss. Raises `LeaseLost`.
        """
