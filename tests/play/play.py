"""How the writers of one stream behave: chance and time. What an act does to stream and truth is in `stream`."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from random import Random
from typing import NamedTuple

from tests.play.agenda import Action, Agenda
from tests.play.cast import Habits
from tests.play.stream import PlayReservation, SimulatedStream, SimulatedWriter
from tidemark.streaming.wire.records import Record

HEARTBEAT_SECONDS = 1.0


class Held(NamedTuple):
    """A transaction that hangs: `id` is signed; `since` and `until` are seconds of the play."""

    stream: str
    writer: str
    id: int
    since: float
    until: float


class StreamPlay:
    """Plans its own acts on the agenda. `refused` counts the `duplicate` and `zombie` records among them."""

    def __init__(self, stream: SimulatedStream, habits: Habits, agenda: Agenda, random: Random) -> None:
        self.stream = stream
        self.refused: Counter[str] = Counter()
        self._habits = habits
        self._agenda = agenda
        self._random = random
        self._wanted = 0
        self._idle: set[str] = set()
        self._hang_next = False
        self._held: dict[int, Held] = {}

    def open(self, wanted: Collection[str]) -> list[Record]:
        """Everybody joins who is wanted."""
        self._wanted = len(wanted)
        records = [record for name in wanted for record in self.stream.add(name, epoch=0).join()]
        if wanted:
            self._agenda.plan(self._random.uniform(0, HEARTBEAT_SECONDS), self._beat)
            self._plan_recurring(self._habits.stuck_every, self._hang)
            self._plan_recurring(self._habits.idle_every, self._rest)
            self._plan_recurring(self._habits.crash_every, self._crash)
            self._plan_recurring(self._habits.turnover_every, self._turn_over)
        return records

    def reserve(self, now: float) -> None:
        """Some writer that is neither down nor idle begins a transaction."""
        busy = [writer for writer in self._running() if writer.name not in self._idle]
        if not busy:
            return
        writer = self._random.choice(busy)
        reservation = writer.reserve(self._rows())
        if self._hang_next:
            self._hang_next = False
            end = now + self._random.uniform(*self._habits.stuck_for)
            signed = self.stream.direction * reservation.id
            self._held[reservation.id] = Held(self.stream.name, writer.name, signed, now, end)
        else:
            end = now + self._random.expovariate(1 / self._habits.duration)
        self._agenda.plan(end, partial(self._end, writer, writer.epoch, reservation))

    def held(self) -> Iterable[Held]:
        """The transactions that hang; those of a crashed writer until its next epoch settles them."""
        self._held = {id_: held for id_, held in self._held.items() if id_ in self.stream.writers[held.writer].open}
        return self._held.values()

    def close(self, leaving: Collection[int]) -> list[Record]:
        """The crashed come back; all complete but the IDs of `leaving` (signed); then all announce the last ID."""
        records: list[Record] = []
        for writer in self.down():
            records += self._restart(writer, 0.0)
        for writer in self._running():
            for reservation in list(writer.open.values()):
                if self.stream.direction * reservation.id not in leaving:
                    records += writer.complete(reservation)
            records += writer.heartbeat()
        return records

    def down(self) -> list[SimulatedWriter]:
        return [writer for writer in self.stream.writers.values() if not (writer.running or writer.retired)]

    def _running(self) -> list[SimulatedWriter]:
        return [writer for writer in self.stream.writers.values() if writer.running]

    def _rows(self) -> int:
        if self._random.random() < self._habits.rollback:
            return 0
        return self._random.randint(2, 4) if self._random.random() < self._habits.several_rows else 1

    def _end(self, writer: SimulatedWriter, epoch: int, reservation: PlayReservation, now: float) -> list[Record]:
        if not writer.running or writer.epoch != epoch:
            return []  # the process that held it died
        if self._random.random() < self._habits.sent_twice:
            self._agenda.plan(now + self._random.uniform(0, 2), partial(self._repeat, writer, epoch, reservation))
        return writer.complete(reservation)

    def _repeat(self, writer: SimulatedWriter, epoch: int, reservation: PlayReservation, _: float) -> list[Record]:
        if not writer.running or writer.epoch != epoch:
            return []
        self.refused["duplicate"] += 1
        return writer.records(reservation)[-1:]  # the rows before the last carry no number: they would count anew

    def _beat(self, now: float) -> list[Record]:
        self._agenda.plan(now + HEARTBEAT_SECONDS, self._beat)
        self.stream.truth.settle()
        return [record for writer in self._running() for record in writer.heartbeat()]

    def _hang(self, _: float) -> list[Record]:
        self._hang_next = True
        return []

    def _rest(self, now: float) -> list[Record]:
        if running := self._running():
            name = self._random.choice(running).name
            self._idle.add(name)
            self._agenda.plan(now + self._random.uniform(*self._habits.idle_for), partial(self._wake, name))
        return []

    def _wake(self, name: str, _: float) -> list[Record]:
        self._idle.discard(name)
        return []

    def _crash(self, now: float) -> list[Record]:
        if running := self._running():
            writer = self._random.choice(running)
            writer.crash()
            self._agenda.plan(now + self._random.uniform(*self._habits.down_for), partial(self._restart, writer))
        return []

    def _restart(self, writer: SimulatedWriter, now: float) -> list[Record]:
        committed: list[PlayReservation] = []
        void: list[PlayReservation] = []
        for reservation in writer.open.values():
            (committed if self._random.random() < self._habits.committed_untold else void).append(reservation)
        if void and self._random.random() < self._habits.zombie:
            late = writer.records(self._random.choice(void))
            self._agenda.plan(now + self._random.uniform(0, 1), partial(self._haunt, late))
        self._random.shuffle(committed)
        return writer.restart(committed)

    def _haunt(self, records: list[Record], _: float) -> list[Record]:
        self.refused["zombie"] += len(records)
        return records

    def _turn_over(self, _: float) -> list[Record]:
        present = sum(not writer.retired for writer in self.stream.writers.values())
        if present < self._wanted or (present == self._wanted and self._random.random() < 0.5):
            return self._newcomer().join()
        running = self._running()
        return self._random.choice(running).retire() if running else []

    def _newcomer(self) -> SimulatedWriter:
        """A new name, or one that retired: names stay few however long the play is."""
        retired = [writer for writer in self.stream.writers.values() if writer.retired]
        if retired and (len(self.stream.writers) >= 2 * self._wanted or self._random.random() < 0.5):
            return self._random.choice(retired)
        names = (f"writer-{number}" for number in range(1, len(self.stream.writers) + 2))
        return self.stream.add(next(name for name in names if name not in self.stream.writers), epoch=0)

    def _plan_recurring(self, every: float, act: Action) -> None:
        if math.isfinite(every):
            first = self._random.expovariate(1 / every)
            self._agenda.plan(first, partial(self._recur, every, act))

    def _recur(self, every: float, act: Action, now: float) -> list[Record]:
        self._agenda.plan(now + self._random.expovariate(1 / every), partial(self._recur, every, act))
        return act(now)
