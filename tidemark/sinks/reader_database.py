"""The schema `tidemark_reader` in a database of readers: its installation, and the writes of published positions.

`reader/schema.sql` has the tables that `tidemark.Reader` needs. `reader/functions.sql` has the positions, and the
functions for readers in any language (docs/design.md 6b). This module does not import redis-py.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from psycopg import sql
from psycopg.types.json import Jsonb

from tidemark.common.log import Progress, no_progress
from tidemark.common.migrations import run_with_lock_timeout
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession

MIGRATE_COMMAND = "tidemark follow migrate"

_USE = DatabaseUse(
    "dsn",
    refusals={
        "3F": f"run `{MIGRATE_COMMAND}`",
        "42P01": f"run `{MIGRATE_COMMAND}`",
        "42883": f"run `{MIGRATE_COMMAND}`",
        "42501": "grant the user the role tidemark_relay; migrations need the owner of the schema tidemark_reader",
    },
)


@dataclass(frozen=True, slots=True)
class PublishedLate:
    """A late completion as Tidemark has published it; see `tidemark.Late`."""

    number: int
    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: str


@cache
def _script() -> tuple[str, str]:
    """The SQL of the schema, and its version mark."""
    folder = files("tidemark") / "sinks" / "reader"  # without an import of that package, which needs redis
    text = "\n".join((folder / name).read_text("utf-8") for name in ("schema.sql", "functions.sql"))
    return text, sha256(text.encode()).hexdigest()[:16]


def reader_session(dsn: Dsn, application: str) -> PostgresSession:
    """A session in a database of readers; `application` becomes its `application_name`."""
    return PostgresSession(dsn, application, _USE)


def install(session: PostgresSession, progress: Progress = no_progress) -> bool:
    """Create or update tables and functions. Returns whether anything had to change; if not, takes no lock.

    `progress` shows the one script. Raises `PrerequisitePending` if a lock was not free in time.
    """
    text, mark = _script()
    comment = f"Places of readers, and positions; installed from {mark}"

    def step(connection: Connection) -> None:
        # Two processes must not replace one function at the same moment.
        connection.execute("select pg_advisory_xact_lock(hashtext('tidemark_reader'))")
        connection.execute(text.encode())
        connection.execute(sql.SQL("comment on schema tidemark_reader is {}").format(comment))

    query = "select obj_description(to_regnamespace('tidemark_reader'), 'pg_namespace')"
    if session.fetch_value(query) == comment:
        return False
    with progress(1) as advance:
        run_with_lock_timeout(session, "installing tidemark_reader", step)
        advance(1)
    return True


@dataclass(frozen=True, slots=True)
class KnownStream:
    """A stream in a database of readers.

    Attributes:
        linear: its linear position.
        late: the number of its newest late completion.
        is_decided_here: whether the transactions of this database decide its position.
    """

    linear: int
    late: int
    is_decided_here: bool


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """The published positions and late completions of a stream. `late` begins after the number `late_after`."""

    linear: int
    writers: Mapping[str, int]
    late_after: int = 0
    late: Sequence[PublishedLate] = ()


def known_streams(session: PostgresSession) -> dict[str, KnownStream]:
    """The streams whose positions this database has, by name."""
    rows = session.fetch_tuples("select stream, linear, late, source = 'database' from tidemark_reader.positions")
    return {stream: KnownStream(linear, late, is_decided_here) for stream, linear, late, is_decided_here in rows}


def local_writers(session: PostgresSession) -> dict[str, tuple[int, Mapping[str, int]]]:
    """The streams that services append to in this database; empty if the database has no tables of the relay.

    Returns:
        Stream -> (the ID, as a magnitude, after which the stream begins; writer -> epoch).
    """
    if session.fetch_value("select to_regclass('tidemark.append_streams')") is None:
        return {}
    rows = session.fetch_tuples(
        """
        select stream, abs(streams.after), coalesce(jsonb_object_agg(known.writer, known.epoch)
            filter (where known.writer is not null), '{}')
            || case when max(kept.writer) is null then '{}' else jsonb_build_object(max(kept.writer), coalesce(
                max(known.epoch) filter (where known.writer = kept.writer), 0)) end
        from tidemark.append_streams as streams join tidemark.append_progress as kept using (number)
        left join tidemark.append_writers as known using (number)
        where ids is not null group by 1, 2
        """
    )
    return {stream: (after, writers) for stream, after, writers in rows}


def count_late_after(session: PostgresSession, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """For each (stream, number), count the late completions of the stream with a higher number in this database."""
    rows = session.fetch_tuples(
        "select known.stream, known.number, (select count(*) from tidemark_reader.late_completions l"
        "   where l.stream = known.stream and l.number > known.number)"
        " from unnest(%s::text[], %s::bigint[]) as known (stream, number)",
        ([stream for stream, _ in pairs], [number for _, number in pairs]),
    )
    return {(stream, number): count for stream, number, count in rows}


def start_following(session: PostgresSession, stream: str, late: int) -> None:
    """Begin to follow the published positions of a stream that this database decided before.

    Readers do not get the late completions up to number `late`: these are older.
    """
    session.execute("select tidemark_reader.share(%s, %s)", [stream, late])


def publish(session: PostgresSession, updates: Mapping[str, StreamUpdate]) -> None:
    """Move streams to their published positions, in one transaction with their late completions. A lower position is
    ignored.
    """
    with session.use() as connection, connection.transaction():
        # Store late completions before positions: no position may pass a late fact that is not stored.
        for stream, update in updates.items():
            if update.late or update.late_after:
                _publish_late(connection, stream, update)
        connection.execute(
            "select tidemark_reader.publish('published', %s, %s::bigint[], %s::jsonb[])",
            [
                [*updates],
                [update.linear for update in updates.values()],
                [Jsonb(dict(update.writers)) for update in updates.values()],
            ],
        )


def _publish_late(connection: Connection, stream: str, update: StreamUpdate) -> None:
    connection.execute(
        "select tidemark_reader.publish_late(%s, %s, %s::bigint[], %s::text[], %s::bigint[], %s::bigint[],"
        " %s::bigint[], %s::bigint[], %s::text[])",
        [
            stream,
            update.late_after,
            *([getattr(late, name) for late in update.late] for name in PublishedLate.__slots__),
        ],
    )
