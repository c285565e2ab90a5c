"""`tidemark simulate`: processes that write and read on real servers, whatever befalls them, held against the truth.

The truth is what the writers have committed in their tables. See `sources.simulator` and `app.simulation`.
"""

import signal
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import click

from tidemark.app.settings import Settings
from tidemark.app.simulation.company import Company, Stage
from tidemark.app.simulation.director import Director
from tidemark.app.simulation.verification import Count, EffectsDiffer, Verification
from tidemark.app.stack.home import Home
from tidemark.sinks.reader import Positions, Standing
from tidemark.sources.simulator import tables
from tidemark.sources.simulator.script import Fault, Players, script
from tidemark.sources.topics import Topics
from tidemark.streaming.errors import Stop

TICK_SECONDS = 0.1
REPORT_SECONDS = 5.0
CATCH_UP_SECONDS = 120.0  # a pipeline that was killed takes half a minute to come back on a busy machine


class StreamTaken(Stop):
    """Tidemark knows the stream, and the play's database does not know which IDs were given out."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"Tidemark knows the stream {stream} already, and the simulator has not written it:"
            " choose other streams with --prefix NAME"
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
    facts; `StreamTaken`, `TopicMissing`, `NotFenced`, `Unavailable`.
    """
    stage = _stage(settings, play.cast)
    stopping = _stop_on_signals()
    with Verification(stage.dsn, play.cast.stream_names()) as verification, _directed(stage, play) as director:
        for now in _until_over(director, play, stopping):
            counts = verification.counts()
            click.echo(f"{now:6.0f} s  {'; '.join(map(str, counts))}")
            if verify and not all(count.right for count in counts):
                raise EffectsDiffer(counts)
        befell = ", ".join(f"{count} x {fault}" for fault, count in sorted(director.done.items()))
        click.echo(f"the play is over; it had {befell or 'no incidents'}")
        director.silence()
        if verify:
            _conclude(director, verification)


def _stage(settings: Settings, cast: Players) -> Stage:
    """Everything that the play needs, made where it is missing."""
    Topics(settings.kafka).describe([settings.kafka_facts_topic])
    dsn = tables.make_database(settings.postgres())
    streams = cast.stream_list()
    with Positions(settings.redis) as positions:
        for stream in tables.missing(dsn, streams):
            # A sequence that starts anew below known positions would look like a database set back (docs/design.md 3).
            if isinstance(positions.get(stream.name), Standing):
                raise StreamTaken(stream.name)
    tables.make(dsn, streams)
    return Stage(Home(settings.home), dsn, settings.kafka, settings.kafka_facts_topic)


@contextmanager
def _directed(stage: Stage, play: Play) -> Iterator[Director]:
    director = Director(Company(stage, play.cast, play.faults, play.seed))
    try:
        director.open()
        yield director
    finally:
        director.abandon()


def _until_over(director: Director, play: Play, stopping: Event) -> Iterator[float]:
    """Let everything happen; gives the play's time (s) whenever a report is due."""
    began, reported = time.monotonic(), 0.0
    acts = script(play.seed, play.faults, play.seconds)
    act = next(acts, None)
    while (now := time.monotonic() - began) < play.seconds and not stopping.wait(TICK_SECONDS):
        while act is not None and act.at <= now:
            director.befall(act)
            act = next(acts, None)
        director.tick()
        if now // REPORT_SECONDS > reported // REPORT_SECONDS:
            yield now
        reported = now


def _conclude(director: Director, verification: Verification) -> None:
    """Wait until the readers have read everything; print how each did. Raises `EffectsDiffer`."""
    deadline = time.monotonic() + CATCH_UP_SECONDS
    counts = verification.counts()
    while not all(count.complete for count in counts) and time.monotonic() < deadline:
        director.tick()
        time.sleep(TICK_SECONDS)
        counts = verification.counts()
    click.echo(table(counts))
    if not all(count.complete for count in counts):
        raise EffectsDiffer(counts)


def table(counts: Sequence[Count]) -> str:
    """For people: a line for each reader."""
    lines = [f"{'READER':8}{'WRITTEN':>10}{'READ':>10}{'MISSED':>8}{'DOUBLED':>9}{'OUT OF ORDER':>14}"]
    lines += [f"{it.reader:8}{it.written:10}{it.read:10}{it.missed:8}{it.doubled:9}{it.disordered:14}" for it in counts]
    return "\n".join(lines)


def _stop_on_signals() -> Event:
    stopping = Event()

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopping
