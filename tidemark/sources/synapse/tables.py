"""Synapse's streams in its database: their sequences and tables, and whether a missing row proves that there is no
fact.

Each query returns the rows of a fact as JSON in the form in which Synapse sends them, `[...]`. If a fact has rows from
several queries, they are in the order of the queries.

The bridge only reads Synapse's database. Each statement has its own snapshot. Two queries have invisible effects: one
uses up a transaction number, one writes a message to the write-ahead log, so that everything before it is on the disk.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemark.common.errors import BadSetting
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession
from tidemark.sources.synapse.decider import MASTER, StreamFact
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.values.direction import Direction


@dataclass(frozen=True, slots=True)
class TableQuestion:
    """How to query the facts in a table. `table` may be a join; `id`: its column of stream IDs; `row`: a JSON
    expression.

    `identity`: a text expression that does not change while the row exists, and differs for another row of the same ID.
    `is_proof`: no other history of the database has a row of the same identity. Rows that only state that data of a
    user has changed are no proof: the same row may be written again, even in a transaction of the same number."""

    table: str
    id: str
    row: str
    identity: str
    is_proof: bool = True

    @property
    def name(self) -> str:
        """The query of the table with the rows."""
        return self.table.partition(" ")[0]

    @property
    def alias(self) -> str:
        return self.table.split(" ")[1]

    def sql(self, place: int) -> str:
        """The query of the facts in the range `%(low)s` to `%(high)s` (signed)."""
        return self._select(f"{place} as place, ({self.row})::text as row")

    def identities(self) -> str:
        """A copy that selects no rows, only identities."""
        return self._select("0 as place")

    def _select(self, more: str) -> str:
        identity = f"coalesce({self.alias}.instance_name, '') || {self.identity}"
        return (
            f"select {self.alias}.{self.id} as id, {self.alias}.instance_name as writer,"
            f" ('x' || left(md5({identity}), 16))::bit(64)::bigint as mark,"
            f" {self.is_proof} as is_proof, {more}"
            f" from {self.table} where {self.alias}.{self.id} between %(low)s and %(high)s"
        )


@dataclass(frozen=True, slots=True)
class SynapseStream:
    """A stream of Synapse. `name`: on the channel. `positions`: in the table `stream_positions`; empty: not there.

    `keeps`: every fact keeps a row for long enough. Otherwise rows are overwritten or deleted, and a missing row proves
    nothing. `kept_for`: seconds for which each row certainly stays; None: without limit.
    """

    name: str
    sequence: str
    questions: Sequence[TableQuestion]
    keeps: bool
    positions: str = ""
    before: Sequence[str] = ()
    """Tables that a transaction writes before it writes the stream's own tables."""
    towards: Direction = Direction.FORWARD
    kept_for: float | None = None


_DAY = 86_400.0
_ABOUT = (
    " left join redactions x using (event_id) left join event_relations r using (event_id)"
    " left join room_memberships m using (event_id)"
)
_ROW = "event_id, e.room_id, e.type, e.state_key, x.redacts, r.relates_to_id"
_LIVE = f"json_build_array('ev', json_build_array({_ROW}, m.membership, e.rejection_reason is not null, e.outlier))"
_BACKFILLED = f"json_build_array({_ROW})"


def _events(row: str) -> tuple[TableQuestion, TableQuestion]:
    return (
        TableQuestion(f"events e{_ABOUT}", "stream_ordering", row, "e.event_id"),
        # An event that was an outlier, and whose state is known now: its row in `events` keeps its older ID.
        TableQuestion(
            f"ex_outlier_stream o join events e using (event_id){_ABOUT}", "event_stream_ordering", row, "event_id"
        ),
    )


_STATE = TableQuestion(
    "current_state_delta_stream d",
    "stream_id",
    "json_build_array('state', json_build_array(d.room_id, d.type, d.state_key, d.event_id))",
    "json_build_array(d.room_id, d.type, d.state_key, d.event_id)::text",
)


_WRITTEN_BY = "t.xmin::text"
"""The transaction that wrote the row. If another history gives out the ID again, the transaction is nearly always
another one.
"""


def _question(table: str, row: str, identity: str = "") -> TableQuestion:
    """`identity`: the part of the identity that is not in the row."""
    more = f", {identity}" if identity else ""
    whole = f"json_build_array({row}{more})::text"
    return TableQuestion(f"{table} t", "stream_id", f"json_build_array({row})", whole, _WRITTEN_BY not in more)


_KNOWN = (
    SynapseStream(
        "events",
        "events_stream_seq",
        [*_events(_LIVE), _STATE],
        keeps=True,
        positions="events",
        before=["event_json"],
    ),
    SynapseStream(
        "backfill",
        "events_backfill_stream_seq",
        _events(_BACKFILLED),
        keeps=True,
        positions="backfill",
        before=["event_json"],
        towards=Direction.BACKWARD,
    ),
    SynapseStream(
        "caches",
        "cache_invalidation_stream_seq",
        [_question("cache_invalidation_stream_by_instance", "t.cache_func, to_json(t.keys), t.invalidation_ts")],
        keeps=True,
        kept_for=6 * _DAY,  # Synapse deletes them after 7 days, by its own clock
    ),
    SynapseStream(
        "push_rules",
        "push_rules_stream_sequence",
        [_question("push_rules_stream", "t.user_id", _WRITTEN_BY)],
        keeps=True,
        positions="push_rules_stream",
    ),
    SynapseStream(
        "account_data",
        "account_data_sequence",
        [
            _question("account_data", "t.user_id, null, t.account_data_type", "t.content"),
            _question("room_account_data", "t.user_id, t.room_id, t.account_data_type", "t.content"),
            _question("room_tags_revisions", "t.user_id, t.room_id, 'm.tag'", _WRITTEN_BY),
        ],
        keeps=False,
        positions="account_data",
    ),
    SynapseStream(
        "to_device",
        "device_inbox_sequence",
        [
            _question("device_inbox", "t.user_id", "t.device_id, t.message_json"),
            _question("device_federation_outbox", "t.destination", "t.messages_json"),
        ],
        keeps=False,
        positions="to_device",
    ),
    SynapseStream(
        "receipts",
        "receipts_sequence",
        [
            _question(
                "receipts_linearized",
                "t.room_id, t.receipt_type, t.user_id, t.event_id, t.thread_id, t.data::json",
            )
        ],
        keeps=False,
        positions="receipts",
    ),
    SynapseStream(
        "device_lists",
        "device_lists_sequence",
        [
            _question("device_lists_stream", "t.user_id, false, false", f"t.device_id, {_WRITTEN_BY}"),
            _question("user_signature_stream", "t.from_user_id, true, false", _WRITTEN_BY),
            # A sent poke is updated in place.
            _question("device_lists_outbound_pokes", "t.user_id, false, true", "t.destination, t.device_id, t.ts"),
        ],
        keeps=False,
        positions="device_lists_stream",
    ),
    SynapseStream(
        "presence",
        "presence_stream_sequence",
        [
            _question(
                "presence_stream",
                "t.user_id, t.state, t.last_active_ts, t.last_federation_update_ts, t.last_user_sync_ts,"
                " t.status_msg, t.currently_active",
            )
        ],
        keeps=False,
        positions="presence_stream",
    ),
)
STREAMS: Mapping[str, SynapseStream] = {stream.name: stream for stream in _KNOWN}

_MEMORY = "it exists only in its writer's memory, where its IDs start again with each start"
_OTHER = "its tables have not been examined"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("typing", "federation", "presence_federation"), _MEMORY),
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
        _OTHER,
    ),
}
"""Streams of Synapse that are not published, and why."""


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
    # Otherwise a crash of the server would not be noticed.
    pooled="give the bridge a direct connection to the server",
)


def synapse_session(dsn: Dsn) -> PostgresSession:
    """The bridge's session in Synapse's database."""
    return PostgresSession(dsn, "tidemark synapse", _USE)


def head(connection: Connection, stream: SynapseStream) -> int:
    """The highest ID that was given out, as a magnitude."""
    return heads(connection, [stream])[stream.name]


def heads(connection: Connection, streams: Iterable[SynapseStream]) -> dict[str, int]:
    """The heads of several streams, by name. If a sequence is unused, all IDs below its first number count as given
    out, because a table that was filled by a port script has facts there. The first number is read first: it is valid
    if the sequence is still unused afterwards."""
    names = {stream.sequence: stream.name for stream in streams}
    begins: dict[str, int] = {}
    while True:
        rows = connection.execute(
            "select name, pg_sequence_last_value(name::regclass) from unnest(%s::text[]) as name", [[*names]]
        ).fetchall()
        heads = {name: begins.get(name) if value is None else int(value) for name, value in rows}
        if None not in heads.values():
            return {names[name]: value for name, value in heads.items() if value is not None}
        for name in [name for name, value in heads.items() if value is None]:
            row = connection.execute(f"select last_value - 1 from {name} where not is_called".encode()).fetchone()
            if row is not None:
                begins[name] = int(row[0])


def unfit(connection: Connection, stream: SynapseStream) -> str:
    """The reason why a sequence does not give out IDs one by one, in order; empty if it does."""
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
    """The writers that the database names: all that have ever written and were not removed from Synapse's
    configuration.
    """
    names = "select instance_name from stream_positions where stream_name = %s"
    if not stream.positions:
        names += f" union select coalesce(instance_name, '{MASTER}') from {stream.questions[0].name}"
    return {name for (name,) in connection.execute(names.encode(), [stream.positions]).fetchall()}


def facts(
    connection: Connection, stream: SynapseStream, low: int, top: int, only: str | None = None
) -> tuple[int, list[StreamFact]]:
    """The head, and the facts in `(low, top]` (only those of one writer, if it is given), from one snapshot;
    magnitudes."""
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
        {"sequence": stream.sequence, "low": first, "high": last, "of": only},
    ).fetchall()
    facts_by_id: dict[int, tuple[str, dict[str, None], set[int]]] = {}
    for id, writer, row, mark, _ in rows:
        if id is not None:
            _, texts, marks = facts_by_id.setdefault(id, (writer or "", {}, set()))
            texts[row] = None
            marks.add(mark)
    facts = [StreamFact(id, fact[0], [*fact[1]], frozenset(fact[2])) for id, fact in sorted(facts_by_id.items())]
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
    """An open transaction that writes to the tables of these streams; `number`: its number in snapshots. `transaction`
    has no stream and no writer yet."""

    streams: frozenset[str]
    number: int
    transaction: OpenTransaction


def table_writers(
    connection: Connection, streams: Iterable[SynapseStream], running: Collection[int] | None = None
) -> list[TableWriter]:
    """The running transactions that have written to the tables of the streams, or are about to, the oldest first."""
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
    writers = []
    for names, number, *session in rows:
        if whole is None or number in whole:  # locks know the lower half of a transaction's number
            names_of = frozenset(stream for name in names for stream in tables.get(name.rpartition(".")[2], ()))
            writers.append(
                TableWriter(names_of, number if whole is None else whole[number], OpenTransaction("", "", *session))
            )
    return writers
