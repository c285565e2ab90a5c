"""Writers as those of Synapse beside a database that breaks its promises, and the bridge's memory over all of it.

A standby that lags is promoted while workers write. A sequence goes back under a live connection, with its rows or
without. A sequence was never called. Two processes have one worker's name. A session is filtered by row level security.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.sources.synapse.world import ASKED, BEGINS, NAMES, Process, Transaction, Writers
from tidemark.sources.synapse.decider import ProvenAdvance, StreamDecider, StreamFact
from tidemark.sources.synapse.evidence import PublishedFacts

FLOOR = 20
MakeDecider = Callable[[Mapping[str, int]], StreamDecider]


@dataclass
class Image:
    """A standby, or a backup."""

    head: int
    facts: dict[int, str]
    contents: dict[int, int]


@dataclass
class BrokenWriters(Writers):
    """`contents`: which row each ID has; no two rows are the same one. `twins` live beside a process of their name.

    `cache`: how many IDs a session of a worker takes from the sequence at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = FLOOR
        self.is_called = False
        """The sequence: `RESTART WITH` one beyond the floor was all so far."""
        self.is_filtered = False
        self.cache = 1
        self._cached: dict[int, list[int]] = {}
        self.database = 1
        self.contents: dict[int, int] = {}
        self.twins: dict[str, Process] = {}
        self._image = Image(FLOOR, {}, {})
        self._rows = 0
        for process in self.live.values():
            process.position = FLOOR

    def last_value(self) -> int | None:
        """As `pg_sequence_last_value` gives it."""
        return self.head if self.is_called else None

    def take(self, name: str) -> None:
        self.is_called = True
        if self.cache == 1:
            super().take(name)
        elif process := self.live.get(name):
            cached = self._cached.setdefault(id(process), [])
            if not cached:
                cached += range(self.head + 1, self.head + 1 + self.cache)
                self.head += self.cache
            process.taken.append(cached.pop(0))

    def alter(self, cache: int) -> None:
        """`ALTER SEQUENCE ... CACHE`: no session keeps IDs from before."""
        self.cache = cache
        self._cached.clear()

    def jump(self, by: int) -> None:
        """`setval` beyond the head."""
        self.is_called = True
        self.head += by

    def waste(self) -> None:
        self.is_called = True
        super().waste()

    def swap(self, name: str) -> None:
        """The next acts are of the other process of that name."""
        if name in self.live and name in self.twins:
            self.live[name], self.twins[name] = self.twins[name], self.live[name]

    def twin(self, name: str) -> None:
        """A second process begins before the first one has ended."""
        if name in self.live and name not in self.twins:
            self.twins[name] = Process(name, self.head)
            self.lines += [(BEGINS, 0, 0), (name, self.head, self.head)]

    def untwin(self, name: str, *, committing: bool) -> None:
        """One of the two is killed."""
        if process := self.twins.pop(name, None):
            self.orphans += [each for each in process.open if committing]

    def end(self, name: str, *, commits: bool, last: bool) -> None:
        if (process := self.live.get(name)) and process.open:
            id = process.open[-1 if last else 0].id
            super().end(name, commits=commits and id not in self.facts, last=last)
            self._note(id)

    def end_orphan(self, *, commits: bool) -> None:
        if self.orphans:
            id = self.orphans[0].id
            super().end_orphan(commits=commits and id not in self.facts)
            self._note(id)

    def _note(self, id: int) -> None:
        """One row more, if it was committed."""
        if id in self.facts and id not in self.contents:
            self._rows += 1
            self.contents[id] = self._rows

    def running_transactions(self) -> frozenset[int]:
        return super().running_transactions() | {
            each.number for process in self.twins.values() for each in process.open
        }

    def copy(self) -> None:
        """The standby is as far as that from now on."""
        self._image = Image(self.head, dict(self.facts), dict(self.contents))

    def promote(self) -> None:
        """Transactions are lost, processes live on and keep the IDs that they have."""
        self.database += 1
        self._cached.clear()
        self._lose_transactions()
        self.head = self._image.head
        self.facts, self.contents = dict(self._image.facts), dict(self._image.contents)

    def set_back(self, by: int, *, rows: bool) -> None:
        """The sequence; `rows`: those beyond go too, as by a restore in place."""
        self.head = max(FLOOR, self.head - by)
        self._image.head = min(self._image.head, self.head)
        if rows:
            self._lose_transactions()
            self.facts = {id: name for id, name in self.facts.items() if id <= self.head}
            self.contents = {id: row for id, row in self.contents.items() if id <= self.head}

    def _lose_transactions(self) -> None:
        self.orphans = []
        for process in [*self.live.values(), *self.twins.values()]:
            for each in process.open:
                process.ended[each.id] = False
            process.open = []

    def retried(self, name: str) -> None:
        """Its transaction broke off, and it tries again with the same ID."""
        if (process := self.live.get(name)) and process.open:
            self.numbers += 1
            process.open.append(Transaction(self.numbers, process.open.pop(0).id, name))


class FilteredError(Exception):
    """What Postgres raises in place of filtering, with `row_security = off`."""


@dataclass
class Bridge:
    """What the bridge makes of it: `streams.StreamTelling` and `timelines.load_progress` without databases.

    `regular` and `late` are the rows that were published, by ID; `reached`: how far each writer ever was.
    """

    writers: BrokenWriters
    make: MakeDecider = StreamDecider
    keeps: bool = True
    sent_upto: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, FLOOR))
    backlog: dict[str, int] = field(default_factory=dict)
    published: PublishedFacts = field(default_factory=lambda: PublishedFacts(FLOOR))
    regular: dict[int, list[int]] = field(default_factory=dict)
    late: set[tuple[int, int]] = field(default_factory=set)
    reached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, FLOOR))
    timelines: int = 0
    database: int = 1
    seen: int = FLOOR
    believes_filter: bool = False
    checks_sequence: bool = True
    decider: StreamDecider = field(init=False)

    def __post_init__(self) -> None:
        self._connect()

    def head(self) -> int:
        """As `looks.heads` reads it."""
        value = self.writers.last_value()
        return FLOOR if value is None else value

    def step(self, count: int = 10_000) -> None:
        """Hear, look, read, and look back; begin anew where something is wrong."""
        try:
            if self.writers.database != self.database:
                self._begin()
            self._receive(count)
            self._see()
            if self.checks_sequence and self.writers.cache > 1:
                return
            if self.decider.needs_observation:
                self.decider.observe(self.head(), self.writers.running_transactions())
            self._read()
            self._audit()
        except FilteredError:
            return
        self.check()

    def check(self) -> None:
        """Every row that is there was published, or is beyond what its writer's position says."""
        below = {
            id: row for id, row in self.writers.contents.items() if FLOOR < id <= self.sent_upto[self.writers.facts[id]]
        }
        over = {id for id, row in below.items() if row not in self.regular.get(id, []) and (id, row) not in self.late}
        assert not over, f"stepped over: {over}, told {self.sent_upto}"

    def _table(self, low: int, top: int) -> list[StreamFact]:
        if self.writers.is_filtered:
            if self.believes_filter:
                return []
            raise FilteredError
        found = self.writers.facts
        return [
            StreamFact(id, name, ["{}"], frozenset({self.writers.contents[id]}))
            for id, name in found.items()
            if low < id <= top
        ]

    def _see(self) -> None:
        if self.head() < self.seen:
            self._begin()
        self.seen = self.head()

    def _begin(self) -> None:
        """A new connection."""
        head, reach = self.head(), max(self.sent_upto.values())
        table = self._table(self.published.since_id, reach)
        if (
            self.writers.database != self.database
            or head < max(self.seen, reach)
            or self.published.find_replaced(table)
        ):
            agreed = self.published.find_last_common_id(table, self.sent_upto)
            at = min(FLOOR if agreed is None else max(agreed, FLOOR), head)
            self.published.truncate(at)
            self.sent_upto = {name: min(sent_upto, at) for name, sent_upto in self.sent_upto.items()}
            self.timelines += 1
        self.database, self.seen = self.writers.database, head
        self._connect()

    def _connect(self) -> None:
        self.decider = self.make(self.sent_upto)
        self.writers.lines.clear()
        self._receive(0)
        self.writers.ask()

    def _receive(self, count: int) -> None:
        lines = self.writers.lines
        for name, first, second in lines[:count]:
            if name == BEGINS:
                self.decider.mark_uncertain()
            elif name == ASKED:
                self.decider.note_request()
            elif second is None:
                self.decider.apply_rdata(name, first, "{}")
            else:
                self.decider.apply_position(name, first, second)
        del lines[:count]

    def _read(self) -> None:
        if (asked := self.decider.range_to_read()) is None:
            return
        facts = self._table(*asked)
        self._see()
        if (asked_again := self.decider.range_to_read()) is None:
            return
        if asked_again == asked:
            for advance in self.decider.apply_facts(asked, self.head(), facts):
                self._take(advance)

    def _take(self, advance: ProvenAdvance) -> None:
        assert advance.prev == self.sent_upto[advance.writer] < advance.id
        self.sent_upto[advance.writer] = advance.id
        for fact in advance.facts:
            row = min(fact.marks, default=0)
            if fact.id <= self.reached[advance.writer]:
                self.late.add((fact.id, row))
            else:
                assert row not in self.regular.get(fact.id, []), f"{fact.id} is told twice"
                self.regular.setdefault(fact.id, []).append(row)
        self.published.add(advance.facts)
        self.reached[advance.writer] = max(self.reached[advance.writer], advance.id)

    def _audit(self) -> None:
        table = self._table(self.published.since_id, max(self.sent_upto.values()))
        if self.published.find_replaced(table):
            self._begin()
            return
        for fact in self.published.find_unpublished(table, self.sent_upto):
            assert fact.id <= self.reached[fact.writer]
            self.late.add((fact.id, min(fact.marks)))
            self.published.add([fact])

    def finish(self) -> None:
        """Everything is in order again, workers begin anew, and nothing is open: then everything is told."""
        writers = self.writers
        writers.is_filtered = False
        writers.alter(cache=1)
        for name in NAMES:
            writers.untwin(name, committing=True)
            writers.kill(name, committing=True)
        while writers.orphans:
            writers.end_orphan(commits=True)
        while writers.head < max(writers.facts, default=0):
            writers.waste()
        writers.waste()
        for name in NAMES:
            writers.start(name, lag_ids=False)
        for _ in range(10):
            for name in NAMES:
                writers.follow(name)
            self.step()
            writers.ask()
        assert {*self.sent_upto.values()} == {writers.head}, (
            f"{self.sent_upto}, head {writers.head}, {self.decider.discarded_positions}"
        )
