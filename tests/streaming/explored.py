"""Every way through a small world, with what must hold at each step of it (docs/design.md 2 and 3).

The state machine is fed what the world produces, record by record. Two ways to the same world and the same bytes of
state are one from there on, so all interleavings are gone through at the price of the states that they lead to.
"""

from collections import deque
from dataclasses import dataclass, field

from tests.streaming.builders import Record
from tests.streaming.judged import Broken, Core, Look, Totals
from tests.streaming.small_world import Size, World, beginning, steps

Place = tuple[World, bytes]
"""A world, and what the state machine has made of its records."""


@dataclass
class Exploration:
    """Breadth first, so that what breaks is broken by the fewest steps."""

    size: Size
    core: Core = field(default_factory=Core)
    came_from: dict[Place, tuple[Place, Record | None] | None] = field(default_factory=dict)
    ways: dict[bytes, tuple[bytes, Record]] = field(default_factory=dict)

    def run(self) -> None:
        first = beginning(self.size), b""
        self.came_from[first] = None
        queue = deque([first])
        while queue:
            place = queue.popleft()
            world, core = place
            if world.quiet and core and (self.size.told or world.history == 1):
                self._end(place)
            for after, record in steps(world, self.size):
                if record is not None and record.control and self._is_refused(core, record):
                    continue
                there = after, core if record is None else self._take(place, after, record)
                if there not in self.came_from:
                    self.came_from[there] = place, record
                    queue.append(there)

    def _is_refused(self, core: bytes, act: Record) -> bool:
        """An operator's act that cannot be is told, and nothing happens."""
        return (core, act) not in self.core.fed and bool(self.core.batch(core, (act,)).rejected)

    def _take(self, place: Place, world: World, record: Record) -> bytes:
        """Feed one record, that `world` has just produced. Raises Broken."""
        core = place[1]
        step = core, record
        fed, there = None, self.core.fed.get(step)
        if there is None:
            fed = self.core.batch(core, (record,))
            there = self.core.fed[step] = fed.core
        look = Look(self.size, world, place[0].heard, record, self.core.standings[core], self.core.standings[there])
        try:
            look.passes_nothing_open()
            if fed is not None:  # what the record does, and may do, is the same in all worlds that produce it here
                look.check(fed)
                self.ways.setdefault(there, step)
        except Broken as broken:
            raise Broken(f"{broken}\n{self.story(place)}\n{record}") from None
        return there

    def _end(self, place: Place) -> None:
        """Where nothing is in flight, nothing is held: a chain is where its writer is, and the line where all are."""
        world, core = place
        stands = self.core.standings[core]
        active = {name: it.last for name, it in world.running() if not it.retired}
        if any(high > it.last for _, it in world.running() for _, high in it.signed):
            return
        for name, last in active.items():
            if stands.chains[name] != last or stands.spans[name]:
                raise Broken(f"{name} has completed all up to {last}, and not so {stands}\n{self.story(place)}")
        if active and stands.line < min(active.values()):
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
            told.append(str(before[1] or place[0]))
            place = before[0]
        return "\n".join(reversed(told))
