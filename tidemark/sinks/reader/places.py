"""Lists and changes the stored places and the parked facts of readers, for operators.

A place may be changed while copies of its reader run. A copy detects the change by the version of the place, and
continues from the new place.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from tidemark.common.errors import Refused
from tidemark.common.postgres_session import Connection, DatabaseUse, Dsn, PostgresSession, fetch_all
from tidemark.sinks.reader.databases import APPLICATION_PREFIX
from tidemark.sinks.reader.token import Token

_USE = DatabaseUse(
    "TIDEMARK_READERS_DSN",
    remedies={
        "28": "check user and password in TIDEMARK_READERS_DSN",
        "3D": "create the database, or correct its name in TIDEMARK_READERS_DSN",
        "42501": "grant the user usage on the schema tidemark_reader and select on its tables; to change places and"
        " parked facts, also insert, update and delete",
    },
)

_SCHEMA_EXISTS: LiteralString = "select to_regclass('tidemark_reader.parked') is not null"

# Postgres shows the application name of every session to every user, and cuts it to 63 bytes. It shows the state of a
# session only to its own user and to members of pg_read_all_stats.
_STORED_PLACES: LiteralString = """
select p.reader, p.stream, p.mode, p.linear, p.positions, p.late, p.version > 0 as has_begun,
    case when p.version > 0 then p.updated_at end as committed_at,
    (select count(*) from tidemark_reader.parked k where (k.reader, k.stream) = (p.reader, p.stream)) as parked,
    (select count(*) from tidemark_reader.parked k
        where (k.reader, k.stream) = (p.reader, p.stream) and retry_at is not null) as retried,
    case when octet_length(name) <= 63 - length(%(application)s) and name ~ '^[ -~]+$' then (
        select case when count(*) > 0 or to_jsonb(p) ->> 'timeline' is null then count(*) end from pg_stat_activity a
        where a.datname = current_database() and a.application_name = %(application)s || name
    ) end as copies,
    (select min(a.xact_start) from pg_stat_activity a
        where a.datname = current_database() and a.application_name = %(application)s || name
            and a.state <> 'active' and a.xact_start is not null and name = p.reader) as busy_since
from tidemark_reader.places p
cross join lateral regexp_replace(p.reader, '\\[\\d+/\\d+\\]$', '') as name
where (%(reader)s::text is null or %(reader)s in (p.reader, name))
    and (%(stream)s::text is null or p.stream = %(stream)s)
order by p.stream, name, coalesce(substring(p.reader from '\\[(\\d+)/\\d+\\]$')::integer, -1)
"""

_PARKED_FACTS: LiteralString = """
select reader, stream, id, reason, parked_at, retry_at from tidemark_reader.parked
where (%(reader)s::text is null or reader = %(reader)s) and (%(stream)s::text is null or stream = %(stream)s)
order by parked_at desc, abs(id) limit %(limit)s
"""

_PARTITION = re.compile(r"\[(\d+)/(\d+)\]$")

_NEXT_VERSION: LiteralString = "greatest(version + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint)"


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """The stored place of a reader in a stream.

    Attributes:
        reader: the name of the reader; with its partition if it has partitions, such as `mailer[3/8]`.
        stream: the name of the stream.
        mode: "linear" or "vector".
        linear: the position up to which the IDs of each writer without an entry in `positions` were handed over.
        positions: writer -> the position up to which the writer's IDs were handed over. Empty in linear mode.
        late: the number of the last late completion that was handed over.
        has_begun: False if the reader has committed no batch yet, or none since its place was reset. The reader then
            begins at the `since` of its service.
        committed_at: when the place was stored; None if not `has_begun`.
        parked: the number of parked facts.
        retried: the number of parked facts for which a retry is requested and not done yet.
        copies: the number of connections of the reader's copies to this database, for all partitions. None if they
            cannot be counted: the name of the reader is too long or not ASCII, or the reader calls the SQL functions.
        busy_since: when the oldest current batch of a copy began. None if no copy has a batch, if the batch is not
            visible to this user, or if the place is that of a partition.
    """

    reader: str
    stream: str
    mode: str
    linear: int
    positions: dict[str, int]
    late: int
    has_begun: bool
    committed_at: datetime | None
    parked: int
    retried: int
    copies: int | None
    busy_since: datetime | None

    @property
    def name(self) -> str:
        """The name of the reader without its partition."""
        return _PARTITION.sub("", self.reader)

    @property
    def partition(self) -> tuple[int, int] | None:
        """(Number of the partition, number of partitions); None if the reader has no partitions."""
        match = _PARTITION.search(self.reader)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def token(self) -> Token:
        """The place as a token."""
        return Token.of(self.linear, self.positions)


@dataclass(frozen=True, slots=True)
class ParkedFact:
    """A fact that a reader has passed without the effects of the fact.

    Attributes:
        reader: the name of the reader, with its partition if it has partitions.
        stream: the name of the stream.
        id: the stream ID of the fact.
        reason: the error of the service.
        parked_at: when the fact was parked.
        retry_at: when an operator requested a retry; None if no retry is requested.
    """

    reader: str
    stream: str
    id: int
    reason: str
    parked_at: datetime
    retry_at: datetime | None


@dataclass(frozen=True, slots=True)
class DeletedFactCounts:
    """The numbers of parked and of delivered facts (`checkpoint.DeliveredFact`) that a change of a place deleted."""

    parked: int
    delivered: int


class ReaderPlaces:
    """Lists and changes the places in one database of readers. A context manager.

    All methods raise `Unavailable` (call again) and `Refused`. `where` is the address of the database for messages.
    """

    def __init__(self, dsn: Dsn, application: str = "tidemark readers") -> None:
        self._session = PostgresSession(dsn, application, _USE)
        self.where = self._session.where

    def __enter__(self) -> "ReaderPlaces":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def places(self, reader: str | None = None, stream: str | None = None) -> list[StoredPlace]:
        """Query the stored places, ordered by stream, reader and partition. Empty if the schema does not exist.

        Args:
            reader: a reader, for all its partitions, or one partition, such as `mailer[3/8]`; None: all readers.
            stream: the name of a stream; None: all streams.
        """
        return self._read(StoredPlace, _STORED_PLACES, reader=reader, stream=stream, application=APPLICATION_PREFIX)

    def parked(self, reader: str | None, stream: str | None, limit: int) -> list[ParkedFact]:
        """Query the parked facts, newest first. Empty if the schema does not exist.

        Args:
            reader: a reader, or one partition, such as `mailer[3/8]`; None: all readers.
            stream: the name of a stream; None: all streams.
            limit: the largest number of facts.
        """
        return self._read(ParkedFact, _PARKED_FACTS, reader=reader, stream=stream, limit=limit)

    def parked_with_ids(self, reader: str, stream: str, ids: Sequence[int]) -> list[ParkedFact]:
        """Query the parked facts with these IDs, ordered by ID away from 0. IDs that are not parked are left out."""
        parked = self.parked(reader, stream, 2**31 - 1)
        return sorted((fact for fact in parked if fact.id in {*ids}), key=lambda fact: abs(fact.id))

    def last_id(self, stream: str) -> int | None:
        """Query the last ID of the stream that was given out, if all writers of the stream are in this database.

        Returns None if the ID is not known, or if this user may not call the function `tidemark_reader.last_id`.
        """
        may_call = "select has_function_privilege(to_regprocedure('tidemark_reader.last_id(text)'), 'execute')"
        if not self._session.fetch_value(may_call):
            return None
        last: int | None = self._session.fetch_value("select tidemark_reader.last_id(%s)", [stream])
        return last

    def _read(self, row_class: Any, query: LiteralString, **values: object) -> list[Any]:
        with self._session.use() as connection:
            exists = connection.execute(_SCHEMA_EXISTS).fetchone()
            if exists is None or not exists[0]:
                return []
            return fetch_all(connection, row_class, query, values)

    def seek(self, stored: StoredPlace, token: Token, must_read: Iterable[tuple[str, int, int]]) -> DeletedFactCounts:
        """Move a place to `token`, forwards or backwards.

        The reader then reads the table for every ID up to the stream's current positions, regardless of the evidence.
        All facts beyond the token are handed over again. So this method deletes the delivered facts beyond the token,
        and the parked facts beyond the linear position of the token.

        Args:
            stored: the place to move.
            token: the new place. In linear mode, only the linear position of the token is used.
            must_read: (writer, prev, ID) of the late completions beyond the token that the reader has already read.

        Raises:
            Refused: a copy has locked the place for 5 s or longer, or a fact is parked between the positions of the
                token.
        """
        positions = dict(token.positions) if stored.mode == "vector" else {}
        beyond = (
            " where reader = %(reader)s and stream = %(stream)s and"
            " abs(id) > abs(coalesce((%(positions)s::jsonb ->> {writer})::bigint, %(linear)s))"
        )
        values = {
            "reader": stored.reader,
            "stream": stored.stream,
            "linear": token.linear,
            "positions": Jsonb(positions),
            "must_read": Jsonb([*must_read]),
        }
        with self._locked(stored) as connection:
            self._check_parked(connection, stored, token)
            connection.execute(
                "update tidemark_reader.places set linear = %(linear)s, positions = %(positions)s,"
                " must_read = %(must_read)s, late_part = null, is_settled = false, updated_at = now(), version = "
                + _NEXT_VERSION
                + " where"
                " reader = %(reader)s and stream = %(stream)s",
                values,
            )
            delivered = connection.execute(
                "delete from tidemark_reader.delivered" + beyond.replace("{writer}", "writer"), values
            )
            parked = connection.execute(
                "delete from tidemark_reader.parked where reader = %(reader)s and stream = %(stream)s"
                " and abs(id) > abs(%(linear)s)",
                values,
            )
            return DeletedFactCounts(parked.rowcount, delivered.rowcount)

    def check_seek(self, stored: StoredPlace, token: Token) -> None:
        """Raise `Refused` if `seek` would be refused because of parked facts. Changes nothing."""
        with self._session.use() as connection:
            self._check_parked(connection, stored, token)

    def _check_parked(self, connection: Connection, stored: StoredPlace, token: Token) -> None:
        """Raise `Refused` if a fact is parked beyond the linear position of `token` and up to its highest position.

        The writer of a parked fact is not stored. If the reader reads the fact again after the seek, the fact must not
        stay parked. If the writer's position in the token has passed the fact, the fact must stay parked.
        """
        if stored.mode != "vector":
            return
        highest = max(abs(id) for id in (token.linear, *dict(token.positions).values()))
        rows = connection.execute(
            "select id from tidemark_reader.parked where reader = %s and stream = %s and abs(id) > %s and abs(id) <= %s"
            " order by abs(id) limit 10",
            [stored.reader, stored.stream, abs(token.linear), highest],
        ).fetchall()
        if rows:
            ids = ", ".join(str(row[0]) for row in rows)
            raise Refused(
                "Postgres",
                self.where,
                f"parked facts of {stored.reader} are beyond the linear position of {token}, but not beyond its highest"
                f" position of a writer: {ids}",
                "retry or drop them first (`tidemark readers parked`), or give a token without writers",
            )

    def reset(self, stored: StoredPlace) -> DeletedFactCounts:
        """Reset a place, and delete its parked and delivered facts.

        The reader then begins again at the `since` of its service. Raises `Refused` if a copy has locked the place for
        5 s or longer.
        """
        with self._locked(stored) as connection:
            connection.execute(
                "update tidemark_reader.places set linear = 0, positions = '{}', late = 0, late_part = null,"
                " must_read = '[]', is_settled = false, version = 0, updated_at = now()"
                " where reader = %s and stream = %s",
                (stored.reader, stored.stream),
            )
            return _delete_facts(connection, stored)

    def delete(self, stored: StoredPlace) -> DeletedFactCounts:
        """Delete a place, and its parked and delivered facts. Raises `Refused` as `reset` does."""
        with self._locked(stored) as connection:
            connection.execute(
                "delete from tidemark_reader.places where reader = %s and stream = %s", (stored.reader, stored.stream)
            )
            return _delete_facts(connection, stored)

    def retry(self, facts: Sequence[ParkedFact]) -> int:
        """Request that the reader hands parked facts over again. All `facts` are of one reader and stream.

        Returns the number of requests: facts that are no longer parked are left out.
        """
        return self._change_parked("update tidemark_reader.parked set retry_at = now()", facts)

    def drop(self, facts: Sequence[ParkedFact]) -> int:
        """Delete parked facts of one reader and stream. Their effects stay missing. Returns the number of deletions."""
        return self._change_parked("delete from tidemark_reader.parked", facts)

    def _change_parked(self, statement: LiteralString, facts: Sequence[ParkedFact]) -> int:
        if not facts:
            return 0
        return self._session.execute(
            statement + " where reader = %s and stream = %s and id = any(%s)",
            (facts[0].reader, facts[0].stream, [fact.id for fact in facts]),
        )

    @contextmanager
    def _locked(self, stored: StoredPlace) -> Iterator[Connection]:
        """Run the block in a transaction that has locked the place. Raises `Refused` after 5 s without the lock."""
        with self._session.use() as connection, connection.transaction():
            connection.execute("set local lock_timeout = '5s'")
            try:
                connection.execute(
                    "select from tidemark_reader.places where reader = %s and stream = %s for update",
                    (stored.reader, stored.stream),
                )
            except psycopg.errors.LockNotAvailable as error:
                problem = f"a copy of {stored.reader}, or another session, has locked the place for 5 s or longer"
                raise Refused("Postgres", self.where, problem, "try again, or stop the copies of the reader") from error
            yield connection


def _delete_facts(connection: Connection, stored: StoredPlace) -> DeletedFactCounts:
    counts = [
        connection.execute(
            "delete from tidemark_reader." + table + " where reader = %s and stream = %s",
            (stored.reader, stored.stream),
        ).rowcount
        for table in _FACT_TABLES
    ]
    return DeletedFactCounts(*counts)


_FACT_TABLES: tuple[LiteralString, ...] = ("parked", "delivered")
