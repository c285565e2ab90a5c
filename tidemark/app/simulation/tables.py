"""The tables of a simulation: the services' tables have the facts, and the readers' tables have the effects."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tidemark.app import relay
from tidemark.app.simulation.script import SimulatedStream
from tidemark.common.postgres_session import Connection
from tidemark.sources.relay.queries import session_of

APPLICATION_NAME = "tidemark simulate"
LOGINS = ("simulate_relay", "simulate_reader")

_EFFECTS = """
create schema if not exists demo;
create table if not exists demo.effects (
    number      bigint  generated always as identity primary key,
    reader      text    not null,
    stream      text    not null,
    stream_id   bigint  not null,
    writer      text    not null,
    mark        uuid    not null,
    late        bigint
);
create index if not exists effects_by_stream on demo.effects (stream, reader, number);
comment on table demo.effects is 'The effect of each row that a reader received, in the order of receipt';
comment on column demo.effects.late is 'The number of the late completion with which the row came; null without one';
create table if not exists demo.compared (
    reader      text    not null,
    stream      text    not null,
    facts       bigint  not null,
    primary key (reader, stream)
);
comment on table demo.compared is 'Number of facts that were verified as read exactly once, and then deleted';
"""

_FACTS = """
create table if not exists {table} (
    stream_id   bigint  not null,
    part        integer not null,
    writer      text    not null,
    written_at  timestamptz not null,
    mark        uuid    not null default gen_random_uuid(),
    primary key (stream_id, part)
);
create index if not exists {by_writer} on {table} (writer, stream_id);
comment on column {table}.mark is 'Distinguishes this row from a row that had the same ID before the database was
restored';
"""


def simulation_database(dsn: str, suffix: str = "demo") -> str:
    """The DSN of the simulation's database on the server of `dsn`. `suffix` is the suffix of its name."""
    return make_conninfo(dsn, dbname=f"{conninfo_to_dict(dsn).get('dbname') or 'tidemark'}_{suffix}")


def make_database(dsn: str, suffix: str = "demo") -> str:
    """Create the simulation's database if it is missing, and return its DSN. Raises `Unavailable` and `Refused`."""
    simulation_dsn = simulation_database(dsn, suffix)
    name = str(conninfo_to_dict(simulation_dsn)["dbname"])
    with _connect(dsn) as connection:
        if not connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone():
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    return simulation_dsn


def prepare_writing(dsn: str) -> None:
    """Create or update the schemas that the services' writers, the relay and readers in SQL need."""
    relay.migrate(dsn, (), "forward", say=lambda _: None)


def missing_streams(dsn: str, streams: Iterable[SimulatedStream]) -> list[SimulatedStream]:
    """The streams that the database at `dsn` does not have yet."""
    with _connect(dsn) as connection:
        known = {name for (name,) in connection.execute("select stream from tidemark.append_streams").fetchall()}
    return [stream for stream in streams if stream.name not in known]


def make_facts(dsn: str, streams: Iterable[SimulatedStream]) -> None:
    """Create the streams and the services' tables if they are missing."""
    with _connect(dsn) as connection, connection.transaction():
        connection.execute("create schema if not exists demo")
        for stream in streams:
            connection.execute(
                sql.SQL(_FACTS).format(
                    table=sql.Identifier("demo", stream.name), by_writer=sql.Identifier(f"{stream.name}_by_writer")
                )
            )
            connection.execute("select tidemark.create_stream(%s, %s)", [stream.name, stream.direction])


def make_effects(dsn: str) -> None:
    """Create the readers' tables if they are missing."""
    make_tables(dsn, _EFFECTS)


def make_tables(dsn: str, script: str) -> None:
    """Run the SQL statements of `script` in one transaction."""
    with _connect(dsn) as connection, connection.transaction():
        connection.execute(script.encode())


def make_streams(dsn: str, streams: Iterable[SimulatedStream]) -> None:
    """Create the streams if they are missing, without tables for their rows."""
    with _connect(dsn) as connection, connection.transaction():
        for stream in streams:
            connection.execute("select tidemark.create_stream(%s, %s)", [stream.name, stream.direction])


def make_logins(dsn: str, streams: Iterable[SimulatedStream]) -> tuple[str, str]:
    """Create logins for the relay and for the readers, with only the rights that they need; return their DSNs. The
    faults need such logins, because row level security does not apply to a superuser."""
    password = str(conninfo_to_dict(dsn).get("password") or "")
    with _connect(dsn) as connection:
        for login in LOGINS:
            with suppress(psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
                connection.execute(
                    sql.SQL("create role {} login password {}").format(sql.Identifier(login), sql.Literal(password))
                )
        relay, readers = map(sql.Identifier, LOGINS)
        connection.execute(sql.SQL("grant tidemark_relay to {}").format(relay))
        connection.execute(sql.SQL("grant tidemark_take to {}").format(readers))
        connection.execute(sql.SQL("grant usage on schema demo to {}").format(readers))
        connection.execute(sql.SQL("grant select, insert, delete on demo.effects to {}").format(readers))
        for stream in streams:
            table = sql.Identifier("demo", stream.name)
            connection.execute(sql.SQL("grant select on {} to {}").format(table, readers))
    relay_dsn, readers_dsn = (make_conninfo(dsn, user=login) for login in LOGINS)
    return relay_dsn, readers_dsn


def floors_and_heads(connection: psycopg.Connection) -> dict[str, tuple[int, int]]:
    """By stream, the floor (all IDs up to it are settled) and the last ID that was given out, as magnitudes."""
    rows = connection.execute(
        "select stream, abs(floor), abs(coalesce(pg_sequence_last_value(ids), s.after))"
        " from tidemark.append_progress join tidemark.append_streams s using (number)"
    ).fetchall()
    return {stream: (floor, head) for stream, floor, head in rows}


@contextmanager
def _connect(dsn: str) -> Iterator[Connection]:
    with closing(session_of(dsn, APPLICATION_NAME)) as session, session.use() as connection:
        yield connection
