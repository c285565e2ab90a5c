"""The schema `tidemark_reader` in a database of readers: its installation, and the positions that others write there.

`reader/schema.sql` has the tables that `tidemark.Reader` needs. `reader/functions.sql` has the positions, and the
functions for readers in any language (docs/design.md 6b). A process without the library of Redis can use this module.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from psycopg import sql
from psycopg.types.json import Jsonb

from tidemark.common.migrations import run_locking
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession

COMMAND = "tidemark follow migrate"

_USE = DatabaseUse(
    "dsn",
    refusals={
        "3F": f"run `{COMMAND}`",
        "42P01": f"run `{COMMAND}`",
        "42883": f"run `{COMMAND}`",
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
    """The SQL of the schema, and a mark of its version."""
    folder = files("tidemark") / "sinks" / "reader"  # not of that package, which needs redis
    text = "\n".join((folder / name).read_text("utf-8") for name in ("schema.sql", "functions.sql"))
    return text, sha256(text.encode()).hexdigest()[:16]


def reader_session(dsn: Dsn, application: str) -> PostgresSession:
    """A session in a database of readers; `application` is its name among the sessions of the server."""
    return PostgresSession(dsn, application, _USE)


def install(session: PostgresSession) -> bool:
    """Create or update tables and functions; returns whether anything was missing. Takes no lock if nothing is.

    Raises `PrerequisitePending` if a lock was not free in time.
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
    run_locking(session, "installing tidemark_reader", step)
    return True


@dataclass(frozen=True, slots=True)
class KnownStream:
    """A stream in a database of readers: its linear position, its newest late completion, and whether the transactions
    of this database decide its position."""

    linear: int
    late: int
    is_decided_here: bool


@dataclass(frozen=True, slots=True)
class Move:
    """What was published of a stream. Late completions up to number `late_after` are not among `late`."""

    linear: int
    writers: Mapping[str, int]
    late_after: int = 0
    late: Sequence[PublishedLate] = ()


def known_streams(session: PostgresSession) -> dict[str, KnownStream]:
    """By name, the streams whose positions this database has."""
    rows = session.fetch_tuples("select stream, linear, late, source = 'database' from tidemark_reader.positions")
    return {stream: KnownStream(linear, late, is_decided_here) for stream, linear, late, is_decided_here in rows}


def writers_here(session: PostgresSession) -> dict[str, tuple[int, Mapping[str, int]]]:
    """By stream that services append to in this database: the ID (a magnitude) behind which it begins, and the epochs
    of its writers. Empty without a relay."""
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


def late_after(session: PostgresSession, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """How many late completions of a stream this database has after a number, by stream and number."""
    rows = session.fetch_tuples(
        "select known.stream, known.number, (select count(*) from tidemark_reader.late_completions l"
        "   where l.stream = known.stream and l.number > known.number)"
        " from unnest(%s::text[], %s::bigint[]) as known (stream, number)",
        ([stream for stream, _ in pairs], [number for _, number in pairs]),
    )
    return {(stream, number): count for stream, number, count in rows}


def share(session: PostgresSession, stream: str, late: int) -> None:
    """From now on the published positions move the stream. Late completions up to number `late` are older than that."""
    session.execute("select tidemark_reader.share(%s, %s)", [stream, late])


def publish(session: PostgresSession, moves: Mapping[str, Move]) -> None:
    """Move streams to their published positions, in one transaction with their late completions. A lower position moves
    nothing."""
    with session.use() as connection, connection.transaction():
        # First, so that the position that passes a late fact never comes before it.
        for stream, move in moves.items():
            if move.late or move.late_after:
                _publish_late(connection, stream, move)
        connection.execute(
            "select tidemark_reader.publish('published', %s, %s::bigint[], %s::jsonb[])",
            [
                [*moves],
                [move.linear for move in moves.values()],
                [Jsonb(dict(move.writers)) for move in moves.values()],
            ],
        )


def _publish_late(connection: Connection, stream: str, move: Move) -> None:
    connection.execute(
        "select tidemark_reader.publish_late(%s, %s, %s::bigint[], %s::text[], %s::bigint[], %s::bigint[],"
        " %s::bigint[], %s::bigint[], %s::text[])",
        [
            stream,
            move.late_after,
            *([getattr(late, name) for late in move.late] for name in PublishedLate.__slots__),
        ],
    )
