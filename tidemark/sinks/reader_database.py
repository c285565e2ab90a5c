"""The schema `tidemark_reader` in a database of readers: its installation, and the positions that others write there.

`reader/schema.sql` has the tables that `tidemark.Reader` needs. `reader/functions.sql` has the positions, and the
functions for readers in any language (docs/design.md 6b). A process without the library of Redis can use this module.
"""

from collections.abc import Mapping, Sequence
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


def publish(session: PostgresSession, positions: Mapping[str, tuple[int, Mapping[str, int]]]) -> None:
    """Move streams to their published linear positions and positions of writers. A lower position moves nothing."""
    if positions:
        session.execute(
            "select tidemark_reader.publish('published', %s, %s::bigint[], %s::jsonb[])",
            [
                [*positions],
                [linear for linear, _ in positions.values()],
                [Jsonb(dict(writers)) for _, writers in positions.values()],
            ],
        )


def publish_late(session: PostgresSession, stream: str, after: int, late: Sequence[PublishedLate]) -> None:
    """Add late completions of a stream. Those up to number `after` are not known."""
    session.execute(
        "select tidemark_reader.publish_late(%s, %s, %s::bigint[], %s::text[], %s::bigint[], %s::bigint[],"
        " %s::bigint[], %s::bigint[], %s::text[])",
        [stream, after, *([getattr(item, name) for item in late] for name in PublishedLate.__slots__)],
    )
