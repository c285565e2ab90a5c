"""The faults of the two Postgres servers of a simulation: Tidemark's, and one that only the services use.

`tidemark up` runs the servers of the local stack, and restarts servers that end. This module runs the services'
Postgres, because a restore must undo the services' commits but not the commits in Tidemark's own database.
"""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle
from typing import Self

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tidemark.app.settings import Settings
from tidemark.app.simulation.script import Successor
from tidemark.app.simulation.workload import Verification
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer, Replica
from tidemark.app.stack.processes import free_port, process_of
from tidemark.common.errors import TidemarkError


class PostgresOwner(StrEnum):
    """The Postgres servers of a simulation."""

    SERVICES = "services"
    TIDEMARK = "tidemark"
    """Tidemark's server, which also has the readers' database."""


class ServicesPostgres:
    """A context manager that runs the services' Postgres, and restarts it when it ends. Raises `AlreadyRunning`."""

    def __init__(self, home: Home) -> None:
        self.server = PostgresServer(Home(home.root / "services"), free_port())
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._restart, name="services-postgres", daemon=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.server.home.locked())
            for server in (Replica(self.server), self.server):
                server.end_leftover()
            self.server.start()
            stack.callback(self.server.stop)
            self._watch.start()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._watch.join()
        self._open.close()

    def with_stack(self, settings: Settings, verification: Verification) -> "Servers":
        """The services' Postgres, and Tidemark's if `tidemark up` runs it."""
        postgres = {PostgresOwner.SERVICES: self.server}
        home, dsn = Home(settings.home), settings.postgres()
        if process_of(home, PostgresServer.name) is not None:
            postgres[PostgresOwner.TIDEMARK] = PostgresServer(home, int(conninfo_to_dict(dsn)["port"] or 5432))
        return Servers(postgres, verification)

    def _restart(self) -> None:
        while not self._ending.wait(0.2):
            self.server.spawn()


@dataclass
class Replacement:
    """Replaces a Postgres server: call `prepare`, and later `switch` or `give_up`. Each call takes seconds and raises
    the errors of `Replica`.

    Attributes:
        owner: which server is replaced.
        origin: the server that is replaced.
        successor: what kind of server replaces it.
        verification: is informed before clients see the new server.
    """

    owner: PostgresOwner
    origin: PostgresServer
    successor: Successor
    verification: Verification

    def __post_init__(self) -> None:
        self._replica = Replica(self.origin)

    def __str__(self) -> str:
        return f"{self.owner}, {self.successor}"

    def prepare(self) -> None:
        self._replica.copy(as_standby=self.successor is not Successor.BASE_BACKUP)
        if self.successor is not Successor.BASE_BACKUP:
            self._replica.start()
            self._replica.wait_until_streaming(synchronous=self.successor is Successor.SYNCHRONOUS_STANDBY)
        if self.successor is Successor.LAGGING_STANDBY:
            self._replica.fall_behind()

    def switch(self) -> None:
        """End the origin, and start the replica at the address of the origin."""
        if self.successor is Successor.BASE_BACKUP:
            self._replica.start()
        with self.verification.paused():  # a comparison would block on a frozen server
            if self.successor is Successor.SYNCHRONOUS_STANDBY:  # the origin may have been restarted since `prepare`
                self._replica.wait_until_streaming(synchronous=True)
            if self.successor is Successor.BASE_BACKUP:
                self._replica.freeze_origin()
            else:
                self._replica.promote()
            if self.owner is PostgresOwner.SERVICES:
                self.verification.prepare_services_server(self._replica.dsn(), self.successor)
            else:
                self.verification.prepare_readers_server(self._replica.dsn())
            self._replica.succeed()

    def give_up(self) -> None:
        self._replica.discard()


class Servers:
    """Injects faults into the Postgres servers in turn. One thread may call it; a second thread runs the long work."""

    def __init__(self, postgres: dict[PostgresOwner, PostgresServer], verification: Verification) -> None:
        self._postgres = postgres
        self._verification = verification
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="servers")
        self._running: Future[None] | None = None
        self._on_done: Callable[[Exception | None], None] = lambda _: None
        self._failovers = cycle(
            [
                (owner, successor)
                for successor in (Successor.LAGGING_STANDBY, Successor.SYNCHRONOUS_STANDBY)
                for owner in self._postgres
            ]
        )
        signals = (signal.SIGKILL, signal.SIGQUIT, signal.SIGQUIT, signal.SIGKILL)
        self._crashes = cycle(zip(cycle((PostgresOwner.TIDEMARK, PostgresOwner.SERVICES)), signals, strict=False))

    def crash(self) -> str:
        """Kill the next server, or stop it by an immediate shutdown. Returns its description, or '' if it is down."""
        owner, number = next(self._crashes)
        process = process_of(self._postgres[owner].home, PostgresServer.name) if owner in self._postgres else None
        if process is None:
            return ""
        process.send_signal(number)
        return f"{owner}, {number.name}"

    def new_failover(self) -> Replacement:
        """A replacement of the next server by the next kind of standby. The caller must run it."""
        owner, successor = next(self._failovers)
        return Replacement(owner, self._postgres[owner], successor, self._verification)

    def new_restore(self) -> Replacement:
        """A replacement of the services' server by a backup. The caller must run it."""
        return Replacement(
            PostgresOwner.SERVICES, self._postgres[PostgresOwner.SERVICES], Successor.BASE_BACKUP, self._verification
        )

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def start_work(self, work: Callable[[], None], on_done: Callable[[Exception | None], None]) -> None:
        """Run a function on another thread. When it has ended, `tick` calls `on_done` with its exception, or None. Only
        one function may run at a time."""
        assert not self.is_busy
        self._running, self._on_done = self._worker.submit(work), on_done

    def tick(self) -> None:
        """Call `on_done` if the work has ended. Raises errors of the work that are not errors of a server."""
        if self._running is not None and self._running.done():
            error = self._running.exception()
            self._running = None
            if error is not None and not isinstance(error, TidemarkError | psycopg.Error | psutil.Error | OSError):
                raise error
            self._on_done(error if isinstance(error, Exception) else None)

    def close(self) -> None:
        """Wait until the function on the other thread has ended."""
        self._worker.shutdown()
