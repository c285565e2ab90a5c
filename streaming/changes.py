"""What a batch did to one stream, collected while it is fed. Magnitudes; `streaming.advance` turns it into effects."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tidemark.streaming.intervals import Ids
from tidemark.streaming.reasons import Reason

Outcome = Literal["applied", "held", "duplicate", "late", "batch", "forgotten"]
Why = Literal["skipped", "regressed"]


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
class Regress:
    """The writer joined at `id`, below its `position`."""

    writer: str
    epoch: int
    id: int
    position: int


@dataclass(slots=True)
class Changes:
    """`now` is the batch's time (ms). `touched` maps a writer to the Kafka time (ms) of its oldest record.

    `rejected` holds offsets of facts, by reason; a rejected marker is told by the return value of its method.
    """

    now: int
    counts: Counter[Outcome] = field(default_factory=Counter)
    touched: dict[str, int] = field(default_factory=dict)
    rejected: list[tuple[Reason, Ids]] = field(default_factory=list)
    late: list[LateRange] = field(default_factory=list)
    regressed: list[Regress] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def touch(self, writer: str, time: int) -> None:
        self.touched[writer] = min(time, self.touched.get(writer, time))
