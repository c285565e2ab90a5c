"""The state machine of one stream: who has joined, what is settled, how far the line is. The heart of Tidemark.

Pure: no Spark, no I/O, no clock of its own; magnitudes only, the sign lives at the edges of the system. Nothing here
raises for what a writer sent: each record is counted in `Changes` as applied, held, duplicate or late, or rejected
with its reason (DESIGN 2, rule 5).

Records come in *stretches*: the edges between two neighbouring JOIN or RETIRE records of the stream (`complete`), then
the marker (`join`, `retire`, `skip`). Inside a stretch the order of arrival does not matter, but for two things that
the offsets of the edges decide: who was first on a new stream, and what came before a writer that never joined.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from streaming.chain import NOTHING, NOWHERE, Chain, Evidence, How
from streaming.effects import Late
from streaming.intervals import EMPTY, Ids, Intervals
from streaming.reasons import Reason
from streaming.runs import Run


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a stream's state may hold; past a bound Tidemark holds, rejects or forgets towards holding (rule 9).

    `pending`: spans per writer; an edge that would add one is rejected. `completed`: intervals above the line; the
    highest are forgotten. `held`: writers that never joined; further ones are rejected. `retired`: retired writers,
    the longest retired are dropped; `retirement` (ms): so long after retiring they are dropped in any case.
    """

    pending: int = 10_000
    completed: int = 10_000
    held: int = 1_000
    retired: int = 10_000
    retirement: int = 7 * 24 * 3600 * 1000


@dataclass(slots=True)
class Writer:
    """A writer that has joined. `late` was settled without its evidence: a completion in there comes too late."""

    epoch: int
    chain: Chain
    retired: int | None = None
    late: Intervals = EMPTY


@dataclass(slots=True)
class Held:
    """An incarnation that has not joined: its edges wait on a chain without a position. `retire`: the ID of its RETIRE."""

    chain: Chain
    since: int
    retire: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of facts whose last row will carry the number: they move nothing."""

    writer: str
    epoch: int
    offsets: Ids
    first_offset: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Who says it: the writer's own record, or an operator (`by`, `why`) through the control topic."""

    writer: str
    epoch: int
    by: str | None = None
    why: str | None = None


@dataclass(slots=True)
class Changes:
    """What a batch did to a stream, collected as it is fed; `now` is the batch's time (ms).

    `touched` maps writers to the Kafka time of their oldest record; `rejected` maps reasons to offsets.
    """

    now: int
    counts: Counter[str] = field(default_factory=Counter)
    touched: dict[str, int] = field(default_factory=dict)
    rejected: list[tuple[Reason, Ids]] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    regressed: list[tuple[str, int, int, int]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def touch(self, writer: str, oldest: int) -> None:
        known = self.touched.get(writer, 0)
        self.touched[writer] = min(known, oldest) if known else oldest

    def reject(self, reason: Reason, offsets: Ids) -> None:
        self.rejected.append((reason, offsets))


@dataclass(slots=True)
class Stream:
    """`direction` is 1 or -1, 0 until the first signed ID; `home` is the Kafka partition that the stream lives in.

    `held` is keyed by writer and epoch. While it holds anything, `line` stays (DESIGN 3).
    """

    direction: int = 0
    home: int | None = None
    line: int = 0
    completed: Intervals = EMPTY
    writers: dict[str, Writer] = field(default_factory=dict)
    held: dict[tuple[str, int], Held] = field(default_factory=dict)

    # -- edges

    def complete(self, runs: Sequence[Run], rows: Sequence[Rows], bounds: Bounds, changes: Changes) -> None:
        """Feed all edges and rows of one stretch."""
        runs = self._of_direction(runs, changes)
        first_seen: dict[tuple[str, int], int] = {}
        for item in (*runs, *rows):
            key = item.writer, item.epoch
            first_seen[key] = min(item.first_offset, first_seen.get(key, item.first_offset))
        strangers = [at for key, at in sorted(first_seen.items(), key=lambda seen: seen[1]) if self._is_stranger(key, at, bounds, changes)]
        for some in rows:
            self._count_rows(some, changes)
        frozen_from = min(strangers, default=None)
        if frozen_from is None or self.held_before(changes):
            ...
