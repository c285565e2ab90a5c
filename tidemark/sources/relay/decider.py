"""Decides for each ID whether it has a fact: runs the queries of the database in the required order (docs/design.md
4b).

Any number of deciders may work on one database at once, and stop or be killed between any two steps. Decisions depend
on the database alone, so all deciders make the same decisions.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidemark.common.errors import UnsuitableSequence
from tidemark.common.postgres_session import Connection
from tidemark.sources import transactions
from tidemark.sources.relay import queries, sequences
from tidemark.sources.relay.epochs import StreamEpoch
from tidemark.sources.relay.evidence import EmptyRange, StreamEvidence, WriterChains, ranges_by_writer
from tidemark.sources.relay.queries import COMMON_CUT, AppendedFact, AppendStream, Page
from tidemark.sources.relay.sequences import MisplacedRowQuery, MisplacedRows, StreamSnapshot
from tidemark.streaming.values.intervals import NO_INTERVALS, Intervals

Steps = Generator[str, None, "list[Decision]"]
"""Yields the name of each step before the step runs, so that tests can run other processes between steps."""

STREAMS_PER_ROUND = 500
"""The largest number of streams that one round reads. The facts of a round are sent before the next round, so even a
relay that is killed often makes progress.
"""


def is_due(evidence: StreamEvidence, head: int) -> bool:
    """Whether a stream has IDs up to `head` that are not decided."""
    return head > evidence.head or evidence.has_undecided


def observe(connection: Connection, streams: Mapping[int, StreamEvidence], heads: Mapping[int, int]) -> Generator[str]:
    """Query the transactions that may own the IDs up to the heads, and add them to the evidence of the streams.

    If the sequence of a stream has become unfit, its IDs above the known head are left out. Yields the name of each
    step before the step runs.

    Args:
        connection: must not be in a transaction.
        streams: the evidence, by number of the stream.
        heads: the highest ID that was given out, read before this call, by number of the stream.
    """
    heads = dict(heads)
    if moved := [number for number, evidence in streams.items() if heads[number] > evidence.head]:
        yield "fitness"
        for number in sequences.sequence_defects(connection, moved):
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
    """IDs of one stream whose outcome is final, even after a crash of the server.

    Attributes:
        facts: the IDs with a fact, in order.
        voids: the IDs without a fact.
        announced: ranges without a fact of their writer.
        previously_published: IDs without a row that were published before the database went back. They may have had a
            fact.
    """

    stream_epoch: StreamEpoch
    facts: Sequence[AppendedFact]
    voids: Intervals
    announced: Sequence[EmptyRange] = ()
    previously_published: Intervals = NO_INTERVALS

    def without_rows(self) -> "Decision":
        """A copy without the rows of its facts."""
        return replace(self, facts=[fact.without_rows() for fact in self.facts])

    def edge_ids(self) -> dict[str, Intervals]:
        """By writer, the IDs of its edges of one ID each. IDs without a fact count for the writer of the database."""
        by_writer: dict[str, list[int]] = {self.stream_epoch.database_writer: []}
        for fact in self.facts:
            by_writer.setdefault(self.stream_epoch.kafka_name(fact.writer), []).append(fact.id)
        own = {writer: Intervals.from_ids(np.array(ids, np.int64)) for writer, ids in by_writer.items()}
        return own | {
            self.stream_epoch.database_writer: own[self.stream_epoch.database_writer]
            .union(self.voids)
            .union(self.previously_published)
        }

    def row_ids(self) -> Intervals:
        """The IDs that have a row in the outbox."""
        return Intervals.from_ids(np.array([fact.id for fact in self.facts], np.int64))


@dataclass(slots=True)
class _StreamState:
    """`chains` is None if the stream has one writer, whose chain is cut at every ID. `epoch_ends`: by writer, the ID at
    which its epoch ends. `acknowledged`: the IDs whose edges are in Kafka. `rows_sent`: the IDs of rows in Kafka.
    `problem`: why the stream is blocked."""

    stream_epoch: StreamEpoch
    evidence: StreamEvidence
    chains: WriterChains | None
    acknowledged: Intervals = field(default=NO_INTERVALS)
    rows_sent: Intervals = field(default=NO_INTERVALS)
    problem: UnsuitableSequence | None = None
    epoch_ends: dict[str, int] = field(default_factory=dict)

    def end_epoch(self, writer: str, id: int) -> None:
        """Note that the writer's epoch ends at `id`. The writer has no fact between the floor and `id`, and joins again
        before its facts beyond `id` are published."""
        known = self.stream_epoch.writers.get(writer)
        if known is not None and known.sent_upto < id and writer not in self.epoch_ends and self.chains is not None:
            self.epoch_ends[writer] = id
            self.chains.end_epoch(writer)

    def undecided_ids(self, writer: str) -> Intervals:
        """The undecided IDs that may belong to the writer. For the database's writer, all undecided IDs: so the linear
        position passes none of them."""
        return self.evidence.undecided_ids(
            None if writer == self.stream_epoch.database_writer else self.stream_epoch.writers[writer].lock_keys
        )


class Decider:
    """Decides the IDs of all streams on one connection. A new connection needs a new decider. For one thread.

    Args:
        connection: must not be in a transaction.
        stream_epochs: Kafka has the JOINs of their writers.
    """

    def __init__(self, connection: Connection, stream_epochs: Iterable[StreamEpoch]) -> None:
        self._connection = connection
        self._misplaced_row_query = MisplacedRowQuery()
        self._last_read_stream = self._last_raised_stream = 0
        """The numbers of the last stream that was read, and of the last one whose floor was raised. The next round
        continues after it."""
        self._streams = {stream_epoch.stream.number: _initial_state(stream_epoch) for stream_epoch in stream_epochs}
        self.is_outdated = False
        """Whether the streams, writers, epochs or floors in the database have changed. If so, make a new decider."""
        self.unknown_writers: dict[int, dict[str, int]] = {}
        """By number of the stream, the writers of facts that have not joined, or whose epoch has ended. The value is an
        ID: the writer has no fact between the floor and that ID."""
        self.streams_without_common_cut: set[AppendStream] = set()
        """The streams whose last common cut was not written, because another session holds the lock."""

    @property
    def undecided_streams(self) -> list[AppendStream]:
        """The streams with IDs that are given out and not decided."""
        return [state.stream_epoch.stream for state in self._streams.values() if state.evidence.has_undecided]

    @property
    def has_backlog(self) -> bool:
        """Whether the outbox has more rows than the last round could read."""
        return any(state.evidence.has_unread for state in self._streams.values())

    @property
    def undecided_counts(self) -> dict[str, int]:
        """By stream, the number of IDs that are given out and not decided."""
        return {state.stream_epoch.stream.name: state.evidence.undecided_count for state in self._streams.values()}

    @property
    def ids_above_floor(self) -> dict[str, int]:
        """By stream, the number of IDs between its floor and its head. Kafka has everything up to the floor."""
        return {
            state.stream_epoch.stream.name: state.evidence.head - state.evidence.floor
            for state in self._streams.values()
        }

    @property
    def chain_count(self) -> int:
        """The number of chains that a common cut cuts, over all streams."""
        return sum(len(state.chains) for state in self._streams.values() if state.chains is not None)

    @property
    def blocked(self) -> dict[str, UnsuitableSequence]:
        """By stream, the reason why no new ID is decided."""
        return {
            state.stream_epoch.stream.name: state.problem
            for state in self._streams.values()
            if state.problem is not None
        }

    def round(self, max_bytes: int) -> Steps:
        """Query all streams once. Returns the new decisions, with about `max_bytes` of rows at most."""
        yield "heads"
        snapshots = {stream.number: snapshot for stream, snapshot in sequences.read_snapshots(self._connection).items()}
        self.is_outdated |= snapshots.keys() != self._streams.keys()
        if self._misplaced_row_query.is_due:
            yield "misplaced rows"
            self._misplaced_row_query.run(self._connection)
        heads = {number: self._head(state, snapshots.get(number)) for number, state in self._streams.items()}
        observed = [state for number, state in self._streams.items() if is_due(state.evidence, heads[number])]
        if self.is_outdated or not observed:
            return []
        yield from observe(
            self._connection, {state.stream_epoch.stream.number: state.evidence for state in observed}, heads
        )
        decisions, left, pages = list[Decision](), max_bytes, 0
        for state in _rotate_to(observed, self._last_read_stream + 1):
            if left > 0 and pages < STREAMS_PER_ROUND and (ranges := state.evidence.unread_ranges()):
                yield "page"
                page = queries.read_page(self._connection, state.stream_epoch.stream, ranges, left)
                left -= page.bytes
                pages += 1
                self._last_read_stream = state.stream_epoch.stream.number
                decisions += self._decide(state, ranges, page)
            if state.chains is not None and (announced := state.chains.announce(state.undecided_ids)):
                decisions.append(Decision(state.stream_epoch, [], NO_INTERVALS, announced))
        if decisions:
            yield "durable"
            streams = {decision.stream_epoch.stream for decision in decisions}
            heads_sent = {
                state.stream_epoch.stream: state.evidence.head
                for state in observed
                if state.stream_epoch.stream in streams
            }
            if not queries.record_upto(self._connection, heads_sent):
                self.is_outdated = True
                return []
        return decisions

    def _head(self, state: _StreamState, snapshot: StreamSnapshot | None) -> int:
        """Read the highest ID that may be decided. Sets the `problem` of the stream. Sets `is_outdated` if the stream
        has changed, or if its rows or its sequence went back."""
        known = state.evidence.head
        if snapshot is None:
            return known  # the stream was dropped
        stream = state.stream_epoch.stream
        head = sequences.read_head(self._connection, stream, snapshot, max(known, snapshot.known_head))
        misplaced = self._misplaced_row_query.found.get(stream.number, MisplacedRows(None, None))
        state.problem = snapshot.sequence.problem(stream)
        if state.problem is None and (misplaced.highest or 0) > head:
            state.problem = snapshot.sequence.lag_problem(stream, max(misplaced.highest or 0, snapshot.known_head))
        self.is_outdated |= (snapshot.version, snapshot.floor) != (state.stream_epoch.version, state.evidence.floor)
        if state.problem is not None:
            return known
        self.is_outdated |= (
            head < max(known, snapshot.known_head) or misplaced.lowest is not None or snapshot.foreign_write > 0
        )
        return head

    def _decide(self, state: _StreamState, ranges: Intervals, page: Page) -> list[Decision]:
        if (page.version, page.floor) != (state.stream_epoch.version, state.evidence.floor):
            self.is_outdated = True
            return []
        for fact in page.facts:
            for writer in fact.ended_writers:
                state.end_epoch(writer, fact.id)
        names = {state.stream_epoch.kafka_name(fact.writer) for fact in page.facts}
        if unknown_writers := names - (state.stream_epoch.writers.keys() - state.epoch_ends.keys()):
            missing = {writer: state.epoch_ends.get(writer, 0) for writer in unknown_writers}
            self.unknown_writers.setdefault(state.stream_epoch.stream.number, {}).update(missing)
            self.is_outdated = True
            return []
        empty = state.evidence.note_rows(ranges.up_to(page.upto), [fact.id for fact in page.facts])
        if not (page.facts or empty):
            return []
        published = state.stream_epoch.published
        decision = Decision(state.stream_epoch, page.facts, empty.above(published), (), empty.up_to(published))
        if state.chains is not None:
            for writer, ids in decision.edge_ids().items():
                state.chains.note_sent(writer, ids)
            for fact in page.facts:
                if fact.writer == COMMON_CUT:
                    state.chains.note_common_cut(fact.id)
        return [decision]

    def cut_chains(self) -> Generator[str]:
        """Write a common cut for each stream with several writers that needs one. Blocked streams get none."""
        for state in self._streams.values():
            if (
                state.problem is None
                and state.chains is not None
                and state.chains.needs_common_cut(state.evidence.head)
            ):
                yield "common cut"
                stream = state.stream_epoch.stream
                if queries.write_common_cut(self._connection, stream):
                    self.streams_without_common_cut.discard(stream)
                else:
                    self.streams_without_common_cut.add(stream)

    def note_acknowledged(self, decision: Decision) -> None:
        """Note that Kafka has acknowledged all records of a decision."""
        state = self._streams[decision.stream_epoch.stream.number]
        state.rows_sent = state.rows_sent.union(decision.row_ids())
        for writer, ids in decision.edge_ids().items():
            state.acknowledged = state.acknowledged.union(ids)
            if state.chains is not None:
                state.chains.note_acknowledged(writer, ids)
        if state.chains is not None:
            for writer, ids in ranges_by_writer(decision.announced).items():
                state.chains.note_acknowledged(writer, ids)

    def raise_floors(self, max_streams: int | None = None) -> Generator[str]:
        """Raise each floor to the ID up to which Kafka has everything, and delete the rows up to it.

        Args:
            max_streams: the largest number of floors to raise in this call, the others in later calls; None for all.
        """
        raised = 0
        for state in _rotate_to([*self._streams.values()], self._last_raised_stream + 1):
            if raised == max_streams:
                break
            floor = state.evidence.floor
            reached = state.acknowledged.contiguous_end(floor)
            if state.chains is not None:
                reached = state.chains.max_floor(reached)
            if reached > floor:
                raised += 1
                self._last_raised_stream = state.stream_epoch.stream.number
                yield "raise floor"
                rows, version = state.rows_sent.up_to(reached), state.stream_epoch.version
                if not queries.raise_floor(self._connection, state.stream_epoch.stream, version, floor, reached, rows):
                    self.is_outdated = True
                    continue
                state.evidence.floor = reached
                state.acknowledged = state.acknowledged.above(reached)
                state.rows_sent = state.rows_sent.above(reached)
                if state.chains is not None:
                    state.chains.note_floor(reached)
                self.is_outdated |= any(id <= reached for id in state.epoch_ends.values())


def _rotate_to(streams: Sequence[_StreamState], number: int) -> list[_StreamState]:
    """The streams in a rotated order: this number and higher ones first."""
    return sorted(
        streams, key=lambda state: (state.stream_epoch.stream.number < number, state.stream_epoch.stream.number)
    )


def _initial_state(stream_epoch: StreamEpoch) -> _StreamState:
    several = len(stream_epoch.writers) > 1
    sent_upto = {writer.name: writer.sent_upto for writer in stream_epoch.writers.values()}
    chains = WriterChains(sent_upto) if several else None
    return _StreamState(stream_epoch, StreamEvidence(stream_epoch.floor, has_several_writers=several), chains)
