"""Writers that behave as those of Synapse do, by the rules that were observed, and what is known of their truth.

An ID is taken outside any transaction, used in one, and ends with it. A writer says how far it is; lines are lost only
together with a sign of it. One that is killed leaves transactions that were asked to commit, and a successor that says
how far it found everything.
"""

from dataclasses import dataclass, field

from tidemark.sources.synapse.decider import ProvenAdvance, StreamDecider, StreamFact

NAMES = ("event1", "event2", "event3")
BEGINS, ASKED = "REPLICATE", "REPLICATE of ours"
"""In place of a writer in what is heard: one that begins asks everybody, and so may we."""


@dataclass
class Transaction:
    number: int
    id: int
    writer: str
    orphan: bool = False


@dataclass
class Process:
    """`taken`: IDs in no transaction yet; `open`: transactions. None of them is complete."""

    name: str
    position: int
    taken: list[int] = field(default_factory=list)
    open: list[Transaction] = field(default_factory=list)
    ended: dict[int, bool] = field(default_factory=dict)

    def complete_upto(self, head: int) -> int:
        flying = [*self.taken, *(each.id for each in self.open)]
        return min(flying) - 1 if flying else head


class Writers:
    """`facts` are committed, by ID; `lines` have not been heard yet: the arguments of what the decider is told."""

    def __init__(self) -> None:
        self.head = 1
        self.numbers = 0
        self.live = {name: Process(name, 1) for name in NAMES}
        self.orphans: list[Transaction] = []
        self.facts: dict[int, str] = {}
        self.lines: list[tuple[str, int, int | None]] = []

    def take(self, name: str) -> None:
        if process := self.live.get(name):
            self.head += 1
            process.taken.append(self.head)

    def waste(self) -> None:
        """Somebody who is no writer takes an ID."""
        self.head += 1

    def begin(self, name: str) -> None:
        if (process := self.live.get(name)) and process.taken:
            self.numbers += 1
            process.open.append(Transaction(self.numbers, process.taken.pop(0), name))

    def end(self, name: str, *, commits: bool, last: bool) -> None:
        if (process := self.live.get(name)) and process.open:
            each = process.open.pop(-1 if last else 0)
            if commits:
                self.facts[each.id] = name
            process.ended[each.id] = commits
            self._say(process)

    def end_orphan(self, *, commits: bool) -> None:
        if self.orphans:
            each = self.orphans.pop(0)
            if commits:
                self.facts[each.id] = each.writer

    def kill(self, name: str, *, committing: bool) -> None:
        if process := self.live.pop(name, None):
            self.orphans += [each for each in process.open if committing]

    def start(self, name: str, *, lag_ids: bool) -> None:
        """`behind`: it finds the IDs of facts, not those that were given out."""
        if name not in self.live:
            found = max(self.facts, default=1) if lag_ids else self.head
            self.live[name] = Process(name, found)
            self.lines += [(BEGINS, 0, 0), (name, found, found)]

    def ask(self) -> None:
        """Everybody that lives answers."""
        self.lines.append((ASKED, 0, 0))
        for name in self.live:
            self.answer(name)

    def answer(self, name: str) -> None:
        if process := self.live.get(name):
            self.lines.append((name, process.position, process.position))

    def follow(self, name: str) -> None:
        """An idle one says that it is as far as others are."""
        if process := self.live.get(name):
            self._say(process)

    def running_transactions(self) -> frozenset[int]:
        live = [each.number for process in self.live.values() for each in process.open]
        return frozenset([*live, *(each.number for each in self.orphans)])

    def _say(self, process: Process) -> None:
        top = process.complete_upto(self.head)
        if top <= process.position:
            return
        facts = [id for id in sorted(process.ended) if process.position < id <= top and process.ended[id]]
        for id in facts:
            self.lines.append((process.name, id, None))
        last = facts[-1] if facts else process.position
        if last < top:
            self.lines.append((process.name, last, top))
        process.position = top


class WriterPositions:
    """What the decider tells, held against the truth. `forgets`: the table overwrites every second row at once."""

    def __init__(self, writers: Writers, decider: StreamDecider, *, forgets: bool = False) -> None:
        self._writers = writers
        self._forgets = forgets
        self.decider = decider
        self.unseen: set[tuple[str, int]] = set()
        self.at = dict.fromkeys(NAMES, 1)
        self.facts: dict[int, str] = {}
        self._owed: dict[str, int] = {}
        self._retired: dict[str, int] = {}

    @property
    def retiring(self) -> set[str]:
        return {*self.decider.retiring_writers}

    def retire(self, name: str) -> None:
        """Of one that is dead; the last one stays."""
        known = self.decider.sent_upto.keys() - self.retiring
        if name in known and len(known) > 1:
            self.decider.retire(name)

    def _come_and_go(self) -> None:
        for name in sorted(self.decider.unknown_writers):
            self._owed[name] = self._retired.pop(name, 1)
            self.at[name] = max(self.decider.linear, self._owed[name])
            self.decider.add_writer(name, self.at[name])
            if self._forgets:
                self.unseen |= {(name, id) for id in range(self._owed[name], self.at[name] + 1)}
        for name in self.decider.sendable_backlogs:
            low = self._owed.pop(name)
            found = [id for id, of in self._table().items() if of == name and low < id <= self.at[name]]
            assert not self.facts.keys() & found
            self.facts |= dict.fromkeys(found, name)
            self.decider.note_backlog_sent(name)
        for name, ended in self.decider.retiring_writers.items():
            if ended is not None:
                self.decider.forget(name)
                self._retired[name] = ended

    def _table(self) -> dict[int, str]:
        return {id: of for id, of in self._writers.facts.items() if id % 2 or not self._forgets}

    def receive(self, count: int) -> None:
        lines = self._writers.lines
        for name, first, second in lines[:count]:
            if name == BEGINS:
                self.decider.mark_uncertain()
            elif name == ASKED:
                self.decider.note_request()
            elif second is None:
                self.decider.apply_rdata(name, first, f'["{name}",{first}]')
            else:
                self.decider.apply_position(name, first, second)
        del lines[:count]

    def lose(self, count: int) -> None:
        """The newest lines are lost; whoever was disconnected asks, and everybody answers in time."""
        lines = self._writers.lines
        del lines[max(0, len(lines) - count) :]
        self.receive(len(lines))
        self.decider.mark_uncertain()

    def look(self) -> None:
        if self.decider.needs_observation:
            self.decider.observe(self._writers.head, self._writers.running_transactions())

    def read(self) -> None:
        self._come_and_go()
        if asked := self.decider.range_to_read():
            low, top = asked
            table = [StreamFact(id, writer, ["{}"]) for id, writer in self._table().items() if low < id <= top]
            for advance in self.decider.apply_facts(asked, self._writers.head, table):
                self._take(advance)

    def _take(self, advance: ProvenAdvance) -> None:
        assert advance.prev == self.at[advance.writer] < advance.id
        self.at[advance.writer] = advance.id
        for fact in advance.facts:
            assert fact.id not in self.facts
            self.facts[fact.id] = fact.writer
        if advance.is_unseen:
            assert self._forgets
            self.unseen |= {(advance.writer, id) for id in range(advance.prev + 1, advance.id + 1)}

    def check(self) -> None:
        """No event is stepped over: of what is committed, all that lies at or below its writer's position is told."""
        below = {id: name for id, name in self._writers.facts.items() if id <= self.at[name] and id not in self.facts}
        below = {id: name for id, name in below.items() if name not in self._owed}
        over = {id: name for id, name in below.items() if (name, id) not in self.unseen}
        assert not over, f"stepped over: {over}, told {self.at}"
        assert self.facts.items() <= self._writers.facts.items()

    def finish(self) -> None:
        """Everybody lives and nothing is open: then everything is told."""
        writers = self._writers
        while writers.orphans:
            writers.end_orphan(commits=True)
        for name in NAMES:
            writers.start(name, lag_ids=False)
            while writers.live[name].taken:
                writers.begin(name)
            while writers.live[name].open:
                writers.end(name, commits=True, last=False)
        self.lose(0)
        for name in NAMES:
            writers.follow(name)
            writers.answer(name)
        for _ in range(8):
            self.receive(len(writers.lines))
            self.look()
            self.read()
            self.check()
        assert self.facts == {id: name for id, name in writers.facts.items() if id in self.facts or not self._forgets}
        assert set(self.at.values()) == {writers.head}
