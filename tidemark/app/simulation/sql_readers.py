"""The two readers in SQL of the streams workload. They call `tidemark_reader.take`, as a program in any language can.

Facts, places and effects are in the services' database, so a restore affects all of them together. A place is a row of
`tidemark_reader.places`: the checkpoint of a reader in a stream, or of one partition of the reader. The reader `sql`
has one place. The reader `parts` has partitions by writer, each with its own place. Each process runs both readers, and
reads for one place after the other.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import md5

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from tidemark.app.simulation.script import SimulatedStream
from tidemark.app.simulation.services import convert_connection_errors, run_threads
from tidemark.common.log import get_logger

log = get_logger(__name__)

READERS: Mapping[str, int | None] = {"sql": None, "parts": 3}
"""Reader -> number of partitions; None for a reader without partitions."""
MAX_FACTS_PER_TAKE = 200
IDLE_SECONDS = 0.5
ERROR_RETRY_SECONDS = 1.0

_TAKE = """
select low, high, late, withdrawn from tidemark_reader.take(
    %(stream)s, %(reader)s, most => %(most)s, wait => false, partition => %(partition)s, partitions => %(partitions)s)
"""
_DELETE_WITHDRAWN_EFFECTS = """
delete from demo.effects as effect
where reader = %(reader)s and stream = %(stream)s and stream_id <@ %(withdrawn)s::int8multirange
    and (%(partitions)s::integer is null
        or tidemark_reader.partition_of(writer, %(partitions)s) = %(partition)s::integer)
    and not exists (
        select from {table} as fact where fact.stream_id = effect.stream_id and not fact.stream_id = any(%(late)s))
"""
_INSERT_EFFECTS = """
insert into demo.effects (reader, stream, stream_id, writer, mark, late)
select %(reader)s, %(stream)s, stream_id, writer, mark, case when stream_id = any(%(late)s) then 0 end from {table}
where (abs(stream_id) > abs(%(low)s) and abs(stream_id) <= abs(%(high)s) or stream_id = any(%(late)s))
    and (%(partitions)s::integer is null
        or tidemark_reader.partition_of(writer, %(partitions)s) = %(partition)s::integer)
order by abs(stream_id), part
"""

Connection = psycopg.Connection[TupleRow]


class ReadRefused(Exception):
    """`tidemark_reader.take` refused to read for a place, or a table could not be read. The log has the reason, such as
    a remedy that an operator must run first."""


@dataclass(frozen=True, slots=True)
class SqlReaderRole:
    """Configuration of one process that runs the readers in SQL."""

    streams: Sequence[SimulatedStream]


@dataclass(frozen=True, slots=True)
class SqlPlace:
    """Names the place of a reader (`partition` is None), or of one partition of a reader (`partition`, from 0)."""

    reader: str
    partition: int | None = None

    @property
    def partition_count(self) -> int | None:
        """The number of partitions of the reader; None for a reader without partitions."""
        return READERS[self.reader]

    @property
    def name(self) -> str:
        """The name of the place in `tidemark_reader.places`, such as `sql` or `parts[0/3]`."""
        return self.reader if self.partition is None else f"{self.reader}[{self.partition}/{self.partition_count}]"

    def has_writer(self, writer: str) -> bool:
        """Whether this place includes the facts of a writer."""
        return self.partition_count is None or partition_of(writer, self.partition_count) == self.partition


def partition_of(key: str, partitions: int) -> int:
    """The number of the partition of the writer `key`, from 0. Must give the same result as
    `tidemark_reader.partition_of`."""
    return int(md5(key.encode(), usedforsecurity=False).hexdigest()[:8], 16) % partitions


def find_place(name: str) -> SqlPlace | None:
    """The place with this name in `tidemark_reader.places`; None if no reader in SQL has such a place."""
    return next((sql_place for reader in READERS for sql_place in places_of(reader) if sql_place.name == name), None)


def places_of(reader: str) -> list[SqlPlace]:
    """All places of a reader: one, or one for each partition."""
    partitions = READERS[reader]
    return [SqlPlace(reader)] if partitions is None else [SqlPlace(reader, number) for number in range(partitions)]


def run_sql_reader(role: SqlReaderRole, dsn: str, stopping: threading.Event) -> None:
    """Read until `stopping` is set.

    After a lost connection, opens a new one. After a refusal of `take`, tries again. Raises other errors of psycopg,
    and sets `stopping`.
    """
    run_threads([partial(_read, role, dsn, stopping)], stopping)


def _read(role: SqlReaderRole, dsn: str, stopping: threading.Event) -> None:
    """Read for all places, one after the other, until `stopping` is set. Raises `ConnectionLost`."""
    # With row_security=off, a query of a table whose rows are hidden raises an error instead of returning no rows.
    with (
        convert_connection_errors(psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.InternalError),
        psycopg.connect(dsn, autocommit=True, connect_timeout=5, options="-c row_security=off") as connection,
    ):
        for stream in role.streams:
            connection.execute(sql.SQL("listen {}").format(sql.Identifier(f"tidemark_{stream.name}")))
        sql_places = [
            (stream.name, sql_place) for stream in role.streams for reader in READERS for sql_place in places_of(reader)
        ]
        retry_at = dict.fromkeys(sql_places, 0.0)
        while not stopping.is_set():
            has_read = False
            for stream_place in sql_places:
                if retry_at[stream_place] > time.monotonic():
                    continue
                try:
                    has_read |= _take(connection, *stream_place)
                except ReadRefused:
                    retry_at[stream_place] = time.monotonic() + ERROR_RETRY_SECONDS
            if not has_read:
                for _ in connection.notifies(timeout=IDLE_SECONDS, stop_after=1):
                    pass


def _take(connection: Connection, stream: str, sql_place: SqlPlace) -> bool:
    """Read the next facts for a place, and write their effects, in one transaction. Deletes the effects of withdrawn
    facts.

    Returns:
        False if there are no new facts, or another process has locked the place.

    Raises:
        ReadRefused: `take` refused to read, or a table could not be read. The reason is logged.
    """
    values = {
        "stream": stream,
        "reader": sql_place.reader,
        "most": MAX_FACTS_PER_TAKE,
        "partition": sql_place.partition,
        "partitions": sql_place.partition_count,
    }
    try:
        with connection.transaction():
            taken = connection.execute(_TAKE, values).fetchone()
            if taken is None:
                return False
            values |= dict(zip(("low", "high", "late", "withdrawn"), taken, strict=True))
            for statement in (_DELETE_WITHDRAWN_EFFECTS, _INSERT_EFFECTS) if taken[3] else (_INSERT_EFFECTS,):
                connection.execute(sql.SQL(statement).format(table=sql.Identifier("demo", stream)), values)
            return True
    except (
        psycopg.errors.ObjectNotInPrerequisiteState,  # an operator must run the statement in the hint
        psycopg.errors.InsufficientPrivilege,  # row level security hides the rows of a table
        psycopg.errors.UndefinedObject,  # the relay has not created its objects yet
    ) as problem:
        text = f"{problem.diag.message_primary}. {problem.diag.message_hint or ''}"
        log.warning("A reader in SQL cannot read; trying again", reader=sql_place.name, stream=stream, problem=text)
        raise ReadRefused(text) from problem


def move_back(connection: Connection, stream: str, sql_place: SqlPlace, back_to: int) -> bool:
    """Move a place back to the ID `back_to` (signed) after a restore of the stream's database, as an operator does.

    Also deletes the effects of the place beyond `back_to`. Does nothing and returns False if the place is not beyond
    `back_to`.
    """
    with connection.transaction():
        if abs(_lock_place(connection, stream, sql_place)[0]) <= abs(back_to):
            return False
        beyond = connection.execute(
            "select distinct stream_id, writer from demo.effects"
            " where reader = %s and stream = %s and abs(stream_id) > abs(%s)",
            [sql_place.reader, stream, back_to],
        ).fetchall()
        own = [(stream_id, writer) for stream_id, writer in beyond if sql_place.has_writer(writer)]
        connection.execute(
            "delete from demo.effects as effect"
            " using unnest(%s::bigint[], %s::text[]) as own (stream_id, writer)"
            " where effect.reader = %s and effect.stream = %s"
            " and effect.stream_id = own.stream_id and effect.writer = own.writer",
            [[id for id, _ in own], [writer for _, writer in own], sql_place.reader, stream],
        )
        connection.execute("select tidemark_reader.seek(%s, %s, %s)", [stream, sql_place.name, f"m{back_to}"])
        return True


def handle_late(connection: Connection, stream: str, sql_place: SqlPlace, writer: str, prev: int, id: int) -> bool:
    """Handle a late completion as an operator does: write the effects of the late facts up to the place's linear
    position, and move the place past the late completion.

    The late facts are the facts of `writer` in (`prev`, `id`]; both IDs are signed. Does nothing and returns False if
    the next late completion of the place is another one, or there is none.
    """
    with connection.transaction():
        linear, late, late_part = _lock_place(connection, stream, sql_place)
        following = connection.execute(
            "select number, writer, prev, id from tidemark_reader.late_completions where stream = %s and number > %s"
            " order by number limit 1",
            [stream, late],
        ).fetchone()
        if following is None or following[1:] != (writer, prev, id):
            return False
        number = following[0]
        low = late_part[1] if late_part and late_part[0] == number else prev
        if sql_place.has_writer(writer):
            connection.execute(
                sql.SQL(
                    "insert into demo.effects (reader, stream, stream_id, writer, mark, late)"
                    " select %s, %s, stream_id, writer, mark, %s from {} where writer = %s"
                    " and abs(stream_id) > abs(%s) and abs(stream_id) <= least(abs(%s), abs(%s))"
                    " order by abs(stream_id), part"
                ).format(sql.Identifier("demo", stream)),
                [sql_place.reader, stream, number, writer, low, id, linear],
            )
        connection.execute("select tidemark_reader.pass_late(%s, %s)", [stream, sql_place.name])
        return True


def _lock_place(connection: Connection, stream: str, sql_place: SqlPlace) -> tuple[int, int, list[int] | None]:
    """Lock the row of a place. Returns its columns `linear`, `late` and `late_part`; (0, 0, None) without a row."""
    rows = connection.execute(
        "select linear, late, late_part from tidemark_reader.places where stream = %s and reader = %s for update",
        [stream, sql_place.name],
    ).fetchall()
    ((linear, late, late_part),) = rows or [(0, 0, None)]
    return linear, late, late_part
