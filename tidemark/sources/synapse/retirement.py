"""Workers that a person says are gone for good: ordered in the bridge's own database, done by whichever speaks."""

from tidemark.common.errors import BadSetting
from tidemark.common.postgres_session import Connection


def ordered(connection: Connection, name: str) -> list[str]:
    """Writers of the stream that a person wants to retire."""
    rows = connection.execute(
        "select writer from tidemark.synapse_writers where (stream, state) = (%s, 'retiring')", [name]
    ).fetchall()
    return [writer for (writer,) in rows]


def order(connection: Connection, writer: str, stream: str | None) -> list[str]:
    """Have the bridge end the writer, in this stream or in each; gives those where it is to retire now. The last writer
    of a stream stays."""
    rows = connection.execute(
        """
        update tidemark.synapse_writers ending set state = 'retiring'
        where writer = %(writer)s and state <> 'retired' and (%(stream)s::text is null or stream = %(stream)s)
            and exists (
                select from tidemark.synapse_writers other
                where other.stream = ending.stream and other.writer <> ending.writer and other.state = 'active'
            )
        returning stream
        """,
        {"writer": writer, "stream": stream},
    ).fetchall()
    return sorted(stream for (stream,) in rows)


def active(connection: Connection, stream: str | None) -> list[str]:
    """Writers of this stream, or of any, that are not gone."""
    rows = connection.execute(
        "select distinct writer from tidemark.synapse_writers"
        " where state = 'active' and (%(stream)s::text is null or stream = %(stream)s) order by writer",
        {"stream": stream},
    ).fetchall()
    return [writer for (writer,) in rows]


def retired_at(connection: Connection, writer: str, stream: str) -> int | None:
    """The ID at which it ended; None: it still is to. Raises `BadSetting`."""
    row = connection.execute(
        "select state, told from tidemark.synapse_writers where (stream, writer) = (%s, %s)", [stream, writer]
    ).fetchone()
    if row is None or row[0] == "active":
        problem = f"{writer} lives: it was heard while it was to retire, and goes on in {stream}"
        raise BadSetting("WRITER", f"{problem}; stop it and take it out of Synapse's stream_writers first")
    return int(row[1]) if row[0] == "retired" else None


def stays(connection: Connection, name: str, writer: str) -> None:
    """It was to retire, and lives."""
    connection.execute(
        "update tidemark.synapse_writers set state = 'active' where (stream, writer, state) = (%s, %s, 'retiring')",
        [name, writer],
    )
