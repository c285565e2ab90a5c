"""The local stack: its processes, their ports, the settings to connect to them, and their supervisor.

The jars of the local broker and of the demo are fetched once with the Ivy of pyspark. That needs neither Maven nor a
Spark session. `ivy-broker.xml` and `ivy-demo.xml` in this folder pin every version.
"""

import fcntl
import hashlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

import psutil

from tidemark.app.connections import Connections, variable
from tidemark.app.settings import Settings, write_stack_env
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer, libpq_variables
from tidemark.app.stack.processes import (
    LOOPBACK,
    DemoProcess,
    KafkaServer,
    PaymentsProcess,
    PipelineProcess,
    RedisServer,
    RelayProcess,
    ServerProcess,
    SidecarProcess,
    end,
    free_port,
    obstacle,
)
from tidemark.common.backoff import Backoff
from tidemark.common.errors import Stop

_STEP = re.compile(r"\tfound (\S+) in |downloading \S*/(\S+) \.\.\.")
# Ivy prints the reason at the end of a line about an address, or as `:: module: not found`.
_FAILURE = re.compile(r"\((java\.[^()]+)\)$|:: (\S+#\S+: not found)")

ATTEMPTS = 5
SILENT_SECONDS = 60.0
"""Ivy waits without a limit for a connection that has died. After so long without a byte it is started again."""
SILENT = "nothing came from the network"
_POLL_SECONDS = 0.2

BROKER = "kafka"
JDBC = "jdbc"


@dataclass(frozen=True, slots=True)
class JarList:
    """A description for Ivy, and its configurations, each of which is a directory of jars."""

    description: Traversable
    configurations: tuple[str, ...]


SERVERS = JarList(files("tidemark.app.stack") / "ivy-broker.xml", (BROKER,))
DEMO = JarList(files("tidemark.app.stack") / "ivy-demo.xml", (JDBC,))


class JarsUnavailable(Stop):
    def __init__(self, problem: str, log: Path) -> None:
        super().__init__(
            f"the jars could not be fetched ({problem}): check the network and try again, which continues the download;"
            f" the whole output is in {log}"
        )


def fetch_jars(
    directory: Path,
    java: str,
    progress: Callable[[str], None],
    wanted: JarList = SERVERS,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Fetch the jars of `wanted` into directories below `directory`, unless they are there.

    May be repeated after any interruption. A second process waits for the first.

    Args:
        progress: called with the name of each jar, a few times a second.
        environment: of Ivy; None inherits the environment of this process.

    Raises:
        JarsUnavailable: the jars could not be fetched.
    """
    if _is_filled(directory, wanted):  # possibly by another user
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _fill(directory, java, progress, wanted, environment)


def _fill(
    directory: Path,
    java: str,
    progress: Callable[[str], None],
    wanted: JarList,
    environment: Mapping[str, str] | None,
) -> None:
    if _is_filled(directory, wanted):
        return
    text = wanted.description.read_bytes()
    description = directory / wanted.description.name
    marker = _marker(directory, wanted)
    marker.unlink(missing_ok=True)
    for stale in wanted.configurations:
        shutil.rmtree(directory / stale, ignore_errors=True)
    description.write_bytes(text)
    _retrieve(description, java, progress, environment)
    marker.write_text(hashlib.sha256(text).hexdigest())


def _is_filled(directory: Path, wanted: JarList) -> bool:
    marker = _marker(directory, wanted)
    hashed = hashlib.sha256(wanted.description.read_bytes()).hexdigest()
    return marker.exists() and marker.read_text() == hashed


def _marker(directory: Path, wanted: JarList) -> Path:
    """The file with the hash of the description, which exists once the directories of `wanted` are complete."""
    return (directory / wanted.description.name).with_suffix(".sha256")


def _retrieve(
    description: Path, java: str, progress: Callable[[str], None], environment: Mapping[str, str] | None
) -> None:
    directory = description.parent
    command = [java, "-jar", str(_ivy()), "-ivy", str(description), "-cache", str(directory / "cache")]
    command += ["-types", "jar", "bundle", "-retrieve", f"{directory}/[conf]/[artifact]-[revision].[ext]"]
    log = description.with_suffix(".log")
    problem: str | None = None
    for attempt in range(1, ATTEMPTS + 1):
        with log.open("w") as record:
            ivy = psutil.Popen(command, env=environment, stdout=record, stderr=subprocess.STDOUT)
        try:
            problem = _follow(ivy, log, directory / "cache", progress)
        finally:
            end(ivy, signal.SIGKILL, seconds=10)
        if problem is None:
            return
        if problem != SILENT:
            break
        progress(f"{description.stem}: {SILENT}, attempt {attempt} of {ATTEMPTS}")
    raise JarsUnavailable(str(problem), log)


def _follow(ivy: psutil.Popen, log: Path, cache: Path, progress: Callable[[str], None]) -> str | None:
    """Report the steps of a running Ivy. Returns None if it has fetched everything, and what went wrong otherwise."""
    problem, rest = "no reason given", ""
    received, last = -1, time.monotonic()
    with log.open(errors="replace") as output:
        ended = False
        while not ended:
            ended = ivy.poll() is not None  # before the rest of the output is read
            *lines, rest = (rest + output.read()).split("\n")
            for line in lines:
                if step := _STEP.match(line):
                    progress(step[1] or step[2])
                elif failure := _FAILURE.search(line):
                    problem = failure[1] or failure[2]
            if not ended:
                size = log.stat().st_size + sum(file.stat().st_size for file in cache.rglob("*.part"))
                if size != received:
                    received, last = size, time.monotonic()
                elif time.monotonic() - last > SILENT_SECONDS:
                    return SILENT
                time.sleep(_POLL_SECONDS)
    return None if ivy.returncode == 0 else problem


def _ivy() -> Path:
    """The jar of Ivy. pyspark is not imported, because that takes a second."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("jars/ivy-*.jar"))


PIPELINE_SHARE = 0.15
"""`TIDEMARK_BATCH_CPU_SHARE` of a local stack, unless the user sets one: people work on the machine."""


class PortTaken(Stop):
    def __init__(self, server: str, port: int, problem: str) -> None:
        super().__init__(
            f"port {port} for {server} is not free ({problem}): end the program that has it,"
            f" or choose another with TIDEMARK_UP_{server.upper()}_PORT (0 = any free one)"
        )
        self.port = port


class LocalStack:
    """The processes of a stack, not started. A port of 0 in `settings` is replaced by a free port."""

    def __init__(self, home: Home, settings: Settings, java: str) -> None:
        self.home = home
        self.kafka = KafkaServer(home, settings.up_kafka_port or free_port(), java=java, jars=home.jars / BROKER)
        self.postgres = PostgresServer(home, settings.up_postgres_port or free_port())
        self.redis = RedisServer(home, settings.up_redis_port or free_port())
        self._java = java
        self._metrics_port = settings.up_metrics_port or free_port()
        self._sidecar_port = settings.up_sidecar_port or free_port()
        self._sidecar_tcp_port = settings.up_lines_port or free_port()
        own = "batch_cpu_share" in settings.model_fields_set
        share = settings.batch_cpu_share if own else PIPELINE_SHARE
        self._share = {variable("batch_cpu_share"): str(share)}

    @property
    def servers(self) -> list[ServerProcess]:
        return [self.kafka, self.postgres, self.redis]

    def pipeline(self) -> PipelineProcess:
        return PipelineProcess(self.home, self._metrics_port, {**self._own(), **self._share})

    def sidecar(self, note: str = "") -> SidecarProcess:
        banner = {"TIDEMARK_SIDECAR_BANNER": note} if note else {}
        return SidecarProcess(self.home, self._sidecar_port, {**self._own(), **banner})

    def relay(self) -> RelayProcess:
        return RelayProcess(self.home, free_port(), self._own())

    def demo(self) -> list[ServerProcess]:
        payments = PaymentsProcess(self.home, self.postgres.libpq, java=self._java, jars=self.home.jars / JDBC)
        return [DemoProcess(self.home, 0, self._own()), payments]

    def require_free_ports(self) -> None:
        """Raises `PortTaken`."""
        ports = {server.name: server.port for server in self.servers}
        ports |= {
            "metrics": self._metrics_port,
            "sidecar": self._sidecar_port,
            "lines_listen": self._sidecar_tcp_port,
        }
        for name, port in ports.items():
            if problem := obstacle(port):
                raise PortTaken(name, port, problem)

    def variables(self) -> Mapping[str, str]:
        """The settings of the stack, by variable."""
        return {
            "TIDEMARK_HOME": str(self.home.root),
            "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            "TIDEMARK_KAFKA_SECURITY_PROTOCOL": "PLAINTEXT",
            "TIDEMARK_KAFKA_CREATE_TOPICS": "true",
            "TIDEMARK_POSTGRES_DSN": self.postgres.dsn(),
            "TIDEMARK_REDIS_URL": self.redis.url,
            "TIDEMARK_METRICS_HOST": LOOPBACK,
            "TIDEMARK_METRICS_PORT": str(self._metrics_port),
            "TIDEMARK_METRICS_URL": f"http://{LOOPBACK}:{self._metrics_port}/metrics",
            "TIDEMARK_SIDECAR_HOST": LOOPBACK,
            "TIDEMARK_SIDECAR_PORT": str(self._sidecar_port),
            "TIDEMARK_LINES_LISTEN": f"{LOOPBACK}:{self._sidecar_tcp_port}",
            "TIDEMARK_SIDECAR_CERTIFICATE_FILE": "",
            "TIDEMARK_SIDECAR_KEY_FILE": "",
            "TIDEMARK_SIDECAR_CA_FILE": "",
            "TIDEMARK_SIDECAR_URL": f"http://{LOOPBACK}:{self._sidecar_port}",
            "TIDEMARK_CHECKPOINT": str(self.home.data("pipeline") / "checkpoint"),
        }

    def _own(self) -> Mapping[str, str]:
        """The settings of a process of the stack. Settings of other servers are empty."""
        return {**dict.fromkeys(_server_variables(), ""), **self.variables()}

    def write_stack_env(self) -> Path:
        """Write a file for a shell to source. Only its owner may read it: it contains the password of Postgres."""
        path = self.home.stack_env
        variables = {**self.variables(), **self.postgres.libpq}
        elsewhere = [*libpq_variables(), *(f"{name}{end}" for name in _server_variables() for end in ("", "_FILE"))]
        write_stack_env(path, variables, [name for name in elsewhere if name not in variables])
        return path


def _server_variables() -> list[str]:
    """Variables of settings of servers: addresses, passwords and certificates."""
    excluded = {"kafka_create_topics", "kafka_partitions", "otlp_url", "synapse_dsn", "synapse_redis_url"}
    names = [name for name in Connections.model_fields if name not in excluded and not name.endswith("_topic")]
    return [*map(variable, names), variable("checkpoint_store")]


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
STEADY = 60.0
"""Seconds after which a process counts as healthy again, so that its next pause is short."""


@dataclass
class _Supervised:
    server: ServerProcess
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE))
    due: float | None = None
    started: float = 0.0
    awaited: bool = False


@dataclass
class Supervisor:
    """Restarts processes that have ended, with back-off, and prints a line about it.

    `tick` is called about twice a second by one thread; it never waits for a server to answer.
    """

    servers: Sequence[ServerProcess]
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _supervised: list[_Supervised] = field(init=False)

    def __post_init__(self) -> None:
        self._supervised = [_Supervised(server, started=self.now()) for server in self.servers]

    def tick(self) -> None:
        for watch in self._supervised:
            if watch.server.running:
                self._report_answer(watch)
            elif watch.due is None:
                self._schedule_restart(watch)
            elif self.now() >= watch.due:
                self._restart(watch)

    def _schedule_restart(self, watch: _Supervised) -> None:
        if self.now() - watch.started > STEADY:
            watch.backoff.reset()
        pause = watch.backoff.next()
        watch.due = self.now() + pause
        server = watch.server
        self.say(
            f"{server.name} ended with code {server.returncode}; starting it again in {pause:.0f} s"
            f" ({server.failure()})"
        )

    def _restart(self, watch: _Supervised) -> None:
        watch.server.spawn()
        watch.due = None
        watch.started = self.now()
        watch.awaited = True

    def _report_answer(self, watch: _Supervised) -> None:
        if watch.awaited and watch.server.answers():
            watch.awaited = False
            self.say(f"{watch.server.name} is back after {self.now() - watch.started:.0f} s")
