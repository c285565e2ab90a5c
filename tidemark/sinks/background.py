"""A thread that works beside the batches for as long as this pipeline holds the lease."""

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
from tidemark.sinks.postgres.batch_wait import BatchWait
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres

log = get_logger(__name__)

POLL = 1.0
LOG_EVERY = 30.0


class LeasedThread(ABC):
    """A context manager: runs `work` until it is left, the lease is lost, or something comes that `work` does not deal
    with itself.

    `failure` is that, or what `work` leaves there: for the thread that supervises.
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
        """Called again and again; gives the seconds until the next time."""

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._lease.check()
                self._closing.wait(self.work())
        except LeaseLost as error:
            self._lease.lose(error.now)
        except Exception as error:  # noqa: BLE001 - whoever supervises raises it
            self.failure = error


CLOCKS_DIFFER = 60.0
"""Seconds from which on it is logged, and the alert TidemarkClocksDiffer fires."""
AGAIN = 60.0  # seconds until a tidying that was not complete is tried again
SELDOM = 20  # times as long as a comparison took until the next: of very many streams it would take a core for itself


@dataclass(frozen=True, slots=True)
class MaintenanceConfig:
    """Seconds between questions whether a sink lost something, between comparisons of everything, and between
    tidyings."""

    poll: float = 1.0
    compare: float = 60.0
    tidy: float = 3600.0


class Maintenance(LeasedThread):
    """Problems are logged and tried again at the next poll; a `Stop` among them is the `failure`."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        postgres: Postgres,
        lease: Lease,
        config: MaintenanceConfig,
        clocks_differ: Callable[[float], object] = lambda _: None,
    ) -> None:
        """`clocks_differ` is given the seconds by which this host is ahead of Postgres, with each comparison."""
        super().__init__("maintenance", lease)
        self._clocks_differ = clocks_differ
        self._clock_at = -float("inf")
        self._is_clock_wrong = False
        self._sinks = sinks
        self._postgres = postgres
        self._config = config
        self._compare_at: dict[str, float] = {}
        self._tidy_at = -float("inf")
        self._problems: dict[str, str] = {}
        self._noted: dict[tuple[str, str], str] | None = None

    def work(self) -> float:
        for sink in self._sinks:
            self._try(sink.name, partial(self._mend, sink))
        self._try("the streams that are not shown", self._note_faults)
        self._try("Postgres's history", self._tidy)
        self._try("the clocks", self._compare_clocks)
        return self._config.poll

    def _try(self, what: str, step: Callable[[], None]) -> None:
        try:
            self._lease.check()
            step()
        except LeaseLost:
            raise
        except Stop as problem:
            self.failure = problem
        except TidemarkError as problem:
            if self._problems.get(what) != str(problem):  # once, not at every poll
                log.warning(f"Could not look after {what}; trying again", problem=str(problem))
            self._problems[what] = str(problem)
        else:
            if self._problems.pop(what, None):
                log.info(f"Looking after {what} again")

    def _mend(self, sink: Sink) -> None:
        began = time.monotonic()
        due = began >= self._compare_at.get(sink.name, -float("inf"))
        if sink.lost() or due:
            # Should the refill fail, the next poll must not find that nothing was lost since this one.
            self._compare_at.pop(sink.name, None)
            sink.refill()
            ended = time.monotonic()
            seldom = 0.0 if sink.faults() else SELDOM * (ended - began)  # it also tries those again
            self._compare_at[sink.name] = ended + max(self._config.compare, seldom)

    def _note_faults(self) -> None:
        faults = {(sink.name, stream): text for sink in self._sinks for stream, text in sink.faults().items()}
        if faults == self._noted:
            return
        for sink in self._sinks:
            new = [it for it in faults.keys() - (self._noted or {}).keys() if it[0] == sink.name]
            if new:
                log.error(
                    f"{sink.name} cannot show some streams, by a fault of their own; it tries them again and again",
                    streams=len(new),
                    first=new[0][1],
                    problem=faults[new[0]],
                )
        for sink_name, stream in (self._noted or {}).keys() - faults.keys():
            log.info("A stream is shown again", sink=sink_name, stream=stream)
        self._postgres.note_faults(faults)
        self._noted = faults

    def _compare_clocks(self) -> None:
        if time.monotonic() < self._clock_at:
            return
        difference = self._postgres.clock.difference()
        self._clock_at = time.monotonic() + self._config.compare
        self._clocks_differ(difference)
        was, self._is_clock_wrong = self._is_clock_wrong, abs(difference) > CLOCKS_DIFFER
        if self._is_clock_wrong and not was:
            log.warning(
                "The clocks of this host and of Postgres differ; set them (NTP): times in the history are this host's,"
                " and no more than a day of it is dropped at a time",
                seconds_ahead=round(difference),
            )
        elif was and not self._is_clock_wrong:
            log.info("The clocks of this host and of Postgres agree again")

    def _tidy(self) -> None:
        if time.monotonic() >= self._tidy_at:
            # Also should it fail: it may have waited for locks, and batches behind it.
            self._tidy_at = time.monotonic() + min(self._config.tidy, AGAIN)
            now = self._postgres.clock.now(datetime.now(UTC))
            if self._postgres.tidy(now):
                self._postgres.clock.complete(now)
                self._tidy_at = time.monotonic() + self._config.tidy


class WaitWatch(LeasedThread):
    """Asks every second what a batch waits for, logs it, and notes it beside the lease. `problem` is for the probes."""

    def __init__(self, waits: BatchWait, lease: Lease) -> None:
        super().__init__("waits", lease)
        self._waits = waits
        self._noted: str | None = None
        self._logged = 0.0
        self.problem: str | None = None

    def work(self) -> float:
        try:
            found = self._waits.problem()
            self._say(found)
            self.problem = found
            if found != self._noted:
                self._waits.note(self._lease.token, found)
                self._noted = found
        except TidemarkError as problem:
            log.warning("Could not ask what a batch waits for; trying again", problem=str(problem))
        return POLL

    def _say(self, found: str | None) -> None:
        now = time.monotonic()
        if found is not None and (found != self.problem or now - self._logged >= LOG_EVERY):
            log.warning("Positions are held", problem=found)
            self._logged = now
        elif found is None and self.problem is not None:
            log.info("The batch goes on")
