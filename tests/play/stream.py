"""One stream of the simulator and its writers: sequence, reservations, completions, announcements, epochs.

Every method that makes something happen returns the records to send, in their order, and tells the truth. Nothing is
random here and nothing has a clock: `tests.play.play` decides what happens when.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from tests.play.truth import StreamTruth
from tidemark.streaming.wire.records import Join, Position, Rdata, Record, Retire, Void, encode_row


class _Signature(TypedDict):
    stream: str
    writer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PlayReservation:
    """A transaction in flight with the ID `id`; the writer's reservation or announcement before it was `prev`.

    `rows` is what its fact will have; 0 means that it will roll back. Magnitudes.
    """

    prev: int
    id: int
    rows: int


class SimulatedStream:
    """`direction` is 1, or -1 for a stream whose IDs go down. `last` is what its sequence gave last (magnitude)."""

    def __init__(self, name: str, direction: int) -> None:
        self.name = name
        self.direction = direction
        self.last = 0
        self.truth = StreamTruth()
        self.writers: dict[str, SimulatedWriter] = {}

    def add(self, name: str, epoch: int) -> "SimulatedWriter":
        """A writer whose last epoch was `epoch`; it has yet to join."""
        writer = SimulatedWriter(self, name, epoch)
        self.writers[name] = writer
        return writer

    def next_id(self) -> int:
        self.last += 1
        return self.last

    def linear(self) -> int:
        return self.direction * self.truth.linear()

    def positions(self) -> dict[str, int]:
        return {name: self.direction * position for name, position in self.truth.positions().items()}


class SimulatedWriter:
    """A writer of one stream. It is *running*, or *down* (crashed), or *retired*; it starts as down."""

    def __init__(self, stream: SimulatedStream, name: str, epoch: int) -> None:
        self.stream = stream
        self.name = name
        self.epoch = epoch
        self.running = False
        self.retired = False
        self.open: dict[int, PlayReservation] = {}
        self._told = 0  # the last ID reserved or announced: the `prev` of what comes next

    def join(self) -> list[Record]:
        """Begin the next epoch: what the one before left open is void."""
        self.epoch += 1
        self.running, self.retired = True, False
        self.open.clear()
        self._told = self.stream.last
        self.stream.truth.joined(self.name, self._told)
        return [Join(**self._signature(), id=self._signed(self._told))]

    def reserve(self, rows: int) -> PlayReservation:
        reservation = PlayReservation(self._told, self.stream.next_id(), rows)
        self._told = reservation.id
        self.open[reservation.id] = reservation
        self.stream.truth.reserved(self.name, reservation.id)
        return reservation

    def complete(self, reservation: PlayReservation) -> list[Record]:
        """Commit or roll back, and tell. All rows but the last of a fact go without its number."""
        del self.open[reservation.id]
        self.stream.truth.completed(self.name, reservation.id)
        return self.records(reservation)

    def records(self, reservation: PlayReservation) -> list[Record]:
        """What tells that `reservation` completed: the same each time, so that it may be sent again."""
        prev, id_ = self._signed(reservation.prev), self._signed(reservation.id)
        if reservation.rows == 0:
            return [Void(**self._signature(), prev=prev, id=id_)]
        batch = [
            Rdata(**self._signature(), id="batch", row=encode_row({"part": part}))
            for part in range(1, reservation.rows)
        ]
        return [*batch, Rdata(**self._signature(), prev=prev, id=id_, row=encode_row({"part": reservation.rows}))]

    def heartbeat(self) -> list[Record]:
        """Announce what the sequence gave last, if that is news: whoever owns it, nothing in between is ours."""
        if self._told == self.stream.last:
            return []
        prev, self._told = self._told, self.stream.last
        self.stream.truth.announced(self.name, self._told)
        return [Position(**self._signature(), prev=self._signed(prev), id=self._signed(self._told))]

    def crash(self) -> None:
        """Say nothing more. What is open stays so until the next epoch tells."""
        self.running = False

    def restart(self, committed: Iterable[PlayReservation]) -> list[Record]:
        """Come back: send what the old epoch had committed and not told, then join (docs/design.md 4)."""
        leftovers = [record for reservation in committed for record in self.complete(reservation)]
        return leftovers + self.join()

    def retire(self) -> list[Record]:
        """Leave for good. What is still open was rolled back; nobody tells, because RETIRE says so."""
        self.running, self.retired = False, True
        self.open.clear()
        self._told = self.stream.last
        self.stream.truth.retired(self.name, self._told)
        return [Retire(**self._signature(), id=self._signed(self._told))]

    def _signature(self) -> _Signature:
        return {"stream": self.stream.name, "writer": self.name, "epoch": self.epoch}

    def _signed(self, id_: int) -> int:
        return self.stream.direction * id_
