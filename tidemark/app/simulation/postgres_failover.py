"""Replaces one Postgres after the other: prepares a replica, switches to it later, and tries again after a failure."""

import sched
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidemark.app.simulation.script import Fault, PlannedFault
from tidemark.app.simulation.workload import SimulatedProcess
from tidemark.common.log import get_logger

if TYPE_CHECKING:  # needs the extra of the local stack
    from tidemark.app.simulation.servers import Replacement, Servers

log = get_logger(__name__)

AGAIN_AFTER = 2.0  # seconds until a fault is tried again if its server is away, or another one is being replaced


class PostgresFailover:
    """Replaces Postgres servers. The thread of the fault injector calls it; long work runs on another thread.

    `scheduler` belongs to the fault injector, `count_fault` counts an injected fault, and `database_users` gives the
    services and the relay that run.
    """

    def __init__(
        self,
        servers: "Servers",
        scheduler: sched.scheduler,
        count_fault: Callable[[Fault, str], None],
        database_users: Callable[[], list[SimulatedProcess]],
    ) -> None:
        self._servers = servers
        self._scheduler = scheduler
        self._count_fault = count_fault
        self._database_users = database_users
        self.pending = 0
        """The faults that have begun, or wait for another fault to end."""
        self._restores = 0
        self._stopped: Sequence[SimulatedProcess] = ()
        self._replacement: Replacement | None = None

    def tick(self) -> None:
        self._servers.tick()

    def begin(self, planned: PlannedFault) -> None:
        """Prepare another server, which replaces the first one `planned.duration` seconds later."""
        self.pending += 1
        self._prepare(planned)

    def _prepare(self, planned: PlannedFault) -> None:
        if self._replacement is not None:
            self._scheduler.enter(AGAIN_AFTER, 0, partial(self._prepare, planned))
            return
        self._replacement = self._servers.restore() if planned.fault is Fault.RESTORE else self._servers.failover()
        self._work(
            self._replacement.prepare,
            lambda: self._scheduler.enter(planned.duration, 0, partial(self._switch, planned)),
            planned,
        )

    def end(self) -> None:
        """Wait for the work that runs; no server is replaced from now on."""
        while self._servers.busy:
            time.sleep(0.1)
            self._servers.tick()
        for event in self._scheduler.queue:
            self._scheduler.cancel(event)
        if self._replacement is not None:
            self._replacement.give_up()

    def _switch(self, planned: PlannedFault) -> None:
        """At every other restore the services are stopped first, and their relay."""
        assert self._replacement is not None
        if planned.fault is Fault.RESTORE:
            self._restores += 1
            self._stopped = () if self._restores % 2 else self._database_users()
        for member in self._stopped:
            member.detach().kill()
        self._work(self._replacement.switch, partial(self._switched, planned), planned)

    def _switched(self, planned: PlannedFault) -> None:
        self.pending -= 1
        self._count_fault(planned.fault, f"{self._replacement}{', with the services down' if self._stopped else ''}")
        self._finish()

    def _work(self, work: Callable[[], None], then: Callable[[], object], planned: PlannedFault) -> None:
        assert self._replacement is not None
        given_up = self._replacement

        def done(error: Exception | None) -> None:
            if error is None:
                then()
            else:
                log.warning("Trying a fault again", fault=planned.fault.value, target=str(given_up), problem=str(error))
                self._servers.work(given_up.give_up, again)

        def again(_: Exception | None) -> None:
            self._finish()
            self._scheduler.enter(AGAIN_AFTER, 0, partial(self._prepare, planned))

        self._servers.work(work, done)

    def _finish(self) -> None:
        stopped, self._stopped, self._replacement = self._stopped, (), None
        for member in stopped:
            member.start()
