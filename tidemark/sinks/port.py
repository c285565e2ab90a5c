"""The protocol of a sink, and the values that the publisher passes to a sink.

A sink publishes a copy of what Postgres has committed, such as `redis.mirror` and `positions_topic`. Postgres itself
(`postgres.store`) is not a sink, because Postgres is the source of truth. The dead letters are not a sink, because they
have records and no positions. To add a sink, write a class with this protocol, and create an object of the class in
`app.pipeline.supervisor`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Protocol

from tidemark.streaming.core.effects import ShardEffects, StreamEffects, WriterAdvance
from tidemark.streaming.values.limits import RejectedRecords


@dataclass(frozen=True, slots=True)
class Batch:
    """The computed effects of one batch of records.

    Attributes:
        query: the name of the Spark query. Each start of the pipeline has a query with a new name.
        number: the number of the batch in its query.
        token: the fencing token of the lease.
        effects: the effects of each shard.
        previous_batch: (query, number) of the batch that Postgres must have applied last. None: Postgres must have
            applied no batch. `...` (Ellipsis): no check, for batches without a query.
    """

    query: str
    number: int
    token: int
    effects: Sequence[ShardEffects]
    previous_batch: tuple[str, int] | EllipsisType | None = ...

    def streams(self) -> Iterator[tuple[ShardEffects, StreamEffects]]:
        """Yield the effects of each stream, with the effects of its shard."""
        return ((shard, stream) for shard in self.effects for stream in shard.streams)

    def rejected_records(self) -> list[RejectedRecords]:
        """Return the rejected records of all shards."""
        return [item for shard in self.effects for item in shard.rejected]

    def offsets(self) -> dict[str, dict[int, int]]:
        """Return topic -> partition -> the next offset to read after this batch."""
        offsets: dict[str, dict[int, int]] = {}
        for shard in self.effects:
            for seen in shard.next_offsets:
                topic = offsets.setdefault(seen.topic, {})
                topic[seen.partition] = max(seen.offset, topic.get(seen.partition, 0))
        return offsets


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of a batch's transaction in Postgres.

    `corrected_advances` and `higher_positions` have entries only if Postgres has higher positions than the batch. This
    happens if a writer joins again after the pipeline's state has dropped it: Postgres keeps the position.

    Attributes:
        is_repeat: whether an earlier transaction applied the batch. If so, this transaction wrote nothing.
        corrected_advances: (stream, writer) -> the part of the advance that is beyond the stored position; None if the
            whole advance was already stored.
        higher_positions: (stream, writer) -> the stored position, if it is beyond the position in the batch.
        late_numbers: stream -> the numbers of its late completions in this batch, in the order of the batch.
    """

    is_repeat: bool = False
    corrected_advances: dict[tuple[str, str], WriterAdvance | None] = field(default_factory=dict)
    higher_positions: dict[tuple[str, str], int] = field(default_factory=dict)
    late_numbers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RefillResult:
    """The outcome of a refill.

    Attributes:
        stream_count: the number of streams that lacked data in the sink.
        entry_count: the number of history entries that were copied.
    """

    stream_count: int
    entry_count: int = 0


class Fence(Protocol):
    """The lease as a sink uses it. The owner of the lease may publish."""

    @property
    def token(self) -> int:
        """The fencing token of this process. It is higher than the token of every earlier owner of the lease."""

    def check(self) -> None:
        """Raise `LeaseLost` if this process has noted that its lease is lost. Queries no server."""


class Sink(Protocol):
    """Publishes a copy of the positions in Postgres. Thread-safe.

    The constructor of a sink takes the `Postgres` to copy and the `Fence` with the token. Every sink keeps five laws
    (`tests/sinks/test_contract.py`):

    - monotone: no call moves a visible position towards 0, even if batches are repeated, late or out of order;
    - idempotent: a call that is repeated, after a failure or a crash at any moment, has the effect of one call;
    - fenced: the sink stores the highest token that it has accepted, and refuses lower tokens; the first `LeaseLost`
      names the highest token, so that the next owner can choose a higher token at once;
    - isolated: a failure that is caused by the data of one stream is a fault of this stream only;
    - refilled: `check_for_loss` detects a loss of data, and `refill` restores the data from Postgres.

    Methods that query a server raise `Unavailable` (call again) and `Refused`. They may raise `Unavailable` only for an
    outage, because the caller repeats the call without a limit.
    """

    @property
    def name(self) -> str:
        """The name of the sink in the log and in the labels of metrics."""

    def check(self) -> None:
        """Query the server, so that an error of the address or the login is reported before the first batch."""

    def publish(self, batch: Batch, committed: CommitResult) -> int:
        """Publish a batch that Postgres has committed.

        The sink may lack earlier batches, if a process died between the commit of a batch and the call of this method.
        The sink then refills itself first, so that readers never get an incomplete stream.

        Args:
            batch: the batch.
            committed: the outcome of the batch's transaction in Postgres.

        Returns:
            The number of streams that changed for readers.

        Raises:
            LeaseLost: the sink has a higher token. The sink published nothing of the streams with the higher token.
        """

    def faults(self) -> Mapping[str, str]:
        """Return stream -> problem, for the streams that the sink cannot publish. Queries no server.

        `publish` skips these streams until a `refill` has published them. The number of entries has no limit.
        """

    def compared_positions(self) -> Mapping[str, tuple[int, int]]:
        """Return stream -> (linear position in Postgres, linear position in the sink), as of the last `refill`.

        The values are from before the refill. Streams with a fault, and streams that are not in the sink, are left out.
        Queries no server.
        """

    def check_for_loss(self) -> bool:
        """Query whether the sink may have lost data since the last call. True at the first call.

        The pipeline calls this every second, and calls `refill` if the result is True.
        """

    def refill(self) -> RefillResult:
        """Compare every stream with Postgres, and write what the sink lacks. Readers may read during a refill.

        The pipeline also calls this periodically, even if `check_for_loss` reports no loss. Raises `LeaseLost`.
        """
