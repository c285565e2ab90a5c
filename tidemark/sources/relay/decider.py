"""Decides, on one connection, what became of each ID: the looks at the database in their order (docs/design.md 4b).

Any number of these may work on one database at once, and stop or be killed between any two steps: what is decided
follows from the database, so they only repeat each other.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidemark.sources import transactions
from tidemark.sources.relay import looks
from tidemark.sources.relay.evidence import StreamEvidence
from tidemark.sources.relay.join import Told
from tidemark.sources.relay.lines import Announced, Lines, edges
from tidemark.sources.relay.looks import BEAT, AppendedFact, AppendStream, Page
from tidemark.streaming.errors import SequenceUnfit
from tidemark.streaming.intervals import EMPTY, Intervals
from tidemark.streaming.postgres_session import Connection

Steps = Generator[str, None, "list[Decided]"]
"""The name of each step before it is taken: between any two of them others may do whatever they like."""


@dataclass(frozen=True, slots=True)
class Decided:
    """IDs of one stream that stand for good, also if the server crashes: `facts` in order, `voids` without a fact."""

    told: Told
    facts: Sequence[AppendedFact]
    voids: Intervals
    announced: Sequence[Announced] = ()

    def without_rows(self) -> "Decided":
        """The same for those who only count and acknowledge."""
        return replace(self, facts=[fact.without_rows() for fact in self.facts])

    def ids(self) -> dict[str, Intervals]:
        """The edges of one ID each, by writer: of facts, and of voids, which the database tells in its own name."""
        found: dict[str, list[int]] = {self.told.own: []}
        for fact in self.facts:
            found.setdefault(self.told.name_of(fact.writer), []).append(fact.id)
        own = {writer: Intervals.from_ids(np.array(ids, np.int64)) for writer, ids in found.items()}
        return own | {self.told.own: own[self.told.own].union(self.voids)}


@dataclass(slots=True)
class _Stream:
    """`lines` where there are several writers; a single one's line is cut at every ID. `ended`: where, by writer."""

    told: Told
    evidence: StreamEvidence
    lines: Lines | None
    acknowledged: Intervals = field(default=EMPTY)
    ended: dict[str, int] = field(default_factory=dict)

    def end(self, writer: str, id: int) -> None:
        """The writer has nothing between the floor and `id`, and joins again before anything beyond it is told."""
        known = self.told.writers.get(writer)
        if known is not None and known.last < id and writer not in self.ended and self.lines is not None:
            self.ended[writer] = id
            self.lines.end(writer)

    def open_to(self, writer: str) -> Intervals:
        """The database's own line passes nothing that anybody may have: so it guards the linear position."""
        return self.evidence.open_to(None if writer == self.told.own else self.told.writers[writer].numbers)


class Decider:
    """Of one connection to the database, which is not in a transaction: with another one everything begins anew.

    `told` have joined. One thread.
    """

    def __init__(self, connection: Connection, told: Iterable[Told]) -> None:
        self._connection = connection
        self._streams = {each.stream.number: _begun(each) for each in told}
        self.outrun = False
        """Streams, writers, epochs or floors are others than these: begin anew."""
        self.strangers: dict[int, dict[str, int]] = {}
        """By number of the stream: writers that have appended and are not known, or have ended; nothing of them lies
        between the floor and the ID."""

    @property
    def open(self) -> list[AppendStream]:
        """Streams with IDs that are given out and not decided."""
        return [each.told.stream for each in self._streams.values() if each.evidence.open]

    @property
    def hurries(self) -> bool:
        """Whether the outbox holds more than the last round could take."""
        return any(each.evidence.unseen for each in self._streams.values())

    @property
    def undecided(self) -> dict[str, int]:
        """By stream: how many IDs are given out and not decided."""
        return {each.told.stream.name: each.evidence.undecided for each in self._streams.values()}

    @property
    def kept(self) -> dict[str, int]:
        """By stream: how many IDs lie above the floor."""
        return {each.told.stream.name: each.evidence.head - each.evidence.floor for each in self._streams.values()}

    @property
    def lines(self) -> int:
        """How many writers a beat tells of, over all streams."""
        return sum(len(each.lines) for each in self._streams.values() if each.lines is not None)

    def round(self, most_bytes: int) -> Steps:
        """Look once at all streams; gives what is decided now, about `most_bytes` of rows at the most."""
        yield "heads"
        heads = {stream.number: head for stream, head in looks.heads(self._connection).items()}
        self.outrun |= heads.keys() != self._streams.keys()
        looked = [each for each in self._streams.values() if self._wants(each, heads)]
        if not looked:
            return []
        if any(heads.get(each.told.stream.number, 0) > each.evidence.head for each in looked):
            yield "end one"
            transactions.end_one(self._connection)
        yield "running"
        running = transactions.running(self._connection)
        held = None
        if any(each.evidence.lingers for each in looked):
            yield "holders"
            held = looks.holders(self._connection, running)
        for each in looked:
            number = each.told.stream.number
            each.evidence.look(heads.get(number, 0), running, None if held is None else held.get(number, frozenset()))
        decided, left = list[Decided](), most_bytes
        for each in looked:
            if left > 0 and (asked := each.evidence.unread()):
                yield "page"
                page = looks.page(self._connection, each.told.stream, asked, left)
                left -= page.bytes
                decided += self._decide(each, asked, page)
            if each.lines is not None and (announced := each.lines.announce(each.open_to)):
                decided.append(Decided(each.told, [], EMPTY, announced))
        if decided:
            yield "durable"
            streams = {each.told.stream for each in decided}
            heads_told = {it.told.stream: it.evidence.head for it in looked if it.told.stream in streams}
            looks.note_told(self._connection, heads_told)
        return decided

    def _wants(self, each: _Stream, heads: dict[int, int]) -> bool:
        head = heads.get(each.told.stream.number)
        if head is None:
            return False  # it was dropped
        if head < each.told.floor:
            name, signed = each.told.stream.name, each.told.stream.towards.signed
            raise SequenceUnfit(
                f"of stream {name}",
                f"it stands at {signed(head)}, and {signed(each.told.floor)} was told",
                f"set it to {signed(each.told.floor)} or beyond: setval",
            )
        return head > each.evidence.head or each.evidence.open

    def _decide(self, each: _Stream, asked: Intervals, page: Page) -> list[Decided]:
        if (page.version, page.floor) != (each.told.version, each.evidence.floor):
            self.outrun = True
            return []
        for fact in page.facts:
            for writer in fact.ends:
                each.end(writer, fact.id)
        names = {each.told.name_of(fact.writer) for fact in page.facts}
        if strangers := names - (each.told.writers.keys() - each.ended.keys()):
            found = {writer: each.ended.get(writer, 0) for writer in strangers}
            self.strangers.setdefault(each.told.stream.number, {}).update(found)
            self.outrun = True
            return []
        voids = each.evidence.read(asked.upto(page.upto), [fact.id for fact in page.facts])
        if not (page.facts or voids):
            return []
        decided = Decided(each.told, page.facts, voids)
        if each.lines is not None:
            for writer, ids in decided.ids().items():
                each.lines.own(writer, ids)
            for fact in page.facts:
                if fact.writer == BEAT:
                    each.lines.beat(fact.id)
        return [decided]

    def beat(self) -> Generator[str]:
        """Have the lines of several writers cut at the head, where one ends below it."""
        for each in self._streams.values():
            if each.lines is not None and each.lines.behind(each.evidence.head):
                yield "beat"
                looks.beat(self._connection, each.told.stream)

    def acknowledged(self, decided: Decided) -> None:
        """Kafka has all of it."""
        each = self._streams[decided.told.stream.number]
        for writer, ids in decided.ids().items():
            each.acknowledged = each.acknowledged.union(ids)
            if each.lines is not None:
                each.lines.acknowledged(writer, ids)
        if each.lines is not None:
            for writer, ids in edges(decided.announced).items():
                each.lines.acknowledged(writer, ids)

    def settle(self) -> Generator[str]:
        """Raise the floors to where everything is in Kafka, and delete the rows below.

        A writer that ended there is to be retired: begin anew.
        """
        for each in self._streams.values():
            floor = each.evidence.floor
            reached = each.acknowledged.reach(floor)
            if each.lines is not None:
                reached = each.lines.floor(reached)
            if reached > floor:
                yield "settle"
                if not looks.raise_floor(self._connection, each.told.stream, each.told.version, floor, reached):
                    self.outrun = True
                    continue
                each.evidence.floor = reached
                each.acknowledged = each.acknowledged.above(reached)
                if each.lines is not None:
                    each.lines.settled(reached)
                self.outrun |= any(id <= reached for id in each.ended.values())


def _begun(told: Told) -> _Stream:
    several = len(told.writers) > 1
    lines = Lines({writer.name: writer.last for writer in told.writers.values()}) if several else None
    return _Stream(told, StreamEvidence(told.floor, several=several), lines)
