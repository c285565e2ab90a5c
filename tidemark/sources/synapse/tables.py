"""The streams of Synapse, and the queries of their sequences and tables in Synapse's database.

Each query returns the rows of a fact as JSON arrays, in the form in which Synapse sends them on its replication
channel. If a fact has rows from several queries, the rows are in the order of the queries.

The bridge writes nothing to Synapse's tables. Each statement has its own snapshot. Two functions of
`sources.transactions` have side effects in Synapse's database: `use_up_transaction_number`, and `flush_wal`, which
writes a message to the write-ahead log.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemark.common.errors import BadSetting
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession
from tidemark.sources.synapse.decider import MASTER, StreamFact
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.values.direction import Direction


@dataclass(frozen=True, slots=True)
class TableQuery:
    """How to query the facts in a table.

    Attributes:
        table: the table and its alias, separated by a space; may be followed by joins.
        id: the column of stream IDs.
        row: an SQL expression of the row as JSON.
        identity: an SQL expression of a text that does not change while the row exists, and that differs for another
            row with the same ID.
        is_proof: whether no other history of the database can have a row with the same identity. A row that only states
            that a user's data has changed is no proof, because the same row may be written again.
    """

    table: str
    id: str
    row: str
    identity: str
    is_proof: bool = True

    @property
    def name(self) -> str:
        """The name of the (first) table."""
        return self.table.partition(" ")[0]

    @property
    def alias(self) -> str:
        """The alias of the (first) table."""
        return self.table.split(" ")[1]

    def row_statement(self, number: int) -> str:
        """The statement that selects the rows with signed IDs from `%(low)s` to `%(high)s`. `number`: the query's index
        in the stream's queries."""
        return self._select(f"{number} as place, ({self.row})::text as row")

    def mark_statement(self) -> str:
        """The statement that selects the ID, the writer, the mark and `is_proof` of each row with a signed ID from
        `%(low)s` to `%(high)s`, without the row itself."""
        return self._select("0 as place")

    def _select(self, columns: str) -> str:
        identity = f"coalesce({self.alias}.instance_name, '') || {self.identity}"
        return (
            f"select {self.alias}.{self.id} as id, {self.alias}.instance_name as writer,"
            f" ('x' || left(md5({identity}), 16))::bit(64)::bigint as mark,"
            f" {self.is_proof} as is_proof, {columns}"
            f" from {self.table} where {self.alias}.{self.id} between %(low)s and %(high)s"
        )


@dataclass(frozen=True, slots=True)
class SynapseStream:
    """A stream of Synapse.

    Attributes:
        name: the stream's name on the replication channel.
        sequence: the sequence of the stream's IDs.
        queries: how to query the stream's tables.
        keeps_rows: whether each row is kept for `kept_seconds`. Then a missing row proves that the ID has no fact.
            Otherwise rows are overwritten or deleted, and a missing row proves nothing.
        positions_name: the stream's name in the table `stream_positions`; empty if the table does not have the stream.
        earlier_tables: the tables that a transaction writes before it writes the stream's own tables.
        direction: whether the stream's IDs rise or fall.
        kept_seconds: the seconds for which each row is certainly kept; None if rows are kept forever.
    """

    name: str
    sequence: str
    queries: Sequence[TableQuery]
    keeps_rows: bool
    positions_name: str = ""
    earlier_tables: Sequence[str] = ()
    direction: Direction = Direction.FORWARD
    kept_seconds: float | None = None


_DAY_SECONDS = 86_400.0
_EVENT_JOINS = (
    " left join redactions x using (event_id) left join event_relations r using (event_id)"
    " left join room_memberships m using (event_id)"
)
_EVENT_COLUMNS = "event_id, e.room_id, e.type, e.state_key, x.redacts, r.relates_to_id"
_LIVE_ROW = (
    f"json_build_array('ev', json_build_array({_EVENT_COLUMNS},"
    " m.membership, e.rejection_reason is not null, e.outlier))"
)
_BACKFILL_ROW = f"json_build_array({_EVENT_COLUMNS})"


def _events(row: str) -> tuple[TableQuery, TableQuery]:
    return (
        TableQuery(f"events e{_EVENT_JOINS}", "stream_ordering", row, "e.event_id"),
        # Events that were outliers and now have a state. The row of such an event in `events` keeps the older ID.
        TableQuery(
            f"ex_outlier_stream o join events e using (event_id){_EVENT_JOINS}",
            "event_stream_ordering",
            row,
            "event_id",
        ),
    )


_STATE_QUERY = TableQuery(
    "current_state_delta_stream d",
    "stream_id",
    "json_build_array('state', json_build_array(d.room_id, d.type, d.state_key, d.event_id))",
    "json_build_array(d.room_id, d.type, d.state_key, d.event_id)::text",
)


_WRITING_TRANSACTION = "t.xmin::text"
"""The number of the transaction that wrote the row. If another history gives out the ID again, this number almost
always differs."""


def _table_query(table: str, row: str, identity: str = "") -> TableQuery:
    """Make the query of a table that has the column `stream_id`.

    Args:
        table: the table, which gets the alias `t`.
        row: the SQL columns to send.
        identity: more SQL columns. Together with `row`, they distinguish two versions of a row.
    """
    extra = f", {identity}" if identity else ""
    whole = f"json_build_array({row}{extra})::text"
    return TableQuery(f"{table} t", "stream_id", f"json_build_array({row})", whole, _WRITING_TRANSACTION not in extra)


_STREAMS_TO_SEND = (
    SynapseStream(
        "events",
        "events_stream_seq",
        [*_events(_LIVE_ROW), _STATE_QUERY],
        keeps_rows=True,
        positions_name="events",
        earlier_tables=["event_json"],
    ),
    SynapseStream(
        "backfill",
        "events_backfill_stream_seq",
        _events(_BACKFILL_ROW),
        keeps_rows=True,
        positions_name="backfill",
        earlier_tables=["event_json"],
        direction=Direction.BACKWARD,
    ),
    SynapseStream(
        "caches",
        "cache_invalidation_stream_seq",
        [_table_query("cache_invalidation_stream_by_instance", "t.cache_func, to_json(t.keys), t.invalidation_ts")],
        keeps_rows=True,
        kept_seconds=6 * _DAY_SECONDS,  # Synapse deletes rows after 7 days, by its own clock
    ),
    SynapseStream(
        "push_rules",
        "push_rules_stream_sequence",
        [_table_query("push_rules_stream", "t.user_id", _WRITING_TRANSACTION)],
        keeps_rows=True,
        positions_name="push_rules_stream",
    ),
    SynapseStream(
        "account_data",
        "account_data_sequence",
        [
            _table_query("account_data", "t.user_id, null, t.account_data_type", "t.content"),
            _table_query("room_account_data", "t.user_id, t.room_id, t.account_data_type", "t.content"),
            _table_query("room_tags_revisions", "t.user_id, t.room_id, 'm.tag'", _WRITING_TRANSACTION),
        ],
        keeps_rows=False,
        positions_name="account_data",
    ),
    SynapseStream(
        "to_device",
        "device_inbox_sequence",
        [
            _table_query("device_inbox", "t.user_id", "t.device_id, t.message_json"),
            _table_query("device_federation_outbox", "t.destination", "t.messages_json"),
        ],
        keeps_rows=False,
        positions_name="to_device",
    ),
    SynapseStream(
        "receipts",
        "receipts_sequence",
        [
            _table_query(
                "receipts_linearized",
                "t.room_id, t.receipt_type, t.user_id, t.event_id, t.thread_id, t.data::json",
            )
        ],
        keeps_rows=False,
        positions_name="receipts",
    ),
    SynapseStream(
        "device_lists",
        "device_lists_sequence",
        [
            _table_query("device_lists_stream", "t.user_id, false, false", f"t.device_id, {_WRITING_TRANSACTION}"),
            _table_query("user_signature_stream", "t.from_user_id, true, false", _WRITING_TRANSACTION),
            # Synapse updates the row of a poke after it has sent the poke.
            _table_query("device_lists_outbound_pokes", "t.user_id, false, true", "t.destination, t.device_id, t.ts"),
        ],
        keeps_rows=False,
        positions_name="device_lists_stream",
    ),
    SynapseStream(
        "presence",
        "presence_stream_sequence",
        [
            _table_query(
                "presence_stream",
                "t.user_id, t.state, t.last_active_ts, t.last_federation_update_ts, t.last_user_sync_ts,"
                " t.status_msg, t.currently_active",
            )
        ],
        keeps_rows=False,
        positions_name="presence_stream",
    ),
)
STREAMS: Mapping[str, SynapseStream] = {stream.name: stream for stream in _STREAMS_TO_SEND}
"""Name on the replication channel -> stream, for the streams that the bridge can send."""

_ONLY_IN_MEMORY = "the stream exists only in its writer's memory, and its IDs start again with each start of the writer"
_UNSUPPORTED_TABLES = "Tidemark does not support the tables of this stream yet"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("typing", "federation", "presence_federation"), _ONLY_IN_MEMORY),
    **dict.fromkeys(
        (
            "pushers",
            "thread_subscriptions",
            "un_partial_stated_room",
            "un_partial_stated_event",
            "sticky_events",
            "profile_updates",
            "quarantined_media",
        ),
        _UNSUPPORTED_TABLES,
    ),
}
"""Name on the replication channel -> the reason why the bridge cannot send the stream."""


_DATABASE_USE = DatabaseUse(
    "TIDEMARK_SYNAPSE_DSN",
    remedies={
        "42P01": "give the DSN of Synapse's own database; Synapse must be version 1.100 or newer",
        "42703": "give the DSN of Synapse's own database; Synapse must be version 1.100 or newer",
        "42501": "grant the user pg_read_all_data, and BYPASSRLS if tables have row level security",
    },
    options=(
        ("synchronous_commit", "on"),
        ("jit", "off"),
    ),
    # Through a pooler, the bridge would not notice a crash of the server.
    pooler_remedy="give the bridge a direct connection to the server",
)


def synapse_session(dsn: Dsn) -> PostgresSession:
    """Make the bridge's session in Synapse's database. The session connects at its first use."""
    return PostgresSession(dsn, "tidemark synapse", _DATABASE_USE)


def read_head(connection: Connection, stream: SynapseStream) -> int:
    """Read the highest ID that was given out (a magnitude). See `read_heads`."""
    return read_heads(connection, [stream])[stream.name]


def read_heads(connection: Connection, streams: Iterable[SynapseStream]) -> dict[str, int]:
    """Read the highest ID that was given out, for each stream: name on the replication channel -> magnitude.

    If a sequence is unused, all IDs below its first value count as given out, because a migration script may have
    filled the table with these IDs. The function reads the sequence again to check that it was still unused when its
    first value was read.
    """
    names = {stream.sequence: stream.name for stream in streams}
    unused: dict[str, int] = {}
    while True:
        rows = connection.execute(
            "select name, pg_sequence_last_value(name::regclass) from unnest(%s::text[]) as name", [[*names]]
        ).fetchall()
        heads = {name: unused.get(name) if value is None else int(value) for name, value in rows}
        if None not in heads.values():
            return {names[name]: value for name, value in heads.items() if value is not None}
        for name in [name for name, value in heads.items() if value is None]:
            row = connection.execute(f"select last_value - 1 from {name} where not is_called".encode()).fetchone()
            if row is not None:
                unused[name] = int(row[0])


def read_sequence_problem(connection: Connection, stream: SynapseStream) -> str:
    """Check that the sequence of a stream gives out IDs one by one, in order. Returns the problem and the remedy, or an
    empty text."""
    row = connection.execute(
        "select seqincrement, seqcache, seqcycle from pg_sequence where seqrelid = %s::regclass", [stream.sequence]
    ).fetchone()
    if row == (1, 1, False):
        return ""
    return (
        f"sequence {stream.sequence} has increment, cache and cycle {row} instead of (1, 1, False): run in Synapse's"
        f" database: alter sequence {stream.sequence} increment 1 cache 1 no cycle; then restart the workers"
    )


def check_server(connection: Connection, name: str) -> None:
    """Raise `BadSetting` if a user in the database belongs to another server_name than `name`. Checks one user only."""
    row = connection.execute("select substr(name, position(':' in name) + 1) from users limit 1").fetchone()
    if row is not None and row[0] != name:
        raise BadSetting(
            "--server-name", f"is {name}, but the users in the database of TIDEMARK_SYNAPSE_DSN belong to {row[0]}"
        )


def read_writers(connection: Connection, stream: SynapseStream) -> set[str]:
    """Read the writers of a stream from `stream_positions`, or from the stream's first table if `positions_name` is
    empty.

    Synapse deletes writers that are no longer in its configuration from `stream_positions`.
    """
    names = "select instance_name from stream_positions where stream_name = %s"
    if not stream.positions_name:
        names += f" union select coalesce(instance_name, '{MASTER}') from {stream.queries[0].name}"
    return {name for (name,) in connection.execute(names.encode(), [stream.positions_name]).fetchall()}


def read_facts(
    connection: Connection, stream: SynapseStream, low: int, top: int, only_writer: str | None = None
) -> tuple[int, list[StreamFact]]:
    """Read the highest ID that was given out, and the facts with IDs in `(low, top]`, with one statement.

    IDs are magnitudes. The facts are in ascending order of their IDs.

    Args:
        connection: to Synapse's database.
        stream: the stream.
        low: the ID before the range.
        top: the last ID of the range.
        only_writer: read only rows that name this writer; None for all rows.
    """
    first, last = low + 1, top
    if stream.direction is Direction.BACKWARD:
        first, last = -top, -low - 1
    every = " union all ".join(query.row_statement(number) for number, query in enumerate(stream.queries))
    rows = connection.execute(
        f"""
        select abs(id), writer, row, mark, null from ({every}) as found where %(of)s::text is null or writer = %(of)s
        union all
        select null, null, null, null, pg_sequence_last_value(%(sequence)s::regclass)
        """.encode(),
        {"sequence": stream.sequence, "low": first, "high": last, "of": only_writer},
    ).fetchall()
    facts_by_id: dict[int, tuple[str, dict[str, None], set[int]]] = {}
    for id, writer, row, mark, _ in rows:
        if id is not None:
            _, texts, marks = facts_by_id.setdefault(id, (writer or "", {}, set()))
            texts[row] = None
            marks.add(mark)
    facts = [StreamFact(id, fact[0], [*fact[1]], frozenset(fact[2])) for id, fact in sorted(facts_by_id.items())]
    given_out = rows[-1][4]
    return read_head(connection, stream) if given_out is None else int(given_out), facts


def read_marks(connection: Connection, stream: SynapseStream, low: int, top: int) -> list[StreamFact]:
    """Read the facts with IDs in `(low, top]`, without their rows, in ascending order. IDs are magnitudes."""
    first, last = low + 1, top
    if stream.direction is Direction.BACKWARD:
        first, last = -top, -low - 1
    every = " union all ".join(query.mark_statement() for query in stream.queries)
    rows = connection.execute(
        f"""
        select abs(id), coalesce(max(writer), ''), array_agg(mark), bool_or(is_proof) from ({every}) as found
        group by 1 order by 1
        """.encode(),
        {"low": first, "high": last},
    ).fetchall()
    return [StreamFact(id, writer, (), frozenset(marks), is_proof) for id, writer, marks, is_proof in rows]


def read_clock(connection: Connection) -> int:
    """Read the clock of Synapse's Postgres, in ms since 1970."""
    row = connection.execute("select (extract(epoch from clock_timestamp()) * 1000)::bigint").fetchone()
    assert row is not None
    return int(row[0])


@dataclass(frozen=True, slots=True)
class TableWriter:
    """An open transaction that writes to the tables of streams.

    Attributes:
        streams: the names of these streams on the replication channel.
        transaction_number: the transaction's number: 64 bits, or only the lower 32 bits if the query got no running
            transactions.
        transaction: the description of the transaction, without stream and writer.
    """

    streams: frozenset[str]
    transaction_number: int
    transaction: OpenTransaction


def read_table_writers(
    connection: Connection, streams: Iterable[SynapseStream], running_transactions: Collection[int] | None = None
) -> list[TableWriter]:
    """Query the open transactions that have written to the tables of these streams, or hold a lock to do so.

    The transactions are in the order of their start, after transactions whose start is hidden from this user.

    Args:
        connection: to Synapse's database.
        streams: the streams.
        running_transactions: the numbers of the transactions to return (64 bits); None for all.
    """
    tables: dict[str, set[str]] = {}
    for stream in streams:
        for table in [*stream.earlier_tables, *(query.name for query in stream.queries)]:
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
    # Locks have only the lower half of a transaction's number.
    full_numbers = (
        None if running_transactions is None else {number & 0xFFFF_FFFF: number for number in running_transactions}
    )
    writers = []
    for names, number, *session in rows:
        if full_numbers is None or number in full_numbers:
            names_of = frozenset(stream for name in names for stream in tables.get(name.rpartition(".")[2], ()))
            writers.append(
                TableWriter(
                    names_of,
                    number if full_numbers is None else full_numbers[number],
                    OpenTransaction("", "", *session),
                )
            )
    return writers
