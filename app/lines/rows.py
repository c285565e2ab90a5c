"""The rows that were read from Kafka and whose IDs no position has passed yet, of all writers, within a bound. Pure.

Past the bound the writers that hold most lose what is held of them, and clients fetch that instead.
"""

from collections.abc import Iterable, Mapping, Sequence

from tidemark.app.lines.unannounced import Fact, Lacking, Unannounced
from tidemark.sinks.reader.events import Advance
from tidemark.sinks.reader.order import farther
from tidemark.streaming import wire

Writer = tuple[str, str]
"""A stream and the name of one of its writers."""


class Rows:
    """`limit` in bytes, about. `announced` is how far each writer was announced; another changes it."""

    def __init__(self, limit: int, announced: Mapping[Writer, int]) -> None:
        self.size = 0
        self.dropped = 0
        """How often a writer lost what was held of it; set it back as you count."""
        self._limit = limit
        self._announced = announced
        self._writers: dict[Writer, Unannounced] = {}
        self._homes: dict[str, int] = {}
        self._whole: Mapping[int, bool] = {}
        self._told: dict[str, int] = {}

    def begin(self, whole: Mapping[int, bool], told: Mapping[str, int]) -> None:
        """From here on the records of these partitions are read. `whole`: none of them came before; `told` is how far
        the IDs go that streams' earlier records may have named."""
        self.end()
        self._whole = whole
        self._told = dict(told)

    def end(self) -> None:
        """Nothing is read any more."""
        self._writers.clear()
        self._homes.clear()
        self._whole = {}
        self.size = 0

    def read(self, partition: int, record: wire.Record) -> Writer | None:
        """The next record of `partition`; gives whose it is, None for one that does not count."""
        if self._homes.setdefault(record.stream, partition) != partition:
            return None  # a stream lives in one partition (DESIGN 3)
        writer = record.stream, record.writer
        held = self._writers.get(writer)
        if held is None:
            whole = self._whole[partition]
            held = self._hold(writer, 0 if whole else self._told.get(record.stream, 0), whole=whole)
        before = held.size
        held.read(record)
        self.size += held.size - before
        if self.size > self._limit:
            self._shed()
        return writer

    def take(self, stream: str, advance: Advance) -> Sequence[Fact] | Lacking:
        """The facts of `advance`, in order; see `Unannounced.take`."""
        evidence = advance.evidence
        if advance.proven_empty:
            return ()
        if evidence.unseen or evidence.skipped or advance.claimed != advance.prev or not self._whole:
            return Lacking.LOST
        held = self._writers.get((stream, advance.writer))
        return Lacking.NOT_YET if held is None else held.take(advance)

    def passed(self, writers: Iterable[Writer]) -> None:
        """They were announced further."""
        for writer in writers:
            if held := self._writers.get(writer):
                before = held.size
                held.passed(self._announced[writer])
                self.size += held.size - before

    def _hold(self, writer: Writer, told: int, *, whole: bool) -> Unannounced:
        held = self._writers[writer] = Unannounced(self._announced.get(writer, 0), told, whole=whole)
        self.size += held.size
        return held

    def _shed(self) -> None:
        for writer in sorted(self._writers, key=lambda writer: self._writers[writer].size, reverse=True):
            if self.size <= self._limit // 2:
                return
            before = self._writers.pop(writer)
            self.size -= before.size
            self._hold(writer, before.reach, whole=False)
            self.dropped += 1
        for (stream, _), held in self._writers.items():  # so many that their number alone is too much
            self._told[stream] = farther(held.reach, self._told.get(stream, 0))
        self._whole = dict.fromkeys(self._whole, False)
        self._writers.clear()
        self.size = 0
