"""Decides, on one connection, what became of each ID: the looks at the database in their order (docs/design.md 4b).

Any number of these may work on one database at once, and stop or be killed between any two steps: what is decided
follows from the database, so they only repeat each other.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidemark.common.errors import SequenceUnfit
from tidemark.common.postgres_session import Connection
from tidemark.sources import transactions
from tidemark.sources.relay import queries, sequences
from tidemark.sources.relay.epochs import StreamEpoch
from tidemark.sources.relay.evidence import StreamEvidence
from tidemark.sources.relay.queries import BEAT, AppendedFact, AppendStream, Page
from tidemark.sources.relay.sequences import StrayRowQuery, StrayRows, StreamSnapshot
from tidemark.sources.relay.writer_chains import EmptyRange, WriterChains, edges
from tidemark.streaming.values.intervals import EMPTY, Intervals

Steps = Generator[str, None, "list[Decision]"]
"""The name of each step before it is taken: between any two of them others may do whatever they like."""

PAGES_AT_ONCE = 500
"""Streams that are read in one round: what they hold is sent before others are read, also by a relay that is killed
every few seconds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """IDs of one stream that stand for good, also if the server crashes: `facts` in order, `voids` without a fact.

    `emptied` have no row and were published before the database went back: nothing more of them is to come.
    """

    stream_epoch: StreamEpoch
    facts: Sequence[AppendedFact]
    voids: Intervals
    announced: Sequence[EmptyRange] = ()
    emptied: Intervals = EMPTY

    def without_rows(self) -> "Decision":
        """The same for those who only count and acknowledge."""
        return replace(self, facts=[fact.without_rows() for fact in self.facts])

    def ids(self) -> dict[str, Intervals]:
        """The edges of one ID each, by writer: of facts, and of voids, which the database tells in its own name."""
        found: dict[str, list[int]] = {self.stream_epoch.own: []}
        for fact in self.facts:
            found.setdefault(self.stream_epoch.name_of(fact.writer), []).append(fact.id)
        own = {writer: Intervals.from_ids(np.array(ids, np.int64)) for writer, ids in found.items()}
        return own | {self.stream_epoch.own: own[self.stream_epoch.own].union(self.voids).union(self.emptied)}

    def rows(self) -> Intervals:
        """The IDs that have a row in the outbox."""
        return Intervals.from_ids(np.array([fact.id for fact in self.facts], np.int64))


@dataclass(slots=True)
class _Stream:
    """`lines` where there are several writers; a single one's line is cut at every ID. `ended`: where, by writer.
    `problem`: why the stream is held.
    """

    stream_epoch: StreamEpoch
    evidence: StreamEvidence
    lines: WriterChains | None
    acknowledged: Intervals = field(default=EMPTY)
    rows_sent: Intervals = field(default=EMPTY)
    problem: SequenceUnfit | None = None
    ended: dict[str, int] = field(default_factory=dict)

    def end(self, writer: str, id: int) -> None:
        """The writer has nothing between the floor and `id`, and joins again before anything beyond it is told."""
        known = self.stream_epoch.writers.get(writer)
        if known is not None and known.last < id and writer not in self.ended and self.lines is not None:
            self.ended[writer] = id
            self.lines.end(writer)

    def open_to(self, writer: str) -> Intervals:
        """The database's own line passes nothing that anybody may have: so it guards the linear position."""
        return self.evidence.open_to(
            None if writer == self.stream_epoch.own else self.stream_epoch.writers[writer].numbers
        )


class Decider:
    """Of one connection to the database, which is not in a transaction: with another one everything begins anew.

    `stream_epochs` have joined. One thread.
    """

    def __init__(self, connection: Connection, stream_epochs: Iterable[StreamEpoch]) -> None:
        self._connection = connection
        self._strays = StrayRowQuery()
        self._paged = self._settled = 0
        """Numbers of the streams whose pages were read, and whose floors were raised last: the next ones follow."""
        self._streams = {each.stream.number: _begun(each) for each in stream_epochs}
        self.is_outdated = False
        """Streams, writers, epochs or floors are others than these: begin anew."""
        self.unknown_writers: dict[int, dict[str, int]] = {}
        """By number of the stream: writers that have appended and are not known, or have ended; nothing of them lies
        between the floor and the ID."""

    @property
    def open(self) -> list[AppendStream]:
        """Streams with IDs that are given out and not decided."""
        return [each.stream_epoch.stream for each in self._streams.values() if each.evidence.open]

    @property
    def has_backlog(self) -> bool:
        """Whether the outbox holds more than the last round could take."""
        return any(each.evidence.unseen for each in self._streams.values())

    @property
    def undecided(self) -> dict[str, int]:
        """By stream: how many IDs are given out and not decided."""
        return {each.stream_epoch.stream.name: each.evidence.undecided for each in self._streams.values()}

    @property
    def kept(self) -> dict[str, int]:
        """By stream: how many IDs lie above the floor."""
        return {
            each.stream_epoch.stream.name: each.evidence.head - each.evidence.floor for each in self._streams.values()
        }

    @property
    def lines(self) -> int:
        """How many writers a beat tells of, over all streams."""
        return sum(len(each.lines) for each in self._streams.values() if each.lines is not None)

    @property
    def held(self) -> dict[str, SequenceUnfit]:
        """By stream: why none of its new IDs is decided."""
        return {
            each.stream_epoch.stream.name: each.problem for each in self._streams.values() if each.problem is not None
        }

    def round(self, most_bytes: int) -> Steps:
        """Look once at all streams; gives what is decided now, about `most_bytes` of rows at the most."""
        yield "heads"
        snapshots = {stream.number: look for stream, look in sequences.heads(self._connection).items()}
        self.is_outdated |= snapshots.keys() != self._streams.keys()
        if self._strays.is_due:
            yield "strays"
            self._strays.run(self._connection)
        heads = {number: self._head(each, snapshots.get(number)) for number, each in self._streams.items()}
        observed = [each for number, each in self._streams.items() if self._wants(each, heads[number])]
        if self.is_outdated or not observed:
            return []
        if moved := [each for each in observed if heads[each.stream_epoch.stream.number] > each.evidence.head]:
            yield "fitness"
            for number in sequences.unfit(self._connection, [each.stream_epoch.stream.number for each in moved]):
                heads[number] = self._streams[number].evidence.head
            yield "end one"
            transactions.end_own_transaction(self._connection)
        yield "running"
        running = transactions.running_transactions(self._connection)
        held = None
        if any(each.evidence.needs_locks for each in observed):
            yield "lock_holders"
            held = queries.lock_holders(self._connection, running)
        for each in observed:
            number = each.stream_epoch.stream.number
            each.evidence.observe(heads[number], running, None if held is None else held.get(number, frozenset()))
        decided, left, pages = list[Decision](), most_bytes, 0
        for each in _from(observed, self._paged + 1):
            if left > 0 and pages < PAGES_AT_ONCE and (asked := each.evidence.unread()):
                yield "page"
                page = queries.page(self._connection, each.stream_epoch.stream, asked, left)
                left -= page.bytes
                pages += 1
                self._paged = each.stream_epoch.stream.number
                decided += self._decide(each, asked, page)
            if each.lines is not None and (announced := each.lines.announce(each.open_to)):
                decided.append(Decision(each.stream_epoch, [], EMPTY, announced))
        if decided:
            yield "durable"
            streams = {each.stream_epoch.stream for each in decided}
            heads_sent = {
                it.stream_epoch.stream: it.evidence.head for it in observed if it.stream_epoch.stream in streams
            }
            queries.record_upto(self._connection, heads_sent)
        return decided

    def _head(self, each: _Stream, look: StreamSnapshot | None) -> int:
        """Up to where IDs may be decided. Rows or a sequence that went back end this decider."""
        known = each.evidence.head
        if look is None:
            return known  # it was dropped
        stream = each.stream_epoch.stream
        head = sequences.head(self._connection, stream, look, max(known, look.reached))
        stray = self._strays.found.get(stream.number, StrayRows(None, None))
        each.problem = look.sequence.problem(stream)
        if each.problem is None and (stray.highest or 0) > head:
            each.problem = look.sequence.lags_table(stream, max(stray.highest or 0, look.reached))
        self.is_outdated |= (look.version, look.floor) != (each.stream_epoch.version, each.evidence.floor)
        if each.problem is not None:
            return known
        self.is_outdated |= head < max(known, look.reached) or stray.lowest is not None or look.foreign > 0
        return head

    def _wants(self, each: _Stream, head: int) -> bool:
        return head > each.evidence.head or each.evidence.open

    def _decide(self, each: _Stream, asked: Intervals, page: Page) -> list[Decision]:
        if (page.version, page.floor) != (each.stream_epoch.version, each.evidence.floor):
            self.is_outdated = True
            return []
        for fact in page.facts:
            for writer in fact.ends:
                each.end(writer, fact.id)
        names = {each.stream_epoch.name_of(fact.writer) for fact in page.facts}
        if unknown_writers := names - (each.stream_epoch.writers.keys() - each.ended.keys()):
            found = {writer: each.ended.get(writer, 0) for writer in unknown_writers}
            self.unknown_writers.setdefault(each.stream_epoch.stream.number, {}).update(found)
            self.is_outdated = True
            return []
        empty = each.evidence.read(asked.upto(page.upto), [fact.id for fact in page.facts])
        if not (page.facts or empty):
            return []
        published = each.stream_epoch.published
        decided = Decision(each.stream_epoch, page.facts, empty.above(published), (), empty.upto(published))
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
                queries.beat(self._connection, each.stream_epoch.stream)

    def acknowledged(self, decided: Decision) -> None:
        """Kafka has all of it."""
        each = self._streams[decided.stream_epoch.stream.number]
        each.rows_sent = each.rows_sent.union(decided.rows())
        for writer, ids in decided.ids().items():
            each.acknowledged = each.acknowledged.union(ids)
            if each.lines is not None:
                each.lines.acknowledged(writer, ids)
        if each.lines is not None:
            for writer, ids in edges(decided.announced).items():
                each.lines.acknowledged(writer, ids)

    def settle(self, most: int | None = None) -> Generator[str]:
        """Raise the floors to where everything is in Kafka, and delete the rows below; of `most` streams, if given, and
        of the others in the next calls.

        A writer that ended there is to be retired: begin anew.
        """
        settled = 0
        for each in _from([*self._streams.values()], self._settled + 1):
            if settled == most:
                break
            floor = each.evidence.floor
            reached = each.acknowledged.reach(floor)
            if each.lines is not None:
                reached = each.lines.floor(reached)
            if reached > floor:
                settled += 1
                self._settled = each.stream_epoch.stream.number
                yield "settle"
                rows, version = each.rows_sent.upto(reached), each.stream_epoch.version
                if not queries.raise_floor(self._connection, each.stream_epoch.stream, version, floor, reached, rows):
                    self.is_outdated = True
                    continue
                each.evidence.floor = reached
                each.acknowledged = each.acknowledged.above(reached)
                each.rows_sent = each.rows_sent.above(reached)
                if each.lines is not None:
                    each.lines.settled(reached)
                self.is_outdated |= any(id <= reached for id in each.ended.values())


def _from(streams: Sequence[_Stream], number: int) -> list[_Stream]:
    """The same streams, those with this number and higher ones first."""
    return sorted(streams, key=lambda each: (each.stream_epoch.stream.number < number, each.stream_epoch.stream.number))


def _begun(stream_epoch: StreamEpoch) -> _Stream:
    several = len(stream_epoch.writers) > 1
    lines = WriterChains({writer.name: writer.last for writer in stream_epoch.writers.values()}) if several else None
    return _Stream(stream_epoch, StreamEvidence(stream_epoch.floor, several=several), lines)
