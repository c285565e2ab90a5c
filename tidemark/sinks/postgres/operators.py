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
    """An override that this process has logged.

    Attributes:
        number: the number of the row of `overrides`.
        seen_as: the login that Postgres verified.
        last_skip: the number of the newest row of `skips` when the override was logged; 0 if there was none.
    """

    number: int
    seen_as: str
    last_skip: int


@dataclass(frozen=True, slots=True)
class OverrideEntry:
    """An operator override, and what is known about its record. Its range is `(prev, id]`.

    Attributes:
        number: the number of the row of `overrides`; None if no command of Tidemark sent the record.
        kind: the kind of the record or action, such as SKIP, JOIN, REPLAY or POLICY.
        by: the name that the operator gave.
        why: the reason that the operator gave.
        seen_as: the login that Postgres verified; None if `number` is None.
        seen_from: the address of the client; None if `number` is None, or if the client used a Unix socket.
        topic, partition, offset: where the record is in Kafka; None if the record is not known to be sent.
        outcome: the outcome, such as `applied` or `refused`; None if it is not known.
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


_CONTENT_COLUMNS: tuple[LiteralString, ...] = ("stream", "kind", "writer", "epoch", "prev", "id", "by", "why")


def _same_record_condition(one: LiteralString, other: LiteralString) -> LiteralString:
    """The SQL condition that two rows have equal records. `one` and `other`: aliases of `skips` or `overrides`."""
    return " and ".join(f"{one}.{column} = {other}.{column}" for column in _CONTENT_COLUMNS)


# If no command has stored the outcome, a row of `skips` shows that the override was applied.
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


# The numbers of `skips` are in the order in which the records were applied.
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
"""The `stream` of an override that concerns all streams. No stream has this name."""


class OverrideLog:
    """The log of operator overrides in Postgres.

    Needs the roles tidemark_reader and tidemark_operator. Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def log(self, stream: str, override: OperatorOverride) -> LoggedOverride:
        """Log an override of `stream`. Call this before the record is sent, so that every sent record is logged."""
        logged = self._session.fetch_one(
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
        assert logged is not None
        return logged

    def note_sent(self, override: LoggedOverride, topic: str, partition: int, offset: int) -> None:
        """Store where the record of an override is in Kafka.

        Raises:
            BadRecord: another login logged the override, or its offset or outcome is already stored.
        """
        arguments = (override.number, topic, partition, offset)
        _require_stored(self._session.fetch_value("select tidemark.note_sent(%s, %s, %s, %s)", arguments), override)

    def is_read(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the pipeline has applied the batch with the record at `offset`."""
        return (
            self._session.fetch_value(
                "select true from tidemark.kafka_offsets where (topic, partition) = (%s, %s) and next > %s",
                (topic, partition, offset),
            )
            is not None
        )

    def find_outcome(self, override: LoggedOverride) -> Literal["applied", "refused", "settled before"]:
        """Find the outcome of an override whose record was read (`is_read`). Stores nothing.

        Returns:
            `refused` if no batch applied the override. `settled before` if another override settled the whole range
            after `override` was logged and before `override` was applied. Otherwise `applied`. If two overrides are
            equal, the override at the lower offset counts as the first.
        """
        is_settled = self._session.fetch_value(_OUTCOME, {"number": override.number, "last_skip": override.last_skip})
        if is_settled is None:
            return "refused"
        return "settled before" if is_settled else "applied"

    def note_outcome(self, override: LoggedOverride, outcome: str) -> None:
        """Store the outcome of an override.

        Raises:
            BadRecord: another login logged the override, or its outcome is already stored.
        """
        _require_stored(
            self._session.fetch_value("select tidemark.note_outcome(%s, %s)", (override.number, outcome)), override
        )

    def note_replay(self, stream: str, override: OperatorOverride, origin: tuple[str, int, int]) -> LoggedOverride:
        """Log the replay of a dead letter, and mark the original record as replayed, in one transaction.

        Args:
            stream: the stream of the record.
            override: the replay.
            origin: topic, partition and offset of the original record.

        Raises:
            BadRecord: the record was replayed before. Nothing is logged.
        """
        with self._session.use() as connection, connection.transaction():
            logged = self.log(stream, override)
            arguments = (logged.number, *origin)
            if not self._session.fetch_value("select tidemark.note_replay(%s, %s, %s, %s)", arguments):
                raise BadRecord(
                    "replayed_before", f"this record was replayed before, as override {self.replays()[origin]}"
                )
        return logged

    def replays(self) -> dict[tuple[str, int, int], int]:
        """(topic, partition, offset) of each replayed record -> number of the override that replayed the record."""
        rows = self._session.fetch_tuples('select topic, partition, "offset", act from tidemark.replays')
        return {(topic, partition, offset): override for topic, partition, offset, override in rows}

    def newest(self, stream: str | None, limit: int) -> list[OverrideEntry]:
        """Overrides of `stream` (None: of all streams), newest first; at most `limit`.

        Includes overrides whose record was not sent by a command of Tidemark.
        """
        return self._session.fetch_all(
            OverrideEntry,
            _ALL_OVERRIDES + " where %(stream)s::text is null or stream = %(stream)s"
            " order by time desc, number desc limit %(limit)s",
            {"stream": stream, "limit": limit},
        )

    def has_stream(self, name: str) -> bool:
        row = self._session.fetch_value("select true from tidemark.streams where stream = %s", (name,))
        return row is not None

    def stream_names(self) -> list[str]:
        return [name for (name,) in self._session.fetch_tuples("select stream from tidemark.streams")]

    def containing(self, stream: str, id: int, limit: int) -> list[OverrideEntry]:
        """Overrides of `stream` whose range contains `id`, oldest first; at most `limit`."""
        return self._session.fetch_all(
            OverrideEntry,
            _ALL_OVERRIDES + " where stream = %(stream)s and abs(prev) < abs(%(id)s) and abs(id) >= abs(%(id)s)"
            " order by time, number limit %(limit)s",
            {"stream": stream, "id": id, "limit": limit},
        )

    def with_number(self, number: int) -> OverrideEntry | None:
        return self._session.fetch_one(OverrideEntry, _ALL_OVERRIDES + " where number = %s", (number,))


def _require_stored(is_stored: object, override: LoggedOverride) -> None:
    """Raise `BadRecord` if a SQL function has changed no row.

    The SQL functions change only rows of the caller's login, and each column only once.
    """
    if not is_stored:
        raise BadRecord(
            "not_yours",
            f"override {override.number} belongs to another login, or its offset or outcome is already stored",
        )


@dataclass(frozen=True, slots=True)
class _PolicyChange:
    override_number: int
    outcome: str


class PolicyTable:
    """The policies: settings of single streams, or of streams whose names have a common prefix.

    Needs the role tidemark_reader; `change` also needs tidemark_operator. Methods raise `Unavailable` and `Refused`.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def read(self) -> dict[str, dict[str, int]]:
        """Read all policies: name -> setting -> value. A name is a stream, or a prefix of names followed by `*`."""
        policies: dict[str, dict[str, int]] = {}
        rows = self._session.fetch_tuples("select stream, setting, value from tidemark.policies order by 1, 2")
        for name, setting, value in rows:
            policies.setdefault(name, {})[setting] = value
        return policies

    def change(self, name: str, changes: Mapping[str, int | None], by: str, why: str) -> tuple[int, str]:
        """Change settings of a policy, and log the change as an override, in one transaction.

        Args:
            name: a stream, or a prefix of stream names followed by `*`.
            changes: setting -> new value; None removes the setting.
            by: the name of the operator.
            why: the reason.

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
                    "select act as override_number, outcome"
                    " from tidemark.change_policy(%s, %s::text[], %s::bigint[], %s, %s)",
                    (name, [*changes], [*changes.values()], by, why),
                )
            except NoDataFound as error:
                raise BadRecord("not_set", first_line(error)) from None
        assert change is not None
        return change.override_number, change.outcome
