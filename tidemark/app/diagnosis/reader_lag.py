"""The status of readers: the lag of each one behind its stream, in IDs and time, and whether a process runs it.

Places are in the readers' own database. Positions and their history are in Tidemark's database. `tidemark follow`,
which copies positions to the readers' database, uses the times at which it saw them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Gauge

from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.reader import StoredPlace
from tidemark.sinks.reader_database import known_streams, late_after
from tidemark.streaming.values.direction import beyond

ReaderState = Literal["current", "reading", "stuck", "not running", "not begun", "ahead", "stream unknown"]

MAX_SEEN = 256  # positions of a stream that are remembered
STUCK = 60.0  # seconds without a commit after which a reader that lags is stuck


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """A reader of a stream.

    Attributes:
        reader: its name, with its partition if it has any, such as `mailer[3/8]`.
        partition: the number of its partition, from 0, of `partitions`; None without partitions.
        token: up to which the reader has read; None if it has not begun.
        linear: the linear position of the reader; `stream_linear` is the stream's; None if unknown.
        lag_ids: IDs between the two positions; 0 if the reader has everything.
        lag_seconds: seconds since the stream passed the reader's place; None if the history does not have that time.
        last_commit: when the reader stored its place.
        copies: number of processes that run the reader; None if they cannot be counted.
        busy_since: when a copy began its current batch, if that is visible.
        parked: number of parked facts; `retried` of them will be handed over again.
        late: number of late completions that the reader does not have yet.
    """

    reader: str
    partition: int | None
    partitions: int | None
    stream: str
    mode: str
    state: ReaderState
    token: str | None
    linear: int | None
    stream_linear: int | None
    lag_ids: int | None
    lag_seconds: float | None
    last_commit: datetime | None
    copies: int | None
    busy_since: datetime | None
    parked: int
    retried: int
    late: int | None


class PositionHistory(Protocol):
    """The linear positions of streams and the times at which they were reached: `LagHistory` or `SeenPositions`."""

    def linear(self, streams: Collection[str]) -> dict[str, int]: ...
    def late_after(self, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]: ...
    def passed(self, stream: str, id: int, since: datetime | None = None) -> datetime | None: ...


class SeenPositions:
    """The history of the positions in a database of readers, recorded by this object at each call of `linear`."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._seen: dict[str, list[tuple[datetime, int]]] = {}

    def linear(self, streams: Collection[str]) -> dict[str, int]:
        positions = {
            stream: known.linear for stream, known in known_streams(self._session).items() if stream in streams
        }
        now = datetime.now(UTC)
        self._seen = {stream: self._seen.get(stream, []) for stream in positions}
        for stream, linear in positions.items():
            seen = self._seen[stream]
            if not seen or seen[-1][1] != linear:
                seen.append((now, linear))
            if len(seen) > MAX_SEEN:
                del seen[1 : MAX_SEEN // 2 : 2]  # thins out the older half
        return positions

    def late_after(self, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return late_after(self._session, pairs)

    def passed(self, stream: str, id: int, since: datetime | None = None) -> datetime | None:
        return next((time for time, linear in self._seen.get(stream, ()) if beyond(linear, id)), None)


class ReaderMetrics:
    """The metrics of readers whose places are in one database."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["stream", "reader"]
        self.position = Gauge(
            "tidemark_reader_linear_position",
            "The linear position up to which a reader has read a stream, if its place is in the database of"
            " TIDEMARK_READERS_DSN, or of `tidemark follow`.",
            labels,
            registry=registry,
        )
        self.lag_ids = Gauge(
            "tidemark_reader_lag_ids",
            "IDs between the place of a reader and the linear position of its stream. Rising: the reader is too slow,"
            " or does not run; `tidemark readers list` says which.",
            labels,
            registry=registry,
        )
        self.lag_seconds = Gauge(
            "tidemark_reader_lag_seconds",
            "Seconds since the stream passed the place of a reader; 0 while the reader has everything.",
            labels,
            registry=registry,
        )
        self.parked = Gauge(
            "tidemark_reader_parked",
            "Facts that a reader has parked because its handler failed on them. Above 0: see `tidemark readers parked"
            " list`, repair the cause, and retry or drop them.",
            labels,
            registry=registry,
        )

    def show(self, statuses: Sequence[ReaderStatus]) -> None:
        """Show the statuses, and remove the series of readers that no longer exist."""
        gauges = (self.position, self.lag_ids, self.lag_seconds, self.parked)
        for gauge in gauges:
            gauge.clear()
        for status in statuses:
            values = (status.linear, status.lag_ids, status.lag_seconds, status.parked)
            for gauge, value in zip(gauges, values, strict=True):
                if value is not None:
                    gauge.labels(status.stream, status.reader).set(value)


class ReaderLag:
    """Compares places with positions. Caches the times at which streams passed places, so frequent calls are cheap."""

    def __init__(self, history: PositionHistory) -> None:
        self._history = history
        self._passed: dict[tuple[str, str], tuple[int, datetime]] = {}  # (reader, stream) -> (position, time)

    def statuses(
        self, stored_places: Sequence[StoredPlace], positions: Mapping[str, int] | None = None
    ) -> list[ReaderStatus]:
        """The status of each place.

        Args:
            positions: the linear positions of streams; None: read them from Tidemark's Postgres.

        Raises:
            Unavailable, Refused: Tidemark's Postgres does not answer.
        """
        if positions is None:
            positions = self._history.linear({stored.stream for stored in stored_places})
        late = self._history.late_after({(stored.stream, stored.late) for stored in stored_places if stored.has_begun})
        self._passed = {
            key: self._passed[key] for key in self._passed if key in {_key(stored) for stored in stored_places}
        }
        now = datetime.now(UTC)
        return [
            self._status(stored, positions.get(stored.stream), late.get((stored.stream, stored.late)), now)
            for stored in stored_places
        ]

    def _status(self, stored: StoredPlace, linear: int | None, late: int | None, now: datetime) -> ReaderStatus:
        ids = seconds = None
        if linear is not None and stored.has_begun:
            ids = max(0, abs(linear) - abs(stored.linear))
            since = self._since(stored) if ids else now
            seconds = None if since is None else max(0.0, (now - since).total_seconds())
        if not ids:
            self._passed.pop(_key(stored), None)
        partition, partitions = stored.partition or (None, None)
        return ReaderStatus(
            stored.reader,
            partition,
            partitions,
            stored.stream,
            stored.mode,
            _state(stored, linear, ids, seconds, now),
            str(stored.token) if stored.has_begun else None,
            stored.linear if stored.has_begun else None,
            linear,
            ids,
            None if seconds is None else round(seconds, 1),
            stored.committed_at,
            stored.copies,
            stored.busy_since,
            stored.parked,
            stored.retried,
            late if stored.has_begun else None,
        )

    def _since(self, stored: StoredPlace) -> datetime | None:
        """The time at which the stream passed the place."""
        known = self._passed.get(_key(stored))
        if known is not None and known[0] == stored.linear:
            return known[1]
        moved_on = known is not None and beyond(stored.linear, known[0])
        since = self._history.passed(stored.stream, stored.linear, known[1] if known and moved_on else None)
        if since is not None:
            self._passed[_key(stored)] = stored.linear, since
        return since


def _key(stored: StoredPlace) -> tuple[str, str]:
    return stored.reader, stored.stream


def _state(
    stored: StoredPlace, linear: int | None, ids: int | None, seconds: float | None, now: datetime
) -> ReaderState:
    if linear is None:
        return "stream unknown"
    if not stored.has_begun:
        return "not begun"
    if beyond(stored.linear, linear):
        return "ahead"
    if not ids:
        return "current"
    if stored.copies == 0:
        return "not running"
    quiet = (now - stored.committed_at).total_seconds() if stored.committed_at else 0.0
    return "stuck" if min(quiet, seconds or 0.0) >= STUCK else "reading"


def sentences(status: ReaderStatus, duration: Callable[[float], str], now: datetime) -> Iterator[str]:
    """Sentences for people that explain the reader's state."""
    name, stream = status.reader, status.stream
    match status.state:
        case "stream unknown":
            yield f"{name}: Tidemark does not know the stream {stream}"
        case "not begun":
            yield f"{name} has not committed a batch of {stream} yet"
        case "ahead":
            yield (
                f"{name} is at {status.linear}, beyond {stream} at {status.stream_linear}: the database of the stream"
                " was restored, or the place belongs to another database"
            )
        case "current":
            yield f"{name} has everything up to {status.linear}: it waits for the stream {stream}"
        case _:
            age = "" if status.lag_seconds is None else f", for {duration(status.lag_seconds)}"
            yield f"{name} is at {status.linear} and {stream} at {status.stream_linear}: the reader lags{age}"
    if status.state == "not running":
        yield "no copy of the reader is connected to the database with its place: start the service"
    elif status.busy_since is not None:
        yield f"a copy has worked on one batch for {duration((now - status.busy_since).total_seconds())}"
    elif status.state == "stuck":
        yield "the reader has committed nothing since the stream moved: see the log of the service"
    if status.last_commit is not None:
        yield f"last commit {duration((now - status.last_commit).total_seconds())} ago"
    if status.late:
        yield f"{status.late} late completions wait for the reader"
    if status.parked:
        yield f"{status.parked} parked facts wait for a person: tidemark readers parked list {name} {stream}"
