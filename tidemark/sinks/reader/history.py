"""Tidemark's Postgres in the place of Redis: for what its list does not reach back to, and for all of it meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemark.common.postgres_session import Dsn
from tidemark.sinks.postgres.changes import DurableMark, StreamChange
from tidemark.sinks.postgres.history import PageBounds, StoredAdvance, StoredLate
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader.events import Advance, Late
from tidemark.sinks.reader.requests import ReadHistory, StreamHistory, StreamKeys

NEWEST = 10_000  # advances of each writer that are told; what lies before them is to be read from the table
SECONDS = 4.0  # that one statement may take: it is bounded, so more shows a server that has too much to do


class History:
    """Needs the rights of the role tidemark_reader. Any thread may call; raises `Unavailable` (call again) and
    `Refused`."""

    def __init__(self, dsn: Dsn) -> None:
        self._postgres = Postgres(PostgresConfig(dsn))

    def close(self) -> None:
        self._postgres.close()

    def keys(self, stream: str) -> StreamKeys:
        """The positions of `stream`, as a Redis that lists nothing would tell them."""
        found = self._postgres.positions([stream]).get(stream)
        if found is None:
            return StreamKeys(None, {}, joined=False)
        return StreamKeys(found.linear, found.positions, found.late, found.allocated, joined=False)

    def past(self, request: ReadHistory) -> StreamHistory:
        place, stream = request.place, request.stream
        page = self._postgres.page_after(
            stream,
            lambda writer: place.positions.get(writer, place.linear),
            place.late,
            PageBounds(NEWEST, request.most, SECONDS),
        )
        return StreamHistory(
            chains={writer: (upto, [*map(_advance, advances)]) for writer, (upto, advances) in page.chains.items()},
            late=[*map(_late, page.late)],
            more=page.more,
        )

    def missed(self, since: DurableMark, most: int) -> "MissedChanges | None":
        """What moved any stream since a mark; None where that is more than `most` advances, or not kept any more."""
        found = self._postgres.missed(since, most, SECONDS)
        if found is None:
            return None
        return MissedChanges(
            {
                stream: [
                    *sorted(map(_advance, found.advances.get(stream, ())), key=lambda it: abs(it.id)),
                    *map(_late, found.late.get(stream, ())),
                ]
                for stream in found.streams
            },
            found.streams,
        )


@dataclass(frozen=True, slots=True)
class MissedChanges:
    """The events of each stream to which anything was done, in order per writer, and where it stands."""

    events: Mapping[str, Sequence[Advance | Late]]
    streams: Mapping[str, StreamChange]


def _advance(past: StoredAdvance) -> Advance:
    told = past.advance
    return Advance(
        told.writer, told.epoch, told.prev, told.id, told.evidence, told.prev, past.linear, past.batch, past.time
    )


def _late(past: StoredLate) -> Late:
    told = past.late
    return Late(past.number, told.writer, told.epoch, told.prev, told.id, told.facts, told.why, past.batch, past.time)
