"""Queries the streams' sequences and their defects, and outbox rows with impossible IDs (docs/design.md 4b).

A row is *misplaced* if its ID is at or below the floor, or beyond the head. Logical replication, a restore or `setval`
can change rows and sequences separately while the connection stays open. So the relay queries the sequences in every
round, and the misplaced rows in every round in which that query is not too slow.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakSet

import psycopg
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from tidemark.common.errors import UnsuitableSequence
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import AppendStream
from tidemark.streaming.values.direction import Direction

log = get_logger(__name__)

HEADS_AT_ONCE = 1000
"""The largest number of sequences that one statement reads. The statement locks each of them, and the size of the lock
table is limited."""
# `select last_value` would read without the sequence's lock. While `nextval` writes to the write-ahead log,
# `last_value` is briefly too high, by up to 32.
_LAST = """
    case when has_sequence_privilege(ids, 'select') and seqcache is not null
        then abs(pg_sequence_last_value(ids)) end
"""
_DEFECT = """
    case when seqcache is null then 'gone'
        when not has_sequence_privilege(ids, 'select') then 'unreadable'
        when seqcache <> 1 or seqcycle or seqincrement <> direction
        then concat_ws(', ',
            case when seqcache <> 1 then format('CACHE %%s', seqcache) end,
            case when seqcycle then 'CYCLE' end,
            case when seqincrement <> direction then format('INCREMENT BY %%s', seqincrement) end)
        else '' end
"""
_SNAPSHOTS = f"""
    select known.number, stream, direction, ids::text, {_DEFECT}, {_LAST}, abs(known.after), abs(floor), version,
        coalesce((select max(upto) from tidemark.append_sent as noted where noted.number = known.number), 0),
        coalesce(written_by <> progress.xmin, false)::integer
    from tidemark.append_streams as known
    join tidemark.append_progress as progress on progress.number = known.number
    left join pg_sequence on seqrelid = ids
    where ids is not null and known.number > $1
    order by known.number limit {HEADS_AT_ONCE}
""".replace("%%", "%").encode()
_prepared: WeakSet[Connection] = WeakSet()
"""The sessions in which `_SNAPSHOTS` is prepared."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The sequence of a stream.

    Attributes:
        name: the name of the sequence.
        defect: why the sequence is unfit: `gone`, `unreadable`, or its unsafe options, such as `CACHE 20, CYCLE`. Empty
            if the sequence is fit.
        last_id: the last ID that the sequence gave out (a magnitude). None if it gave out no ID since its creation or
            restart, or if it is gone or unreadable.
    """

    name: str
    defect: str
    last_id: int | None

    def problem(self, stream: AppendStream) -> UnsuitableSequence | None:
        """The reason why no ID of the sequence may be decided, and what to do; None if the sequence is fit."""
        match self.defect:
            case "":
                return None
            case "gone":
                return self._problem(stream, "it does not exist", "restore it, or drop the stream and create it again")
            case "unreadable":
                return self._problem(
                    stream, "this user may not read it", f"run: GRANT SELECT ON SEQUENCE {self.name} TO tidemark_relay"
                )
        remedy = f"run: ALTER SEQUENCE {self.name} INCREMENT BY {stream.direction.signed(1)} CACHE 1 NO CYCLE"
        return self._problem(stream, f"it has {self.defect}, so it may give out IDs that were declared void", remedy)

    def lag_problem(self, stream: AppendStream, highest_id: int) -> UnsuitableSequence:
        """The problem, and what to do, if the sequence has not given out the ID of a row in the outbox.

        Args:
            stream: the stream of the sequence.
            highest_id: the highest ID in use, to which the sequence must be set (a magnitude).
        """
        id = stream.direction.signed(highest_id)
        problem = f"it has not given out the ID of a row in tidemark.append_outbox; the highest ID in use is {id}"
        return self._problem(stream, problem, f"run: SELECT setval('{self.name}', {id})")

    def _problem(self, stream: AppendStream, problem: str, remedy: str) -> UnsuitableSequence:
        return UnsuitableSequence(f"{self.name} of stream {stream.name}", problem, remedy)


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """The state of a stream that is stored in the database. IDs are magnitudes.

    Attributes:
        sequence: the sequence of the stream.
        begins_after: the IDs of the stream begin beyond this one.
        floor: every ID up to the floor is decided, and Kafka has the records.
        version: the version of the stream's epochs.
        published_bound: the stored upper bound of the published IDs (see `queries.store_heads`); 0 if none is stored.
        foreign_write: 1 if a restore or a replication wrote the row with the floor; 0 if a relay wrote the row.
    """

    sequence: SequenceState
    begins_after: int
    floor: int
    version: int
    published_bound: int
    foreign_write: int

    @property
    def known_head(self) -> int:
        """The highest ID that must have been given out, from the stored state without the sequence."""
        return max(self.floor, self.published_bound)


@dataclass(frozen=True, slots=True)
class MisplacedRows:
    """The IDs of a stream's misplaced rows (magnitudes).

    Attributes:
        lowest_id: the lowest ID at or below the floor; None if there is no such row.
        highest_id: the highest ID beyond the head; None if there is no such row.
    """

    lowest_id: int | None
    highest_id: int | None


def read_snapshots(connection: Connection) -> dict[AppendStream, StreamSnapshot]:
    """Query the stored state of all streams that are not dropped. Raises `psycopg.Error`.

    The relay calls this function 20 times a second while the database is idle. So the function avoids psycopg's
    cursors, which cost more than the query.
    """
    server = connection.pgconn
    if connection not in _prepared:
        _check_result(connection, server.prepare(b"tidemark_heads", _SNAPSHOTS))
        _prepared.add(connection)
    encoding, observed, above, rows = connection.info.encoding, dict[AppendStream, StreamSnapshot](), 0, HEADS_AT_ONCE
    while rows == HEADS_AT_ONCE:
        result = _check_result(connection, server.exec_prepared(b"tidemark_heads", [b"%d" % above]))
        rows = result.ntuples
        for row in range(rows):
            texts = tuple(result.get_value(row, column) for column in range(result.nfields))
            append_stream, observed[append_stream] = _decode_row(texts, encoding)
            above = append_stream.number
    return observed


@lru_cache(2 * HEADS_AT_ONCE)
def _decode_row(texts: tuple[bytes | None, ...], encoding: str) -> tuple[AppendStream, StreamSnapshot]:
    """Decode one row of `_SNAPSHOTS`. The results are cached, because most rows do not change between two queries."""
    number, stream, sign, name, defect, last, *numbers = [text and text.decode(encoding) for text in texts]
    sequence = SequenceState(name or "", defect or "", None if last is None else int(last))
    append_stream = AppendStream(int(number or 0), stream or "", Direction(int(sign or 0)))
    return append_stream, StreamSnapshot(sequence, *(int(column or 0) for column in numbers))


def _check_result(connection: Connection, result: PGresult) -> PGresult:
    if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        return result
    if connection.closed:
        raise psycopg.OperationalError(result.get_error_message())
    raise psycopg.errors.error_from_result(result)


def read_head(connection: Connection, stream: AppendStream, snapshot: StreamSnapshot, known_head: int) -> int:
    """Return the highest ID that the sequence gave out (a magnitude).

    If `snapshot` has no last ID, the sequence is new, restarted or unfit. If the sequence is fit and `known_head` is
    beyond `snapshot.begins_after`, the function queries the next ID of the sequence, and returns the ID before.
    Otherwise it returns `snapshot.begins_after`.

    Args:
        connection: a session of the database.
        stream: the stream.
        snapshot: the result of `read_snapshots` for the stream.
        known_head: the highest ID that the caller has seen given out (a magnitude).
    """
    if snapshot.sequence.last_id is not None:
        return snapshot.sequence.last_id
    if snapshot.sequence.defect or known_head <= snapshot.begins_after:
        return snapshot.begins_after
    # `last_value` is read without the sequence's lock. pg_sequence_last_value takes the lock, so no session is taking
    # an ID at that moment.
    row = connection.execute(
        f"select abs(last_value), abs(pg_sequence_last_value(%s::regclass)) from {snapshot.sequence.name}".encode(),
        [snapshot.sequence.name],
    ).fetchone()
    assert row is not None
    next_id, last = row
    return int(next_id) - 1 if last is None else int(last)


def read_misplaced_rows(connection: Connection) -> dict[int, MisplacedRows]:
    """Query the misplaced rows: number of the stream -> rows. Streams without misplaced rows are left out.

    The query reads the sequences after its snapshot of the rows. So a row that is committed during the query is not
    beyond the head. If a sequence gave out no ID since its restart, every row counts as beyond the head.
    """
    rows = connection.execute(
        f"""
        select number, abs(lowest), case when last is null or abs(highest) > last then abs(highest) end
        from (
            select number, {_LAST} as last,
                case direction
                    when 1 then (select min(id) from tidemark.append_outbox as kept
                        where kept.number = known.number and id between 1 and floor)
                    else (select max(id) from tidemark.append_outbox as kept
                        where kept.number = known.number and id between floor and -1)
                end as lowest,
                case direction
                    when 1 then (select max(id) from tidemark.append_outbox as kept where kept.number = known.number)
                    else (select min(id) from tidemark.append_outbox as kept where kept.number = known.number)
                end as highest
            from tidemark.append_streams as known join tidemark.append_progress using (number)
            left join pg_sequence on seqrelid = ids
            where ids is not null
        ) as found
        where highest is not null and (lowest is not null or last is null or abs(highest) > last)
        """.replace("%%", "%").encode()
    ).fetchall()
    return {number: MisplacedRows(lowest, highest) for number, lowest, highest in rows}


QUICK_QUERY_SECONDS = 0.02
"""The query for misplaced rows runs in every round if it takes at most this many seconds."""
_MAX_TIME_SHARE = 0.05


class MisplacedRowQuery:
    """Queries the misplaced rows (`read_misplaced_rows`), and limits how often the query runs.

    A quick query is due in every round. The query is slow while vacuum cannot remove dead rows. If the last query took
    longer than `QUICK_QUERY_SECONDS`, the next one is delayed, so that the queries take at most 5 % of the time.

    Attributes:
        result: the result of the last query: number of the stream -> rows.
    """

    def __init__(self) -> None:
        self.result: Mapping[int, MisplacedRows] = {}
        self._next_run = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the caller should call `run` in this round."""
        return time.monotonic() >= self._next_run

    def run(self, connection: Connection) -> None:
        """Run the query, and store its result in `result`."""
        began = time.monotonic()
        self.result = read_misplaced_rows(connection)
        took = time.monotonic() - began
        self._next_run = began + took / _MAX_TIME_SHARE if took > QUICK_QUERY_SECONDS else 0.0


def read_sequence_defects(connection: Connection, streams: Collection[int]) -> Mapping[int, str]:
    """Query why sequences are unfit: number of the stream -> `SequenceState.defect`. Fit sequences are left out.

    Call this function after `read_snapshots`. An unsafe option that was set and reset before the call is harmless,
    because no session keeps cached IDs after a change of the sequence.

    Args:
        connection: a session of the database.
        streams: the numbers of the streams to query.
    """
    rows = connection.execute(
        f"""
        select number, {_DEFECT} from tidemark.append_streams left join pg_sequence on seqrelid = ids
        where number = any(%s)
        """.encode(),
        [[*streams]],
    ).fetchall()
    return {number: why for number, why in rows if why}


@dataclass(frozen=True, slots=True)
class Regression:
    """A stream that went back. IDs are magnitudes.

    Attributes:
        stream: the stream.
        version: the version of the stream at the query. A relay handles the regression only if the stream still has
            this version, so only one of several relays handles it.
        floor: the new floor of the stream.
        published_bound: the new upper bound of the published IDs. Higher IDs may be given out again, although they were
            published.
        reader_floor: the ID to which the positions for readers of this database go back.
        is_restore: whether the only evidence is that a restore or a replication wrote the row with the floor. Then
            readers whose positions were also restored continue from the restored positions.
        why: the reason, for the log.
    """

    stream: AppendStream
    version: int
    floor: int
    published_bound: int
    reader_floor: int
    is_restore: bool
    why: str


def find_regressions(connection: Connection) -> list[Regression]:
    """Query the streams that went back.

    A stream is left out if its sequence is unfit, or has not given out the ID of a row in the outbox. No ID of such a
    stream is decided before the repair.
    """
    observed = read_snapshots(connection)
    misplaced_by_stream = read_misplaced_rows(connection)
    regressions = list[Regression]()
    for stream, snapshot in observed.items():
        misplaced = misplaced_by_stream.get(stream.number, MisplacedRows(None, None))
        head = read_head(connection, stream, snapshot, snapshot.known_head)
        if snapshot.sequence.defect or (misplaced.highest_id or 0) > head:
            continue
        signed, limits = stream.direction.signed, dict[int, str]()
        if head < snapshot.known_head:
            limits[head] = f"the sequence is at {signed(head)}, and was at {signed(snapshot.known_head)}"
        if misplaced.lowest_id is not None:
            id = signed(misplaced.lowest_id)
            limits[misplaced.lowest_id - 1] = (
                f"a row with ID {id} was committed below the floor {signed(snapshot.floor)}"
            )
        reader_floor, is_restore = min([snapshot.floor, *limits]), not limits
        if snapshot.foreign_write:
            limits.setdefault(head, "the rows were written by a restore or a replication")
        if limits:
            limit = min(limits)
            # After the restore, a relay may have stored a higher bound, and services may have taken IDs up to it.
            bound = snapshot.floor if snapshot.foreign_write else snapshot.published_bound
            floor, bound = min(snapshot.floor, limit), min(bound, limit)
            why = "; ".join(limits.values())
            regressions.append(Regression(stream, snapshot.version, floor, bound, reader_floor, is_restore, why))
    return regressions


def begin_timelines_for_filled_ids(connection: Connection) -> None:
    """Begin a new timeline for the readers of each stream that has a fact which readers may have missed. Logs a
    warning.

    Such a fact was committed at or below the stored position for readers, by a younger transaction than the transaction
    that stored the position. This happens if the sequence was set back while no process noticed it. Otherwise the
    transactions of all facts up to a position end before the transaction that stores the position begins.
    """
    rows = connection.execute(
        """
        select stream, filled - direction, tidemark_reader.went_back(stream, filled - direction)
        from (
            select stream, direction, (
                select id from tidemark.append_outbox as kept
                where kept.number = progress.number and age(kept.xmin) < age(known.xmin)
                    and id between least(floor + direction, linear) and greatest(floor + direction, linear)
                order by abs(id) limit 1
            ) as filled
            from tidemark_reader.positions as known join tidemark.append_streams using (stream)
            join tidemark.append_progress as progress using (number)
            where source <> 'published' and abs(linear) > abs(floor)
                and not coalesce(progress.written_by <> progress.xmin, false)
        ) as facts
        where filled is not null
        """
    ).fetchall()
    for stream, back_to, _ in rows:
        log.warning(
            "A fact was committed at an ID that readers here have passed: a new timeline begins for these readers",
            stream=stream,
            back_to=back_to,
        )
