"""The writers of a stream, joined or held, and how an epoch begins. Pure; `streaming.stream` decides when.

The functions change the writers, the line and the `Changes` that they are given. What a JOIN or RETIRE settles has no
record of its own: its evidence is the marker's (docs/design.md 3).
"""

from dataclasses import dataclass

from tidemark.streaming.chain import Chain, How
from tidemark.streaming.changes import Changes, LateRange, Regress
from tidemark.streaming.intervals import EMPTY, Ids, Intervals
from tidemark.streaming.linear import LinearPosition
from tidemark.streaming.model import NOTHING, Evidence

Incarnation = tuple[str, int]
"""A writer's name and epoch."""


@dataclass(slots=True)
class WriterState:
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
class HeldWriter:
    """An incarnation that has not joined, since when (ms), and the ID of its RETIRE, if it sent one."""

    chain: Chain
    since: int
    retire: int | None = None
    doubt: bool = False


@dataclass(frozen=True, slots=True)
class HeldRows:
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


def begin(
    writers: dict[str, WriterState],
    held: dict[Incarnation, HeldWriter],
    line: LinearPosition,
    mark: Mark,
    changes: Changes,
) -> tuple[WriterState, int | None]:
    """Start the epoch of a JOIN. Gives the writer, and the ID of a RETIRE that waited for this JOIN.

    What earlier epochs completed up to the JOIN stays as evidence; what they left open there is settled by it.
    What they completed beyond it was taken back with the writer's database (docs/design.md 3): it is late, and IDs that
    were complete beyond the JOIN may come again, so that the line forgets them and waits for them.
    """
    writer = writers.setdefault(mark.writer, WriterState(mark.epoch, Chain()))
    chain, position = writer.chain, writer.chain.position
    taken_back = [(writer.epoch, span) for span in chain.cut_above(mark.id)]
    retire, early = None, None
    for incarnation in sorted(key for key in held if key[0] == mark.writer and key[1] <= mark.epoch):
        before = held.pop(incarnation)
        if incarnation[1] < mark.epoch:
            taken_back.extend((incarnation[1], span) for span in before.chain.cut_above(mark.id))
        else:
            retire, early = before.retire, before.chain
            taken_back.extend((mark.epoch, span) for span in before.chain.within(mark.id, position))
        chain.adopt(before.chain)
        writer.doubt |= before.doubt
    chain.declare_empty(writer.late.upto(mark.id))  # what was skipped there may come of the epoch that ends here only
    writer.epoch, writer.retired, writer.late, writer.regressed, writer.again = mark.epoch, None, EMPTY, 0, None
    if mark.id < position:
        writer.late, writer.regressed = Intervals.of([(mark.id, position)]), position
        writer.again = Chain(mark.id)
        if early is not None:
            writer.again.adopt(early)
    if taken_back or mark.id < position:
        changes.regressed.append(Regress(mark.writer, mark.epoch, mark.id, position))
        changes.counts["forgotten"] += line.forget_above(mark.id)
    for of_epoch, span in taken_back:
        late = LateRange(mark.writer, of_epoch, span.prev, span.id, span.evidence.facts, "regressed")
        changes.late.append(late)
    settle(writer, 0, mark, "joined", changes)
    writer.doubt = False
    return writer, retire


def settle(writer: WriterState, prev: int, mark: Mark, how: How, changes: Changes) -> Intervals:
    """Settle what is open in `(prev, mark.id]`; gives it. What an operator settles is late from then on."""
    open_ = Intervals.of(writer.chain.missing(prev, mark.id))
    refused = mark.id if writer.doubt else writer.chain.refused
    for low, high in open_:
        evidence = mark.evidence(low, high, refused)
        writer.chain.settle(low, high, evidence, 0, how, changes.now)
        if evidence.empty:
            writer.chain.declare_empty(Intervals.of([(high - evidence.empty, high)]))
    if writer.again is not None:
        for low, high in writer.again.missing(prev, mark.id):
            writer.again.settle(low, high, NOTHING, 0, how, changes.now)
        writer.caught_up()
    if mark.forced:
        writer.late = writer.late.union(open_)
    changes.touch(mark.writer, mark.time)
    return open_
