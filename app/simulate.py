"""`tidemark simulate`: a play of many writers on a real Kafka, and its truth held against what Redis says.

One thread. The play's clock stands still while Kafka does not take records, and never jumps: an outage makes no burst.
"""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import click
import structlog

from app.settings import Settings
from app.verification import NOTHING_SEEN, RedisReader, Verifier
from sources.kafka import KafkaConnection
from sources.producer import FOR_EVER, RecordProducer
from sources.simulator.cast import Cast
from sources.simulator.ledger import Ledger, opened
from sources.simulator.simulation import Simulation
from sources.topics import Topics
from streaming import wire
from streaming.errors import Stop, Unavailable

log = structlog.get_logger(__name__)

TICK_SECONDS = 0.02
LONGEST_STEP_SECONDS = 0.5
BACKLOG = 10_000  # records without acknowledgement, past which the play stands still
REPORT_SECONDS = 5.0
FLUSH_SECONDS = 5.0  # so long may a stop take while Kafka is away
CATCH_UP_SECONDS = 60.0
SHOWN = 5  # streams, and holders, in a line of the report


class StreamTaken(Stop):
    """Tidemark knows the stream, and the ledger does not know where its sequence stands."""

    def __init__(self, stream: str, ledger: Path) -> None:
        super().__init__(
            f"Tidemark knows the stream {stream} already, but {ledger} does not say where its sequence stands:"
            " choose other streams with --prefix NAME"
        )
        self.stream = stream


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a play takes place."""

    kafka: KafkaConnection
    topic: str
    redis_url: str
    ledger: Path


@dataclass(frozen=True, slots=True)
class Script:
    """What is played, and for how long; `math.inf` seconds: until somebody stops it."""

    cast: Cast
    seed: int
    seconds: float


Watch = Callable[[Simulation, float], None]
"""Called now and then with the play and its time."""


def run(settings: Settings, script: Script, *, verify: bool) -> None:
    """Play to the script's end, or until SIGTERM or Ctrl-C; a second one of these ends the process at once.

    Raises `PositionsDiffer` where `verify` finds Redis beyond the truth meanwhile, or not at it in the end.
    """
    prefix = script.cast.prefix
    name = f"simulator-{prefix}.json" if prefix else "simulator.json"
    stage = Stage(
        settings.kafka, settings.kafka_facts_topic, settings.redis_url.get_secret_value(), settings.home / name
    )
    verifier = Verifier(RedisReader(stage.redis_url))

    def watch(simulation: Simulation, now: float) -> None:
        click.echo(report(simulation, now))
        if verify:
            verifier.sample(simulation.streams())

    simulation = play(stage, script, _stop_on_signals(), watch)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(simulation.sent().items()))
    click.echo(f"the play is over: {counts}")
    if verify:
        verifier.conclude(simulation.streams(), CATCH_UP_SECONDS)
        click.echo("verified: Redis has every position and every linear position as they truly are")


def play(stage: Stage, script: Script, stopping: Event, watch: Watch) -> Simulation:
    """Play, then drain, so that nothing stays open. All is in Kafka when this returns; any thread may set `stopping`.

    Raises `TopicMissing`, `StreamTaken`, `LedgerInUse`, and `Unavailable` where Kafka is away at the end.
    """
    Topics(stage.kafka).describe([stage.topic])
    with opened(stage.ledger) as ledger:
        _require_free(script.cast.stream_names(), ledger, stage)
        simulation = Simulation(script.seed, script.cast, ledger.past())
        producer = RecordProducer(stage.kafka, stage.topic, give_up_after=FOR_EVER)

        def send(records: Iterable[wire.Record]) -> None:
            ledger.cover(simulation.marks())
            for record in records:
                producer.send(record.stream, wire.encode(record))

        watched = 0.0
        for now in _clock(producer, script.seconds, stopping):
            send(simulation.step(now))
            if now // REPORT_SECONDS > watched // REPORT_SECONDS:
                watch(simulation, now)
            watched = now
        send(simulation.drain())
        if left := producer.flush(FLUSH_SECONDS):
            raise Unavailable("Kafka", stage.kafka.bootstrap, f"{left} records were not acknowledged")
        ledger.close(simulation.marks())
    return simulation


def _require_free(names: Sequence[str], ledger: Ledger, stage: Stage) -> None:
    """A sequence that starts anew below known positions would look like a database set back (DESIGN 3)."""
    unknown = [name for name in names if name not in ledger.past()]
    if unknown:
        seen = RedisReader(stage.redis_url).read(unknown)
        if taken := next((name for name in unknown if seen[name] != NOTHING_SEEN), None):
            raise StreamTaken(taken, stage.ledger)


def _clock(producer: RecordProducer, seconds: float, stopping: Event) -> Iterator[float]:
    """The play's time at each tick: real time, but for pauses of this machine and while Kafka takes no records."""
    now, before, standing = 0.0, time.monotonic(), False
    while now < seconds and not stopping.wait(TICK_SECONDS):
        instant = time.monotonic()
        elapsed, before = instant - before, instant
        if producer.backlog() > BACKLOG:
            if not standing:
                log.warning("Kafka takes no records: the play stands still", backlog=producer.backlog())
            standing = True
        else:
            standing = False
            now += min(elapsed, LONGEST_STEP_SECONDS)
            yield now


def report(simulation: Simulation, now: float) -> str:
    """One line for people: how far the streams are, and what holds them back."""
    streams = simulation.streams()
    lines = [f"{stream.name} {stream.linear()}" for stream in streams[:SHOWN]]
    if len(streams) > SHOWN:
        lines.append(f"and {len(streams) - SHOWN} more")
    holds = [
        f"{held.stream}: {held.writer} holds {held.id} for {held.until - held.since:.0f} s"
        for held in simulation.held()
    ] + [f"{writer.stream.name}: {writer.name} has crashed" for writer in simulation.down()]
    return f"{now:6.0f} s  {', '.join(lines)}" + (f"  |  {'; '.join(holds[:SHOWN])}" if holds else "")


def _stop_on_signals() -> Event:
    stopping = Event()

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return stopping
