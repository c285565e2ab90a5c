"""Who writes to a stream, and what they say besides edges. Pure; what it means is decided in `positions`."""

from dataclasses import dataclass

from tidemark.streaming.chain import Chain, Evidence
from tidemark.streaming.intervals import EMPTY, Ids, Intervals

Incarnation = tuple[str, int]
"""A writer's name and epoch."""


@dataclass(slots=True)
class Writer:
    """A writer that has joined; `retired` is the batch time (ms) at which it retired.

    `late` was settled without the writer's evidence: a completion in there is late. Up to `regressed` that is so
    because the source went back to an earlier state; beyond, an operator skipped it. `again` follows the IDs that such
    a source hands out a second time, until it is at `regressed`: the writer's position passed them long ago, but the
    line must not pass one that is in flight again. `doubt`: records of the stream could not be read, perhaps its own.
    """

    epoch: int
    chain: Chain
    retired: int | None = None
    late: Intervals = EMPTY
    regressed: int = 0
    again: Chain | None = None
    doubt: bool = False

    @property
    def floor(self) -> int:
        """All IDs of the writer up to here are complete, those included that came again."""
        return self.chain.position if self.again is None else self.again.position

    def caught_up(self) -> None:
        """Stop following IDs that come again once the last of them did."""
        if self.again is not None and self.again.position >= self.regressed:
            self.again = None


@dataclass(slots=True)
class Held:
    """An incarnation that has not joined, since when (ms), and the ID of its RETIRE, if it sent one."""

    chain: Chain
    since: int
    retire: int | None = None
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of facts whose last row will carry the number: they move nothing, but they show that their writer lives."""

    writer: str
    epoch: int
    offsets: Ids
    first_offset: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A JOIN or RETIRE of one incarnation at `id`. `forced`: by an operator, without the writer's evidence."""

    writer: str
    epoch: int
    id: int
    time: int
    unseen: bool = False
    forced: bool = False

    def evidence(self, low: int, high: int, refused: int) -> Evidence:
        """How the open range `(low, high]` counts that this marker settles.

        Its writer speaks of what it sent, not of what was taken: up to `refused` there may be facts.
        """
        width = high - low
        if self.forced:
            return Evidence(skipped=width)
        unseen = width if self.unseen else min(max(refused - low, 0), width)
        return Evidence(unseen=unseen, empty=width - unseen)
