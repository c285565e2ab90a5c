"""The events that a follower hands over, and the place of a follower. Values only.

IDs are signed. Times are the batch times of the pipeline, in milliseconds since 1970.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemark.sinks.reader.token import Token
from tidemark.streaming.values.limits import Evidence


@dataclass(frozen=True, slots=True)
class Advance:
    """The position of `writer` moved over `(prev, id]`. `prev` is where the last event of the writer ended.

    Attributes:
        evidence: how the IDs of `(evidence_prev, id]` were settled, the whole stored advance. `evidence_prev` is below
            `prev` if the reader began inside that range; then the counts are upper bounds for `(prev, id]`.
        linear: the linear position after the batch of the advance.
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
        """Whether the range certainly has no facts: a reader of the table finds no rows."""
        return self.evidence.proves_empty


@dataclass(frozen=True, slots=True)
class Reread:
    """`(prev, id]` of `writer` is complete, but its evidence is no longer available: read the table.

    If `writer` is None, the event is about every writer except those in `besides`, up to the linear position `id`. A
    writer may have joined and retired before this reader could see its name.
    """

    writer: str | None
    prev: int
    id: int
    besides: frozenset[str] = frozenset()

    @property
    def proven_empty(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LinearMove:
    """The linear position moved over `(prev, id]`.

    Attributes:
        advances: the advances that overlap the range. An advance across an end of the range is in two moves.
        known: whether `advances` are all advances of the range, each with its evidence. If not, the range may have
            facts that no advance counts.
    """

    prev: int
    id: int
    advances: tuple[Advance, ...]
    known: bool

    @property
    def proven_empty(self) -> bool:
        """Whether the range certainly has no facts of any writer: a reader of the table finds no rows."""
        return self.known and all(advance.proven_empty for advance in self.advances)


@dataclass(frozen=True, slots=True)
class Late:
    """Late completions in `(prev, id]` of `writer`: the range had been settled without them. Each is handed over once.

    Attributes:
        number: ascends with each late completion of the stream.
        why: `skipped`: an operator skipped the range. `regressed`: the source database was restored and gave these IDs
            out again. `final`: the linear position had passed the ID, or another writer had completed it. `announced`:
            their writer had declared the range empty.

    The range holds no ID of `writer` that was completed in time.
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
class LateLost:
    """Redis no longer lists the late completions with numbers in `(after, number]`. Tidemark's Postgres may still have
    them.
    """

    after: int
    number: int


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The progress that a reader reports after each commit, and whenever it has read everything: see
    `Reader(observe=...)`.

    Attributes:
        reader: the name of the reader.
        stream: the name of the stream.
        position: the position up to which the reader has read and committed.
        lag_ids: the number of IDs from `position` to the position up to which the stream is complete, as far as the
            reader knows.
        rows: rows of the committed batch; 0 without a batch.
        is_late: the batch had late facts.
        seconds: seconds from the handover of the batch to its commit.
        timed_out: how often the server had ended the transaction of this batch before, because the handler was too
            slow.
    """

    reader: str
    stream: str
    position: Token
    lag_ids: int
    rows: int
    is_late: bool
    seconds: float
    timed_out: int


Event = Advance | Reread | LinearMove | Late | LateLost


@dataclass(frozen=True, slots=True)
class Place:
    """What a follower has handed over: a value that may be stored in any form. A token states what is complete; a place
    states what one reader has received.

    Attributes:
        linear: the place of every writer that has no entry in `positions`.
        positions: by writer; an entry may be below `linear`. Empty in linear mode.
        late: the number of the last late completion.
        is_settled: whether a reader of a table also has the rows up to `linear` that no known writer wrote. A table has
            such rows if it is older than its stream. False is always safe: the range is read again.
    """

    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    is_settled: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def after(cls, token: Token, late: int = 0) -> "Place":
        """The place of a reader that has everything up to `token`, and the late completions up to number `late`."""
        return cls(token.linear, dict(token.positions), late)
