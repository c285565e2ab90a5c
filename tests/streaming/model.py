"""A stream by brute force, from docs/design.md 1 to 3 and not from the code: keeps every ID, recomputes everything.

Records are fed one by one. Nothing here is quick, bounded, or an interval.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from tests.streaming.builders import Record
from tidemark.streaming.wire.records import CURRENT_EPOCH, DatabaseStart

# How an ID was settled. BARE: it lies strictly inside somebody's edge, so it is another writer's, or nobody's.
FACTS, EMPTY, UNSEEN, SKIPPED, BARE = "facts", "empty", "unseen", "skipped", "bare"

Settled = dict[int, str]

UNBOUNDED = 2**63 - 1


@dataclass
class Incarnated:
    """What is known of a writer, or of an incarnation that has not joined: each settled ID, and how.

    `late` says why a completion of that ID comes too late, until it came; `refused` is the highest ID that was turned
    away although it may be true, or UNBOUNDED. `denied` are IDs of which the writer said that they are no facts of its
    own. `joined` is what the JOIN of its epoch says, None if it is not known. `blurred` is set once a settled range was
    taken in part: Tidemark keeps counts per range, so that from then on its counts of this writer are upper bounds.
    """

    epoch: int
    settled: Settled = field(default_factory=dict)
    late: dict[int, str] = field(default_factory=dict)
    retired: bool = False
    retire: int | None = None
    refused: int = 0
    blurred: bool = False
    denied: set[int] = field(default_factory=set)
    published: int = 0
    told: Settled = field(default_factory=dict)
    timeline: int = 1
    start: str | None = None
    joined: tuple[int, bool, DatabaseStart | None] | None = None

    @property
    def passed(self) -> int:
        """All IDs up to here are complete; after the database went back, those included that came again since."""
        at = 0
        while at + 1 in self.settled:
            at += 1
        return at

    @property
    def position(self) -> int:
        """Never moves back."""
        return max(self.passed, self.published)

    @property
    def reach(self) -> int:
        return max(self.settled, default=0)

    @property
    def own(self) -> int:
        """The highest ID that is settled by more than an operator's word."""
        return max((at for at in self.settled if at not in self.late), default=0)

    def follow(self, ids: range, denied: set[int]) -> None:
        """Settle what is open; no evidence is told of it, and it comes late no more. In `denied` there is no fact."""
        self.denied |= denied & self.late.keys()
        for at in ids:
            self.settled.setdefault(at, BARE)
            self.late.pop(at, None)

    def evidence(self, prev: int, id: int) -> Counter[str]:
        counts = Counter(self.told.get(at) or self.settled[at] for at in range(prev + 1, id + 1))
        del counts[BARE]
        return counts

    def ranges(self) -> list[tuple[int, int]]:
        """What is settled, as the longest ranges `(prev, id]`."""
        starts = [at - 1 for at in sorted(self.settled) if at - 1 not in self.settled]
        ends = [at for at in sorted(self.settled) if at + 1 not in self.settled]
        return list(zip(starts, ends, strict=True))

    def adopt(self, held: "Incarnated") -> None:
        """Take over what an incarnation completed before it joined."""
        for prev, id in held.ranges():
            there = sum(at in self.settled for at in range(prev + 1, id + 1))
            self.blurred |= 0 < there < id - prev or prev < self.published < id
        new = {at: BARE if at <= self.published else how for at, how in held.settled.items()}
        self.settled = new | self.settled
        self.denied |= held.denied
        self.blurred |= held.blurred
        self.refused = max(self.refused, held.refused)

    def gaps(self) -> list[tuple[int, int]]:
        """Open ranges below the highest settled ID, ascending."""
        edges = [0, *(at for pair in self.ranges() for at in pair)]
        return [(low, top) for low, top in zip(edges[::2], edges[1::2], strict=False) if low < top]


@dataclass
class Model:
    direction: int = 0
    home: int | None = None
    linear: int = 0
    writers: dict[str, Incarnated] = field(default_factory=dict)
    unjoined: dict[tuple[str, int], Incarnated] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    late_facts: Counter[tuple[str, str]] = field(default_factory=Counter)
    timeline: int = 1
    database: str | None = None
    refused: int = 0
    elsewhere: bool = False
    began: int = 0
    timelines: list[tuple[str, int, int, int, str]] = field(default_factory=list)

    def feed(self, record: Record) -> str:
        """The record's outcome; a rejected one gives `rejected: <reason>`. IDs are magnitudes from here on."""
        outcome = self._take(record)
        self.linear = self._linear()
        return outcome

    def positions(self) -> dict[str, int]:
        return {name: writer.position for name, writer in sorted(self.writers.items())}

    def _linear(self) -> int:
        """docs/design.md 3, word for word; never back, and not past what came before an unknown writer."""
        if self.unjoined or not self.writers:
            return self.linear
        active = [writer for writer in self.writers.values() if not writer.retired]
        if active and all(it.timeline < self.timeline for it in active):
            return self.linear
        ends = [
            it.passed if it.timeline == self.timeline else min(it.passed, self.began) for it in self.writers.values()
        ]
        passed = min(it.passed for it in active) if active else max(ends)
        at = 0
        while at + 1 <= self.linear or at + 1 in self.done or at + 1 <= passed:
            at += 1
        return at

    def _take(self, record: Record) -> str:
        if not record.control and self.home not in (None, record.partition):
            self.astray(record)
            return "rejected: wrong_partition"
        named = record.id or _told(record) or 0
        sign = (named > 0) - (named < 0)
        if sign * self.direction < 0:
            return "rejected: mixed_sign"
        if record.epoch == CURRENT_EPOCH:
            record = replace(record, epoch=self._living(record.writer))
        if record.control and not record.beyond and abs(record.id) > self._allocated():
            return "rejected: beyond_allocated"
        outcome = self._act(record)
        if sign and not outcome.startswith("rejected"):
            self.direction = sign
        if not record.control and not outcome.startswith("rejected"):
            self.home = record.partition
        return outcome

    def _living(self, name: str) -> int:
        """The joined epoch; else the newest that is held, else that of its RETIRE."""
        writer = self.writers.get(name)
        if writer is not None and not writer.retired:
            return writer.epoch
        held = [epoch for held, epoch in self.unjoined if held == name]
        return max([writer.epoch if writer else 0, *held])

    def _allocated(self) -> int:
        """The highest ID that is settled anywhere, or that the line has passed."""
        return max(
            [self.linear, *(it.reach for it in self.writers.values()), *(it.reach for it in self.unjoined.values())]
        )

    def astray(self, record: Record) -> None:
        """Another partition: no order against this one, so an incarnation that is not joined here holds the line."""
        if record.kind == "RETIRE":
            return
        reach = {"JOIN": 0, "ROW": UNBOUNDED}.get(record.kind, abs(record.id))
        writer = self.writers.get(record.writer)
        if record.epoch == 0 and self._is_new():
            self.refused = max(self.refused, reach)
            return
        if writer is not None and (
            record.epoch < writer.epoch or (record.epoch == writer.epoch and not writer.retired)
        ):
            writer.refused = max(writer.refused, reach if record.epoch == writer.epoch else 0)
        elif writer is None or record.epoch > writer.epoch or reach > writer.position:
            held = self._unjoined(record)
            held.refused = max(held.refused, reach)

    def _act(self, record: Record) -> str:
        match record.kind:
            case "JOIN":
                return self._join(record)
            case "RETIRE":
                return self._retire(record)
            case "SKIP":
                return self._skip(record)
        writer = self._begun(record)
        if writer is not None and record.epoch < writer.epoch:
            return "rejected: zombie"
        if record.kind == "ROW":
            if writer is None or record.epoch > writer.epoch or writer.retired:
                self._unjoined(record).refused = UNBOUNDED
            return "batch"
        prev, id = abs(record.prev), abs(record.id)
        if writer is None or record.epoch > writer.epoch or (writer.retired and id > writer.position):
            outcome = self._edge(self._unjoined(record), record, prev, id)
            return {"applied": "buffered", "final": "late", "denied": "late"}.get(outcome, outcome)
        return self._edge_of(writer, record, prev, id)

    def _begun(self, record: Record) -> Incarnated | None:
        """The writer; where nobody was ever seen, one of epoch 0 needs no JOIN."""
        if record.epoch == 0 and self._is_new():
            begun = Incarnated(0, refused=self.refused, timeline=self.timeline)
            return self.writers.setdefault(record.writer, begun)
        return self.writers.get(record.writer)

    def _is_new(self) -> bool:
        return not self.writers and not self.unjoined and self.linear == 0

    def _unjoined(self, record: Record) -> Incarnated:
        return self.unjoined.setdefault((record.writer, record.epoch), Incarnated(record.epoch))

    # -- edges

    def _edge(self, writer: Incarnated, record: Record, prev: int, id: int) -> str:
        """Edges tile: all of it open, or all of it there, or a conflict; but not where a timeline before left it.

        `final`: it was open, and yet the line or another writer has its ID. `denied`: a fact where its writer had
        said that it has none.
        """
        kind = record.kind
        covered = [at in writer.settled for at in range(prev + 1, id + 1)]
        if all(covered):
            if kind != "RDATA" or id not in writer.denied:
                return "duplicate"
            writer.denied.discard(id)
            self._complete(record, id)
            self.late_facts[record.writer, "announced"] += 1
            return "denied"
        if any(covered):
            began = self.began if writer.timeline == self.timeline else 0
            ends = [at for at in range(prev + 1, id) if (at in writer.settled) != (at + 1 in writer.settled)]
            if any(at > began or (at == began and at not in writer.settled) for at in ends):
                writer.refused = max(writer.refused, id)
                return "rejected: conflict"
            low = max(at for at in range(prev, id) if at == prev or at in writer.settled)
            outcome = self._edge(writer, record, id - 1 if id in writer.settled else low, id)
            writer.follow(range(prev + 1, id + 1), set())
            return outcome
        for at in range(prev + 1, id + 1):
            writer.settled[at] = EMPTY if kind == "POSITION" else BARE
        writer.denied |= _denied(kind, prev, id)
        if kind == "POSITION":
            return "applied"
        writer.settled[id] = FACTS if kind == "RDATA" else EMPTY
        if id in self.done or id <= self.linear:
            self.late_facts[record.writer, "final"] += kind == "RDATA"
            return "final"
        self._complete(record, id)
        return "applied"

    def _complete(self, record: Record, id: int) -> None:
        """For the line; but not of a timeline that is over, as of writers that have not joined in this one."""
        writer = self.writers.get(record.writer)
        stale = writer is not None and writer.epoch == record.epoch and writer.timeline < self.timeline
        if not stale or id <= self.began:
            self.done.add(id)

    def _edge_of(self, writer: Incarnated, record: Record, prev: int, id: int) -> str:
        late = [at for at in range(prev + 1, id + 1) if at in writer.late]
        if not late:
            outcome = self._edge(writer, record, prev, id)
            return "late" if outcome in ("final", "denied") else outcome
        if id in writer.late:
            outcome = "duplicate"
            if record.kind != "POSITION":
                outcome = "late"
                self._complete(record, id)
                if record.kind == "RDATA":
                    why = "regressed" if id <= writer.published else writer.late[id]
                    self.late_facts[record.writer, why] += 1
        else:
            outcome = self._edge(writer, record, max(late), id)
            if outcome not in ("applied", "final"):
                return "late" if outcome == "denied" else outcome
        writer.follow(range(prev + 1, id + 1), _denied(record.kind, prev, id))
        return "late" if outcome == "final" else outcome

    # -- markers

    def _join(self, record: Record) -> str:
        id, writer = abs(record.id), self.writers.get(record.writer)
        if writer is not None and record.epoch < writer.epoch:
            return "rejected: zombie"
        if writer is not None and record.epoch == writer.epoch and self._is_repeated(writer, record):
            if id > writer.position:
                return "rejected: conflict"
            if not record.control and writer.joined is None:
                self._note(writer, record)
            return "applied" if record.control and self._reopen(writer, id) else "duplicate"
        writer, retire = self._begin(record)
        if retire is not None and writer.reach <= max(retire, writer.passed):
            self._end(writer, retire, "empty")
        return "applied"

    def _is_repeated(self, writer: Incarnated, record: Record) -> bool:
        """A JOIN that says the same again, or nothing that contradicts the JOIN of its epoch."""
        said, told = (abs(record.id), record.unseen, record.timeline), record.timeline
        if record.control or writer.joined == said:
            return True
        if told is not None and told.database != self.database is not None:
            return False
        if writer.joined is None:
            return told is None or writer.start in (None, told.start, told.after)
        if writer.timeline < self.timeline or writer.own > max(abs(record.id), abs(record.published or 0)):
            return False
        return told is None or writer.start in (None, told.start)

    def _note(self, writer: Incarnated, record: Record) -> None:
        writer.joined = None if record.control else (abs(record.id), record.unseen, record.timeline)
        if record.timeline is not None:
            self.database, writer.start = record.timeline.database, record.timeline.start

    def _reopen(self, writer: Incarnated, id: int) -> bool:
        """What beyond `id` rests on an operator's word alone is open again; whether there was any."""
        forced = {at for at in writer.settled if at > id and at in writer.late}
        if writer.retired or not forced:
            return False
        writer.published, passed = writer.position, writer.passed
        writer.blurred |= any(
            prev >= passed and 0 < len(forced & {*range(prev + 1, id + 1)}) < id - prev for prev, id in writer.ranges()
        )
        for at in range(1, passed + 1):
            writer.told.setdefault(at, writer.settled[at])
        # What was passed was told then: of it nothing is told again, also where the database goes back later.
        writer.settled = {at: BARE if at <= passed else how for at, how in writer.settled.items() if at not in forced}
        writer.late = {at: why for at, why in writer.late.items() if at <= max(id, writer.published)}
        return True

    def _begin(self, record: Record) -> tuple[Incarnated, int | None]:
        id, name = abs(record.id), record.writer
        told = _told(record)
        stands = max(id, abs(told or 0))
        why = self._went_back(record, stands)
        if why is not None:
            if name in self.writers and self._is_another_start(self.writers[name], record):
                stands = id  # a timeline that this database never had may have given out what was published again
            self.timeline, self.began = self.timeline + 1, stands
            position = self.writers[name].position if name in self.writers else 0
            self.timelines.append((name, record.epoch, stands, position, why))
            for other, known in self.writers.items():
                self._go_back(known, other, stands)
                if record.timeline is not None and told is not None and known.start == record.timeline.start:
                    known.timeline = self.timeline
            self.done = {at for at in self.done if at <= stands}
        writer, retire = self.writers.setdefault(name, Incarnated(record.epoch, refused=self.refused)), None
        refused = 0
        self._go_back(writer, name, stands)
        for key in sorted(self.unjoined):
            if key[0] == name and key[1] <= record.epoch:
                held = self.unjoined.pop(key)
                if key[1] < record.epoch:
                    self._take_back(held, name, stands, held.reach)
                else:
                    retire, refused = held.retire, held.refused
                    self._come_again(writer, name, held, id)
                writer.adopt(held)
        writer.denied |= {at for at in writer.late if at <= id}
        writer.epoch, writer.retired, writer.timeline = record.epoch, False, self.timeline
        writer.late = {at: why for at, why in writer.late.items() if at > id}
        self._note(writer, record)
        self._settle(writer, 0, id, _how(record))
        if not self.elsewhere:
            writer.refused = refused
        return writer, retire

    def _come_again(self, writer: Incarnated, name: str, held: Incarnated, id: int) -> None:
        """What an incarnation completed beyond its own JOIN is late where its IDs were published, or skipped."""
        gone = Incarnated(0, dict(held.settled))
        for at in writer.late:
            if at > id:
                self._take_back(gone, name, at - 1, at)
        late = {at for at in writer.late if at > id}
        for prev, top in held.ranges():
            writer.blurred |= 0 < len(late & {*range(prev + 1, top + 1)}) < top - prev

    def _went_back(self, record: Record, id: int) -> str | None:
        """`id`: up to here its database says that nothing is given out again."""
        writer, told = self.writers.get(record.writer), record.timeline
        held = [it for key, it in self.unjoined.items() if key[0] == record.writer and key[1] < record.epoch]
        if told is not None and self.database not in (None, told.database):
            return "database"
        if any(it.reach > id for it in held):
            return "position"
        if writer is None or writer.timeline < self.timeline:
            return None
        if writer.own > id:
            return "position"
        return "start" if self._is_another_start(writer, record) else None

    def _is_another_start(self, writer: Incarnated, record: Record) -> bool:
        told = record.timeline
        if told is None or writer.start in (None, told.start):
            return False
        same_epoch = record.epoch == writer.epoch and writer.joined is not None
        return writer.start != told.after or same_epoch

    def _go_back(self, writer: Incarnated, name: str, id: int) -> None:
        """What was passed stays published; what is beyond and was not is late."""
        passed = writer.passed
        self._take_back(writer, name, max(id, passed), writer.reach)
        if passed > id:
            for at in range(1, passed + 1):
                writer.told.setdefault(at, writer.settled[at])
            writer.published = max(writer.published, passed)
            writer.settled = {at: how for at, how in writer.settled.items() if at <= id}
            writer.denied = {at for at in writer.denied if at <= id}
        writer.late = {at: why for at, why in writer.late.items() if at <= id}
        writer.late |= dict.fromkeys(range(id + 1, writer.published + 1), "regressed")

    def _take_back(self, writer: Incarnated, name: str, low: int, high: int) -> bool:
        """Unsettle `(low, high]`, whose facts are late; whether anything was there."""
        gone = [at for at in range(low + 1, high + 1) if at in writer.settled]
        if gone:
            writer.blurred |= any(prev < cut < id for prev, id in writer.ranges() for cut in (low, high))
            own = {at for at in gone if at not in writer.late}
            writer.blurred |= any(0 < len(own & {*range(prev + 1, id + 1)}) < id - prev for prev, id in writer.ranges())
        self.late_facts[name, "regressed"] += sum(writer.settled.pop(at) == FACTS for at in gone)
        writer.denied -= set(gone)
        return bool(gone)

    def _retire(self, record: Record) -> str:
        id, key = abs(record.id), (record.writer, record.epoch)
        if record.writer == "*":
            return self._throw_out([*self.unjoined])
        writer, held = self.writers.get(record.writer), self.unjoined.get(key)
        if writer is not None and record.epoch < writer.epoch:
            return "rejected: zombie"
        if record.control and held is not None and max(held.settled, default=0) > id:
            return "rejected: conflict"
        if not record.control and (writer is None or record.epoch > writer.epoch):
            return self._retire_held(record)
        if writer is None:
            writer, _ = self._begin(record)
        elif record.epoch > writer.epoch:
            return self._throw_out([key])
        elif writer.retired and record.control and held is not None:
            writer.adopt(self.unjoined.pop(key))
        elif writer.retired:
            return "duplicate" if id <= writer.position else "rejected: conflict"
        else:
            reach = writer.reach if record.control else writer.own
            if reach > max(id, writer.passed):
                return "rejected: conflict"
            if not record.control:
                self._reopen(writer, max(id, reach))
        self._end(writer, id, _how(record))
        return "applied"

    def _throw_out(self, keys: list[tuple[str, int]]) -> str:
        if not self.unjoined.keys() & keys:
            return "rejected: unknown_writer"
        for key in keys:
            held = self.unjoined.pop(key)
            self.late_facts[key[0], "skipped"] += sum(how == FACTS for how in held.settled.values())
            doubted = self.writers.get(key[0], self)
            doubted.refused = max(doubted.refused, held.refused)
        return "applied"

    def _retire_held(self, record: Record) -> str:
        held = self._unjoined(record)
        if held.retire is not None:
            return "duplicate" if held.retire == abs(record.id) else "rejected: conflict"
        held.retire = abs(record.id)
        return "buffered"

    def _skip(self, record: Record) -> str:
        writer = self.writers.get(record.writer)
        if writer is None or record.epoch > writer.epoch:
            return "rejected: unknown_writer"
        if record.epoch < writer.epoch:
            return "rejected: zombie"
        if writer.retired:
            return "rejected: conflict"
        return "applied" if self._settle(writer, abs(record.prev), abs(record.id), SKIPPED) else "duplicate"

    def _end(self, writer: Incarnated, id: int, how: str) -> None:
        self._settle(writer, 0, id, how)
        writer.retired = True

    def _settle(self, writer: Incarnated, prev: int, id: int, how: str) -> bool:
        """Settle what is open in `(prev, id]`; whether anything was."""
        open_ = [at for at in range(prev + 1, id + 1) if at not in writer.settled]
        for at in open_:
            writer.settled[at] = UNSEEN if how == EMPTY and at <= writer.refused else how
            if at <= writer.published:
                writer.settled[at] = BARE
            if writer.settled[at] == EMPTY:
                writer.denied.add(at)
            if how == SKIPPED:
                writer.late.setdefault(at, "skipped")
        return bool(open_)


def _denied(kind: str, prev: int, id: int) -> set[int]:
    """Where an edge says that its writer has no fact: of its whole range only its own ID may be one."""
    return {*range(prev + 1, id + (kind != "RDATA"))}


def _told(record: Record) -> int | None:
    return None if record.control else record.published


def _how(record: Record) -> str:
    if record.control:
        return SKIPPED
    return UNSEEN if record.unseen else EMPTY
