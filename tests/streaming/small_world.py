"""A world small enough to be gone through whole: two writers, one sequence, and what may happen to them, one step at
a time. The truth that the state machine knows only by its records.

Writers keep docs/design.md 3 and 4 here, but for the one clause that a `Size` may break. Worlds are immutable and can
be compared, so that two ways to the same world are one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.streaming.builders import Record
from tidemark.streaming.wire.records import CURRENT_EPOCH, DatabaseStart

WRITERS = ("a", "b")

Clause = Literal[
    "epochs rise over a restore",
    "a JOIN stands before what its writer reserves",
    "what was committed is acknowledged before the JOIN",
    "an announcement is read while no reservation is out",
    "who lost its database joins again",
    "a void is named only where nothing was committed",
    "an edge leaves out no ID of its own writer",
]
"""What a writer promises (docs/design.md 4)."""


@dataclass(frozen=True)
class Size:
    """How much may happen: IDs and announcements of each writer; the rest in the whole world.

    `acts`: how often an operator skips a range of a writer, or takes back what was skipped. `under_way`: whether a
    record of a database that was set back may still be on its way to Kafka. `told`: a database
    that went back has another history by name, as a Postgres that was restored or promoted; else it is a disk image.
    `broken` is the clause that writers do not keep.
    """

    ids: int
    beats: int = 1
    rollbacks: int = 1
    restarts: int = 1
    set_backs: int = 1
    retirements: int = 0
    acts: int = 0
    under_way: bool = True
    told: bool = True
    broken: Clause | None = None


class Process(NamedTuple):
    """A writer. `epoch` 0: not started yet. `history` is the database's at its last start.

    `open` holds what it reserved and has not completed as `(prev, id)`; `joining` what its start read as allocated,
    until the JOIN is sent. `token` is what its last start left in the database, `after` what that start found there.
    `signed` are the ranges that an operator settled, until its next JOIN or until somebody takes them back.
    """

    left: int
    beats: int
    epoch: int = 0
    history: int = 1
    last: int = 0
    open: tuple[tuple[int, int], ...] = ()
    joining: int | None = None
    token: int = 0
    after: int = 0
    retired: bool = False
    signed: tuple[tuple[int, int], ...] = ()

    def is_signed(self, id: int) -> bool:
        return any(prev < id <= high for prev, high in self.signed)


class World(NamedTuple):
    """`head` is what the sequence has allocated, `lost` what it had before it was set back.

    `fresh`: nothing has happened yet that depends on what was last reserved. Until something does, nothing else need
    happen: it might as well have happened before. So of steps that may change places one order is enough. `heard` is
    the history of the newest JOIN.
    """

    processes: tuple[Process, ...]
    rollbacks: int
    restarts: int
    set_backs: int
    retirements: int
    acts: int
    head: int = 0
    history: int = 1
    lost: int = 0
    fresh: bool = False
    heard: int = 0

    def has_gone_back_behind(self, process: Process) -> bool:
        """Its database was set back, and it has not started again since."""
        return process.epoch > 0 and process.history < self.history

    def in_flight(self) -> Iterator[tuple[str, int]]:
        """Writer and ID of all that is reserved and not completed, in the history that counts."""
        for name, process in zip(WRITERS, self.processes, strict=True):
            if process.history == self.history:
                for _, id in process.open:
                    yield name, id

    def running(self) -> Iterator[tuple[str, Process]]:
        """Who has started once, with its name."""
        return ((name, it) for name, it in zip(WRITERS, self.processes, strict=True) if it.epoch)

    @property
    def heard_of(self) -> int:
        """What may be spoken of: until somebody has joined in a new history, the records are of the old one."""
        return self.head if self.heard == self.history else max(self.head, self.lost)

    @property
    def quiet(self) -> bool:
        """Everybody runs, and nothing is in flight."""
        return not any(
            it.open or it.joining is not None or it.epoch == 0 or it.history < self.history for it in self.processes
        )

    def may_be_passed(self, id: int) -> bool:
        """Whether every writer that the line waits for was skipped there; where all have retired, one of them."""
        joined = [it for _, it in self.running() if it.epoch > 1 or it.joining is None]
        here = [it for it in joined if not self.has_gone_back_behind(it)]
        active = [it.is_signed(id) for it in here if not it.retired]
        return all(active) if active else any(it.is_signed(id) for it in here)

    def _with(self, at: int, process: Process, *, fresh: bool = False) -> "World":
        return self._replace(fresh=fresh, processes=(*self.processes[:at], process, *self.processes[at + 1 :]))


Step = tuple[World, Record | None]
"""What is afterwards, and what was produced to Kafka."""


def beginning(size: Size) -> World:
    return World(
        (Process(size.ids, size.beats),) * len(WRITERS),
        size.rollbacks,
        size.restarts,
        size.set_backs,
        size.retirements,
        size.acts,
    )


def steps(world: World, size: Size) -> Iterator[Step]:
    """Everything that may happen next, but for what might have happened before as well."""
    for at, process in enumerate(world.processes):
        if process.retired:
            continue
        yield from _is_operated(world, at, process, size)
        if process.joining is not None:
            if not world.fresh:
                yield _joins(world, at, process, size)
            if size.broken != "a JOIN stands before what its writer reserves":
                continue
        yield from _starts(world, at, process, size)
        if not process.epoch:
            continue
        if not world.has_gone_back_behind(process):
            yield from _reserves(world, at, process, size)
        yield from _completes(world, at, process, size)
        if process.joining is None:
            yield from _announces(world, at, process)
            yield from _retires(world, at, process)
    if world.set_backs and world.heard:
        for head in range(world.head + 1):
            yield from _goes_back(world, head, size)


def _joins(world: World, at: int, process: Process, size: Size) -> Step:
    history = world.history if size.told else 1
    told = DatabaseStart(f"database/{history}", str(process.token), str(process.after) if process.after else None)
    joined = world._with(at, process._replace(joining=None, signed=()))._replace(heard=world.history)
    if world.heard < world.history:  # all go back with it
        joined = joined._replace(processes=tuple(it._replace(signed=()) for it in joined.processes))
    return joined, Record("JOIN", WRITERS[at], process.epoch, id=process.joining or 0, timeline=told)


def _starts(world: World, at: int, process: Process, size: Size) -> Iterator[Step]:
    """The fence: what was open has ended, the head is read. Then the JOIN, at once or after another reserved more."""
    if at and not world.processes[0].epoch:
        return  # the two are alike: a is the one that starts first
    again = world.has_gone_back_behind(process)
    if process.epoch and not again:
        if not world.restarts:
            return
        world = world._replace(restarts=world.restarts - 1)
    repeated = again and process.epoch > 1 and size.broken == "epochs rise over a restore"
    late = size.broken == "what was committed is acknowledged before the JOIN"
    started = process._replace(
        epoch=process.epoch if repeated else process.epoch + 1,
        history=world.history,
        last=world.head,
        open=process.open if late else (),
        joining=world.head,
        token=process.epoch + 1,
        after=process.token,
    )
    world = world._with(at, started)
    yield _joins(world, at, started, size)
    for other, it in enumerate(world.processes):
        if it.epoch and it.joining is None and not world.has_gone_back_behind(it):
            yield from _reserves(world, other, it, size)
        elif other == at and size.broken == "a JOIN stands before what its writer reserves":
            yield from _reserves(world, at, started, size)


def _reserves(world: World, at: int, process: Process, size: Size) -> Iterator[Step]:
    if not process.left:
        return
    id = world.head + 1
    reserved = process._replace(left=process.left - 1, last=id, open=(*process.open, (process.last, id)))
    record = None
    if size.broken == "an announcement is read while no reservation is out":
        record = Record("POSITION", WRITERS[at], process.epoch, process.last, id)
    yield world._replace(head=id)._with(at, reserved, fresh=record is None), record
    if size.broken == "an edge leaves out no ID of its own writer" and process.open:
        over = reserved._replace(open=(*process.open, (process.open[-1][0], id)))
        yield world._replace(head=id)._with(at, over, fresh=True), None


def _completes(world: World, at: int, process: Process, size: Size) -> Iterator[Step]:
    """In any order. Of a database that was set back since, this is what was under way to Kafka still."""
    for edge in process.open:
        if world.fresh and edge[1] != world.head:
            continue
        rest = process._replace(open=tuple(it for it in process.open if it != edge))
        fact, void = (Record(kind, WRITERS[at], process.epoch, *edge) for kind in ("RDATA", "VOID"))
        yield world._with(at, rest), fact
        if world.rollbacks:
            fewer = world._replace(rollbacks=world.rollbacks - 1)
            yield fewer._with(at, rest), void
            if size.broken == "a void is named only where nothing was committed":
                yield fewer, void


def _announces(world: World, at: int, process: Process) -> Iterator[Step]:
    head = world.lost if world.has_gone_back_behind(process) else world.head
    if process.beats and process.last < head:
        announced = process._replace(beats=process.beats - 1, last=head)
        yield world._with(at, announced), Record("POSITION", WRITERS[at], process.epoch, process.last, head)


def _retires(world: World, at: int, process: Process) -> Iterator[Step]:
    if world.retirements and not world.fresh and not process.open and not world.has_gone_back_behind(process):
        fewer = world._replace(retirements=world.retirements - 1)
        retired = process._replace(retired=True, left=0)
        yield fewer._with(at, retired), Record("RETIRE", WRITERS[at], process.epoch, id=process.last)


def _is_operated(world: World, at: int, process: Process, size: Size) -> Iterator[Step]:
    """By somebody who knows nothing: any range, also of IDs that nobody will ever give out."""
    if not world.acts or world.fresh or not process.epoch or (process.epoch == 1 and process.joining is not None):
        return
    fewer, name = world._replace(acts=world.acts - 1), WRITERS[at]
    for id in range(len(WRITERS) * size.ids + 2):
        for prev in range(id):
            skipped = process._replace(signed=tuple(sorted({*process.signed, (prev, id)})))
            yield fewer._with(at, skipped), Record("SKIP", name, CURRENT_EPOCH, prev, id, by="ann", beyond=True)
        if process.signed:
            signed = tuple((prev, min(high, id)) for prev, high in process.signed if prev < id)
            record_rolled_back = process._replace(signed=signed)
            yield fewer._with(at, record_rolled_back), Record("JOIN", name, CURRENT_EPOCH, id=id, by="ann", beyond=True)


def _goes_back(world: World, head: int, size: Size) -> Iterator[Step]:
    """To a backup that has `head`: what was given out beyond it is given out again. The next that happens is a JOIN,
    for what else is sent might have been sent before. Of what was in flight, one record may still be under way.
    """
    lost: list[tuple[int, int] | None] = []
    if size.under_way:
        lost.extend(edge for process in world.processes for edge in process.open)
    for kept in lost or [None]:
        processes = tuple(
            it._replace(
                joining=None,
                open=tuple(edge for edge in it.open if edge == kept),
                last=it.last if it.joining is None else world.head,  # it has said nothing, and does not announce
            )
            for it in world.processes
        )
        if size.broken == "who lost its database joins again":
            processes = tuple(it._replace(history=world.history + 1, open=()) for it in processes)
        back = world._replace(
            set_backs=world.set_backs - 1,
            head=head,
            history=world.history + 1,
            lost=world.head,
            processes=processes,
            fresh=False,
        )
        images = [back]
        if not size.told and any(
            it.epoch > 1 for it in processes
        ):  # from before a restart: it lacks that start's token
            images.append(back._replace(processes=tuple(it._replace(token=min(it.token, 1)) for it in processes)))
        for image in images:
            if size.broken == "who lost its database joins again":
                yield image, None
            for at, process in enumerate(image.processes):
                if not process.retired:
                    yield from _starts(image, at, process, size)
