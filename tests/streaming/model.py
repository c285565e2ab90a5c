"""A stream by brute force, from docs/design.md 1 to 3 and not from the code: keeps every ID, recomputes everything.

Records are fed one by one. Nothing here is quick, bounded, or an interval.
"""

from collections import Counter
from dataclasses import dataclass, field

from tests.streaming.builders import Record

# How an ID was settled. BARE: it lies strictly inside somebody's edge, so it is another writer's, or nobody's.
FACTS, EMPTY, UNSEEN, SKIPPED, BARE = "facts", "empty", "unseen", "skipped", "bare"

Settled = dict[int, str]


@dataclass
class Incarnated:
    """What is known of a writer, or of an incarnation that has not joined: each settled ID, and how.

    `late` says why a completion of that ID comes too late; `refused` is the highest ID that was turned away although
    it may be true. `denied` are IDs that the writer declared to be empty. `blurred` is set once a settled range was
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
    floor: int | None = None
    again: set[int] = field(default_factory=set)

    @property
    def passed(self) -> int:
        """All IDs up to here are complete; after the source went back, those included that came again since."""
        if self.floor is None:
            return self.position
        at = self.floor
        while at + 1 in self.again:
            at += 1
        if all(late <= at for late, why in self.late.items() if why == "regressed"):
            self.floor = None
            return self.position
        return at

    def come_again(self, prev: int, id: int) -> None:
        """An edge of the epoch that goes through IDs again; one that contradicts an earlier one counts for nothing."""
        ids = range(prev + 1, id + 1)
        if self.floor is not None and prev >= self.floor and not any(at in self.again for at in ids):
            self.again.update(ids)

    def skip_again(self, prev: int, id: int) -> bool:
        """Whether anything that is awaited again lies there; it is no longer."""
        low = prev if self.floor is None else max(prev, self.passed)
        awaited = set(range(low + 1, id + 1)) - self.again if self.floor is not None else set()
        self.again |= awaited
        return bool(awaited)

    @property
    def position(self) -> int:
        at = 0
        while at + 1 in self.settled:
            at += 1
        return at

    def evidence(self, prev: int, id: int) -> Counter[str]:
        counts = Counter(self.settled[at] for at in range(prev + 1, id + 1))
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
            self.blurred |= 0 < there < id - prev
        self.settled = held.settled | self.settled
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
    line: int = 0
    writers: dict[str, Incarnated] = field(default_factory=dict)
    held: dict[tuple[str, int], Incarnated] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    late_facts: Counter[tuple[str, str]] = field(default_factory=Counter)
    regressed: list[tuple[str, int, int, int]] = field(default_factory=list)

    def feed(self, record: Record) -> str:
        """The record's outcome; a rejected one gives `rejected: <reason>`. IDs are magnitudes from here on."""
        outcome = self._take(record)
        self.line = self._linear()
        return outcome

    def positions(self) -> dict[str, int]:
        return {name: writer.position for name, writer in sorted(self.writers.items())}

    def _linear(self) -> int:
        """docs/design.md 3, word for word; never back, and not past what came before an unknown writer."""
        if self.held or not self.writers:
            return self.line
        positions = [writer.position for writer in self.writers.values()]
        active = [writer.passed for writer in self.writers.values() if not writer.retired]
        passed = min(active) if active else max(positions)
        at = 0
        while at + 1 <= self.line or at + 1 in self.done or at + 1 <= passed:
            at += 1
        return at

    def _take(self, record: Record) -> str:
        if not record.control:
            if self.home is None:
                self.home = record.partition
            if record.partition != self.home:
                return self._stray(record)
        sign = (record.id > 0) - (record.id < 0)
        if sign * self.direction < 0:
            return "rejected: mixed_sign"
        outcome = self._act(record)
        if sign and not outcome.startswith("rejected"):
            self.direction = sign
        return outcome

    def _stray(self, record: Record) -> str:
        """Another partition: no order against this one, so an incarnation that is not joined here holds the line."""
        key, writer = (record.writer, record.epoch), self.writers.get(record.writer)
        reach = abs(record.id) if record.kind in ("RDATA", "VOID", "POSITION") else 0
        if writer is not None and record.epoch == writer.epoch and not writer.retired:
            writer.refused = max(writer.refused, reach)
        elif writer is None or record.epoch >= writer.epoch:
            held = self.held.setdefault(key, Incarnated(record.epoch))
            held.refused = max(held.refused, reach)
        return "rejected: wrong_partition"

    def _act(self, record: Record) -> str:
        match record.kind:
            case "JOIN":
                return self._join(record)
            case "RETIRE":
                return self._retire(record)
            case "SKIP":
                return self._skip(record)
        writer = self.writers.get(record.writer)
        if writer is None and record.epoch == 0 and not self.writers and not self.held and self.line == 0:
            writer = self.writers[record.writer] = Incarnated(0)
        if writer is not None and record.epoch < writer.epoch:
            return "rejected: zombie"
        if record.kind == "ROW":
            if writer is None or record.epoch > writer.epoch:
                self._held(record)
            return "batch"
        prev, id = abs(record.prev), abs(record.id)
        if writer is None or record.epoch > writer.epoch or (writer.retired and id > writer.position):
            outcome = self._edge(self._held(record), record, prev, id)
            return {"applied": "held", "final": "late", "denied": "late"}.get(outcome, outcome)
        return self._edge_of(writer, record, prev, id)

    def _held(self, record: Record) -> Incarnated:
        return self.held.setdefault((record.writer, record.epoch), Incarnated(record.epoch))

    # -- edges

    def _edge(self, writer: Incarnated, record: Record, prev: int, id: int) -> str:
        """Edges tile: all of it open, or all of it there, or a conflict.

        `final`: it was open, and yet the line or another writer has its ID. `denied`: a fact where its writer had
        declared that there is none.
        """
        kind = record.kind
        covered = [at in writer.settled for at in range(prev + 1, id + 1)]
        if all(covered):
            if kind != "RDATA" or id not in writer.denied:
                return "duplicate"
            writer.denied.discard(id)
            self.done.add(id)
            self.late_facts[record.writer, "announced"] += 1
            return "denied"
        if any(covered):
            writer.refused = max(writer.refused, id)
            return "rejected: conflict"
        for at in range(prev + 1, id + 1):
            writer.settled[at] = EMPTY if kind == "POSITION" else BARE
        if kind == "POSITION":
            writer.denied |= set(range(prev + 1, id + 1))
            return "applied"
        writer.settled[id] = FACTS if kind == "RDATA" else EMPTY
        if kind == "VOID":
            writer.denied.add(id)
        if id in self.done or id <= self.line:
            self.late_facts[record.writer, "final"] += kind == "RDATA"
            return "final"
        self.done.add(id)
        return "applied"

    def _edge_of(self, writer: Incarnated, record: Record, prev: int, id: int) -> str:
        writer.come_again(prev, id)
        late = [at for at in range(prev + 1, id + 1) if at in writer.late]
        if not late:
            outcome = self._edge(writer, record, prev, id)
            return "late" if outcome in ("final", "denied") else outcome
        if id in writer.late:
            outcome = "duplicate"
            if record.kind != "POSITION":
                outcome = "late"
                self.done.add(id)
                if record.kind == "RDATA":
                    self.late_facts[record.writer, writer.late[id]] += 1
        else:
            outcome = self._edge(writer, record, max(late), id)
            if outcome not in ("applied", "final"):
                return "late" if outcome == "denied" else outcome
        for at in range(prev + 1, id + 1):
            writer.settled.setdefault(at, BARE)
        return "late" if outcome == "final" else outcome

    # -- markers

    def _join(self, record: Record) -> str:
        id, writer = abs(record.id), self.writers.get(record.writer)
        if writer is not None and record.epoch < writer.epoch:
            return "rejected: zombie"
        if writer is not None and record.epoch == writer.epoch:
            return "duplicate" if id <= writer.position else "rejected: conflict"
        writer, retire = self._begin(record)
        if retire is not None and max(writer.settled, default=0) <= max(retire, writer.position):
            self._end(writer, retire, "empty")
        return "applied"

    def _begin(self, record: Record) -> tuple[Incarnated, int | None]:
        id, name = abs(record.id), record.writer
        writer = self.writers.setdefault(name, Incarnated(record.epoch))
        position, retire, early = writer.position, None, None
        back = self._take_back(writer, name, max(id, position), max(writer.settled, default=0))
        for key in sorted(self.held):
            if key[0] == name and key[1] <= record.epoch:
                held = self.held.pop(key)
                if key[1] < record.epoch:
                    back |= self._take_back(held, name, id, max(held.settled, default=0))
                else:
                    retire, early = held.retire, set(held.settled)
                    gone = Incarnated(0, dict(held.settled))
                    self._take_back(gone, name, id, position)
                    writer.blurred |= gone.blurred
                writer.adopt(held)
        writer.denied |= {at for at in writer.late if at <= id}
        writer.epoch, writer.retired = record.epoch, False
        writer.late = dict.fromkeys(range(id + 1, position + 1), "regressed")
        writer.floor, writer.again = (id if id < position else None), set()
        if early is not None:
            writer.again = {at for at in early if at > id}
        if back or id < position:
            self.regressed.append((name, record.epoch, id, position))
            self.done = {at for at in self.done if at <= id}
        self._settle(writer, 0, id, _how(record))
        return writer, retire

    def _take_back(self, writer: Incarnated, name: str, low: int, high: int) -> bool:
        """Unsettle `(low, high]`, whose facts are late; whether anything was there."""
        gone = [at for at in range(low + 1, high + 1) if at in writer.settled]
        if gone:
            writer.blurred |= any(prev < cut < id for prev, id in writer.ranges() for cut in (low, high))
        self.late_facts[name, "regressed"] += sum(writer.settled.pop(at) == FACTS for at in gone)
        writer.denied -= set(gone)
        return bool(gone)

    def _retire(self, record: Record) -> str:
        id, key = abs(record.id), (record.writer, record.epoch)
        writer, held = self.writers.get(record.writer), self.held.get(key)
        if writer is not None and record.epoch < writer.epoch:
            return "rejected: zombie"
        if record.control and held is not None and max(held.settled, default=0) > id:
            return "rejected: conflict"
        if not record.control and (writer is None or record.epoch > writer.epoch):
            return self._retire_held(record)
        if writer is None:
            writer, _ = self._begin(record)
        elif record.epoch > writer.epoch:
            return self._throw_out(record)
        elif writer.retired and record.control and held is not None:
            writer.adopt(self.held.pop(key))
        elif writer.retired:
            return "duplicate" if id <= writer.position else "rejected: conflict"
        elif max(writer.settled, default=0) > max(id, writer.position):
            return "rejected: conflict"
        self._end(writer, id, _how(record))
        return "applied"

    def _throw_out(self, record: Record) -> str:
        held = self.held.pop((record.writer, record.epoch), None)
        if held is None:
            return "rejected: unknown_writer"
        self.late_facts[record.writer, "skipped"] += sum(how == FACTS for how in held.settled.values())
        return "applied"

    def _retire_held(self, record: Record) -> str:
        held = self._held(record)
        if held.retire is not None:
            return "duplicate" if held.retire == abs(record.id) else "rejected: conflict"
        held.retire = abs(record.id)
        return "held"

    def _skip(self, record: Record) -> str:
        writer = self.writers.get(record.writer)
        if writer is None or record.epoch > writer.epoch:
            return "rejected: unknown_writer"
        if record.epoch < writer.epoch:
            return "rejected: zombie"
        if writer.retired:
            return "rejected: conflict"
        again = writer.skip_again(abs(record.prev), abs(record.id))
        return "applied" if self._settle(writer, abs(record.prev), abs(record.id), SKIPPED) or again else "duplicate"

    def _end(self, writer: Incarnated, id: int, how: str) -> None:
        self._settle(writer, 0, id, how)
        writer.retired, writer.floor = True, None

    def _settle(self, writer: Incarnated, prev: int, id: int, how: str) -> bool:
        """Settle what is open in `(prev, id]`; whether anything was."""
        open_ = [at for at in range(prev + 1, id + 1) if at not in writer.settled]
        for at in open_:
            writer.settled[at] = UNSEEN if how == EMPTY and at <= writer.refused else how
            if writer.settled[at] == EMPTY:
                writer.denied.add(at)
            if how == SKIPPED:
                writer.late[at] = "skipped"
        return bool(open_)


def _how(record: Record) -> str:
    if record.control:
        return SKIPPED
    return UNSEEN if record.unseen else EMPTY
