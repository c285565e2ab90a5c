"""Operator overrides and policies.

A command such as `tidemark skip` logs an override before it sends the record. The log has the login that Postgres has
verified, because a Kafka consumer cannot see who produced a record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, LiteralString

from psycopg.errors import NoDataFound

from tidemark.common.errors import BadRecord
from tidemark.common.postgres_session import PostgresSession, fetch_one, first_line
from tidemark.streaming.core.effects import OperatorOverride


@dataclass(frozen=True, slots=True)
class LoggedOverride:
    """The number and login (`seen_as`) of a logged override.

    `last_skip`: the number of the newest row of `skips` at that time; 0 if there was none.
    """

    number: int
    seen_as: str
    last_skip: int


@dataclass(frozen=True, slots=True)
class OverrideEntry:
    """An override of `(prev, id]` of `writer`.

    Attributes:
        number: None if no command of Tidemark sent the record.
        seen_as: the login that Postgres verified; None without a number.
        seen_from: the address of the client; None without a number, or with a Unix socket.
        topic, partition, offset: of the record; None if the record is not known to be sent.
        outcome: `applied` or `refused`; None if it is not known, or if the record was not sent.
    """

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


_CONTENT: tuple[LiteralString, ...] = ("stream", "kind", "writer", "epoch", "prev", "id", "by", "why")


def _same_record_condition(one: LiteralString, other: LiteralString) -> LiteralString:
    """The SQL condition that two rows of the audit or of overrides describe equal records."""
    return " and ".join(f"{one}.{column} = {other}.{column}" for column in _CONTENT)


# If no command has stored the outcome, a row of the audit shows that the override was applied.
_ALL_OVERRIDES: LiteralString = f"""
with listed as (
    select a.number, a.time, a.kind, a.stream, a.writer, a.epoch, a.prev, a.id, a.by, a.why, a.seen_as,
        host(a.seen_from) as seen_from, a.topic, a.partition, a."offset", coalesce(a.outcome, (
            select 'applied' from tidemark.skips s
            where {_same_record_condition("s", "a")} limit 1)) as outcome
    from tidemark.overrides a
    union all
    select null, s.time, s.kind, s.stream, s.writer, s.epoch, s.prev, s.id, s.by, s.why, null, null, null, null, null,
        'applied'
    from tidemark.skips s where not exists (
        select from tidemark.overrides a
        where {_same_record_condition("s", "a")})
)
select * from listed
"""


# Rows of the audit are in the order in which the records were applied.
_OUTCOME: LiteralString = f"""
with act as (select * from tidemark.overrides where number = %(number)s), mine as (
    select s.number from act a join tidemark.skips s on {_same_record_condition("s", "a")}
    where s.number > %(last_skip)s
    order by s.number offset (
        select least(count(*), (select greatest(count(*) - 1, 0) from act a join tidemark.skips s
            on {_same_record_condition("s", "a")} where s.number > %(last_skip)s))
        from act a join tidemark.overrides b
            on (b.stream, b.kind, b.writer, b.epoch, b.prev, b.id, b.by, b.why, b.topic, b.partition)
            = (a.stream, a.kind, a.writer, a.epoch, a.prev, a.id, a.by, a.why, a.topic, a.partition)
            and b."offset" < a."offset" and b.outcome is distinct from 'refused'
        where not exists (select from tidemark.skips s
            where {_same_record_condition("s", "b")} and s.number <= %(last_skip)s)
    ) limit 1
)
select exists (
    select from act a join tidemark.skips s on (s.stream, s.kind, s.writer, s.epoch)
        = (a.stream, a.kind, a.writer, a.epoch) and abs(s.prev) <= abs(a.prev)
        and case when a.kind = 'JOIN' then s.id = a.id else abs(s.id) >= abs(a.id) end
    where s.number > %(last_skip)s and s.number < mine.number
) from mine
"""


EVERY_STREAM: Final = ""
"""The stream of an override of all streams; no stream has this name."""


class OverrideLog:
    """The log of operator overrides in Postgres.

    Needs the roles tidemark_reader and tidemark_operator. Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def log(self, stream: str, override: OperatorOverride) -> LoggedOverride:
        """Log an override. Call this before sending the record, so that every sent record is logged."""
        noted = self._session.fetch_one(
            LoggedOverride,
            "insert into tidemark.overrides (stream, kind, writer, epoch, prev, id, by, why)"
            " values (%s, %s, %s, %s, %s, %s, %s, %s)"
            " returning number, seen_as, coalesce((select max(number) from tidemark.skips), 0) as last_skip",
            (
                stream,
                override.kind,
                override.writer,
                override.epoch,
                override.prev,
                override.id,
                override.by,
                override.why,
            ),
        )
        assert noted is not None
        return noted

    def note_sent(self, override: LoggedOverride, topic: str, partition: int, offset: int) -> None:
        """Store the offset of the record.

        Raises:
            BadRecord: another login logged the override, or the offset is already stored.
        """
        arguments = (override.number, topic, partition, offset)
        _require_noted(self._session.fetch_value("select tidemark.note_sent(%s, %s, %s, %s)", arguments), override)

    def is_read(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the batch with that record was applied."""
        return (
            self._session.fetch_value(
                "select true from tidemark.kafka_offsets where (topic, partition) = (%s, %s) and next > %s",
                (topic, partition, offset),
            )
            is not None
        )

    def find_outcome(self, override: LoggedOverride) -> Literal["applied", "refused", "settled before"]:
        """Find the outcome of an override whose record was read.

        Returns:
            `settled before` if another override settled the whole range after this one was logged and before it was
            applied. If two overrides are equal, the one at the lower offset counts as the first.
        """
        is_settled = self._session.fetch_value(_OUTCOME, {"number": override.number, "last_skip": override.last_skip})
        if is_settled is None:
            return "refused"
        return "settled before" if is_settled else "applied"

    def note_outcome(self, override: LoggedOverride, outcome: str) -> None:
        """Store the outcome.

        Raises:
            BadRecord: another login logged the override, or the outcome is already stored.
        """
        _require_noted(
            self._session.fetch_value("select tidemark.note_outcome(%s, %s)", (override.number, outcome)), override
        )

    def note_replay(self, stream: str, override: OperatorOverride, origin: tuple[str, int, int]) -> LoggedOverride:
        """Log the replay of a dead letter.

        Args:
            origin: topic, partition and offset of the original record.

        Raises:
            BadRecord: the record was replayed before.
        """
        with self._session.use() as connection, connection.transaction():
            noted = self.log(stream, override)
            arguments = (noted.number, *origin)
            if not self._session.fetch_value("select tidemark.note_replay(%s, %s, %s, %s)", arguments):
                raise BadRecord(
                    "replayed_before", f"this record was replayed before, as override {self.replays()[origin]}"
                )
        return noted

    def replays(self) -> dict[tuple[str, int, int], int]:
        """(topic, partition, offset) of each replayed record -> number of the override."""
        rows = self._session.fetch_tuples('select topic, partition, "offset", act from tidemark.replays')
        return {(topic, partition, offset): override for topic, partition, offset, override in rows}

    def newest(self, stream: str | None, most: int) -> list[OverrideEntry]:
        """Overrides of one stream or of all, newest first, including overrides that no command has sent."""
        return self._session.fetch_all(
            OverrideEntry,
            _ALL_OVERRIDES + " where %(stream)s::text is null or stream = %(stream)s"
            " order by time desc, number desc limit %(most)s",
            {"stream": stream, "most": most},
        )

    def has_stream(self, name: str) -> bool:
        row = self._session.fetch_value("select true from tidemark.streams where stream = %s", (name,))
        return row is not None

    def stream_names(self) -> list[str]:
        return [name for (name,) in self._session.fetch_tuples("select stream from tidemark.streams")]

    def containing(self, stream: str, id: int, most: int) -> list[OverrideEntry]:
        """Overrides whose range contains `id`, oldest first."""
        return self._session.fetch_all(
            OverrideEntry,
            _ALL_OVERRIDES + " where stream = %(stream)s and abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
            " order by time, number limit %(most)s",
            {"stream": stream, "id": id, "most": most},
        )

    def with_number(self, number: int) -> OverrideEntry | None:
        return self._session.fetch_one(OverrideEntry, _ALL_OVERRIDES + " where number = %s", (number,))


def _require_noted(is_noted: object, override: LoggedOverride) -> None:
    """Raise `BadRecord` if no row was changed. The SQL functions change only rows of the caller's login, and each
    column only once.
    """
    if not is_noted:
        raise BadRecord("not_yours", f"override {override.number} belongs to another login, or was noted before")


@dataclass(frozen=True, slots=True)
class _PolicyChange:
    act: int
    outcome: str


class PolicyTable:
    """The policies. Needs the role tidemark_reader; to change, also tidemark_operator.

    Raises `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def read(self) -> dict[str, dict[str, int]]:
        """The policies: name -> setting -> value."""
        policies: dict[str, dict[str, int]] = {}
        rows = self._session.fetch_tuples("select stream, setting, value from tidemark.policies order by 1, 2")
        for name, setting, value in rows:
            policies.setdefault(name, {})[setting] = value
        return policies

    def change(self, name: str, changes: Mapping[str, int | None], by: str, why: str) -> tuple[int, str]:
        """Set settings of a policy, and remove those whose value is None, in one transaction.

        Returns:
            The number of the override, and the changes as text.

        Raises:
            BadRecord: a setting to remove is not set.
        """
        with self._session.use() as connection:
            try:
                change = fetch_one(
                    connection,
                    _PolicyChange,
                    "select act, outcome from tidemark.change_policy(%s, %s::text[], %s::bigint[], %s, %s)",
                    (name, [*changes], [*changes.values()], by, why),
                )
            except NoDataFound as error:
                raise BadRecord("not_set", first_line(error)) from None
        assert change is not None
        return change.act, change.outcome
