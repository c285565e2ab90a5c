"""`tidemark simulate`: processes that write and read on real servers, whatever befalls them, held against the truth.

The truth is what the writers have committed in their tables.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

from tidemark.app.settings import Settings
from tidemark.app.signals import told_to_end
from tidemark.app.simulation import tables
from tidemark.app.simulation.fault_injector import Director
from tidemark.app.simulation.processes import Company, Stage
from tidemark.app.simulation.script import OF_DATABASES, Fault, PlayedStream, Players, script
from tidemark.app.simulation.verification import Count, EffectsDiffer, Verification, table
from tidemark.app.stack.home import Home
from tidemark.common.errors import Stop, TidemarkError, Unavailable
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.reader import Positions, Standing
from tidemark.sources.topics import Topics
from tidemark.streaming.core.codec import decode

if TYPE_CHECKING:  # it needs what comes with the local stack
    from tidemark.app.simulation.servers import Servers, ServicesPostgres


class Judged(Protocol):
    """How one reader does, in a line."""

    @property
    def right(self) -> bool: ...


C = TypeVar("C", bound=Judged)

TICK_SECONDS = 0.1
REPORT_SECONDS = 5.0
ENDING_SECONDS = 60.0  # for what has begun
CATCH_UP_SECONDS = 120.0  # a pipeline that was killed takes half a minute to come back on a busy machine


class StreamTaken(Stop):
    """Tidemark knows the stream, and the play's database does not know which IDs were given out."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"Tidemark knows the stream {stream} already, and the simulator has not written it:"
            " choose other streams with --prefix NAME"
        )
        self.stream = stream


class LossUntold(TidemarkError):
    """A database went back, readers had read facts that are no more, and nothing tells of it."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"facts of {stream} were read and then lost with their database, and their IDs were given out again:"
            " there is neither a late completion nor a new timeline"
        )
        self.stream = stream


@dataclass(frozen=True, slots=True)
class Play:
    """What is played, and for how long; `math.inf` seconds: until somebody stops it."""

    cast: Players
    faults: Set[Fault]
    seed: int
    seconds: float


def run(settings: Settings, play: Play, *, verify: bool) -> None:
    """Play to the end, or until SIGTERM or Ctrl-C; a second one of these ends the process at once.

    Raises `EffectsDiffer` where `verify` finds, in the end or meanwhile, that a reader missed, doubled or disordered
    facts, and `LossUntold` where nobody was told that some were lost; `StreamTaken`, `TopicMissing`, `AlreadyRunning`,
    `StartFailed`, `Unavailable`.
    """
    with ExitStack() as stack:
        own = services_server(settings, play, stack)
        stage = _stage(settings, play.cast, own.server.dsn() if own else settings.postgres())
        stopping = told_to_end(again=signal.SIG_DFL)
        before = timelines(settings.postgres()) if own else {}
        verification = stack.enter_context(Verification(stage.facts, stage.effects, play.cast.stream_list()))
        servers = stack.enter_context(closing(own.with_stack(settings, verification))) if own else None
        company = Company(stage, play.cast, play.faults, play.seed)
        director = stack.enter_context(directed(company, servers))
        play_through(director, play, stopping, verification.counts, EffectsDiffer if verify else None)
        if verify:
            _conclude(director, verification)
            if own:
                _require_told(verification.lost, verification.late, before, timelines(settings.postgres()))


def _stage(settings: Settings, cast: Players, services: str) -> Stage:
    """Everything that the play needs, made where it is missing; `services` is the DSN of their server."""
    Topics(settings.kafka).describe([settings.kafka_facts_topic])
    facts, effects = tables.make_database(services), tables.make_database(settings.postgres())
    tables.prepare_writing(facts)
    streams = cast.stream_list()
    require_own(settings, facts, streams)
    tables.make_facts(facts, streams)
    tables.make_effects(effects)
    return Stage(Home(settings.home), facts, effects)


def require_own(settings: Settings, facts: str, streams: Sequence[PlayedStream]) -> None:
    """Raise `StreamTaken` for a stream that Tidemark knows and the database at `facts` does not."""
    with Positions(settings.redis) as positions:
        for stream in tables.missing(facts, streams):
            # IDs that begin anew below known positions would look like a database set back (docs/design.md 3).
            if isinstance(positions.get(stream.name), Standing):
                raise StreamTaken(stream.name)


def timelines(dsn: str) -> dict[str, int]:
    """The number of each stream's timeline, as Tidemark's Postgres has it."""
    with Postgres(PostgresConfig(lambda: dsn)) as postgres:
        return {stream: decode(data).timeline for stream, data in postgres.states().items()}


@contextmanager
def directed(company: Company, servers: "Servers | None") -> Iterator[Director]:
    """The company at play, and in the end no process of it."""
    director = Director(company, servers)
    try:
        director.open()
        yield director
    finally:
        director.abandon()


def services_server(settings: Settings, play: Play, stack: ExitStack) -> "ServicesPostgres | None":
    """One for the services alone, where faults befall their databases."""
    if not play.faults & OF_DATABASES:
        return None
    from tidemark.app.simulation.servers import ServicesPostgres  # noqa: PLC0415 - it comes with the local stack

    return stack.enter_context(ServicesPostgres(Home(settings.home)))


def play_through(
    director: Director,
    play: Play,
    stopping: Event,
    counts: Callable[[], Sequence[C]],
    differ: Callable[[Sequence[C]], Exception] | None,
) -> None:
    """Let everything happen, and tell how each reader does meanwhile. Then the services are ended, and it is said what
    befell whom. Raises what `differ` makes of counts of which one is not right.
    """
    for now in _until_over(director, play, stopping):
        try:
            found = counts()
        except Unavailable as problem:
            click.echo(f"{now:6.0f} s  {problem}")
            continue
        if found:
            click.echo(f"{now:6.0f} s  {'; '.join(map(str, found))}")
        if differ is not None and not all(count.right for count in found):
            raise differ(found)
    befell = ", ".join(f"{count} x {fault}" for fault, count in sorted(director.done.items()))
    click.echo(f"the play is over; it had {befell or 'no incidents'}")
    director.silence()


def _until_over(director: Director, play: Play, stopping: Event) -> Iterator[float]:
    """Let everything happen, to its end; gives the play's time (s) whenever a report is due."""
    began, reported = time.monotonic(), 0.0
    acts = script(play.seed, play.faults, play.seconds)
    act = next(acts, None)
    while not stopping.wait(TICK_SECONDS):
        now = time.monotonic() - began
        if now >= play.seconds + (ENDING_SECONDS if director.owes else 0.0):
            return
        while act is not None and act.at <= min(now, play.seconds):
            director.befall(act)
            act = next(acts, None)
        director.tick()
        if now // REPORT_SECONDS > reported // REPORT_SECONDS:
            yield now
        reported = now


def _conclude(director: Director, verification: Verification) -> None:
    """Wait until the readers have read everything; print how each did. Raises `EffectsDiffer`."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    counts: list[Count] = []
    while not (counts and all(count.complete for count in counts)) and time.monotonic() < deadline:
        director.tick()
        time.sleep(TICK_SECONDS)
        with suppress(Unavailable):
            counts = verification.counts()
    counts = verification.counts(final=True)
    click.echo(table(counts, "LATE", "AGAIN", "LOST"))
    if not all(count.complete for count in counts):
        raise EffectsDiffer(counts)


def _require_told(lost: Set[str], late: Set[str], before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise `LossUntold` for the first stream that gave out again what readers had read, and nobody was told."""
    for stream in sorted(lost - late):
        if after.get(stream, 1) == before.get(stream, 1):
            raise LossUntold(stream)
