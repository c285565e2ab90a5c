"""The tables of a play, in a database of its own beside Tidemark's: facts (the truth) and readers' effects."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tidemark.sources.writer import Stream, fence, sequences
from tidemark.sources.writer.database import SCHEMA, session_of
from tidemark.streaming.postgres_session import Connection

APPLICATION = "tidemark simulate"

_COMMON = """
create schema if not exists demo;
create table if not exists demo.effects (
    number      bigint  generated always as identity primary key,
    reader      text    not null,
    stream      text    not null,
    stream_id   bigint  not null,
    part        integer not null,
    writer      text    not null
);
create index if not exists effects_by_reader on demo.effects (reader, stream, stream_id);
comment on table demo.effects is 'What came of each row that a reader was handed, in the order in which it was';
create table if not exists demo.compared (
    reader      text    not null,
    stream      text    not null,
    facts       bigint  not null,
    primary key (reader, stream)
);
comment on table demo.compared is 'Facts that were found to be read exactly once, and deleted';
"""

_FACTS = """
create table if not exists {table} (
    stream_id   bigint  not null,
    part        integer not null,
    writer      text    not null,
    written_at  timestamptz not null,
    primary key (stream_id, part)
);
create index if not exists {by_writer} on {table} (writer, stream_id);
"""


def own_database(dsn: str) -> str:
    """The DSN of the play's database, which is called after the one of `dsn`."""
    return make_conninfo(dsn, dbname=f"{conninfo_to_dict(dsn).get('dbname') or 'tidemark'}_demo")


def make_database(dsn: str) -> str:
    """Make it where it is missing, with the writer's schema; its DSN. Raises `Unavailable` and `Refused`."""
    own = own_database(dsn)
    name = str(conninfo_to_dict(own)["dbname"])
    with _using(dsn) as connection:
        if not connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone():
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    session = session_of(own, APPLICATION)
    SCHEMA.migrate(session)
    session.close()
    return own


def missing(dsn: str, streams: Iterable[Stream]) -> list[Stream]:
    """The streams that have no sequence yet."""
    with _using(dsn) as connection:
        return [stream for stream in streams if sequences.inspect(connection, stream.sequence) is None]


def make(dsn: str, streams: Iterable[Stream]) -> None:
    """Make the tables, and the sequences of streams that have none."""
    with _using(dsn) as connection, connection.transaction():
        connection.execute(_COMMON)
        for stream in streams:
            connection.execute(
                sql.SQL(_FACTS).format(
                    table=sql.Identifier("demo", stream.name), by_writer=sql.Identifier(f"{stream.name}_by_writer")
                )
            )
            if sequences.inspect(connection, stream.sequence) is None:
                sequences.create(connection, stream.sequence, stream.towards)


def instances(dsn: str) -> list[str]:
    """Every writer that ever wrote there."""
    with _using(dsn) as connection:
        return fence.known(connection)


@contextmanager
def _using(dsn: str) -> Iterator[Connection]:
    session = session_of(dsn, APPLICATION)
    try:
        with session.use() as connection:
            yield connection
    finally:
        session.close()
