"""Decides the positions of a database's streams for readers in that database, by its transactions (docs/design.md 6b).

The evidence is the relay's (`evidence`); Kafka is not needed. The relay decides the outcome of each ID. This module
decides only whether an ID is complete: its transaction has ended, and every later statement sees its rows. Any number
of processes may decide at once, and be killed between any two steps: stored positions only rise.
"""

import threading
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field

from psycopg.types.json import Jsonb

from tidemark.common.backoff import Backoff
from tidemark.common.errors import Refused, Retry
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, PostgresSession
from tidemark.sources.relay import queries, sequences
from tidemark.sources.relay.decider import is_due, observe
from tidemark.sources.relay.evidence import StreamEvidence
from tidemark.sources.relay.queries import SCHEMA, AppendStream, signed
from tidemark.sources.relay.sequences import SequenceState, StreamSnapshot
from tidemark.sources.run_loop import StandbyLocks, set_lock_timeout
from tidemark.streaming.values.intervals import Intervals

log = get_logger(__name__)

SHORTEST, LONGEST = 0.005, 0.045
"""Seconds between two rounds, while IDs are given out and while there are none."""
_LONGEST_WAIT = 0.5
"""Seconds until the next round while the database is idle, unless it gives out an ID."""
IDS_AT_ONCE = 50_000
_LOCK_KEY = 1
"""Second half of the lock key, after `queries.LOCK`. The relay uses 0."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0


@dataclass(slots=True)
class _KnownStream:
    """`position` is stored for readers in `timeline`; None: nothing is stored yet. `locks`: the second half of the lock
    key of each writer with a name; `writers`: their stored positions."""

    stream: AppendStream
    version: int
    evidence: StreamEvidence
    position: int
    timeline: int | None
    locks: Mapping[str, int]
    writers: Mapping[str, int] = field(default_factory=dict)

    def vector(self) -> dict[str, int]:
        """The positions of writers that are beyond the linear position (magnitudes)."""
        complete, positions = self.evidence.complete, dict[str, int]()
        if complete < self.evidence.head:
            for writer, lock in self.locks.items():
                open_ids = self.evidence.open_to([lock])
                position = int(open_ids.lows[0]) if open_ids else self.evidence.head
                if position > max(complete, self.writers.get(writer, 0)):
                    positions[writer] = position
        return positions


class PositionDecider:
    """Decides and stores the positions on one connection, which is not in a transaction. A new connection needs a new
    decider, because a server reuses transaction numbers after a crash.

    `is_ours` returns whether all writers of a stream are in this database. It is called until it first returns True.
    """

    def __init__(self, connection: Connection, is_ours: Callable[[str], bool] = lambda _: True) -> None:
        self._connection = connection
        self._is_ours = is_ours
        self._streams: dict[int, _KnownStream] = {}
        self._seen: dict[int, SequenceState] = {}  # by number of the stream, in the last round
        self._is_new = True

    @property
    def has_backlog(self) -> bool:
        """Whether the outbox holds more than the last round has read."""
        return any(known.evidence.unseen for known in self._streams.values())

    def round(self) -> Generator[str, None, bool]:
        """Query all streams once, and store their positions. Returns whether a position has moved. Yields the name of
        each step before it is taken, so that tests can let other processes act between two steps."""
        yield "heads"
        snapshots = {
            stream.number: (stream, snapshot) for stream, snapshot in sequences.heads(self._connection).items()
        }
        self._seen = {number: snapshot.sequence for number, (_, snapshot) in snapshots.items()}
        heads = self._heads(snapshots)
        due = {number for number, head in heads.items() if is_due(self._streams[number].evidence, head)}
        if observed := [known for number, known in self._streams.items() if number in due]:
            yield from observe(self._connection, {known.stream.number: known.evidence for known in observed}, heads)
            for known in observed:
                if asked := known.evidence.unread():
                    yield "read"
                    self._read(known, asked)
        yield "load"
        self._load([number for number in snapshots if number not in self._streams], snapshots)
        yield "store"
        return self._store()

    def wait_for_ids(self, pause: float, most: float) -> bool:
        """Wait in the database until a sequence gives out an ID or a stream is added. This takes a fifth of the CPU of
        rounds.

        Args:
            pause: seconds between two queries inside the database.
            most: seconds to wait at most.

        Returns:
            False at once if more than the sequences has to be queried: an ID is open, or a sequence is unfit.
        """
        if (
            any(known.evidence.complete < known.evidence.head for known in self._streams.values())
            or any(sequence.unfit for sequence in self._seen.values())
            or len(self._seen) > sequences.HEADS_AT_ONCE
        ):
            return False
        self._connection.execute(
            "call tidemark.await_ids(%s::integer[], %s::bigint[], %s::float8, %s::float8)",
            [[*self._seen], [sequence.last for sequence in self._seen.values()], pause, most],
        )
        return True

    def _heads(self, snapshots: Mapping[int, tuple[AppendStream, StreamSnapshot]]) -> dict[int, int]:
        """The highest ID of each stream that may be decided. Streams that other processes have changed are forgotten
        and loaded again."""
        heads = dict[int, int]()
        for number, known in [*self._streams.items()]:
            if number not in snapshots or snapshots[number][1].version != known.version:
                del self._streams[number]
                continue
            stream, snapshot = snapshots[number]
            before = known.evidence.head
            head = sequences.head(self._connection, stream, snapshot, max(before, snapshot.reached))
            if snapshot.foreign:
                del self._streams[number]
            if snapshot.sequence.problem(stream) or snapshot.foreign or head < snapshot.reached:
                continue  # the relay reports this and begins a new timeline
            if head < before:
                del self._streams[number]
                self._begin_timeline(stream, min(head, snapshot.floor), "The sequence of a stream went back")
                continue
            heads[number] = head
        return heads

    def _begin_timeline(self, stream: AppendStream, floor: int, why: str) -> None:
        """Begin a timeline: IDs beyond the floor may be given out again."""
        log.warning(why, stream=stream.name, floor=stream.towards.signed(floor))
        self._connection.execute(
            "select tidemark_reader.went_back(%s, %s)", [stream.name, stream.towards.signed(floor)]
        )

    def _read(self, known: _KnownStream, asked: Intervals) -> None:
        lows, highs = signed(known.stream, asked)
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
            [lows, highs, IDS_AT_ONCE, IDS_AT_ONCE, known.stream.number],
        ).fetchone()
        if row is None or row[0] != known.version:
            del self._streams[known.stream.number]
            return
        _, floor, ids = row
        if len(ids) == IDS_AT_ONCE:
            asked = asked.upto(ids[-1])
        known.evidence.read(asked, ids, settled=floor)

    def _load(self, numbers: Collection[int], snapshots: Mapping[int, tuple[AppendStream, StreamSnapshot]]) -> None:
        """Load streams: each begins at its stored position, or at the floor."""
        if not numbers:
            return
        if self._is_new:  # from now on the heads show a sequence that is set back
            sequences.warn_readers_of_filled_ids(self._connection)
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
        for number, version, floor, linear, timeline, is_foreign, locks in rows:
            stream, _ = snapshots[number]
            if is_foreign:  # only these positions were restored; the relay handles a restore of all tables
                self._begin_timeline(stream, floor, "A restore or a replication has written the positions for readers")
            elif timeline is not None or self._is_ours(stream.name):
                evidence = StreamEvidence(max(floor, linear or 0), several=bool(locks))
                self._streams[number] = _KnownStream(stream, version, evidence, linear or 0, timeline, locks)

    def _store(self) -> bool:
        positions = {number: (known.evidence.complete, known.vector()) for number, known in self._streams.items()}
        moves = [
            known
            for number, known in self._streams.items()
            if known.timeline is None or positions[number][0] > known.position or positions[number][1]
        ]
        if not moves:
            return False
        linears, vectors = list[int](), list[Jsonb]()
        for known in moves:
            signed, (complete, vector) = known.stream.towards.signed, positions[known.stream.number]
            linears.append(signed(complete))
            vectors.append(Jsonb({writer: signed(id) for writer, id in vector.items()}))
        row = self._connection.execute(
            "select tidemark_reader.publish('database', %s, %s::bigint[], %s::jsonb[], %s::bigint[])",
            [
                [known.stream.name for known in moves],
                linears,
                vectors,
                [known.timeline for known in moves],
            ],
        ).fetchone()
        moved = set[str](row[0] if row else ())
        for known in moves:
            if known.stream.name in moved and known.timeline is not None:
                known.position, vector = positions[known.stream.number]
                known.writers = {**known.writers, **vector}
            else:  # a new row, or another process changed the row
                del self._streams[known.stream.number]
        return True


class LocalPositions:
    """Updates the positions until `halt` is set. One of several processes works; the others are on standby."""

    def __init__(
        self, session: PostgresSession, halt: threading.Event, is_ours: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._session = session
        self._halt = halt
        self._is_ours = is_ours
        self._standby = StandbyLocks(queries.LOCK)
        self._problem = ""

    def run(self) -> None:
        """Run until `halt` is set; wait while the database is unavailable. Closes the session at the end."""
        try:
            self._run()
        finally:
            self._session.close()

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while not self._halt.is_set():
            try:
                with self._session.use() as connection:
                    SCHEMA.check(connection)
                    if self._standby.take(connection, [_LOCK_KEY]):
                        set_lock_timeout(connection)
                        self._decide(PositionDecider(connection, self._is_ours), backoff)
                self._halt.wait(1.0)
            except (Retry, Refused) as error:
                if self._problem != str(error):
                    log.warning("Positions for readers of this database wait", problem=str(error))
                self._problem = str(error)
                self._session.close()
                self._halt.wait(backoff.next())

    def _decide(self, decider: PositionDecider, failures: Backoff) -> None:
        pause = Backoff(SHORTEST, LONGEST, 1.2)
        while not self._halt.is_set():
            if _result(decider.round()):
                pause.reset()
            failures.reset()
            self._problem = ""
            if decider.has_backlog:
                continue
            seconds = pause.next()
            if seconds < LONGEST or not decider.wait_for_ids(LONGEST, _LONGEST_WAIT):
                self._halt.wait(seconds)


def _result(steps: Generator[str, None, bool]) -> bool:
    """Run all steps and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            return bool(over.value)
