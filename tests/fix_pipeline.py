"""Real pipeline processes on the real servers, each test in a site of its own: topics, database, Redis and home.

What a process does is seen as an operator sees it: by its log, its metrics, its exit code, and by what stands in
Postgres, Redis and Kafka. A process dies for real.
"""

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import psutil
import psycopg
import pytest
import redis
from psycopg import sql

from app.stack.kafka import Kafka
from app.stack.postgres import Postgres
from app.stack.redis import Redis
from app.stack.server import LOOPBACK, Server, free_port
from sinks.migrations import migrate
from sources.kafka import KafkaConnection
from sources.producer import RecordProducer
from sources.topics import Topics, plans
from streaming.errors import Unavailable
from streaming.wire import Record, encode
from tests.play.cast import Cast
from tests.play.published import RedisReader, differences
from tests.play.simulation import Simulation
from tests.play.stream import SimulatedStream

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
PARTITIONS = 4
PATIENCE = 90.0  # seconds; what takes this long on a busy machine will not come

_OURS = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[(debug|info|warning|error) *\] |Error: ")
_numbers = itertools.count(1)


def eventually(found: Callable[[], T | None], what: Callable[[], str], seconds: float = PATIENCE) -> T:
    """The first true answer of `found`, asked ten times a second; fails with `what` was waited for, and how it is."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what()}")
        time.sleep(0.1)
    return answer


@dataclass
class Running:
    """A pipeline process. Its children (the JVM and Spark's Python workers) are its own business, but for `leave`."""

    process: psutil.Popen
    log_file: Path
    metrics_port: int
    _family: set[psutil.Process] = field(default_factory=set)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text()

    def says(self, text: str, seconds: float = PATIENCE, times: int = 1) -> str:
        """Wait until `text` stands in so many lines of the log; gives the last of them."""

        def found() -> str | None:
            lines = [line for line in self.log().splitlines() if text in line]
            assert len(lines) >= times or self.process.poll() is None, (
                f"it ended and never said {text!r}:\n{self.log()}"
            )
            return lines[-1] if len(lines) >= times else None

        return eventually(found, lambda: f"{text!r} in the log:\n{self.log()}", seconds)

    def metric(self, name: str) -> float | None:
        """A metric without labels; None while nothing is served."""
        try:
            with urlopen(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=2) as response:
                page: str = response.read().decode()
        except OSError:
            return None
        return next((float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} ")), None)

    def ready(self) -> "Running":
        """Wait until it reads and publishes."""

        def found() -> bool:
            assert self.process.poll() is None, f"it ended with code {self.process.returncode}:\n{self.log()}"
            self._look_after()
            return self.metric("tidemark_pipeline_ready") == 1.0

        eventually(found, lambda: f"ready; its log:\n{self.log()}")
        return self

    def ends(self, seconds: float = PATIENCE) -> int:
        """Wait for the end of the process; its exit code, negative for a signal."""

        def found() -> bool:
            self._look_after()
            return self.process.poll() is not None

        eventually(found, lambda: f"the end of the process; its log:\n{self.log()}", seconds)
        return int(self.process.returncode)

    def terminate(self) -> None:
        """SIGTERM; it must end with code 0 within the ten seconds that an orchestrator gives."""
        self.process.terminate()
        assert self.ends(10.0) == 0, self.log()

    def kill(self) -> None:
        """SIGKILL to the driver alone, as the kernel does when memory runs out: its JVM has to notice by itself."""
        self._look_after()
        self.process.kill()
        self.process.wait()

    def stopped(self) -> bool:
        """Whether SIGSTOP holds the driver."""
        return bool(self.process.status() == psutil.STATUS_STOPPED)

    def alone(self) -> bool:
        """Whether none of its children is left."""
        return not any(self._alive())

    def leave(self) -> None:
        """End whatever is left of it."""
        self._look_after()
        for process in (self.process, *self._alive()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _look_after(self) -> None:
        if self.process.poll() is None:
            self._family.update(self.process.children(recursive=True))

    def _alive(self) -> Iterator[psutil.Process]:
        return (
            process for process in self._family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        )


@dataclass(frozen=True)
class Ended:
    """What a process left that ended by itself; `lines` are its output but for log lines below a warning."""

    code: int
    lines: Sequence[str]


@dataclass(frozen=True)
class Site:
    """One test's world. `variables` are the settings of its pipelines."""

    postgres: Postgres
    database: str
    home: Path
    variables: Mapping[str, str]
    _started: list[Running] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.variables["TIDEMARK_POSTGRES_DSN"]

    @property
    def redis_url(self) -> str:
        return self.variables["TIDEMARK_REDIS_URL"]

    @property
    def kafka(self) -> KafkaConnection:
        return KafkaConnection(self.variables["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"])

    @property
    def facts(self) -> str:
        return self.variables["TIDEMARK_KAFKA_FACTS_TOPIC"]

    @property
    def control(self) -> str:
        return self.variables["TIDEMARK_KAFKA_CONTROL_TOPIC"]

    @property
    def dead_letters(self) -> str:
        return self.variables["TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC"]

    @property
    def checkpoint(self) -> Path:
        return Path(self.variables["TIDEMARK_CHECKPOINT"])

    def start(self, *arguments: str, module: Sequence[str] = ("app.cli",), **changed: object) -> Running:
        """Start `python -m MODULE pipeline ARGUMENTS`; `changed` replaces settings (`shards=8`)."""
        port = free_port()
        settings = {f"TIDEMARK_{name.upper()}": str(value) for name, value in changed.items()}
        clean = {name: text for name, text in os.environ.items() if not name.startswith("TIDEMARK_")}
        # The JVM's second compiler takes more than it gives in a life of seconds.
        clean["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        log_file = self.home / f"pipeline-{len(self._started) + 1}.log"
        with log_file.open("wb") as log:
            process = psutil.Popen(
                [sys.executable, "-m", *module, "pipeline", *arguments],
                stdin=-3,  # /dev/null
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**clean, **self.variables, "TIDEMARK_METRICS_PORT": str(port), **settings},
                start_new_session=True,
            )
        running = Running(process, log_file, port)
        self._started.append(running)
        return running

    def refused(self, *arguments: str, **changed: object) -> Ended:
        """Start a pipeline that is to end by itself before it reads anything."""
        running = self.start(*arguments, module=("app.cli",), **{"log_level": "error", **changed})
        return Ended(running.ends(30.0), running.log().splitlines())

    @property
    def latest(self) -> Running:
        """The process that was started last."""
        return self._started[-1]

    def leave(self) -> None:
        """End all that was started. Fails where a log holds anything but lines of ours: a person is to read it."""
        for running in self._started:
            running.leave()
        strange = [line for running in self._started for line in running.log().splitlines() if not _OURS.match(line)]
        assert not strange, "\n".join(strange[:20])

    def sql(self, query: sql.SQL | str, *parameters: object) -> list[tuple[object, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(sql.SQL(query) if isinstance(query, str) else query, parameters)
            return cursor.fetchall() if cursor.description else []

    def snapshot(self) -> str:
        """A copy of the database, for `restore`; no process may be using it."""
        copy = f"{self.database}_copy{next(_numbers)}"
        self._administer("CREATE DATABASE {} TEMPLATE {}", copy, self.database)
        return copy

    def restore(self, copy: str) -> None:
        """The database as it was at `snapshot`, as from a backup."""
        self._administer("DROP DATABASE {} WITH (FORCE)", self.database)
        self._administer("ALTER DATABASE {} RENAME TO {}", copy, self.database)

    def _administer(self, statement: str, *names: str) -> None:
        with psycopg.connect(self.postgres.dsn("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def make_topics(self, partitions: int = PARTITIONS) -> None:
        Topics(self.kafka).create_missing(plans(self.facts, self.control, self.dead_letters, partitions))

    def send(self, *records: Record) -> None:
        """Send facts; they are in Kafka when this returns."""
        producer = RecordProducer(self.kafka, self.facts, give_up_after=30.0)
        for record in records:
            producer.send(record.stream, encode(record))
        assert producer.flush(30.0) == 0

    def positions(self, stream: str) -> dict[str, int | None]:
        """What a reader of Redis finds: the writers' positions and `linear`."""
        return RedisReader(self.redis_url).read([stream])[stream].line_and_positions()

    def reaches(self, stream: str, seconds: float = PATIENCE, /, **wanted: int) -> None:
        """Wait until Redis has at least the `wanted` positions."""

        def found() -> bool:
            seen = self.positions(stream)
            return all(seen.get(name) == position for name, position in wanted.items())

        eventually(
            found, lambda: f"{stream} at {wanted}, it is at {self.positions(stream)}\n{self._last_log()}", seconds
        )

    def lacks(self, play: "Play") -> list[str]:
        """Where Redis differs from the truth of the play."""
        with play.truth() as streams:
            try:
                return differences(streams, RedisReader(self.redis_url).read(stream.name for stream in streams))
            except Unavailable as problem:
                return [str(problem)]

    def shows(self, play: "Play") -> None:
        """Wait until Redis has exactly the truth of the play."""
        eventually(lambda: not self.lacks(play), lambda: f"Redis has the truth: {self.lacks(play)}\n{self._last_log()}")

    def _last_log(self) -> str:
        return self.latest.log() if self._started else ""


class Play:
    """A simulation whose records go to a site's topic as fast as Kafka takes them; time is the play's own.

    One thread plays; `truth` may be asked by any.
    """

    def __init__(self, site: Site, seed: int, cast: Cast) -> None:
        self.sent = 0
        self._simulation = Simulation(seed, cast)
        self._producer = RecordProducer(site.kafka, site.facts, give_up_after=PATIENCE)
        self._lock = threading.Lock()

    def until(self, now: float) -> None:
        """Play up to `now`; all is in Kafka when this returns."""
        with self._lock:
            records = self._simulation.step(now)
        self._send(records)

    def end(self) -> None:
        """Let everything complete, so that no position is held back."""
        with self._lock:
            records = self._simulation.drain()
        self._send(records)

    @contextmanager
    def truth(self) -> Iterator[list[SimulatedStream]]:
        """The streams, which do not move on meanwhile."""
        with self._lock:
            yield self._simulation.streams()

    def _send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._producer.send(record.stream, encode(record))
        self.sent += len(records)
        assert self._producer.flush(PATIENCE) == 0


@contextmanager
def away(server: Server) -> Iterator[None]:
    """The server is stopped meanwhile, and answers again at the end."""
    server.stop()
    try:
        yield
    finally:
        server.start()


@contextmanager
def deaf(server: Server) -> Iterator[None]:
    """The server's port takes connections and nobody answers them: what a dead disk or a firewall looks like."""
    parent = psutil.Process(server.pid)
    family = [parent, *parent.children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


@contextmanager
def made_site(kafka: Kafka, postgres: Postgres, server: Redis, jars: Path, home: Path) -> Iterator[Site]:
    number = next(_numbers)
    name = f"site{number}"
    url = server.url.replace("/0", f"/{number % 15 + 1}")
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    site = Site(
        postgres,
        name,
        home,
        {
            "TIDEMARK_HOME": str(home),
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "TIDEMARK_KAFKA_FACTS_TOPIC": f"{name}.facts",
            "TIDEMARK_KAFKA_CONTROL_TOPIC": f"{name}.control",
            "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": f"{name}.dead-letters",
            "TIDEMARK_POSTGRES_DSN": postgres.dsn(name),
            "TIDEMARK_REDIS_URL": url,
            "TIDEMARK_CHECKPOINT": str(home / "checkpoint"),
            "TIDEMARK_SPARK_JARS": str(jars),
            "TIDEMARK_SPARK_DRIVER_MEMORY": "512m",
            "TIDEMARK_LOG_LEVEL": "debug",
        },
    )
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    migrate(site.dsn)
    site.make_topics()
    try:
        yield site
    finally:
        site.leave()


@pytest.fixture
def site(kafka: Kafka, postgres: Postgres, redis_server: Redis, connector_jars: Path, tmp_path: Path) -> Iterator[Site]:
    """A site that only this test uses, with its topics and a migrated database; no pipeline runs."""
    with made_site(kafka, postgres, redis_server, connector_jars, tmp_path) as made:
        yield made
