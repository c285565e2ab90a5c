"""The queries and statements of the relay in a service's database. Each statement has its own snapshot.

The order of the statements is essential: see `sources.relay.evidence` and `sources.relay.decider`. The files in
`migrations/` create the database schema. The schema has its own version (see `common.migrations`).
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import LiteralString

from psycopg import errors
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format

from tidemark.common.migrations import Migrations
from tidemark.common.postgres_session import (
    Connection,
    DatabaseUse,
    Dsn,
    PostgresSession,
    describe_sessions,
    fetch_value,
)
from tidemark.sources.relay.evidence import LockOwner
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.values.direction import Direction
from tidemark.streaming.values.intervals import Intervals

LOCK_KEY_BASE = 1414087749
"""The base of the keys of advisory locks. The first half of a writer's lock key is this number plus the stream's
number; the second half is the hash of the writer's name. The SQL functions contain this number too. The relay's own
locks use the stream number 0, which no stream has."""
COMMON_CUT = "*"
"""The writer's name in the outbox rows of common cuts (see `sources.relay.evidence`)."""
ROWS_AT_ONCE = 5000
"""The largest number of rows that one query reads from the outbox."""


class _Utf8Loader(Loader):
    """Loads text as bytes. As `str`, a row of 16 MiB with one emoji would take 64 MiB."""

    format = Format.BINARY

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


@dataclass(frozen=True, slots=True)
class AppendStream:
    """A row of `tidemark.append_streams`: the number by which tables refer to a stream, its name, and its direction."""

    number: int
    name: str
    direction: Direction


@dataclass(frozen=True, slots=True)
class AppendedFact:
    """A row of `tidemark.append_outbox`.

    Attributes:
        id: the stream ID (a magnitude).
        rows: the rows of the fact as JSON in UTF-8; empty for an ID without a fact. The rows of a common cut are
            the names of the writers whose epochs end at the ID.
        size_bytes: an upper bound of the size of the fact's rows and the JSON around them, in bytes.
        writer: the name of the writer; `COMMON_CUT` for a common cut, and empty for the writer of the database.
    """

    id: int
    rows: Sequence[bytes]
    size_bytes: int
    writer: str = ""

    @property
    def is_void(self) -> bool:
        """Whether the ID has no fact: the ID has no rows, or is a common cut."""
        return not self.rows or self.writer == COMMON_CUT

    @property
    def ended_writers(self) -> Sequence[str]:
        """The names of the writers whose epochs end at this ID; empty if the ID is not a common cut."""
        return [row.decode() for row in self.rows] if self.writer == COMMON_CUT else ()

    def without_rows(self) -> "AppendedFact":
        """A copy without its rows, to free memory. `is_void` is unchanged."""
        return self if self.is_void else replace(self, rows=_REMOVED_ROWS)


_REMOVED_ROWS = (b"",)


@dataclass(frozen=True, slots=True)
class Page:
    """The outbox rows of queried ranges. IDs are magnitudes.

    Attributes:
        facts: the rows in ascending order of their IDs.
        read_upto: the ranges were read up to this ID.
        floor: the floor of the stream, from the same snapshot; 0 if the stream was dropped.
        version: the version of the stream, from the same snapshot; -1 if the stream was dropped.
        bytes: the sum of `AppendedFact.size_bytes`.
    """

    facts: Sequence[AppendedFact]
    read_upto: int
    floor: int
    version: int
    bytes: int


_HAS_SEQUENCE: LiteralString = """
    exists (
        select from pg_locks sequence
        where sequence.virtualtransaction = held.virtualtransaction and sequence.locktype = 'relation'
            and sequence.database = held.database and sequence.relation = streams.ids and sequence.granted
    )
"""


def read_lock_owners(connection: Connection, running_transactions: Collection[int]) -> dict[int, frozenset[LockOwner]]:
    """Query the transactions that hold the lock of a writer now: number of the stream -> transactions and locks.

    Two kinds of transactions are left out, because they had reserved no ID when `running_transactions` was read, or
    have ended: transactions that are not in `running_transactions`, and transactions without a lock on the stream's
    sequence. `nextval` takes the lock on the sequence until the end of the transaction. Any user can take the advisory
    lock, but only the functions of the schema `tidemark` can use the sequence.

    Args:
        connection: a session of the database.
        running_transactions: the numbers of the running transactions (64 bits), read before this call.
    """
    rows = connection.execute(
        """
        select streams.number, own.transactionid::text::bigint, held.objid::bigint, held.mode = 'ExclusiveLock'
        from pg_locks held
        join tidemark.append_streams streams on held.classid::bigint = %s + streams.number
        join pg_locks own on own.virtualtransaction = held.virtualtransaction and own.locktype = 'transactionid'
            and own.mode = 'ExclusiveLock' and own.granted
        where held.locktype = 'advisory' and held.objsubid = 2 and held.granted
            and held.database = (select oid from pg_database where datname = current_database())
            and """
        + _HAS_SEQUENCE,
        [LOCK_KEY_BASE],
    ).fetchall()
    whole = {xid & 0xFFFF_FFFF: xid for xid in running_transactions}  # pg_locks has only the lower half of a number
    owners: dict[int, set[LockOwner]] = {}
    for number, xid, writer, exclusive in rows:
        if xid in whole:
            owners.setdefault(number, set()).add(LockOwner(whole[xid], writer, exclusive))
    return {number: frozenset(locks) for number, locks in owners.items()}


def read_page(connection: Connection, stream: AppendStream, ranges: Intervals, max_bytes: int) -> Page:
    """Read the rows of the outbox in these ranges, in ascending order of their IDs.

    Stops after the row with which the page reaches `max_bytes` or `ROWS_AT_ONCE` rows.
    """
    order = "asc" if stream.direction is Direction.FORWARD else "desc"
    lows, highs = signed_bounds(stream, ranges)
    cursor = connection.cursor(binary=True)
    cursor.adapters.register_loader("text", _Utf8Loader)
    rows = cursor.execute(
        f"""
        select abs(kept.floor), kept.version, abs(found.id), found.rows, found.bytes, found.writer::varchar
        from tidemark.append_progress kept
        left join lateral (
            select id, rows, bytes, writer, sum(bytes) over (order by id {order}) - bytes as before
            from (
                select one.* from unnest(%s::bigint[], %s::bigint[]) as range (low, high)
                cross join lateral (
                    select id, rows, bytes, writer from tidemark.append_outbox
                    where number = %s and id between low and high order by id {order} limit {ROWS_AT_ONCE}
                ) as one
                order by one.id {order} limit {ROWS_AT_ONCE}
            ) as lowest
        ) as found on found.before < %s
        where kept.number = %s
        order by found.id {order}
        """.encode(),
        [lows, highs, stream.number, max_bytes, stream.number],
    ).fetchall()
    floor, version = rows[0][:2] if rows else (0, -1)  # a dropped stream has no row
    facts = [AppendedFact(*fact) for _, _, *fact in rows if fact[0] is not None]
    size = sum(fact.size_bytes for fact in facts)
    whole = len(facts) < ROWS_AT_ONCE and size < max_bytes
    return Page(facts, int(ranges.highs[-1]) if whole else facts[-1].id, floor, version, size)


def store_heads(connection: Connection, heads: Mapping[AppendStream, int]) -> bool:
    """Store the heads as upper bounds of the IDs that will be published next, and make all earlier changes durable.

    A `nextval`, and a commit with `synchronous_commit = off`, are durable only after a later commit. This function
    writes a message to the write-ahead log and commits, so these changes are durable when it returns.

    Args:
        connection: must not be in a transaction.
        heads: stream -> the highest ID that was given out (a magnitude).

    Returns:
        False if a stream was dropped, or a restore or a replication has written the stream's rows. Nothing is stored
        for such a stream, because its head belongs to the previous history.
    """
    row = connection.execute(
        """
        with own as (
            select number, upto from unnest(%s::integer[], %s::bigint[]) as given (number, upto)
            join tidemark.append_progress as progress using (number)
            where not coalesce(written_by <> progress.xmin, false)
        ), noted as (
            insert into tidemark.append_sent (number, upto) select number, upto from own on conflict do nothing
        )
        select pg_logical_emit_message(true, 'tidemark.relay', ''), (select count(*) from own)
        """,
        [[stream.number for stream in heads], [*heads.values()]],
    ).fetchone()
    return row is not None and row[1] == len(heads)


def write_common_cut(connection: Connection, stream: AppendStream) -> bool:
    """Write a common cut: take the next ID of the stream, and store it as an ID of no writer.

    Does not wait for the lock of common cuts. Stores nothing if the outbox already has a row with the ID. Then the
    sequence was set back since the last round, and the next round begins a new timeline or blocks the stream.

    Returns:
        False if another session holds the lock of common cuts. True in all other cases.
    """
    with suppress(errors.UniqueViolation):
        return fetch_value(connection, "select tidemark.append_beat(%s)", [stream.name]) is not None
    return True


def describe_common_cut_lock_sessions(connection: Connection, stream: AppendStream) -> str:
    """Describe, for a log message, the sessions that hold or request the stream's lock of common cuts exclusively."""
    rows = connection.execute(
        """
        select distinct coalesce(pid, 0) from pg_locks
        where locktype = 'advisory' and objsubid = 2 and mode = 'ExclusiveLock' and classid::bigint = %s
            and objid = hashtext(%s)::oid
            and database = (select oid from pg_database where datname = current_database())
        """,
        [LOCK_KEY_BASE + stream.number, COMMON_CUT],
    ).fetchall()
    return describe_sessions(connection, [pid for (pid,) in rows]) or "a session that has ended"


def raise_floor(
    connection: Connection, stream: AppendStream, version: int, old_floor: int, new_floor: int, sent_ids: Intervals
) -> bool:
    """Raise the floor of a stream, and delete the rows that Kafka has, in one transaction.

    Only the rows of `sent_ids` are deleted. Another row up to `new_floor` was committed after its ID had been declared
    void. Such a row stays below the floor, where `sequences.read_misplaced_rows` finds it. Stores the last cut of each
    writer's chain up to `new_floor`. Writers whose epochs end at or below `new_floor` become `retiring`.

    Args:
        connection: must not be in a transaction.
        stream: the stream.
        version: the version of the stream that the relay has read.
        old_floor: the floor that the relay has read (a magnitude).
        new_floor: the new floor (a magnitude).
        sent_ids: the IDs up to `new_floor` whose rows Kafka has.

    Returns:
        False if another relay has changed the stream, if the stream was dropped, or if a restore or a replication has
        written the stream's rows. Then nothing has changed.
    """
    lows, highs = signed_bounds(stream, sent_ids)
    rows = connection.execute(
        """
        with raised as (
            update tidemark.append_progress set floor = %(signed)s, written_by = pg_current_xact_id()::xid
            where number = %(number)s and version = %(version)s and abs(floor) = %(old)s
                and not coalesce(written_by <> xmin, false)
            returning number, writer
        ), gone as (
            delete from tidemark.append_outbox
            using unnest(%(lows)s::bigint[], %(highs)s::bigint[]) as sent (low, high)
            where number = (select number from raised) and id between sent.low and sent.high
            returning abs(id) as id, writer, rows
        ), surpassed as (
            delete from tidemark.append_sent
            where number = (select number from raised) and upto >= %(old)s and upto < %(new)s
        ), ended as (
            select name as writer, max(id) as id from gone, unnest(rows) as name
            where writer = %(common_cut)s group by 1
        ), cut as (
            select writer, max(id) as id from gone where writer <> '' group by writer
            union all
            -- A void is sent in the name of the database's own writer, so each void cuts its chain. Its last cut is the
            -- highest ID up to `new` that is no fact of a named writer.
            select writer, %(new)s - above.count from raised, (
                select count(*) from (
                    select id, row_number() over (order by id desc) as place from gone
                    where writer not in ('', %(common_cut)s, (select writer from raised))
                ) as named where id = %(new)s + 1 - place
            ) as above where %(new)s - above.count > %(old)s
        ), moved as (
            update tidemark.append_writers as kept
            set last = %(sign)s * coalesce(cuts.ended, cuts.id),
                state = case when cuts.ended is null then kept.state else 'retiring' end
            from (
                select known.writer, max(cut.id) as id, max(ended.id) filter (where ended.id > abs(known.last)) as ended
                from tidemark.append_writers known join cut on cut.writer in (known.writer, %(common_cut)s)
                left join ended on ended.writer = known.writer
                where known.number = (select number from raised) group by 1
            ) as cuts
            where kept.number = (select number from raised) and kept.writer = cuts.writer
                and kept.state in ('joining', 'joined') and cuts.id > abs(kept.last)
        )
        select from raised
        """,
        {
            "number": stream.number,
            "version": version,
            "old": old_floor,
            "new": new_floor,
            "signed": stream.direction.signed(new_floor),
            "sign": stream.direction.signed(1),
            "common_cut": COMMON_CUT,
            "lows": lows,
            "highs": highs,
        },
    ).fetchall()
    return len(rows) == 1


def signed_bounds(stream: AppendStream, ranges: Intervals) -> tuple[list[int], list[int]]:
    """The signed lowest IDs and the signed highest IDs of the ranges, for `between` in a query of the outbox."""
    lows, highs = ranges.lows.tolist(), ranges.highs.tolist()
    if stream.direction is Direction.FORWARD:
        return [low + 1 for low in lows], highs
    return [-high for high in highs], [-low - 1 for low in lows]


COMMAND = "tidemark relay migrate"
SCHEMA = Migrations("tidemark.sources.relay", "relay_schema_version", COMMAND)

_USE = DatabaseUse(
    "dsn",
    remedies={
        "3F": f"run `{COMMAND}`",
        "42P01": f"run `{COMMAND}`",
        "42803": f"run `{COMMAND}`",  # a restore has created a table, and not yet the table's primary key
        "42883": f"run `{COMMAND}`",
        "42501": "grant the user the role tidemark_relay",
        "22021": "move to a database WITH ENCODING 'UTF8'",
    },
    options=(
        # The relay sends records after a commit, so the commit must be durable. The server's default may differ.
        ("synchronous_commit", "on"),
        # The outbox is empty most of the time, so a planner with statistics would choose a sequential scan over all
        # dead rows.
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("jit", "off"),
    ),
    # Behind a pooler, the relay would not notice a crash of the server. The server may then give out IDs again, and the
    # relay would declare them void.
    pooler_remedy="give the relay a direct connection to the server",
)

DEAD_CLIENT_WARNING_SECONDS = 600.0
"""A warning is logged if a client host that died can block a stream for longer than this."""
_LINUX_KEEPALIVE_SECONDS = 7200 + 9 * 75


def read_dead_client_timeout(connection: Connection) -> float:
    """Read from the server's settings after how many seconds the server ends a transaction whose client host has died.

    If the server uses the operating system's keepalive defaults, this function assumes the defaults of Linux.
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
    keepalives = idle + interval * count if idle and interval and count else _LINUX_KEEPALIVE_SECONDS
    return min(keepalives, timeout or keepalives)


def session_of(dsn: Dsn, application: str) -> PostgresSession:
    """Make a session of the relay, which connects at its first use. `application`: its `application_name`."""
    return PostgresSession(dsn, application, _USE)


def read_blockers(connection: Connection) -> list[OpenTransaction]:
    """Query the open transactions that may block a stream: those with a writer's lock that have used the sequence.

    Transactions whose start this user may not see come first, then the others, the oldest first.
    """
    rows = connection.execute(
        """
        select streams.stream,
            coalesce((
                select string_agg(known.writer, ' or ' order by known.writer)
                from (
                    select writer, writer as called from tidemark.append_writers where number = streams.number
                    union all
                    select progress.writer, '' from tidemark.append_progress as progress where number = streams.number
                ) as known
                where hashtext(known.called)::oid = held.objid
            ), ''),
            held.pid, prepared.gid, coalesce(activity.usename, prepared.owner, ''),
            coalesce(activity.application_name, ''), coalesce(activity.state, ''),
            coalesce(activity.xact_start, prepared.prepared),
            coalesce(regexp_replace(left(activity.query, 300), '\\s+', ' ', 'g'), ''), current_database()
        from pg_locks held
        join tidemark.append_streams streams on %s + streams.number = held.classid::bigint
        left join pg_stat_activity activity on activity.pid = held.pid
        left join pg_locks own on held.pid is null and own.virtualtransaction = held.virtualtransaction
            and own.pid is null and own.locktype = 'transactionid' and own.mode = 'ExclusiveLock'
        left join pg_prepared_xacts prepared on prepared.transaction = own.transactionid
        where held.locktype = 'advisory' and held.objsubid = 2 and held.granted
            and held.database = (select oid from pg_database where datname = current_database())
            and """
        + _HAS_SEQUENCE
        + " order by 8 nulls first, 1, 2",
        [LOCK_KEY_BASE],
    ).fetchall()
    return [OpenTransaction(*row) for row in rows]
