"""`tidemark simulate`: processes that write and read on real servers while faults are injected, and a verification.

The truth is what the writers have committed in their tables.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING

import click
import psycopg

from tidemark.app.logs import shutdown_event
from tidemark.app.settings import Settings
from tidemark.app.simulation import tables
from tidemark.app.simulation.fault_injector import FaultInjector
from tidemark.app.simulation.rooms import RoomsWorkload
from tidemark.app.simulation.script import OF_DATABASES, OF_SOURCES, SimulatedStream, fault_schedule
from tidemark.app.simulation.source_faults import SourceFaults
from tidemark.app.simulation.streams import StreamsVerification, StreamsWorkload
from tidemark.app.simulation.workload import (
    ReadCount,
    SimulationDatabases,
    SimulationPlan,
    Verification,
    Workload,
    table,
)
from tidemark.app.stack.home import Home
from tidemark.common.errors import Stop, TidemarkError, Unavailable
from tidemark.sinks.reader import Positions, PositionSnapshot
from tidemark.sources.topics import Topics

if TYPE_CHECKING:  # needs the extra of the local stack
    from tidemark.app.simulation.servers import Servers, ServicesPostgres

WORKLOADS = {"streams": StreamsWorkload, "rooms": RoomsWorkload}
TICK_SECONDS = 0.1
REPORT_SECONDS = 5.0
ENDING_SECONDS = 60.0  # seconds for faults that have begun
CATCH_UP_SECONDS = 300.0  # without progress; a pipeline that was killed takes a minute to come back on a busy machine


class StreamTaken(Stop):
    """Tidemark knows the stream, and the services' database does not know which IDs were given out."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"Tidemark knows the stream {stream} already, and the simulator has not written it:"
            " choose other streams with --prefix NAME"
        )
        self.stream = stream


class OverridesAccepted(TidemarkError):
    """Operator overrides with a NUL character were sent, and some are no dead letters."""

    def __init__(self, sent: int, rejected: int) -> None:
        super().__init__(f"of {sent} operator overrides with a NUL character only {rejected} are dead letters")
        self.sent = sent
        self.rejected = rejected


def run(settings: Settings, plan: SimulationPlan, workload_name: str, *, verify: bool) -> None:
    """Run to the end, or until SIGTERM or Ctrl-C; a second signal ends the process at once.

    Raises:
        TidemarkError: `verify`, and what was read differs from what was written (`EffectsDiffer`, `RoomsDiffer`,
            `LossUntold`).
        StreamTaken: Tidemark knows a stream, and the services' database does not.
        Stop: a topic is missing, or another simulation runs (`TopicMissing`, `AlreadyRunning`, `StartFailed`).
        Unavailable: a server is away.
    """
    with ExitStack() as stack:
        plan = replace(plan, faults=plan.faults & WORKLOADS[workload_name].faults)
        own = _services_server(settings, plan, stack)
        workload = WORKLOADS[workload_name](plan, verify=verify)
        databases = _prepare_databases(settings, workload, own.server.dsn() if own else settings.postgres())
        stopping = shutdown_event(again=signal.SIG_DFL)
        verification = stack.enter_context(workload.verification(databases, settings.postgres()))
        servers = stack.enter_context(closing(own.with_stack(settings, verification))) if own else None
        source_faults = _source_faults(settings, plan, databases, verification, stack)
        injector = stack.enter_context(_running(databases, workload, servers, source_faults))
        _await_begin(injector, verification, stopping)
        _run_faults(injector, plan, stopping, verification, verify=verify)
        if verify:
            _conclude(injector, verification)
            if source_faults:
                _require_rejected(settings.postgres(), source_faults.overrides)


def _prepare_databases(settings: Settings, workload: Workload, services: str) -> SimulationDatabases:
    """Create the missing databases, streams and tables; `services` is the DSN of the services' server."""
    Topics(settings.kafka).describe([settings.kafka_facts_topic])
    facts = tables.make_database(services, workload.database)
    effects = tables.make_database(settings.postgres(), workload.database)
    tables.prepare_writing(facts)
    _require_own(settings, facts, workload.streams)
    workload.make_tables(facts, effects)
    if not workload.plan.faults & OF_SOURCES:
        return SimulationDatabases(Home(settings.home), facts, effects, facts, facts)
    return SimulationDatabases(Home(settings.home), facts, effects, *tables.make_logins(facts, workload.streams))


def _require_own(settings: Settings, facts: str, streams: Sequence[SimulatedStream]) -> None:
    """Raise `StreamTaken` for a stream that Tidemark knows and the database at `facts` does not."""
    with Positions(settings.redis) as positions:
        for stream in tables.missing(facts, streams):
            # IDs that start again below known positions would look like a database set back (docs/design.md 3).
            if isinstance(positions.get(stream.name), PositionSnapshot):
                raise StreamTaken(stream.name)


@contextmanager
def _running(
    databases: SimulationDatabases, workload: Workload, servers: "Servers | None", source_faults: SourceFaults | None
) -> Iterator[FaultInjector]:
    """Run the processes while the block runs, and end all of them afterwards."""
    injector = FaultInjector(databases, workload, servers, source_faults)
    try:
        injector.start()
        yield injector
    finally:
        injector.kill_all()


def _services_server(settings: Settings, plan: SimulationPlan, stack: ExitStack) -> "ServicesPostgres | None":
    """A Postgres for the services alone, if faults are injected into their database."""
    if not plan.faults & OF_DATABASES:
        return None
    from tidemark.app.simulation.servers import ServicesPostgres  # noqa: PLC0415 - it comes with the local stack

    return stack.enter_context(ServicesPostgres(Home(settings.home)))


def _source_faults(
    settings: Settings,
    plan: SimulationPlan,
    databases: SimulationDatabases,
    verification: Verification,
    stack: ExitStack,
) -> SourceFaults | None:
    if not (plan.faults & OF_SOURCES and isinstance(verification, StreamsVerification)):
        return None
    writer_plan = plan.writer_plan
    faults = SourceFaults(settings, databases, writer_plan.stream_list(), writer_plan.writer_name(1), verification)
    return stack.enter_context(faults)


def _require_rejected(tidemark: str, overrides: int) -> None:
    """Raise `OverridesAccepted` if not all of the operator overrides with a NUL character are dead letters."""
    with psycopg.connect(tidemark) as connection:
        ((rejected,),) = connection.execute(
            "select coalesce(sum(records), 0) from tidemark.dead_letters where reason = 'bad_text'"
        ).fetchall()
    if rejected < overrides:
        raise OverridesAccepted(overrides, int(rejected))
    click.echo(f"operator overrides with a NUL character: {overrides}, dead letters of them: {rejected}")


def _await_begin(injector: FaultInjector, verification: Verification, stopping: Event) -> None:
    """Wait until every reader works: processes need their time on a busy machine."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    while not verification.has_begun() and time.monotonic() < deadline and not stopping.wait(TICK_SECONDS):
        injector.tick()


def _run_faults(
    injector: FaultInjector, plan: SimulationPlan, stopping: Event, verification: Verification, *, verify: bool
) -> None:
    """Inject the faults of the script, and print the counts of each reader meanwhile. Then end the services, and print
    which faults there were. Raises the verification's error as soon as `verify` and a count is not right.
    """
    for now in _until_over(injector, plan, stopping):
        try:
            counts = verification.counts()
        except Unavailable as problem:
            click.echo(f"{now:6.0f} s  {problem}")
            continue
        if counts:
            click.echo(f"{now:6.0f} s  {'; '.join(map(str, counts))}")
        if verify and not all(count.is_right for count in counts):
            raise verification.difference(counts)
    counted = ", ".join(f"{count} x {fault}" for fault, count in sorted(injector.done.items()))
    click.echo(f"the simulation is over; faults: {counted or 'none'}")
    injector.stop_services()


def _until_over(injector: FaultInjector, plan: SimulationPlan, stopping: Event) -> Iterator[float]:
    """Inject the faults until the end. Yields the seconds since the start whenever a report is due."""
    began, reported = time.monotonic(), 0.0
    planned_faults = fault_schedule(plan.seed, plan.faults, plan.seconds)
    planned = next(planned_faults, None)
    while not stopping.wait(TICK_SECONDS):
        now = time.monotonic() - began
        if now >= plan.seconds + (ENDING_SECONDS if injector.has_pending else 0.0):
            return
        while planned is not None and planned.at <= min(now, plan.seconds):
            injector.inject(planned)
            planned = next(planned_faults, None)
        injector.tick()
        if now // REPORT_SECONDS > reported // REPORT_SECONDS:
            yield now
        reported = now


def _conclude(injector: FaultInjector, verification: Verification) -> None:
    """Wait until the readers have read everything, and print their counts. Raises the verification's error."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    counts: Sequence[ReadCount] = []
    while not verification.is_complete(counts) and time.monotonic() < deadline:
        injector.tick()
        time.sleep(verification.seconds_between)
        with suppress(Unavailable):
            before, counts = counts, verification.counts()
            if counts != before:
                deadline = time.monotonic() + CATCH_UP_SECONDS
    counts = verification.final_counts()
    click.echo(table(counts, *verification.columns))
    if not verification.is_complete(counts):
        raise verification.difference(counts)
    verification.require_reported()
