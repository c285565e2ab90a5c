"""The service's own database, as the writer's library uses it: its session, and its part of the schema `tidemark`.

The schema is made by the files in `migrations/` and has a version of its own, so that it may share a database with what
the pipeline writes; see `streaming.postgres_migrations`.
"""

from tidemark.streaming.postgres_migrations import Migrations
from tidemark.streaming.postgres_session import DatabaseUse, PostgresSession

COMMAND = "tidemark writer migrate"
SCHEMA = Migrations("tidemark.sources.writer", "writer_schema_version", COMMAND)

_USE = DatabaseUse(
    "dsn",
    refusals={
        "3F": f"run `{COMMAND}`",
        "42P01": f"run `{COMMAND}`",
        "42883": f"run `{COMMAND}`",
        "42501": "grant the user the role tidemark_writer, and usage and select on the sequences",
    },
    options=(
        # Its commits stand for what is announced, so they are durable whatever the database's default is.
        ("synchronous_commit", "on"),
        # The outbox is empty whenever nobody reads it, so a planner with statistics would scan it, dead rows and all.
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
    ),
)


def session_of(dsn: str, application: str) -> PostgresSession:
    """The library's session; `application` is its name among the sessions of the server."""
    return PostgresSession(dsn, application, _USE)
