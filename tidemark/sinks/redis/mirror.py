"""The sink that keeps Redis a mirror of Postgres: publishes each batch, and refills what Redis lost.

It only ever copies what is committed, so it may run at any time, and twice (docs/design.md, rule 4). One lock keeps a
refill and a batch from interleaving within a stream, so that the list of advances stays chained (rule 3).
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tidemark.common.errors import LeaseLost
from tidemark.common.log import get_logger
from tidemark.sinks.port import Batch, Committed, Fence, Refilled
from tidemark.sinks.postgres.history import StoredAdvance
from tidemark.sinks.postgres.store import Postgres, StreamPositions
from tidemark.sinks.redis.client import beside_keys
from tidemark.sinks.redis.publish import Change, Mode, Redis, of_batch, of_history
from tidemark.sinks.redis.snapshot import RedisPositions

log = get_logger(__name__)

STREAMS_AT_ONCE = 500
ENTRIES = 100_000  # of the history, copied by one refill: what takes about four seconds; older ones stay in Postgres


class Mirror:
    """A `Sink`."""

    name = "redis"

    def __init__(self, postgres: Postgres, redis: Redis, fence: Fence) -> None:
        self._postgres = postgres
        self._redis = redis
        self._fence = fence
        self._named: set[str] = set()  # streams that have been written since all were compared
        self._compared = False
        self._comparing = threading.Lock()
        self._lines: dict[str, tuple[int, int]] = {}
        self._stamps = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        self._redis.check()

    def publish(self, batch: Batch, committed: Committed) -> int:
        if not self._compared:
            # Redis may lack all or some of what earlier processes committed; a batch must not join half a stream.
            self._compare_first()
        if committed.repeated:
            # Postgres knows how it was settled then; the batch alone does not.
            return self.refill(sorted({stream.stream for _, stream in batch.streams()})).streams
        # A refill tries those again that have a fault: what they lack by now is not in this batch alone.
        changes = [it for it in of_batch(batch, committed) if it.stream not in self._redis.faults]
        with self._lock:
            lost = self._write([("known" if self._known(it.stream) else "new", it) for it in changes])
        if lost:
            log.warning("Redis has lost data; filling it again from Postgres", streams=len(lost), first=lost[0])
            self.refill(lost)
        return len(changes)

    def faults(self) -> dict[str, str]:
        return {
            stream: f"{problem}; delete its keys, {beside_keys(stream)}:*, and they are filled again from Postgres"
            for stream, problem in self._redis.faults.copy().items()
        }

    def compared(self) -> dict[str, tuple[int, int]]:
        return self._lines

    def lost(self) -> bool:
        """Leave a new stamp; True where Redis does not remember the last one: it was flushed, restored or replaced."""
        last = f"{self._fence.token}:{self._stamps}"
        self._stamps += 1
        return self._redis.stamp(f"{self._fence.token}:{self._stamps}") != last

    def refill(self, streams: Sequence[str] | None = None) -> Refilled:
        """Compare `streams` (None: all) with Postgres, and write what Redis lacks. Readers keep reading meanwhile."""
        if streams is None:
            with self._comparing:
                return self._refill_all()
        lines: dict[str, tuple[int, int]] = {}
        refilled = self._refill(streams, lines)
        with self._lock:
            self._lines = self._lines | lines
        return refilled

    def _compare_first(self) -> None:
        """Unless another thread does just that: it is waited for."""
        with self._comparing:
            if not self._compared:
                self._refill_all()

    def _refill_all(self) -> Refilled:
        lines: dict[str, tuple[int, int]] = {}
        refilled = self._refill(self._postgres.streams(), lines)
        with self._lock:
            self._lines, self._compared = lines, True
            self._named = {stream for stream in self._named if stream not in lines}
        return refilled

    def _known(self, stream: str) -> bool:
        """Whether Redis has shown it."""
        return stream in self._lines or stream in self._named

    def _refill(self, streams: Sequence[str], lines: dict[str, tuple[int, int]]) -> Refilled:
        behind = self._behind(streams, lines)
        writers = sum(behind.values())
        newest = max(1, ENTRIES // max(1, writers))
        entries = 0
        for names in _chunks(list(behind)):
            with self._lock:
                calls = self._mending(names, newest)
                self._write(calls)
            entries += sum(len(change.entries) for _, change in calls)
        if behind:
            log.info("Filled Redis from Postgres", streams=len(behind), writers=writers, entries=entries)
        return Refilled(len(behind), entries)

    def _behind(self, streams: Sequence[str], lines: dict[str, tuple[int, int]]) -> dict[str, int]:
        """Streams of which Redis lacks something, with the count of writers that are affected; notes all `lines`."""
        behind: dict[str, int] = {}
        ahead: list[str] = []
        fence = 0
        for held, stored in self._both(streams):
            for stream, wanted in stored.items():
                here = held.get(stream)
                if here is None:
                    continue
                fence = max(fence, here.fence)
                writers = _affected(here, wanted)
                if writers or _moved(here, wanted):
                    behind[stream] = writers
                else:
                    self._redis.faults.pop(stream, None)
                if here.linear is not None:
                    # The same number twice is one object: there may be a million.
                    lines[stream] = wanted.linear, here.linear if here.linear != wanted.linear else wanted.linear
                if _ahead(here, wanted):
                    ahead.append(stream)
        if fence > self._fence.token:
            raise LeaseLost(self._fence.token, fence)
        if ahead:
            # Nothing is taken back (rule 2): readers may have used it.
            log.error(
                "Redis is ahead of Postgres; was the database restored from a backup?",
                streams=len(ahead),
                first=ahead[0],
            )
        return behind

    def _both(
        self, streams: Sequence[str]
    ) -> Iterator[tuple[Mapping[str, RedisPositions], Mapping[str, StreamPositions]]]:
        """What Redis held, and then Postgres, of some streams after the others. Redis is asked for the next ones while
        those before are compared."""
        chunks = [*_chunks(streams)]
        with ThreadPoolExecutor(1, "held") as pool:
            asked = (pool.submit(self._redis.held, names) for names in [*chunks, []])
            following = next(asked)
            for names in chunks:
                held, following = following, next(asked)
                yield held.result(), self._postgres.positions(names)

    def _mending(self, names: Sequence[str], newest: int) -> list[tuple[Mode, Change]]:
        held = self._redis.held(names)
        wanted = {stream: here for stream, here in self._postgres.positions(names).items() if stream in held}
        anew = {stream for stream in wanted if not held[stream].positions}
        going_on = wanted.keys() - anew
        since = [
            (stream, writer, held[stream].positions.get(writer, 0))
            for stream in going_on
            for writer in _lacking(held[stream], wanted[stream])
        ]
        # One more than will be written shows that there are too many: a list that goes on has no holes.
        history = self._postgres.advances_since(since, newest + 1)
        late = self._postgres.late_since([(stream, held[stream].late) for stream in going_on], newest + 1)
        anew |= {stream for (stream, _), chain in history.items() if len(chain) > newest}
        anew |= {stream for stream, lacking in late.items() if len(lacking) > newest}
        everything = [(stream, writer, 0) for stream in anew for writer in wanted[stream].positions]
        history |= self._postgres.advances_since(everything, newest)
        chains: dict[str, list[Sequence[StoredAdvance]]] = {}
        for (stream, _), chain in history.items():
            chains.setdefault(stream, []).append(chain)
        late |= self._postgres.late_since([(stream, 0) for stream in anew], newest + 1)
        # To readers an advance that they know is proof that the list has all late completions since.
        for stream in [stream for stream, found in late.items() if len(found) > newest]:
            del late[stream][0]
            chains.pop(stream, None)
        return [
            (
                "anew" if stream in anew else "mend",
                of_history(stream, here, chains.get(stream, ()), late.get(stream, ())),
            )
            for stream, here in wanted.items()
        ]

    def _write(self, calls: Sequence[tuple[Mode, Change]]) -> list[str]:
        self._fence.check()
        named = {change.stream for mode, change in calls if mode != "known"}
        self._redis.name(named)  # first: a stream that is there is not looked at again for its name
        lost = self._redis.publish(self._fence.token, calls)
        self._named |= named
        return lost


def _moved(held: RedisPositions, wanted: StreamPositions) -> bool:
    return (
        held.linear is None
        or abs(held.linear) < abs(wanted.linear)
        or abs(held.allocated) < abs(wanted.allocated)
        or held.late < wanted.late
        or not (held.agrees and held.listed)
    )


def _ahead(held: RedisPositions, wanted: StreamPositions) -> bool:
    if abs(held.linear or 0) > abs(wanted.linear) or abs(held.allocated) > abs(wanted.allocated):
        return True
    return held.positions != wanted.positions and any(
        writer not in wanted.positions or abs(position) > abs(wanted.positions[writer])
        for writer, position in held.positions.items()
        if writer not in wanted.forgotten
    )


def _affected(held: RedisPositions, wanted: StreamPositions) -> int:
    """How many writers Redis lacks, has at an earlier position, or has to forget."""
    if held.positions == wanted.positions:
        return 0
    return len(_lacking(held, wanted)) + len(wanted.forgotten & held.positions.keys())


def _lacking(held: RedisPositions, wanted: StreamPositions) -> list[str]:
    """Writers that Redis does not know, or holds at an earlier position."""
    return [
        writer
        for writer, position in wanted.positions.items()
        if writer not in held.positions or abs(held.positions[writer]) < abs(position)
    ]


def _chunks(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + STREAMS_AT_ONCE] for start in range(0, len(names), STREAMS_AT_ONCE))
