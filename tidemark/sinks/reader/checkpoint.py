"""The checkpoint of a reader, stored in the reader's own database (`schema.sql`).

The functions yield requests, and open no sockets.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import LiteralString

from psycopg import sql
from psycopg.types.json import Jsonb

from tidemark.common.errors import ReaderModeChanged, ReaderPartitionsChanged, Refused, TransactionEnded
from tidemark.common.postgres_session import describe_hidden_rows
from tidemark.sinks.reader.events import Place
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.requests import Answer, Request, Row, RunSql, fetch_rows
from tidemark.sinks.reader.table import Range

SCHEMA_TEXT = (
    "do $schema$ begin\n"
    + files("tidemark.sinks.reader").joinpath("schema.sql").read_text("utf-8")
    + "exception when unique_violation or duplicate_table or duplicate_schema or duplicate_column then null;\n"
    + "end $schema$"
)

RETRIES_PER_QUERY = 100  # the most parked facts that one call of `read_operator_changes` returns


@dataclass(frozen=True, slots=True)
class DeliveredFact:
    """A fact that was handed over, and that must not be handed over again when it is read again (`read_loop`).

    The same rows may be read again, as late rows or in order. `epoch` is the epoch of `writer`.
    """

    id: int
    writer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ReaderCheckpoint:
    """The stored state of a reader.

    Attributes:
        version: a number that grows with each change; 0 if nothing is stored yet.
        place: what the reader has handed over.
        late_part: the number of the late completion that is being read, and the ID up to which its rows were handed
            over; None if no late completion is being read.
        must_read_ranges: ranges in which the reader reads the table regardless of the evidence; see `read_loop`.
        delivered_facts: ID -> fact that must not be handed over again; see `read_loop`.
    """

    version: int = 0
    place: Place = field(default_factory=Place)
    late_part: tuple[int, int] | None = None
    must_read_ranges: tuple[Range, ...] = ()
    delivered_facts: Mapping[int, DeliveredFact] = field(default_factory=dict)


class CheckpointStore:
    """Loads and stores the checkpoint of one reader of one stream. The methods yield the requests.

    `load`, `lock` and `save` raise `Refused` if row level security hides rows of the reader's tables.
    """

    def __init__(self, reader: str, stream: str, mode: Mode) -> None:
        self.reader = reader
        self._stream = stream
        self._mode = mode

    def load(self) -> Generator[Request, Answer, ReaderCheckpoint]:
        """Load the checkpoint. Create the schema and the row of the reader if they do not exist.

        Raises:
            ReaderModeChanged: the stored place belongs to the other mode.
            ReaderPartitionsChanged: a place of this reader is stored for another number of partitions.
        """
        yield from self.create_schema()
        yield from self._check_rows_visible()
        others = yield from self._rows(
            "select reader from tidemark_reader.places where stream = {stream} and version > 0 and reader <> {reader}"
            " and regexp_replace(reader, {suffix}, '') = regexp_replace({reader}, {suffix}, '')"
            " and coalesce(substring(reader from {count}), '') <> coalesce(substring({reader} from {count}), '')"
            " limit 1",
            suffix=r"\[\d+/\d+\]$",
            count=r"/(\d+)\]$",
        )
        if others:
            raise ReaderPartitionsChanged(self.reader, self._stream, others[0]["reader"])
        places = yield from self._rows(
            "select version, mode, linear, positions, late, late_part, must_read, is_settled"
            " from tidemark_reader.places where reader = {reader} and stream = {stream}"
        )
        if not places:
            yield from self._rows(
                "insert into tidemark_reader.places"
                " (reader, stream, mode, linear, positions, late, must_read, is_settled, version)"
                " values ({reader}, {stream}, {mode}, 0, '{{}}', 0, '[]', false, 0) on conflict do nothing",
                mode=self._mode,
            )
            return ReaderCheckpoint()
        row = places[0]
        if row["version"] and row["mode"] != self._mode:
            raise ReaderModeChanged(self.reader, self._stream, row["mode"], self._mode)
        delivered = yield from self._rows(
            "select id, writer, epoch from tidemark_reader.delivered where reader = {reader} and stream = {stream}"
        )
        return ReaderCheckpoint(
            row["version"],
            Place(row["linear"], row["positions"], row["late"], row["is_settled"]),
            None if row["late_part"] is None else (row["late_part"][0], row["late_part"][1]),
            tuple(Range(writer, prev, id) for writer, prev, id in row["must_read"]),
            {fact["id"]: DeliveredFact(**fact) for fact in delivered},
        )

    def create_schema(self) -> Generator[Request, Answer, None]:
        """Create the schema `tidemark_reader` if its tables do not exist."""
        schema = yield from self._rows("select to_regclass('tidemark_reader.copies') is not null as is_created")
        if not schema[0]["is_created"]:
            # Copies may create the schema at the same moment. There is no advisory lock: any user could keep it locked.
            yield from self._rows(SCHEMA_TEXT)

    def lock(self) -> Generator[Request, Answer, tuple[int, str] | None]:
        """Lock the row of the reader until the transaction ends. Does not wait for a lock of another copy.

        Returns:
            The stored version, and the ID of the open transaction. None if another copy of the reader has the lock, or
            the row was deleted.
        """
        locked = yield from self._rows(
            "select version, txid_current()::text as transaction from tidemark_reader.places"
            " where reader = {reader} and stream = {stream} for update skip locked"
        )
        if not locked:
            yield from self._check_rows_visible()
        return (locked[0]["version"], locked[0]["transaction"]) if locked else None

    def save(
        self,
        checkpoint: ReaderCheckpoint,
        added_facts: Iterable[DeliveredFact],
        removed_ids: Iterable[int],
        transaction: str,
    ) -> Generator[Request, Answer, int]:
        """Store the checkpoint in the open transaction. Does not commit.

        Args:
            checkpoint: the new checkpoint. Its `version` and `delivered_facts` are not stored.
            added_facts: facts to add to the stored delivered facts.
            removed_ids: IDs of facts to remove from the stored delivered facts.
            transaction: the ID of the open transaction, as returned by `lock`.

        Returns:
            The new version. It is at least the time in microseconds since 1970, so a restored database never repeats a
            version.

        Raises:
            TransactionEnded: the transaction in which the row was locked has ended.
        """
        written = yield from self._rows(
            "update tidemark_reader.places set mode = {mode}, linear = {linear}, positions = {positions},"
            " late = {late}, late_part = {part}, must_read = {must_read}, is_settled = {is_settled},"
            " updated_at = now(),"
            " version = greatest(version + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint)"
            " where reader = {reader} and stream = {stream} and txid_current()::text = {transaction}"
            " returning version",
            mode=self._mode,
            transaction=transaction,
            linear=checkpoint.place.linear,
            positions=Jsonb(dict(checkpoint.place.positions)),
            late=checkpoint.place.late,
            is_settled=checkpoint.place.is_settled,
            part=None if checkpoint.late_part is None else Jsonb(checkpoint.late_part),
            must_read=Jsonb([(item.writer, item.prev, item.id) for item in checkpoint.must_read_ranges]),
        )
        if not written:
            yield from self._check_rows_visible()
            raise TransactionEnded(self.reader, self._stream)
        facts = [*added_facts]
        if facts:
            yield from self._rows(
                "insert into tidemark_reader.delivered (reader, stream, id, writer, epoch)"
                " select {reader}, {stream}, * from unnest({ids}::bigint[], {writers}::text[], {epochs}::bigint[])"
                " on conflict (reader, stream, id) do update set writer = excluded.writer, epoch = excluded.epoch",
                ids=[fact.id for fact in facts],
                writers=[fact.writer for fact in facts],
                epochs=[fact.epoch for fact in facts],
            )
        if ids := [*removed_ids]:
            yield from self._rows(
                "delete from tidemark_reader.delivered"
                " where reader = {reader} and stream = {stream} and id = any({ids}::bigint[])",
                ids=ids,
            )
        return int(written[0]["version"])

    def read_operator_changes(self) -> Generator[Request, Answer, tuple[int | None, list[int]]]:
        """Query the changes that operators have made.

        Returns:
            The stored version (None if the row was deleted), and the IDs of parked facts for which an operator
            requested a retry, at most `RETRIES_PER_QUERY`, nearest to 0 first.
        """
        (row,) = yield from self._rows(
            "select (select version from tidemark_reader.places where reader = {reader} and stream = {stream}),"
            " array(select id from tidemark_reader.parked where reader = {reader} and stream = {stream}"
            "   and retry_at is not null order by abs(id) limit {limit}) as retries",
            limit=RETRIES_PER_QUERY,
        )
        return row["version"], row["retries"]

    def unpark(self, id: int) -> Generator[Request, Answer, bool]:
        """Delete a parked fact, so that the fact can be handed over again.

        Returns False, and deletes nothing, if the fact is no longer parked or its retry is no longer requested.
        """
        removed = yield from self._rows(
            "delete from tidemark_reader.parked where reader = {reader} and stream = {stream} and id = {id}"
            " and retry_at is not null returning id",
            id=id,
        )
        return bool(removed)

    def park_statement(self, id: int, reason: str) -> sql.Composed:
        """Return the statement that parks the fact `id`, or replaces the reason if the fact is parked already."""
        return self._statement(
            "insert into tidemark_reader.parked (reader, stream, id, reason)"
            " values ({reader}, {stream}, {id}, {reason})"
            " on conflict (reader, stream, id) do update"
            " set reason = excluded.reason, parked_at = now(), retry_at = null",
            id=id,
            reason=reason,
        )

    def _check_rows_visible(self) -> Generator[Request, Answer, None]:
        """Raise `Refused` if row level security hides rows of the reader's tables from this user.

        The connection belongs to the service, so its setting `row_security` is not changed.
        """
        hidden_tables = yield from self._rows(
            "select relname as name, current_user::text as role, current_database()::text as database,"
            " pg_has_role(relowner, 'usage') as is_owner from pg_class"
            " where relnamespace = to_regnamespace('tidemark_reader') and relkind = 'r' and row_security_active(oid)"
            " order by relname limit 1"
        )
        for table in hidden_tables:
            problem, do = describe_hidden_rows(
                table["role"], f"tidemark_reader.{table['name']}", is_owner=table["is_owner"]
            )
            raise Refused("Postgres", f"database {table['database']}", problem, do)

    def _rows(self, query: LiteralString, **values: object) -> Generator[Request, Answer, list[Row]]:
        return (yield from fetch_rows(RunSql("place", self._statement(query, **values))))

    def _statement(self, query: LiteralString, **values: object) -> sql.Composed:
        return sql.SQL(query).format(reader=self.reader, stream=self._stream, **values)
