"""Decides the outcome of each ID: runs the queries of the database in their order (docs/design.md 4b).

Any number of deciders may work on one database at once, and stop or be killed between any two steps. Decisions follow
from the database alone, so all deciders decide the same.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidemark.common.errors import UnsuitableSequence
from tidemark.common.postgres_session import Connection
from tidemark.sources import transactions
from tidemark.sources.relay import queries, sequences
from tidemark.sources.relay.epochs import StreamEpoch
from tidemark.sources.relay.evidence import EmptyRange, StreamEvidence, WriterChains, edges
from tidemark.sources.relay.queries import BEAT, AppendedFact, AppendStream, Page
from tidemark.sources.relay.sequences import StrayRowQuery, StrayRows, StreamSnapshot
from tidemark.streaming.values.intervals import EMPTY, Intervals

Steps = Generator[str, None, "list[Decision]"]
"""Yields the name of each step before the step runs, so that tests can let other processes act between steps."""

PAGES_AT_ONCE = 500
"""Streams that are read in one round. Their facts are sent before others are read, so even a relay that is killed often
makes progress.
"""


def is_due(evidence: StreamEvidence, head: int) -> bool:
    """Whether a stream has IDs up to `head` that are not decided."""
    return head > evidence.head or evidence.open


def observe(connection: Connection, streams: Mapping[int, StreamEvidence], heads: Mapping[int, int]) -> Generator[str]:
    """Query the transactions that may own the IDs up to the heads, and add them to the evidence of the streams.

    A stream whose sequence has become unfit is not observed. Yields the name of each step before it runs.

    Args:
        connection: is not in a transaction.
        streams: by the number of the stream.
        heads: by the number of the stream, read before.
    """
    heads = dict(heads)
    if moved := [number for number, evidence in streams.items() if heads[number] > evidence.head]:
        yield "fitness"
        for number in sequences.unfit(connection, moved):
            heads[number] = streams[number].head
        yield "end one"
        transactions.end_own_transaction(connection)
    yield "running"
    running = transactions.running_transactions(connection)
    lock_owners = None
    if any(evidence.needs_locks for evidence in streams.values()):
        yield "lock_holders"
        lock_owners = queries.lock_holders(connection, running)
    for number, evidence in streams.items():
        evidence.observe(heads[number], running, None if lock_owners is None else lock_owners.get(number, frozenset()))


@dataclass(frozen=True, slots=True)
class Decision:
    """IDs of one stream whose outcome is final, even after a crash of the server: `facts` in order, and `voids` without
    a fact.

    `emptied` are IDs without a row that were published before the database went back. They may have had a fact.
    """

    stream_epoch: StreamEpoch
    facts: Sequence[AppendedFact]
    voids: Intervals
    announced: Sequence[EmptyRange] = ()
    emptied: Intervals = EMPTY

    def without_rows(self) -> "Decision":
        """A copy without the rows of its facts."""
        return replace(self, facts=[fact.without_rows() for fact in self.facts])

    def ids(self) -> dict[str, Intervals]:
        """By writer, the IDs that have an edge of their own: the IDs of its facts. IDs without a fact belong to the
        writer that represents the database.
        """
        by_writer: dict[str, list[int]] = {self.stream_epoch.own: []}
        for fact in self.facts:
            by_writer.setdefault(self.stream_epoch.name_of(fact.writer), []).append(fact.id)
        own = {writer: Intervals.from_ids(np.array(ids, np.int64)) for writer, ids in by_writer.items()}
        return own | {self.stream_epoch.own: own[self.stream_epoch.own].union(self.voids).union(self.emptied)}

    def rows(self) -> Intervals:
        """The IDs that have a row in the outbox."""
        return Intervals.from_ids(np.array([fact.id for fact in self.facts], np.int64))


@dataclass(slots=True)
class _Stream:
    """`chains` is None if the stream has one writer, whose chain is cut at every ID. `ended`: by writer, the ID at
    which its epoch ends. `problem`: why the stream is blocked."""

    stream_epoch: StreamEpoch
    evidence: StreamEvidence
    chains: WriterChains | None
    acknowledged: Intervals = field(default=EMPTY)
    rows_sent: Intervals = field(default=EMPTY)
    problem: UnsuitableSequence | None = None
    ended: dict[str, int] = field(default_factory=dict)

    def end(self, writer: str, id: int) -> None:
        """The writer has no fact between the floor and `id`. It joins again before anything beyond `id` is
        published."""
        known = self.stream_epoch.writers.get(writer)
        if known is not None and known.last < id and writer not in self.ended and self.chains is not None:
            self.ended[writer] = id
            self.chains.end(writer)

    def open_to(self, writer: str) -> Intervals:
        """The undecided IDs that may be the writer's. The database's own chain passes no undecided ID, so that it
        holds the linear position back."""
        return self.evidence.open_to(
            None if writer == self.stream_epoch.own else self.stream_epoch.writers[writer].numbers
        )


class Decider:
    """Decides the IDs that are seen on one connection, which is not in a transaction. A new connection needs a new
    decider.

    `stream_epochs` have joined. For one thread.
    """

    def __init__(self, connection: Connection, stream_epochs: Iterable[StreamEpoch]) -> None:
        self._connection = connection
        self._strays = StrayRowQuery()
        self._paged = self._settled = 0
        """Numbers of the streams that were read last, and whose floors were raised last. The next round continues after
        them."""
        self._streams = {stream_epoch.stream.number: _begun(stream_epoch) for stream_epoch in stream_epochs}
        self.is_outdated = False
        """Streams, writers, epochs or floors are others than these: start again."""
        self.unknown_writers: dict[int, dict[str, int]] = {}
        """By number of the stream: writers that have appended and are not known, or have ended; nothing of them lies
        between the floor and the ID."""
        self.without_beat: set[AppendStream] = set()
        """Streams whose last beat was not written, because another session holds the lock."""

    @property
    def open(self) -> list[AppendStream]:
        """Streams with IDs that are given out and not decided."""
        return [state.stream_epoch.stream for state in self._streams.values() if state.evidence.open]

    @property
    def has_backlog(self) -> bool:
        """Whether the outbox has more rows than the last round could read."""
        return any(state.evidence.unseen for state in self._streams.values())

    @property
    def undecided(self) -> dict[str, int]:
        """By stream: how many IDs are given out and not decided."""
        return {state.stream_epoch.stream.name: state.evidence.undecided for state in self._streams.values()}

    @property
    def ids_above_floor(self) -> dict[str, int]:
        """By stream, the number of IDs above its floor: Kafka has everything up to the floor."""
        return {
            state.stream_epoch.stream.name: state.evidence.head - state.evidence.floor
            for state in self._streams.values()
        }

    @property
    def chain_count(self) -> int:
        """The number of chains that a beat cuts, over all streams."""
        return sum(len(state.chains) for state in self._streams.values() if state.chains is not None)

    @property
    def blocked(self) -> dict[str, UnsuitableSequence]:
        """By stream: the reason why no new ID is decided."""
        return {
            state.stream_epoch.stream.name: state.problem
            for state in self._streams.values()
            if state.problem is not None
        }

    def round(self, most_bytes: int) -> Steps:
        """Query all streams once. Returns the new decisions, with about `most_bytes` of rows at most."""
        yield "heads"
        snapshots = {stream.number: snapshot for stream, snapshot in sequences.heads(self._connection).items()}
        self.is_outdated |= snapshots.keys() != self._streams.keys()
        if self._strays.is_due:
            yield "strays"
            self._strays.run(self._connection)
        heads = {number: self._head(state, snapshots.get(number)) for number, state in self._streams.items()}
        observed = [state for number, state in self._streams.items() if is_due(state.evidence, heads[number])]
        if self.is_outdated or not observed:
            return []
        yield from observe(
            self._connection, {state.stream_epoch.stream.number: state.evidence for state in observed}, heads
        )
        decided, left, pages = list[Decision](), most_bytes, 0
        for state in _from(observed, self._paged + 1):
            if left > 0 and pages < PAGES_AT_ONCE and (asked := state.evidence.unread()):
                yield "page"
                page = queries.page(self._connection, state.stream_epoch.stream, asked, left)
                left -= page.bytes
                pages += 1
                self._paged = state.stream_epoch.stream.number
                decided += self._decide(state, asked, page)
            if state.chains is not None and (announced := state.chains.announce(state.open_to)):
                decided.append(Decision(state.stream_epoch, [], EMPTY, announced))
        if decided:
            yield "durable"
            streams = {decision.stream_epoch.stream for decision in decided}
            heads_sent = {
                state.stream_epoch.stream: state.evidence.head
                for state in observed
                if state.stream_epoch.stream in streams
            }
            if not queries.record_upto(self._connection, heads_sent):
                self.is_outdated = True
                return []
        return decided

    def _head(self, state: _Stream, snapshot: StreamSnapshot | None) -> int:
        """The highest ID that may be decided. Raises if rows or the sequence went back: the decider is outdated."""
        known = state.evidence.head
        if snapshot is None:
            return known  # the stream was dropped
        stream = state.stream_epoch.stream
        head = sequences.head(self._connection, stream, snapshot, max(known, snapshot.reached))
        stray = self._strays.found.get(stream.number, StrayRows(None, None))
        state.problem = snapshot.sequence.problem(stream)
        if state.problem is None and (stray.highest or 0) > head:
            state.problem = snapshot.sequence.lags_table(stream, max(stray.highest or 0, snapshot.reached))
        self.is_outdated |= (snapshot.version, snapshot.floor) != (state.stream_epoch.version, state.evidence.floor)
        if state.problem is not None:
            return known
        self.is_outdated |= head < max(known, snapshot.reached) or stray.lowest is not None or snapshot.foreign > 0
        return head

    def _decide(self, state: _Stream, asked: Intervals, page: Page) -> list[Decision]:
        if (page.version, page.floor) != (state.stream_epoch.version, state.evidence.floor):
            self.is_outdated = True
            return []
        for fact in page.facts:
            for writer in fact.ends:
                state.end(writer, fact.id)
        names = {state.stream_epoch.name_of(fact.writer) for fact in page.facts}
        if unknown_writers := names - (state.stream_epoch.writers.keys() - state.ended.keys()):
            missing = {writer: state.ended.get(writer, 0) for writer in unknown_writers}
            self.unknown_writers.setdefault(state.stream_epoch.stream.number, {}).update(missing)
            self.is_outdated = True
            return []
        empty = state.evidence.read(asked.upto(page.upto), [fact.id for fact in page.facts])
        if not (page.facts or empty):
            return []
        published = state.stream_epoch.published
        decided = Decision(state.stream_epoch, page.facts, empty.above(published), (), empty.upto(published))
        if state.chains is not None:
            for writer, ids in decided.ids().items():
                state.chains.own(writer, ids)
            for fact in page.facts:
                if fact.writer == BEAT:
                    state.chains.beat(fact.id)
        return [decided]

    def beat(self) -> Generator[str]:
        """Write a beat for each stream with several writers if the chain of one of them ends below the head. Blocked
        streams get none.
        """
        for state in self._streams.values():
            if state.problem is None and state.chains is not None and state.chains.behind(state.evidence.head):
                yield "beat"
                stream = state.stream_epoch.stream
                if queries.beat(self._connection, stream):
                    self.without_beat.discard(stream)
                else:
                    self.without_beat.add(stream)

    def note_acknowledged(self, decided: Decision) -> None:
        """Note that Kafka has all records of a decision."""
        state = self._streams[decided.stream_epoch.stream.number]
        state.rows_sent = state.rows_sent.union(decided.rows())
        for writer, ids in decided.ids().items():
            state.acknowledged = state.acknowledged.union(ids)
            if state.chains is not None:
                state.chains.note_acknowledged(writer, ids)
        if state.chains is not None:
            for writer, ids in edges(decided.announced).items():
                state.chains.note_acknowledged(writer, ids)

    def settle(self, most: int | None = None) -> Generator[str]:
        """Raise each floor to the ID up to which everything is in Kafka, and delete the rows below.

        Args:
            most: the largest number of streams to settle in this call; None for all. The next calls settle the others.
        """
        settled = 0
        for state in _from([*self._streams.values()], self._settled + 1):
            if settled == most:
                break
            floor = state.evidence.floor
            reached = state.acknowledged.reach(floor)
            if state.chains is not None:
                reached = state.chains.floor(reached)
            if reached > floor:
                settled += 1
                self._settled = state.stream_epoch.stream.number
                yield "settle"
                rows, version = state.rows_sent.upto(reached), state.stream_epoch.version
                if not queries.raise_floor(self._connection, state.stream_epoch.stream, version, floor, reached, rows):
                    self.is_outdated = True
                    continue
                state.evidence.floor = reached
                state.acknowledged = state.acknowledged.above(reached)
                state.rows_sent = state.rows_sent.above(reached)
                if state.chains is not None:
                    state.chains.settled(reached)
                self.is_outdated |= any(id <= reached for id in state.ended.values())


def _from(streams: Sequence[_Stream], number: int) -> list[_Stream]:
    """The streams in a rotated order: this number and higher ones first."""
    return sorted(
        streams, key=lambda state: (state.stream_epoch.stream.number < number, state.stream_epoch.stream.number)
    )


def _begun(stream_epoch: StreamEpoch) -> _Stream:
    several = len(stream_epoch.writers) > 1
    chains = WriterChains({writer.name: writer.last for writer in stream_epoch.writers.values()}) if several else None
    return _Stream(stream_epoch, StreamEvidence(stream_epoch.floor, several=several), chains)
