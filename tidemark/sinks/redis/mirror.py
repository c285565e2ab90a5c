"""The sink that mirrors Postgres to Redis: publishes each batch, and restores data that Redis has lost.

The sink copies only committed data, so its methods may run at any time, even concurrently (docs/design.md, rule 4). The
list of advances of a stream must stay chained (rule 3). So a lock prevents that a refill and a batch write at the same
time.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tidemark.common.errors import LeaseLost
from tidemark.common.log import Progress, get_logger, no_progress
from tidemark.sinks.port import Batch, CommitResult, Fence, RefillResult
from tidemark.sinks.postgres.history import StoredAdvance
from tidemark.sinks.postgres.store import Postgres, StreamPositions
from tidemark.sinks.redis.client import key_prefix
from tidemark.sinks.redis.publish import Change, Mode, Redis, RedisPositions, change_of_history, changes_of_batch

log = get_logger(__name__)

STREAMS_PER_CHUNK = 500
# The approximate number of history entries that one refill copies, in about 4 s. Older ones are only in Postgres.
MAX_REFILL_ENTRIES = 100_000


class Mirror:
    """The sink that publishes to Redis. `sinks.port.Sink` describes the methods."""

    name = "redis"

    def __init__(self, postgres: Postgres, redis: Redis, fence: Fence, progress: Progress = no_progress) -> None:
        """`progress` shows how many streams a refill has written."""
        self._postgres = postgres
        self._progress = progress
        self._redis = redis
        self._fence = fence
        self._streams_written_since_comparison: set[str] = set()  # since the last comparison of all streams
        self._is_compared_with_postgres = False
        self._compare_lock = threading.Lock()
        self._compared_positions: dict[str, tuple[int, int]] = {}
        self._sentinel_number = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        self._redis.check()

    def publish(self, batch: Batch, committed: CommitResult) -> int:
        if not self._is_compared_with_postgres:
            # Redis may lack batches that earlier processes committed, and a batch must not follow an incomplete stream.
            self._refill_before_first_batch()
        if committed.is_repeat:
            # Only Postgres has the outcome of the first attempt.
            return self.refill(sorted({stream.stream for _, stream in batch.streams()})).stream_count
        # Faulty streams need a refill, because earlier batches are missing too.
        changes = [change for change in changes_of_batch(batch, committed) if change.stream not in self._redis.faults]
        with self._lock:
            lost = self._write([("known" if self._is_known(change.stream) else "new", change) for change in changes])
        if lost:
            log.warning("Redis has lost data; refilling it from Postgres", streams=len(lost), first=lost[0])
            self.refill(lost)
        return len(changes)

    def faults(self) -> dict[str, str]:
        return {
            stream: f"{problem}; delete the keys of the stream, {key_prefix(stream)}:*, and Tidemark writes them again"
            for stream, problem in self._redis.faults.copy().items()
        }

    def compared_positions(self) -> dict[str, tuple[int, int]]:
        return self._compared_positions

    def check_for_loss(self) -> bool:
        """Replace the sentinel in Redis, and compare the old sentinel with the one that this sink wrote last.

        Returns:
            Whether the two sentinels differ: Redis was flushed, restored or replaced, or this is the first call.
        """
        last = f"{self._fence.token}:{self._sentinel_number}"
        self._sentinel_number += 1
        return self._redis.replace_sentinel(f"{self._fence.token}:{self._sentinel_number}") != last

    def refill(self, streams: Sequence[str] | None = None) -> RefillResult:
        """Compare Redis with Postgres, and write the missing data into Redis. Readers may read meanwhile.

        `streams`: the streams to compare. None: all streams; first waits while another thread refills all streams.
        Raises `LeaseLost`.
        """
        if streams is None:
            with self._compare_lock:
                return self._refill_all()
        linear: dict[str, tuple[int, int]] = {}
        refilled = self._refill(streams, linear)
        with self._lock:
            self._compared_positions = self._compared_positions | linear
        return refilled

    def _refill_before_first_batch(self) -> None:
        """Refill all streams, unless this sink has done so before. Waits while another thread refills all streams."""
        with self._compare_lock:
            if not self._is_compared_with_postgres:
                self._refill_all()

    def _refill_all(self) -> RefillResult:
        linear: dict[str, tuple[int, int]] = {}
        refilled = self._refill(self._postgres.streams(), linear)
        with self._lock:
            self._compared_positions, self._is_compared_with_postgres = linear, True
            self._streams_written_since_comparison.difference_update(linear)
        return refilled

    def _is_known(self, stream: str) -> bool:
        """Whether Redis must already have the stream. If so, missing keys are a loss of data."""
        return stream in self._compared_positions or stream in self._streams_written_since_comparison

    def _refill(self, streams: Sequence[str], linear: dict[str, tuple[int, int]]) -> RefillResult:
        """Compare `streams`, and write what Redis lacks. Adds the compared linear positions to `linear`."""
        outdated = self._find_outdated_streams(streams, linear)
        writers = sum(outdated.values())
        per_writer = max(1, MAX_REFILL_ENTRIES // max(1, writers))
        entries = 0
        with self._progress(len(outdated)) as advance:
            for names in _chunks(list(outdated)):
                with self._lock:
                    calls = self._repairs(names, per_writer)
                    self._write(calls)
                entries += sum(len(change.entries) for _, change in calls)
                advance(len(names))
        if outdated:
            log.info("Refilled Redis from Postgres", streams=len(outdated), writers=writers, entries=entries)
        return RefillResult(len(outdated), entries)

    def _find_outdated_streams(self, streams: Sequence[str], linear: dict[str, tuple[int, int]]) -> dict[str, int]:
        """Find streams with missing or outdated data in Redis: stream -> number of writers with a wrong position.

        Adds to `linear` the linear positions in Postgres and in Redis, for `compared_positions`. Removes repaired
        streams from the faults. Logs an error if Redis is ahead of Postgres.

        Raises:
            LeaseLost: Redis has a newer token.
        """
        outdated: dict[str, int] = {}
        ahead: list[str] = []
        fence = 0
        for snapshots, stored in self._read_both(streams):
            for stream, wanted in stored.items():
                snapshot = snapshots.get(stream)
                if snapshot is None:
                    continue
                fence = max(fence, snapshot.fence)
                writers = _count_affected_writers(snapshot, wanted)
                if writers or _has_outdated_keys(snapshot, wanted):
                    outdated[stream] = writers
                else:
                    self._redis.faults.pop(stream, None)
                if snapshot.linear is not None:
                    # Equal numbers are stored as one object: there may be a million streams.
                    is_equal = snapshot.linear == wanted.linear
                    linear[stream] = wanted.linear, wanted.linear if is_equal else snapshot.linear
                if _is_ahead(snapshot, wanted):
                    ahead.append(stream)
        if fence > self._fence.token:
            raise LeaseLost(self._fence.token, fence)
        if ahead:
            # Positions never move back (rule 2): readers may have used them.
            log.error(
                "Redis is ahead of Postgres; Postgres may have lost commits (a failover, or a restored backup)",
                streams=len(ahead),
                first=ahead[0],
            )
        return outdated

    def _read_both(
        self, streams: Sequence[str]
    ) -> Iterator[tuple[Mapping[str, RedisPositions], Mapping[str, StreamPositions]]]:
        """Yield chunks of streams: stream -> keys in Redis, and stream -> positions in Postgres.

        Redis is read before Postgres. A thread reads the next chunk of Redis while the caller compares the current one.
        """
        chunks = [*_chunks(streams)]
        with ThreadPoolExecutor(1, "snapshots") as pool:
            reads = (pool.submit(self._redis.snapshots, names) for names in [*chunks, []])
            following = next(reads)
            for names in chunks:
                snapshots, following = following, next(reads)
                yield snapshots.result(), self._postgres.positions(names)

    def _repairs(self, names: Sequence[str], per_writer: int) -> list[tuple[Mode, Change]]:
        """Create the changes that repair the streams `names`, with at most `per_writer` advances of each writer."""
        snapshots = self._redis.snapshots(names)
        stored = {stream: row for stream, row in self._postgres.positions(names).items() if stream in snapshots}
        rebuilt = {stream for stream in stored if not snapshots[stream].positions}
        repaired = stored.keys() - rebuilt
        since = [
            (stream, writer, snapshots[stream].positions.get(writer, 0))
            for stream in repaired
            for writer in _outdated_writers(snapshots[stream], stored[stream])
        ]
        # Read one more than is written, to detect too many: a repaired list must have no holes.
        history = self._postgres.advances_since(since, per_writer + 1)
        late = self._postgres.late_since(
            [(stream, snapshots[stream].last_late_number) for stream in repaired], per_writer + 1
        )
        rebuilt |= {stream for (stream, _), chain in history.items() if len(chain) > per_writer}
        rebuilt |= {stream for stream, missing in late.items() if len(missing) > per_writer}
        everything = [(stream, writer, 0) for stream in rebuilt for writer in stored[stream].positions]
        history |= self._postgres.advances_since(everything, per_writer)
        chains: dict[str, list[Sequence[StoredAdvance]]] = {}
        for (stream, _), chain in history.items():
            chains.setdefault(stream, []).append(chain)
        late |= self._postgres.late_since([(stream, 0) for stream in rebuilt], per_writer + 1)
        # A reader that finds a known advance in the list assumes that the list has all later late completions.
        for stream in [stream for stream, completions in late.items() if len(completions) > per_writer]:
            del late[stream][0]
            chains.pop(stream, None)
        return [
            (
                "rebuild" if stream in rebuilt else "repair",
                change_of_history(stream, row, chains.get(stream, ()), late.get(stream, ())),
            )
            for stream, row in stored.items()
        ]

    def _write(self, calls: Sequence[tuple[Mode, Change]]) -> list[str]:
        """Publish changes, and return the streams of which Redis has lost data. Raises `LeaseLost`."""
        self._fence.check()
        written = {change.stream for mode, change in calls if mode != "known"}
        self._redis.add_names(written)  # first, because the names of written streams are not checked again
        lost = self._redis.publish(self._fence.token, calls)
        self._streams_written_since_comparison |= written
        return lost


def _has_outdated_keys(snapshot: RedisPositions, stored: StreamPositions) -> bool:
    """Whether data of a stream in Redis is missing or outdated. Positions of writers are not compared."""
    return (
        snapshot.linear is None
        or abs(snapshot.linear) < abs(stored.linear)
        or abs(snapshot.allocated) < abs(stored.allocated)
        or snapshot.last_late_number < stored.last_late_number
        or not (snapshot.is_token_current and snapshot.is_in_stream_names)
    )


def _is_ahead(snapshot: RedisPositions, stored: StreamPositions) -> bool:
    """Whether a position or the allocated ID in Redis is beyond that in Postgres, or Postgres lacks a writer."""
    if abs(snapshot.linear or 0) > abs(stored.linear) or abs(snapshot.allocated) > abs(stored.allocated):
        return True
    return snapshot.positions != stored.positions and any(
        writer not in stored.positions or abs(position) > abs(stored.positions[writer])
        for writer, position in snapshot.positions.items()
        if writer not in stored.forgotten_writers
    )


def _count_affected_writers(snapshot: RedisPositions, stored: StreamPositions) -> int:
    """The number of writers whose position in Redis is missing, is outdated or must be removed."""
    if snapshot.positions == stored.positions:
        return 0
    return len(_outdated_writers(snapshot, stored)) + len(stored.forgotten_writers & snapshot.positions.keys())


def _outdated_writers(snapshot: RedisPositions, stored: StreamPositions) -> list[str]:
    """The writers whose position in Redis is missing or outdated."""
    return [
        writer
        for writer, position in stored.positions.items()
        if writer not in snapshot.positions or abs(snapshot.positions[writer]) < abs(position)
    ]


def _chunks(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + STREAMS_PER_CHUNK] for start in range(0, len(names), STREAMS_PER_CHUNK))
