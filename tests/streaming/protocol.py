"""Writers that keep docs/design.md 3 and 4 against one sequence: what they send, and what their database holds."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.streaming.builders import Record, join, position, rdata, retire, void
from tidemark.streaming.wire.records import DatabaseStart


@dataclass
class Transaction:
    """Reserved `id`; `prev` is what its writer had reserved or announced before."""

    prev: int
    id: int


@dataclass
class Process:
    """One writer's process; `outbox` holds committed facts that were not sent. Where a relay tells of it, `edges` are
    what it completed beyond `joined`.
    """

    name: str
    epoch: int = 0
    last: int = 0
    alive: bool = False
    open: list[Transaction] = field(default_factory=list)
    outbox: list[Record] = field(default_factory=list)
    token: str | None = None
    edges: list[Record] = field(default_factory=list)
    joined: int = 0


class Database:
    """A sequence that goes up (or down: `sign` -1) and its writers. What is yielded was produced to Kafka, in order."""

    def __init__(self, sign: int, writers: tuple[str, ...]) -> None:
        self.sign = sign
        self.last_value = 0
        self.processes = {name: Process(name) for name in writers}
        self.facts: set[tuple[str, int]] = set()
        self.history = 1
        self.starts = 0
        self.token: str | None = None
        self.told = 0
        self.settled = 0

    def start(self, name: str, *, raised: bool = True) -> Iterator[Record]:
        """The fence: what was open is rolled back, the outbox is sent, then the JOIN. Not `raised`: in the epoch of the
        start before, as what keeps the epochs went back; no writer that keeps the contract does so.
        """
        process = self.processes[name]
        process.open.clear()
        process.epoch += raised
        self.starts += 1
        after, process.token = process.token, f"start {self.starts}"
        timeline = DatabaseStart(f"database/{self.history}", process.token, after)
        yield from process.outbox
        process.outbox.clear()
        process.last, process.alive = self.last_value, True
        yield join(name, self.sign * self.last_value, process.epoch, timeline=timeline)

    def relay_starts(self, back: int) -> Iterator[Record]:
        """One that tells of all writers, on a server that was down (docs/design.md 4b): what was open is void. It joins
        at a floor, `back` IDs below the lowest that is not told, and tells again what lies beyond.
        """
        self.starts += 1
        timeline = DatabaseStart("database", f"start {self.starts}", self.token)
        floor = max(0, self._end_all(self.last_value) - back)
        for process in self.processes.values():
            process.alive, process.epoch = True, process.epoch + 1
            process.joined = max([process.joined, *(abs(it.id) for it in process.edges if abs(it.id) <= floor)])
            process.edges = [it for it in process.edges if abs(it.id) > process.joined]
            process.last = max([process.joined, *(abs(it.id) for it in process.edges)])
            id, told = self.sign * process.joined, self.sign * self.told
            yield join(process.name, id, process.epoch, timeline=timeline, published=told)
        self.token, self.told, self.settled = timeline.start, self.last_value, self.last_value
        for process in self.processes.values():
            yield from (replace(it, epoch=process.epoch) for it in process.edges)

    def image_is_put_back(self, value: int) -> None:
        """A disk image of a server of which a relay tells: it looks like the server that it was."""
        self._end_all(value)
        self.last_value, self.told = value, min(self.told, value)
        for process in self.processes.values():
            process.edges = [it for it in process.edges if abs(it.id) <= value]
            process.joined, process.alive = min(process.joined, value), False

    def _end_all(self, value: int) -> int:
        """Of what is there up to `value` all that is open is void; gives up to where everything was told."""
        unsent = [abs(record.id) for it in self.processes.values() for record in it.outbox]
        unsent += [open_.id for it in self.processes.values() for open_ in it.open]
        self.settled = min([self.settled, value, *(id - 1 for id in unsent)])
        for process in self.processes.values():
            process.outbox.clear()
            for open_ in process.open:
                process.edges.append(void(process.name, self.sign * open_.prev, self.sign * open_.id))
            process.open.clear()
            process.edges.sort(key=lambda it: abs(it.id))
        return self.settled

    def reserve(self, name: str) -> None:
        process = self.processes[name]
        self.last_value += 1
        process.open.append(Transaction(process.last, self.last_value))
        process.last = self.last_value

    def commit(self, name: str, which: int) -> None:
        """The fact is in the outbox."""
        process, done = self._end(name, which)
        self.facts.add((name, done.id))
        process.outbox.append(rdata(name, self.sign * done.id, self.sign * done.prev, process.epoch))
        process.edges.append(process.outbox[-1])

    def send(self, name: str, which: int) -> Iterator[Record]:
        process = self.processes[name]
        yield process.outbox.pop(which % len(process.outbox))

    def roll_back(self, name: str, which: int) -> Iterator[Record]:
        process, done = self._end(name, which)
        process.edges.append(void(name, self.sign * done.prev, self.sign * done.id, process.epoch))
        yield process.edges[-1]

    def heartbeat(self, name: str) -> Iterator[Record]:
        process = self.processes[name]
        if process.last < self.last_value:
            process.edges.append(position(name, self.sign * process.last, self.sign * self.last_value, process.epoch))
            process.last = self.last_value
            yield process.edges[-1]

    def retire(self, name: str) -> Iterator[Record]:
        """Stops for good, once it has nothing open and nothing to send."""
        process = self.processes[name]
        process.alive = False
        yield retire(name, self.sign * process.last, process.epoch)

    def restore(self, value: int, *, told: bool) -> None:
        """From a backup: the sequence goes back, and with it all processes end. Epochs rise all the same.

        `told`: the server has a history of its own from here on, as after recovery to a point in time or a failover. A
        disk image that is put back tells nothing.
        """
        self.last_value = min(value, self.last_value)
        self.history += told
        self.facts = {(name, id) for name, id in self.facts if id <= self.last_value}
        for process in self.processes.values():
            process.alive = False
            process.open.clear()
            process.outbox.clear()

    def in_flight(self) -> set[tuple[str, int]]:
        """Reserved, and neither known to Kafka nor rolled back by a fence."""
        return {(it.name, open_.id) for it in self.processes.values() for open_ in it.open} | {
            (it.name, abs(record.id)) for it in self.processes.values() for record in it.outbox
        }

    def _end(self, name: str, which: int) -> tuple[Process, Transaction]:
        process = self.processes[name]
        return process, process.open.pop(which % len(process.open))
