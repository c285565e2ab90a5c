"""Installs the schema `tidemark_reader` in a database of readers, and writes published positions to the database.

`reader/schema.sql` has the tables that `tidemark.Reader` needs. `reader/functions.sql` has the table of positions, and
the functions for readers in any language (docs/design.md 6b). This module does not import redis-py.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Literal

from psycopg import sql
from psycopg.types.json import Jsonb

from tidemark.common.log import Progress, no_progress
from tidemark.common.migrations import run_with_lock_timeout
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession

MIGRATE_COMMAND = "tidemark follow migrate"

_DATABASE_USE = DatabaseUse(
    "dsn",
    remedies={
        "3F": f"run `{MIGRATE_COMMAND}`",
        "42P01": f"run `{MIGRATE_COMMAND}`",
        "42883": f"run `{MIGRATE_COMMAND}`",
        "42501": "grant the user the role tidemark_relay; migrations need the owner of the schema tidemark_reader",
    },
)


@dataclass(frozen=True, slots=True)
class PublishedLate:
    """A late completion as Tidemark has published it. The fields mean the same as those of `tidemark.Late`."""

    number: int
    writer: str
    epoch: int
    prev: int
    id: int
    facts: int
    why: str


@cache
def _read_script() -> tuple[str, str]:
    """Read the SQL of the schema. Returns the SQL, and its version: the first 16 hex digits of the SQL's hash."""
    folder = files("tidemark") / "sinks" / "reader"  # without an import of that package, which needs redis
    text = "\n".join((folder / name).read_text("utf-8") for name in ("schema.sql", "functions.sql"))
    return text, sha256(text.encode()).hexdigest()[:16]


def reader_session(dsn: Dsn, application: str) -> PostgresSession:
    """Return a session in a database of readers. `application` becomes the session's `application_name`."""
    return PostgresSession(dsn, application, _DATABASE_USE)


def install(session: PostgresSession, progress: Progress = no_progress) -> bool:
    """Create or update the tables and functions of the schema `tidemark_reader`.

    Args:
        session: a session of the owner of the schema.
        progress: shows the progress of one step.

    Returns:
        True if the schema was created or updated; False if the schema was up to date. In this case, nothing is locked.

    Raises:
        PrerequisitePending: other transactions have locked the tables for too long.
    """
    text, version = _read_script()
    comment = f"Places of readers, and positions; installed from {version}"

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


PositionSource = Literal["database", "handover", "published"]


@dataclass(frozen=True, slots=True)
class KnownStream:
    """A stream in a database of readers.

    Attributes:
        linear: the linear position of the stream in this database.
        last_late_number: the number of the stream's newest late completion in this database.
        source: where the position comes from: column `tidemark_reader.positions.source`.
    """

    linear: int
    last_late_number: int
    source: PositionSource


@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """The published positions and late completions of a stream.

    Attributes:
        linear: the linear position.
        writers: writer -> position.
        late_after: `late` has all late completions with higher numbers than this one; 0 for all of the stream.
        late: these late completions, in ascending order of number.
    """

    linear: int
    writers: Mapping[str, int]
    late_after: int = 0
    late: Sequence[PublishedLate] = ()


def known_streams(session: PostgresSession) -> dict[str, KnownStream]:
    """Query the streams whose positions this database has. Returns name -> stream."""
    rows = session.fetch_tuples("select stream, linear, late, source from tidemark_reader.positions")
    return {stream: KnownStream(linear, late, source) for stream, linear, late, source in rows}


def local_writers(session: PostgresSession) -> dict[str, tuple[int, Mapping[str, int]]]:
    """Query the streams to which services append facts in this database, and the writers of these streams.

    Returns:
        Stream -> (after, epochs). `after`: the ID, without its sign, beyond which the IDs of the stream begin.
        `epochs`: writer -> epoch; 0 if the database's own writer has no epoch yet. Empty if the database has no tables
        of the relay.
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
    return {stream: (after, epochs) for stream, after, epochs in rows}


def count_late_after(session: PostgresSession, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Count the late completions of streams in this database.

    Args:
        session: a session in the database.
        pairs: pairs (stream, number).

    Returns:
        (stream, number) -> the number of late completions of the stream with a higher number.
    """
    rows = session.fetch_tuples(
        "select known.stream, known.number, (select count(*) from tidemark_reader.late_completions l"
        "   where l.stream = known.stream and l.number > known.number)"
        " from unnest(%s::text[], %s::bigint[]) as known (stream, number)",
        ([stream for stream, _ in pairs], [number for _, number in pairs]),
    )
    return {(stream, number): count for stream, number, count in rows}


def hand_over(
    session: PostgresSession, stream: str, last_late_number: int, linear: int, positions: Mapping[str, int]
) -> PositionSource:
    """Stop this database from deciding the position of a stream, permanently. Other streams are not changed.

    The stream has the source `handover`, and its position does not move, until the published positions have reached the
    position in this database. Then the stream becomes `published`. Readers in this database do not get the late
    completions up to number `last_late_number`, because these late completions are older than the first call.

    Args:
        session: a session in the database.
        stream: the stream.
        last_late_number: the number of the newest published late completion.
        linear: the published linear position.
        positions: writer -> published position. A writer that is not named is at `linear`.

    Returns:
        The source of the stream now.
    """
    source = session.fetch_value(
        "select tidemark_reader.share(%s, %s, %s, %s)", [stream, last_late_number, linear, Jsonb(dict(positions))]
    )
    return "published" if source == "published" else "handover"


def publish(session: PostgresSession, updates: Mapping[str, StreamUpdate]) -> None:
    """Store the published positions and late completions of streams, in one transaction.

    A position that is lower than the stored position is ignored. Only streams with the source `published` are moved.

    Args:
        session: a session in the database.
        updates: stream -> its published positions and late completions.
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
