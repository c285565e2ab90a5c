"""The faults of the servers of a simulation: those of the local stack, and a Postgres that is the services' own.

The stack's servers run in `tidemark up`, which starts again what dies. The services' Postgres runs here, because what a
restore takes back must be theirs alone: Tidemark's own would go back with it.
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
    """A context manager: the services' Postgres, which is restarted when it dies. Raises `AlreadyRunning`."""

    def __init__(self, home: Home) -> None:
        self.server = PostgresServer(Home(home.root / "services"), free_port())
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._start_again, name="services-postgres", daemon=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.server.home.claimed())
            for left in (Replica(self.server), self.server):
                left.end_leftover()
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

    def _start_again(self) -> None:
        while not self._ending.wait(0.2):
            self.server.spawn()


@dataclass
class Replacement:
    """A server and its replacement: call `prepare`, and later `switch` or `give_up`. Each takes seconds and raises
    the errors of `Replica`."""

    whose: PostgresOwner
    origin: PostgresServer
    how: Successor
    verification: Verification

    def __post_init__(self) -> None:
        self._replica = Replica(self.origin)

    def __str__(self) -> str:
        return f"{self.whose}, {self.how}"

    def prepare(self) -> None:
        self._replica.copy(follows=self.how is not Successor.IMAGE)
        if self.how is not Successor.IMAGE:
            self._replica.start()
            self._replica.stream(synchronous=self.how is Successor.IN_STEP)
        if self.how is Successor.LAGGING:
            self._replica.fall_behind()

    def switch(self) -> None:
        """The clients of the origin find the replica at its address."""
        if self.how is Successor.IMAGE:
            self._replica.start()
        with self.verification.paused():  # it would wait for a paused server
            if self.how is Successor.IN_STEP:  # the origin may have been started again since
                self._replica.stream(synchronous=True)
            if self.how is Successor.IMAGE:
                self._replica.freeze_origin()
            else:
                self._replica.promote()
            if self.whose is PostgresOwner.SERVICES:
                self.verification.services_go_back(self._replica.dsn(), self.how)
            else:
                self.verification.readers_go_back(self._replica.dsn())
            self._replica.succeed()

    def give_up(self) -> None:
        self._replica.discard()


class Servers:
    """The faults of the reachable Postgres servers, one server after the other. For one thread; uses another thread."""

    def __init__(self, postgres: dict[PostgresOwner, PostgresServer], verification: Verification) -> None:
        self._postgres = postgres
        self._judge = verification
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="servers")
        self._running: Future[None] | None = None
        self._then: Callable[[Exception | None], None] = lambda _: None
        self._failovers = cycle(
            [(whose, how) for how in (Successor.LAGGING, Successor.IN_STEP) for whose in self._postgres]
        )
        signals = (signal.SIGKILL, signal.SIGQUIT, signal.SIGQUIT, signal.SIGKILL)
        self._crashes = cycle(zip(cycle((PostgresOwner.TIDEMARK, PostgresOwner.SERVICES)), signals, strict=False))

    def crash(self) -> str:
        """Kill the next server, or stop it with an immediate shutdown."""
        whose, number = next(self._crashes)
        process = process_of(self._postgres[whose].home, PostgresServer.name) if whose in self._postgres else None
        if process is None:
            return ""
        process.send_signal(number)
        return f"{whose}, {number.name}"

    def failover(self) -> Replacement:
        whose, how = next(self._failovers)
        return Replacement(whose, self._postgres[whose], how, self._judge)

    def restore(self) -> Replacement:
        return Replacement(PostgresOwner.SERVICES, self._postgres[PostgresOwner.SERVICES], Successor.IMAGE, self._judge)

    @property
    def busy(self) -> bool:
        return self._running is not None

    def work(self, work: Callable[[], None], then: Callable[[Exception | None], None]) -> None:
        """Run a function on another thread. `tick` then calls `then` with the exception, or None. Only one function may
        run at a time."""
        assert not self.busy
        self._running, self._then = self._worker.submit(work), then

    def tick(self) -> None:
        if self._running is not None and self._running.done():
            error = self._running.exception()
            self._running = None
            if error is not None and not isinstance(error, TidemarkError | psycopg.Error | psutil.Error | OSError):
                raise error
            self._then(error if isinstance(error, Exception) else None)

    def close(self) -> None:
        """Wait until the function on the other thread has ended."""
        self._worker.shutdown()
