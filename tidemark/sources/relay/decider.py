"""Decides for each ID of a stream whether the ID has a fact (docs/design.md 4b).

The module runs the database queries in the order that `evidence` requires. Any number of deciders may work on one
database at once. Each may be killed between any two steps. Decisions depend on the database alone, so all deciders make
the same decisions.
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
"""Yields the name of each step before the step runs, so that tests can run other processes between two steps. Returns
the new decisions."""

STREAMS_PER_ROUND = 500
"""The largest number of streams whose outbox rows one round reads. The facts of a round are sent before the next round.
So a relay makes progress even if it is often killed.
"""


def is_due(evidence: StreamEvidence, head: int) -> bool:
    """Whether an ID of the stream up to `head` (a magnitude) is not decided."""
    return head > evidence.head or evidence.has_undecided


def observe(connection: Connection, streams: Mapping[int, StreamEvidence], heads: Mapping[int, int]) -> Generator[str]:
    """Query the transactions that may own the IDs up to the heads, and add an observation to each stream's evidence.

    If the sequence of a stream has become unfit, the head in the stream's evidence does not change. Yields the name of
    each step before the step runs.

    Args:
        connection: must not be in a transaction.
        streams: number of the stream -> its evidence, which this function changes.
        heads: number of the stream -> the highest ID that was given out (a magnitude), read before this call.
    """
    heads = dict(heads)
    if moved := [number for number, evidence in streams.items() if heads[number] > evidence.head]:
        yield "fitness"
        for number in sequences.read_sequence_defects(connection, moved):
            heads[number] = streams[number].head
        yield "end one"
        transactions.use_up_transaction_number(connection)
    yield "running"
    running = transactions.read_running_transactions(connection)
    lock_owners = None
    if any(evidence.needs_locks for evidence in streams.values()):
        yield "lock owners"
        lock_owners = queries.read_lock_owners(connection, running)
    for number, evidence in streams.items():
        evidence.observe(heads[number], running, None if lock_owners is None else lock_owners.get(number, frozenset()))


@dataclass(frozen=True, slots=True)
class Decision:
    """IDs of one stream whose outcome is final, even after a crash of the server. IDs are magnitudes.

    Attributes:
        stream_epoch: the stream, with the epochs of its writers.
        facts: the rows of the outbox in ascending order of their IDs. A row can also be a void (`is_void`).
        void_ids: the IDs that have no row in the outbox, and no fact.
        announced_ranges: ranges in which the named writer has no fact.
        previously_published_ids: the IDs that have no row, but were published before the database went back. These IDs
            may have had facts.
    """

    stream_epoch: StreamEpoch
    facts: Sequence[AppendedFact]
    void_ids: Intervals
    announced_ranges: Sequence[EmptyRange] = ()
    previously_published_ids: Intervals = NO_INTERVALS

    def without_rows(self) -> "Decision":
        """A copy in which the facts have no rows, to free memory."""
        return replace(self, facts=[fact.without_rows() for fact in self.facts])

    def edge_ids(self) -> dict[str, Intervals]:
        """Writer's name on Kafka -> the IDs that the decision settles one by one as edges of that writer.

        The database's own writer gets the IDs without a fact. Ranges in `announced_ranges` are not included.
        """
        by_writer: dict[str, list[int]] = {self.stream_epoch.database_writer: []}
        for fact in self.facts:
            by_writer.setdefault(self.stream_epoch.kafka_name(fact.writer), []).append(fact.id)
        own = {writer: Intervals.from_ids(np.array(ids, np.int64)) for writer, ids in by_writer.items()}
        return own | {
            self.stream_epoch.database_writer: own[self.stream_epoch.database_writer]
            .union(self.void_ids)
            .union(self.previously_published_ids)
        }

    def row_ids(self) -> Intervals:
        """The IDs of the decision that have a row in the outbox."""
        return Intervals.from_ids(np.array([fact.id for fact in self.facts], np.int64))


@dataclass(slots=True)
class _StreamState:
    """The state of one stream in a decider. IDs are magnitudes.

    Attributes:
        stream_epoch: the stream, with the epochs of its writers.
        evidence: the evidence for the stream's IDs.
        chains: the chains of the stream's writers; None if the stream has one writer, whose chain is cut at every ID.
        acknowledged_ids: the IDs above the floor whose edges Kafka has acknowledged.
        acknowledged_row_ids: the IDs above the floor whose outbox rows Kafka has acknowledged.
        problem: why the stream is blocked; None if it is not blocked.
        epoch_ends: writer -> the ID at which the writer's epoch ends. Only epochs whose end this decider has found.
    """

    stream_epoch: StreamEpoch
    evidence: StreamEvidence
    chains: WriterChains | None
    acknowledged_ids: Intervals = field(default=NO_INTERVALS)
    acknowledged_row_ids: Intervals = field(default=NO_INTERVALS)
    problem: UnsuitableSequence | None = None
    epoch_ends: dict[str, int] = field(default_factory=dict)

    def end_epoch(self, writer: str, id: int) -> None:
        """Record that the writer's epoch ends at `id`, and remove the writer's chain.

        The writer has no fact between the floor and `id`. The writer joins again before its facts beyond `id` are
        published. Does nothing if the stream has one writer, if the writer is unknown, or if the epoch ended earlier.
        """
        known = self.stream_epoch.writers.get(writer)
        if known is not None and known.sent_upto < id and writer not in self.epoch_ends and self.chains is not None:
            self.epoch_ends[writer] = id
            self.chains.end_epoch(writer)

    def undecided_ids(self, writer: str) -> Intervals:
        """The undecided IDs that may belong to the writer (its name on Kafka).

        For the database's own writer, these are all undecided IDs, so the linear position passes no undecided ID.
        """
        return self.evidence.undecided_ids(
            None if writer == self.stream_epoch.database_writer else self.stream_epoch.writers[writer].lock_keys
        )


class Decider:
    """Decides the IDs of all streams on one connection. A new connection needs a new decider. Not thread-safe.

    Args:
        connection: must not be in a transaction.
        stream_epochs: the streams to decide. Kafka must have acknowledged the JOINs of their writers.
    """

    def __init__(self, connection: Connection, stream_epochs: Iterable[StreamEpoch]) -> None:
        self._connection = connection
        self._misplaced_row_query = MisplacedRowQuery()
        self._last_read_stream = self._last_raised_stream = 0
        """Two stream numbers: the last stream whose rows were read, and the last stream whose floor was raised. The
        next call continues after this stream."""
        self._streams = {stream_epoch.stream.number: _initial_state(stream_epoch) for stream_epoch in stream_epochs}
        self.is_outdated = False
        """Whether the streams, writers, epochs or floors in the database have changed. If so, the caller must join the
        streams again and make a new decider."""
        self.unknown_writers: dict[int, dict[str, int]] = {}
        """Number of the stream -> writer -> ID. These writers have facts in the outbox, but no current epoch. The ID is
        0 if the writer has not joined. Otherwise the writer's epoch ended at that ID (a magnitude)."""
        self.streams_without_common_cut: set[AppendStream] = set()
        """The streams whose last common cut was not written, because another session holds the lock of common cuts."""

    @property
    def undecided_streams(self) -> list[AppendStream]:
        """The streams that have IDs which were given out and are not decided."""
        return [state.stream_epoch.stream for state in self._streams.values() if state.evidence.has_undecided]

    @property
    def has_backlog(self) -> bool:
        """Whether the last round left ranges of the outbox unread. Then the next round need not be delayed."""
        return any(state.evidence.has_unread for state in self._streams.values())

    @property
    def undecided_counts(self) -> dict[str, int]:
        """Name of the stream -> the number of IDs that were given out and are not decided."""
        return {state.stream_epoch.stream.name: state.evidence.undecided_count for state in self._streams.values()}

    @property
    def ids_above_floor(self) -> dict[str, int]:
        """Name of the stream -> the number of IDs above the floor, up to the highest ID that was given out."""
        return {
            state.stream_epoch.stream.name: state.evidence.head - state.evidence.floor
            for state in self._streams.values()
        }

    @property
    def chain_count(self) -> int:
        """The number of chains in all streams with several writers: one chain for each writer of each stream."""
        return sum(len(state.chains) for state in self._streams.values() if state.chains is not None)

    @property
    def blocked(self) -> dict[str, UnsuitableSequence]:
        """Name of the stream -> the reason why no new ID is decided. Other streams are left out."""
        return {
            state.stream_epoch.stream.name: state.problem
            for state in self._streams.values()
            if state.problem is not None
        }

    def run_round(self, max_bytes: int) -> Steps:
        """Query all streams once, and decide IDs. Makes the outcome of the decided IDs durable before it returns.

        Sets `is_outdated`, `unknown_writers` and `blocked`. Returns no decision if `is_outdated` is set before the
        transactions are queried, or if a stream was restored or dropped during the round.

        Args:
            max_bytes: the approximate limit for the outbox rows of all decisions together.
        """
        yield "heads"
        snapshots = {stream.number: snapshot for stream, snapshot in sequences.read_snapshots(self._connection).items()}
        self.is_outdated |= snapshots.keys() != self._streams.keys()
        if self._misplaced_row_query.is_due:
            yield "misplaced rows"
            self._misplaced_row_query.run(self._connection)
        heads = {number: self._read_head(state, snapshots.get(number)) for number, state in self._streams.items()}
        observed = [state for number, state in self._streams.items() if is_due(state.evidence, heads[number])]
        if self.is_outdated or not observed:
            return []
        yield from observe(
            self._connection, {state.stream_epoch.stream.number: state.evidence for state in observed}, heads
        )
        decisions, free_bytes, pages = list[Decision](), max_bytes, 0
        for state in _rotate_to(observed, self._last_read_stream + 1):
            if free_bytes > 0 and pages < STREAMS_PER_ROUND and (ranges := state.evidence.unread_ranges()):
                yield "page"
                page = queries.read_page(self._connection, state.stream_epoch.stream, ranges, free_bytes)
                free_bytes -= page.bytes
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
            if not queries.store_heads(self._connection, heads_sent):
                self.is_outdated = True
                return []
        return decisions

    def _read_head(self, state: _StreamState, snapshot: StreamSnapshot | None) -> int:
        """Read the highest ID that may be decided (a magnitude).

        Sets the `problem` of the stream. Sets `is_outdated` if the stream's version or floor has changed, if its
        sequence went back, if a row was committed below the floor, or if a restore wrote the stream's rows. If the
        stream was dropped or has a problem, the head is the same as in the last round.
        """
        known = state.evidence.head
        if snapshot is None:
            return known  # the stream was dropped
        stream = state.stream_epoch.stream
        head = sequences.read_head(self._connection, stream, snapshot, max(known, snapshot.known_head))
        misplaced = self._misplaced_row_query.result.get(stream.number, MisplacedRows(None, None))
        state.problem = snapshot.sequence.problem(stream)
        if state.problem is None and (misplaced.highest_id or 0) > head:
            state.problem = snapshot.sequence.lag_problem(stream, max(misplaced.highest_id or 0, snapshot.known_head))
        self.is_outdated |= (snapshot.version, snapshot.floor) != (state.stream_epoch.version, state.evidence.floor)
        if state.problem is not None:
            return known
        self.is_outdated |= (
            head < max(known, snapshot.known_head) or misplaced.lowest_id is not None or snapshot.foreign_write > 0
        )
        return head

    def _decide(self, state: _StreamState, ranges: Intervals, page: Page) -> list[Decision]:
        """Decide the IDs of a page that was read from `ranges`. Returns a list with one decision, or an empty list.

        The list is empty if the page decides nothing. It is also empty, and `is_outdated` is set, if the stream has
        changed, or if a fact's writer has no current epoch. Such writers are added to `unknown_writers`.
        """
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
        empty = state.evidence.note_rows(ranges.up_to(page.read_upto), [fact.id for fact in page.facts])
        if not (page.facts or empty):
            return []
        regressed_from = state.stream_epoch.regressed_from_id
        decision = Decision(
            state.stream_epoch, page.facts, empty.above(regressed_from), (), empty.up_to(regressed_from)
        )
        if state.chains is not None:
            for writer, ids in decision.edge_ids().items():
                state.chains.note_sent(writer, ids)
            for fact in page.facts:
                if fact.writer == COMMON_CUT:
                    state.chains.note_common_cut(fact.id)
        return [decision]

    def write_common_cuts(self) -> Generator[str]:
        """Write a common cut in each stream with several writers that needs a common cut and is not blocked.

        A stream needs a common cut if a writer's chain ends below the highest ID that was given out. Updates
        `streams_without_common_cut`. Yields the name of each step before the step runs.
        """
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
        """Record that Kafka has acknowledged all records of a decision. `raise_floors` uses this information."""
        state = self._streams[decision.stream_epoch.stream.number]
        state.acknowledged_row_ids = state.acknowledged_row_ids.union(decision.row_ids())
        for writer, ids in decision.edge_ids().items():
            state.acknowledged_ids = state.acknowledged_ids.union(ids)
            if state.chains is not None:
                state.chains.note_acknowledged(writer, ids)
        if state.chains is not None:
            for writer, ids in ranges_by_writer(decision.announced_ranges).items():
                state.chains.note_acknowledged(writer, ids)

    def raise_floors(self, max_streams: int | None = None) -> Generator[str]:
        """Raise the floor of each stream to the ID up to which Kafka has everything, and delete the rows up to that ID.

        Sets `is_outdated` if another relay has changed a stream, or if a writer's epoch ended at or below the new
        floor. Yields the name of each step before the step runs.

        Args:
            max_streams: the largest number of floors to raise in this call; None for no limit. The next call raises the
                floors of the streams that were left.
        """
        raised = 0
        for state in _rotate_to([*self._streams.values()], self._last_raised_stream + 1):
            if raised == max_streams:
                break
            floor = state.evidence.floor
            reached = state.acknowledged_ids.contiguous_end(floor)
            if state.chains is not None:
                reached = state.chains.max_floor(reached)
            if reached > floor:
                raised += 1
                self._last_raised_stream = state.stream_epoch.stream.number
                yield "raise floor"
                rows, version = state.acknowledged_row_ids.up_to(reached), state.stream_epoch.version
                if not queries.raise_floor(self._connection, state.stream_epoch.stream, version, floor, reached, rows):
                    self.is_outdated = True
                    continue
                state.evidence.floor = reached
                state.acknowledged_ids = state.acknowledged_ids.above(reached)
                state.acknowledged_row_ids = state.acknowledged_row_ids.above(reached)
                if state.chains is not None:
                    state.chains.note_floor(reached)
                self.is_outdated |= any(id <= reached for id in state.epoch_ends.values())


def _rotate_to(streams: Sequence[_StreamState], number: int) -> list[_StreamState]:
    """Sort the streams by number. The streams with lower numbers than `number` come last."""
    return sorted(
        streams, key=lambda state: (state.stream_epoch.stream.number < number, state.stream_epoch.stream.number)
    )


def _initial_state(stream_epoch: StreamEpoch) -> _StreamState:
    several = len(stream_epoch.writers) > 1
    sent_upto = {writer.name: writer.sent_upto for writer in stream_epoch.writers.values()}
    chains = WriterChains(sent_upto) if several else None
    return _StreamState(stream_epoch, StreamEvidence(stream_epoch.floor, has_several_writers=several), chains)
