"""Queries of the history in Tidemark's Postgres, for advances that Redis no longer has, and while Redis is down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemark.common.postgres_session import Dsn
from tidemark.sinks.postgres.history import DurableMark, PageBounds, StoredAdvance, StoredLate, StreamChange
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader.events import Advance, Late
from tidemark.sinks.reader.requests import ReadHistory, StreamHistory, StreamKeys

MAX_ADVANCES = 10_000  # the most advances of one writer in a page: the newest ones; the ranges before become a `Reread`
STATEMENT_TIMEOUT_SECONDS = 4.0  # the time limit of one statement: each statement reads a limited number of rows


class History:
    """Queries the history of streams in Tidemark's Postgres. Needs the rights of the role tidemark_reader.

    Any thread may call. All methods raise `Unavailable` (call again) and `Refused`.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._postgres = Postgres(PostgresConfig(dsn))

    def close(self) -> None:
        self._postgres.close()

    def read_keys(self, stream: str) -> StreamKeys:
        """Query the positions of `stream`.

        The result has no list entries, and its `is_continuous` is False. If Postgres does not know the stream, its
        `linear` is None.
        """
        positions = self._postgres.positions([stream]).get(stream)
        if positions is None:
            return StreamKeys(None, {}, is_continuous=False)
        return StreamKeys(
            positions.linear, positions.positions, positions.last_late_number, positions.allocated, is_continuous=False
        )

    def read_page(self, request: ReadHistory) -> StreamHistory:
        """Query the page that `request` describes, with at most `MAX_ADVANCES` advances of each writer."""
        place, stream = request.place, request.stream
        page = self._postgres.page_after(
            stream,
            lambda writer: place.positions.get(writer, place.linear),
            place.late,
            PageBounds(MAX_ADVANCES, request.limit, STATEMENT_TIMEOUT_SECONDS),
        )
        return StreamHistory(
            chains={writer: (upto, [*map(_advance, advances)]) for writer, (upto, advances) in page.chains.items()},
            late=[*map(_late, page.late)],
            has_more=page.has_more,
        )

    def read_missed_changes(self, since: DurableMark, limit: int) -> "MissedChanges | None":
        """Query the changes of all streams since a mark.

        Returns None if the changes have more than `limit` advances, or if the history does not reach back to the mark.
        """
        changes = self._postgres.full_changes_since(since, limit, STATEMENT_TIMEOUT_SECONDS)
        if changes is None:
            return None
        return MissedChanges(
            {
                stream: [
                    *sorted(map(_advance, changes.advances.get(stream, ())), key=lambda advance: abs(advance.id)),
                    *map(_late, changes.late.get(stream, ())),
                ]
                for stream in changes.streams
            },
            changes.streams,
        )


@dataclass(frozen=True, slots=True)
class MissedChanges:
    """The changes of all streams since a mark.

    Attributes:
        events: stream -> its advances, in order per writer, and then its late completions.
        streams: stream -> its positions after the events.
    """

    events: Mapping[str, Sequence[Advance | Late]]
    streams: Mapping[str, StreamChange]


def _advance(stored: StoredAdvance) -> Advance:
    advance = stored.advance
    return Advance(
        advance.writer,
        advance.epoch,
        advance.prev,
        advance.id,
        advance.evidence,
        advance.prev,
        stored.linear,
        stored.batch,
        stored.time,
    )


def _late(stored: StoredLate) -> Late:
    late = stored.late
    return Late(
        stored.number, late.writer, late.epoch, late.prev, late.id, late.facts, late.why, stored.batch, stored.time
    )
