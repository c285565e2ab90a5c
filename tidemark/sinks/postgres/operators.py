"""The table of operators' acts: noted before they are sent, with the user that Postgres knows, and what came of them.

A record on Kafka tells nobody who produced it, so this is where an act meets an identity that was proved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, LiteralString

from psycopg.errors import NoDataFound

from tidemark.common.errors import BadRecord
from tidemark.common.postgres_session import PostgresSession, first_line
from tidemark.streaming.core.effects import Forced


@dataclass(frozen=True, slots=True)
class NotedAct:
    """`number` in `tidemark.acts`; `seen_as`: the user who logged in; `audited`: the newest row of `skips` before."""

    number: int
    seen_as: str
    audited: int


@dataclass(frozen=True, slots=True)
class ListedAct:
    """What an operator did to `(prev, id]` of `writer`. `seen_as` and `seen_from`: user and address that Postgres knew;
    None, as `number`: it came to the control topic by other means, and Kafka tells nobody from whom. `topic`,
    `partition` and `offset` say where it went. `outcome` is what is known of it: `applied`, `refused`; None: nothing
    yet, or it was never sent."""

    number: int | None
    time: datetime
    kind: str
    stream: str
    writer: str
    epoch: int
    prev: int
    id: int
    by: str
    why: str
    seen_as: str | None
    seen_from: str | None
    topic: str | None
    partition: int | None
    offset: int | None
    outcome: str | None


_SAID: tuple[LiteralString, ...] = ("stream", "kind", "writer", "epoch", "prev", "id", "by", "why")


def _same(one: LiteralString, other: LiteralString) -> LiteralString:
    """Whether two rows, of the audit or of acts, are of records that say the same."""
    return " and ".join(f"{one}.{column} = {other}.{column}" for column in _SAID)


# An act that no verb waited for is known by its row in the audit.
_LISTED: LiteralString = f"""
with listed as (
    select a.number, a.time, a.kind, a.stream, a.writer, a.epoch, a.prev, a.id, a.by, a.why, a.seen_as,
        host(a.seen_from) as seen_from, a.topic, a.partition, a."offset", coalesce(a.outcome, (
            select 'applied' from tidemark.skips s
            where {_same("s", "a")} limit 1)) as outcome
    from tidemark.acts a
    union all
    select null, s.time, s.kind, s.stream, s.writer, s.epoch, s.prev, s.id, s.by, s.why, null, null, null, null, null,
        'applied'
    from tidemark.skips s where not exists (
        select from tidemark.acts a
        where {_same("s", "a")})
)
select * from listed
"""


# Rows of the audit stand in the order in which the records were applied.
_BECAME: LiteralString = f"""
with act as (select * from tidemark.acts where number = %(number)s), mine as (
    select s.number from act a join tidemark.skips s on {_same("s", "a")}
    where s.number > %(audited)s
    order by s.number offset (
        select least(count(*), (select greatest(count(*) - 1, 0) from act a join tidemark.skips s
            on {_same("s", "a")} where s.number > %(audited)s))
        from act a join tidemark.acts b
            on (b.stream, b.kind, b.writer, b.epoch, b.prev, b.id, b.by, b.why, b.topic, b.partition)
            = (a.stream, a.kind, a.writer, a.epoch, a.prev, a.id, a.by, a.why, a.topic, a.partition)
            and b."offset" < a."offset" and b.outcome is distinct from 'refused'
        where not exists (select from tidemark.skips s
            where {_same("s", "b")} and s.number <= %(audited)s)
    ) limit 1
)
select exists (
    select from act a join tidemark.skips s on (s.stream, s.kind, s.writer, s.epoch)
        = (a.stream, a.kind, a.writer, a.epoch) and abs(s.prev) <= abs(a.prev)
        and case when a.kind = 'JOIN' then s.id = a.id else abs(s.id) >= abs(a.id) end
    where s.number > %(audited)s and s.number < mine.number
) from mine
"""


EVERY_STREAM: Final = ""
"""In place of a stream in an act on all of them; no stream has such a name."""


class Acts:
    """Needs the roles tidemark_reader and tidemark_operator. Raises `Unavailable` and `Refused`."""

    def __init__(self, database: PostgresSession) -> None:
        self._database = database

    def note(self, stream: str, act: Forced) -> NotedAct:
        """Before it is sent: what is not noted is not done."""
        with self._database.use() as connection:
            row = connection.execute(
                "insert into tidemark.acts (stream, kind, writer, epoch, prev, id, by, why)"
                " values (%s, %s, %s, %s, %s, %s, %s, %s)"
                " returning number, seen_as, coalesce((select max(number) from tidemark.skips), 0)",
                (stream, act.kind, act.writer, act.epoch, act.prev, act.id, act.by, act.why),
            ).fetchone()
        assert row is not None
        return NotedAct(*row)

    def sent(self, noted: NotedAct, topic: str, partition: int, offset: int) -> None:
        """Where its record went. Once, and only for the login that noted it: raises `BadRecord` else."""
        with self._database.use() as connection:
            row = connection.execute(
                "select tidemark.note_sent(%s, %s, %s, %s)", (noted.number, topic, partition, offset)
            ).fetchone()
        _require(row, noted)

    def is_read(self, topic: str, partition: int, offset: int) -> bool:
        """Whether a batch with that record was applied."""
        with self._database.use() as connection:
            found = connection.execute(
                "select 1 from tidemark.kafka_offsets where (topic, partition) = (%s, %s) and next > %s",
                (topic, partition, offset),
            )
            return found.fetchone() is not None

    def became(self, noted: NotedAct) -> Literal["applied", "refused", "settled before"]:
        """What the pipeline made of an act, once its record was read. `settled before`: since it was noted another act
        was applied that had settled all of it. Of two that say the same the one at the lower offset is the first."""
        with self._database.use() as connection:
            row = connection.execute(_BECAME, {"number": noted.number, "audited": noted.audited}).fetchone()
        if row is None:
            return "refused"
        return "settled before" if row[0] else "applied"

    def close(self, noted: NotedAct, outcome: str) -> None:
        """What was seen of it. Once, and only for the login that noted it: raises `BadRecord` else."""
        with self._database.use() as connection:
            row = connection.execute("select tidemark.note_outcome(%s, %s)", (noted.number, outcome)).fetchone()
        _require(row, noted)

    def note_replay(self, stream: str, act: Forced, origin: tuple[str, int, int]) -> NotedAct:
        """The same of a record that stood at `origin` (topic, partition, offset); `BadRecord` the second time."""
        with self._database.use() as connection, connection.transaction():
            noted = self.note(stream, act)
            taken = connection.execute(
                'insert into tidemark.replays (topic, partition, "offset", act) values (%s, %s, %s, %s)'
                " on conflict do nothing",
                (*origin, noted.number),
            )
            if not taken.rowcount:
                raise BadRecord("replayed_before", f"act {self.replays()[origin]} sent this record again")
        return noted

    def replays(self) -> dict[tuple[str, int, int], int]:
        """Topic, partition and offset of what was replayed -> number of the act."""
        with self._database.use() as connection:
            rows = connection.execute('select topic, partition, "offset", act from tidemark.replays')
            return {(topic, partition, offset): act for topic, partition, offset, act in rows}

    def newest(self, stream: str | None, most: int) -> list[ListedAct]:
        """Of one stream or of all, newest first; also acts that came to the control topic by other means."""
        with self._database.use() as connection:
            rows = connection.execute(
                _LISTED + " where %(stream)s::text is null or stream = %(stream)s"
                " order by time desc, number desc limit %(most)s",
                {"stream": stream, "most": most},
            )
            return [ListedAct(*row) for row in rows]

    def is_stream(self, name: str) -> bool:
        with self._database.use() as connection:
            return (
                connection.execute("select 1 from tidemark.streams where stream = %s", (name,)).fetchone() is not None
            )

    def about(self, stream: str, id: int, most: int) -> list[ListedAct]:
        """Those whose range holds `id`, oldest first."""
        with self._database.use() as connection:
            rows = connection.execute(
                _LISTED + " where stream = %(stream)s and abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
                " order by time, number limit %(most)s",
                {"stream": stream, "id": id, "most": most},
            )
            return [ListedAct(*row) for row in rows]

    def numbered(self, number: int) -> ListedAct | None:
        with self._database.use() as connection:
            row = connection.execute(_LISTED + " where number = %s", (number,)).fetchone()
            return ListedAct(*row) if row else None


def _require(row: tuple[bool | None] | None, noted: NotedAct) -> None:
    """The functions write what nobody has written yet, of the own login alone."""
    if row is None or not row[0]:
        raise BadRecord("not_yours", f"override {noted.number} is of another login, or its outcome was noted before")


class PolicyTable:
    """Needs the role tidemark_reader; to change, also tidemark_operator. Raises `Unavailable` and `Refused`."""

    def __init__(self, database: PostgresSession) -> None:
        self._database = database

    def given(self) -> dict[str, dict[str, int]]:
        """Name -> setting -> value."""
        found: dict[str, dict[str, int]] = {}
        with self._database.use() as connection:
            rows = connection.execute("select stream, setting, value from tidemark.policies order by 1, 2")
            for name, setting, value in rows:
                found.setdefault(name, {})[setting] = value
        return found

    def change(self, name: str, changes: Mapping[str, int | None], by: str, why: str) -> tuple[int, str]:
        """Set these of the policy, take back what is None; all or none. Gives the number of the act and what it did.

        `BadRecord` where one to take back is not set.
        """
        with self._database.use() as connection:
            try:
                row = connection.execute(
                    "select act, outcome from tidemark.change_policy(%s, %s::text[], %s::bigint[], %s, %s)",
                    (name, [*changes], [*changes.values()], by, why),
                ).fetchone()
            except NoDataFound as error:
                raise BadRecord("not_set", first_line(error)) from None
        assert row is not None
        return int(row[0]), str(row[1])
