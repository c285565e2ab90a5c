"""Starts the processes of a simulation, injects the faults of its schedule, and ends the processes.

Only one thread may call this module, and this thread must call `FaultInjector.tick` often. `tick` does not wait for
servers.

A simulation has two Postgres servers: Tidemark's, and one that only the services use.
`tidemark up` runs the servers of the local stack, and restarts servers that end. This module runs the services'
Postgres, because a restore must undo the services' commits but not the commits in Tidemark's own database.
"""

import sched
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import cycle
from typing import Self, TypeVar

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tidemark.app.settings import Settings
from tidemark.app.simulation.script import SERVER_FAULTS, SOURCE_FAULTS, Fault, PlannedFault, Successor
from tidemark.app.simulation.source_faults import SourceFaults
from tidemark.app.simulation.workload import (
    ChildProcess,
    ProcessRole,
    SimulatedProcess,
    SimulationDatabases,
    Verification,
    Workload,
)
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresReplica, PostgresServer
from tidemark.app.stack.processes import find_process, free_port
from tidemark.common.errors import TidemarkError
from tidemark.common.log import get_logger

log = get_logger(__name__)

RETRY_SECONDS = 2.0  # until a fault is tried again, after an error or while another server is being replaced


class PostgresFailover:
    """Replaces Postgres servers, one at a time. Only the thread of the fault injector may call the methods.

    Args:
        servers: the Postgres servers, and the second thread for long work.
        scheduler: the scheduler of the fault injector.
        count_fault: called with each injected fault and its target as text.
        services_and_relay: returns the services and the relay, without processes that are down.
    """

    def __init__(
        self,
        servers: "Servers",
        scheduler: sched.scheduler,
        count_fault: Callable[[Fault, str], None],
        services_and_relay: Callable[[], list[SimulatedProcess]],
    ) -> None:
        self._servers = servers
        self._scheduler = scheduler
        self._count_fault = count_fault
        self._services_and_relay = services_and_relay
        self.pending_count = 0
        """Number of calls of `begin` whose fault is not injected yet."""
        self._restore_count = 0
        self._killed_processes: Sequence[SimulatedProcess] = ()
        self._replacement: Replacement | None = None

    def tick(self) -> None:
        """Continue the replacement if its work on the second thread has ended. Raises the errors of `Servers.tick`."""
        self._servers.tick()

    def begin(self, planned: PlannedFault) -> None:
        """Start a replacement, now or after the running replacement. Returns at once.

        The new server takes over `planned.duration_seconds` after the preparation of the new server.
        """
        self.pending_count += 1
        self._prepare(planned)

    def _prepare(self, planned: PlannedFault) -> None:
        """Start the preparation of a new server. If another replacement runs, try again after `RETRY_SECONDS`."""
        if self._replacement is not None:
            self._scheduler.enter(RETRY_SECONDS, 0, partial(self._prepare, planned))
            return
        self._replacement = (
            self._servers.make_restore() if planned.fault is Fault.RESTORE else self._servers.make_failover()
        )
        self._start_work(
            self._replacement.prepare,
            lambda: self._scheduler.enter(planned.duration_seconds, 0, partial(self._switch, planned)),
            planned,
        )

    def end(self) -> None:
        """Wait until the running work has ended, cancel all events of the fault injector, and give up the running
        replacement. Blocks for seconds. Raises the errors of `Replacement.give_up`."""
        while self._servers.is_busy:
            time.sleep(0.1)
            self._servers.tick()
        for event in self._scheduler.queue:
            self._scheduler.cancel(event)
        if self._replacement is not None:
            self._replacement.give_up()

    def _switch(self, planned: PlannedFault) -> None:
        """Start the takeover of the new server. At every second restore, kill the services and their relay first."""
        assert self._replacement is not None
        if planned.fault is Fault.RESTORE:
            self._restore_count += 1
            self._killed_processes = () if self._restore_count % 2 else self._services_and_relay()
        for process in self._killed_processes:
            process.detach().kill()
        self._start_work(self._replacement.switch, partial(self._finish_switch, planned), planned)

    def _finish_switch(self, planned: PlannedFault) -> None:
        self.pending_count -= 1
        self._count_fault(
            planned.fault, f"{self._replacement}{', with the services down' if self._killed_processes else ''}"
        )
        self._finish()

    def _start_work(self, work: Callable[[], None], on_success: Callable[[], object], planned: PlannedFault) -> None:
        """Run `work` on the second thread, and return at once. If `work` succeeds, `tick` calls `on_success`.

        If `work` fails, give up the replacement, start the killed processes again, and try the fault again later.
        """
        assert self._replacement is not None
        replacement = self._replacement

        def on_done(error: Exception | None) -> None:
            if error is None:
                on_success()
            else:
                log.warning(
                    "Could not inject a fault; trying again",
                    fault=planned.fault.value,
                    target=str(replacement),
                    problem=str(error),
                )
                self._servers.start_work(replacement.give_up, retry)

        def retry(_: Exception | None) -> None:
            self._finish()
            self._scheduler.enter(RETRY_SECONDS, 0, partial(self._prepare, planned))

        self._servers.start_work(work, on_done)

    def _finish(self) -> None:
        """Start the processes that `_switch` killed, and allow the next replacement."""
        killed_processes, self._killed_processes, self._replacement = self._killed_processes, (), None
        for process in killed_processes:
            process.start()


T = TypeVar("T")

RESTART_SECONDS = 1.0  # until a process that ended by itself is started again, or a fault is tried again
STOP_SECONDS = 40.0  # until services that have not ended are killed
QUICK_STOP_SECONDS = 5.0  # the same, if nothing is verified or the simulation is aborted
MAX_EXTRA_SERVICES = 2  # services that may join, beyond those at the beginning


class FaultInjector:
    """Starts the processes and injects faults.

    Call `start`, then `inject` and `tick`, then `stop_services`. Always call `kill_all` at the end, so that no process
    is left.

    Args:
        databases: the databases, and the folder of the logs.
        workload: makes the roles of the processes.
        servers: the Postgres servers. Required if the schedule has faults of Postgres servers.
        source_faults: injects the `SOURCE_FAULTS`. If None, these faults are skipped.
    """

    def __init__(
        self,
        databases: SimulationDatabases,
        workload: Workload,
        servers: "Servers | None" = None,
        source_faults: SourceFaults | None = None,
    ) -> None:
        self._databases = databases
        self._workload = workload
        self._writer_plan = workload.plan.writer_plan
        self._servers = servers
        self._source_faults = source_faults
        self.injected_counts: Counter[Fault] = Counter()
        """How often each fault was injected."""
        self._scheduler = sched.scheduler(time.monotonic)
        self._failover = (
            None
            if servers is None
            else PostgresFailover(servers, self._scheduler, self._count_fault, self._services_and_relay)
        )
        self._relay = SimulatedProcess(
            "relay", databases.home, lambda _: ProcessRole(databases.relay_dsn, databases.effects_dsn)
        )
        self._readers = [
            SimulatedProcess(name, databases.home, partial(workload.make_reader_role, databases, name))
            for name in workload.readers
        ]
        self._services: list[SimulatedProcess] = []
        self._leaving_children: list[ChildProcess] = []

    def start(self) -> None:
        """Start the relay, the readers and the services."""
        writer_plan = self._writer_plan
        self._services = [
            self._make_service(writer_plan.writer_name(number)) for number in range(1, writer_plan.writer_count + 1)
        ]
        for process in self._all_processes():
            process.start()

    def inject(self, planned: PlannedFault) -> None:
        """Inject a fault, or begin a fault that takes longer.

        If the target is down, a fault of the relay is tried again after `RESTART_SECONDS`. So is a fault of a server,
        if there is a local stack. Other faults are then skipped. Raises `ValueError` for faults that services inject in
        their own transactions.
        """
        match planned.fault:
            case Fault.CRASH:
                target = self._crash(self._running_services(), planned)
            case Fault.READER:
                target = self._crash([reader for reader in self._readers if reader.child], planned)
            case Fault.RELAY:
                target = self._crash([self._relay] if self._relay.child else [], planned)
            case Fault.PAUSE:
                target = self._pause(planned)
            case Fault.LATE:
                target = self._join(planned)
            case Fault.LEAVE:
                target = self._leave(planned)
            case Fault.PIPELINE | Fault.REDIS | Fault.KAFKA:
                target = self._kill_server(planned.fault.value)
            case Fault.POSTGRES_CRASH:
                target = self._servers.crash() if self._servers else ""
            case Fault.FAILOVER | Fault.RESTORE:
                if self._failover:
                    self._failover.begin(planned)
                return
            case fault if fault in SOURCE_FAULTS:
                if self._source_faults:
                    self._source_faults.begin(planned)
                return
            case _:
                raise ValueError(
                    f"the fault injector cannot inject {planned.fault}: services inject it in their own transactions"
                )
        if target:
            self._count_fault(planned.fault, target)
        elif planned.fault is Fault.RELAY or self._is_target_restarted(planned.fault):
            self._scheduler.enter(RESTART_SECONDS, 0, partial(self.inject, planned))

    @property
    def has_pending(self) -> bool:
        """Whether a replacement of a server or a fault of a source has begun and is not finished."""
        return (self._failover is not None and self._failover.pending_count > 0) or (
            self._source_faults is not None and self._source_faults.pending_count > 0
        )

    def _is_target_restarted(self, fault: Fault) -> bool:
        """Whether the target of the fault is a server, and there is a local stack: then the server is started again."""
        return fault in SERVER_FAULTS and self._databases.home.stack_env.exists()

    def _count_fault(self, fault: Fault, target: str) -> None:
        log.info("Injected a fault", fault=fault.value, target=target)
        self.injected_counts[fault] += 1

    def tick(self) -> None:
        """Continue the faults that have begun, and start processes again that ended by themselves.

        Raises the error that ended a thread of the faults, if a retry cannot solve the error.
        """
        if self._failover:
            self._failover.tick()
        if self._source_faults:
            for fault, target in self._source_faults.take_injected():
                self._count_fault(fault, target)
        self._scheduler.run(blocking=False)
        for process in self._all_processes():
            if process.child and (code := process.child.exit_code) is not None:
                log.warning("A process of the simulation ended by itself; restarting it", name=process.name, code=code)
                process.detach()
                self._scheduler.enter(RESTART_SECONDS, 0, process.start)

    def stop_services(self, seconds: float = STOP_SECONDS) -> None:
        """Inject no more faults, and stop all services, so that no transaction stays open. Kill services that have not
        ended after `seconds`. Blocks until all services have ended.

        Starts the relay and the readers that are down. Readers that also write are restarted without their writing
        part.
        """
        for event in self._scheduler.queue:
            self._scheduler.cancel(event)
        if self._failover:
            self._failover.end()
        if self._source_faults:
            self._source_faults.end()
        self._workload.have_services_ended = True
        writing = [reader for reader in self._readers if reader.child and reader.name in self._workload.writing_readers]
        self._stop_all(
            [*self._leaving_children, *(process.detach() for process in [*self._running_services(), *writing])], seconds
        )
        self._services = []
        for process in self._all_processes():
            if process.child is None:
                process.start()

    def kill_all(self) -> None:
        """Stop every process, and kill the processes that do not end within `QUICK_STOP_SECONDS`."""
        self._stop_all(
            [*self._leaving_children, *(process.child for process in self._all_processes() if process.child)],
            QUICK_STOP_SECONDS,
        )

    def _make_service(self, name: str) -> SimulatedProcess:
        return SimulatedProcess(
            name, self._databases.home, partial(self._workload.make_service_role, self._databases, name)
        )

    def _all_processes(self) -> list[SimulatedProcess]:
        return [self._relay, *self._readers, *self._services]

    def _services_and_relay(self) -> list[SimulatedProcess]:
        """The services and their relay, without processes that are down."""
        return [process for process in (self._relay, *self._services) if process.child]

    def _running_services(self) -> list[SimulatedProcess]:
        """The services that run now."""
        return [service for service in self._services if service.child]

    def _crash(self, candidates: Sequence[SimulatedProcess], planned: PlannedFault) -> str:
        """Kill one of the candidates, and start the process again after `planned.duration_seconds`. Returns the name of
        the process; '' without candidates."""
        if not candidates:
            return ""
        process = _choose(candidates, planned.choice)
        process.detach().kill()
        self._scheduler.enter(planned.duration_seconds, 0, process.start)
        return process.name

    def _pause(self, planned: PlannedFault) -> str:
        """Suspend one of the services for `planned.duration_seconds`. Returns the name of the service; '' if no service
        runs."""
        running = self._running_services()
        if not running:
            return ""
        process = _choose(running, planned.choice)
        assert process.child is not None
        process.child.freeze()
        self._scheduler.enter(planned.duration_seconds, 1, process.child.thaw)
        return process.name

    def _join(self, planned: PlannedFault) -> str:
        """Start one more service. Returns the name of the service; '' if there is the maximum number of services."""
        writer_plan = self._writer_plan
        numbers = range(1, writer_plan.writer_count + MAX_EXTRA_SERVICES + 1)
        free = {writer_plan.writer_name(number) for number in numbers} - {service.name for service in self._services}
        if not free:
            return ""
        process = self._make_service(_choose(sorted(free), planned.choice))
        self._services.append(process)
        process.start()
        return process.name

    def _leave(self, planned: PlannedFault) -> str:
        """Stop one of the services, which is not restarted. Does not wait for its end. Returns the name of the service;
        '' if fewer than two services run."""
        running = self._running_services()
        if len(running) < 2:
            return ""
        process = _choose(running, planned.choice)
        self._services.remove(process)
        self._leaving_children.append(process.detach())
        self._leaving_children[-1].stop()
        return process.name

    def _kill_server(self, name: str) -> str:
        """Kill a server of the local stack. Returns the name of the server; '' if the server is down."""
        process = find_process(self._databases.home, name)
        if process is None:
            return ""
        process.kill()
        return name

    def _stop_all(self, processes: Sequence[ChildProcess], seconds: float) -> None:
        """Stop the processes, and kill those that still run after `seconds`."""
        for process in processes:
            process.thaw()
            process.stop()
        deadline = time.monotonic() + seconds
        for process in processes:
            if not process.wait_for_exit(deadline - time.monotonic()):
                process.kill()


def _choose(candidates: Sequence[T], choice: float) -> T:
    """Choose a candidate by `choice`, a number in [0, 1)."""
    return candidates[int(choice * len(candidates))]


class PostgresOwner(StrEnum):
    """The Postgres servers of a simulation."""

    SERVICES = "services"
    TIDEMARK = "tidemark"
    """Tidemark's server, which also has the readers' database."""


class ServicesPostgres:
    """A context manager that runs the services' Postgres, and starts the server again when it ends.

    `__enter__` waits until the server answers. It raises `AlreadyRunning` if another simulation runs the server, and
    `StartFailed` if the server does not start.
    """

    def __init__(self, home: Home) -> None:
        self.server = PostgresServer(Home(home.root / "services"), free_port())
        self._thread_stop_requested = threading.Event()
        self._restart_thread = threading.Thread(target=self._restart_repeatedly, name="services-postgres", daemon=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.server.home.lock())
            for server in (PostgresReplica(self.server), self.server):
                server.end_leftover()
            self.server.start()
            stack.callback(self.server.stop)
            self._restart_thread.start()
            self._exit_stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread_stop_requested.set()
        self._restart_thread.join()
        self._exit_stack.close()

    def make_servers(self, settings: Settings, verification: Verification) -> "Servers":
        """Make `Servers` of the services' Postgres, and of Tidemark's Postgres if `tidemark up` runs that server."""
        postgres = {PostgresOwner.SERVICES: self.server}
        home, dsn = Home(settings.home), settings.postgres()
        if find_process(home, PostgresServer.name) is not None:
            postgres[PostgresOwner.TIDEMARK] = PostgresServer(home, int(conninfo_to_dict(dsn)["port"] or 5432))
        return Servers(postgres, verification)

    def _restart_repeatedly(self) -> None:
        """Start the server each time that it has ended, until the context ends."""
        while not self._thread_stop_requested.wait(0.2):
            self.server.spawn()


@dataclass
class Replacement:
    """One replacement of a Postgres server. Call `prepare`, and later `switch`. If a call fails, call `give_up`.

    Each of these calls takes seconds, and raises the errors of `PostgresReplica`. `switch` also raises the errors of
    the verification.

    Attributes:
        owner: whether the services' server or Tidemark's server is replaced.
        origin: the old server.
        successor: the kind of the new server.
        verification: paused by `switch`, and prepared for the new server before clients use this server.
    """

    owner: PostgresOwner
    origin: PostgresServer
    successor: Successor
    verification: Verification

    def __post_init__(self) -> None:
        self._replica = PostgresReplica(self.origin)

    def __str__(self) -> str:
        return f"{self.owner}, {self.successor}"

    def prepare(self) -> None:
        """Copy the old server. Also start the copy if the new server is a standby. Then disconnect a lagging standby
        from the old server."""
        self._replica.copy(as_standby=self.successor is not Successor.BASE_BACKUP)
        if self.successor is not Successor.BASE_BACKUP:
            self._replica.start()
            self._replica.wait_until_streaming(is_synchronous=self.successor is Successor.SYNCHRONOUS_STANDBY)
        if self.successor is Successor.LAGGING_STANDBY:
            self._replica.disconnect()

    def switch(self) -> None:
        """Give the data of the new server to the old server, and kill the old server.

        `tidemark up` or `ServicesPostgres` then starts the old server again, with the new data.
        """
        if self.successor is Successor.BASE_BACKUP:
            self._replica.start()
        with self.verification.paused():  # a comparison would block on a frozen server
            if self.successor is Successor.SYNCHRONOUS_STANDBY:  # the origin may have been restarted since `prepare`
                self._replica.wait_until_streaming(is_synchronous=True)
            if self.successor is Successor.BASE_BACKUP:
                self._replica.freeze_origin()
            else:
                self._replica.promote()
            if self.owner is PostgresOwner.SERVICES:
                self.verification.prepare_services_server(self._replica.dsn(), self.successor)
            else:
                self.verification.prepare_readers_server(self._replica.dsn())
            self._replica.replace_origin()

    def give_up(self) -> None:
        """Kill the new server, and resume the old server if `switch` has suspended the old server."""
        self._replica.discard()


class Servers:
    """The Postgres servers of a simulation. Chooses the target of each fault in turn.

    Only one thread may call the methods. `start_work` runs functions on a second thread.
    """

    def __init__(self, postgres: dict[PostgresOwner, PostgresServer], verification: Verification) -> None:
        self._postgres = postgres
        self._verification = verification
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="servers")
        self._work: Future[None] | None = None
        self._on_done: Callable[[Exception | None], None] = lambda _: None
        self._next_failovers = cycle(
            [
                (owner, successor)
                for successor in (Successor.LAGGING_STANDBY, Successor.SYNCHRONOUS_STANDBY)
                for owner in self._postgres
            ]
        )
        signals = (signal.SIGKILL, signal.SIGQUIT, signal.SIGQUIT, signal.SIGKILL)
        self._next_crashes = cycle(zip(cycle((PostgresOwner.TIDEMARK, PostgresOwner.SERVICES)), signals, strict=False))

    def crash(self) -> str:
        """Kill the next server (SIGKILL), or shut it down in the mode `immediate` (SIGQUIT). The servers take turns.

        Returns the server and the signal as text. Returns '' without a signal if the server is down, or is Tidemark's
        server and `tidemark up` does not run it.
        """
        owner, number = next(self._next_crashes)
        process = find_process(self._postgres[owner].home, PostgresServer.name) if owner in self._postgres else None
        if process is None:
            return ""
        process.send_signal(number)
        return f"{owner}, {number.name}"

    def make_failover(self) -> Replacement:
        """Make the next replacement of a server by a standby. The servers and the kinds of standbys take turns. Does
        not start the replacement."""
        owner, successor = next(self._next_failovers)
        return Replacement(owner, self._postgres[owner], successor, self._verification)

    def make_restore(self) -> Replacement:
        """Make a replacement of the services' server by a base backup. Does not start the replacement."""
        return Replacement(
            PostgresOwner.SERVICES, self._postgres[PostgresOwner.SERVICES], Successor.BASE_BACKUP, self._verification
        )

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    def start_work(self, work: Callable[[], None], on_done: Callable[[Exception | None], None]) -> None:
        """Start `work` on the second thread, and return at once. Allowed only if `is_busy` is False.

        After the end of `work`, `tick` calls `on_done` with the error of `work`, or with None.
        """
        assert not self.is_busy
        self._work, self._on_done = self._executor.submit(work), on_done

    def tick(self) -> None:
        """If the work has ended, call `on_done`. Does not wait. If the exception of the work is not an error of
        Tidemark, psycopg, psutil or the operating system, raises the exception instead."""
        if self._work is not None and self._work.done():
            error = self._work.exception()
            self._work = None
            if error is not None and not isinstance(error, TidemarkError | psycopg.Error | psutil.Error | OSError):
                raise error
            self._on_done(error if isinstance(error, Exception) else None)

    def close(self) -> None:
        """Wait until the work on the second thread has ended, and end the thread."""
        self._executor.shutdown()
