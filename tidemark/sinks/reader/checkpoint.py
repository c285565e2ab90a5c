"""The place of a reader, kept in the reader's own database (`schema.sql`). No sockets."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import LiteralString

from psycopg import sql
from psycopg.types.json import Jsonb

from tidemark.common.errors import BatchEnded, ReaderModeChanged, Refused
from tidemark.common.session_settings import hidden_from
from tidemark.sinks.reader.events import Place
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.requests import Answer, Request, Row, RunSql, rows
from tidemark.sinks.reader.table import Range

_SCHEMA = (
    "do $schema$ begin\n"
    + files("tidemark.sinks.reader").joinpath("schema.sql").read_text("utf-8")
    + "exception when unique_violation or duplicate_table or duplicate_schema or duplicate_column then null;\n"
    + "end $schema$"
)


@dataclass(frozen=True, slots=True)
class DeliveredFact:
    """A fact that was handed over although a completion of it may still be announced as late; see `read_loop`."""

    id: int
    writer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ReaderCheckpoint:
    """The kept state of a reader. `version` 0: nothing yet. `late_part`: the number of the late completion in hand, and
    the ID up to which it was handed over. `owed` and `delivered`: see `read_loop`."""

    version: int = 0
    place: Place = field(default_factory=Place)
    late_part: tuple[int, int] | None = None
    owed: tuple[Range, ...] = ()
    delivered: Mapping[int, DeliveredFact] = field(default_factory=dict)


class CheckpointStore:
    """The requests for one reader of one stream."""

    def __init__(self, reader: str, stream: str, mode: Mode) -> None:
        self.reader = reader
        self._stream = stream
        self._mode = mode

    def load(self) -> Generator[Request, Answer, ReaderCheckpoint]:
        """The kept state; makes the schema where there is none, and the place's row. Raises `ReaderModeChanged`."""
        found = yield from self._rows(
            "select exists (select from pg_attribute where attrelid = to_regclass('tidemark_reader.places')"
            " and attname = 'is_settled') and to_regclass('tidemark_reader.parked') is not null as there"
        )
        if not found[0]["there"]:
            # Copies of a reader may make it at the same moment. No advisory lock: any other login could hold that.
            yield from self._rows(_SCHEMA)
        yield from self._check_visible()
        places = yield from self._rows(
            "select version, mode, linear, positions, late, late_part, owed, is_settled from tidemark_reader.places"
            " where reader = {reader} and stream = {stream}"
        )
        if not places:
            yield from self._rows(
                "insert into tidemark_reader.places (reader, stream, mode, linear, positions, late, owed, is_settled,"
                " version) values ({reader}, {stream}, {mode}, 0, '{{}}', 0, '[]', false, 0) on conflict do nothing",
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
            tuple(Range(writer, prev, id) for writer, prev, id in row["owed"]),
            {it["id"]: DeliveredFact(**it) for it in delivered},
        )

    def lock(self) -> Generator[Request, Answer, tuple[int, str] | None]:
        """The version of the place, and the name of the open transaction, until whose end nobody else moves it; None
        where another copy of the reader has it in hand. Waits for nobody."""
        found = yield from self._rows(
            "select version, txid_current()::text as transaction from tidemark_reader.places"
            " where reader = {reader} and stream = {stream} for update skip locked"
        )
        if not found:
            yield from self._check_visible()
        return (found[0]["version"], found[0]["transaction"]) if found else None

    def save(
        self, kept: ReaderCheckpoint, more: Iterable[DeliveredFact], forgotten: Iterable[int], transaction: str
    ) -> Generator[Request, Answer, int]:
        """Write the place, the facts that were `delivered` in addition, and forget others; inside the transaction.

        Returns the new version, which is of the clock: a database that is restored gives none again. Raises
        `BatchEnded` where the transaction is not the one any more in which the place was locked.
        """
        written = yield from self._rows(
            "update tidemark_reader.places set mode = {mode}, linear = {linear}, positions = {positions},"
            " late = {late}, late_part = {part}, owed = {owed}, is_settled = {is_settled}, updated_at = now(),"
            " version = greatest(version + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint)"
            " where reader = {reader} and stream = {stream} and txid_current()::text = {transaction}"
            " returning version",
            mode=self._mode,
            transaction=transaction,
            linear=kept.place.linear,
            positions=Jsonb(dict(kept.place.positions)),
            late=kept.place.late,
            is_settled=kept.place.is_settled,
            part=None if kept.late_part is None else Jsonb(kept.late_part),
            owed=Jsonb([(it.writer, it.prev, it.id) for it in kept.owed]),
        )
        if not written:
            yield from self._check_visible()
            raise BatchEnded(self.reader, self._stream)
        added = [*more]
        if added:
            yield from self._rows(
                "insert into tidemark_reader.delivered (reader, stream, id, writer, epoch)"
                " select {reader}, {stream}, * from unnest({ids}::bigint[], {writers}::text[], {epochs}::bigint[])"
                " on conflict (reader, stream, id) do update set writer = excluded.writer, epoch = excluded.epoch",
                ids=[it.id for it in added],
                writers=[it.writer for it in added],
                epochs=[it.epoch for it in added],
            )
        if ids := [*forgotten]:
            yield from self._rows(
                "delete from tidemark_reader.delivered"
                " where reader = {reader} and stream = {stream} and id = any({ids}::bigint[])",
                ids=ids,
            )
        return int(written[0]["version"])

    def parked(self, id: int, reason: str) -> sql.Composed:
        """The statement that parks the fact `id`."""
        return self._statement(
            "insert into tidemark_reader.parked (reader, stream, id, reason)"
            " values ({reader}, {stream}, {id}, {reason})"
            " on conflict (reader, stream, id) do update set reason = excluded.reason, parked_at = now()",
            id=id,
            reason=reason,
        )

    def _check_visible(self) -> Generator[Request, Answer, None]:
        """Raises `Refused` if row level security hides rows of our tables from this user. The connection is that of the
        service's own statements, so `row_security` stays as the service has it."""
        hidden = yield from self._rows(
            "select relname as name, current_user::text as role, current_database()::text as database,"
            " pg_has_role(relowner, 'usage') as is_owner from pg_class"
            " where relnamespace = to_regnamespace('tidemark_reader') and relkind = 'r' and row_security_active(oid)"
            " order by relname limit 1"
        )
        for it in hidden:
            problem, do = hidden_from(it["role"], f"tidemark_reader.{it['name']}", is_owner=it["is_owner"])
            raise Refused("Postgres", f"database {it['database']}", problem, do)

    def _rows(self, query: LiteralString, **values: object) -> Generator[Request, Answer, list[Row]]:
        return (yield from rows(RunSql("place", self._statement(query, **values))))

    def _statement(self, query: LiteralString, **values: object) -> sql.Composed:
        return sql.SQL(query).format(reader=self.reader, stream=self._stream, **values)
