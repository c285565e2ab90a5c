"""The service's own database, as the relay uses it: its session, and what `tidemark.append` needs there.

The schema is made by the files in `migrations/` and has a version of its own; see `common.migrations`.
"""

from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession

COMMAND = "tidemark relay migrate"
SCHEMA = Migrations("tidemark.sources.relay", "relay_schema_version", COMMAND)

_USE = DatabaseUse(
    "dsn",
    refusals={
        "3F": f"run `{COMMAND}`",
        "42P01": f"run `{COMMAND}`",
        "42883": f"run `{COMMAND}`",
        "42501": "grant the user the role tidemark_relay",
        "22021": "move to a database WITH ENCODING 'UTF8'",
    },
    options=(
        # Its commits stand for what is announced, so they are durable whatever the database's default is.
        ("synchronous_commit", "on"),
        # The outbox is empty most of the time, so a planner with statistics would scan it, dead rows and all.
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("jit", "off"),
    ),
    # A server that crashed would not be noticed, and what it took back would be told as void.
    pooled="give the relay a direct connection to the server",
)

SILENT_SECONDS = 600.0
"""How long a host that died without closing its connections may hold a stream without a word of warning."""
_LINUX = 7200 + 9 * 75


def silence(connection: Connection) -> float:
    """Seconds for which the server takes a transaction for open whose host has died, as far as its settings say here.

    Where the server leaves keepalives to its system, these are Linux's.
    """
    row = connection.execute(
        """
        select current_setting('tcp_keepalives_idle')::float, current_setting('tcp_keepalives_interval')::float,
            current_setting('tcp_keepalives_count')::float,
            (select setting::float / 1000 from pg_settings where name = 'idle_in_transaction_session_timeout')
        """
    ).fetchone()
    assert row is not None
    idle, interval, count, timeout = row
    keepalives = idle + interval * count if idle and interval and count else _LINUX
    return min(keepalives, timeout or keepalives)


def session_of(dsn: Dsn, application: str) -> PostgresSession:
    """The relay's session; `application` is its name among the sessions of the server."""
    return PostgresSession(dsn, application, _USE)
