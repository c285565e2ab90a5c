"""Directs the processes of a play: starts them, lets the script's acts befall them, and lays the writers to rest.

One thread: `tick` is to be called often, and what it does takes at most about a second.
"""

import re
import sched
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from app import writer
from app.simulation import reading
from app.simulation.actor import Actor
from app.stack.home import Home
from app.verification import READERS
from sinks.reader.following import Mode
from sources.kafka import KafkaConnection
from sources.simulator import service
from sources.simulator.cast import Cast, Fault
from sources.simulator.script import Act
from sources.simulator.tables import instances
from streaming.errors import TidemarkError

log = structlog.get_logger(__name__)

T = TypeVar("T")

FENCE_AFTER = 1.0  # seconds from the stop of a writer's process to its fence
AGAIN_AFTER = 1.0  # seconds until a process that ended by itself is started again
END_SECONDS = 40.0
MORE_WRITERS = 2  # than there were at the beginning, at most


class NotFenced(TidemarkError):
    """A writer that was replaced goes on."""

    def __init__(self, instance: str) -> None:
        super().__init__(f"{instance} was replaced while it was stopped, and does not end now that it goes on")
        self.instance = instance


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the play takes place; `dsn` is that of its own database."""

    home: Home
    dsn: str
    kafka: KafkaConnection
    topic: str


@dataclass
class _Member:
    """A writer or a reader. `actor` is None while it is down (or has yet to come); `begins` starts its next process."""

    name: str
    begins: Callable[["_Member"], Actor]
    actor: Actor | None = None
    incarnation: int = 0

    def begin(self) -> None:
        self.incarnation += 1
        self.actor = self.begins(self)

    def leave(self) -> Actor:
        """It is down from now on; its process is the caller's."""
        assert self.actor is not None
        actor, self.actor = self.actor, None
        return actor


@dataclass
class Director:
    """`open`, then acts and ticks, then `close`; `abandon` in any case, so that no process is left."""

    stage: Stage
    cast: Cast
    faults: Set[Fault]
    seed: int
    done: dict[Fault, int] = field(default_factory=dict)
    """How often each act was carried out."""

    def __post_init__(self) -> None:
        self._plan = sched.scheduler(time.monotonic)
        self._readers = [_Member(mode, partial(self._reader, mode)) for mode in READERS]
        self._writers: list[_Member] = []
        self._leaving: dict[str, Actor] = {}
        self._frozen: list[tuple[str, Actor]] = []
        self._retired: set[str] = set()

    # -- the play

    def open(self) -> None:
        """Whoever an earlier play left behind is laid to rest, so that nobody waits for it."""
        names = [self.cast.writer_name(number) for number in range(1, self.cast.writers + 1)]
        self._lay_to_rest(self._known() - set(names))
        self._writers = [_Member(name, self._writer) for name in names]
        for member in [*self._readers, *self._writers]:
            member.begin()

    def befall(self, act: Act) -> None:
        """Carry out an act; nothing happens where there is nobody whom it can befall."""
        match act.fault:
            case Fault.CRASH:
                who = self._crash([writer for writer in self._writers if writer.actor], act)
            case Fault.READER:
                who = self._crash([reader for reader in self._readers if reader.actor], act)
            case Fault.PAUSE:
                who = self._pause(act)
            case Fault.LATE:
                who = self._join(act)
            case Fault.RETIRE:
                who = self._retire(act)
            case Fault.PIPELINE | Fault.REDIS:
                who = self._kill_server(act.fault.value)
            case _:
                raise ValueError(f"{act.fault} happens inside transactions")
        if who:
            log.info("It befell", fault=act.fault.value, who=who)
            self.done[act.fault] = self.done.get(act.fault, 0) + 1

    def tick(self) -> None:
        """What is due; who ended by itself is started again."""
        self._plan.run(blocking=False)
        for member in [*self._readers, *self._writers]:
            if member.actor and (code := member.actor.ended) is not None:
                log.warning("A process ended by itself; starting it again", name=member.name, code=code)
                member.leave()
                self._plan.enter(AGAIN_AFTER, 0, member.begin)
        for name, actor in [*self._leaving.items()]:
            if actor.ended is not None:
                del self._leaving[name]
                self._retired.add(name)

    def silence(self) -> None:
        """The end of the writers: what is open ends, everyone retires, and the dead are laid to rest."""
        for event in self._plan.queue:
            self._plan.cancel(event)
        deadline = time.monotonic() + END_SECONDS
        for _, actor in self._frozen:
            actor.thaw()
            actor.retire()  # it may not have been replaced yet
        leaving = dict(self._leaving)
        for member in self._writers:
            if member.actor and member.actor.ended is None:
                leaving[member.name] = member.leave()
                leaving[member.name].retire()
        for actor in leaving.values():
            if not actor.ends_within(deadline - time.monotonic()):
                actor.kill()
        for name, actor in self._frozen:
            if not actor.ends_within(deadline - time.monotonic()):
                raise NotFenced(name)
        at_rest = self._retired | {name for name, actor in leaving.items() if actor.ended == 0}
        self._writers = []
        self._lay_to_rest(self._known() - at_rest)
        for reader in self._readers:
            if reader.actor is None:
                reader.begin()

    def abandon(self) -> None:
        """End every process, whatever it does."""
        for _, actor in self._frozen:
            actor.kill()
        actors = [member.actor for member in [*self._readers, *self._writers] if member.actor]
        actors += self._leaving.values()
        for actor in actors:
            actor.stop()
        deadline = time.monotonic() + 5.0
        for actor in actors:
            if not actor.ends_within(deadline - time.monotonic()):
                actor.kill()

    # -- acts

    def _crash(self, among: Sequence[_Member], act: Act) -> str:
        if not among:
            return ""
        member = _chosen(among, act.lot)
        member.leave().kill()
        self._plan.enter(act.spell, 0, member.begin)
        return member.name

    def _pause(self, act: Act) -> str:
        running = [writer for writer in self._writers if writer.actor]
        if not running:
            return ""
        member = _chosen(running, act.lot)
        actor = member.leave()
        actor.freeze()
        self._frozen.append((member.name, actor))
        self._plan.enter(FENCE_AFTER, 0, partial(self._replace, member))
        self._plan.enter(FENCE_AFTER + act.spell, 1, partial(self._thaw, member.name, actor))
        return member.name

    def _replace(self, member: _Member) -> None:
        order = writer.Fence(member.name, terminate=True, retire=False)
        writer.fence(self.stage.dsn, self.stage.kafka, self.stage.topic, order, _noted)
        member.begin()

    def _thaw(self, name: str, actor: Actor) -> None:
        actor.thaw()
        self._plan.enter(END_SECONDS, 0, partial(self._require_end, name, actor))

    def _require_end(self, name: str, actor: Actor) -> None:
        if actor.ended is None:
            raise NotFenced(name)
        self._frozen.remove((name, actor))

    def _join(self, act: Act) -> str:
        present = {writer.name for writer in self._writers} | self._leaving.keys()
        numbers = range(1, self.cast.writers + MORE_WRITERS + 1)
        free = [name for name in map(self.cast.writer_name, numbers) if name not in present]
        if not free:
            return ""
        name = _chosen(free, act.lot)
        self._retired.discard(name)
        member = _Member(name, self._writer)
        self._writers.append(member)
        member.begin()
        return name

    def _retire(self, act: Act) -> str:
        running = [writer for writer in self._writers if writer.actor]
        if len(running) < 2:
            return ""
        member = _chosen(running, act.lot)
        self._writers.remove(member)
        self._leaving[member.name] = member.leave()
        self._leaving[member.name].retire()
        return member.name

    def _kill_server(self, name: str) -> str:
        from app.stack.server import process_of  # noqa: PLC0415 - psutil comes with the local stack

        process = process_of(self.stage.home, name)
        if process is None:
            return ""
        process.kill()
        return name

    # -- processes

    def _writer(self, member: _Member) -> Actor:
        role = service.Role(
            member.name,
            self.cast.stream_list(),
            self.faults,
            self.cast.rate / self.cast.writers,
            f"{self.seed} {member.name} {member.incarnation}",
        )
        return Actor("writer", msgspec.json.encode(role), self._log(member))

    def _reader(self, mode: Mode, member: _Member) -> Actor:
        role = reading.Role(mode, self.cast.stream_names())
        return Actor("reader", msgspec.json.encode(role), self._log(member))

    def _log(self, member: _Member) -> Path:
        return self.stage.home.log(f"simulate-{member.name}")

    def _known(self) -> set[str]:
        """All writers of plays with this prefix."""
        ours = re.compile(re.escape(self.cast.writer_name(0)).removesuffix("0") + r"\d+")
        return {name for name in instances(self.stage.dsn) if ours.fullmatch(name)}

    def _lay_to_rest(self, names: Set[str]) -> None:
        for name in sorted(names):
            order = writer.Fence(name, terminate=True, retire=True)
            writer.fence(self.stage.dsn, self.stage.kafka, self.stage.topic, order, _noted)


def _chosen(among: Sequence[T], lot: float) -> T:
    return among[int(lot * len(among))]


def _noted(text: str) -> None:
    log.debug("Fenced", found=text)
