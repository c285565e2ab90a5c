"""What one batch did to one stream, collected while the records are applied. Magnitudes only.

`streaming.core.batch` makes the effects of the batch from it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tidemark.streaming.values.intervals import Ids, Intervals
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire.runs import Run

Outcome = Literal["applied", "buffered", "deferred", "duplicate", "late", "batch", "forgotten"]
"""How a record, or an edge of a RUN, is counted. `batch` is one of several rows of a fact. `forgotten` counts completed
IDs that were dropped at the bound."""

Why = Literal["skipped", "regressed", "final", "announced"]
"""Why a completion is late: an operator had settled the ID; the database was restored; the ID was final, because the
linear position had passed it or another writer had completed it; or the writer had declared that it has no fact there.
"""

RollbackSignal = Literal["position", "database", "start"]
"""What shows that a database was restored: a JOIN below what its own writer had completed, another history of the
database, or a start that does not follow the writer's last start."""


@dataclass(frozen=True, slots=True)
class LateRange:
    """Late completions in `(prev, id]`, of which `facts` are facts."""

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: Why


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """A JOIN began a timeline.

    Attributes:
        writer: the writer that joined.
        id: IDs above may be given out again.
        position: the writer's position at that time.
        number: number of the new timeline.
        why: what showed that the database was restored.
    """

    writer: str
    epoch: int
    id: int
    position: int
    number: int
    why: RollbackSignal


@dataclass(frozen=True, slots=True)
class Refusal:
    """Edges or records that are rejected for one reason.

    Attributes:
        offsets: Kafka offsets, ascending. A record with many rejected edges occurs as often.
        ids: for each offset the ID of the rejected edge; 0 if the whole record is rejected.
    """

    reason: Reason
    offsets: Ids
    ids: Ids

    @classmethod
    def whole(cls, reason: Reason, offsets: Ids) -> "Refusal":
        """Reject whole records."""
        return cls(reason, np.sort(offsets), np.zeros_like(offsets))


@dataclass(slots=True)
class BatchOutcome:
    """What a batch did to a stream.

    Attributes:
        now: time (ms) of the batch.
        elsewhere: True if the batch also rejected records that have no order against the stream's other records.
        counts: number of records by outcome.
        touched: for each writer with records in the batch, the Kafka time (ms) of its oldest record.
        rejected: rejected facts. A rejected marker is the return value of `StreamState.apply_marker`.
        late: late completions.
        timelines: timelines that began.
        dropped: names of retired writers that left the state.
    """

    now: int
    elsewhere: bool = False
    counts: Counter[Outcome] = field(default_factory=Counter)
    touched: dict[str, int] = field(default_factory=dict)
    rejected: list[Refusal] = field(default_factory=list)
    late: list[LateRange] = field(default_factory=list)
    timelines: list[TimelineStart] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def record_late(self, run: Run, why: Why) -> None:
        """Count all edges of `run` as late. The run must not contain other edges of its writer."""
        self.counts["late"] += len(run)
        self.late.append(LateRange(run.writer, run.epoch, run.start, run.end, run.facts, why))

    def record_contradiction(self, run: Run) -> None:
        """Count facts that their writer had declared not to exist as late. Their edges may overlap other edges."""
        self.counts["late"] += len(run)
        for low, high in Intervals.from_ids(run.ids):
            self.late.append(LateRange(run.writer, run.epoch, low, high, high - low, "announced"))

    def touch(self, writer: str, time: int) -> None:
        """Note a record of `writer` with the Kafka time `time` (ms)."""
        self.touched[writer] = min(time, self.touched.get(writer, time))
