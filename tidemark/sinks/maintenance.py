"""The thread that looks after the sinks between batches: refills what they lost, and tidies Postgres's history.

Spark runs no batch while no data comes, so an idle system needs it. The thread ends with the lease.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import structlog

from tidemark.common.errors import LeaseLost, Stop, TidemarkError
from tidemark.sinks.leased_thread import LeasedThread
from tidemark.sinks.port import Sink
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.store import Postgres

log = structlog.get_logger(__name__)


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
