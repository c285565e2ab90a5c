"""The local stack: its jars, its processes and their ports, the settings of programs that use the stack, and a
supervisor.

The jars of the local broker and of the demo are downloaded once, with the program Ivy, which pyspark contains. The
download needs neither Maven nor a Spark session. `ivy-broker.xml` and `ivy-demo.xml` in this folder pin the versions of
the jars.
"""

import fcntl
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import psutil

from tidemark.app.connections import Connections, variable
from tidemark.app.output import progress, shows_progress
from tidemark.app.settings import Settings, is_set, write_stack_env
from tidemark.app.stack.home import Home
from tidemark.app.stack.postgres import PostgresServer, libpq_variables, postgres_program
from tidemark.app.stack.processes import (
    CHAT_DATABASE,
    LOOPBACK,
    DemoProcess,
    DemoRelayProcess,
    KafkaServer,
    PaymentsProcess,
    PipelineProcess,
    RedisServer,
    RelayProcess,
    ServerProcess,
    SidecarProcess,
    end_process,
    free_port,
    port_problem,
    redis_program,
)
from tidemark.common.backoff import Backoff
from tidemark.common.errors import Stop

_STEP_PATTERN = re.compile(r"\tfound (\S+) in |downloading \S*/(\S+) \.\.\.")
# Ivy prints the reason of a failure at the end of a line with a URL, or as `:: module: not found`.
_FAILURE_PATTERN = re.compile(r"\((java\.[^()]+)\)$|:: (\S+#\S+: not found)")

MAX_ATTEMPTS = 5
STALL_SECONDS = 60.0
"""Ivy is restarted after this time without a received byte, because Ivy has no timeout for dead connections."""
STALLED = "the network sent no data"
_POLL_SECONDS = 0.2

BROKER = "kafka"
JDBC = "jdbc"


@dataclass(frozen=True, slots=True)
class JarList:
    """The jars that an Ivy file describes. Ivy first looks up the modules, then downloads the jars.

    Attributes:
        description: the Ivy file.
        configurations: the configurations in the Ivy file. Each configuration becomes a folder of jars.
        module_count: the number of modules, for the progress bar.
        jar_count: the number of jars, for the progress bar.
    """

    description: Traversable
    configurations: tuple[str, ...]
    module_count: int = 0
    jar_count: int = 0


BROKER_JARS = JarList(files("tidemark.app.stack") / "ivy-broker.xml", (BROKER,), module_count=48, jar_count=46)
DEMO_JARS = JarList(files("tidemark.app.stack") / "ivy-demo.xml", (JDBC,), module_count=1, jar_count=1)


class JarsUnavailable(Stop):
    def __init__(self, problem: str, log: Path) -> None:
        super().__init__(
            f"the jars could not be downloaded ({problem}): check the network and run the command again, which resumes"
            f" the download; the whole output is in {log}"
        )


def fetch_jars(
    directory: Path,
    java: str,
    say: Callable[[str], None],
    jar_list: JarList = BROKER_JARS,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Download the jars of `jar_list`, unless all of them are present.

    May be called again after an interruption. If another process downloads into `directory`, waits for this process.

    Args:
        directory: the directory in which each configuration of `jar_list` becomes a folder.
        java: the path of the Java program.
        say: called with a text for each attempt that stalled. Without a terminal, also called with the name of each
            module and jar.
        jar_list: the jars.
        environment: the environment of Ivy; None: the environment of this process.

    Raises:
        JarsUnavailable: the download failed.
    """
    if _is_complete(directory, jar_list):  # before the lock, because this user may have no right to write
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _download(directory, java, say, jar_list, environment)


def _download(
    directory: Path,
    java: str,
    say: Callable[[str], None],
    jar_list: JarList,
    environment: Mapping[str, str] | None,
) -> None:
    if _is_complete(directory, jar_list):
        return
    text = jar_list.description.read_bytes()
    description = directory / jar_list.description.name
    marker = _marker(directory, jar_list)
    marker.unlink(missing_ok=True)
    for stale in jar_list.configurations:
        shutil.rmtree(directory / stale, ignore_errors=True)
    description.write_bytes(text)
    _run_ivy(jar_list, description, java, say, environment)
    marker.write_text(hashlib.sha256(text).hexdigest())


def _is_complete(directory: Path, jar_list: JarList) -> bool:
    marker = _marker(directory, jar_list)
    digest = hashlib.sha256(jar_list.description.read_bytes()).hexdigest()
    return marker.exists() and marker.read_text() == digest


def _marker(directory: Path, jar_list: JarList) -> Path:
    """The path of a file that exists if all jars were downloaded. The file contains the hash of the Ivy file."""
    return (directory / jar_list.description.name).with_suffix(".sha256")


def _run_ivy(
    jar_list: JarList,
    description: Path,
    java: str,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None,
) -> None:
    directory = description.parent
    command = [java, "-jar", str(_find_ivy()), "-ivy", str(description), "-cache", str(directory / "cache")]
    command += ["-types", "jar", "bundle", "-retrieve", f"{directory}/[conf]/[artifact]-[revision].[ext]"]
    log = description.with_suffix(".log")
    problem: str | None = None
    for attempt in range(1, MAX_ATTEMPTS + 1):
        with log.open("w") as record:
            ivy = psutil.Popen(command, env=environment, stdout=record, stderr=subprocess.STDOUT)
        try:
            with _DownloadProgress(jar_list, say) as download:
                problem = _follow(ivy, log, directory / "cache", download)
        finally:
            end_process(ivy, signal.SIGKILL, seconds=10)
        if problem is None:
            return
        if problem != STALLED:
            break
        say(f"{description.stem}: {STALLED}, attempt {attempt} of {MAX_ATTEMPTS}")
    raise JarsUnavailable(str(problem), log)


class _DownloadProgress:
    """Shows the progress of Ivy: a bar for the modules that Ivy looks up, then a bar for the jars that Ivy downloads.
    Without a terminal, calls `say` with the name of each module and jar."""

    def __init__(self, jar_list: JarList, say: Callable[[str], None]) -> None:
        self._jar_list = jar_list
        self._say = say
        self._bar = ExitStack()
        self._advance: Callable[[int], None] | None = None
        self._is_downloading = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def add_module(self, module: str) -> None:
        self._report(module, "looking up modules", self._jar_list.module_count, "module")

    def add_jar(self, jar: str) -> None:
        if not self._is_downloading:
            self._bar.close()
            self._advance, self._is_downloading = None, True
        self._report(jar, "downloading jars", self._jar_list.jar_count, "jar")

    def _report(self, name: str, label: str, total: int, unit: str) -> None:
        if not shows_progress():
            self._say(name)
            return
        if self._advance is None:
            self._advance = self._bar.enter_context(progress(label, total, unit))
        self._advance(1)


def _follow(ivy: psutil.Popen, log: Path, cache: Path, download: _DownloadProgress) -> str | None:
    """Report the progress of a running Ivy until Ivy ends, or receives no data for `STALL_SECONDS`.

    Returns None if all jars were downloaded, `STALLED` if Ivy receives no data, otherwise the problem as text.
    """
    problem, rest = "no reason given", ""
    received, last = -1, time.monotonic()
    with log.open(errors="replace") as output:
        has_ended = False
        while not has_ended:
            has_ended = ivy.poll() is not None  # checked before the output is read, so that no output is missed
            *lines, rest = (rest + output.read()).split("\n")
            for line in lines:
                if (step := _STEP_PATTERN.match(line)) and step[1]:
                    download.add_module(step[1])
                elif step:
                    download.add_jar(step[2])
                elif failure := _FAILURE_PATTERN.search(line):
                    problem = failure[1] or failure[2]
            if not has_ended:
                size = log.stat().st_size + sum(file.stat().st_size for file in cache.rglob("*.part"))
                if size != received:
                    received, last = size, time.monotonic()
                elif time.monotonic() - last > STALL_SECONDS:
                    return STALLED
                time.sleep(_POLL_SECONDS)
    return None if ivy.returncode == 0 else problem


def _find_ivy() -> Path:
    """Find the jar of Ivy in pyspark. Does not import pyspark, because the import takes a second."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("jars/ivy-*.jar"))


LOCAL_CPU_SHARE = 0.15
"""The default of `TIDEMARK_BATCH_CPU_SHARE` in a local stack: low, because people work on the machine."""


class PortTaken(Stop):
    def __init__(self, server: str, port: int, problem: str) -> None:
        super().__init__(
            f"port {port} for {server} is not free ({problem}): end the program that uses the port,"
            f" or choose another port with TIDEMARK_UP_{server.upper()}_PORT (0 = any free port)"
        )
        self.port = port


class LocalStack:
    """Creates the processes of a stack, with consistent ports and settings. Starts no process. If a port in `settings`
    is 0, selects a free port."""

    def __init__(self, home: Home, settings: Settings, java: str) -> None:
        self.home = home
        self.kafka = KafkaServer(home, settings.up_kafka_port or free_port(), java=java, jars=home.jars / BROKER)
        self.postgres = PostgresServer(home, settings.up_postgres_port or free_port())
        self.redis = RedisServer(home, settings.up_redis_port or free_port())
        self._java = java
        self._metrics_port = settings.up_metrics_port or free_port()
        self._sidecar_port = settings.up_sidecar_port or free_port()
        self._lines_port = settings.up_lines_port or free_port()
        share = settings.batch_cpu_share if is_set("batch_cpu_share") else LOCAL_CPU_SHARE
        self._cpu_share = {variable("batch_cpu_share"): str(share)}

    @property
    def servers(self) -> list[ServerProcess]:
        return [self.kafka, self.postgres, self.redis]

    def pipeline(self) -> PipelineProcess:
        return PipelineProcess(self.home, self._metrics_port, {**self._process_variables(), **self._cpu_share})

    def sidecar(self, banner: str = "") -> SidecarProcess:
        variables = {"TIDEMARK_SIDECAR_BANNER": banner} if banner else {}
        return SidecarProcess(self.home, self._sidecar_port, {**self._process_variables(), **variables})

    def relay(self) -> RelayProcess:
        return RelayProcess(self.home, free_port(), self._process_variables())

    def demo_relay(self) -> DemoRelayProcess:
        """Create the relay of the streams of an earlier demo. Without a relay, their open IDs would stay open."""
        variables = {**self._process_variables(), "TIDEMARK_POSTGRES_DSN": self.postgres.dsn(CHAT_DATABASE)}
        return DemoRelayProcess(self.home, free_port(), variables)

    def demo(self) -> list[ServerProcess]:
        payments = PaymentsProcess(
            self.home, self.postgres.libpq_environment, java=self._java, jars=self.home.jars / JDBC
        )
        return [DemoProcess(self.home, 0, self._process_variables()), payments]

    def require_free_ports(self) -> None:
        """Raise `PortTaken` if a port of the stack is in use."""
        ports = {server.name: server.port for server in self.servers}
        ports |= {
            "metrics": self._metrics_port,
            "sidecar": self._sidecar_port,
            "lines": self._lines_port,
        }
        for name, port in ports.items():
            if problem := port_problem(port):
                raise PortTaken(name, port, problem)

    def variables(self) -> Mapping[str, str]:
        """The settings for programs that use the stack: name of the environment variable -> value."""
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
            "TIDEMARK_LINES_LISTEN": f"{LOOPBACK}:{self._lines_port}",
            "TIDEMARK_SIDECAR_CERTIFICATE_FILE": "",
            "TIDEMARK_SIDECAR_KEY_FILE": "",
            "TIDEMARK_SIDECAR_CA_FILE": "",
            "TIDEMARK_SIDECAR_URL": f"http://{LOOPBACK}:{self._sidecar_port}",
            "TIDEMARK_CHECKPOINT": str(self.home.data("pipeline") / "checkpoint"),
        }

    def _process_variables(self) -> Mapping[str, str]:
        """The settings of a process of the stack: name of the environment variable -> value. A setting with an address
        or a password that the stack does not set is empty, which overrides the value in the user's shell."""
        return {**dict.fromkeys(_server_variables(), ""), **self.variables()}

    def write_stack_env(self) -> Path:
        """Write `stack.env`, which a shell can source. Returns the path of the file. Only the owner may read the file,
        because it contains the password of Postgres.
        """
        path = self.home.stack_env
        variables = {**self.variables(), **self.postgres.libpq_environment}
        other_names = [
            *libpq_variables(),
            *(f"{name}{suffix}" for name in _server_variables() for suffix in ("", "_FILE")),
        ]
        programs = [Path(sys.executable), Path(postgres_program("psql")), Path(redis_program("redis-cli"))]
        write_stack_env(
            path, variables, [name for name in other_names if name not in variables], [path.parent for path in programs]
        )
        return path


def _server_variables() -> list[str]:
    """The names of the environment variables with addresses, passwords and certificates of servers."""
    excluded = {"kafka_create_topics", "kafka_partitions", "otlp_url", "synapse_dsn", "synapse_redis_url"}
    names = [name for name in Connections.__struct_fields__ if name not in excluded and not name.endswith("_topic")]
    return [*map(variable, names), variable("checkpoint_store")]


MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0  # before a restart
HEALTHY_SECONDS = 60.0
"""If a process has run for longer than this, the back-off starts again with the shortest pause."""


@dataclass
class _SupervisedServer:
    """The state of one server in a `Supervisor`. Times are seconds of the supervisor's clock.

    Attributes:
        restart_at: when to restart the server; None: no restart is planned.
        is_restarting: whether the server was restarted, and has not answered since.
    """

    server: ServerProcess
    backoff: Backoff = field(default_factory=lambda: Backoff(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS))
    restart_at: float | None = None
    started_at: float = 0.0
    is_restarting: bool = False


@dataclass
class Supervisor:
    """Restarts processes that have ended, with back-off. Calls `say` with a text when a process has ended, and when a
    restarted process answers.

    One thread must call `tick` about twice a second. `tick` does not wait until a server is up.
    """

    servers: Sequence[ServerProcess]
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _supervised: list[_SupervisedServer] = field(init=False)

    def __post_init__(self) -> None:
        self._supervised = [_SupervisedServer(server, started_at=self.now()) for server in self.servers]

    def tick(self) -> None:
        """Start the processes whose pause is over, and report what has changed since the last call."""
        for process in self._supervised:
            if process.server.running:
                self._report_answer(process)
            elif process.restart_at is None:
                self._schedule_restart(process)
            elif self.now() >= process.restart_at:
                self._restart(process)

    def _schedule_restart(self, process: _SupervisedServer) -> None:
        if self.now() - process.started_at > HEALTHY_SECONDS:
            process.backoff.reset()
        pause = process.backoff.next()
        process.restart_at = self.now() + pause
        server = process.server
        cause = server.failure_cause()
        self.say(f"{server.name} ended with code {server.returncode}; restarting it in {pause:.0f} s ({cause})")

    def _restart(self, process: _SupervisedServer) -> None:
        process.server.spawn()
        process.restart_at = None
        process.started_at = self.now()
        process.is_restarting = True

    def _report_answer(self, process: _SupervisedServer) -> None:
        if process.is_restarting and process.server.answers():
            process.is_restarting = False
            self.say(f"{process.server.name} is back after {self.now() - process.started_at:.0f} s")
