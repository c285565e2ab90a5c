"""Threads that run while this pipeline has the lease: maintenance of the sinks, and reports of batches that wait."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Self

from tidemark.common.errors import LeaseLost, Stop, TidemarkError
from tidemark.common.log import get_logger
from tidemark.sinks.port import Sink
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres
from tidemark.sinks.postgres.transaction import BatchWait

log = get_logger(__name__)

POLL_SECONDS = 1.0  # between two checks whether a batch waits
LOG_INTERVAL_SECONDS = 30.0  # between two log lines about the same wait


class LeasedThread(ABC):
    """A thread that calls `work` repeatedly until the lease is lost, `work` raises, or the context is left.

    A context manager. Entering the context starts the thread. Leaving the context waits until the thread has ended.

    Attributes:
        failure: the error that `work` raised or stored here; None if there is none. The supervising thread raises it.
            A lost lease is no failure: the thread calls `Lease.note_lost` instead.
    """

    def __init__(self, name: str, lease: Lease) -> None:
        self._lease = lease
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()

    @abstractmethod
    def work(self) -> float:
        """Do one step. Returns the number of seconds to wait before the next step."""

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._lease.check()
                self._closing.wait(self.work())
        except LeaseLost as error:
            self._lease.note_lost(error.newest)
        except Exception as error:  # noqa: BLE001 - the supervising thread raises it
            self.failure = error


MAX_CLOCK_DIFFERENCE_SECONDS = 60.0
"""A larger difference between two clocks is logged, and the alert TidemarkClocksDiffer fires."""
RETENTION_RETRY_SECONDS = 60.0  # until an incomplete run of retention is retried
# The pause after a comparison, as a multiple of its duration: limits the CPU time for millions of streams.
COMPARISON_PAUSE_FACTOR = 20


@dataclass(frozen=True, slots=True)
class MaintenanceConfig:
    """How often each task of `Maintenance` runs.

    Attributes:
        poll_seconds: seconds between two checks whether a sink has lost data.
        compare_seconds: seconds between two comparisons of a sink, and of the clock, with Postgres. Longer for a sink
            whose comparison takes long (`COMPARISON_PAUSE_FACTOR`).
        retention_seconds: seconds between two complete runs of retention.
    """

    poll_seconds: float = 1.0
    compare_seconds: float = 60.0
    retention_seconds: float = 3600.0


class Maintenance(LeasedThread):
    """Refills the sinks, stores the faults of the sinks in Postgres, runs retention, and compares clocks.

    A task that fails is tried again, and its error is logged. A `Stop` is not logged, but becomes the `failure`.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        postgres: Postgres,
        lease: Lease,
        config: MaintenanceConfig,
        on_clock_difference: Callable[[float], object] = lambda _: None,
    ) -> None:
        """Prepare the thread; entering the context starts it.

        Args:
            sinks: the sinks to refill.
            postgres: the Postgres with the positions and the history.
            lease: the lease of this pipeline.
            config: how often each task runs.
            on_clock_difference: called after each comparison of clocks, with the number of seconds by which the clock
                of this host is ahead of the clock of Postgres. Negative if the clock of this host is behind.
        """
        super().__init__("maintenance", lease)
        self._on_clock_difference = on_clock_difference
        self._next_clock_check = -float("inf")
        self._do_clocks_differ = False
        self._sinks = sinks
        self._postgres = postgres
        self._config = config
        self._next_comparison_by_sink: dict[str, float] = {}
        self._next_retention = -float("inf")
        self._problem_by_task: dict[str, str] = {}
        self._stored_faults: dict[tuple[str, str], str] | None = None  # (sink, stream) -> problem

    def work(self) -> float:
        for sink in self._sinks:
            self._try_task(f"refilling {sink.name}", partial(self._refill, sink))
        self._try_task("storing the faults of the sinks", self._store_faults)
        self._try_task("retention", self._apply_retention)
        self._try_task("comparing clocks", self._compare_clocks)
        return self._config.poll_seconds

    def _try_task(self, task: str, step: Callable[[], None]) -> None:
        """Call `step`. Store a `Stop` as the failure, and log another error if its text is new. Raises `LeaseLost`.

        `task` names the step in the log.
        """
        try:
            self._lease.check()
            step()
        except LeaseLost:
            raise
        except Stop as problem:
            self.failure = problem
        except TidemarkError as problem:
            if self._problem_by_task.get(task) != str(problem):  # once, not at every poll
                log.warning(f"A maintenance task failed: {task}; trying again", problem=str(problem))
            self._problem_by_task[task] = str(problem)
        else:
            if self._problem_by_task.pop(task, None):
                log.info(f"A maintenance task works again: {task}")

    def _refill(self, sink: Sink) -> None:
        """Refill the sink if it may have lost data, or if its next comparison with Postgres is due."""
        began = time.monotonic()
        due = began >= self._next_comparison_by_sink.get(sink.name, -float("inf"))
        if sink.check_for_loss() or due:
            # If the refill fails, the next poll must refill again, although nothing was lost since this poll.
            self._next_comparison_by_sink.pop(sink.name, None)
            sink.refill()
            ended = time.monotonic()
            pause = (
                0.0 if sink.faults() else COMPARISON_PAUSE_FACTOR * (ended - began)
            )  # a refill also retries faulty streams
            self._next_comparison_by_sink[sink.name] = ended + max(self._config.compare_seconds, pause)

    def _store_faults(self) -> None:
        """Store the faults of all sinks in Postgres, if they have changed. Log new faults and repaired streams."""
        faults = {(sink.name, stream): text for sink in self._sinks for stream, text in sink.faults().items()}
        if faults == self._stored_faults:
            return
        for sink in self._sinks:
            new = [key for key in faults.keys() - (self._stored_faults or {}).keys() if key[0] == sink.name]
            if new:
                log.error(
                    f"{sink.name} cannot publish some streams because of their data; retrying them",
                    streams=len(new),
                    first=new[0][1],
                    problem=faults[new[0]],
                )
        for sink_name, stream in (self._stored_faults or {}).keys() - faults.keys():
            log.info("A fault of a sink has ended; the sink publishes the stream again", sink=sink_name, stream=stream)
        self._postgres.note_faults(faults)
        self._stored_faults = faults

    def _compare_clocks(self) -> None:
        """Compare the clocks of this host and of Postgres, if `compare_seconds` have passed. Log a large difference."""
        if time.monotonic() < self._next_clock_check:
            return
        difference = self._postgres.clock.difference()
        self._next_clock_check = time.monotonic() + self._config.compare_seconds
        self._on_clock_difference(difference)
        did_differ, self._do_clocks_differ = self._do_clocks_differ, abs(difference) > MAX_CLOCK_DIFFERENCE_SECONDS
        if self._do_clocks_differ and not did_differ:
            log.warning(
                "The clocks of this host and of Postgres differ; synchronize them (NTP). Until then, the times in the"
                " history are those of this host, and retention deletes at most one day of history at a time",
                seconds_ahead=round(difference),
            )
        elif did_differ and not self._do_clocks_differ:
            log.info("The clocks of this host and of Postgres agree again")

    def _apply_retention(self) -> None:
        """Run retention if a run is due. A failed or incomplete run is due again after at most a minute."""
        if time.monotonic() >= self._next_retention:
            # Set before the run, so that a failed run is not retried at once: its waits for locks may block batches.
            self._next_retention = time.monotonic() + min(self._config.retention_seconds, RETENTION_RETRY_SECONDS)
            now = self._postgres.clock.retention_limit(datetime.now(UTC))
            if self._postgres.apply_retention(now):
                self._postgres.clock.note_complete_run(now)
                self._next_retention = time.monotonic() + self._config.retention_seconds


class BatchWaitMonitor(LeasedThread):
    """Checks every second whether a batch has been waiting in Postgres for some seconds, for example for a lock.

    Logs what the batch waits for, and stores the text in the row of the lease.

    Attributes:
        problem: what the batch waits for, as text for a person; None if no batch waits. Health probes read this text.
    """

    def __init__(self, batch_wait: BatchWait, lease: Lease) -> None:
        super().__init__("waits", lease)
        self._batch_wait = batch_wait
        self._stored_problem: str | None = None
        self._logged_at = 0.0
        self.problem: str | None = None

    def work(self) -> float:
        try:
            wait = self._batch_wait.find_problem()
            self._log(wait)
            self.problem = wait
            if wait != self._stored_problem:
                self._batch_wait.store_problem(self._lease.token, wait)
                self._stored_problem = wait
        except TidemarkError as problem:
            log.warning("Could not query or store what a batch waits for; trying again", problem=str(problem))
        return POLL_SECONDS

    def _log(self, wait: str | None) -> None:
        now = time.monotonic()
        if wait is not None and (wait != self.problem or now - self._logged_at >= LOG_INTERVAL_SECONDS):
            log.warning("Positions do not advance: a batch is waiting in Postgres", problem=wait)
            self._logged_at = now
        elif wait is None and self.problem is not None:
            log.info("No batch waits in Postgres any more")
