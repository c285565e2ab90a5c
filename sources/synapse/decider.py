"""How far each writer of one stream of Synapse may be told, and with which facts (docs/synapse.md). Pure; magnitudes.

Three kinds of evidence, of which no two are enough:

- *The word of a writer* on the channel: everything of mine up to `n` has ended. Synapse takes an ID before it opens the
  transaction that uses it, so the database alone cannot know who is about to use one.
- *The table*: which IDs are facts, and whose. Lines are lost, and nothing tells; a row that is committed is there.
- *Who runs*: a process that was killed leaves transactions that commit after its successor has spoken. So a word that
  may be a successor's counts only once everybody has ended who ran when it was heard: its *barrier*.

What a writer says twice, late or out of order changes nothing: its highest word counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from tidemark.streaming.intervals import EMPTY, Intervals

MASTER = "master"
"""The main process, which older rows do not name."""
MOST_IDS = 5000
"""IDs that are read at once."""
MOST_HEARD = 50_000
"""Rows kept of what was heard and is not told; past it the oldest are forgotten, and the table alone knows."""


@dataclass(frozen=True, slots=True)
class StreamFact:
    """`rows` are JSON, at least one. `writer` is empty where the table does not say whose it is."""

    id: int
    writer: str
    rows: Sequence[str]


@dataclass(frozen=True, slots=True)
class ProvenAdvance:
    """Everything of the writer in `(prev, id]` has ended, and these are its facts there, in order.

    `unseen`: there may be more, of which nobody knows.
    """

    writer: str
    prev: int
    id: int
    facts: Sequence[StreamFact]
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class _Barrier:
    """Who of a dead incarnation may still commit an ID up to `head` is one of those who are waited for."""

    head: int
    waiting: frozenset[int]


@dataclass(slots=True)
class _SynapseWriter:
    """`doubted`: its next word may be a successor's; `spoken`: it has spoken since."""

    told: int
    word: int = 0
    doubted: bool = True
    spoken: bool = False
    barriers: list[_Barrier] = field(default_factory=list)
    since: int = 0
    """IDs beyond were given out in its present life."""
    empty: Intervals = EMPTY
    """What it has announced to be empty of those, beyond what is told."""
    moved: bool = False
    """Whether there is reason to look at the table since it was last told."""

    def say(self, id: int, *, began: bool = False) -> None:
        self.doubted |= began
        self.spoken = True
        self.moved |= id > self.told
        self.word = max(self.word, id)

    @property
    def guarded(self) -> int:
        """Up to here an ID that stands nowhere may still come."""
        return max((barrier.head for barrier in self.barriers), default=0)


class StreamDecider:
    """Of one connection to Synapse's database. `told`: how far each known writer was told.

    `keeps`: a row that is in no table is in none for good; else rows are overwritten and deleted, and what stands
    nowhere may have been a fact. One thread: hear everything that has come, look, read what is asked for.
    """

    def __init__(self, told: Mapping[str, int], *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._writers = {name: _SynapseWriter(at) for name, at in told.items()}
        self._heard: dict[int, StreamFact] = {}
        self._begun: dict[str, list[str]] = {}
        self._whole: set[str] = set()
        """Writers of whose next fact every row was heard, or none."""
        self._strangers: dict[str, _SynapseWriter] = {}

    @property
    def strangers(self) -> Set[str]:
        """Writers that were heard or read of and are not known: nothing is told until they are."""
        return self._strangers.keys()

    @property
    def told(self) -> Mapping[str, int]:
        return {name: writer.told for name, writer in self._writers.items()}

    @property
    def words(self) -> Mapping[str, int]:
        """How far each writer said it is."""
        return {name: writer.word for name, writer in self._writers.items()}

    @property
    def line(self) -> int:
        """Everything up to here is told."""
        return min((writer.told for writer in self._writers.values()), default=0)

    @property
    def waiting(self) -> frozenset[int]:
        """Transactions for which a barrier waits."""
        every = [barrier.waiting for writer in self._writers.values() for barrier in writer.barriers]
        return frozenset().union(*every)

    @property
    def wants_look(self) -> bool:
        """Whether it is to be asked who runs before anything is read."""
        return any(it.barriers or (it.doubted and it.spoken) for it in self._writers.values())

    def meet(self, writers: Iterable[str]) -> None:
        """These are there, whether known or not."""
        for name in writers:
            if name not in self._writers:
                self._strangers.setdefault(name, _SynapseWriter(0))

    def introduce(self, writer: str, told: int) -> None:
        """The writer has joined there; what it said before counts."""
        self.meet([writer])
        if stranger := self._strangers.pop(writer, None):
            stranger.told, stranger.moved = told, stranger.word > told
            self._writers[writer] = stranger

    def doubt(self) -> None:
        """Lines may have been lost, and with them the first words of a successor."""
        self._begun.clear()
        self._whole.clear()
        for writer in [*self._writers.values(), *self._strangers.values()]:
            writer.doubted, writer.spoken = True, False

    def announced(self, writer: str, prev: int, id: int) -> None:
        """`POSITION writer prev id`. Of one number twice: it has begun, or was asked."""
        self._begun.pop(writer, None)
        self._whole.add(writer)
        known = self._known(writer)
        known.say(id, began=prev >= id)
        if not known.doubted and (first := max(prev, known.since, known.told)) < id:
            known.empty = known.empty.union(Intervals.of([(first, id)]))

    def completed(self, writer: str, id: int | None, row: str) -> None:
        """`RDATA writer id row`; None is one of several rows, of which the last has the number."""
        rows = self._begun.setdefault(writer, [])
        rows.append(row)
        if id is None:
            return
        del self._begun[writer]
        self._known(writer).say(id)
        if writer in self._whole:
            self._heard.setdefault(id, StreamFact(id, writer, rows))
            while len(self._heard) > MOST_HEARD:
                del self._heard[next(iter(self._heard))]
        self._whole.add(writer)

    def _known(self, writer: str) -> _SynapseWriter:
        self.meet([writer])
        return self._writers.get(writer) or self._strangers[writer]

    def look(self, head: int, running: frozenset[int]) -> None:
        """How far IDs are given out, and then who runs: both asked for after everything was heard."""
        for writer in self._writers.values():
            left = [_Barrier(it.head, it.waiting & running) for it in writer.barriers]
            left = [it for it in left if it.waiting]
            writer.moved |= len(left) < len(writer.barriers)
            if writer.doubted and writer.spoken:
                writer.doubted = writer.spoken = False
                writer.since = head
                if running:
                    left.append(_Barrier(head, running))
            by_waiting = {it.waiting: it for it in sorted(left, key=lambda it: it.head)}
            writer.barriers = [*by_waiting.values()]

    def floor(self) -> int | None:
        """Where all writers may join for the first time: up to there everything has ended. None: not known yet."""
        if not self._writers or any(it.doubted or it.barriers for it in self._writers.values()):
            return None
        return min(writer.word for writer in self._writers.values())

    def begin(self, floor: int) -> None:
        """All writers have joined there."""
        for writer in self._writers.values():
            writer.told, writer.moved = floor, writer.word > floor

    def asked(self) -> tuple[int, int] | None:
        """`(low, high]`: what the table is to be asked for, now; None: nothing."""
        moved = [it for it in self._writers.values() if it.moved and it.told < it.word and not it.doubted]
        if not moved:
            return None
        low = min(it.told for it in moved)
        return low, min(low + MOST_IDS, max(it.word for it in moved))

    def read(self, asked: tuple[int, int], head: int, facts: Iterable[StreamFact]) -> list[ProvenAdvance]:
        """What the table has of `asked`, and the head, read together and last; gives what may be told now."""
        low, top = asked[0], min(asked[1], head)
        table = {fact.id: fact if fact.writer else replace(fact, writer=self._owner(fact.id)) for fact in facts}
        known = {id: fact for id, fact in self._heard.items() if low < id <= top} | table
        self.meet(fact.writer for fact in known.values())
        if self.strangers:
            return []
        here = Intervals.of((id - 1, id) for id in known)
        found = list[ProvenAdvance]()
        for name, writer in self._writers.items():
            if writer.moved and not writer.doubted and low <= writer.told:
                found += self._advance(name, writer, top, known, here)
        line = self.line
        if found:
            self._heard = {id: fact for id, fact in self._heard.items() if id > line}
        return found

    def _owner(self, id: int) -> str:
        """Who wrote what no row names: who announced it, or the only writer there is."""
        if heard := self._heard.get(id):
            return heard.writer
        return next(iter(self._writers)) if len(self._writers) == 1 else MASTER

    def _advance(
        self, name: str, writer: _SynapseWriter, top: int, known: Mapping[int, StreamFact], here: Intervals
    ) -> Iterator[ProvenAdvance]:
        writer.moved = writer.word > top
        prev, id = writer.told, min(writer.word, top)
        if id <= prev:
            return
        nowhere = here.missing(prev, id)
        if uncertain := [low for low, _ in nowhere if low < writer.guarded]:
            id = uncertain[0]
        if id <= prev:
            return
        facts = [known[at] for at in sorted(known) if prev < at <= id and known[at].writer == name]
        unseen = not self._keeps and bool(nowhere.upto(id).difference(writer.empty))
        writer.told = id
        writer.empty = writer.empty.above(id)
        yield ProvenAdvance(name, prev, id, facts, unseen)
