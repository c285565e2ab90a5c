"""Every way through a small world, with what must hold at each step of it (docs/design.md 2 and 3).

The state machine is fed what the world produces, record by record. Two ways to the same world and the same bytes of
state are one from there on, so all interleavings are gone through at the price of the states that they lead to.
"""

from collections import deque
from dataclasses import dataclass, field

from tests.streaming.builders import Record
from tests.streaming.judged import Broken, Core, Fed, Look, Totals
from tests.streaming.small_world import Size, World, beginning, steps

Place = tuple[int, bytes]
"""A world by its number, and what the state machine has made of its records."""


class Worlds:
    """Each world that was met, by number, with the steps from there: many ways lead to it, and few worlds are equal to
    their neighbours only after a long comparison.
    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self.known: list[World] = []
        self._numbers: dict[World, int] = {}
        self._steps: dict[int, list[tuple[int, int | None]]] = {}
        self.records: list[Record] = []
        self._record_numbers: dict[Record, int] = {}

    def number(self, world: World) -> int:
        found = self._numbers.setdefault(world, len(self.known))
        if found == len(self.known):
            self.known.append(world)
        return found

    def steps(self, number: int) -> list[tuple[int, int | None]]:
        """The worlds that may follow, and the record that leads there."""
        found = self._steps.get(number)
        if found is None:
            found = self._steps[number] = [
                (self.number(after), None if record is None else self._record(record))
                for after, record in steps(self.known[number], self._size)
            ]
        return found

    def _record(self, record: Record) -> int:
        found = self._record_numbers.setdefault(record, len(self.records))
        if found == len(self.records):
            self.records.append(record)
        return found


@dataclass
class Exploration:
    """Breadth first, so that what breaks is broken by the fewest steps."""

    size: Size
    core: Core = field(default_factory=Core)
    came_from: dict[Place, tuple[Place, int | None] | None] = field(default_factory=dict)
    ways: dict[bytes, tuple[bytes, Record]] = field(default_factory=dict)
    worlds: Worlds = field(init=False)
    _led: dict[tuple[bytes, int], bytes | None] = field(default_factory=dict, init=False)
    _passed: set[tuple[int, int, int]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.worlds = Worlds(self.size)

    def run(self) -> None:
        first = self.worlds.number(beginning(self.size)), b""
        self.came_from[first] = None
        queue = deque([first])
        quiet: dict[int, bool] = {}
        while queue:
            place = queue.popleft()
            number, core = place
            if number not in quiet:
                world = self.worlds.known[number]
                quiet[number] = world.quiet and (self.size.told or world.history == 1)
            if core and quiet[number]:
                self._end(place)
            for after, record in self.worlds.steps(number):
                led = core if record is None else self._take(place, after, record)
                if led is None:
                    continue
                there = after, led
                if there not in self.came_from:
                    self.came_from[there] = place, record
                    queue.append(there)

    def _take(self, place: Place, after: int, number: int) -> bytes | None:
        """Feed one record, that the world `after` has just produced; None for an operator's that is refused. Raises
        Broken.
        """
        core = place[1]
        fed, step = None, (core, number)
        if step in self._led:
            there = self._led[step]
        else:
            record = self.worlds.records[number]
            fed = self.core.batch(core, (record,))
            there = self._led[step] = None if record.control and fed.rejected else fed.core
        if there is None:
            return None
        moved = after, self.core.briefs[core], self.core.briefs[there]
        if fed is not None or moved not in self._passed:
            self._look(place, after, number, there, fed)
            self._passed.add(moved)
        return there

    def _look(self, place: Place, after: int, number: int, there: bytes, fed: Fed | None) -> None:
        world, record, core = self.worlds.known[after], self.worlds.records[number], place[1]
        heard = self.worlds.known[place[0]].heard
        look = Look(self.size, world, heard, record, self.core.standings[core], self.core.standings[there])
        try:
            look.passes_nothing_open()
            if fed is not None:  # what the record does, and may do, is the same in all worlds that produce it here
                look.check(fed)
                self.core.fed[core, record] = there
                self.ways.setdefault(there, (core, record))
        except Broken as broken:
            raise Broken(f"{broken}\n{self.story(place)}\n{record}") from None

    def _end(self, place: Place) -> None:
        """Where nothing is in flight, nothing is held: a chain is where its writer is, and the line where all are."""
        world, core = self.worlds.known[place[0]], place[1]
        stands = self.core.standings[core]
        active = {name: it.last for name, it in world.running() if not it.retired}
        if any(high > it.last for _, it in world.running() for _, high in it.signed):
            return
        for name, last in active.items():
            if stands.chains[name] != last or stands.spans[name]:
                raise Broken(f"{name} has completed all up to {last}, and not so {stands}\n{self.story(place)}")
        if active and stands.linear < min(active.values()):
            raise Broken(f"all is complete up to {min(active.values())}, and not so {stands}\n{self.story(place)}")

    def cuts(self, *, edges: bool) -> int:
        """Every cut of a shortest log that leads to each state; with `edges` also of each that ends in another record.

        A batch of any length, from any place of the log, must do what its records do one by one. Gives how many there
        were; raises Broken.
        """
        totals: dict[tuple[bytes, Record], Totals] = {}
        lasts = self.core.fed if edges else self.ways.values()
        return sum(self._cut(core, record, totals) for core, record in lasts)

    def _cut(self, core: bytes, record: Record, known: dict[tuple[bytes, Record], Totals]) -> int:
        one_by_one = self.core.batch(core, (record,))
        records: tuple[Record, ...] = (record,)
        totals, batches = one_by_one.totals, 0
        known[core, record] = totals
        while core:
            step = self.ways[core]
            if step not in known:
                known[step] = self.core.batch(step[0], (step[1],)).totals
            totals = totals + known[step]
            core, records, batches = step[0], (step[1], *records), batches + 1
            whole = self.core.batch(core, records)
            if (whole.core, whole.totals) != (one_by_one.core, totals):
                told = "\n".join(map(str, records))
                raise Broken(
                    f"one batch gives {whole.totals}, {whole.core!r} and not {totals}, {one_by_one.core!r}\n{told}"
                )
        return batches

    def story(self, place: Place) -> str:
        """How it came to that place."""
        told: list[str] = []
        while (before := self.came_from[place]) is not None:
            told.append(str(self.worlds.known[place[0]] if before[1] is None else self.worlds.records[before[1]]))
            place = before[0]
        return "\n".join(reversed(told))
