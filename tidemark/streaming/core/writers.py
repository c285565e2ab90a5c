"""The writers of a stream, joined or held, and how an epoch begins. Pure; `streaming.core.stream` decides when.

The functions change the writers and the `BatchOutcome` that they are given. What a JOIN or RETIRE settles has no
record of its own: its evidence is the marker's (docs/design.md 3).
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace

from tidemark.streaming.core.chain import NO_POSITION, Chain, How, Moves, Span
from tidemark.streaming.core.outcome import BatchOutcome, LateRange
from tidemark.streaming.values.intervals import EMPTY, Ids, Intervals
from tidemark.streaming.values.limits import NOTHING, Bounds, Evidence
from tidemark.streaming.wire.records import ANY_WRITER
from tidemark.streaming.wire.runs import UNBOUNDED, Marker

Incarnation = tuple[str, int]
"""A writer's name and epoch."""

OVERFLOW_SLOT: Incarnation = (ANY_WRITER, 0)
"""All that never joined and were turned away at the bound, as one: held until an operator retires `*`."""


@dataclass(slots=True)
class WriterState:
    """A writer that has joined; `retired` is the batch time (ms) at which it retired.

    `chain` is that of the stream's timeline: where the database went back, it begins anew below what was `published`,
    and the line goes by it, while the position stands until the chain has passed it. A completion in `late` is late, up
    to `published` because that was passed before, beyond because an operator skipped it; then it is late no more. So
    what is settled and in `late` rests on an operator's word alone. `timeline` is the one that it joined last, and
    `start` the token of that start. `joined` is the evidence of its epoch's JOIN (`timelines.evidence_of`), 0 if it is
    not known. `seen` is the time (ms) of the batch that read its newest record, 0 if none was noted.
    """

    epoch: int
    chain: Chain
    retired: int | None = None
    late: Intervals = EMPTY
    published: int = 0
    timeline: int = 1
    start: str | None = None
    seen: int = 0
    joined: int = 0
    _told: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._told = self.position

    @property
    def position(self) -> int:
        return max(self.chain.position, self.published)

    def take(self) -> Moves:
        """What happened to the chain since the last `take`, with the move of the position."""
        moves = self.chain.take()
        # Counts of a span that was published in part are upper bounds, and none is above the width of what moved.
        evidence = moves.evidence.at_most(self.position - self._told)
        moves = replace(moves, prev=self._told, id=self.position, evidence=evidence)
        self._told = self.position
        return moves

    def go_back(self, limit: int, name: str, changes: BatchOutcome) -> None:
        """IDs beyond `limit` may be given out again. What was completed beyond it and not published is late."""
        record_rolled_back(self.epoch, self.chain.cut_above(limit), self.late, name, changes)
        if self.chain.position > limit:
            self.published = max(self.published, self.chain.position)
            self.chain.begin_again(limit)
        self.late = self.late.upto(limit)
        if self.published > limit:
            self.late = self.late.union(Intervals.of([(limit, self.published)]))

    @property
    def reach(self) -> int:
        """The highest ID that is settled by more than an operator's word."""
        if not len(self.late):
            return self.chain.reach
        own = self.chain.settled().difference(self.late)
        return int(own.highs[-1]) if len(own) else 0

    def reopen(self, id: int, now: int) -> bool:
        """Open again, at `now` (ms), what beyond `id` an operator alone has settled; gives whether there was any. What
        the position has passed stays published, and is late when it comes.
        """
        forced = self.chain.settled().common(self.late.above(id))
        if not len(forced):
            return False
        self.published = self.position
        self.chain.reopen(forced, now)
        self.late = self.late.upto(max(id, self.published))
        return True


@dataclass(slots=True)
class UnjoinedWriter:
    """An incarnation that has not joined, since when (ms), the ID of its RETIRE, if it sent one, and the time (ms)
    of the batch that read its newest record.
    """

    chain: Chain
    since: int
    retire: int | None = None
    seen: int = 0


class UnjoinedWriters(MutableMapping[Incarnation, UnjoinedWriter]):
    """Those that have not joined, of whatever writer and of one."""

    def __init__(self, held: Mapping[Incarnation, UnjoinedWriter] | None = None) -> None:
        self._all: dict[Incarnation, UnjoinedWriter] = {}
        self._epochs: dict[str, set[int]] = {}
        self.update(held or {})

    def of(self, name: str) -> list[Incarnation]:
        """By epoch, ascending."""
        return [(name, epoch) for epoch in sorted(self._epochs.get(name, ()))]

    def __getitem__(self, incarnation: Incarnation) -> UnjoinedWriter:
        return self._all[incarnation]

    def __setitem__(self, incarnation: Incarnation, held: UnjoinedWriter) -> None:
        name, epoch = incarnation
        self._all[incarnation] = held
        self._epochs.setdefault(name, set()).add(epoch)

    def __delitem__(self, incarnation: Incarnation) -> None:
        name, epoch = incarnation
        del self._all[incarnation]
        self._epochs[name].remove(epoch)
        if not self._epochs[name]:
            del self._epochs[name]

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def place(
    held: UnjoinedWriters, incarnation: Incarnation, bounds: Bounds, changes: BatchOutcome
) -> UnjoinedWriter | None:
    """Where the records of an incarnation wait that has not joined; None where the bound leaves no place."""
    if incarnation not in held and len(held) - (OVERFLOW_SLOT in held) >= bounds.unjoined:
        return None
    return held.setdefault(incarnation, UnjoinedWriter(Chain(NO_POSITION), changes.now))


def discard_unjoined(held: UnjoinedWriters, incarnation: Incarnation, changes: BatchOutcome) -> int:
    """Hold it no more: what it completed is late. Gives how far what was refused of it reaches."""
    chain = held.pop(incarnation).chain
    for span in chain.pending:
        changes.late.append(LateRange(*incarnation, span.prev, span.id, span.evidence.facts, "skipped"))
    return chain.refused


@dataclass(frozen=True, slots=True)
class PartialRows:
    """Rows of facts whose last row will carry the number: they move nothing, but they show that their writer lives.

    Of one that has not joined they are like facts that were refused: their number may never come.
    """

    writer: str
    epoch: int
    offsets: Ids
    first_offset: int

    @property
    def reach(self) -> int:
        return UNBOUNDED


def begin(
    writers: MutableMapping[str, WriterState],
    held: UnjoinedWriters,
    marker: Marker,
    refused: int,
    changes: BatchOutcome,
) -> tuple[WriterState, int | None]:
    """Start the epoch of a JOIN. Gives the writer, and the ID of a RETIRE that waited for this JOIN.

    `refused` is how far records reach that were turned away and may be of a writer that nobody knew. The JOIN answers
    for all that was turned away of earlier epochs, but not for what came of its own epoch before it, and not for what
    has no order against it or cannot be told from others.

    What earlier epochs completed up to `marker.no_reuse_below` stays as evidence; what they left open up to the JOIN is
    settled by it. What they completed beyond was taken back with the writer's database (docs/design.md 3): it is late.
    """
    writer = writers.setdefault(marker.writer, WriterState(marker.epoch, Chain(refused=refused)))
    writer.go_back(marker.no_reuse_below, marker.writer, changes)
    writer.chain.deferred.clear()
    retire, refused = None, 0
    for incarnation in [it for it in held.of(marker.writer) if it[1] <= marker.epoch]:
        before = held.pop(incarnation)
        if incarnation[1] < marker.epoch:
            record_rolled_back(
                incarnation[1], before.chain.cut_above(marker.no_reuse_below), EMPTY, marker.writer, changes
            )
        else:
            retire, refused, writer.chain.deferred = before.retire, before.chain.refused, before.chain.deferred
            for low, high in writer.late.above(marker.id):
                record_rolled_back(marker.epoch, before.chain.within(low, high), EMPTY, marker.writer, changes)
        writer.chain.adopt(before.chain, writer.published)
    # What was skipped there may come of the epoch that ends here only.
    writer.chain.declare_empty(writer.late.upto(marker.id))
    writer.epoch, writer.retired = marker.epoch, None
    writer.late = writer.late.above(marker.id)
    settle(writer, 0, marker, "joined", changes)
    if not changes.elsewhere and OVERFLOW_SLOT not in held:
        writer.chain.refused = refused
    return writer, retire


def record_rolled_back(
    epoch: int, spans: Iterable[Span], forced: Intervals, writer: str, changes: BatchOutcome
) -> None:
    """What an earlier timeline completed, and nobody was told of, is late; nobody completed what was `forced`. There is
    nothing to tell of what holds no fact for certain.
    """
    for span in spans:
        for low, high in forced.missing(span.prev, span.id):
            evidence = span.evidence.at_most(high - low)
            if evidence.facts or evidence.unseen:
                changes.late.append(LateRange(writer, epoch, low, high, evidence.facts, "regressed"))


def _evidence(marker: Marker, low: int, high: int, refused: int) -> Evidence:
    """The evidence of the open range `(low, high]` that `marker` settles.

    The writer knows what it sent, but not what was rejected: IDs up to `refused` may hold facts.
    """
    width = high - low
    if marker.is_override:
        return Evidence(skipped=width)
    unseen = width if marker.unseen else min(max(refused - low, 0), width)
    return Evidence(unseen=unseen, empty=width - unseen)


def settle(writer: WriterState, prev: int, marker: Marker, how: How, changes: BatchOutcome) -> Intervals:
    """Settle what is open in `(prev, marker.id]`; gives it. What an operator settles is late from then on.

    What was published before needs no evidence: it was told then.
    """
    open_ = Intervals.of(writer.chain.missing(prev, marker.id))
    for low, high in open_.upto(writer.published):
        writer.chain.settle(low, high, NOTHING, 0, how, changes.now)
    for low, high in open_.above(writer.published):
        evidence = _evidence(marker, low, high, writer.chain.refused)
        writer.chain.settle(low, high, evidence, 0, how, changes.now)
        if evidence.empty:
            writer.chain.declare_empty(Intervals.of([(high - evidence.empty, high)]))
    if marker.is_override:
        writer.late = writer.late.union(open_)
    changes.touch(marker.writer, marker.time)
    return open_
