"""What is true of a simulated stream, from full knowledge of it: the oracle against which positions are checked.

It knows every reservation, so it reads the definitions (docs/design.md 1 and 3) word by word and follows no chain of
edges. It shares no code with the state machine and is slow on purpose. Magnitudes only; the sign lives in the
simulator.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Known:
    """A writer: its open reservations, and the IDs that it completed, announced or joined at."""

    position: int = 0
    active: bool = True
    open: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)

    def settle(self) -> None:
        """The largest ID it told of with no open reservation at or below."""
        first_open = min(self.open, default=None)
        reached = {id_ for id_ in self.told if first_open is None or id_ < first_open}
        self.position = max(self.position, *reached, 0)
        self.told -= reached


class StreamTruth:
    """Told of everything in the order in which it goes to Kafka; asked at any time."""

    def __init__(self) -> None:
        self._writers: dict[str, _Known] = {}
        self._completed: set[int] = set()
        self._linear = 0

    def joined(self, writer: str, id_: int) -> None:
        """A new epoch: whatever the writer had open up to `id_` has ended."""
        known = self._writers.setdefault(writer, _Known())
        known.active = True
        known.open.clear()
        known.told.add(id_)
        self.settle()

    def retired(self, writer: str, id_: int) -> None:
        """As a JOIN at `id_`, and nothing will follow."""
        self.joined(writer, id_)
        self._writers[writer].active = False
        self.settle()

    def reserved(self, writer: str, id_: int) -> None:
        self._writers[writer].open.add(id_)

    def completed(self, writer: str, id_: int) -> None:
        """The fact `id_`, or that it was rolled back, went to Kafka."""
        known = self._writers[writer]
        known.open.remove(id_)
        known.told.add(id_)
        self._completed.add(id_)

    def announced(self, writer: str, id_: int) -> None:
        """A heartbeat: nothing of the writer's own up to `id_`, which may be another's and in flight."""
        self._writers[writer].told.add(id_)

    def positions(self) -> dict[str, int]:
        self.settle()
        return {name: known.position for name, known in self._writers.items()}

    def linear(self) -> int:
        self.settle()
        return self._linear

    def settle(self) -> None:
        """Bring the answers up to date and forget what they no longer need. Call it now and then: memory."""
        for known in self._writers.values():
            known.settle()
        active = [known.position for known in self._writers.values() if known.active]
        reached = [known.position for known in self._writers.values()]
        self._linear = max(self._linear, min(active) if active else max(reached, default=0))
        while self._linear + 1 in self._completed:
            self._linear += 1
        self._completed = {id_ for id_ in self._completed if id_ > self._linear}
