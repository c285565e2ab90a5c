"""The events that a follower hands over, and the place of a follower. Values only.

IDs have the sign of their stream: negative on a backward stream. A range `(prev, id]` excludes `prev` and includes
`id`, and `id` is farther from 0. Times are in milliseconds since 1970.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemark.sinks.reader.token import Token
from tidemark.streaming.values.limits import Evidence


@dataclass(frozen=True, slots=True)
class Advance:
    """The position of a writer moved over the range `(prev, id]`: all IDs that the writer reserved there are complete.

    Attributes:
        writer: the name of the writer.
        epoch: the epoch of the writer.
        prev: the position of the writer before the move, which is the `id` of the writer's previous event.
        id: the position of the writer after the move.
        evidence: how many IDs of the range `(evidence_prev, id]` were settled in which way.
        evidence_prev: where the stored advance begins. Nearer to 0 than `prev` if the follower began inside the stored
            advance. Then the counts of `evidence` are upper bounds for `(prev, id]`.
        linear: the linear position after the pipeline's batch with the advance.
        batch: the number of the pipeline's batch.
        time: the time of the pipeline's batch, in milliseconds since 1970.
    """

    writer: str
    epoch: int
    prev: int
    id: int
    evidence: Evidence
    evidence_prev: int
    linear: int
    batch: int
    time: int

    @property
    def proven_empty(self) -> bool:
        """Whether the range certainly has no facts of the writer, so that a reader need not read the table."""
        return self.evidence.proves_empty


@dataclass(frozen=True, slots=True)
class Reread:
    """The range `(prev, id]` of a writer is complete, but the evidence of the range is not available: read the table.

    Attributes:
        writer: the name of the writer. None: the range has the IDs of all writers except `besides`, because a writer
            may have joined and retired before the follower could read its name.
        prev: the `id` of the writer's previous event. If `writer` is None: the linear position before this event.
        id: the last ID of the range. If `writer` is None: a linear position.
        besides: names of writers whose IDs are not part of the range; empty if `writer` is not None.
    """

    writer: str | None
    prev: int
    id: int
    besides: frozenset[str] = frozenset()

    @property
    def proven_empty(self) -> bool:
        """Always False: the range may have facts."""
        return False


@dataclass(frozen=True, slots=True)
class LinearMove:
    """The linear position moved over the range `(prev, id]`: the range is complete for all writers.

    Attributes:
        prev: the linear position before the move.
        id: the linear position after the move.
        advances: the known advances that overlap the range. An advance that crosses an end of the range is also part of
            the neighbouring move.
        known: whether `advances` has all advances of the range. If False, the range may have facts that no advance
            counts.
    """

    prev: int
    id: int
    advances: tuple[Advance, ...]
    known: bool

    @property
    def proven_empty(self) -> bool:
        """Whether the range certainly has no facts of any writer, so that a reader need not read the table."""
        return self.known and all(advance.proven_empty for advance in self.advances)


@dataclass(frozen=True, slots=True)
class Late:
    """IDs of a writer in the range `(prev, id]` completed late: the range had been settled without these IDs.

    The range has no ID of the writer that completed in time.

    Attributes:
        number: the number of the late completion. The numbers of a stream ascend.
        writer: the name of the writer.
        epoch: the epoch of the writer that completed the IDs.
        prev: the range begins after this ID.
        id: the last ID of the range.
        facts: the number of facts that completed late; 0 if only empty IDs did.
        why: why the completion is late. `skipped`: an operator had settled the range, or the epoch never joined.
            `regressed`: the source database was restored and may have given the IDs out again, or an operator's
            override was taken back. `final`: the linear position had passed the ID, or another writer had completed the
            ID. `announced`: the writer had declared that it has no facts in the range.
        batch: the number of the pipeline's batch.
        time: the time of the pipeline's batch, in milliseconds since 1970.
    """

    number: int
    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: str
    batch: int
    time: int


@dataclass(frozen=True, slots=True)
class MissingLateCompletions:
    """Some late completions are no longer among the advances in Redis. Tidemark's Postgres may still have these.

    Attributes:
        after: the number of the late completion before the first missing one.
        number: the number of the last missing late completion.
    """

    after: int
    number: int


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The progress of a reader, for metrics. `Reader(observe=...)` gets one after each commit, and when all is read.

    Attributes:
        reader: the name of the reader. With partitions, the name ends with the partition, such as `mailer[3/8]`.
        stream: the name of the stream.
        position: the token up to which the reader has read all rows and committed their effects.
        lag_ids: the number of IDs from the linear part of `position` to the linear position that the reader read last.
        rows: the number of rows of the committed batch; 0 if no batch was committed.
        is_late: whether the committed batch had late facts.
        seconds: seconds from the handover of the committed batch to its commit; 0 if no batch was committed.
        time_outs: the number of attempts to process the batch that failed because the server ended the transaction: the
            service was slower than the server's time limit.
    """

    reader: str
    stream: str
    position: Token
    lag_ids: int
    rows: int
    is_late: bool
    seconds: float
    time_outs: int


Event = Advance | Reread | LinearMove | Late | MissingLateCompletions


@dataclass(frozen=True, slots=True)
class Place:
    """What one follower or reader of a stream has received. In contrast, a `Token` states what is complete.

    A service may store a place in any form, and continue from it with `follow(since=place)`.

    Attributes:
        linear: the position up to which the IDs of each writer without an entry in `positions` were handed over.
        positions: writer -> the position up to which the writer's IDs were handed over. May be below `linear`. Empty in
            linear mode.
        late: the number of the last late completion that was handed over; 0 if there was none.
        is_settled: whether the place includes the rows up to `linear` that no known writer wrote. A table has such rows
            if it is older than its stream. False is always safe: these rows are then read again. Ignored by `==`.
    """

    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    is_settled: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def after(cls, token: Token, late: int = 0) -> "Place":
        """Return the place of a reader that has everything up to `token`, and late completions up to number `late`."""
        return cls(token.linear, dict(token.positions), late)
