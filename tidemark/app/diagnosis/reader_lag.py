"""The status of readers: how far each reader lags behind its stream, in IDs and time, and whether a process runs it.

The places of readers are in the readers' database. Positions and their history are in Tidemark's database. `tidemark
follow` and the relay do not read the history from Tidemark's database. Instead, they store in memory when they first
read each position (`PositionSamples`)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Protocol

from tidemark.common.postgres_session import PostgresSession
from tidemark.sinks.reader_database import count_late_after, known_streams
from tidemark.streaming.values.direction import is_beyond

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from tidemark.sinks.reader import StoredPlace

ReaderState = Literal["current", "reading", "stuck", "not running", "not begun", "ahead", "stream unknown"]

MAX_SAMPLES = 256  # positions of a stream that are kept in memory
STUCK_SECONDS = 60.0  # a reader that has lag, and has committed nothing for so long, is stuck


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """A reader of a stream.

    Attributes:
        reader: the name of the reader, with its partition if there are partitions, such as `mailer[3/8]`.
        partition: the number of the reader's partition, from 0; None if there are no partitions.
        partitions: the number of partitions; None if there are no partitions.
        stream: the name of the stream.
        mode: `linear` or `vector`.
        state: the state of the reader.
        token: the token up to which the reader has read; None if it has read nothing.
        linear: the linear position up to which the reader has read; None if it has read nothing.
        stream_linear: the linear position of the stream; None if the stream is not known.
        lag_ids: the number of IDs from `linear` to `stream_linear`; 0 if the reader has read everything or is ahead;
            None if one of them is None.
        lag_seconds: seconds since the stream passed the place of the reader, or since the history begins, if that is
            shorter; 0 if `lag_ids` is 0; None if `lag_ids` is None, or if the history has no position beyond the place.
        last_commit: when the reader last stored its place; None if it has not begun.
        copies: the number of connections of copies (processes that run the reader), for all partitions; None if they
            cannot be counted.
        busy_since: when the oldest current batch of a copy began; None if there is none, or if this is not known.
        parked: the number of parked facts.
        retried: how many of the parked facts will be given to the reader again.
        late: the number of late completions that the reader has not read yet; None if the reader has not begun.
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
    """The linear positions of streams, now and in the past: `LagHistory` or `PositionSamples`."""

    def linear_positions(self, streams: Collection[str]) -> dict[str, int]:
        """Read the current linear positions of `streams`. Leaves out streams that are not known."""

    def count_late_after(self, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """For each pair (stream, number), count the late completions of the stream with higher numbers."""

    def passed_at(self, stream: str, id: int, since: datetime | None = None) -> datetime | None:
        """When the linear position passed `id`, or when the history begins, if that is later. None if the history has
        no position beyond `id`. `since`: a time at which the position was not beyond `id` yet, for a faster search.
        """


class PositionSamples:
    """The history, in memory, of the positions that a database of readers contains.

    `linear_positions` adds a sample for each stream whose position has moved since the last call, and drops the history
    of all streams that it does not return. The history of a stream begins with the first sample.
    """

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._samples_by_stream: dict[str, list[tuple[datetime, int]]] = {}

    def linear_positions(self, streams: Collection[str]) -> dict[str, int]:
        positions = {
            stream: known.linear for stream, known in known_streams(self._session).items() if stream in streams
        }
        now = datetime.now(UTC)
        self._samples_by_stream = {stream: self._samples_by_stream.get(stream, []) for stream in positions}
        for stream, linear in positions.items():
            samples = self._samples_by_stream[stream]
            if not samples or samples[-1][1] != linear:
                samples.append((now, linear))
            if len(samples) > MAX_SAMPLES:
                del samples[1 : MAX_SAMPLES // 2 : 2]  # every second sample of the older half
        return positions

    def count_late_after(self, pairs: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return count_late_after(self._session, pairs)

    def passed_at(self, stream: str, id: int, since: datetime | None = None) -> datetime | None:
        return next((time for time, linear in self._samples_by_stream.get(stream, ()) if is_beyond(linear, id)), None)


class ReaderMetrics:
    """The metrics of readers whose places are in one database."""

    def __init__(self, registry: "CollectorRegistry") -> None:
        from prometheus_client import Gauge  # noqa: PLC0415 - `tidemark readers` and `explain` show no metrics

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
            " or does not run; `tidemark readers list` shows the cause.",
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
        """Set the metrics to `statuses`, and remove the series of all other readers."""
        gauges = (self.position, self.lag_ids, self.lag_seconds, self.parked)
        for gauge in gauges:
            gauge.clear()
        for status in statuses:
            values = (status.linear, status.lag_ids, status.lag_seconds, status.parked)
            for gauge, value in zip(gauges, values, strict=True):
                if value is not None:
                    gauge.labels(status.stream, status.reader).set(value)


class ReaderLag:
    """Compares the places of readers with positions. Caches the time at which a stream passed a place, so that frequent
    calls are cheap."""

    def __init__(self, history: PositionHistory) -> None:
        self._history = history
        self._passed_at: dict[tuple[str, str], tuple[int, datetime]] = {}  # (reader, stream) -> (position, time)

    def statuses(
        self, stored_places: "Sequence[StoredPlace]", positions: Mapping[str, int] | None = None
    ) -> list[ReaderStatus]:
        """Compute the status of each reader, in the order of `stored_places`.

        Args:
            stored_places: the places of the readers.
            positions: the linear positions of the streams; None: read them from the history.

        Raises:
            Unavailable, Refused: the database of the history does not answer, or refuses the session.
        """
        if positions is None:
            positions = self._history.linear_positions({stored.stream for stored in stored_places})
        late = self._history.count_late_after(
            {(stored.stream, stored.late) for stored in stored_places if stored.has_begun}
        )
        self._passed_at = {
            key: self._passed_at[key]
            for key in self._passed_at
            if key in {_cache_key(stored) for stored in stored_places}
        }
        now = datetime.now(UTC)
        return [
            self._reader_status(stored, positions.get(stored.stream), late.get((stored.stream, stored.late)), now)
            for stored in stored_places
        ]

    def _reader_status(
        self, stored: "StoredPlace", linear: int | None, late: int | None, now: datetime
    ) -> ReaderStatus:
        ids = seconds = None
        if linear is not None and stored.has_begun:
            ids = max(0, abs(linear) - abs(stored.linear))
            since = self._find_passing_time(stored) if ids else now
            seconds = None if since is None else max(0.0, (now - since).total_seconds())
        if not ids:
            self._passed_at.pop(_cache_key(stored), None)
        partition, partitions = stored.partition or (None, None)
        return ReaderStatus(
            stored.reader,
            partition,
            partitions,
            stored.stream,
            stored.mode,
            _reader_state(stored, linear, ids, seconds, now),
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

    def _find_passing_time(self, stored: "StoredPlace") -> datetime | None:
        """When the linear position passed the reader's place; None if the history has no position beyond the place
        (`PositionHistory.passed_at`). Caches the time, but not None."""
        cached = self._passed_at.get(_cache_key(stored))
        if cached is not None and cached[0] == stored.linear:
            return cached[1]
        has_advanced = cached is not None and is_beyond(stored.linear, cached[0])
        since = self._history.passed_at(stored.stream, stored.linear, cached[1] if cached and has_advanced else None)
        if since is not None:
            self._passed_at[_cache_key(stored)] = stored.linear, since
        return since


def _cache_key(stored: "StoredPlace") -> tuple[str, str]:
    return stored.reader, stored.stream


def _reader_state(
    stored: "StoredPlace", linear: int | None, ids: int | None, seconds: float | None, now: datetime
) -> ReaderState:
    if linear is None:
        return "stream unknown"
    if not stored.has_begun:
        return "not begun"
    if is_beyond(stored.linear, linear):
        return "ahead"
    if not ids:
        return "current"
    if stored.copies == 0:
        return "not running"
    quiet = (now - stored.committed_at).total_seconds() if stored.committed_at else 0.0
    return "stuck" if min(quiet, seconds or 0.0) >= STUCK_SECONDS else "reading"


def sentences(status: ReaderStatus, duration: Callable[[float], str], now: datetime) -> Iterator[str]:
    """Explain the state of a reader in sentences for people.

    Args:
        status: the status of the reader.
        duration: formats seconds.
        now: the current time.
    """
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
            yield f"{name} has read everything up to {status.linear}, and waits for new facts of {stream}"
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
        yield f"the reader has not read late completions yet: {status.late}"
    if status.parked:
        facts = "fact is" if status.parked == 1 else "facts are"
        yield f"{status.parked} {facts} parked: tidemark readers parked list {name} {stream}"
