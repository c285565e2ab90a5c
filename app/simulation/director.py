"""Directs the processes of a play: starts them, lets the script's acts befall them, and lays the writers to rest.

One thread: `tick` is to be called often, and what it does takes at most about a second.
"""

import sched
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from tidemark.app.simulation.company import Actor, Company, Member
from tidemark.app.simulation.replacing import Replacing
from tidemark.sources.simulator.script import OF_SERVERS, Act, Fault
from tidemark.streaming.errors import TidemarkError, Unavailable

if TYPE_CHECKING:  # it needs what comes with the local stack
    from tidemark.app.simulation.servers import Servers

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


class Director:
    """`open`, then acts and ticks, then `silence`; `abandon` in any case, so that no process is left.

    `servers` are for the faults of Postgres servers.
    """

    def __init__(self, company: Company, servers: "Servers | None" = None) -> None:
        self.company = company
        self._servers = servers
        self.done: Counter[Fault] = Counter()
        """How often each act was carried out."""
        self._plan = sched.scheduler(time.monotonic)
        self._replacing = None if servers is None else Replacing(servers, self._plan, self._befell, self._running)
        self._readers = self.company.readers()
        self._writers: list[Member] = []
        self._leaving: dict[str, Actor] = {}
        self._frozen: list[tuple[str, Actor]] = []
        self._retired: set[str] = set()

    # -- the play

    def open(self) -> None:
        """Whoever an earlier play left behind is laid to rest, so that nobody waits for it."""
        cast = self.company.cast
        names = [cast.writer_name(number) for number in range(1, cast.writers + 1)]
        self.company.lay_to_rest(self.company.known() - set(names))
        self._writers = [self.company.writer(name) for name in names]
        for member in [*self._readers, *self._writers]:
            member.begin()

    def befall(self, act: Act) -> None:
        """Carry out an act; nothing happens where there is nobody whom it can befall."""
        match act.fault:
            case Fault.CRASH:
                who = self._crash(self._running(), act)
            case Fault.READER:
                who = self._crash([reader for reader in self._readers if reader.actor], act)
            case Fault.PAUSE:
                who = self._pause(act)
            case Fault.LATE:
                who = self._join(act)
            case Fault.RETIRE:
                who = self._retire(act)
            case Fault.PIPELINE | Fault.REDIS | Fault.KAFKA:
                who = self._kill_server(act.fault.value)
            case Fault.POSTGRES_CRASH:
                who = self._servers.crash() if self._servers else ""
            case Fault.FAILOVER | Fault.RESTORE:
                if self._replacing:
                    self._replacing.begin(act)
                return
            case _:
                raise ValueError(f"{act.fault} happens inside transactions")
        if who:
            self._befell(act.fault, who)
        elif act.fault in OF_SERVERS and self.company.stage.home.stack_env.exists():  # it is on its way back
            self._plan.enter(AGAIN_AFTER, 0, partial(self.befall, act))

    @property
    def owes(self) -> bool:
        """Whether a server is still to be replaced."""
        return self._replacing is not None and self._replacing.owed > 0

    def _befell(self, fault: Fault, who: str) -> None:
        log.info("It befell", fault=fault.value, who=who)
        self.done[fault] += 1

    def tick(self) -> None:
        """What is due; who ended by itself is started again."""
        if self._replacing:
            self._replacing.tick()
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
                if actor.ended != 0:  # perhaps signalled before it could handle that, or a server was away
                    self._lay_to_rest(name)

    def silence(self) -> None:
        """The end of the writers: what is open ends, everyone retires, and the dead are laid to rest."""
        for event in self._plan.queue:
            self._plan.cancel(event)
        if self._replacing:
            self._replacing.end()
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
        self.company.rest_at_last(at_rest)
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

    def _running(self) -> list[Member]:
        return [writer for writer in self._writers if writer.actor]

    def _crash(self, among: Sequence[Member], act: Act) -> str:
        if not among:
            return ""
        member = _chosen(among, act.lot)
        member.leave().kill()
        self._plan.enter(act.spell, 0, member.begin)
        return member.name

    def _pause(self, act: Act) -> str:
        running = self._running()
        if not running:
            return ""
        member = _chosen(running, act.lot)
        actor = member.leave()
        actor.freeze()
        self._frozen.append((member.name, actor))
        self._plan.enter(FENCE_AFTER, 0, partial(self._replace, member))
        self._plan.enter(FENCE_AFTER + act.spell, 1, partial(self._thaw, member.name, actor, self._times_back))
        return member.name

    def _replace(self, member: Member) -> None:
        try:
            self.company.fence(member.name)
        except Unavailable:
            self._plan.enter(AGAIN_AFTER, 0, partial(self._replace, member))
        else:
            member.begin()

    def _lay_to_rest(self, name: str) -> None:
        if name not in self._retired:  # it has come back
            return
        try:
            self.company.lay_to_rest({name})
        except Unavailable:
            self._plan.enter(AGAIN_AFTER, 0, partial(self._lay_to_rest, name))

    def _thaw(self, name: str, actor: Actor, times_back: int) -> None:
        actor.thaw()
        self._plan.enter(END_SECONDS, 0, partial(self._require_end, name, actor, times_back))

    def _require_end(self, name: str, actor: Actor, times_back: int) -> None:
        """A database that went back may have lost the fence: then the next start of its replacement ends it."""
        if actor.ended is not None:
            self._frozen.remove((name, actor))
        elif times_back != self._times_back:
            self._plan.enter(END_SECONDS, 0, partial(self._require_end, name, actor, self._times_back))
        else:
            raise NotFenced(name)

    @property
    def _times_back(self) -> int:
        return self._replacing.times if self._replacing else 0

    def _join(self, act: Act) -> str:
        present = {writer.name for writer in self._writers} | self._leaving.keys()
        cast = self.company.cast
        numbers = range(1, cast.writers + MORE_WRITERS + 1)
        free = [name for name in map(cast.writer_name, numbers) if name not in present]
        if not free:
            return ""
        name = _chosen(free, act.lot)
        self._retired.discard(name)
        member = self.company.writer(name)
        self._writers.append(member)
        member.begin()
        return name

    def _retire(self, act: Act) -> str:
        running = self._running()
        if len(running) < 2:
            return ""
        member = _chosen(running, act.lot)
        self._writers.remove(member)
        self._leaving[member.name] = member.leave()
        self._leaving[member.name].retire()
        return member.name

    def _kill_server(self, name: str) -> str:
        from tidemark.app.stack.server import process_of  # noqa: PLC0415 - psutil comes with the local stack

        process = process_of(self.company.stage.home, name)
        if process is None:
            return ""
        process.kill()
        return name


def _chosen(among: Sequence[T], lot: float) -> T:
    return among[int(lot * len(among))]
