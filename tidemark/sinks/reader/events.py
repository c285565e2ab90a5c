"""Events, which a follower hands over, and a follower's place among them. Values only.

IDs are signed; times are the pipeline's batch times (ms since 1970).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemark.sinks.reader.token import Token
from tidemark.streaming.values.limits import Evidence


@dataclass(frozen=True, slots=True)
class Advance:
    """The position of `writer` moved over `(prev, id]`; `prev` is where the writer's last event ended.

    `evidence` is of `(claimed, id]`. That is the same range, but where the reader stood in the middle of it: then the
    counts are upper bounds for `(prev, id]`. `linear` is the linear position after the batch that made the advance.
    """

    writer: str
    epoch: int
    prev: int
    id: int
    evidence: Evidence
    claimed: int
    linear: int
    batch: int
    time: int

    @property
    def proven_empty(self) -> bool:
        """Nothing was written there: who reads the table for it finds nothing."""
        return self.evidence.proves_empty


@dataclass(frozen=True, slots=True)
class Reread:
    """Completed IDs `(prev, id]` of `writer` whose evidence is gone: read the table for them.

    Without a `writer`: those of every writer but the ones in `besides`, up to the linear position `id`. A writer may
    have come and gone while nobody followed, and no list tells of it any more.
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

    `advances` are those that touch the range; one across an end of it is in two lines. `known` tells whether they are
    all that there are, each with its evidence: else there may be facts that none of them counts.
    """

    prev: int
    id: int
    advances: tuple[Advance, ...]
    known: bool

    @property
    def proven_empty(self) -> bool:
        """Nothing was written there, by whomever: who reads the table for it finds nothing."""
        return self.known and all(advance.proven_empty for advance in self.advances)


@dataclass(frozen=True, slots=True)
class Late:
    """Completions in `(prev, id]` of `writer` that came after the range was settled without them; see `why`:
    `skipped` by an operator; the source `regressed` (its database was restored and gave these IDs out again); `final`:
    the linear position had passed the ID, or another writer had completed it; `announced` as empty by their own writer.

    `number` ascends; each is handed over once. The range holds no ID of `writer` that was completed in time.
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
    """Late completions numbered `(after, number]` are not listed any more: Tidemark's Postgres would know them."""

    after: int
    number: int


Event = Advance | Reread | LinearMove | Late | LateLost


@dataclass(frozen=True, slots=True)
class Place:
    """A plain value, to be stored as you like. It says more than a token: what was handed over, and not what is true.

    Each writer stands at its entry in `positions`, which may lie below `linear`; a writer without one stands at
    `linear`. `late` is the number of the last late completion. In linear mode `positions` is empty.

    `is_settled`: a reader of a table has the rows up to `linear` of writers that Tidemark does not know too. A table
    that is older than its stream has such rows. False is always safe: the range is read, again if need be.
    """

    linear: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    is_settled: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def after(cls, token: Token, late: int = 0) -> "Place":
        """The place of a reader of all that `token` stands for, and of late completions up to number `late`."""
        return cls(token.linear, dict(token.positions), late)
