"""The place of a reader, kept in the reader's own database (`schema.sql`). No sockets."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import LiteralString

from psycopg import sql
from psycopg.types.json import Jsonb

from tidemark.sinks.reader.events import Place
from tidemark.sinks.reader.follow import Mode
from tidemark.sinks.reader.io import Answer, BeginTransaction, CommitTransaction, Request, Row, RunSql, rows
from tidemark.sinks.reader.table import Range
from tidemark.streaming.errors import ReaderModeChanged

_SCHEMA = files("tidemark.sinks.reader").joinpath("schema.sql").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Delivered:
    """A fact that was handed over although a completion of it may still be announced as late; see `plan`."""

    id: int
    writer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept state of a reader. `version` 0: nothing yet. `late_part`: the number of the late completion in hand, and
    the ID up to which it was handed over. `owed` and `delivered`: see `plan`."""

    version: int = 0
    place: Place = field(default_factory=Place)
    late_part: tuple[int, int] | None = None
    owed: tuple[Range, ...] = ()
    delivered: Mapping[int, Delivered] = field(default_factory=dict)


class Ledger:
    """The requests for one reader of one stream."""

    def __init__(self, reader: str, stream: str, mode: Mode) -> None:
        self._reader = reader
        self._stream = stream
        self._mode = mode

    def load(self) -> Generator[Request, Answer, Kept]:
        """The kept state; makes the schema where there is none. Raises `ReaderModeChanged`."""
        found = yield from self._rows("select to_regclass('tidemark_reader.delivered') is not null as there")
        if not found[0]["there"]:
            yield BeginTransaction()
            yield from self._rows("select pg_advisory_xact_lock(hashtextextended('tidemark.reader', 0))")
            yield from self._rows(_SCHEMA)
            yield CommitTransaction()
        places = yield from self._rows(
            "select * from tidemark_reader.places where reader = {reader} and stream = {stream}"
        )
        if not places:
            return Kept()
        row = places[0]
        if row["mode"] != self._mode:
            raise ReaderModeChanged(self._reader, self._stream, row["mode"], self._mode)
        delivered = yield from self._rows(
            "select id, writer, epoch from tidemark_reader.delivered where reader = {reader} and stream = {stream}"
        )
        return Kept(
            row["version"],
            Place(row["linear"], row["positions"], row["late"]),
            None if row["late_part"] is None else (row["late_part"][0], row["late_part"][1]),
            tuple(Range(writer, prev, id) for writer, prev, id in row["owed"]),
            {it["id"]: Delivered(**it) for it in delivered},
        )

    def lock(self, version: int) -> Generator[Request, Answer, bool]:
        """Whether the place still has that version; it stays so until the end of the transaction, which is open."""
        yield from self._rows(
            "insert into tidemark_reader.places"
            " (reader, stream, mode, linear, positions, late, owed, version)"
            " values ({reader}, {stream}, {mode}, 0, '{{}}', 0, '[]', 0) on conflict do nothing",
            mode=self._mode,
        )
        rows = yield from self._rows(
            "select version from tidemark_reader.places where reader = {reader} and stream = {stream} for update"
        )
        return bool(rows[0]["version"] == version)

    def save(self, kept: Kept, more: Iterable[Delivered], forgotten: Iterable[int]) -> Generator[Request, Answer, None]:
        """Write the place, the facts that were `delivered` in addition, and forget others; inside the transaction."""
        yield from self._rows(
            "update tidemark_reader.places set linear = {linear}, positions = {positions}, late = {late},"
            " late_part = {part}, owed = {owed}, version = {version}, updated_at = now()"
            " where reader = {reader} and stream = {stream}",
            linear=kept.place.linear,
            positions=Jsonb(dict(kept.place.positions)),
            late=kept.place.late,
            part=None if kept.late_part is None else Jsonb(kept.late_part),
            owed=Jsonb([(it.writer, it.prev, it.id) for it in kept.owed]),
            version=kept.version,
        )
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

    def _rows(self, query: LiteralString, **values: object) -> Generator[Request, Answer, list[Row]]:
        statement = sql.SQL(query).format(reader=self._reader, stream=self._stream, **values)
        return (yield from rows(RunSql("place", statement)))
