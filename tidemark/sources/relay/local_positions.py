"""Decides the positions of a database's streams for readers in that database, without Kafka (docs/design.md 6b).

The module uses the same evidence as the relay (`evidence`). The relay decides for each ID whether the ID has a fact.
This module decides only whether an ID is complete: the ID's transaction has ended, so every later statement sees the
rows of the transaction. Any number of processes may decide at once, and be killed between any two steps, because stored
positions only rise.
"""

import threading
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field

from psycopg.types.json import Jsonb

from tidemark.common.backoff import Backoff
from tidemark.common.errors import Refused, Retry, SchemaMismatch
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sources.relay import queries, sequences
from tidemark.sources.relay.decider import is_due, observe
from tidemark.sources.relay.evidence import StreamEvidence
from tidemark.sources.relay.queries import SCHEMA, AppendStream, signed_bounds
from tidemark.sources.relay.sequences import StreamSnapshot
from tidemark.sources.run_loop import StandbyLocks, set_lock_timeout
from tidemark.streaming.values.intervals import Intervals

log = get_logger(__name__)

SHORTEST_ROUND_PAUSE_SECONDS, LONGEST_ROUND_PAUSE_SECONDS = 0.005, 0.045
"""Seconds between two rounds: the first after a position has moved, the second after a while without moves."""
_LONGEST_IDLE_PAUSE_SECONDS = 0.5
"""Seconds until the next round while the database is idle. The round begins earlier if a sequence gives out an ID."""
IDS_AT_ONCE = 50_000
"""The largest number of IDs that one query reads from the outbox."""
_LOCK_KEY = 1
"""The second half of the key of the advisory lock; 0 in the relay's key. The first half is `queries.LOCK_KEY_BASE`."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""Shortest and longest pause before the next attempt after a failure, in seconds."""


@dataclass(slots=True)
class _DecidedStream:
    """The state of one stream in a decider.

    Attributes:
        stream: the stream.
        version: the version of the stream when the stream was loaded.
        evidence: the evidence for the stream's IDs.
        position: the stored linear position (a magnitude).
        timeline_number: the number of the timeline of the stored position; None if no position is stored.
        lock_keys: name of a writer -> the second half of the key of the writer's lock. Only named writers.
        writers: name of a writer -> the writer's position that this process has stored (a magnitude).
    """

    stream: AppendStream
    version: int
    evidence: StreamEvidence
    position: int
    timeline_number: int | None
    lock_keys: Mapping[str, int]
    writers: Mapping[str, int] = field(default_factory=dict)

    def vector(self) -> dict[str, int]:
        """Name of a writer -> the position to store (a magnitude).

        A writer is left out unless its position is beyond the decided linear position and beyond its position in
        `writers`.
        """
        complete, positions = self.evidence.decided_upto, dict[str, int]()
        if complete < self.evidence.head:
            for writer, lock in self.lock_keys.items():
                undecided = self.evidence.undecided_ids([lock])
                position = int(undecided.lows[0]) if undecided else self.evidence.head
                if position > max(complete, self.writers.get(writer, 0)):
                    positions[writer] = position
        return positions


class PositionDecider:
    """Decides and stores the positions of all streams on one connection.

    A new connection needs a new decider, because a server reuses transaction numbers after a crash.

    Args:
        connection: must not be in a transaction.
        is_local: gets the name of a stream, and returns whether all writers of the stream are in this database. If the
            result is False, the next round calls the function again.
    """

    def __init__(self, connection: Connection, is_local: Callable[[str], bool] = lambda _: True) -> None:
        self._connection = connection
        self._is_local = is_local
        self._streams: dict[int, _DecidedStream] = {}
        self._snapshots: Mapping[int, tuple[AppendStream, StreamSnapshot]] = {}  # of the last round
        self._is_new = True

    @property
    def has_backlog(self) -> bool:
        """Whether the last round left ranges of the outbox unread. Then the next round need not be delayed."""
        return any(state.evidence.has_unread for state in self._streams.values())

    def run_round(self) -> Generator[str, None, bool]:
        """Query all streams once, and store their positions. Also begins a new timeline for a stream that went back.

        Yields the name of each step before the step runs, so that tests can run other processes between two steps.
        Returns whether there was a position to store.
        """
        yield "heads"
        self._snapshots = snapshots = {
            stream.number: (stream, snapshot) for stream, snapshot in sequences.read_snapshots(self._connection).items()
        }
        heads = self._read_heads(snapshots)
        due = {number for number, head in heads.items() if is_due(self._streams[number].evidence, head)}
        if observed := [state for number, state in self._streams.items() if number in due]:
            yield from observe(self._connection, {state.stream.number: state.evidence for state in observed}, heads)
            for state in observed:
                if ranges := state.evidence.unread_ranges():
                    yield "read"
                    self._read(state, ranges)
        yield "load"
        self._load([number for number in snapshots if number not in self._streams], snapshots)
        yield "store"
        return self._store()

    def wait_for_ids(self, pause: float, max_seconds: float) -> bool:
        """Wait in the database until a sequence gives out an ID or a stream is added, or for `max_seconds`.

        The wait takes a fifth of the CPU time of rounds.

        Args:
            pause: seconds between two queries of the sequences, inside the database.
            max_seconds: the longest wait, in seconds.

        Returns:
            False at once, without waiting, if an ID is open, a sequence is unfit, or there are too many streams. Then
            the sequences alone do not show that a round is due. True after the wait.
        """
        seen = {number: snapshot.sequence for number, (_, snapshot) in self._snapshots.items()}
        if (
            any(state.evidence.decided_upto < state.evidence.head for state in self._streams.values())
            or any(sequence.defect for sequence in seen.values())
            or len(seen) > sequences.HEADS_AT_ONCE
        ):
            return False
        self._connection.execute(
            "call tidemark.await_ids(%s::integer[], %s::bigint[], %s::float8, %s::float8)",
            [[*seen], [sequence.last_id for sequence in seen.values()], pause, max_seconds],
        )
        return True

    def _read_heads(self, snapshots: Mapping[int, tuple[AppendStream, StreamSnapshot]]) -> dict[int, int]:
        """Read the highest ID that this round may decide, for each stream: number of the stream -> magnitude.

        Unloads a stream that another process has changed. If the stream's sequence went back in this session, also
        begins a new timeline. A stream that the relay must repair is left out.
        """
        heads = dict[int, int]()
        for number, state in [*self._streams.items()]:
            if number not in snapshots or snapshots[number][1].version != state.version:
                del self._streams[number]
                continue
            stream, snapshot = snapshots[number]
            before = state.evidence.head
            head = sequences.read_head(self._connection, stream, snapshot, max(before, snapshot.known_head))
            if snapshot.foreign_write:
                del self._streams[number]
            if snapshot.sequence.problem(stream) or snapshot.foreign_write or head < snapshot.known_head:
                continue  # the relay reports the problem, or begins a new timeline
            if head < before:
                del self._streams[number]
                self._begin_timeline(stream, min(head, snapshot.floor), "The sequence of a stream went back")
                continue
            heads[number] = head
        return heads

    def _begin_timeline(self, stream: AppendStream, floor: int, why: str) -> None:
        """Log a warning, and begin a timeline for readers: IDs beyond the floor (a magnitude) may be given out
        again."""
        log.warning(why, stream=stream.name, floor=stream.direction.signed(floor))
        self._connection.execute(
            "select tidemark_reader.went_back(%s, %s)", [stream.name, stream.direction.signed(floor)]
        )

    def _read(self, state: _DecidedStream, ranges: Intervals) -> None:
        """Read the outbox in these ranges, and add the IDs to the evidence. Unloads the stream if it has changed."""
        lows, highs = signed_bounds(state.stream, ranges)
        row = self._connection.execute(
            """
            select kept.version, abs(kept.floor), array(
                select abs(one.id) from unnest(%s::bigint[], %s::bigint[]) as range (low, high)
                cross join lateral (
                    select id from tidemark.append_outbox where number = kept.number and id between low and high
                    order by abs(id) limit %s
                ) as one
                order by 1 limit %s
            )
            from tidemark.append_progress as kept where kept.number = %s
            """,
            [lows, highs, IDS_AT_ONCE, IDS_AT_ONCE, state.stream.number],
        ).fetchone()
        if row is None or row[0] != state.version:
            del self._streams[state.stream.number]
            return
        _, floor, ids = row
        if len(ids) == IDS_AT_ONCE:
            ranges = ranges.up_to(ids[-1])
        state.evidence.note_rows(ranges, ids, deleted_upto=floor)

    def _load(self, numbers: Collection[int], snapshots: Mapping[int, tuple[AppendStream, StreamSnapshot]]) -> None:
        """Load streams, each from its stored position or from its floor, whichever is higher.

        A stream is not loaded if its writers are not all in this database, or if its positions come from Kafka. If a
        restore wrote the positions, begins a new timeline instead.
        """
        if not numbers:
            return
        if self._is_new:  # later, `_read_heads` detects a sequence that was set back
            sequences.begin_timelines_for_filled_ids(self._connection)
            self._is_new = False
        rows = self._connection.execute(
            """
            select number, kept.version, abs(kept.floor), abs(known.linear), known.timeline,
                known.written_by <> known.xmin and not coalesce(kept.written_by <> kept.xmin, false), (
                select coalesce(jsonb_object_agg(named.writer, hashtext(named.writer) & 4294967295), '{}')
                from tidemark.append_writers as named
                where named.number = kept.number and named.writer is distinct from kept.writer
                    and named.state in ('joining', 'joined')
            )
            from tidemark.append_streams join tidemark.append_progress as kept using (number)
            left join tidemark_reader.positions as known using (stream)
            where number = any(%s) and coalesce(known.source, 'database') = 'database'
            """,
            [[*numbers]],
        ).fetchall()
        for number, version, floor, linear, timeline, is_foreign, lock_keys in rows:
            stream, _ = snapshots[number]
            if is_foreign:  # only the positions were restored; the relay handles a restore of all tables
                self._begin_timeline(stream, floor, "A restore or a replication has written the positions for readers")
            elif timeline is not None or self._is_local(stream.name):
                evidence = StreamEvidence(max(floor, linear or 0), has_several_writers=bool(lock_keys))
                self._streams[number] = _DecidedStream(stream, version, evidence, linear or 0, timeline, lock_keys)

    def _store(self) -> bool:
        """Store the positions that have risen, and the first positions of new streams. Returns whether there were any.

        Unloads a stream whose stored position is new, or was changed by another process.
        """
        positions = {number: (state.evidence.decided_upto, state.vector()) for number, state in self._streams.items()}
        moves = [
            state
            for number, state in self._streams.items()
            if state.timeline_number is None or positions[number][0] > state.position or positions[number][1]
        ]
        if not moves:
            return False
        linears, vectors = list[int](), list[Jsonb]()
        for state in moves:
            signed, (complete, vector) = state.stream.direction.signed, positions[state.stream.number]
            linears.append(signed(complete))
            vectors.append(Jsonb({writer: signed(id) for writer, id in vector.items()}))
        row = self._connection.execute(
            "select tidemark_reader.publish('database', %s, %s::bigint[], %s::jsonb[], %s::bigint[])",
            [
                [state.stream.name for state in moves],
                linears,
                vectors,
                [state.timeline_number for state in moves],
            ],
        ).fetchone()
        moved = set[str](row[0] if row else ())
        for state in moves:
            if state.stream.name in moved and state.timeline_number is not None:
                state.position, vector = positions[state.stream.number]
                state.writers = {**state.writers, **vector}
            else:  # load the new row, or the row that another process has changed
                del self._streams[state.stream.number]
        return True


class LocalPositions:
    """Updates the positions for readers of one database until `halt` is set.

    One of several processes works. The others are on standby.

    Args:
        session: the session for all queries. `run` closes the session.
        halt: stops `run`.
        is_local: see `PositionDecider`.
    """

    def __init__(
        self, session: PostgresSession, halt: threading.Event, is_local: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._session = session
        self._halt = halt
        self._is_local = is_local
        self._standby = StandbyLocks(queries.LOCK_KEY_BASE)
        self._problem = ""

    def run(self) -> None:
        """Run until `halt` is set. Closes the session at the end.

        Retries while the database is unavailable or refuses a request. Raises `SchemaMismatch` if the database has
        another version of the schema.
        """
        try:
            self._run()
        finally:
            self._session.close()

    def _run(self) -> None:
        backoff, has_schema = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS), False
        while not self._halt.is_set():
            try:
                with self._session.use() as connection:
                    SCHEMA.check_writable(connection)
                    has_schema = True
                    if self._standby.take(connection, [_LOCK_KEY]):
                        set_lock_timeout(connection)
                        self._decide(PositionDecider(connection, self._is_local), backoff)
                self._halt.wait(1.0)
            except (Retry, Refused, SchemaMismatch) as error:
                # Version 0 means that there is no schema: a restore is running if this process has used the schema.
                if isinstance(error, SchemaMismatch) and (error.found != 0 or not has_schema):
                    raise
                if self._problem != str(error):
                    log.warning(
                        "Cannot update the positions for readers of this database; trying again", problem=str(error)
                    )
                self._problem = str(error)
                self._session.close()
                self._halt.wait(backoff.next())

    def _decide(self, decider: PositionDecider, failures: Backoff) -> None:
        pause = Backoff(SHORTEST_ROUND_PAUSE_SECONDS, LONGEST_ROUND_PAUSE_SECONDS, 1.2)
        while not self._halt.is_set():
            if _run_steps(decider.run_round()):
                pause.reset()
            failures.reset()
            self._problem = ""
            if decider.has_backlog:
                continue
            seconds = pause.next()
            if seconds < LONGEST_ROUND_PAUSE_SECONDS or not decider.wait_for_ids(
                LONGEST_ROUND_PAUSE_SECONDS, _LONGEST_IDLE_PAUSE_SECONDS
            ):
                self._halt.wait(seconds)


def _run_steps(steps: Generator[str, None, bool]) -> bool:
    """Run all steps of a generator and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return bool(over.value)
