"""`tidemark simulate`: processes write and read on real servers while faults are injected. A verification compares what
the readers received with what the writers committed in their tables."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from threading import Event

import click
import psycopg

from tidemark.app.logs import shutdown_event
from tidemark.app.settings import Settings
from tidemark.app.simulation.fault_injector import (
    QUICK_STOP_SECONDS,
    STOP_SECONDS,
    FaultInjector,
    Servers,
    ServicesPostgres,
)
from tidemark.app.simulation.rooms import RoomsWorkload
from tidemark.app.simulation.script import DATABASE_FAULTS, SOURCE_FAULTS, SimulatedStream, fault_schedule
from tidemark.app.simulation.source_faults import SourceFaults
from tidemark.app.simulation.streams import StreamsVerification, StreamsWorkload
from tidemark.app.simulation.workload import (
    ReadCount,
    SimulationDatabases,
    SimulationPlan,
    Verification,
    Workload,
    find_missing_streams,
    format_table,
    make_database,
    make_logins,
    prepare_writing,
)
from tidemark.app.stack.home import Home
from tidemark.common.errors import Stop, TidemarkError, Unavailable
from tidemark.sinks.reader import Positions, PositionSnapshot
from tidemark.sources.topics import Topics

WORKLOADS = {"streams": StreamsWorkload, "rooms": RoomsWorkload}
TICK_SECONDS = 0.1
REPORT_INTERVAL_SECONDS = 5.0
MAX_REPORT_SHARE = 0.05  # maximum share of the time for reports; no process is restarted during a report
FINISH_FAULTS_SECONDS = 60.0  # at the end, for faults that have begun
NO_PROGRESS_SECONDS = 300.0  # until the verification fails; on a busy machine, a pipeline restarts within a minute


class StreamTaken(Stop):
    """Tidemark has positions of a stream that the services' database lacks. A new stream with this name would give out
    the same IDs again."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"Tidemark already has positions of the stream {stream}, but the simulation's database does not have this"
            " stream. Choose other stream names with --prefix NAME"
        )
        self.stream = stream


class OverridesAccepted(TidemarkError):
    """Fewer records were rejected with the reason `bad_text` than operator overrides with a NUL character were sent."""

    def __init__(self, sent_count: int, rejected_count: int) -> None:
        super().__init__(
            f"{sent_count} operator overrides with a NUL character were sent, but Tidemark has only {rejected_count}"
            " dead letters with the reason bad_text"
        )
        self.sent_count = sent_count
        self.rejected_count = rejected_count


def run(settings: Settings, plan: SimulationPlan, workload_name: str, *, verify: bool) -> None:
    """Run a simulation to its end, or until SIGTERM or Ctrl-C. Then, with `verify`, wait until the readers have read
    everything, and verify the effects. A second signal ends the process at once.

    Raises:
        TidemarkError: with `verify`, what was read differs from what was written (`EffectsDiffer`, `RoomsDiffer`,
            `LossUnreported`), or a bad operator override was not rejected (`OverridesAccepted`).
        StreamTaken: Tidemark has positions of a stream that the services' database lacks.
        TopicMissing: the facts topic does not exist.
        AlreadyRunning: another simulation runs the services' Postgres.
        StartFailed: the services' Postgres did not start.
        Unavailable: a server does not answer.
    """
    with ExitStack() as stack:
        plan = replace(plan, faults=plan.faults & WORKLOADS[workload_name].faults)
        services_postgres = _start_services_postgres(settings, plan, stack)
        workload = WORKLOADS[workload_name](plan, verify=verify)
        databases = _prepare_databases(
            settings, workload, services_postgres.server.dsn() if services_postgres else settings.postgres()
        )
        stopping = shutdown_event(repeat_handler=signal.SIG_DFL)
        verification = stack.enter_context(workload.make_verification(databases, settings.postgres()))
        servers = (
            stack.enter_context(closing(services_postgres.make_servers(settings, verification)))
            if services_postgres
            else None
        )
        source_faults = _make_source_faults(settings, plan, databases, verification, stack)
        injector = stack.enter_context(_run_processes(databases, workload, servers, source_faults))
        _wait_for_first_reads(injector, verification, stopping)
        _run_faults(injector, plan, stopping, verification, verify=verify)
        if verify:
            _verify_all_read(injector, verification)
            if source_faults:
                _require_rejected(settings.postgres(), source_faults.sent_override_count)


def _prepare_databases(settings: Settings, workload: Workload, services_dsn: str) -> SimulationDatabases:
    """Create the missing databases, streams and tables, and the logins that source faults need.

    Raises `TopicMissing`, `StreamTaken` and `Unavailable`. `services_dsn`: the DSN of the services' Postgres.
    """
    Topics(settings.kafka).describe([settings.kafka_facts_topic])
    facts_dsn = make_database(services_dsn, workload.database_suffix)
    effects_dsn = make_database(settings.postgres(), workload.database_suffix)
    prepare_writing(facts_dsn)
    _require_unknown_streams(settings, facts_dsn, workload.streams)
    workload.make_tables(facts_dsn, effects_dsn)
    logins = (
        make_logins(facts_dsn, workload.streams) if workload.plan.faults & SOURCE_FAULTS else (facts_dsn, facts_dsn)
    )
    return SimulationDatabases(Home(settings.home), facts_dsn, effects_dsn, *logins)


def _require_unknown_streams(settings: Settings, facts_dsn: str, streams: Sequence[SimulatedStream]) -> None:
    """Raise `StreamTaken` if Tidemark has positions of a stream that the services' database lacks."""
    with Positions(settings.redis) as positions:
        for stream in find_missing_streams(facts_dsn, streams):
            # IDs that start again below known positions would look like a database set back (docs/design.md 3).
            if isinstance(positions.get(stream.name), PositionSnapshot):
                raise StreamTaken(stream.name)


@contextmanager
def _run_processes(
    databases: SimulationDatabases, workload: Workload, servers: Servers | None, source_faults: SourceFaults | None
) -> Iterator[FaultInjector]:
    """Start all processes of the simulation, run the block, and then end all processes."""
    injector = FaultInjector(databases, workload, servers, source_faults)
    try:
        injector.start()
        yield injector
    finally:
        injector.kill_all()


def _start_services_postgres(settings: Settings, plan: SimulationPlan, stack: ExitStack) -> ServicesPostgres | None:
    """Start a Postgres that only the services use, if the plan has `DATABASE_FAULTS`; otherwise return None.

    `stack` stops this server.
    """
    if not plan.faults & DATABASE_FAULTS:
        return None
    return stack.enter_context(ServicesPostgres(Home(settings.home)))


def _make_source_faults(
    settings: Settings,
    plan: SimulationPlan,
    databases: SimulationDatabases,
    verification: Verification,
    stack: ExitStack,
) -> SourceFaults | None:
    if not (plan.faults & SOURCE_FAULTS and isinstance(verification, StreamsVerification)):
        return None
    writer_plan = plan.writer_plan
    faults = SourceFaults(settings, databases, writer_plan.stream_list(), writer_plan.writer_name(1), verification)
    return stack.enter_context(faults)


def _require_rejected(tidemark_dsn: str, sent_overrides: int) -> None:
    """Print the number of dead letters with the reason `bad_text`. Raises `OverridesAccepted` if there are fewer than
    `sent_overrides`, the number of sent operator overrides with a NUL character."""
    with psycopg.connect(tidemark_dsn) as connection:
        ((rejected,),) = connection.execute(
            "select coalesce(sum(records), 0) from tidemark.dead_letters where reason = 'bad_text'"
        ).fetchall()
    if rejected < sent_overrides:
        raise OverridesAccepted(sent_overrides, int(rejected))
    click.echo(
        f"operator overrides with a NUL character: {sent_overrides}, dead letters with reason bad_text: {rejected}"
    )


def _wait_for_first_reads(injector: FaultInjector, verification: Verification, stopping: Event) -> None:
    """Wait until every reader has read something, because processes start slowly on a busy machine.

    Returns without an error after `NO_PROGRESS_SECONDS`, or when `stopping` is set.
    """
    deadline = time.monotonic() + NO_PROGRESS_SECONDS
    while not verification.has_begun() and time.monotonic() < deadline and not stopping.wait(TICK_SECONDS):
        injector.tick()


def _run_faults(
    injector: FaultInjector, plan: SimulationPlan, stopping: Event, verification: Verification, *, verify: bool
) -> None:
    """Inject the faults of the schedule, and print the counts of each reader from time to time.

    At the end of the simulation or when `stopping` is set, prints the number of injected faults, and stops the
    services. With `verify`, raises the error of the verification as soon as a count is wrong.
    """
    for now in _inject_faults(injector, plan, stopping):
        try:
            counts = verification.counts()
        except Unavailable as problem:
            click.echo(f"{now:6.0f} s  {problem}")
            continue
        if counts:
            click.echo(f"{now:6.0f} s  {'; '.join(map(str, counts))}")
        if verify and not all(count.is_correct for count in counts):
            raise verification.error_for(counts)
    counted = ", ".join(f"{count} x {fault}" for fault, count in sorted(injector.injected_counts.items()))
    click.echo(f"the simulation is over; faults: {counted or 'none'}")
    injector.stop_services(STOP_SECONDS if verify else QUICK_STOP_SECONDS)


def _inject_faults(injector: FaultInjector, plan: SimulationPlan, stopping: Event) -> Iterator[float]:
    """Inject the faults of the schedule. Whenever a report is due, yield the seconds since the start.

    Ends when `stopping` is set, or `plan.seconds` after the start. Faults that have begun then get up to
    `FINISH_FAULTS_SECONDS` more.
    """
    began, report_at = time.monotonic(), REPORT_INTERVAL_SECONDS
    planned_faults = fault_schedule(plan.seed, plan.faults, plan.seconds)
    planned = next(planned_faults, None)
    while not stopping.wait(TICK_SECONDS):
        now = time.monotonic() - began
        if now >= plan.seconds + (FINISH_FAULTS_SECONDS if injector.has_pending else 0.0):
            return
        while planned is not None and planned.due_seconds <= min(now, plan.seconds):
            injector.inject(planned)
            planned = next(planned_faults, None)
        injector.tick()
        if now >= report_at:
            yield now
            report_seconds = time.monotonic() - began - now
            next_interval = (now // REPORT_INTERVAL_SECONDS + 1) * REPORT_INTERVAL_SECONDS
            report_at = max(next_interval, now + report_seconds / MAX_REPORT_SHARE)


def _verify_all_read(injector: FaultInjector, verification: Verification) -> None:
    """Wait until the readers have read everything, or the counts have not changed for `NO_PROGRESS_SECONDS`. Then print
    the counts.

    Raises the error of the verification if the counts are wrong or incomplete, or a loss of facts was not reported.
    """
    deadline = time.monotonic() + NO_PROGRESS_SECONDS
    counts: Sequence[ReadCount] = []
    comparison_seconds = 0.0
    while not verification.is_complete(counts) and time.monotonic() < deadline:
        injector.tick()
        # At least as long as the last comparison took: a comparison delays the remedies of `SourceFaults`.
        time.sleep(max(verification.comparison_interval_seconds, comparison_seconds))
        began = time.monotonic()
        with suppress(Unavailable):
            before, counts = counts, verification.counts()
            comparison_seconds = time.monotonic() - began
            if counts != before:
                deadline = time.monotonic() + NO_PROGRESS_SECONDS
    counts = verification.final_counts()
    click.echo(format_table(counts, *verification.columns))
    if not verification.is_complete(counts):
        raise verification.error_for(counts)
    verification.require_loss_reported()
