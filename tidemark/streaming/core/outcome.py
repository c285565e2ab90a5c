"""What a batch did to one stream, collected while it is fed; `streaming.core.batch` makes effects of it. Magnitudes."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tidemark.streaming.values.intervals import Ids, Intervals
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire.runs import Run

Outcome = Literal["applied", "buffered", "deferred", "duplicate", "late", "batch", "forgotten"]
Why = Literal["skipped", "regressed", "final", "announced"]
"""Why a completion is late: an operator settled its ID, the source went back, the line or another writer had its ID
already, or its own writer had said that it has no fact there."""


RollbackSignal = Literal["position", "database", "start"]
"""What showed that a database went back: a JOIN below what its own writer had completed, another history of the
database, or a start that does not follow the writer's last one."""


@dataclass(frozen=True, slots=True)
class LateRange:
    """Completions in `(prev, id]`, `facts` of them RDATA, that came after the range was settled without them."""

    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: Why


@dataclass(frozen=True, slots=True)
class TimelineBegun:
    """By its JOIN at `id` the writer, whose position is `position`, began timeline `number`; `why` says by what."""

    writer: str
    epoch: int
    id: int
    position: int
    number: int
    why: "RollbackSignal"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Facts refused for one reason: their offsets, ascending, and of each the ID that does not fit; 0 where it is the
    whole record. A record that holds many facts may be here many times.
    """

    reason: Reason
    offsets: Ids
    ids: Ids

    @classmethod
    def whole(cls, reason: Reason, offsets: Ids) -> "Refusal":
        return cls(reason, np.sort(offsets), np.zeros_like(offsets))


@dataclass(slots=True)
class BatchOutcome:
    """`now` is the batch's time (ms). `touched` maps a writer to the Kafka time (ms) of its oldest record.

    `rejected` is about facts; a rejected marker is told by the return value of its method.
    `elsewhere`: the batch also turned away what has no order against the stream's records.
    """

    now: int
    elsewhere: bool = False
    counts: Counter[Outcome] = field(default_factory=Counter)
    touched: dict[str, int] = field(default_factory=dict)
    rejected: list[Refusal] = field(default_factory=list)
    late: list[LateRange] = field(default_factory=list)
    timelines: list[TimelineBegun] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def record_late(self, run: Run, why: Why) -> None:
        """All edges of `run` are completions that come late; nothing else of their writer lies inside them."""
        self.counts["late"] += len(run)
        self.late.append(LateRange(run.writer, run.epoch, run.start, run.end, run.facts, why))

    def record_contradiction(self, run: Run) -> None:
        """All edges of `run` are facts that their writer had denied. Their edges may reach over what came in time."""
        self.counts["late"] += len(run)
        for low, high in Intervals.from_ids(run.ids):
            self.late.append(LateRange(run.writer, run.epoch, low, high, high - low, "announced"))

    def touch(self, writer: str, time: int) -> None:
        self.touched[writer] = min(time, self.touched.get(writer, time))
