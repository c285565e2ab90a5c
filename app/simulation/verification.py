"""Holds what readers did against the truth: the facts that were committed, and the effects of each reader, in one look.

It knows nothing of positions but where a reader says that it stands. What was found to be right is deleted, so that a
play may go on for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from psycopg import sql

from tidemark.sinks.reader.follow import Mode
from tidemark.sources.writer.database import session_of
from tidemark.streaming.errors import TidemarkError
from tidemark.streaming.postgres_session import Connection

READERS: tuple[Mode, ...] = ("vector", "linear")


class EffectsDiffer(TidemarkError):
    """Some reader missed, doubled or disordered facts."""

    def __init__(self, counts: "Sequence[Count]") -> None:
        wrong = "; ".join(str(count) for count in counts if not count.right)
        super().__init__(f"what was read is not what was written: {wrong}")
        self.counts = counts


@dataclass(frozen=True, slots=True)
class Count:
    """Facts of all streams, for one reader. `missed` are those that it passed without reading them.

    `doubled` are facts of which it was handed more rows than there are, `disordered` rows below an earlier one (of the
    same writer, for the vector).
    """

    reader: str
    written: int
    read: int
    missed: int
    doubled: int
    disordered: int

    @property
    def right(self) -> bool:
        return not (self.missed or self.doubled or self.disordered)

    @property
    def complete(self) -> bool:
        return self.right and self.read == self.written

    def __str__(self) -> str:
        return (
            f"{self.reader}: {self.written} facts written, {self.read} read, {self.missed} missed,"
            f" {self.doubled} doubled, {self.disordered} out of order"
        )


_COUNTS = """
with written as (
    select stream_id, writer, count(*) as rows from {facts} group by stream_id, writer
), handed as (
    select stream_id, count(*) as rows from demo.effects
    where reader = {reader} and stream = {stream} group by stream_id
), place as (
    select linear, positions from tidemark_reader.places where reader = {reader} and stream = {stream}
), in_order as (
    select abs(stream_id) as id, max(abs(stream_id)) over (
        {partition} order by number rows between unbounded preceding and 1 preceding
    ) as before
    from demo.effects where reader = {reader} and stream = {stream}
)
select
    count(written.stream_id),
    count(*) filter (where handed.rows >= written.rows),
    count(*) filter (
        where written.rows > coalesce(handed.rows, 0) and abs(written.stream_id) <=
            (select abs(coalesce((positions ->> written.writer)::bigint, linear)) from place)
    ),
    count(*) filter (where handed.rows > coalesce(written.rows, 0)),
    (select count(*) from in_order where id < before)
from written full join handed using (stream_id)
"""


_FORGOTTEN = """
with readers as (
    select unnest({readers}::text[]) as reader
), reached as (
    select abs(linear) as id from tidemark_reader.places where reader = {slowest} and stream = {stream}
), read_by_all as (
    select not exists (
        select from {facts} fact cross join readers
        where abs(fact.stream_id) <= (select id from reached) and not exists (
            select from demo.effects effect
            where (effect.reader, effect.stream, effect.stream_id, effect.part)
                = (readers.reader, {stream}, fact.stream_id, fact.part)
        )
    ) as so
), facts as (
    delete from {facts} where abs(stream_id) <= (select id from reached) and (select so from read_by_all)
    returning stream_id
), effects as (
    delete from demo.effects where stream = {stream} and abs(stream_id) <= (select id from reached)
        and (select so from read_by_all)
)
insert into demo.compared (reader, stream, facts)
select reader, {stream}, (select count(distinct stream_id) from facts) from readers
on conflict (reader, stream) do update set facts = compared.facts + excluded.facts
"""


class Verification:
    """A context manager, for one thread. `dsn` is that of the play's database."""

    def __init__(self, dsn: str, streams: Sequence[str]) -> None:
        self._session = session_of(dsn, "tidemark simulate --verify")
        self._streams = streams

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def counts(self) -> list[Count]:
        """How each reader does, over all streams, since the database was made; nothing before the first has begun.

        Raises `Unavailable`.

        Forgets what all readers have read and the linear one has passed: whoever is handed some of it again is handed
        what is not there, which counts as doubled.
        """
        with self._session.use() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read")
            if not self._begun(connection):
                return [Count(reader, 0, 0, 0, 0, 0) for reader in READERS]
            counts = {reader: [self._count(connection, reader, each) for each in self._streams] for reader in READERS}
            for stream, *of in zip(self._streams, *counts.values(), strict=True):
                if all(count.right for count in of):
                    connection.execute(
                        sql.SQL(_FORGOTTEN).format(
                            facts=sql.Identifier("demo", stream),
                            readers=list(READERS),
                            slowest="linear",
                            stream=stream,
                        )
                    )
        return [_sum(reader, of) for reader, of in counts.items()]

    def _begun(self, connection: Connection) -> bool:
        """Whether any reader has made its table of places."""
        row = connection.execute("select to_regclass('tidemark_reader.places') is not null").fetchone()
        return row is not None and bool(row[0])

    def _count(self, connection: Connection, reader: str, stream: str) -> Count:
        row = connection.execute(
            sql.SQL(_COUNTS).format(
                facts=sql.Identifier("demo", stream),
                reader=reader,
                stream=stream,
                partition=sql.SQL("partition by writer" if reader == "vector" else ""),
            )
        ).fetchone()
        assert row is not None
        forgotten = connection.execute(
            "select facts from demo.compared where reader = %s and stream = %s", [reader, stream]
        ).fetchone()
        before = 0 if forgotten is None else forgotten[0]
        written, read, missed, doubled, disordered = row
        return Count(reader, before + written, before + read, missed, doubled, disordered)


def _sum(reader: str, counts: Sequence[Count]) -> Count:
    return Count(
        reader,
        sum(count.written for count in counts),
        sum(count.read for count in counts),
        sum(count.missed for count in counts),
        sum(count.doubled for count in counts),
        sum(count.disordered for count in counts),
    )
