"""The queries of the bridge in Synapse's database, which it only reads. Each statement sees the database at its own
time.

Two of them have effects that nobody sees: one uses up a transaction number, one writes a message to the write-ahead
log, so that everything before it is on the disk.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tidemark.common.errors import BadSetting
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession
from tidemark.sources.synapse.facts import MASTER, StreamFact
from tidemark.sources.synapse.tables import SynapseStream
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.values.direction import Direction

_USE = DatabaseUse(
    "TIDEMARK_SYNAPSE_DSN",
    refusals={
        "42P01": "give the dsn of Synapse's own database, of a Synapse that is not older than 1.100",
        "42703": "give the dsn of Synapse's own database, of a Synapse that is not older than 1.100",
        "42501": "grant the user pg_read_all_data, and BYPASSRLS if tables have row level security",
    },
    options=(
        ("synchronous_commit", "on"),
        ("jit", "off"),
    ),
    # A server that crashed would not be noticed.
    pooled="give the bridge a direct connection to the server",
)


def synapse_session(dsn: Dsn) -> PostgresSession:
    """The bridge's session in Synapse's database."""
    return PostgresSession(dsn, "tidemark synapse", _USE)


def head(connection: Connection, stream: SynapseStream) -> int:
    """Up to where IDs were given out, as a magnitude."""
    return heads(connection, [stream])[stream.name]


def heads(connection: Connection, streams: Iterable[SynapseStream]) -> dict[str, int]:
    """The same of several, by name.

    A sequence of which nothing was taken yet has given out what lies below the number with which it begins: a table
    that was filled otherwise (a port script) has facts there. That number is read first: it holds if the sequence is
    still untouched afterwards.
    """
    names = {each.sequence: each.name for each in streams}
    begins: dict[str, int] = {}
    while True:
        rows = connection.execute(
            "select name, pg_sequence_last_value(name::regclass) from unnest(%s::text[]) as name", [[*names]]
        ).fetchall()
        found = {name: begins.get(name) if value is None else int(value) for name, value in rows}
        if None not in found.values():
            return {names[name]: value for name, value in found.items() if value is not None}
        for name in [name for name, value in found.items() if value is None]:
            row = connection.execute(f"select last_value - 1 from {name} where not is_called".encode()).fetchone()
            if row is not None:
                begins[name] = int(row[0])


def unfit(connection: Connection, stream: SynapseStream) -> str:
    """Why its IDs would not be given out one by one, in order; empty: they are."""
    row = connection.execute(
        "select seqincrement, seqcache, seqcycle from pg_sequence where seqrelid = %s::regclass", [stream.sequence]
    ).fetchone()
    if row == (1, 1, False):
        return ""
    return (
        f"sequence {stream.sequence} has increment, cache and cycle {row}, and Synapse's have (1, 1, False): run, in"
        f" Synapse's database, alter sequence {stream.sequence} increment 1 cache 1 no cycle, and restart the workers"
    )


def check_server(connection: Connection, name: str) -> None:
    """Raises `BadSetting` if the database belongs to a Synapse with another server_name, judged by its users."""
    row = connection.execute("select substr(name, position(':' in name) + 1) from users limit 1").fetchone()
    if row is not None and row[0] != name:
        raise BadSetting("--server-name", f"is {name}, and the users of TIDEMARK_SYNAPSE_DSN are of {row[0]}")


def writers(connection: Connection, stream: SynapseStream) -> set[str]:
    """The writers that the database names: all that have ever written, until Synapse is started without them."""
    names = "select instance_name from stream_positions where stream_name = %s"
    if not stream.positions:
        names += f" union select coalesce(instance_name, '{MASTER}') from {stream.questions[0].name}"
    return {name for (name,) in connection.execute(names.encode(), [stream.positions]).fetchall()}


def facts(
    connection: Connection, stream: SynapseStream, low: int, top: int, of: str | None = None
) -> tuple[int, list[StreamFact]]:
    """The head, and the facts in `(low, top]` (those of one writer, where it is named), of one snapshot; magnitudes."""
    first, last = low + 1, top
    if stream.towards is Direction.BACKWARD:
        first, last = -top, -low - 1
    every = " union all ".join(question.sql(place) for place, question in enumerate(stream.questions))
    rows = connection.execute(
        f"""
        select abs(id), writer, row, mark, null from ({every}) as found where %(of)s::text is null or writer = %(of)s
        union all
        select null, null, null, null, pg_sequence_last_value(%(sequence)s::regclass)
        """.encode(),
        {"sequence": stream.sequence, "low": first, "high": last, "of": of},
    ).fetchall()
    found: dict[int, tuple[str, dict[str, None], set[int]]] = {}
    for id, writer, row, mark, _ in rows:
        if id is not None:
            _, texts, marks = found.setdefault(id, (writer or "", {}, set()))
            texts[row] = None
            marks.add(mark)
    facts = [StreamFact(id, it[0], [*it[1]], frozenset(it[2])) for id, it in sorted(found.items())]
    given_out = rows[-1][4]
    return head(connection, stream) if given_out is None else int(given_out), facts


def identities(connection: Connection, stream: SynapseStream, low: int, top: int) -> list[StreamFact]:
    """The facts in `(low, top]` without their rows; magnitudes."""
    first, last = low + 1, top
    if stream.towards is Direction.BACKWARD:
        first, last = -top, -low - 1
    every = " union all ".join(question.identities() for question in stream.questions)
    rows = connection.execute(
        f"""
        select abs(id), coalesce(max(writer), ''), array_agg(mark), bool_or(is_proof) from ({every}) as found
        group by 1 order by 1
        """.encode(),
        {"low": first, "high": last},
    ).fetchall()
    return [StreamFact(id, writer, (), frozenset(marks), is_proof) for id, writer, marks, is_proof in rows]


def now(connection: Connection) -> int:
    """The clock of Synapse's server, in ms."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


@dataclass(frozen=True, slots=True)
class TableWriter:
    """An open transaction that writes to the tables of these streams; `number` as snapshots list it. `transaction` is
    of no stream and no writer yet."""

    streams: frozenset[str]
    number: int
    transaction: OpenTransaction


def table_writers(
    connection: Connection, streams: Iterable[SynapseStream], running: Collection[int] | None = None
) -> list[TableWriter]:
    """Who of those that run has written to the tables of the streams, or is about to: the oldest first."""
    tables: dict[str, set[str]] = {}
    for stream in streams:
        for table in [*stream.before, *(question.name for question in stream.questions)]:
            tables.setdefault(table, set()).add(stream.name)
    rows = connection.execute(
        """
        select array_agg(distinct held.relation::regclass::text), own.transactionid::text::bigint, held.pid,
            prepared.gid, coalesce(activity.usename, prepared.owner, ''), coalesce(activity.application_name, ''),
            coalesce(activity.state, ''), coalesce(activity.xact_start, prepared.prepared),
            coalesce(regexp_replace(left(activity.query, 300), '\\s+', ' ', 'g'), '')
        from pg_locks held
        join pg_locks own on own.virtualtransaction = held.virtualtransaction and own.locktype = 'transactionid'
            and own.mode = 'ExclusiveLock' and own.granted
        left join pg_stat_activity activity on activity.pid = held.pid
        left join pg_prepared_xacts prepared on held.pid is null and prepared.transaction = own.transactionid
        where held.locktype = 'relation' and held.relation = any (%s::regclass[]::oid[])
            and held.mode not in ('AccessShareLock', 'RowShareLock')
            and held.database = (select oid from pg_database where datname = current_database())
        group by 2, 3, 4, 5, 6, 7, 8, 9
        order by 8 nulls first
        """,
        [[*tables]],
    ).fetchall()
    whole = None if running is None else {number & 0xFFFF_FFFF: number for number in running}
    found = []
    for names, number, *who in rows:
        if whole is None or number in whole:  # locks know the lower half of a transaction's number
            of = frozenset(stream for name in names for stream in tables.get(name.rpartition(".")[2], ()))
            found.append(TableWriter(of, number if whole is None else whole[number], OpenTransaction("", "", *who)))
    return found
