"""Directs the processes of a play: starts them, lets the script's acts befall them, and ends them.

One thread: `tick` is to be called often, and what it does takes at most about a second.
"""

import sched
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tidemark.app.simulation.postgres_failover import Replacing
from tidemark.app.simulation.processes import Actor, Member, Part, Stage
from tidemark.app.simulation.script import OF_SERVERS, Act, Fault
from tidemark.app.simulation.workload import Workload
from tidemark.common.log import get_logger

if TYPE_CHECKING:  # it needs what comes with the local stack
    from tidemark.app.simulation.servers import Servers

log = get_logger(__name__)

T = TypeVar("T")

AGAIN_AFTER = 1.0  # seconds until a process that ended by itself is started again
END_SECONDS = 40.0
MORE_SERVICES = 2  # than there were at the beginning, at most


class Director:
    """`open`, then acts and ticks, then `silence`; `abandon` in any case, so that no process is left.

    `servers` are for the faults of Postgres servers.
    """

    def __init__(self, stage: Stage, workload: Workload, servers: "Servers | None" = None) -> None:
        self._stage = stage
        self._workload = workload
        self._cast = workload.play.cast
        self._servers = servers
        self.done: Counter[Fault] = Counter()
        """How often each act was carried out."""
        self._plan = sched.scheduler(time.monotonic)
        self._replacing = None if servers is None else Replacing(servers, self._plan, self._befell, self._writing)
        self._relay = Member("relay", stage.home, lambda _: Part(stage.facts, stage.effects))
        self._readers = [Member(name, stage.home, partial(workload.reader, stage, name)) for name in workload.readers]
        self._services: list[Member] = []
        self._leaving: list[Actor] = []

    # -- the play

    def open(self) -> None:
        cast = self._cast
        self._services = [self._service(cast.writer_name(number)) for number in range(1, cast.writers + 1)]
        for member in self._members():
            member.begin()

    def befall(self, act: Act) -> None:
        """Carry out an act; nothing happens where there is nobody whom it can befall."""
        match act.fault:
            case Fault.CRASH:
                who = self._crash(self._running(), act)
            case Fault.READER:
                who = self._crash([reader for reader in self._readers if reader.actor], act)
            case Fault.RELAY:
                who = self._crash([self._relay] if self._relay.actor else [], act)
            case Fault.PAUSE:
                who = self._pause(act)
            case Fault.LATE:
                who = self._join(act)
            case Fault.LEAVE:
                who = self._leave(act)
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
        elif act.fault is Fault.RELAY or self._comes_back(act.fault):
            self._plan.enter(AGAIN_AFTER, 0, partial(self.befall, act))

    @property
    def owes(self) -> bool:
        """Whether a server is still to be replaced."""
        return self._replacing is not None and self._replacing.owed > 0

    def _comes_back(self, fault: Fault) -> bool:
        return fault in OF_SERVERS and self._stage.home.stack_env.exists()

    def _befell(self, fault: Fault, who: str) -> None:
        log.info("It befell", fault=fault.value, who=who)
        self.done[fault] += 1

    def tick(self) -> None:
        """What is due; who ended by itself is started again."""
        if self._replacing:
            self._replacing.tick()
        self._plan.run(blocking=False)
        for member in self._members():
            if member.actor and (code := member.actor.ended) is not None:
                log.warning("A process ended by itself; starting it again", name=member.name, code=code)
                member.leave()
                self._plan.enter(AGAIN_AFTER, 0, member.begin)

    def silence(self) -> None:
        """The end of the services: what is open ends. Relay and readers go on."""
        for event in self._plan.queue:
            self._plan.cancel(event)
        if self._replacing:
            self._replacing.end()
        self._end([*self._leaving, *(member.leave() for member in self._running())], END_SECONDS)
        self._services = []
        for member in self._members():
            if member.actor is None:
                member.begin()

    def abandon(self) -> None:
        """End every process, whatever it does."""
        self._end([*self._leaving, *(member.actor for member in self._members() if member.actor)], 5.0)

    # -- acts

    def _service(self, name: str) -> Member:
        return Member(name, self._stage.home, partial(self._workload.service, self._stage, name))

    def _members(self) -> list[Member]:
        return [self._relay, *self._readers, *self._services]

    def _writing(self) -> list[Member]:
        """Who uses the services' database: services, and their relay."""
        return [member for member in (self._relay, *self._services) if member.actor]

    def _running(self) -> list[Member]:
        return [service for service in self._services if service.actor]

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
        assert member.actor is not None
        member.actor.freeze()
        self._plan.enter(act.spell, 1, member.actor.thaw)
        return member.name

    def _join(self, act: Act) -> str:
        cast = self._cast
        numbers = range(1, cast.writers + MORE_SERVICES + 1)
        free = {cast.writer_name(number) for number in numbers} - {service.name for service in self._services}
        if not free:
            return ""
        member = self._service(_chosen(sorted(free), act.lot))
        self._services.append(member)
        member.begin()
        return member.name

    def _leave(self, act: Act) -> str:
        running = self._running()
        if len(running) < 2:
            return ""
        member = _chosen(running, act.lot)
        self._services.remove(member)
        self._leaving.append(member.leave())
        self._leaving[-1].stop()
        return member.name

    def _kill_server(self, name: str) -> str:
        from tidemark.app.stack.processes import process_of  # noqa: PLC0415 - psutil comes with the local stack

        process = process_of(self._stage.home, name)
        if process is None:
            return ""
        process.kill()
        return name

    def _end(self, actors: Sequence[Actor], seconds: float) -> None:
        for actor in actors:
            actor.thaw()
            actor.stop()
        deadline = time.monotonic() + seconds
        for actor in actors:
            if not actor.ends_within(deadline - time.monotonic()):
                actor.kill()


def _chosen(among: Sequence[T], lot: float) -> T:
    return among[int(lot * len(among))]
